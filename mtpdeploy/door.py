"""What both doors do with a verb: check its options, run it, print the answer or the error, and choose the exit code.

Answers go to stdout, talk to stderr. Nothing heavy is imported until a verb runs.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import inspect
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mtpdeploy.actions.verbs import COMMON, Option, Verb
from mtpdeploy.errors import MtpError, UsageError
from mtpdeploy.resources import find_home
from mtpdeploy.secret import Secret

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
BROKEN_PIPE = 141  # 128 + SIGPIPE, as a shell reports it


class _NoAnswer(Exception):
    """Stdout does not take the answer, such as a file on a full disk."""


def perform(verb: Verb, given: Mapping[str, object]) -> int:
    """Run `verb` with the options as a door parsed them, print what comes of it, return the exit code."""
    _usable_streams()
    as_json = bool(given.get("json"))
    try:
        with _signals_unwind():
            return _run(verb, given, as_json)
    except MtpError as error:
        tell_error(error, as_json=as_json, no_color=bool(given.get("no_color")))
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted; the next `mtpdeploy status` tells how things stand", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        silence_stdout()
        return BROKEN_PIPE
    except _NoAnswer as error:
        silence_stdout()
        tell_error(MtpError(f"standard output: {error}"), as_json=False, no_color=bool(given.get("no_color")))
        return MtpError.exit_code
    except OSError as error:
        told = _of_this_machine(error) or _unexpected(error, verb)
        tell_error(told, as_json=as_json, no_color=bool(given.get("no_color")))
        return told.exit_code
    except Exception as error:  # a bug of ours: the user gets one line, the traceback goes to a file
        tell_error(_unexpected(error, verb), as_json=as_json, no_color=bool(given.get("no_color")))
        return 1


def _run(verb: Verb, given: Mapping[str, object], as_json: bool) -> int:
    options = checked(verb, given)
    common = {option.name: options.pop(option.name) for option in COMMON}
    no_color = bool(common["no_color"])
    home = find_home(common["home"])
    if home.exists() and not home.is_dir():
        raise UsageError(f"--home: {home} is not a folder")
    action = _load(verb.action)

    from mtpdeploy.report.live import Bars, live

    with live(quiet=bool(common["quiet"]), no_color=no_color) as talk:
        if verb.streams:
            # On one terminal the bars would be torn by lines that they do not know of.
            options["out"] = talk.above if isinstance(talk, Bars) and sys.stdout.isatty() else _write_line
            if "json" in inspect.signature(action).parameters:
                options["json"] = as_json
            if "colour" in inspect.signature(action).parameters:
                plain = no_color or "NO_COLOR" in os.environ or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
                options["colour"] = sys.stdout.isatty() and not plain
        answer = action(home=home, talk=talk, **options)
    if answer is not None:
        with _answering():
            if as_json:
                sys.stdout.write(as_document(answer.as_json()) + "\n")
            else:
                _load(verb.text)(answer, answer_console(no_color))
            sys.stdout.flush()
    return int(getattr(answer, "exit_code", 0))


def checked(verb: Verb, given: Mapping[str, object]) -> dict[str, Any]:
    """The options with their types and choices enforced. Fabric's door hands over strings; Click's come typed and pass unchanged.

    Raises UsageError, which names the option.
    """
    options: dict[str, Any] = {}
    for option in (*verb.options, *COMMON):
        value = given.get(option.name)
        if option.multiple:
            options[option.name] = tuple(_typed(option, each) for each in _several(value))
        elif value is None:
            options[option.name] = option.default
        else:
            options[option.name] = _typed(option, value)
    for argument in verb.arguments:
        value = given.get(argument.name)
        if argument.multiple:
            options[argument.name] = _several(value)
        else:
            options[argument.name] = value
        if argument.required and not options[argument.name]:
            raise UsageError(f"{verb.name}: {argument.name.upper()} is missing: {argument.help}")
    return options


def _several(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else ()


def _typed(option: Option, value: object) -> object:
    if option.type is bool:
        return bool(value)
    try:
        typed = option.type(value)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}.get(option.type, option.type.__name__)
        raise UsageError(f"{option.flag}: should be {kind}, not {value!r}") from None
    if isinstance(typed, float) and not math.isfinite(typed):
        raise UsageError(f"{option.flag}: should be a number, not {value!r}")
    if option.choices and typed not in option.choices:
        raise UsageError(f"{option.flag}: should be one of {', '.join(option.choices)}, not {value!r}")
    return typed


def as_document(value: object) -> str:
    """JSON text. What JSON cannot hold is made plain: NaN and infinities are unknown, hence null; a secret is its mask."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def _plain(value: object) -> object:
    match value:
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case tuple() | list() | set() | frozenset():
            return [_plain(each) for each in value]
        case Secret() | Path():
            return str(value)
    return value


def tell_error(error: MtpError, *, as_json: bool, no_color: bool = False) -> None:
    """The error for a person on stderr, or for a program as JSON on stdout."""
    if as_json:
        with contextlib.suppress(BrokenPipeError):
            _write_line(as_document(error.as_json()))
        return
    from mtpdeploy.report.console import console
    from mtpdeploy.report.errors import text

    text(error, console(sys.stderr, no_color))


def answer_console(no_color: bool = False) -> Console:
    """Where text renderers print: stdout."""
    from mtpdeploy.report.console import console

    return console(sys.stdout, no_color)


def _write_line(line: str) -> None:
    with _answering():
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _NoAnswer(error.strerror) from error


def _load(where: str) -> Callable[..., Any]:
    module, _, function = where.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def _usable_streams() -> None:
    """A log or a name may hold what the terminal's encoding lacks: it is shown escaped. A closed stream (`>&-`) takes anything."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open until the process ends, as the stream would be)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def silence_stdout() -> None:
    """After a broken pipe or a full disk: keep the interpreter from complaining when it flushes stdout at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like an exception, so that tunnels, locks and rehearsal servers are put away."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    try:
        before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    except ValueError:  # not the main thread: the embedding program owns the signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _of_this_machine(error: OSError) -> MtpError | None:
    """A folder that may not be written, a full disk: the user's to mend, and no fault of ours."""
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):  # a temporary file, which has no name
        return MtpError(f"no room for a file: {error.strerror}", next_commands=("df -h",))
    if error.filename is None or error.errno is None:
        return None
    message = f"{error.filename}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MtpError(message, next_commands=(f"df -h {shlex.quote(str(Path(error.filename).parent))}",))
    wrong_place = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
    return UsageError(message) if error.errno in wrong_place else None


def _unexpected(error: Exception, verb: Verb) -> MtpError:
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile(
        "w", prefix="mtpdeploy-traceback-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write(f"mtpdeploy {verb.name}\n")
        file.write("".join(traceback.format_exception(error)))
    return MtpError(
        f"unexpected {type(error).__name__}: {error}\n"
        f"This is a fault in mtpdeploy, not in your input. The traceback is in {file.name}; please file it with the command that you typed."
    )
