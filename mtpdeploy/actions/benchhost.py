"""`bench` on a deployed service: proves who answers, then sends the load beside the server or from here through a tunnel."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mtpdeploy.actions.bench import Keeper, Wish, measured, point_specs
from mtpdeploy.actions.reach import targets
from mtpdeploy.actions.report import BenchAnswer
from mtpdeploy.agent.protocol import BenchPullRequest, BenchRequest, StatusRequest
from mtpdeploy.bench.target import Target
from mtpdeploy.bench.values import RunSpec
from mtpdeploy.bench.wire import dump
from mtpdeploy.errors import LineCut, NotFound, NotOurs, NotReady, RemoteError, UsageError
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.hosts.fanout import on_hosts
from mtpdeploy.hosts.transport import Transport, connect
from mtpdeploy.inventory.values import Deployment, Host
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
    chosen = targets(home, host, inventory, profile=profile, sets=sets)
    by_name = {target.name: target.deployment for target in chosen}

    def one(each: Host) -> BenchAnswer:
        return at_host(home, talk, wish, by_name[each.name], place=place, key=key)

    return on_hosts([target.host for target in chosen], one)


def at_host(
    home: Path,
    talk: Talk,
    wish: Wish,
    deployment: Deployment,
    *,
    place: str = "host",
    key: Secret | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> BenchAnswer:
    """Measures the running service of `deployment`. NotOurs, NotReady or NotFound if that is not what answers."""
    name = deployment.host.name
    with connect(deployment.host) as transport:
        agent = _agent(transport, deployment)
        talk.stage("bench", f"{name}: who answers?")
        status = agent.call("status", StatusRequest(generate=False, log_tail_bytes=0))
        check(name, deployment, status)
        url = str(status["url"])
        server = Target.read_server_info(status.get("server_info") or {})
        asked = wish.complete(server)
        told = {**_provenance(deployment, status), **(provenance or {})}
        meta = {"host": name, "profile": status.get("profile") or deployment.profile}
        expect = {"launch_id": status.get("launch_id"), "boot": status.get("boot")}
        if place == "here":
            tunnel = transport.forward(urlsplit(url).port or 80)
            try:
                return measured(
                    home, talk, wish, asked, f"http://127.0.0.1:{tunnel.port}", key or deployment.api_key,
                    meta=meta, provenance={**told, "client_place": "here"}, expect=expect,
                )  # fmt: skip
            finally:
                tunnel.close()
        spec = replace(wish.spec, url=url, points=point_specs(asked), expect={**expect, "pid": status.get("main_pid")})
        keeper = Keeper(home, talk, wish, asked, spec, meta, {**told, "client_place": "host"})
        return _beside(agent, deployment, keeper, spec, server)


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


def _beside(
    agent: AgentClient, deployment: Deployment, keeper: Keeper, spec: RunSpec, server: Mapping[str, Any]
) -> BenchAnswer:
    """The client runs at the host and goes on if the line is cut; its events are taken up where they were left."""
    remote = f"bench-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    keeper.begin(server, remote)
    request = BenchRequest(
        run_id=remote,
        python=deployment.python,
        env={name: value for name, value in deployment.env.items() if isinstance(value, str)},
        spec=dump(spec),
        detach=True,
    )
    return _follow(agent, keeper, request)


def _follow(agent: AgentClient, keeper: Keeper, request: BenchRequest) -> BenchAnswer:
    """Takes events until the client at the host has ended; a cut line is mended a few times."""
    remote = request["run_id"]

    def take(event: Mapping[str, Any]) -> None:
        if event.get("event") == "bench":
            keeper.seen = max(keeper.seen, int(event.get("line") or 0))
            keeper.take(event.get("data") or {})

    tries = 0
    while True:
        try:
            result = agent.call("bench", request, on_event=take)
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
            _hang_up(agent, remote)
        request = BenchRequest(run_id=remote, attach_only=True, detach=True, from_line=keeper.seen)
    if keeper.failure is not None:
        keeper.fail(str(keeper.failure.details.get("kind", "error")), keeper.failure.message)
        raise keeper.failure
    if not result.get("finished"):
        log = [str(line) for line in result.get("client_log") or ()]
        keeper.fail("client", "the client at the host ended early")
        raise RemoteError(
            f"{agent.transport.host.name}: the benchmark's client ended early", evidence=log,
            next_commands=[f"mtpdeploy bench --from here --host {agent.transport.host.name}"],
        )  # fmt: skip
    answer = keeper.finish()
    with contextlib.suppress(RemoteError):  # the records are here; what is left there is only their copy
        agent.call("bench-pull", BenchPullRequest(run_id=remote, remove=True))
    return answer


def _hang_up(agent: AgentClient, remote: str) -> None:
    """Asks the agent to end the load: it does so when a caller that does not detach goes away."""

    def leave(event: Mapping[str, Any]) -> None:
        raise _HungUp

    with contextlib.suppress(_HungUp):
        agent.call("bench", BenchRequest(run_id=remote, attach_only=True, detach=False, from_line=0), on_event=leave)


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
    with connect(target.host) as transport:
        agent = _agent(transport, target.deployment)
        return _follow(agent, keeper, BenchRequest(run_id=remote, attach_only=True, detach=True, from_line=keeper.seen))


def _agent(transport: Transport, deployment: Deployment) -> AgentClient:
    return AgentClient(transport, workdir=deployment.workdir, service=deployment.service, python=deployment.python)
