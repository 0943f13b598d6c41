"""`bench` on a deployed service: the load is sent beside the server, from another host, or from here through a tunnel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtpdeploy.actions import serverlog
from mtpdeploy.actions.bench import Keeper, Wish, measured, point_specs
from mtpdeploy.actions.benchservice import Service, nonce, remote_name, running, start, tunnel
from mtpdeploy.actions.reach import Target, agent, targets
from mtpdeploy.actions.report import BenchAnswer
from mtpdeploy.agent.protocol import BenchPullRequest, BenchRequest
from mtpdeploy.bench.wire import dump
from mtpdeploy.errors import LineCut, NotFound, RemoteError, UsageError
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.hosts.fanout import on_hosts
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
    """A BenchAnswer; of several hosts one each. `place`: host, here, or the name of another host, where the client runs."""
    found = targets(home, host, inventory, profile=profile, sets=sets, reveal=place != "host")
    by_name = {target.name: target for target in found}
    client = None
    if place in by_name and len(found) == 1:
        place = "host"
    elif place not in ("host", "here"):
        client = _client_host(home, place, inventory, [target.name for target in found])
    return on_hosts(
        [target.host for target in found],
        lambda one: at_host(home, talk, wish, by_name[one.name], place=place, key=key, client=client),
    )


def _client_host(home: Path, name: str, inventory: Sequence[str], servers: Sequence[str]) -> Target:
    """The host that --from names: one of the inventory, and one that serves none of what is measured."""
    try:
        found = targets(home, name, inventory)
    except NotFound as exc:
        raise UsageError(
            f"--from {name}: should be `host` (beside the server), `here`, or a host of the inventory: {exc.message}",
            next_commands=["mtpdeploy hosts"],
        ) from exc
    if len(found) != 1:
        raise UsageError(f"--from {name}: should be one host, and is {', '.join(one.name for one in found)}")
    if found[0].name in servers:
        raise UsageError(
            f"--from {name}: it is one of the servers, whose own load would disturb the others' measurement"
        )
    return found[0]


def at_host(
    home: Path,
    talk: Talk,
    wish: Wish,
    target: Target,
    *,
    place: str = "host",
    key: Secret | None = None,
    client: Target | None = None,
) -> BenchAnswer:
    """Measures the running service of `target`. NotOurs, NotReady or NotFound if that is not what answers."""
    with agent(target) as at_server:
        service = running(talk, target, at_server, key)
        asked = wish.complete(service.server)
        launch = nonce(home, service.status.get("launch_id"), service.status.get("boot"), asked.seed)
        wish = replace(wish, spec=replace(wish.spec, nonce=launch))
        provenance = {**service.provenance, "client_place": place}
        if place == "host":
            spec = service.spec(replace(wish.spec, points=point_specs(asked)))
            keeper = Keeper(home, talk, wish, asked, spec, service.meta, provenance)
            remote = remote_name()
            keeper.begin(service.server, remote)
            take_all(at_server, keeper, start(service, dump(spec), remote))
            with contextlib.suppress(RemoteError):  # the figures stand without it
                serverlog.keep(at_server, keeper.made)
            return keeper.finish()
        if place == "here":
            with tunnel(at_server, service.url) as url:
                return measured(
                    home, talk, wish, asked, url, service.key,
                    meta=service.meta, provenance=provenance, expect=service.expect, service=service,
                )  # fmt: skip
        assert client is not None
        return _from_host(home, talk, wish, asked, service, client, provenance)


def _from_host(
    home: Path,
    talk: Talk,
    wish: Wish,
    asked: Any,
    service: Service,
    client: Target,
    provenance: Mapping[str, Any],
) -> BenchAnswer:
    """The client runs at a third machine, in that host's Python, and reaches the server over the network between them."""
    url = service.seen_from(client.name)
    spec = replace(wish.spec, points=point_specs(asked), url=url, expect=service.expect, gpu_samples=False)
    keeper = Keeper(home, talk, wish, asked, spec, service.meta, {**provenance, "endpoint": url})
    keeper.prove_by(service.witness, service.proven)
    remote = remote_name()
    with agent(client) as at_client:
        keeper.begin(service.server, remote, client=client.name)
        keeper.stand_beside(service.look())
        request = BenchRequest(
            run_id=remote,
            python=client.deployment.python,
            env=client.probe_env,
            spec=dump(spec),
            detach=True,
            api_key=service.key.reveal() if service.key else "",
        )
        take_all(at_client, keeper, request)
    return keeper.finish()


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
    if meta.get("arms"):
        raise UsageError(
            f"run {run.id} has several arms, whose turns its own command deploys: what was measured is kept",
            next_commands=[f"mtpdeploy report {run.id}"],
        )
    away = meta.get("remote_host")
    profile = meta.get("profile")
    where = away if isinstance(away, str) else host
    (target,) = targets(home, where, inventory, profile=profile if isinstance(profile, str) and where == host else None)
    run.reopen()
    keeper = Keeper.of(home, talk, run, seen if isinstance(seen, int) else 0)
    with agent(target) as client:
        take_all(client, keeper, BenchRequest(run_id=remote, attach_only=True, detach=True, from_line=keeper.seen))
    return keeper.finish()
