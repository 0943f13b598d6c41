"""`hosts`: which hosts the inventory has, and what it says of them. No connection is opened; `doctor` asks the hosts themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtpdeploy import inventory as inventories
from mtpdeploy.inventory.values import Deployment, Host
from mtpdeploy.progress import Talk


@dataclass(frozen=True, slots=True)
class Known:
    """A host, and what it is without any profile."""

    host: Host
    deployment: Deployment

    def as_json(self) -> dict[str, object]:
        host, deployment = self.host, self.deployment
        return {
            "name": host.name,
            "address": host.address,
            "user": host.user,
            "port": host.port,
            "local": host.local,
            "simulated": host.simulate is not None,
            "groups": list(host.groups),
            "gpus": [{"index": gpu.index, "name": gpu.name, "memory_gb": gpu.memory_gb} for gpu in host.gpus],
            "python": deployment.python,
            "sglang_version": deployment.sglang_version or (host.simulate.sglang_version if host.simulate else None),
            "service": deployment.service,
            "workdir": deployment.workdir,
            "supervisor": deployment.supervisor,
            "file": str(host.source) if host.source else None,
        }


@dataclass(frozen=True, slots=True)
class Hosts:
    """The chosen hosts in the order of the inventory, and its groups."""

    hosts: tuple[Known, ...]
    groups: Mapping[str, tuple[str, ...]]
    files: tuple[Path, ...]

    def as_json(self) -> dict[str, object]:
        return {
            "hosts": [known.as_json() for known in self.hosts],
            "groups": {name: list(members) for name, members in self.groups.items()},
            "files": [str(file) for file in self.files],
        }


def hosts(*, home: Path, talk: Talk, host: str | None, inventory: Sequence[str]) -> Hosts:
    """Raises ConfigError, UsageError."""
    known = inventories.load(home, inventory)
    chosen = known.choose(host) if host else tuple(known.hosts.values())
    return Hosts(
        tuple(Known(each, inventories.resolve(known, each, None, reveal=False)) for each in chosen),
        known.groups,
        known.files,
    )
