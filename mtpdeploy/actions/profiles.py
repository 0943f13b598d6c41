"""`profiles` and `profiles show`: which profiles there are, and what one comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtpdeploy import inventory as inventories
from mtpdeploy.errors import UsageError
from mtpdeploy.inventory.settings import Layer
from mtpdeploy.inventory.values import Deployment, VersionedEnv
from mtpdeploy.progress import Talk
from mtpdeploy.secret import MASK, Secret


@dataclass(frozen=True, slots=True)
class Profiles:
    """Every profile that can be named from this home."""

    profiles: tuple[inventories.Profile, ...]

    def as_json(self) -> dict[str, object]:
        return {
            "profiles": [
                {
                    "name": profile.name,
                    "description": profile.description,
                    "extends": profile.extends,
                    "model": next(
                        (said.values["model"] for said in reversed(profile.layers) if "model" in said.values), None
                    ),
                    "file": str(profile.source),
                }
                for profile in self.profiles
            ]
        }


@dataclass(frozen=True, slots=True)
class Setting:
    """One dotted key, its value (secrets masked), and the layer that said it."""

    key: str
    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A profile's settings in the order of the layers; `host` None: no host's layers are in it."""

    name: str
    description: str
    file: Path
    extends: str | None
    resolved: bool
    host: str | None
    settings: tuple[Setting, ...]
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "description": self.description,
            "file": str(self.file),
            "extends": self.extends,
            "resolved": self.resolved,
            "host": self.host,
            "settings": {setting.key: {"value": setting.value, "origin": setting.origin} for setting in self.settings},
            "notes": list(self.notes),
        }


def profiles(*, home: Path, talk: Talk) -> Profiles:
    """Raises ConfigError if one of the files is wrong."""
    return Profiles(tuple(inventories.load_profile(home, name) for name in inventories.profile_names(home)))


def show(
    *,
    home: Path,
    talk: Talk,
    name: str,
    resolved: bool,
    host: str | None,
    inventory: Sequence[str],
    set_: Sequence[str],
) -> Shown:
    """Raises ConfigError, NotFound, UsageError."""
    profile = inventories.load_profile(home, name)
    if not (resolved or host or set_):
        settings = [setting for said in profile.layers for setting in _said(said)]
        last = {setting.key: setting for setting in settings}
        return Shown(
            profile.name, profile.description, profile.source, profile.extends, False, None, tuple(last.values())
        )
    known = inventories.load(home, inventory)
    chosen = known.choose(host) if host else ()
    if len(chosen) > 1:
        raise UsageError(f"--host: one host, not {len(chosen)}: {', '.join(each.name for each in chosen)}")
    deployment = inventories.resolve(known, chosen[0] if chosen else None, name, set_, reveal=False)
    return Shown(
        profile.name,
        profile.description,
        profile.source,
        profile.extends,
        True,
        chosen[0].name if chosen else None,
        tuple(_resolved(deployment)),
        deployment.notes,
    )


def _said(said: Layer) -> list[Setting]:
    return [
        *(Setting(key, value, said.label) for key, value in said.values.items()),
        *(Setting(f"args.{key}", value, said.label) for key, value in said.args.items()),
        *(Setting(f"env.{key}", _told(value), said.label) for key, value in said.env.items()),
        *([Setting("api_key", _told(said.api_key), said.label)] if said.api_key else []),
    ]


def _resolved(deployment: Deployment) -> list[Setting]:
    versioned = {each.name: each for each in deployment.versioned_env}
    found: list[Setting] = []
    for key, origin in deployment.origin.items():
        kind, _, name = key.partition(".")
        value: object
        match kind:
            case "args":
                value = deployment.args.get(name)
            case "env":
                value = _told(deployment.env[name] if name in deployment.env else versioned[name])
            case "api_key":
                value = MASK
            case "model":
                continue  # told as args.model_path, which is what it comes to
            case _:
                value = getattr(deployment, kind)
        found.append(Setting(key, value, origin))
    return sorted(found, key=lambda setting: ("." in setting.key, setting.key))


def _told(value: object) -> object:
    match value:
        case Secret():
            return MASK
        case VersionedEnv():
            return {"value": value.value, "versions": value.versions}
        case str() | int() | float() | bool() | None | tuple() | Mapping():
            return value
    return str(value)  # a SecretSource: where it is read, never what it holds
