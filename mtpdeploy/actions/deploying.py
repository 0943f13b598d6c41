"""What `deploy` does, host by host: one exec that may find all as it should be, else a second one that changes it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from mtpdeploy.actions.deploy import Deployed
from mtpdeploy.actions.plan import Planned, Plans, keep_calibration, stored_facts, with_calibrations
from mtpdeploy.actions.reach import Target, again_after_cuts, ask_sudo_password, keep_facts, targets
from mtpdeploy.actions.reach import agent as agent_at
from mtpdeploy.agent.protocol import DeployRequest, ProbeRequest, ProbeSpec, RollbackRequest, StatusRequest
from mtpdeploy.errors import LaunchFailed, LineCut, MtpError, NotOurs, NotReady, PlanRefused, UsageError
from mtpdeploy.hosts.agentclient import AgentClient, whoami
from mtpdeploy.hosts.fanout import Outcomes, on_hosts
from mtpdeploy.inventory import profile_names
from mtpdeploy.inventory.values import Host
from mtpdeploy.plan import Compared, Plan, beside, known_of, make_plan
from mtpdeploy.progress import Talk
from mtpdeploy.store import Run, Store

if TYPE_CHECKING:
    from mtpdeploy.actions.follow import Followed
    from mtpdeploy.actions.recall import Recall
    from mtpdeploy.sglang.failures import Attempt

Options = DeployRequest  # what the command's own options say of a request
_UNKNOWN = "unknown"  # the fingerprint of a plan that cannot be made yet: equal to none


def deploy(
    home: Path,
    talk: Talk,
    *,
    host: str | None,
    profile: str | None,
    inventory: Sequence[str],
    sets: Sequence[str],
    overrides: Mapping[str, object],
    options: DeployRequest,
    dry_run: bool,
    wait: bool,
    rollback: bool,
    ask_sudo: bool,
    recall: Recall | None,
) -> Deployed | Outcomes[Deployed] | Planned | Plans:
    """See actions.deploy."""
    chosen = targets(home, host, inventory, profile=profile, sets=sets, overrides=overrides, reveal=True)
    for target in chosen:
        if target.profile is None:
            names = ", ".join(profile_names(home))
            raise UsageError(f"which profile? --profile NAME (here: {names})", next_commands=["mtpdeploy profiles"])
    if dry_run:
        return _dry(home, chosen)
    given = DeployRequest(**options, sudo_password=ask_sudo_password(ask_sudo))
    work = {target.name: _Deploy(home, talk, target, given) for target in chosen}

    def one(each: Host) -> Deployed:
        return work[each.name].run(wait=wait, rollback=rollback)

    answer = on_hosts([target.host for target in chosen], one)
    found = [each.unchanged for each in work.values()]
    if recall is not None and None not in found:
        recall.keep([each for each in found if each is not None])
    return answer


def _dry(home: Path, chosen: Sequence[Target]) -> Planned | Plans:
    by_name = {target.name: target for target in chosen}

    def one(host: Host) -> Planned:
        deployment = by_name[host.name].deployment
        facts = stored_facts(home, host)
        known = known_of(deployment, facts, facts_source="read from the host at the last contact")
        return Planned(make_plan(deployment, known, home=home))

    answer = on_hosts([target.host for target in chosen], one)
    return Plans(answer.by_host) if isinstance(answer, Outcomes) else answer


class _Deploy:
    """One host's deploy."""

    def __init__(self, home: Path, talk: Talk, target: Target, options: DeployRequest) -> None:
        self.home, self.talk, self.target, self.options = home, talk, target, options
        self.began = time.monotonic()
        self.notes: list[str] = []
        self.compared: tuple[Compared, ...] = ()
        self.unchanged: tuple[Target, DeployRequest, Sequence[str]] | None = None  # if the first exec found it so

    def run(self, *, wait: bool, rollback: bool) -> Deployed:
        target = self.target
        self.talk.stage(target.name, "asking what runs there")
        with agent_at(target) as client:
            client.transport.begin()
            plan = self._plan_from_memory()
            request = self._first(plan)
            asked = datetime.now(timezone.utc)
            first = client.call("deploy", request, on_event=self._tell)
            if first["outcome"] == "unchanged" and plan is not None:
                self.unchanged = (target, request, self.notes)
            if first["outcome"] == "needs-files":
                facts = first["facts"]
                keep_facts(self.home, target.host, facts)
                self._compare_clocks(facts, asked)
                plan = self._plan(facts)
                if plan.wants_help:
                    facts = {**facts, **self._help(client)}
                    plan = self._plan(facts)
                first = self._second(client, plan)
        assert plan is not None  # an answer without one is `needs-files`
        self.notes += [*plan.notes, *(f.message for f in plan.findings if f.severity != "refuse")]
        store = Store(self.home)
        store.set_last_deployed(target.name, str(target.profile), first["launch_id"])
        if first["outcome"] == "unchanged":
            self.talk.done(target.name, f"unchanged: launch {first['launch_id']} is {first['status']['word']}")
            return self._answer("unchanged", first, first["status"], None, None)
        run = store.new_run("deploy", self._meta(first, plan))
        with run:
            return self._watched(run, plan, first, wait=wait, rollback=rollback)

    def _compare_clocks(self, facts: Mapping[str, Any], asked: datetime) -> None:
        """Says before anything is touched that times here and there cannot be compared; it refuses nothing."""
        from mtpdeploy.actions.doctor import skew

        for finding in skew(facts, asked, datetime.now(timezone.utc)):
            if finding["ok"] is False:
                self.notes.append(f"{finding['what']} ({finding['why']})")
                self.talk.note(f"{self.target.name}: {finding['what']}")

    # ---- the two execs

    def _plan(self, facts: Mapping[str, Any]) -> Plan:
        d = self.target.deployment
        return make_plan(d, known_of(d, with_calibrations(self.home, self.target.host, facts)), home=self.home)

    def _plan_from_memory(self) -> Plan | None:
        """The plan by what is remembered of the host, for a first exec that can end there. None: not without asking it."""
        d = self.target.deployment
        try:
            known = known_of(d, stored_facts(self.home, self.target.host))
            return make_plan(d, known, home=self.home) if known.version_is_fact else None
        except PlanRefused:
            return None  # refused by old facts; fresh ones decide

    def _probe(self, plan: Plan | None, *, help_flags: bool = False) -> ProbeSpec:
        d, t = self.target.deployment, self.target
        port = d.args.get("port")
        spec = ProbeSpec(python=d.python, env=t.probe_env, port=int(port) if isinstance(port, int) else None)
        if isinstance(path := d.args.get("model_path"), str):
            spec["model_path"] = path
        if plan is not None and plan.known.gpus:
            spec["gpus"] = list(plan.known.gpus)
        if help_flags:
            spec["help_flags"] = True
        return spec

    def _first(self, plan: Plan | None) -> DeployRequest:
        return DeployRequest(
            fingerprint=plan.fingerprint if plan else _UNKNOWN,
            expect_version=str(plan.version) if plan else None,
            force=bool(self.options.get("force")),
            probe=self._probe(plan),
        )

    def _help(self, client: AgentClient) -> dict[str, Any]:
        self.talk.stage(self.target.name, "this SGLang is newer than the flag table: asking its own --help")
        facts = client.call("probe", ProbeRequest(probe=self._probe(None, help_flags=True)))
        return {"help_flags": facts.get("help_flags")}

    def _second(self, client: AgentClient, plan: Plan) -> dict[str, Any]:
        now = datetime.now(timezone.utc)
        launch_id = f"{now:%Y%m%dT%H%M%SZ}-{token_hex(3)}"
        release: Any = plan.release(
            launch_id, created_utc=now.isoformat(timespec="milliseconds")[:-6] + "Z", by=whoami()
        )
        request = DeployRequest(
            **self.options,
            fingerprint=plan.fingerprint,
            expect_version=str(plan.version),
            probe=self._probe(plan),
            needs=plan.needs(),  # type: ignore[typeddict-item]
            release=release,
            files=[{"path": f.path, "mode": f.mode, "content": f.content} for f in plan.files(launch_id)],
        )
        try:
            return client.call("deploy", request, on_event=self._tell)
        except LineCut as cut:
            return self._look_again(launch_id, cut)

    def _look_again(self, launch_id: str, cut: LineCut) -> dict[str, Any]:
        """The line was cut while the host was changing: nothing is sent twice, but how it ended can be asked."""

        def ask(client: AgentClient) -> dict[str, Any]:
            deadline = time.monotonic() + self.target.deployment.drain_timeout_s + 60
            while True:
                status = client.call("status", StatusRequest())
                held = (status.get("lock") or {}).get("state")
                if held not in ("held", "hanging") or time.monotonic() > deadline:
                    return status
                time.sleep(0.5)

        status = again_after_cuts(ask, self.target, lambda text: self.talk.note(f"{self.target.name}: {text}"))
        if status.get("launch_id") != launch_id:
            raise cut
        self.notes.append("the line was cut during the deploy; the agent had finished it at the host")
        return {
            "outcome": "started",
            "launch_id": launch_id,
            "boot": status.get("boot"),
            "supervisor": status.get("supervisor"),
            "log": None,
        }

    def _tell(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            self.talk.stage(self.target.name, event["do"])
        elif event["event"] == "note":
            self.talk.note(f"{self.target.name}: {event['text']}")

    # ---- afterwards

    def _watched(self, run: Run, plan: Plan, first: dict[str, Any], *, wait: bool, rollback: bool) -> Deployed:
        target, launch_id = self.target, first["launch_id"]
        run.write_json("plan.json", plan.as_json())
        run.write_json("deploy.json", first)
        if not wait:
            self.talk.done(target.name, f"launch {launch_id} started; not waited for")
            run.finish({"outcome": "started", "launch_id": launch_id})
            return self._answer("started", first, first.get("status") or {}, None, run.id)
        from mtpdeploy.actions.follow import follow

        try:
            done = follow(
                target, launch_id, first.get("log"), self.talk, target.deployment.ready_timeout_s, self._failed_before()
            )
        except (LaunchFailed, NotReady, NotOurs) as failure:
            self._bury(run, launch_id, failure)
            if rollback:
                self._roll_back(failure)
            raise
        summary = done.summary.as_json()
        run.write_json("watch.json", done.watch)
        run.write_json("log_summary.json", summary)
        run.finish(
            {"outcome": "ready", "launch_id": launch_id, "max_running_requests": summary.get("max_running_requests")}
        )
        self.compared = beside(plan, summary)
        keep_calibration(self.home, target.host, plan, summary, launch_id)
        self.talk.done(target.name, f"launch {launch_id} is ready after {time.monotonic() - self.began:.1f} s")
        return self._answer("ready", {**first, "watch": done.watch}, done.watch["status"], done, run.id)

    def _failed_before(self) -> list[Attempt]:
        """Earlier failed launches on this host: two that fail in opposite ways leave no value between them."""
        import json

        from mtpdeploy.sglang.failures import Attempt

        found = []
        for row in Store(self.home).runs(kind="deploy", host=self.target.name, status="failed", limit=8):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                details = json.loads((row.folder / "failure.json").read_text())["details"]
                found.append(Attempt(details["summary"]["server_args"] or {}, details["diagnosis"]["cause"]))
        return found

    def _bury(self, run: Run, launch_id: str, failure: MtpError) -> None:
        """Keeps what is left of the failed launch here."""
        import base64

        from mtpdeploy.actions.follow import corpse

        run.write_json("failure.json", failure.as_json())
        if (bundle := corpse(self.target, launch_id)) is not None:
            if bundle.get("log"):
                run.write_text("server.log", base64.b64decode(bundle.pop("log")).decode(errors="replace"))
            run.write_json("corpse.json", bundle)
        run.finish({"outcome": failure.kind, "launch_id": launch_id}, "failed")
        failure.details = {**(failure.details or {}), "run_id": run.id, "kept_in": str(run.path)}
        self.talk.done(self.target.name, f"launch {launch_id} failed; what is left of it is in {run.path}")

    def _roll_back(self, failure: MtpError) -> None:
        """Starts the previous good release again and proves it; the failure stays the answer."""
        from mtpdeploy.actions.follow import follow

        target = self.target
        self.talk.note(f"{target.name}: rolling back")
        try:
            with agent_at(target) as client:
                request = RollbackRequest(sudo_password=self.options.get("sudo_password"))
                result = client.call("rollback", request, on_event=self._tell)
            follow(target, result["launch_id"], result.get("log"), self.talk, target.deployment.ready_timeout_s)
        except MtpError as second:
            failure.message += f"\nThe rollback failed too: {second.message}"
            failure.details = {**(failure.details or {}), "rollback": second.as_json()}
            return
        failure.message += f"\nRolled back: launch {result['launch_id']} serves again, proven by a generation."
        failure.details = {**(failure.details or {}), "rollback": {"launch_id": result["launch_id"], "ready": True}}

    def _meta(self, first: Mapping[str, Any], plan: Plan) -> dict[str, object]:
        target = self.target
        return {
            "host": target.name,
            "profile": target.profile,
            "service": target.deployment.service,
            "launch_id": first["launch_id"],
            "simulated": plan.known.simulated,
        }

    def _answer(
        self,
        outcome: str,
        result: Mapping[str, Any],
        status: Mapping[str, Any],
        done: Followed | None,
        run_id: str | None,
    ) -> Deployed:
        target = self.target
        return Deployed(
            host=target.name,
            service=target.deployment.service,
            profile=str(target.profile),
            outcome=outcome,
            launch_id=str(result["launch_id"]),
            result=result,
            status=status,
            summary=done.summary if done else None,
            seconds=time.monotonic() - self.began,
            run_id=run_id,
            notes=tuple(dict.fromkeys(self.notes)),
            memory=self.compared,
        )
