"""Follows a launch to its end: ready, dead or silent. Shared by deploy, start, restart and rollback."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtpdeploy.actions.reach import Target, again_after_cuts
from mtpdeploy.agent.protocol import CorpseRequest, WatchRequest
from mtpdeploy.errors import LaunchFailed, MtpError, NotOurs, NotReady
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.progress import Talk
from mtpdeploy.sglang.failures import Attempt, diagnose
from mtpdeploy.sglang.logs import Fold, Parser, Summary


@dataclass(frozen=True, slots=True)
class Followed:
    """A launch that became ready: the agent's watch result, and what its log says."""

    watch: Mapping[str, Any]
    summary: Summary


class _Listener:
    """Takes a watch's events: feeds the log to the parser, shows progress, keeps the place for a resume."""

    def __init__(self, target: Target, talk: Talk, place: Mapping[str, Any] | None) -> None:
        self.key, self.talk = target.name, talk
        self.inode = (place or {}).get("inode")
        self.offset = (place or {}).get("offset")
        self.begin()

    def begin(self) -> None:
        self.parser, self.fold = Parser(), Fold()

    def take(self, event: Mapping[str, Any]) -> None:
        match event.get("event"):
            case "log":
                data = base64.b64decode(event["data"])
                self.inode, self.offset = event["inode"], event["offset"] + len(data)
                self.fold.extend(self.parser.feed(data))
                progress = self.fold.progress()
                self.talk.stage(self.key, progress.text, progress.fraction)
            case "log-gap":
                self.inode, self.offset = event["inode"], event["offset"]
                self.begin()
            case "note":
                self.talk.note(f"{self.key}: {event['text']}")
            case "step":
                self.talk.stage(self.key, event["do"])

    def summary(self) -> Summary:
        self.fold.extend(self.parser.close())
        return self.fold.summary()


def follow(
    target: Target,
    launch_id: str,
    place: Mapping[str, Any] | None,
    talk: Talk,
    silence_s: float,
    attempts: Sequence[Attempt] = (),
) -> Followed:
    """Until the launch is proven ready. Survives cuts of the line. attempts: earlier failures, which a diagnosis may need.

    Raises LaunchFailed (with cause, evidence, remedy), NotReady (silent for `silence_s`), NotOurs (something else answered).
    """
    listener = _Listener(target, talk, place)

    def watch(client: AgentClient) -> dict[str, Any]:
        request = WatchRequest(launch_id=launch_id, silence_s=silence_s)
        if listener.offset is not None:
            request.update(WatchRequest(inode=listener.inode, offset=listener.offset))
        return client.call("watch", request, on_event=listener.take)

    result = again_after_cuts(watch, target, lambda text: talk.note(f"{target.name}: {text}"))
    summary = listener.summary()
    if result["outcome"] == "ready":
        return Followed(result, summary)
    raise _failure(target, launch_id, result, summary, attempts)


def _failure(
    target: Target, launch_id: str, result: Mapping[str, Any], summary: Summary, attempts: Sequence[Attempt]
) -> MtpError:
    status = result.get("status") or {}
    details: dict[str, object] = {
        "launch_id": launch_id,
        "outcome": result["outcome"],
        "exit": result.get("exit"),
        "summary": summary.as_json(),
        "status": {k: status.get(k) for k in ("word", "why", "identity", "proof", "boot", "restarts")},
    }
    where = f"--host {target.name}"
    if result["outcome"] == "stopped":
        return LaunchFailed(
            f"{target.name}: launch {launch_id} was stopped while it was starting: {status.get('why')}",
            next_commands=[f"mtpdeploy status {where}"],
            details=details,
        )
    if result["outcome"] == "silent":
        return NotReady(
            f"{target.name}: launch {launch_id} has written nothing for {target.deployment.ready_timeout_s:.0f} s; it is in "
            f"phase {summary.phase} and goes on",
            evidence=summary.evidence,
            next_commands=[f"mtpdeploy logs {where} --follow", f"mtpdeploy status {where}", f"mtpdeploy stop {where}"],
            runbook="server-never-ready",
            details=details,
        )
    if status.get("word") in ("stale", "unknown") or status.get("identity") in ("foreign", "earlier launch"):
        return NotOurs(
            f"{target.name}: launch {launch_id} is not what answers: {status.get('why')}",
            evidence=result.get("evidence") or (),
            next_commands=[f"mtpdeploy status {where} --proof"],
            runbook="port-or-gpu-taken",
            details=details,
        )
    ended = result.get("exit") or {}
    code = -ended["signal"] if ended.get("signal") else ended.get("status")
    d = diagnose(
        summary,
        exit_status=code,
        oom_killed=result.get("oom_killed"),
        host=target.name,
        profile=target.profile,
        attempts=attempts,
    )
    taken = str(ended.get("result") or "")
    head = taken if taken.startswith("port taken") else d.meaning
    loop = " It crashed again and again and was given up." if result.get("crash_loop") else ""
    remedy = f"\nremedy: {d.remedy.why}" if d.remedy.why else ""
    return LaunchFailed(
        f"{target.name}: launch {launch_id} failed{f' in {d.failed_in}' if d.failed_in else ''}: {head}.{loop}{remedy}",
        evidence=[*d.evidence, *(result.get("evidence") or ())],
        next_commands=d.next_commands or [f"mtpdeploy logs {where}"],
        runbook="port-or-gpu-taken" if head is taken else d.runbook,
        details={**details, "diagnosis": d.as_json()},
    )


def corpse(target: Target, launch_id: str) -> dict[str, Any] | None:
    """What is left of a failed launch; None if it cannot be had. Never hides the failure itself."""
    from mtpdeploy.actions.reach import agent

    with contextlib.suppress(MtpError), agent(target) as client:
        return client.call("corpse", CorpseRequest(launch_id=launch_id))
    return None
