"""`profiles import`: the command line of a server that somebody runs already, as a profile."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from mtpdeploy.errors import ConfigError, UsageError
from mtpdeploy.inventory import load_profile
from mtpdeploy.inventory.values import ArgValue
from mtpdeploy.progress import Talk
from mtpdeploy.sglang import command as commands
from mtpdeploy.sglang.masking import is_secret
from mtpdeploy.sglang.versions import NEWEST, Version
from mtpdeploy.store.files import write_atomically

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}\Z")
_HUB = re.compile(r"[\w.-]+/[\w.-]+\Z")
KEY_VARIABLE = "SGLANG_API_KEY"


@dataclass(frozen=True, slots=True)
class Imported:
    """The profile that was written, and what a person should know of how it was read."""

    name: str
    file: Path
    text: str
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "file": str(self.file),
            "profile": yaml.safe_load(self.text),
            "notes": list(self.notes),
        }


def import_command(
    *, home: Path, talk: Talk, name: str, command: str | None, sglang_version: str | None, force: bool
) -> Imported:
    """Writes inventories/profiles/NAME.yml of the home. Raises UsageError, PlanRefused for what that version does not take."""
    if command is None:
        raise UsageError("--command 'CMD' is needed: the command line as you would type it")
    if not _NAME.match(name):
        raise UsageError(
            f"{name!r} cannot name a profile: letters, digits, dots, dashes and underscores would be right"
        )
    try:
        version = Version.parse(sglang_version) if sglang_version else NEWEST
    except ValueError as wrong:
        raise UsageError(f"--sglang-version: {wrong}") from None
    file = home / "inventories" / "profiles" / f"{name}.yml"
    if file.exists() and not force:
        raise UsageError(f"{file}: is there already; --force replaces it")
    parsed = commands.parse(command, version)
    if "model_path" not in parsed.args:
        raise UsageError("--command names no model: --model-path PATH is missing in it")
    notes = [*parsed.notes]
    if sglang_version is None:
        notes.append(f"read with the flags of SGLang {version}, the newest in the table; --sglang-version says another")
    content = _profile(parsed, notes)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text.encode())
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
    try:
        load_profile(home, name)
    except ConfigError:
        file.unlink()  # half a profile would stand in the way of every verb
        raise
    return Imported(name, file, text, tuple(notes))


def _profile(parsed: commands.Parsed, notes: list[str]) -> dict[str, object]:
    args: dict[str, ArgValue] = dict(parsed.args)
    content: dict[str, object] = {"description": "imported from a command line"}
    model = args.get("model_path")
    if isinstance(model, str) and _HUB.match(model):
        content["model"] = args.pop("model_path")
    if args.get("host") == "127.0.0.1":
        del args["host"]
    if parsed.python and parsed.python not in ("python", "python3"):
        content["python"] = parsed.python
    if "api_key" in parsed.secrets:
        content["api_key"] = {"from_env": KEY_VARIABLE}
        notes.append(f"the API key is not in the file: it is read from ${KEY_VARIABLE} when it is needed")
    if others := sorted(set(parsed.secrets) - {"api_key"}):
        notes.append(f"left out, as a profile has no place for it: {', '.join(others)}")
    content["args"] = {name: _plain(value) for name, value in args.items()}
    env: dict[str, object] = {}
    for name, value in parsed.env.items():
        if is_secret(name):
            env[name] = {"from_env": name}
            notes.append(f"{name} is a secret and not in the file: it is read from ${name} here")
        else:
            env[name] = value
    if env:
        content["env"] = env
    return content


def _plain(value: ArgValue) -> object:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value
