"""Does a campaign, step by step: each is written down when it begins and when it has ended, and none is done twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from mtpdeploy.actions.campaign import Arm, Campaign, Spec, Step, Told
from mtpdeploy.actions.report import BenchAnswer, recomputed
from mtpdeploy.analysis.compare import Comparison, compare
from mtpdeploy.analysis.recommend import Recommendation
from mtpdeploy.analysis.samples import Load, Measured
from mtpdeploy.errors import (
    ConfigError,
    HostKeyRefused,
    HostLocked,
    HostUnreachable,
    LineCut,
    MtpError,
    NotFound,
    RemoteError,
    UsageError,
)
from mtpdeploy.progress import Talk
from mtpdeploy.store import Run, Store
from mtpdeploy.store.measured import measured

PATIENCE_S = 600.0  # how long an unattended campaign waits for a host that does not answer
NOT_OF_AN_ARM = (HostUnreachable, HostLocked, ConfigError, UsageError)  # say nothing about the settings of an arm
SERVES = ("ready", "degraded", "starting")


class Interrupted(KeyboardInterrupt):
    """The user ended a benchmark in its middle."""


class Conductor:
    """One campaign on one host."""

    def __init__(self, home: Path, talk: Talk, spec: Spec, inventory: Sequence[str]) -> None:
        self.home, self.talk, self.spec, self.inventory = home, talk, spec, tuple(inventory)
        self.store = Store(home)
        self.turns = spec.turns
        self.told: dict[str, Told] = {}
        self.begun: dict[str, str] = {}  # step → when it began, by steps.jsonl
        self.now = ""  # when the step at work began this time
        self.steps = self._steps()

    # -- what is to be done

    def _steps(self) -> list[Step]:
        spec = self.spec
        steps = [Step("doctor", f"look at {spec.host}", "what would make a launch fail, and what the host serves now")]
        steps += [
            Step(f"plan:{arm}", f"plan {arm}", "flags for that SGLang, memory before the launch", arm)
            for arm in spec.arms
        ]
        for place, arm in enumerate(self.turns, 1):
            steps.append(Step(f"deploy:{place}:{arm}", f"deploy {arm}", f"turn {place} of {len(self.turns)}", arm))
            if arm not in self.turns[: place - 1]:
                steps.append(
                    Step(f"verify:{place}:{arm}", f"verify {arm}", "does what runs match what was asked for", arm)
                )
            steps.append(
                Step(f"bench:{place}:{arm}", f"measure {arm}", "arms take turns, so that drift falls on all alike", arm)
            )
        for arm in spec.tuned:
            tuned = _tuned(arm)
            steps += [
                Step(f"tune:{arm}", f"search the settings of {arm}", "each arm under the same budget of launches", arm),
                Step(f"deploy:tuned:{tuned}", f"deploy {tuned}", "what the search found", tuned),
                Step(f"bench:tuned:{tuned}", f"measure {tuned}", "under the loads of the other arms", tuned),
            ]
        return [
            *steps,
            Step("compare", "compare the arms", "what was not alike first, then ratios with intervals"),
            Step("recommend", f"recommend for {spec.workload}", spec.slo or "no objectives were given"),
            Step("report", "write the report", "HTML, Markdown and JSON with the same figures"),
            Step("leave", f"leave {spec.host} as asked", f"--leave {spec.leave}"),
        ]

    def planned(self, run: Run | None) -> Campaign:
        """What would be done; nothing is touched."""
        if run is not None:
            self._read(run)
        return self._answer(run.id if run else None, (), None, {}, None)

    # -- doing it

    def conduct(self, run: Run) -> Campaign:
        """Until the end, or until something breaks it off; then the next command is said."""
        with run:
            try:
                return self._all(run)
            except BaseException as broken:
                again = f"mtpdeploy campaign --resume {run.id}"
                if isinstance(broken, MtpError):
                    broken.next_commands = (*dict.fromkeys((*broken.next_commands, again)),)
                else:
                    self.talk.note(f"campaign {run.id} was broken off; what is done is kept")
                    self.talk.note(f"next: {again}")
                raise

    def _all(self, run: Run) -> Campaign:
        self._read(run)
        if self.told:
            self.talk.note(f"campaign: {len(self.told)} of {len(self.steps)} steps are done already")
        self._do(run, "doctor", self._doctor)
        for step in self.steps:
            arm = step.arm
            if arm is None:
                continue
            reason = self._not_worth(step)
            if reason is not None:
                self._skip(run, step, reason)
                continue
            work: dict[str, Callable[[Run, Step, str], Told]] = {
                "plan": self._plan, "deploy": self._deploy, "verify": self._verify, "bench": self._bench, "tune": self._tune,
            }  # fmt: skip
            self._do(run, step.key, partial(work[step.what], run, step, arm))
        return self._concluded(run)

    def _read(self, run: Run) -> None:
        """A step's last word counts: one that began again after a kill has only begun."""
        for line in run.read_jsonl("steps.jsonl"):
            key = str(line.get("step"))
            told = Told.from_json(line)
            if told is not None:
                self.told[key] = told
            elif isinstance(line.get("at_utc"), str):
                self.begun.setdefault(key, str(line["at_utc"]))

    def _do(self, run: Run, key: str, work: Callable[[], Told]) -> None:
        """Does a step that has not ended yet. MtpError of the arm's own is its result; a host that is away is waited for."""
        if key in self.told:
            return
        place = next(number for number, step in enumerate(self.steps, 1) if step.key == key)
        step = self.steps[place - 1]
        self.talk.note(f"campaign {place}/{len(self.steps)}: {step.do} ({step.why})")
        self.now = _utc()
        self.begun.setdefault(key, self.now)
        run.append_jsonl("steps.jsonl", [{"step": key, "status": "begun", "at_utc": self.now}])
        began = time.monotonic()
        try:
            told = self._patiently(work)
        except NOT_OF_AN_ARM:
            raise
        except MtpError as exc:
            told = _failure(key, step.arm, exc)
            self.talk.note(f"campaign: {step.do}: failed: {exc.message.splitlines()[0]}; a result like any other")
        self._write(run, told, time.monotonic() - began)

    def _patiently(self, work: Callable[[], Told]) -> Told:
        """Tries again while the host does not answer. What a step has done is not done twice: each looks first."""
        from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential

        def away(error: BaseException) -> bool:
            return isinstance(error, (HostUnreachable, LineCut)) and not isinstance(error, HostKeyRefused)

        def say(state: RetryCallState) -> None:
            wait = state.next_action.sleep if state.next_action else 0.0
            self.talk.note(f"campaign: {self.spec.host} does not answer; again in {wait:.0f} s")

        # A host that was never reached is told at once: it is the option that is wrong, more likely than the line.
        delay = PATIENCE_S if self.told else 0.0
        retrying = Retrying(
            retry=retry_if_exception(away), stop=stop_after_delay(delay), wait=wait_exponential(2, max=60),
            before_sleep=say, reraise=True,
        )  # fmt: skip
        return retrying(work)

    def _write(self, run: Run, told: Told, seconds: float) -> None:
        told = replace(told, seconds=seconds)
        run.append_jsonl("steps.jsonl", [{**told.as_json(), "at_utc": _utc()}])
        self.told[told.step] = told
        if told.status == "done" and told.step.startswith("bench:"):
            run.update_meta(runs=self._runs())

    def _skip(self, run: Run, step: Step, reason: str) -> None:
        if step.key not in self.told:
            self.talk.note(f"campaign: {step.do}: left out: {reason}")
            self._write(run, Told(step.key, "skipped", arm=step.arm, message=reason), 0.0)

    def _not_worth(self, step: Step) -> str | None:
        """Why a step of an arm is left out: an earlier one of the arm has failed, or its search kept the profile."""
        failed = self._failed(str(step.arm))
        if failed is not None and failed.step != step.key:
            return f"{failed.step.partition(':')[0]} of {step.arm} failed: {failed.cause}"
        for base in self.spec.tuned:
            if step.arm == _tuned(base) and step.arm not in self.spec.arms:
                told = self.told.get(f"tune:{base}")
                if told is None or not (told.facts or {}).get("profile_file"):
                    return (
                        f"the search kept {base} as it is" if told and told.status == "done" else "there was no search"
                    )
        return None

    def _failed(self, arm: str) -> Told | None:
        """The first failure that leaves the arm without further figures. A verification that finds a difference is none."""
        return next(
            (
                told
                for told in self.told.values()
                if told.arm == arm and told.status == "failed" and not told.step.startswith(("verify:", "tune:"))
            ),
            None,
        )

    def _runs(self, arm: str | None = None) -> list[str]:
        """The benchmarks so far, in the order of the steps."""
        found = [
            self.told[step.key]
            for step in self.steps
            if step.what == "bench" and step.key in self.told and (arm is None or step.arm == arm)
        ]
        return [name for told in found if told.status == "done" for name in told.runs]

    # -- the steps

    def _doctor(self) -> Told:
        """Findings are told and kept; each deploy's own check decides whether its arm can be launched."""
        from mtpdeploy.actions.doctor import doctor
        from mtpdeploy.actions.launches import status

        spec = self.spec
        before: Any = status(home=self.home, talk=self.talk, host=spec.host, inventory=self.inventory)
        served = {
            name: before.result.get(name) for name in ("word", "launch_id", "profile", "simulated", "sglang_version")
        }
        examined: Any = doctor(
            home=self.home,
            talk=self.talk,
            host=spec.host,
            profile=spec.arms[0],
            inventory=self.inventory,
            set_=spec.sets,
        )
        against = [f"{one['check']}: {one['what']}" for one in examined.findings if one["ok"] is False]
        for one in against:
            self.talk.note(f"doctor: {one}")
        return Told("doctor", "done", message="; ".join(against) or "nothing against a launch",
                    facts={"before": served, "findings": against})  # fmt: skip

    def _plan(self, run: Run, step: Step, arm: str) -> Told:
        from mtpdeploy.actions.deploy import deploy

        planned: Any = deploy(
            home=self.home, talk=self.talk, host=self.spec.host, profile=arm, inventory=self.inventory,
            set_=self.spec.sets, dry_run=True,
        )  # fmt: skip
        document = planned.as_json()
        run.write_json(f"plan-{_file(arm)}.json", document)
        memory = document.get("memory") or {}
        facts = {
            name: memory.get(name) for name in ("max_running_requests", "bound_by", "slots", "kv_tokens", "headroom_gb")
        }
        said = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
        return Told(step.key, "done", arm=arm, message=said or "no memory budget", facts=facts)

    def _deploy(self, run: Run, step: Step, arm: str) -> Told:
        from mtpdeploy.actions.deploy import deploy

        deployed: Any = deploy(
            home=self.home,
            talk=self.talk,
            host=self.spec.host,
            profile=arm,
            inventory=self.inventory,
            set_=self.spec.sets,
        )
        document = deployed.as_json()
        facts = {name: document.get(name) for name in ("outcome", "launch_id", "sglang_version", "simulated", "memory")}
        runs = (deployed.run_id,) if deployed.run_id else ()
        return Told(
            step.key,
            "done",
            arm=arm,
            message=f"{deployed.outcome}: launch {deployed.launch_id}",
            runs=runs,
            facts=facts,
        )

    def _verify(self, run: Run, step: Step, arm: str) -> Told:
        """The profile against what runs: a difference is reported, and the figures are of what runs."""
        said = self._verified(arm)
        run.write_json(f"verify-{_file(arm)}.json", said)
        why = "; ".join(str(one) for one in said["why"])
        return Told(step.key, "done", arm=arm, message=f"{said['verdict']}{f': {why}' if why else ''}",
                    facts={"verdict": said["verdict"], "why": said["why"], "capacity": said["capacity"]})  # fmt: skip

    def _verified(self, arm: str) -> dict[str, Any]:
        from mtpdeploy.actions.verify import verify

        answer = verify(
            home=self.home, talk=self.talk, host=self.spec.host, profile=arm, inventory=self.inventory, set_=self.spec.sets,
            file=None, command=None, sglang_version=None, model_config=None, gpu_memory_gb=None, want_concurrency=None,
        )  # fmt: skip
        document: dict[str, Any] = answer.as_json()
        return document

    def _bench(self, run: Run, step: Step, arm: str) -> Told:
        """Measures, or takes up what an earlier attempt of this turn left: at the host, or finished here."""
        answer = self._left_behind(step, arm) or self._measure(arm)
        if answer.interrupted:
            raise Interrupted
        held = self.store.run(answer.run_id)
        known = held.meta.get("provenance")
        tuned = arm not in self.spec.arms
        held.update_meta(
            campaign=run.id,
            provenance={**(known if isinstance(known, Mapping) else {}), "session": run.id, "tuned": tuned},
        )
        # After the load: only now has the server reported acceptance.
        try:
            held.write_json("verify.json", self._verified(arm))
        except MtpError as exc:
            self.talk.note(f"campaign: {arm} could not be verified after its load: {exc.message.splitlines()[0]}")
        invalid = [
            f"{Load(point.concurrency, point.rate)}: {'; '.join(point.invalid_because)}"
            for point in answer.points
            if not point.valid
        ]
        said = f"{len(answer.points)} points" + (f", {len(invalid)} of them invalid" if invalid else "")
        return Told(step.key, "done", arm=arm, message=said, evidence=tuple(invalid), runs=(answer.run_id,),
                    facts={"simulated": answer.simulated})  # fmt: skip

    def _measure(self, arm: str) -> BenchAnswer:
        from mtpdeploy.actions.bench import bench

        try:
            answer: BenchAnswer = bench(
                home=self.home, talk=self.talk, host=self.spec.host, profile=arm, inventory=self.inventory,
                set_=self.spec.sets, slo=self.spec.slo, **self.spec.bench,
            )  # fmt: skip
        except LineCut:
            raise
        except RemoteError as exc:
            raise self._explained(exc) from exc
        return answer

    def _explained(self, failure: RemoteError) -> MtpError:
        """A load that broke because the server died under it: why that died is the cause."""
        from mtpdeploy.actions.launches import status

        try:
            found: Any = status(home=self.home, talk=self.talk, host=self.spec.host, inventory=self.inventory)
        except MtpError:
            return failure
        word, why = found.result.get("word"), found.result.get("why")
        if word in ("ready", None):
            return failure
        return RemoteError(
            f"the server is {word} under the load: {why}\n{failure.message}", evidence=failure.evidence,
            next_commands=(f"mtpdeploy logs --host {self.spec.host}", *failure.next_commands),
            details={**failure.details, "kind": word},
        )  # fmt: skip

    def _left_behind(self, step: Step, arm: str) -> BenchAnswer | None:
        """The benchmark that this turn began before it was broken off: finished here, or going on alone at the host."""
        since = self.begun.get(step.key)
        if since is None or since == self.now:
            return None
        known = set(self._runs())
        for row in self.store.runs(kind="bench", host=self.spec.host):
            if row.id in known or row.profile != arm or (row.created_utc or "") < since:
                continue
            left = self.store.run(row.id)
            if left.meta.get("interrupted") is True:  # ended by the user in its middle: measured again
                continue
            if left.status == "done":
                self.talk.note(f"campaign: benchmark {left.id} of this turn was finished already")
                return recomputed(left)
            if left.status in ("interrupted", "failed") and left.meta.get("remote_run"):
                self.talk.note(f"campaign: taking up benchmark {left.id}, which went on at the host")
                return self._taken_up(left.id)
        return None

    def _taken_up(self, run_id: str) -> BenchAnswer | None:
        from mtpdeploy.actions.bench import bench

        try:
            answer: BenchAnswer = bench(home=self.home, talk=self.talk, attach=run_id, inventory=self.inventory)
        except (HostUnreachable, LineCut):
            raise
        except MtpError as exc:
            self.talk.note(
                f"campaign: it cannot be taken up ({exc.message.splitlines()[0]}); measuring this turn again"
            )
            return None
        if answer.interrupted or not answer.points:
            self.talk.note("campaign: it did not reach its end; measuring this turn again")
            return None
        return answer

    def _tune(self, run: Run, step: Step, arm: str) -> Told:
        """A search of its own, which resumes by itself."""
        from mtpdeploy.actions.tune import tune

        broken = self._left_search(step)
        spec = self.spec
        loads = spec.bench.get("concurrency")
        options: dict[str, Any] = (
            {"resume": broken}
            if broken
            else {
                "host": spec.host, "profile": arm, "set_": spec.sets, "slo": spec.slo, "objective": _objective(spec.workload),
                "concurrency": loads, "workload": None if loads else spec.bench.get("workload"),
                "requests": spec.bench.get("requests"), "output_tokens": _whole(spec.bench.get("output_tokens")),
                "leave": "original", **spec.tune,
            }
        )  # fmt: skip
        if broken:
            self.talk.note(f"campaign: going on with search {broken}")
        answer = tune(home=self.home, talk=self.talk, inventory=self.inventory, **options)
        document = answer.as_json()
        run.write_json(f"tune-{_file(arm)}.json", document)
        facts = {name: document.get(name) for name in ("verdict", "profile_file", "name", "stopped_because", "refused")}
        facts["launches"] = len(answer.outcomes)
        runs = (answer.run_id,) if answer.run_id else ()
        return Told(
            step.key,
            "done",
            arm=arm,
            message=f"{answer.verdict}; {len(answer.outcomes)} launches",
            runs=runs,
            facts=facts,
        )

    def _left_search(self, step: Step) -> str | None:
        since = self.begun.get(step.key)
        if since is None or since == self.now:
            return None
        rows = self.store.runs(kind="tune", host=self.spec.host, profile=step.arm)
        return next(
            (row.id for row in rows if (row.created_utc or "") >= since and row.status in ("interrupted", "failed")),
            None,
        )

    # -- what it came to

    def _concluded(self, run: Run) -> Campaign:
        """Nothing here measures: it is computed from the runs, and again after a resume."""
        comparisons = self._compare(run)
        recommendation = self._recommend(run)
        run.update_meta(runs=self._runs(), simulated=self._simulated())
        report: dict[str, str] = {}
        # The report reads what was decided from here.
        run.write_json("campaign.json", self._answer(run.id, comparisons, recommendation, {}, None).as_json())

        def write() -> Told:
            from mtpdeploy.actions.runs import report as written

            for kind in ("html", "md", "json"):
                made = written(home=self.home, talk=self.talk, run=(run.id,), format=kind)
                report[kind] = str(made.path)
            return Told("report", "done", message=report["html"])

        self._again(run, "report", write if self._runs() else None, "nothing was measured")
        serving = self._left(run)
        answer = self._answer(run.id, comparisons, recommendation, report, serving)
        word, sentence = answer.verdict
        run.write_json("campaign.json", answer.as_json())
        chosen = recommendation.chosen if recommendation else None
        run.finish(
            {
                "verdict": word, "verdict_text": sentence, "runs": self._runs(), "serving": serving,
                "recommended": chosen.spot.profile if chosen else None,
                "failed": {arm.name: arm.failure.cause for arm in answer.arms if arm.failure is not None},
            }
        )  # fmt: skip
        return answer

    def _again(self, run: Run, key: str, work: Callable[[], Told] | None, reason: str = "") -> None:
        """A concluding step: done anew each time, since what it rests on may have grown."""
        self.told.pop(key, None)
        step = next(one for one in self.steps if one.key == key)
        if work is None:
            self._skip(run, step, reason)
        else:
            self._do(run, key, work)

    def _measured(self) -> dict[str, list[Measured]]:
        """By arm, in the order of the arms; runs that were deleted meanwhile are told and left out."""
        found: dict[str, list[Measured]] = {}
        for step in self.steps:
            if step.what != "bench" or step.arm is None:
                continue
            told = self.told.get(step.key)
            for name in told.runs if told and told.status == "done" else ():
                if (held := self._readable(name)) is not None:
                    found.setdefault(step.arm, []).append(held)
        return found

    def _readable(self, name: str) -> Measured | None:
        try:
            return measured(self.store.run(name))
        except MtpError as exc:
            self.talk.note(f"campaign: {exc.message}; left out")
            return None

    def _compare(self, run: Run) -> tuple[Comparison, ...]:
        made: list[Comparison] = []
        arms = self._measured()
        base = self.spec.arms[0]

        def work() -> Told:
            for name, held in arms.items():
                if name == base or name == _tuned(base):
                    continue
                # A tuned arm stands against the baseline with its own best settings, where that was searched too.
                other = _tuned(base) if name not in self.spec.arms and _tuned(base) in arms else base
                made.append(compare(arms[other], held))
            run.write_json("comparison.json", {"comparisons": [one.as_json() for one in made]})
            return Told("compare", "done", message="; ".join(one.verdict_text for one in made))

        enough = base in arms and len(arms) > 1
        self._again(run, "compare", work if enough else None, "fewer than two arms were measured")
        return tuple(made)

    def _recommend(self, run: Run) -> Recommendation | None:
        made: list[Recommendation] = []

        def work() -> Told:
            from mtpdeploy.actions.recommend import recommend

            made.append(
                recommend(
                    home=self.home, talk=self.talk, run=tuple(self._runs()), workload=self.spec.workload, slo=self.spec.slo,
                    rate=self.spec.rate, baseline=self.spec.arms[0] if self._runs(self.spec.arms[0]) else None,
                )
            )  # fmt: skip
            run.write_json("recommendation.json", made[0].as_json())
            return Told("recommend", "done", message=made[0].why)

        self._again(run, "recommend", work if self._runs() else None, "nothing was measured")
        return made[0] if made else None

    # -- how the host is left

    def _left(self, run: Run) -> str | None:
        wanted = self._wanted(run)
        step = Step("leave", "", "")
        self._again(run, step.key, lambda: self._leave(*wanted))
        told = self.told["leave"]
        return told.message if told.status == "done" else f"unknown: {told.message}"

    def _wanted(self, run: Run) -> tuple[str, str | None]:
        """(profile, launch or stop, its name). Where nothing is recommended, the host is left as it was."""
        if self.spec.leave == "stopped":
            return "stop", None
        if self.spec.leave == "chosen":
            try:
                said = run.read_json("recommendation.json")
            except MtpError:
                said = None
            chosen = (
                said.get("profile") if isinstance(said, Mapping) and self.told["recommend"].status == "done" else None
            )
            name = str(chosen).partition(" [")[0] if chosen else None
            if name is not None and name in self._measured():
                return "profile", name
            self.talk.note("campaign: nothing is recommended, so the host is left as it was")
        before = ((self.told["doctor"].facts or {}).get("before") or {}) if "doctor" in self.told else {}
        if before.get("word") in SERVES and before.get("launch_id"):
            return "launch", str(before["launch_id"])
        return "stop", None

    def _leave(self, how: str, name: str | None) -> Told:
        from mtpdeploy.actions.deploy import deploy
        from mtpdeploy.actions.launches import rollback, status, stop

        common: dict[str, Any] = {
            "home": self.home,
            "talk": self.talk,
            "host": self.spec.host,
            "inventory": self.inventory,
        }
        if how == "profile":
            deployed: Any = deploy(**common, profile=name, set_=self.spec.sets)
            return Told("leave", "done", message=f"{name} (launch {deployed.launch_id})")
        found: Any = status(**common)
        word, launch = found.result.get("word"), found.result.get("launch_id")
        if how == "launch":
            if not (word == "ready" and launch == name):
                rollback(**common, launch=name)
            return Told("leave", "done", message=f"what it served before (launch {name})")
        try:
            if word not in ("stopped", "not deployed"):
                stop(**common, why="campaign: --leave")
        except NotFound:
            pass  # nothing of ours is deployed: stopped it is
        return Told("leave", "done", message="nothing: stopped")

    # -- the answer

    def _simulated(self) -> bool:
        facts = [told.facts or {} for told in self.told.values()]
        before = (self.told["doctor"].facts or {}).get("before") if "doctor" in self.told else None
        served = before.get("simulated") if isinstance(before, Mapping) else None
        return served is True or any(one.get("simulated") is True for one in facts)

    def _arms(self) -> tuple[Arm, ...]:
        names = dict.fromkeys(
            [*self.spec.arms, *(step.arm for step in self.steps if step.arm and step.key.startswith("bench:tuned"))]
        )
        found = []
        for name in names:
            runs, failure = tuple(self._runs(name)), self._failed(name)
            verified = next(
                (told.facts for key, told in self.told.items() if key.startswith("verify:") and told.arm == name), None
            )
            tuned = name not in self.spec.arms
            if tuned and not runs and failure is None:
                continue  # the search found nothing to measure
            found.append(
                Arm(
                    name, "measured" if runs else "failed" if failure else "not reached", runs, failure, verified, tuned
                )
            )
        return tuple(found)

    def _answer(
        self, run_id: str | None, comparisons: tuple[Comparison, ...], recommendation: Recommendation | None,
        report: Mapping[str, str], serving: str | None,
    ) -> Campaign:  # fmt: skip
        return Campaign(
            run_id=run_id, spec=self.spec, steps=tuple(self.steps), told=tuple(self.told.values()), arms=self._arms(),
            comparisons=comparisons, recommendation=recommendation, report=report, serving=serving,
            simulated=self._simulated() or self._rehearsal(), notes=self._notes(),
        )  # fmt: skip

    def _rehearsal(self) -> bool:
        from mtpdeploy.actions.reach import targets

        return any(one.host.simulate is not None for one in targets(self.home, self.spec.host, self.inventory))

    def _notes(self) -> tuple[str, ...]:
        said = []
        for told in self.told.values():
            facts = told.facts or {}
            if told.step.startswith("verify:") and facts.get("verdict") == "differs":
                said.append(f"{told.arm} does not run as asked for: {'; '.join(map(str, facts.get('why') or ()))}")
            if told.status == "failed" and told.step.startswith(("verify:", "tune:", "leave", "report", "recommend")):
                said.append(f"{told.step}: {told.message}")
        return tuple(said)


def _failure(key: str, arm: str | None, exc: MtpError) -> Told:
    diagnosis = exc.details.get("diagnosis")
    cause = diagnosis.get("cause") if isinstance(diagnosis, Mapping) else None
    run_id = exc.details.get("run_id")
    return Told(
        key, "failed", arm=arm, cause=str(cause or exc.details.get("kind") or exc.kind), message=exc.message.splitlines()[0],
        evidence=exc.evidence, next_commands=exc.next_commands, exit_code=exc.exit_code,
        runs=(str(run_id),) if isinstance(run_id, str) else (), facts={"error": exc.kind},
    )  # fmt: skip


def _tuned(arm: str) -> str:
    """The profile that a search of `arm` writes."""
    return f"{Path(arm).stem}-tuned"


def _file(arm: str) -> str:
    """A profile may be a path; its name goes into a file name."""
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in Path(arm).stem)


def _objective(workload: str) -> str:
    return {"interactive": "latency", "batch": "throughput"}.get(workload, "mixed")


def _whole(text: object) -> int | None:
    return int(str(text)) if text is not None and str(text).isdigit() else None


def _utc() -> str:
    """As run folders are stamped, so that the two can be compared as text."""
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%S.%f}Z"
