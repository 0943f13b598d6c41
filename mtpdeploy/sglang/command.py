"""Command lines: canonical arguments → the argv of one SGLang version, and any SGLang command → canonical arguments."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mtpdeploy.errors import PlanRefused, UsageError
from mtpdeploy.inventory.values import ArgValue
from mtpdeploy.secret import Secret
from mtpdeploy.sglang import flags
from mtpdeploy.sglang.flags import Flag, HelpFlags
from mtpdeploy.sglang.versions import Version

ENTRY = ("-m", "sglang.launch_server")  # works in every release; `sglang serve` needs the console script on PATH
_FIRST = ("model_path", "served_model_name", "host", "port")


@dataclass(frozen=True, slots=True)
class Command:
    """argv is ready for exec; it never holds a secret. notes say what was translated or left out, and why."""

    argv: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a command line asks for. args by canonical name with typed values; env as assigned before the command.

    secrets: api_key and the like, taken out of args.
    python:  the interpreter that was named, None with `sglang serve`.
    """

    args: Mapping[str, ArgValue]
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    python: str | None = None
    notes: tuple[str, ...] = ()


def build(
    args: Mapping[str, ArgValue],
    version: Version,
    *,
    python: str = "python3",
    help_flags: HelpFlags | None = None,
) -> Command:
    """The argv for this version: full spellings, one order, each value as one word. Secrets are refused: they go into a file.

    Raises PlanRefused with every argument that this version does not take, the nearest name, and the versions that have it.
    """
    notes: list[str] = []
    problems: list[str] = []
    wanted = _translated(args, version, help_flags, notes, problems)
    argv = [python, *ENTRY]
    order = {name: n for n, name in enumerate(_FIRST)}
    for name, value in sorted(wanted.items(), key=lambda item: order.get(item[0], len(order))):
        if value is None:
            continue
        if name in flags.secret_fields():
            problems.append(
                f"args.{name}: a secret on the command line is seen by everybody on the host; "
                "set `api_key:` of the profile (secret:, from_env: or from_file:) instead"
            )
            continue
        flag = flags.spelling(name, version, help_flags)
        if flag is None:
            if reason := flags.needless(name, value, version):
                notes.append(f"{name} left out: {reason}")
            elif value is not False:
                problems.append(f"args.{name}: {flags.explain_absent(name, version, help_flags)}")
            continue
        try:
            words = _words(flag, value)
        except ValueError as wrong:
            problems.append(f"args.{name}: {wrong}")
            continue
        if words and flag.dead:
            problems.append(
                f"args.{name}: SGLang {version} takes {flag.option} only to refuse it; use {flag.use or 'another'}"
            )
        elif words and flag.deprecated:
            notes.append(_deprecation(flag, version))
        argv += words
    if not wanted.get("model_path"):
        problems.append("args.model_path: missing; SGLang does not start without --model-path")
    refuse(problems, version)
    return Command(tuple(argv), tuple(notes))


def refuse(problems: Sequence[str], version: Version, nothing: str = "Nothing was touched.") -> None:
    """Raises PlanRefused naming each problem, if there is one."""
    if not problems:
        return
    head = (
        f"SGLang {version} would not start with this: "
        if len(problems) == 1
        else f"SGLang {version} would not start:\n  - "
    )
    raise PlanRefused(
        head + "\n  - ".join(problems) + f"\n{nothing}",
        runbook="bad-arguments",
        details={"problems": list(problems), "sglang_version": str(version)},
    )


def _deprecation(flag: Flag, version: Version) -> str:
    use = f"; newer: {flag.use}" if flag.use else ""
    return f"{flag.option} is deprecated in SGLang {version} and still works{use}"


def _translated(
    args: Mapping[str, ArgValue],
    version: Version,
    help_flags: HelpFlags | None,
    notes: list[str],
    problems: list[str],
) -> dict[str, ArgValue]:
    """Arguments that older releases say with other arguments, not only with another name."""
    wanted = dict(args)
    if (size := wanted.get("attn_dp_size")) is not None and flags.spelling("attn_dp_size", version, help_flags) is None:
        del wanted["attn_dp_size"]
        if size != 1:
            if wanted.get("dp_size") not in (None, 1, size):
                problems.append(
                    f"args.attn_dp_size: SGLang {version} spells it --dp-size {size} --enable-dp-attention, and dp_size is {wanted['dp_size']}"
                )
            wanted |= {"dp_size": size, "enable_dp_attention": True}
            notes.append(f"attn_dp_size {size} is spelled --dp-size {size} --enable-dp-attention before 0.5.22")
    for phase, plain in (("prefill", "disable_prefill_cuda_graph"), ("decode", "disable_decode_cuda_graph")):
        name = f"cuda_graph_backend_{phase}"
        if wanted.get(name) == "disabled" and flags.spelling(name, version, help_flags) is None:
            del wanted[name]
            wanted[plain] = True
    return wanted


def _words(flag: Flag, value: ArgValue) -> list[str]:
    """One option with its value as argv words. ValueError: this option does not take such a value."""
    if flag.type == "unknown" and isinstance(value, bool):
        return [flag.option] if value else []
    if flag.kind in ("flag", "switch"):
        if not isinstance(value, bool):
            raise ValueError(f"{flag.option} takes no value (got {value!r}); true or false would be right")
        if value:
            return [flag.option]
        return ["--no-" + flag.option[2:]] if flag.kind == "switch" else []
    if isinstance(value, bool):
        wanted = f"one of {', '.join(map(str, flag.choices))}" if flag.choices else "a value"
        raise ValueError(f"{flag.option} takes {wanted}, not {str(value).lower()}")
    listed = isinstance(value, (list, tuple))
    if flag.nargs in (None, "?") and listed and flag.type != "json":
        raise ValueError(f"{flag.option} takes one value, not a list")
    if flag.nargs not in (None, "?"):
        items = [*value] if isinstance(value, (list, tuple)) else [value]
        if not items and flag.nargs == "+":
            raise ValueError(f"{flag.option} takes at least one value")
    else:
        items = [value]
    texts = [_text(flag, item) for item in items]
    for text in texts:
        checked = flag.type in ("str", "int", "float", "json", "human_int")
        if checked:
            flags.coerce(flag, text)
        if text.startswith("-") and not _is_number(text):
            if len(texts) > 1:
                raise ValueError(f"{flag.option}: {text!r} in a list begins with a dash and would be read as an option")
            return [f"{flag.option}={text}"]
    return [flag.option, *texts]


def _text(flag: Flag, value: ArgValue) -> str:
    if isinstance(value, Mapping) or (flag.type == "json" and not isinstance(value, str)):
        return json.dumps(value, separators=(",", ":"), default=lambda v: list(v) if isinstance(v, tuple) else dict(v))
    if isinstance(value, bool) or value is None or isinstance(value, (list, tuple)):
        raise ValueError(f"{flag.option}: {value!r} cannot stand in a command line")
    if isinstance(value, float) and flag.type in ("int", "human_int"):
        if not value.is_integer():
            raise ValueError(f"{flag.option}: {value!r} is not a whole number")
        value = int(value)
    text = str(value)
    if "\0" in text:
        raise ValueError(f"{flag.option}: a value cannot hold a NUL byte")
    return text


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"-\d+|-\d*\.\d+", text))  # argparse's own pattern of a negative number


_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


def parse(command: str | Sequence[str], version: Version, help_flags: HelpFlags | None = None) -> Parsed:
    """Reads `ENV=1 python -m sglang.launch_server …`, `sglang serve MODEL …`, a container's command, or bare flags.

    What argparse of that version accepts is accepted, abbreviations included.

    command: text as typed in a shell (quotes, `\\` at line ends) or an argv.
    UsageError: not an SGLang server command. PlanRefused: an option that this version lacks, an ambiguous one, or a wrong value.
    """
    notes: list[str] = []
    words = _shell_words(command, notes) if isinstance(command, str) else list(command)
    env, python, rest = _entry(words, notes)
    args, secrets = _arguments(rest, version, help_flags, notes)
    return Parsed(args, env, secrets, python, tuple(dict.fromkeys(notes)))


_PIECE = re.compile(
    r"""(?P<quoted>'[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?P<operator>[;&|()<>]+)|(?P<comment>(?:(?<=\s)|^)\#[^\n]*)|(?P<plain>[^'"\\;&|()<>\#]+|.)""",
    re.DOTALL,
)


def _shell_words(text: str, notes: list[str]) -> list[str]:
    """Words as a shell splits them; a command's end becomes a word that begins with NUL, which no shell word can."""
    joined = re.sub(r"\\\r?\n", " ", text.strip())
    marked = ""
    for piece in _PIECE.finditer(joined):
        if piece["operator"]:
            marked += f" \0{piece['operator']} "
        elif not piece["comment"]:
            marked += piece[0]
    try:
        tokens = shlex.split(marked)
    except ValueError:
        raise UsageError("--command: a quote or a backslash is not closed") from None
    words: list[str] = []
    skip = False
    for token in tokens:
        if skip:
            skip = False
        elif token.startswith("\0") and set(token) & {"<", ">"}:
            skip = True
            if words and words[-1].isdigit():
                words.pop()
            notes.append("a redirection is left out: the launch has its own log")
        else:
            words.append(token)
    if any("$" in w for w in words):
        notes.append("a `$` stands as it is written: variables are not expanded here")
    return words


def _entry(words: Sequence[str], notes: list[str]) -> tuple[dict[str, str], str | None, list[str]]:
    """(environment, interpreter, the server's own arguments)."""
    start = python = None
    for n, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        if word == "sglang.launch_server" and n and words[n - 1] == "-m":
            start, python = n + 1, words[n - 2] if n >= 2 and not words[n - 2].startswith("\0") else None
        elif name == "launch_server.py":
            start, python = n + 1, words[n - 1] if n else None
        elif name == "sglang" and n + 1 < len(words) and words[n + 1] == "serve":
            start = n + 2
        else:
            continue
        break
    before: Sequence[str]
    if start is None:
        first = next((n for n, w in enumerate(words) if not _ASSIGNMENT.fullmatch(w)), len(words))
        if first == len(words) or not words[first].startswith("--"):
            raise UsageError(
                "--command: this is no SGLang server: it has neither `-m sglang.launch_server` nor `sglang serve`, and does not begin with flags"
            )
        before, start = words[:first], first
    else:
        before = words[:start]
    env: dict[str, str] = {}
    for word in before:
        text = word.removeprefix("--env=")
        if _ASSIGNMENT.fullmatch(text):
            name, _, value = text.partition("=")
            env[name] = value
    rest = list(words[start:])
    if (end := next((n for n, w in enumerate(rest) if w.startswith("\0")), None)) is not None:
        if any(not w.startswith("\0") for w in rest[end:]):
            notes.append("what follows the server's command is left out")
        rest = rest[:end]
    return env, python, rest


def _arguments(
    words: Sequence[str], version: Version, help_flags: HelpFlags | None, notes: list[str]
) -> tuple[dict[str, ArgValue], dict[str, Secret]]:
    args: dict[str, ArgValue] = {}
    secrets: dict[str, Secret] = {}
    problems: list[str] = []
    position = 0

    def is_option(word: str) -> bool:
        return word.startswith("-") and word != "-" and not _is_number(word) and " " not in word.partition("=")[0]

    if words and not words[0].startswith("-"):
        args["model_path"], position = words[0], 1
    while position < len(words):
        word = words[position]
        position += 1
        if not is_option(word):
            problems.append(f"{word!r} belongs to no option: SGLang says 'unrecognized arguments'")
            continue
        written, equals, inline = word.partition("=")
        found = flags.match(written, version, help_flags)
        if found.ambiguous:
            options = ", ".join(found.ambiguous)
            problems.append(f"{written} is ambiguous in SGLang {version}: it could be {options}; write one in full")
        if found.unknown and written == "--model-type":
            notes.append(
                "--model-type is a setting of `sglang serve`'s own and is left out: this is always a language model's server"
            )
            position += 0 if equals else 1
            continue
        if found.unknown:
            problems.append(flags.explain_absent(written, version, help_flags))
        if found.flag is None:
            while not equals and position < len(words) and not is_option(words[position]):
                position += 1
            continue
        flag = found.flag
        if flag.option == "--help":
            problems.append(f"{written} only prints the help text")
            continue
        if found.abbreviated:
            notes.append(f"{written} is short for {flag.option}")
        if flag.dead:
            problems.append(
                f"SGLang {version} takes {flag.option} only to refuse it{f'; use {flag.use}' if flag.use else ''}"
            )
        elif flag.deprecated:
            notes.append(_deprecation(flag, version))
        given: list[str] = [inline] if equals else []
        if flag.kind != "value":
            if equals:
                problems.append(f"{flag.option} takes no value, and got {inline!r}")
            value: ArgValue = not found.negated if flag.const is None else flag.const
        else:
            many = flag.nargs in ("+", "*")
            while not equals and position < len(words) and not is_option(words[position]) and (many or not given):
                given.append(words[position])
                position += 1
            if not given and flag.nargs in (None, "+"):
                problems.append(f"{flag.option} takes a value and has none")
                continue
            if flag.field == "config" and equals:
                problems.append(
                    f"{word} would be ignored without a word: SGLang reads a settings file only from two words, --config {inline}"
                )
            try:
                values = [flags.coerce(flag, text) for text in given]
            except ValueError as wrong:
                problems.append(str(wrong))
                continue
            value = tuple(values) if many else (values[0] if values else flag.const)
        if flag.field in flags.secret_fields():
            secrets[flag.field] = Secret(str(value))
            notes.append(f"{flag.option} is taken out of the command line, where everybody at the host would read it")
            continue
        if flag.field in args and args[flag.field] != value:
            notes.append(f"{flag.option} is given twice: {value!r} wins over {args[flag.field]!r}")
        args[flag.field] = value
    if "config" in args:
        notes.append(
            f"what stands in {args['config']} is not seen here: SGLang reads it at the host, and the command line wins over it"
        )
    refuse(problems, version)
    return args, secrets
