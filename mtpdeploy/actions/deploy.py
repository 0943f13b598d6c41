"""`deploy`: from profile to a server that is proven ours, fresh and ready; or a cause, its evidence, and what to type next.

This module is light on purpose: the connection begins before the planning and its libraries are loaded (see hosts.early).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpdeploy.hosts.early import EARLY
from mtpdeploy.progress import Talk

if TYPE_CHECKING:
    from mtpdeploy.actions.plan import Planned, Plans
    from mtpdeploy.hosts.fanout import Outcomes
    from mtpdeploy.plan import Compared
    from mtpdeploy.sglang.logs import Summary


@dataclass(frozen=True, slots=True)
class Deployed:
    """What a deploy came to. outcome: `unchanged`, `ready`, or `started` (with --no-wait)."""

    host: str
    service: str
    profile: str
    outcome: str
    launch_id: str
    result: Mapping[str, Any]
    status: Mapping[str, Any]
    summary: Summary | None
    seconds: float
    run_id: str | None
    notes: tuple[str, ...]
    memory: tuple[Compared, ...] = ()  # the budget beside what the log says

    def as_json(self) -> dict[str, object]:
        watched, status = self.result.get("watch") or {}, self.status
        return {
            "host": self.host,
            "service": self.service,
            "profile": self.profile,
            "outcome": self.outcome,
            "launch_id": self.launch_id,
            "boot": status.get("boot") or self.result.get("boot"),
            "url": status.get("url"),
            "supervisor": self.result.get("supervisor"),
            "supervisor_why": self.result.get("supervisor_why"),
            "survives": self.result.get("survives"),
            "previous": self.result.get("previous"),
            "generation": watched.get("generation"),
            "ready_utc": watched.get("ready_utc"),
            "identity": status.get("identity"),
            "proof": status.get("proof"),
            "findings": [f for f in self.result.get("findings") or () if f["ok"] is not True],
            "log_summary": self.summary.as_json() if self.summary else None,
            "sglang_version": status.get("sglang_version"),
            "simulated": bool(status.get("simulated")),
            "memory": [{"name": c.name, "predicted": c.predicted, "actual": c.actual} for c in self.memory],
            "seconds": round(self.seconds, 2),
            "run_id": self.run_id,
            "notes": list(self.notes),
        }


def deploy(
    *,
    home: Path,
    talk: Talk,
    host: str | None,
    profile: str | None,
    inventory: Sequence[str],
    set_: Sequence[str],
    dry_run: bool = False,
    force: bool = False,
    no_wait: bool = False,
    supervisor: str | None = None,
    sglang_version: str | None = None,
    ready_timeout: float | None = None,
    drain_timeout: float | None = None,
    abort_requests: bool = False,
    skip_preflight: bool = False,
    rollback_on_failure: bool = False,
    keep: int = 0,
    ask_sudo: bool = False,
) -> Deployed | Outcomes[Deployed] | Planned | Plans:
    """Raises what the plan refuses, HostLocked, PlanRefused by the preflight, LaunchFailed, NotReady, NotOurs.

    With `dry_run` no connection is opened and the plan is the answer.
    """
    overrides = {
        "supervisor": supervisor,
        "sglang_version": sglang_version,
        "ready_timeout_s": ready_timeout,
        "drain_timeout_s": drain_timeout,
    }
    if not dry_run:
        EARLY.begin(home, host, inventory)
    try:
        recall = None
        if not (dry_run or force or ask_sudo):
            from mtpdeploy.actions.recall import Recall

            recall = Recall(home, host=host, profile=profile, inventory=inventory, sets=set_, overrides=overrides)
            if (same := recall.unchanged(talk)) is not None:
                return same
        from mtpdeploy.actions import deploying

        return deploying.deploy(
            home,
            talk,
            host=host,
            profile=profile,
            inventory=inventory,
            sets=set_,
            overrides=overrides,
            options=deploying.Options(
                force=force, abort_requests=abort_requests, skip_preflight=skip_preflight, keep=keep
            ),
            dry_run=dry_run,
            wait=not no_wait,
            rollback=rollback_on_failure,
            ask_sudo=ask_sudo,
            recall=recall,
        )
    finally:
        EARLY.end()
