"""Who answers at a host, under which conditions, and whether it is still the same one after a point."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mtpdeploy.actions.bench import identity
from mtpdeploy.actions.reach import Target
from mtpdeploy.agent.protocol import BenchPullRequest, BenchRequest, StatusRequest
from mtpdeploy.bench.values import RunSpec
from mtpdeploy.errors import MtpError, NotFound, NotOurs, NotReady, RemoteError, UsageError
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.inventory.values import Deployment
from mtpdeploy.progress import Talk
from mtpdeploy.secret import Secret
from mtpdeploy.sglang.masking import mask_values
from mtpdeploy.store import Store

LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
    def proven(self) -> dict[str, Any]:
        """The launch and its process, to be compared with what is proven after a point."""
        return _proven(self.status)

    def witness(self) -> Mapping[str, Any]:
        """Proves again who answers, for a client that does not run beside the server and cannot look for itself."""
        try:
            return _proven(self.client.call("status", StatusRequest(generate=False, log_tail_bytes=0)))
        except MtpError as exc:
            return {"unproven": exc.message}

    def seen_from(self, other: str) -> str:
        """The server's URL for a client at another host. UsageError if nothing but its own host can reach it."""
        parts = urlsplit(self.url)
        release = self.status.get("release") or {}
        bound = str(release.get("host") or parts.hostname)
        if bound in LOOPBACK:
            raise UsageError(
                f"--from {other}: the server at {self.target.name} listens on {bound} only, which no other host reaches",
                next_commands=[
                    f"mtpdeploy deploy --host {self.target.name} --profile {self.target.profile or 'PROFILE'} --set args.host=0.0.0.0",
                    f"mtpdeploy bench --host {self.target.name} --from here",
                ],
            )
        if bound in ("0.0.0.0", "::", ""):
            if self.target.host.local:
                raise UsageError(
                    f"--from {other}: {self.target.name} is this machine, and has no address in the inventory"
                )
            from mtpdeploy.hosts.sshconfig import resolve

            bound = resolve(self.target.host).hostname
        return f"http://[{bound}]:{parts.port}" if ":" in bound else f"http://{bound}:{parts.port}"

    def look(self) -> dict[str, Any]:
        """Versions, CUDA and the model's hash at the server's host, where the client does not run. {} if it cannot be asked."""
        told: dict[str, Any] = {}
        remote = remote_name()

        def take(event: Mapping[str, Any]) -> None:
            data = event.get("data") or {}
            if data.get("what") == "surroundings":
                told.update({key: value for key, value in data.items() if key != "what"})

        asked = {"look": {"model_path": self.server.get("model_path")}}
        with contextlib.suppress(MtpError):
            self.client.call("bench", start(self, asked, remote), on_event=take)
            self.client.call("bench-pull", BenchPullRequest(run_id=remote, remove=True))
        return told

    @property
    def meta(self) -> dict[str, Any]:
        return {"host": self.target.name, "profile": self.status.get("profile") or self.target.profile}

    @property
    def provenance(self) -> dict[str, Any]:
        return _provenance(self.target.deployment, self.status) | {"effective_args": self.server.get("effective_args")}

    def spec(self, spec: RunSpec) -> RunSpec:
        """For a client beside the server: it can also watch the process itself."""
        return replace(spec, url=self.url, expect={**self.expect, "pid": self.status.get("main_pid")})


@contextlib.contextmanager
def tunnel(client: AgentClient, url: str) -> Iterator[str]:
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
        with tunnel(client, str(status["url"])) as url:
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
        "proof": [one.get("check") for one in status.get("proof") or () if one.get("holds")],
        "args": release.get("args") or {},
        "env": mask_values(
            {
                name: value
                for name, value in (release.get("env") or {}).items()
                if name.startswith(("SGLANG_", "SGL_", "CUDA_", "TORCH", "NCCL_"))
            }
        ),
        "simulated": status.get("simulated"),
        "simulated_clock": deployment.host.simulate.clock if deployment.host.simulate else None,
    }


def _proven(status: Mapping[str, Any]) -> dict[str, Any]:
    told = {
        "launch_id": status.get("launch_id"),
        "boot": status.get("boot"),
        "pid": status.get("main_pid"),
        "started": status.get("since_utc"),
    }
    if status.get("identity") != "ours":
        told["gone"] = (
            f"what answers is not the recorded launch ({status.get('word')}): {status.get('why') or 'no reason given'}"
        )
    return told


def remote_name() -> str:
    """Name of a run's folder at its host."""
    return f"bench-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def start(service: Service, spec: Mapping[str, Any], remote: str) -> BenchRequest:
    """What starts the client at the server's host. It goes on if the line is cut; its events are taken up where they were left."""
    return BenchRequest(
        run_id=remote,
        python=service.target.deployment.python,
        env=service.target.probe_env,
        spec=dict(spec),
        detach=True,
    )


def nonce(home: Path, launch_id: object, boot: object, seed: int) -> str | None:
    """What begins the salts of a run's prompts: the same for the n-th benchmark of every launch, so that what two launches
    answer to the same request can be compared, and another for each benchmark of one launch, whose cache may hold the last one's.

    None (drawn by the client) where the launch is not known. Homes differ, since they don't know of each other's runs.
    """
    if not isinstance(launch_id, str):
        return None
    store, before = Store(home), 0
    for row in store.runs(kind="bench"):
        if row.id.replace("-", "T", 1) < launch_id[: len("20260101T000000")]:
            break  # older than the launch
        if (launch_id, boot) in _launches(store, row.id):
            before += 1
    told = f"{socket.gethostname()} {home.resolve()} {seed} {before}"
    return hashlib.sha256(told.encode()).hexdigest()[:6]


def _launches(store: Store, run_id: str) -> set[tuple[object, object]]:
    try:
        meta = store.run(run_id).meta
    except MtpError:
        return set()
    arms = meta.get("arms")
    told = [meta.get("provenance"), *(arms.values() if isinstance(arms, Mapping) else ())]
    return {(one.get("launch_id"), one.get("boot")) for one in told if isinstance(one, Mapping)}
