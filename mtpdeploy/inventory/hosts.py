"""Inventory files → hosts and groups; and which hosts a command means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mtpdeploy.errors import UsageError
from mtpdeploy.inventory.documents import Document, Problem, did_you_mean, read, refuse
from mtpdeploy.inventory.schema import NAME, HostEntry, InventoryFile, Placed, validated
from mtpdeploy.inventory.settings import Layer, layer
from mtpdeploy.inventory.values import Gpu, Host, Simulate, SshOptions
from mtpdeploy.resources import bundled

T = TypeVar("T")
ALIAS = re.compile(
    r"(?:(?P<user>[^@\s:,-][^@\s:,]*)@)?(?P<address>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::(?P<port>\d{1,5}))?"
)


@dataclass(frozen=True, slots=True)
class Inventory:
    """hosts: by name in the order of the files. groups: name → names of hosts. layers: host → its layers, weakest first."""

    home: Path
    files: tuple[Path, ...]
    hosts: Mapping[str, Host]
    groups: Mapping[str, tuple[str, ...]]
    layers: Mapping[str, tuple[Layer, ...]] = field(default_factory=dict)

    def choose(self, option: str | None, last_deployed: str | None = None) -> tuple[Host, ...]:
        """The hosts that `--host` means, each once, in the order given.

        Without the option: the host of the last deploy, else the only one. A name that is neither host nor group is an ssh alias.
        Raises UsageError: nothing chosen and nothing obvious, or no host name at all.
        """
        if option is None:
            if last_deployed is not None:
                return self.choose(last_deployed)
            if len(self.hosts) == 1:
                return tuple(self.hosts.values())
            names = ", ".join(self.hosts) or "none; give one as user@name:port, or write inventories/NAME.yml"
            raise UsageError(f"which host? Choose with --host: {names}", next_commands=("mtpdeploy hosts",))
        chosen: dict[str, Host] = {}
        for word in option.split(","):
            for host in self._named(word.strip()):
                chosen.setdefault(host.name, host)
        return tuple(chosen.values())

    def _named(self, word: str) -> Iterator[Host]:
        if word in self.hosts:
            yield self.hosts[word]
        elif word in self.groups:
            yield from (self.hosts[name] for name in self.groups[word])
        elif word:
            yield self._alias(word)
        else:
            raise UsageError("--host: an empty name in the list")

    def _alias(self, word: str) -> Host:
        found = ALIAS.fullmatch(word)
        port = int(found["port"]) if found and found["port"] else None
        if not found or (port is not None and not 1 <= port <= 65535):
            known = (*self.hosts, *self.groups)
            raise UsageError(
                f"--host: {word!r} is no host or group here, and no ssh name such as user@name:port{did_you_mean(word, known, 'names here')}"
            )
        return Host(name=word, address=found["address"].strip("[]"), user=found["user"], port=port)


def inventory_files(home: Path) -> tuple[Path, ...]:
    """The home's inventories/*.yml without example.yml; if there are none, the shipped rehearsal host."""
    folder = home / "inventories"
    own = sorted(p for p in (*folder.glob("*.yml"), *folder.glob("*.yaml")) if p.stem != "example")
    shipped = bundled("inventories") / "local.yml"
    return tuple(own) or ((shipped,) if shipped.is_file() else ())


def load(home: Path, inventory: Sequence[Path | str] | None = None) -> Inventory:
    """Read and validate the inventory. Raises ConfigError that tells everything that is wrong, in all files."""
    paths = tuple(Path(each).expanduser() for each in inventory or ()) or inventory_files(home)
    return _Loader(home).load([read(path) for path in paths])


class _Loader:
    def __init__(self, home: Path) -> None:
        self._home = home
        self._problems: list[Problem] = []
        self._hosts: dict[str, tuple[Document, HostEntry, Placed, Layer]] = {}
        self._groups: dict[str, tuple[Document, Placed, Layer]] = {}

    def load(self, documents: Sequence[Document]) -> Inventory:
        for document in documents:
            content, problems = validated(InventoryFile, document)
            self._problems += problems
            if content:
                self._file(document, content)
        refuse(self._problems)
        hosts: dict[str, Host] = {}
        layers: dict[str, tuple[Layer, ...]] = {}
        groups: dict[str, list[str]] = {name: [] for name in self._groups}
        for name, (document, entry, defaults, defaults_layer) in self._hosts.items():
            mine = [self._groups[group] for group in entry.groups if group in self._groups]
            own = self._layer(f"host {name}", document, entry, ("hosts", name))
            layers[name] = (defaults_layer, *(made for _, _, made in mine), own)
            hosts[name] = self._host(name, document, entry, [defaults, *(placed for _, placed, _ in mine), entry])
            for group in entry.groups:
                groups.setdefault(group, []).append(name)
        for clash in sorted(set(hosts) & set(groups)):
            document = self._hosts[clash][0]
            self._problems.append(document.problem(("hosts", clash), "is also the name of a group; rename one"))
        refuse(self._problems)
        return Inventory(
            self._home, tuple(d.path for d in documents), hosts, {g: tuple(n) for g, n in groups.items()}, layers
        )

    def _file(self, document: Document, content: InventoryFile) -> None:
        defaults = self._layer("defaults", document, content.defaults, ("defaults",))
        for name, placed in content.groups.items():
            if self._name_ok(document, "groups", name, self._groups.get(name, (None,))[0]):
                self._groups[name] = (
                    document,
                    placed,
                    self._layer(f"group {name}", document, placed, ("groups", name)),
                )
        for name, entry in content.hosts.items():
            if self._name_ok(document, "hosts", name, self._hosts.get(name, (None,))[0]):
                self._hosts[name] = (document, entry, content.defaults, defaults)
            if entry.local and entry.address:
                self._problems.append(
                    document.problem(("hosts", name, "address"), "stands beside local: true; keep one")
                )
            for index, group in enumerate(entry.groups):
                if not re.match(NAME, group):
                    self._problems.append(
                        document.problem(("hosts", name, "groups", index), f"should be a plain name, not {group!r}")
                    )

    def _name_ok(self, document: Document, kind: str, name: str, earlier: Document | None) -> bool:
        if not re.match(NAME, name):
            self._problems.append(
                document.problem((kind, name), "should be a plain name: letters, digits, dot, dash, underscore")
            )
        elif earlier:
            self._problems.append(document.problem((kind, name), f"is already in {earlier.path}; rename one"))
        else:
            return True
        return False

    def _layer(self, what: str, document: Document, said: Placed, at: tuple[str, ...]) -> Layer:
        return layer(f"{what} ({shown(document.path, self._home)})", said, document, at, self._problems)

    def _host(self, name: str, document: Document, entry: HostEntry, weakest_first: list[Placed]) -> Host:
        ssh: dict[str, Any] = {}
        for placed in weakest_first:
            ssh.update({key: getattr(placed.ssh, key) for key in placed.ssh.model_fields_set} if placed.ssh else {})
        simulate: dict[str, Any] = {}
        for placed in weakest_first:
            simulate.update(
                {key: getattr(placed.simulate, key) for key in placed.simulate.model_fields_set}
                if placed.simulate
                else {}
            )
        simulated = any(placed.simulate is not None for placed in weakest_first)
        gpus: list[Gpu] = []
        for gpu in _strongest(weakest_first, lambda placed: placed.gpus) or ():
            for _ in range(gpu.count):
                index = (
                    gpu.index
                    if gpu.index is not None and gpu.count == 1
                    else (gpus[-1].index + 1 if gpus else gpu.index or 0)
                )
                gpus.append(Gpu(index, gpu.name, gpu.memory_gb))
        if simulated and not gpus:
            played = Simulate(**simulate)
            gpus.append(Gpu(0, played.gpu_name, played.gpu_memory_gb))
        return Host(
            name=name,
            address=None if entry.local else entry.address or name,
            user=_strongest(weakest_first, lambda placed: placed.user),
            port=_strongest(weakest_first, lambda placed: placed.port),
            local=entry.local,
            ssh=SshOptions(**ssh),
            groups=tuple(entry.groups),
            gpus=tuple(gpus),
            simulate=Simulate(**simulate) if simulated else None,
            source=document.path,
        )


def _strongest(weakest_first: Sequence[Placed], said: Callable[[Placed], T | None]) -> T | None:
    """What the strongest layer says that says anything."""
    return next((value for placed in reversed(weakest_first) if (value := said(placed)) is not None), None)


def shown(path: Path, home: Path) -> str:
    """A file as a layer's label names it: relative to the home, `shipped …` for ours, else in full."""
    shipped = bundled("inventories")
    if path.is_relative_to(home):
        return str(path.relative_to(home))
    return f"shipped {path.relative_to(shipped.parent)}" if path.is_relative_to(shipped) else str(path)
