"""A deploy that changed nothing is remembered, so that the same words need no planning the next time to find that out again.

What a first exec asks of a host (the fingerprint of the plan, and where to look) follows from files and options alone. As long as
every one of them is as it was, the same question can be asked without reading them as YAML, validating and planning: that is half
of the time of an unchanged deploy. The answer comes from the host as always, and only `unchanged` is taken; anything else, and any
doubt, goes the whole way.

Inputs (see `state`): the options, this program's own files, the home's inventories/ and templates/, the --inventory files, what is
known of the hosts (runs/hosts/*.json), the variables HOME and MTPDEPLOY_*. Nothing is remembered of a deploy that reads anything
else: a secret, a model_config, a profile by its path, a rehearsal on this machine. runs/hosts/.planned.json holds no secret.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpdeploy import __version__
from mtpdeploy.actions.deploy import Deployed
from mtpdeploy.agent.protocol import DeployRequest
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.hosts.fanout import Outcomes, on_hosts
from mtpdeploy.hosts.ssh import SshTransport
from mtpdeploy.inventory.values import Host, SshOptions
from mtpdeploy.progress import Talk
from mtpdeploy.resources import PACKAGE, bundled

if TYPE_CHECKING:
    from mtpdeploy.actions.reach import Target

_KEPT = 32  # different deploys of one home
_MOST_BYTES = 16 * 1024 * 1024  # inputs larger than this are not hashed, and so nothing is remembered


class Recall:
    """What is remembered of one deploy's words. `key`: the words; `now`: the state of all that they are read with, None if too large."""

    def __init__(
        self,
        home: Path,
        *,
        host: str | None,
        profile: str | None,
        inventory: Sequence[str],
        sets: Sequence[str],
        overrides: Mapping[str, object],
    ) -> None:
        self.home = home
        # Without --host or --profile the last deploy decides: that changes by itself.
        self.possible = host is not None and profile is not None and "/" not in profile and not profile.endswith(_FILES)
        words = [host, profile, [os.path.abspath(path) for path in inventory], list(sets), overrides]
        self.key = hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()
        self.now = state(home, inventory) if self.possible else None
        self._file = home / "runs" / "hosts" / ".planned.json"

    def unchanged(self, talk: Talk) -> Deployed | Outcomes[Deployed] | None:
        """The answer if every host says that nothing has to change; None if the whole way has to be gone.

        Raises what a host's connection and agent raise, as the whole way would. Nothing is changed at a host.
        """
        held = self._read().get(self.key)
        if self.now is None or not isinstance(held, dict) or held.get("state") != self.now:
            return None
        try:
            asked = {each["host"]["name"]: each for each in held["hosts"]}
            hosts = [_host(each["host"]) for each in held["hosts"]]
        except (KeyError, TypeError):
            return None
        began = time.monotonic()

        def one(host: Host) -> Deployed | _Otherwise:
            return _ask(self.home, talk, host, asked[host.name], began)

        answer = on_hosts(hosts, one)
        said = answer.by_host if isinstance(answer, Outcomes) else dict.fromkeys(asked, answer)
        if any(isinstance(each, _Otherwise) for each in said.values()):
            return None
        return answer  # type: ignore[return-value]

    def keep(self, found: Sequence[tuple[Target, DeployRequest, Sequence[str]]]) -> None:
        """Remembers a deploy that found everything unchanged. A failure to write does not matter."""
        if self.now is None or not all(_plain(self.home, target) for target, _, _ in found):
            return
        hosts = [
            {
                "host": _connection(target.host),
                "service": target.deployment.service,
                "workdir": target.deployment.workdir,
                "python": target.deployment.python,
                "profile": target.profile,
                "request": dict(request),
                "notes": list(notes),
            }
            for target, request, notes in found
        ]
        known = {key: value for key, value in self._read().items() if key != self.key}
        kept = dict([*known.items()][1 - _KEPT :]) | {self.key: {"state": self.now, "hosts": hosts}}
        aside = self._file.with_name(f".planned.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(kept))
            aside.replace(self._file)

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return known if isinstance(known, dict) else {}


_FILES = (".yml", ".yaml")


class _Otherwise:
    """A host that has something to do, or is not through."""

    def as_json(self) -> dict[str, Any]:
        return {}


def _ask(home: Path, talk: Talk, host: Host, held: Mapping[str, Any], began: float) -> Deployed | _Otherwise:
    talk.stage(host.name, "asking what runs there")

    def tell(event: Mapping[str, Any]) -> None:
        if event["event"] == "note":
            talk.note(f"{host.name}: {event['text']}")

    with SshTransport(host) as transport:
        transport.begin()
        from mtpdeploy.store import Store  # while the connection is made

        client = AgentClient(transport, workdir=held["workdir"], service=held["service"], python=held["python"])
        result = client.call("deploy", held["request"], on_event=tell)
        if result["outcome"] != "unchanged":
            transport.leave()
            return _Otherwise()
    Store(home).set_last_deployed(host.name, held["profile"], result["launch_id"])
    talk.done(host.name, f"unchanged: launch {result['launch_id']} is {result['status']['word']}")
    return Deployed(
        host=host.name,
        service=held["service"],
        profile=held["profile"],
        outcome="unchanged",
        launch_id=str(result["launch_id"]),
        result=result,
        status=result["status"],
        summary=None,
        seconds=time.monotonic() - began,
        run_id=None,
        notes=tuple(held["notes"]),
    )


def _connection(host: Host) -> dict[str, Any]:
    """What a connection needs of a host."""
    return {
        "name": host.name,
        "address": host.address,
        "user": host.user,
        "port": host.port,
        "ssh": asdict(host.ssh),
    }


def _host(said: Mapping[str, Any]) -> Host:
    return Host(**{**said, "ssh": SshOptions(**said["ssh"])})


def _plain(home: Path, target: Target) -> bool:
    """Whether the deployment follows from the inputs of `state` alone, and may be written down."""
    from mtpdeploy.inventory import load_profile
    from mtpdeploy.secret import Secret
    from mtpdeploy.sglang.masking import is_secret

    seen: set[str] = set()
    name = target.profile
    while name is not None and name not in seen:  # a profile may build on the shipped one of its own name
        if "/" in name or name.endswith(_FILES):
            return False
        seen.add(name)
        name = load_profile(home, name).extends
    d = target.deployment
    secret = d.api_key is not None or any(is_secret(name) or isinstance(value, Secret) for name, value in d.env.items())
    return not target.host.local and d.model_config is None and not secret


# ---------------------------------------------------------------- the inputs


def state(home: Path, inventory: Sequence[str]) -> str | None:
    """A hash over everything that a plan is made from; None if that is too much to read, or cannot be."""
    try:
        return _state(home, inventory)
    except OSError:
        return None


def _state(home: Path, inventory: Sequence[str]) -> str | None:
    hashed, size = hashlib.sha256(), 0
    environ = {name: value for name, value in os.environ.items() if name == "HOME" or name.startswith("MTPDEPLOY_")}
    hashed.update(json.dumps([__version__, sys.version, str(home.absolute()), sorted(environ.items())]).encode())
    for folder in dict.fromkeys((PACKAGE, bundled("templates"), bundled("inventories"))):
        for entry in _walk(str(folder)):
            found = entry.stat()
            hashed.update(f"\n{entry.path} {found.st_size} {found.st_mtime_ns} {found.st_ino}".encode(*_ODD))
    facts = home / "runs" / "hosts"
    known = sorted(facts.glob("[!.]*.json")) if facts.is_dir() else []
    own = [entry.path for name in ("inventories", "templates") for entry in _walk(str(home / name))]
    for path in [*own, *(os.path.expanduser(each) for each in inventory), *map(str, known)]:
        data = Path(path).read_bytes()
        size += len(data)
        if size > _MOST_BYTES:
            return None
        hashed.update(f"\n{path} {len(data)}\n".encode(*_ODD) + data)
    return hashed.hexdigest()


_DEEPEST = 12
_ODD = ("utf-8", "surrogateescape")  # file names need not be text


def _walk(folder: str, depth: int = 0) -> Iterator[os.DirEntry[str]]:
    """All files below, in a fixed order, without compiled ones. OSError for a folder that goes on without end."""
    if depth > _DEEPEST:
        raise OSError(errno.ELOOP, "too many folders in one another", folder)
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _walk(entry.path, depth + 1)
        elif entry.is_file():
            yield entry
