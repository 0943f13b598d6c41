"""The verbs on a launch that is there: status, stop, start, restart, rollback, history, prune, adopt, unlock."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from secrets import token_hex
from typing import Any

from mtpdeploy.actions.follow import follow
from mtpdeploy.actions.reach import Target, again_after_cuts, ask_sudo_password, targets
from mtpdeploy.actions.reach import agent as agent_at
from mtpdeploy.agent import protocol
from mtpdeploy.errors import UsageError
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.hosts.fanout import Outcomes, on_hosts
from mtpdeploy.inventory.values import Host
from mtpdeploy.progress import Talk
from mtpdeploy.sglang.logs import Fold, Parser, Progress

_TAIL_BYTES = 256 * 1024
# Exit codes of `status --check`, as the errors of the same meaning have them.
_CHECKED = {
    "ready": 0,
    "starting": 9,
    "degraded": 8,
    "crashed": 8,
    "stale": 10,
    "unknown": 12,
    "stopped": 14,
    "not deployed": 14,
}


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """What one host's agent answered to a verb, with the host's name."""

    host: str
    verb: str
    result: Mapping[str, Any]
    exit_code: int = 0

    def as_json(self) -> dict[str, object]:
        return {"host": self.host, **self.result}


Answers = HostAnswer | Outcomes[HostAnswer]


def _each(chosen: Sequence[Target], work: Callable[[Target], HostAnswer]) -> Answers:
    by_name = {target.name: target for target in chosen}

    def one(host: Host) -> HostAnswer:
        return work(by_name[host.name])

    return on_hosts([target.host for target in chosen], one)


def _tell(target: Target, talk: Talk) -> Callable[[Mapping[str, Any]], None]:
    def told(event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            why = f" ({event['why']})" if event.get("why") else ""
            talk.stage(target.name, f"{event['do']}{why}")
        elif event["event"] == "note":
            talk.note(f"{target.name}: {event['text']}")

    return told


# ---------------------------------------------------------------- status


@dataclass(frozen=True, slots=True)
class Status:
    """The state of one service, with the launch's progress while it starts."""

    host: str
    result: Mapping[str, Any]
    progress: Progress | None
    with_proof: bool
    exit_code: int = 0

    @property
    def phase(self) -> str | None:
        return self.progress.phase if self.progress else None

    def as_json(self) -> dict[str, object]:
        shown = {name: value for name, value in self.result.items() if name != "release"}
        if isinstance(log := shown.get("log"), dict):
            shown["log"] = {name: value for name, value in log.items() if name not in ("tail", "tail_offset")}
        p = self.progress
        return {
            "host": self.host,
            **shown,
            "simulated": bool(self.result.get("simulated")),
            "phase": self.phase,
            "progress": {"text": p.text, "fraction": p.fraction} if p else None,
        }


def status(
    *,
    home: Path,
    talk: Talk,
    host: str | None,
    inventory: Sequence[str],
    proof: bool = False,
    generate: bool = False,
    check: bool = False,
) -> Status | Outcomes[Status]:
    """Raises HostUnreachable, RemoteError. Reading changes nothing, so a cut line is tried again."""
    chosen = {target.name: target for target in targets(home, host, inventory)}

    def one(each: Host) -> Status:
        target = chosen[each.name]
        talk.stage(target.name, "asking")
        port = target.deployment.args.get("port")
        request = protocol.StatusRequest(generate=generate, log_tail_bytes=_TAIL_BYTES)
        if isinstance(port, int):
            request["port"] = port
        with agent_at(target) as client:
            result = client.call("status", request)
        talk.done(target.name, str(result["word"]))
        code = _CHECKED[result["word"]] if check else 0
        return Status(target.name, result, _progress(result), proof, code)

    return on_hosts([target.host for target in chosen.values()], one)


def _progress(result: Mapping[str, Any]) -> Progress | None:
    """How far a starting launch is, from the end of its log."""
    log = result.get("log") or {}
    if result.get("word") != "starting" or not log.get("tail"):
        return None
    data = base64.b64decode(log["tail"])
    if log.get("tail_offset"):
        data = data[data.find(b"\n") + 1 :]
    parser, fold = Parser(), Fold()
    fold.extend(parser.feed(data))
    return fold.progress()


# ---------------------------------------------------------------- stop, start, restart, rollback


def stop(
    *,
    home: Path,
    talk: Talk,
    host: str | None,
    inventory: Sequence[str],
    launch: str | None = None,
    drain_timeout: float | None = None,
    abort_requests: bool = False,
    why: str = "asked for",
    ask_sudo: bool = False,
) -> Answers:
    """Raises NotFound (nothing deployed), HostLocked. Exit code 6 if something of the launch is left."""
    if drain_timeout is not None and drain_timeout < 0:
        raise UsageError(f"--drain-timeout: {drain_timeout:g} is less than 0")
    password = ask_sudo_password(ask_sudo)

    def one(target: Target) -> HostAnswer:
        request = protocol.StopRequest(
            launch_id=launch,
            why=why,
            drain_timeout_s=drain_timeout,
            abort_requests=abort_requests,
            sudo_password=password,
        )
        with agent_at(target) as client:
            result = client.call("stop", request, on_event=_tell(target, talk))
        talk.done(target.name, "stopped" if result["stopped"] else "not stopped completely")
        return HostAnswer(target.name, "stop", result, 0 if result["stopped"] else 6)

    return _each(targets(home, host, inventory), one)


def start(
    *, home: Path, talk: Talk, host: str | None, inventory: Sequence[str], launch: str | None = None, no_wait: bool = False,
    ask_sudo: bool = False,
) -> Answers:  # fmt: skip
    """Starts the current release again. Raises LaunchFailed, NotReady, PlanRefused by the preflight."""
    request = protocol.StartRequest(launch_id=launch, sudo_password=ask_sudo_password(ask_sudo))
    return _started("start", request, targets(home, host, inventory), talk, not no_wait)


def restart(
    *, home: Path, talk: Talk, host: str | None, inventory: Sequence[str], no_wait: bool = False, abort_requests: bool = False,
    ask_sudo: bool = False,
) -> Answers:  # fmt: skip
    """Stops the current release and starts it as a new boot. Raises as `start`."""
    password = ask_sudo_password(ask_sudo)
    request = protocol.StartRequest(restart=True, abort_requests=abort_requests, sudo_password=password)
    return _started("start", request, targets(home, host, inventory), talk, not no_wait)


def rollback(
    *, home: Path, talk: Talk, host: str | None, inventory: Sequence[str], launch: str | None = None, no_wait: bool = False,
    abort_requests: bool = False, ask_sudo: bool = False,
) -> Answers:  # fmt: skip
    """Starts the newest earlier launch that was once ready, or the named one. Raises NotFound, and as `start`."""
    password = ask_sudo_password(ask_sudo)
    request = protocol.RollbackRequest(launch_id=launch, abort_requests=abort_requests, sudo_password=password)
    return _started("rollback", request, targets(home, host, inventory), talk, not no_wait)


def _started(
    verb: protocol.Verb, request: protocol.Request, chosen: Sequence[Target], talk: Talk, wait: bool
) -> Answers:
    def one(target: Target) -> HostAnswer:
        began = time.monotonic()
        with agent_at(target) as client:
            result = client.call(verb, request, on_event=_tell(target, talk))
        launch_id = str(result["launch_id"])
        if result["outcome"] == "unchanged" or not wait:
            talk.done(target.name, f"launch {launch_id}: {result['outcome']}")
            return HostAnswer(target.name, verb, result)
        done = follow(target, launch_id, result.get("log"), talk, target.deployment.ready_timeout_s)
        seconds = round(time.monotonic() - began, 2)
        talk.done(target.name, f"launch {launch_id} is ready after {seconds:.1f} s")
        result |= {"outcome": "ready", "watch": dict(done.watch), "status": done.watch["status"], "seconds": seconds}
        return HostAnswer(target.name, verb, result)

    return _each(chosen, one)


# ---------------------------------------------------------------- releases, lock, foreign servers


def history(*, home: Path, talk: Talk, host: str | None, inventory: Sequence[str], journal: bool = False) -> Answers:
    """Releases, newest first; with `journal` every act on the service too."""

    def one(target: Target) -> HostAnswer:
        def ask(client: AgentClient) -> dict[str, Any]:
            result = client.call("history")
            if journal:
                result["acts"] = client.call("journal", protocol.JournalRequest(lines=0))["acts"]
            return result

        return HostAnswer(target.name, "history", again_after_cuts(ask, target, talk.note))

    return _each(targets(home, host, inventory), one)


def prune(
    *, home: Path, talk: Talk, host: str | None, inventory: Sequence[str], keep: int = 5, dry_run: bool = False
) -> Answers:
    """Removes old releases; never the current one, a running one, or the last that served."""
    if keep < 1:
        raise UsageError(f"--keep: {keep} is less than 1")

    def one(target: Target) -> HostAnswer:
        with agent_at(target) as client:
            result = client.call("prune", protocol.PruneRequest(keep=keep, dry_run=dry_run))
        return HostAnswer(target.name, "prune", result)

    return _each(targets(home, host, inventory), one)


def unlock(*, home: Path, talk: Talk, host: str | None, inventory: Sequence[str], break_lock: bool = False) -> Answers:
    """Removes a stale lock; with `break_lock` one whose holder lives too. Raises HostLocked."""

    def one(target: Target) -> HostAnswer:
        with agent_at(target) as client:
            result = client.call("unlock", protocol.UnlockRequest(break_lock=break_lock))
        return HostAnswer(target.name, "unlock", result)

    return _each(targets(home, host, inventory), one)


def adopt(
    *, home: Path, talk: Talk, host: str | None, inventory: Sequence[str], port: int, pid: int | None = None,
    log: str | None = None,
) -> Answers:  # fmt: skip
    """Takes a server that somebody else started into our records. It is not touched. Raises NotFound, NotOurs."""

    def one(target: Target) -> HostAnswer:
        launch_id = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{token_hex(3)}"
        with agent_at(target) as client:
            result = client.call("adopt", protocol.AdoptRequest(port=port, pid=pid, log=log, launch_id=launch_id))
        return HostAnswer(target.name, "adopt", result)

    return _each(targets(home, host, inventory), one)
