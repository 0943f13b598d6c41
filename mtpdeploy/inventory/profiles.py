"""Profiles and workloads by name: the home's own first, then the shipped ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from mtpdeploy.errors import ConfigError, NotFound
from mtpdeploy.inventory.documents import Problem, did_you_mean, read, refuse
from mtpdeploy.inventory.hosts import shown
from mtpdeploy.inventory.schema import ProfileFile, WorkloadFile, validated
from mtpdeploy.inventory.settings import Layer, layer
from mtpdeploy.inventory.values import Workload
from mtpdeploy.resources import bundled

MAX_EXTENDS = 8
_NAME_MAX = 255  # bytes of a file's name


@dataclass(frozen=True, slots=True)
class Profile:
    """layers: what it builds on first, its own last."""

    name: str
    description: str
    source: Path
    extends: str | None
    layers: tuple[Layer, ...]


def _folders(home: Path, kind: str) -> Iterator[Path]:
    yield home / "inventories" / kind
    yield bundled("inventories") / kind


def _names(home: Path, kind: str) -> tuple[str, ...]:
    return tuple(
        sorted({p.stem for folder in _folders(home, kind) for p in (*folder.glob("*.yml"), *folder.glob("*.yaml"))})
    )


def profile_names(home: Path) -> tuple[str, ...]:
    """Every profile that can be named from this home, sorted."""
    return _names(home, "profiles")


def workload_names(home: Path) -> tuple[str, ...]:
    """Every workload that can be named from this home, sorted."""
    return _names(home, "workloads")


def _find(home: Path, kind: str, name: str) -> Path:
    if "/" not in name and len(name.encode()) > _NAME_MAX - len(".yaml"):
        raise NotFound(f"no {kind[:-1]} {name[:60]!r}…: that is too long for a file's name")
    if name.endswith((".yml", ".yaml")) or "/" in name:
        return Path(name).expanduser()
    for folder in _folders(home, kind):
        for suffix in (".yml", ".yaml"):
            if (path := folder / f"{name}{suffix}").is_file():
                return path
    raise NotFound(
        f"no {kind[:-1]} {name!r}{did_you_mean(name, _names(home, kind), kind)}", next_commands=("mtpdeploy profiles",)
    )


def load_profile(home: Path, name: str) -> Profile:
    """Raises NotFound (with the nearest name) or ConfigError."""
    return _load_profile(home, name, ())


def _load_profile(home: Path, name: str, above: tuple[Path, ...]) -> Profile:
    path = _find(home, "profiles", name)
    if path in above or len(above) > MAX_EXTENDS:
        raise ConfigError(f"{above[-1]}: extends: goes round in a circle: {' → '.join(p.stem for p in (*above, path))}")
    document = read(path)
    content, problems = validated(ProfileFile, document)
    refuse(problems)
    assert content is not None
    more: list[Problem] = []
    own = layer(f"profile {path.stem} ({shown(path, home)})", content, document, (), more)
    refuse(more)
    below: tuple[Layer, ...] = ()
    if content.extends:
        # A home's own profile may build on the shipped one of the same name.
        same = content.extends == path.stem and (bundled("inventories") / "profiles" / path.name)
        below = _load_profile(home, str(same) if same and same != path else content.extends, (*above, path)).layers
    return Profile(path.stem, content.description, path, content.extends, (*below, own))


def workload(home: Path, name: str) -> Workload:
    """Raises NotFound (with the nearest name) or ConfigError."""
    path = _find(home, "workloads", name)
    document = read(path)
    content, problems = validated(WorkloadFile, document)
    refuse(problems)
    assert content is not None
    said = {f.name: getattr(content, f.name) for f in fields(Workload) if f.name not in ("name", "source")}
    for key, unit in (("concurrency", "requests in flight"), ("rate", "requests per second")):
        points = tuple(said[key]) if isinstance(said[key], list) else (said[key],)
        refuse(document.problem((key,), f"should be above 0 {unit}, not {p!r}") for p in points if p <= 0)
        said[key] = points
    if said["concurrency"] and said["rate"]:
        refuse(
            [
                document.problem(
                    ("rate",), "stands beside concurrency: a workload is a closed loop or an open one; keep one"
                )
            ]
        )
    return Workload(name=path.stem, source=path, **said)
