"""One layer's settings as typed values: SGLang arguments by canonical name, environment, secrets, places of models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtpdeploy.inventory.documents import Document, KeyPath, Problem, did_you_mean
from mtpdeploy.inventory.schema import Placed, Settings
from mtpdeploy.inventory.values import ArgValue, VersionedEnv
from mtpdeploy.secret import Secret
from mtpdeploy.sglang import flags
from mtpdeploy.sglang.masking import is_secret
from mtpdeploy.sglang.versions import NEWEST, RELEASES, Version

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CONDITION = re.compile(r"(<=|>=|==|!=|<|>)\s*(\S+)")
SIMPLE = (
    "python",
    "venv",
    "workdir",
    "service",
    "supervisor",
    "ready_timeout_s",
    "drain_timeout_s",
    "slots_for",
    "sglang_version",
    "model",
)


@dataclass(frozen=True, slots=True)
class SecretSource:
    """Where a secret is read when it is needed: exactly one of the two is given. key is the file and key path, for an error."""

    key: str
    from_env: str | None = None
    from_file: Path | None = None

    def __str__(self) -> str:
        return f"from_env {self.from_env}" if self.from_env else f"from_file {self.from_file}"


EnvValue = str | Secret | SecretSource | VersionedEnv


@dataclass(frozen=True, slots=True)
class Layer:
    """label: as `profiles show --resolved` names it. values: what the layer says of `Deployment`'s plain fields."""

    label: str
    values: Mapping[str, object] = field(default_factory=dict)
    args: Mapping[str, ArgValue] = field(default_factory=dict)
    env: Mapping[str, EnvValue] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    api_key: Secret | SecretSource | None = None
    notes: tuple[str, ...] = ()


def layer(label: str, said: Settings, document: Document, at: KeyPath, problems: list[Problem]) -> Layer:
    """The layer of a validated mapping that stands at `at` in `document`. What is still wrong is added to `problems`."""
    reader = _Reader(document, problems)
    values: dict[str, object] = {name: value for name in SIMPLE if (value := getattr(said, name)) is not None}
    if said.venv and said.python:
        reader.wrong((*at, "venv"), "stands beside python; keep one of them")
    if said.sglang_version:
        reader.version((*at, "sglang_version"), said.sglang_version)
    if said.model_config_file:
        values["model_config"] = str(_beside(document, said.model_config_file))
    models = said.models if isinstance(said, Placed) else {}
    for name, path in models.items():
        reader.remote_model((*at, "models", name), path)
    return Layer(
        label,
        values,
        reader.args((*at, "args"), said.args),
        reader.env((*at, "env"), said.env),
        models,
        reader.api_key((*at, "api_key"), said.api_key),
        tuple(reader.notes),
    )


class _Reader:
    def __init__(self, document: Document, problems: list[Problem]) -> None:
        self._document = document
        self._problems = problems
        self.notes: list[str] = []

    def wrong(self, at: KeyPath, message: str) -> None:
        self._problems.append(self._document.problem(at, message))

    def version(self, at: KeyPath, text: str) -> None:
        try:
            Version.parse(text)
        except ValueError as error:
            self.wrong(at, str(error))

    def remote_model(self, at: KeyPath, path: str) -> None:
        if path.startswith("~"):
            self.wrong(at, f"should be an absolute path, not {path!r}: SGLang does not expand ~")

    def args(self, at: KeyPath, said: Mapping[str, Any]) -> dict[str, ArgValue]:
        typed: dict[str, ArgValue] = {}
        written: dict[str, str] = {}
        for name, value in said.items():
            here = (*at, name)
            try:
                known, result = argument(name, value, self._document.raw.get(here))
            except ValueError as error:
                self.wrong(here, str(error))
                continue
            if known in written:
                self.wrong(here, f"means the same as {written[known]}; keep one")
            if known == "model_path":
                self.remote_model(here, str(result))
            written[known] = name
            typed[known] = result
        return typed

    def env(self, at: KeyPath, said: Mapping[str, Any]) -> dict[str, EnvValue]:
        result: dict[str, EnvValue] = {}
        for name, value in said.items():
            here = (*at, name)
            if not ENV_NAME.fullmatch(name):
                self.wrong(here, "should be a variable's name: letters, digits and _, not first a digit")
            elif isinstance(value, dict):
                result[name] = self._env_mapping(here, name, value) or ""
            elif value is None or isinstance(value, list):
                self.wrong(
                    here, "should be text, or {from_env: NAME}, {from_file: PATH}, {value: TEXT, versions: '<=0.5.10'}"
                )
            else:
                text = self._document.raw.get(here, str(value))
                self._printable(here, text)
                if is_secret(name):
                    self.notes.append(
                        f"{self._document.path}: {'.'.join(map(str, here))} holds a secret in clear; {{from_env: {name}}} keeps it out of the file"
                    )
                    result[name] = Secret(text)
                else:
                    result[name] = text
        return result

    def _env_mapping(self, at: KeyPath, name: str, value: dict[str, object]) -> EnvValue | None:
        if "value" in value or "versions" in value:
            text, versions = value.get("value"), value.get("versions")
            if set(value) != {"value", "versions"} or isinstance(text, (dict, list)) or not isinstance(versions, str):
                self.wrong(at, "should be {value: TEXT, versions: '<=0.5.10'}")
                return None
            try:
                matches(versions, NEWEST)
            except ValueError as error:
                self.wrong((*at, "versions"), str(error))
            return VersionedEnv(name, self._document.raw.get((*at, "value"), str(text)), versions)
        return self.source(at, value)

    def api_key(self, at: KeyPath, value: object) -> Secret | SecretSource | None:
        if value is None:
            return None
        if isinstance(value, dict):
            return self.source(at, value)
        if isinstance(value, str):
            self.notes.append(
                f"{self._document.path}: {'.'.join(map(str, at))} holds a secret in clear; {{from_env: NAME}} keeps it out of the file"
            )
            return Secret(value)
        self.wrong(at, "should be {from_env: NAME} or {from_file: PATH}")
        return None

    def source(self, at: KeyPath, value: Mapping[str, object]) -> Secret | SecretSource | None:
        where = f"{self._document.path}: {'.'.join(map(str, at))}"
        match dict(value):
            case {"from_env": str(name), **rest} if not rest and ENV_NAME.fullmatch(name):
                return SecretSource(where, from_env=name)
            case {"from_file": str(path), **rest} if not rest and path:
                return SecretSource(where, from_file=_beside(self._document, path))
            case {"secret": str(text), **rest} if not rest:
                self.notes.append(f"{where} holds a secret in clear; {{from_env: NAME}} keeps it out of the file")
                return Secret(text)
        unknown = [key for key in value if key not in ("from_env", "from_file", "secret")]
        hint = did_you_mean(unknown[0], ("from_env", "from_file")) if unknown else ""
        self.wrong(at, f"should be {{from_env: NAME}} or {{from_file: PATH}}{hint}")
        return None

    def _printable(self, at: KeyPath, text: str) -> None:
        if any(c in text for c in "\n\r\0"):
            self.wrong(at, "should be one line of text")


def argument(name: str, value: object, raw: str | None = None) -> tuple[str, ArgValue]:
    """(canonical name, typed value) of one SGLang argument. `raw` is the scalar as written, for YAML's surprises: `no` meant as text.

    Raises ValueError that says what would be right. None means "leave SGLang's default".
    """
    known = flags.canonical(name)
    if known is None:
        begun = [each for each in flags.canonical_names() if each.startswith(name.replace("-", "_"))]
        near = flags.nearest(name, NEWEST) or min(begun, key=len, default=None)
        hint = (
            f"; did you mean {flags.canonical(near) or near}?"
            if near
            else "; `python -m sglang.launch_server --help` lists them"
        )
        raise ValueError(f"no SGLang from {RELEASES[0]} to {RELEASES[-1]} has this argument{hint}")
    if known in flags.secret_fields():
        right = (
            "say `api_key: {from_env: NAME}` beside args"
            if known == "api_key"
            else "give it to SGLang in a --config file at the host"
        )
        raise ValueError(f"a secret in args would show in the host's process list; {right}")
    if value is None:
        return known, None
    flag = _flag(known)
    if flag.kind in ("flag", "switch"):
        if not isinstance(value, bool):
            raise ValueError(f"should be true or false, not {value!r}")
        return known, value
    if isinstance(value, Mapping):
        if flag.type not in ("json", "str") and not flag.type.endswith("json"):
            raise ValueError(f"should be {_kind(flag)}, not a mapping")
        return known, _frozen(value)
    if isinstance(value, (list, tuple)):
        if flag.nargs is None or flag.nargs == "?":
            raise ValueError(f"should be one value ({_kind(flag)}), not a list")
        return known, tuple(_scalar(flag, each, None) for each in value)
    typed = _scalar(flag, value, raw)
    return known, (typed,) if flag.nargs in ("+", "*") and not isinstance(typed, tuple) else typed


def _scalar(flag: flags.Flag, value: object, raw: str | None) -> ArgValue:
    if flag.type == "int" and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"should be a whole number, not {value!r}")
    if flag.type == "float" and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ValueError(f"should be a number, not {value!r}")
    text = raw if raw is not None else str(value)
    if any(c in text for c in "\n\r\0"):
        raise ValueError("should be one line of text")
    try:
        typed = flags.coerce(flag, text)
    except ValueError as error:
        raise ValueError(str(error).removeprefix(f"{flag.option}: ")) from None
    return typed if isinstance(typed, (bool, int, float, str)) or typed is None else _frozen(typed)


def _frozen(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _frozen(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each) for each in value)
    return value


def _kind(flag: flags.Flag) -> str:
    return {
        "int": "a whole number",
        "float": "a number",
        "json": "JSON",
        "human_int": "a whole number such as 4096 or 25.6k",
    }.get(flag.type, "text")


def _flag(known: str) -> flags.Flag:
    """The argument as the newest release that has it reads it."""
    for release in reversed(RELEASES):
        if found := flags.spelling(known, Version.parse(release)):
            return found
    raise AssertionError(f"{known} is in no release")  # canonical() only returns names of the table


def matches(versions: str, version: Version) -> bool:
    """Whether `version` meets a condition such as `<=0.5.10` or `>=0.5.7,<0.5.14`. A post release counts as its release.

    Raises ValueError when the condition is none.
    """
    tests: dict[str, Callable[[Version, Version], bool]] = {
        "<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b, "<": lambda a, b: a < b,
        ">": lambda a, b: a > b, "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
    }  # fmt: skip
    base = Version(version.text, version.release)
    verdict = True
    for part in versions.split(","):
        found = CONDITION.fullmatch(part.strip())
        if not found:
            raise ValueError(f"should be a condition such as '<=0.5.10' or '>=0.5.7,<0.5.14', not {versions!r}")
        verdict = verdict and tests[found[1]](base, Version.parse(found[2]))
    return verdict


def _beside(document: Document, path: str) -> Path:
    """A path of this machine as the file means it: ~ is the home folder, a relative one stands beside the file."""
    given = Path(path).expanduser()
    return given if given.is_absolute() else document.path.parent / given
