"""`doctor`: what at a host would make a launch fail, each with why it matters and what to type. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mtpdeploy.actions.reach import Target, keep_facts, targets
from mtpdeploy.actions.reach import agent as agent_at
from mtpdeploy.agent.protocol import Finding, Needs, ProbeSpec
from mtpdeploy.errors import MtpError
from mtpdeploy.hosts.fanout import Outcomes, on_hosts
from mtpdeploy.inventory.values import Host
from mtpdeploy.plan import known_of, make_plan
from mtpdeploy.progress import Talk

_SKEW_S = 5.0


@dataclass(frozen=True, slots=True)
class Examined:
    """A host's facts and the findings, those that refuse a launch first."""

    host: str
    profile: str | None
    facts: Mapping[str, Any]
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """4, as a deploy would be refused."""
        return 4 if any(f["ok"] is False and f["severity"] == "refuse" for f in self.findings) else 0

    def as_json(self) -> dict[str, object]:
        return {"host": self.host, "profile": self.profile, "findings": list(self.findings), "facts": dict(self.facts)}


def doctor(
    *, home: Path, talk: Talk, host: str | None, profile: str | None, inventory: Sequence[str], set_: Sequence[str]
) -> Examined | Outcomes[Examined]:
    """With a profile its plan's needs are checked too. Raises HostUnreachable, RemoteError."""
    chosen = {target.name: target for target in targets(home, host, inventory, profile=profile, sets=set_)}

    def one(each: Host) -> Examined:
        return _examine(home, talk, chosen[each.name])

    return on_hosts([target.host for target in chosen.values()], one)


def _examine(home: Path, talk: Talk, target: Target) -> Examined:
    d = target.deployment
    talk.stage(target.name, "looking at the host")
    port, path = d.args.get("port"), d.args.get("model_path")
    spec = ProbeSpec(python=d.python, env=target.probe_env, port=port if isinstance(port, int) else None)
    if isinstance(path, str):
        spec["model_path"] = path
    with agent_at(target) as client:
        asked = datetime.now(timezone.utc)
        facts = client.call("probe", {"probe": spec})  # type: ignore[arg-type]
        answered = datetime.now(timezone.utc)
        keep_facts(home, target.host, facts)
        needs, planned = _plan(target, facts)
        result = client.call("doctor", {"probe": spec, "needs": needs, "host": str(d.args.get("host"))})  # type: ignore[arg-type]
    talk.done(target.name, "looked at")
    findings = [*result["findings"], *planned, *skew(facts, asked, answered)]
    findings.sort(key=lambda f: (f["ok"] is True, f["severity"] != "refuse"))
    return Examined(target.name, target.profile, facts, tuple(findings))


def _plan(target: Target, facts: Mapping[str, Any]) -> tuple[Needs, list[Finding]]:
    """What the profile's plan needs of the host, and what it says against itself."""
    if target.profile is None:
        return Needs(), []
    try:
        plan = make_plan(target.deployment, known_of(target.deployment, facts))
    except MtpError as refused:
        why = "SGLang would refuse or kill this launch"
        return Needs(), [
            Finding(check="plan", ok=False, what=refused.message, why=why, type="mtpdeploy plan", severity="refuse")
        ]
    findings = [
        Finding(check="plan", ok=False, what=f.message, why=f"rule {f.rule}", type="mtpdeploy plan", severity="warn")
        for f in plan.findings
        if f.severity == "warn"
    ]
    needs: Needs = plan.needs()  # type: ignore[assignment]
    return needs, findings


def skew(facts: Mapping[str, Any], asked: datetime, answered: datetime) -> list[Finding]:
    """How far the host's clock is from this machine's; the time of the answer bounds what can be said."""
    try:
        there = datetime.strptime(str(facts["utc"]), "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
    except (KeyError, ValueError):
        return []
    off = 0.0
    if there < asked:
        off = (there - asked).total_seconds()
    elif there > answered:
        off = (there - answered).total_seconds()
    ok = abs(off) <= _SKEW_S
    what = (
        "the clock agrees with this machine's"
        if ok
        else f"the clock is {abs(off):.0f} s {'behind' if off < 0 else 'ahead'}"
    )
    why = "times of logs and launches are compared across machines"
    return [Finding(check="clock", ok=ok, what=what, why=why, type="" if ok else "timedatectl", severity="warn")]
