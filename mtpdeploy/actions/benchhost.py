"""`bench` on a deployed service: proves who answers, then sends the load beside the server or from here through a tunnel."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mtpdeploy.actions.bench import Keeper, Wish, identity, measured, point_specs
from mtpdeploy.actions.reach import Target, agent, targets
from mtpdeploy.actions.report import BenchAnswer
from mtpdeploy.agent.protocol import BenchPullRequest, BenchRequest, StatusRequest
from mtpdeploy.bench.values import RunSpec
from mtpdeploy.bench.wire import dump
from mtpdeploy.errors import LineCut, NotFound, NotOurs, NotReady, RemoteError, UsageError
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.hosts.fanout import on_hosts
from mtpdeploy.inventory.values import Deployment
from mtpdeploy.progress import Talk
from mtpdeploy.secret import Secret
from mtpdeploy.store import Store

REATTACH_TIMES = 5
REATTACH_EVERY_S = 2.0


class _HungUp(Exception):
    """Ends a call from inside: the agent sees the line close and stops the load."""


def at_hosts(
    home: Path,
    talk: Talk,
    wish: Wish,
    *,
    host: str | None,
    profile: str | None,
    inventory: Sequence[str],
    sets: Sequence[str],
    place: str,
    key: Secret | None,
) -> Any:
    """A BenchAnswer; of several hosts one each."""
    found = targets(home, host, inventory, profile=profile, sets=sets, reveal=place == "here")
    by_name = {target.name: target for target in found}
    return on_hosts(
        [target.host for target in found],
        lambda one: at_host(home, talk, wish, by_name[one.name], place=place, key=key),
    )


def at_host(
    home: Path,
    talk: Talk,
    wish: Wish,
    target: Target,
    *,
    place: str = "host",
    key: Secret | None = None,
) -> BenchAnswer:
    """Measures the running service of `target`. NotOurs, NotReady or NotFound if that is not what answers."""
    with agent(target) as client:
        service = running(talk, target, client, key)
        asked = wish.complete(service.server)
        if place == "here":
            with _tunnel(client, service.url) as url:
                return measured(
                    home, talk, wish, asked, url, service.key,
                    meta=service.meta, provenance={**service.provenance, "client_place": "here"}, expect=service.expect,
                )  # fmt: skip
        spec = service.spec(replace(wish.spec, points=point_specs(asked)))
        keeper = Keeper(home, talk, wish, asked, spec, service.meta, {**service.provenance, "client_place": "host"})
        remote = remote_name()
        keeper.begin(service.server, remote)
        take_all(client, keeper, start(service, spec, remote))
        return keeper.finish()


@dataclass(frozen=True, slots=True)
class Service:
    """A launch that was proven to be the one that answers."""

    target: Target
    client: AgentClient
    status: Mapping[str, Any]
    server: Mapping[str, Any]
    key: Secret | None

    @property
    def url(self) -> str:
        """As the host sees it."""
        return str(self.status["url"])

    @property
    def expect(self) -> dict[str, Any]:
        """What must hold during the whole run."""
        return {"launch_id": self.status.get("launch_id"), "boot": self.status.get("boot")}

    @property
    def meta(self) -> dict[str, Any]:
        return {"host": self.target.name, "profile": self.status.get("profile") or self.target.profile}

    @property
    def provenance(self) -> dict[str, Any]:
        return _provenance(self.target.deployment, self.status)

    def spec(self, spec: RunSpec) -> RunSpec:
        """For a client beside the server: it can also watch the process itself."""
        return replace(spec, url=self.url, expect={**self.expect, "pid": self.status.get("main_pid")})


@contextlib.contextmanager
def _tunnel(client: AgentClient, url: str) -> Iterator[str]:
    """The service's URL as it is reachable from here."""
    forward = client.transport.forward(urlsplit(url).port or 80)
    try:
        yield f"http://127.0.0.1:{forward.port}"
    finally:
        forward.close()


def running(talk: Talk, target: Target, client: AgentClient, key: Secret | None = None) -> Service:
    """Who answers, and its limits by its own word."""
    talk.stage("bench", f"{target.name}: who answers?")
    status = client.call("status", StatusRequest(generate=False, log_tail_bytes=0))
    check(target.name, target.deployment, status)
    secret = key or target.deployment.api_key
    try:
        with _tunnel(client, str(status["url"])) as url:
            server = identity(url, secret)
    except RemoteError:  # a key that only the host knows: the client there has it, and says more later
        server = {"kind": "sglang"}
    return Service(target, client, status, server, secret)


def check(name: str, deployment: Deployment, status: Mapping[str, Any]) -> None:
    """Only the launch that was recorded is measured: a stale or foreign server would give somebody else's numbers."""
    word, why = status.get("word"), status.get("why") or ""
    again = [f"mtpdeploy status --host {name}"]
    if word in ("ready", "degraded") and status.get("url"):
        return
    if word == "starting":
        raise NotReady(f"{name}: {deployment.service} is still starting: {why}", next_commands=again)
    if word == "stale":
        raise NotOurs(
            f"{name}: what answers is not the launch that was recorded: {why}", next_commands=again,
            runbook="a-stale-server-answers",
        )  # fmt: skip
    deploy = f"mtpdeploy deploy --host {name} --profile {deployment.profile or 'PROFILE'}"
    if word == "not deployed":
        raise NotFound(f"{name}: {deployment.service} is not deployed here", next_commands=[deploy])
    raise RemoteError(f"{name}: {deployment.service} is {word}: {why}", next_commands=[*again, deploy])


def _provenance(deployment: Deployment, status: Mapping[str, Any]) -> dict[str, Any]:
    release = status.get("release") or {}
    cards = status.get("gpus") or []
    return {
        "host": deployment.host.name,
        "gpu": cards[0].get("name") if cards else None,
        "gpu_count": len(cards) or None,
        "gpu_memory_gb": cards[0].get("memory_gb") if cards else None,
        "driver": cards[0].get("driver") if cards else None,
        "sglang_version": status.get("sglang_version"),
        "model": release.get("served_model_name") or release.get("model_path"),
        "profile": status.get("profile"),
        "service": deployment.service,
        "launch_id": status.get("launch_id"),
        "boot": status.get("boot"),
        "args": release.get("args") or {},
        "env": {
            name: value
            for name, value in (release.get("env") or {}).items()
            if name.startswith(("SGLANG_", "SGL_", "CUDA_", "TORCH", "NCCL_"))
        },
        "simulated": status.get("simulated"),
        "simulated_clock": deployment.host.simulate.clock if deployment.host.simulate else None,
    }


def remote_name() -> str:
    """Name of a run's folder at its host."""
    return f"bench-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def start(service: Service, spec: RunSpec, remote: str) -> BenchRequest:
    """What starts the client at the host. It goes on if the line is cut; its events are taken up where they were left."""
    return BenchRequest(
        run_id=remote,
        python=service.target.deployment.python,
        env=service.target.probe_env,
        spec=dump(spec),
        detach=True,
    )


def take_all(client: AgentClient, keeper: Keeper, request: BenchRequest) -> None:
    """Takes events until the client at the host has ended; a cut line is mended a few times."""
    remote = request["run_id"]

    def take(event: Mapping[str, Any]) -> None:
        if event.get("event") == "bench":
            keeper.seen = max(keeper.seen, int(event.get("line") or 0))
            keeper.take(event.get("data") or {})

    tries = 0
    while True:
        try:
            result = client.call("bench", request, on_event=take)
            break
        except LineCut as cut:
            tries += 1
            keeper.remember()
            if tries > REATTACH_TIMES:
                cut.next_commands = (f"mtpdeploy bench --attach {keeper.run_id}", *cut.next_commands)
                raise
            keeper.say(
                f"the line was cut; the benchmark goes on at the host; reconnecting ({tries} of {REATTACH_TIMES})"
            )
            time.sleep(REATTACH_EVERY_S)
        except KeyboardInterrupt:
            if keeper.halt.asked:
                raise
            keeper.halt.ask()
            keeper.say("stopping the load at the host; what was measured is kept (Ctrl-C again leaves at once)")
            _hang_up(client, remote)
        request = BenchRequest(run_id=remote, attach_only=True, detach=True, from_line=keeper.seen)
    if keeper.failure is not None:
        keeper.fail(str(keeper.failure.details.get("kind", "error")), keeper.failure.message)
        raise keeper.failure
    if not result.get("finished"):
        log = [str(line) for line in result.get("client_log") or ()]
        keeper.fail("client", "the client at the host ended early")
        raise RemoteError(
            f"{client.transport.host.name}: the benchmark's client ended early", evidence=log,
            next_commands=[f"mtpdeploy bench --from here --host {client.transport.host.name}"],
        )  # fmt: skip
    with contextlib.suppress(RemoteError):  # the records are here; what is left there is only their copy
        client.call("bench-pull", BenchPullRequest(run_id=remote, remove=True))


def _hang_up(client: AgentClient, remote: str) -> None:
    """Asks the agent to end the load: it does so when a caller that does not detach goes away."""

    def leave(event: Mapping[str, Any]) -> None:
        raise _HungUp

    with contextlib.suppress(_HungUp):
        client.call("bench", BenchRequest(run_id=remote, attach_only=True, detach=False, from_line=0), on_event=leave)


def attach(home: Path, talk: Talk, run_id: str, *, inventory: Sequence[str]) -> BenchAnswer:
    """Takes up a benchmark that went on at its host after the line was cut."""
    run = Store(home).run(run_id, kind="bench" if run_id == "last" else None)
    meta = run.meta
    remote, host, seen = meta.get("remote_run"), meta.get("host"), meta.get("seen")
    if not isinstance(remote, str) or not isinstance(host, str):
        raise UsageError(f"run {run.id} did not run beside a server: there is nothing to attach to")
    if run.status == "done":
        raise UsageError(f"run {run.id} is complete", next_commands=[f"mtpdeploy report {run.id}"])
    profile = meta.get("profile")
    (target,) = targets(home, host, inventory, profile=profile if isinstance(profile, str) else None)
    keeper = Keeper.of(home, talk, run, seen if isinstance(seen, int) else 0)
    with agent(target) as client:
        take_all(client, keeper, BenchRequest(run_id=remote, attach_only=True, detach=True, from_line=keeper.seen))
    return keeper.finish()
