"""From `--host`, `--profile` and `--set` to the agent of a service at a host: what every launch verb begins with."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtpdeploy import inventory as inventories
from mtpdeploy.errors import HostKeyRefused, HostUnreachable, LineCut, MtpError
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.hosts.transport import connect
from mtpdeploy.inventory.values import Deployment, Host
from mtpdeploy.secret import Secret
from mtpdeploy.store import Store

RECONNECT_S = 120.0  # how long a watched launch is looked for again after the line was cut
_AGAIN_S = 0.2  # before the first new attempt; later ones wait longer


@dataclass(frozen=True, slots=True)
class Target:
    """A service at a host. profile: None where none was named and none was deployed from here."""

    host: Host
    deployment: Deployment
    profile: str | None

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def probe_env(self) -> dict[str, str]:
        """The variables that decide which SGLang and nvidia-smi are found; no secret among them."""
        wanted = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME", "HF_HUB_CACHE", "CUDA_VISIBLE_DEVICES")
        env = self.deployment.env
        return {name: value for name in wanted if isinstance(value := env.get(name), str)}


def targets(
    home: Path,
    host: str | None,
    inventory: Sequence[str],
    *,
    profile: str | None = None,
    sets: Sequence[str] = (),
    overrides: Mapping[str, object] | None = None,
    reveal: bool = False,
) -> tuple[Target, ...]:
    """The services that the options mean. Without `profile`, each host's last deployed one (it may name service or folder).

    Raises ConfigError, UsageError, NotFound; opens no connection.
    """
    known = inventories.load(home, inventory)
    store = Store(home)
    last = store.last_deployed()
    return tuple(
        _target(home, known, store, each, profile, sets, overrides or {}, reveal)
        for each in known.choose(host, last.host if last else None)
    )


def _target(
    home: Path,
    known: inventories.Inventory,
    store: Store,
    host: Host,
    profile: str | None,
    sets: Sequence[str],
    overrides: Mapping[str, object],
    reveal: bool,
) -> Target:
    last = store.last_deployed(host.name)
    named = profile or (last.profile if last else None)
    try:
        deployment = inventories.resolve(known, host, named, sets, overrides, reveal=reveal)
    except MtpError:
        if profile is not None:
            raise
        # The last deploy's profile is gone; the host's own record still says what runs.
        deployment, named = inventories.resolve(known, host, None, sets, overrides, reveal=reveal), None
    return Target(host, _rehearsed(home, host, deployment), named)


def _rehearsed(home: Path, host: Host, deployment: Deployment) -> Deployment:
    """On this machine's simulated host, the deployment with the simulator in front of everything else."""
    if host.simulate is None or not host.local:
        return deployment
    from mtpdeploy import sim

    python = sys.executable if deployment.python in ("python", "python3") else os.path.expanduser(deployment.python)
    shim = sim.install(home / "runs" / "simulated" / host.name, host.simulate, python)
    env: dict[str, str | Secret] = {**deployment.env, **shim}
    return replace(deployment, python=python, env=env)


@contextlib.contextmanager
def agent(target: Target) -> Iterator[AgentClient]:
    """The agent at the host, over a connection of its own."""
    with connect(target.host) as transport:
        d = target.deployment
        yield AgentClient(transport, workdir=d.workdir, service=d.service, python=d.python)


def again_after_cuts(work: Callable[[AgentClient], Any], target: Target, told: Callable[[str], None]) -> Any:
    """Runs `work`, which changes nothing at the host, and once more with a new connection whenever the line is cut.

    `work` keeps its own place (a log's offset, a line number), so nothing is lost or seen twice. Gives up RECONNECT_S after
    the last cut; an unknown host key is never retried.
    """
    last_progress = time.monotonic()

    def worth_it(error: BaseException) -> bool:
        cut = isinstance(error, (LineCut, HostUnreachable)) and not isinstance(error, HostKeyRefused)
        return cut and time.monotonic() - last_progress < RECONNECT_S

    def attempt() -> Any:
        nonlocal last_progress
        with agent(target) as client:
            last_progress = time.monotonic()
            try:
                return work(client)
            except LineCut:
                last_progress = time.monotonic()
                raise

    try:
        return attempt()
    except (LineCut, HostUnreachable) as error:
        if not worth_it(error):
            raise
    from tenacity import RetryCallState, Retrying, retry_if_exception, wait_exponential_jitter

    def say(_state: RetryCallState | None = None) -> None:
        told("the line was cut; connecting again")

    say()
    time.sleep(_AGAIN_S)
    waiting = wait_exponential_jitter(multiplier=_AGAIN_S, max=5, min=_AGAIN_S)
    return Retrying(retry=retry_if_exception(worth_it), wait=waiting, before_sleep=say, reraise=True)(attempt)


def keep_facts(home: Path, host: Host, facts: Mapping[str, Any]) -> None:
    """Remembers what was read from the host, for plans that open no connection. A failure to write does not matter."""
    folder = home / "runs" / "hosts"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{host.name}.{os.getpid()}"
        aside.write_text(json.dumps({"facts": facts}, indent=1))
        aside.replace(folder / f"{host.name}.json")


def ask_sudo_password(wanted: bool) -> str | None:
    """Asked once at the terminal, kept in memory only."""
    if not wanted:
        return None
    import getpass

    return getpass.getpass("sudo password at the host(s): ")
