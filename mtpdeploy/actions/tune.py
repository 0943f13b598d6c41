"""`tune`: searches the settings of a profile on its host, launch by launch, and writes the winner as a profile of its own.

The state is the run folder: spec.json says what is searched and on what ground, outcomes.jsonl holds a line a launch, written
before the next one starts, launching.json says which launch is under way. A broken search resumes from it with the same next
proposal, and takes up a benchmark that went on at the host.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from mtpdeploy.actions.plan import stored_facts
from mtpdeploy.actions.reach import Target, keep_facts, targets
from mtpdeploy.actions.reach import agent as agent_at
from mtpdeploy.actions.tuneprofile import refuse_foreign, write_profile
from mtpdeploy.actions.tunespec import Spec, limits, read_spec
from mtpdeploy.agent.protocol import ProbeRequest, ProbeSpec
from mtpdeploy.analysis.compare import Comparison, LoadComparison, compare
from mtpdeploy.analysis.model import NOISE, Estimate, Observation, Setting, leave_one_out, observations, positions
from mtpdeploy.analysis.samples import Measured, told_apart
from mtpdeploy.analysis.space import FACTORS, GIVEABLE, Ground, Space, default_factors, space
from mtpdeploy.analysis.tune import Candidate, Misfit, Objective, Outcome, Proposal, Search, Status, Stop, status_of
from mtpdeploy.errors import (
    CannotTell,
    ConfigError,
    HostLocked,
    HostUnreachable,
    LaunchFailed,
    LineCut,
    MtpError,
    NotReady,
    PlanRefused,
    RemoteError,
    UsageError,
)
from mtpdeploy.plan import known_of, make_plan
from mtpdeploy.plan.calibration import as_stored, from_stored
from mtpdeploy.plan.known import Known
from mtpdeploy.progress import Talk
from mtpdeploy.store import Run, Store
from mtpdeploy.store.choose import benchmarks
from mtpdeploy.store.measured import measured

MOST_LEARNED = 20  # earlier runs that the model starts from
AHEAD = 3  # proposals that a dry run shows
NOT_THE_SETTINGS = (HostUnreachable, HostLocked, LineCut, ConfigError, UsageError)  # never a result of a launch
OUT_OF_MEMORY = ("oom_weights", "oom_after_pool", "oom_graph_capture", "oom_runtime", "kv_pool_too_small",
                 "mamba_pool_too_small")  # fmt: skip
HUNG = ("watchdog_hang", "dist_init_hang", "launch_timeout", "nccl_timeout")
RESUMED = ("host", "inventory", "resume", "dry_run")  # options that go with --resume; the rest is the run's


@dataclass(frozen=True, slots=True)
class RuledOut:
    """Combinations that are not launched for one reason, with an example."""

    rule: str
    count: int
    example: str
    why: str

    def as_json(self) -> dict[str, object]:
        return {"rule": self.rule, "count": self.count, "example": self.example, "why": self.why}


@dataclass(frozen=True, slots=True)
class Price:
    """What giving something up is predicted to bring: the best setting with it over the best without, 95 %."""

    give_up: str
    candidate: Candidate
    ratio: Estimate

    def as_json(self) -> dict[str, object]:
        return {"give_up": self.give_up, "candidate": self.candidate.as_json(), "ratio": self.ratio.as_json()}


@dataclass(frozen=True, slots=True)
class Tuned:
    """What the search came to. chosen: None where nothing beat the profile as it is, or nothing was confirmed.

    first: what a dry run would launch, each as if the one before came out as predicted. predicted: settings not run, by the
    model that earlier runs of this host fitted. prices: what is not searched, and what it would bring. misfit: why the model
    is not believed here; then nothing is predicted.
    """

    run_id: str | None
    spec: Spec
    candidates: int
    ruled_out: tuple[RuledOut, ...]
    outcomes: tuple[Outcome, ...]
    first: tuple[Proposal, ...]
    stop: str
    best: Outcome | None
    chosen: Outcome | None
    comparison: Comparison | None
    verdict: str
    profile_file: Path | None
    serving: str | None
    model_error: Mapping[str, object] | None
    simulated: bool
    predicted: tuple[Proposal, ...] = ()
    prices: tuple[Price, ...] = ()
    misfit: Misfit | None = None

    @property
    def exit_code(self) -> int:
        """0; 12 where the search ended without an answer: nothing came up, or the confirmation does not decide."""
        undecided = self.best is None or (self.comparison is not None and self.verdict == "can't tell")
        return CannotTell.exit_code if self.run_id is not None and undecided else 0

    @property
    def factors(self) -> Mapping[str, Sequence[Any]]:
        return self.spec.factors or {}

    def as_json(self) -> dict[str, object]:
        return {
            "run_id": self.run_id,
            "simulated": self.simulated,
            "not_like_for_like": self.comparison.as_json()["not_like_for_like"] if self.comparison else [],
            "verdict": self.verdict,
            **self.spec.as_json(),
            "space": [
                {**FACTORS[name].as_json(), "levels": list(levels), "searched": len(levels) > 1}
                for name, levels in self.factors.items()
            ],
            "candidates": self.candidates,
            "refused": {one.rule: one.count for one in self.ruled_out},
            "ruled_out": [one.as_json() for one in self.ruled_out],
            "launched": [_told(one) for one in self.outcomes],
            "next": self.first[0].as_json() if self.first else None,
            "first": [one.as_json() for one in self.first],
            "stopped_because": self.stop,
            "best": _told(self.best) if self.best else None,
            "chosen": _told(self.chosen) if self.chosen else None,
            "confirmation": self.comparison.as_json() if self.comparison else None,
            "profile_file": str(self.profile_file) if self.profile_file else None,
            "serving": self.serving,
            "model_error": dict(self.model_error) if self.model_error else None,
            "model_misfit": self.misfit.as_json() if self.misfit else None,
            "predicted": [one.as_json() for one in self.predicted],
            "prices": [one.as_json() for one in self.prices],
        }


def tune(
    *,
    home: Path,
    talk: Talk,
    host: str | None = None,
    profile: str | None = None,
    inventory: Sequence[str] = (),
    set_: Sequence[str] = (),
    objective: str | None = None,
    slo: str | None = None,
    concurrency: str | None = None,
    workload: str | None = None,
    requests: int | None = None,
    output_tokens: int | None = None,
    space_: str | None = None,
    give_up: str | None = None,
    budget_launches: int | None = None,
    budget_minutes: float | None = None,
    confirm: int | None = None,
    leave: str | None = None,
    name: str | None = None,
    gpu_memory_gb: float | None = None,
    resume: str | None = None,
    dry_run: bool = False,
) -> Tuned:
    """Raises what deploy and bench raise where the host cannot be reached or is held by somebody else.

    A launch that fails by its settings is a result, not an error. `dry_run` plans the search and launches nothing.
    """
    given: dict[str, Any] = {
        "profile": profile, "set_": set_, "objective": objective, "slo": slo, "concurrency": concurrency,
        "workload": workload, "requests": requests, "output_tokens": output_tokens, "space_": space_, "give_up": give_up,
        "budget_launches": budget_launches, "budget_minutes": budget_minutes, "confirm": confirm, "leave": leave,
        "name": name, "gpu_memory_gb": gpu_memory_gb, "inventory": inventory,
    }  # fmt: skip
    store = Store(home)
    if resume is not None:
        run = _broken(store, resume, {**given, "host": host})
        spec = Spec.of(run)
        searcher = _Searcher(home, talk, store, _target(home, spec.host, spec), spec)
        if dry_run:
            return searcher.plan_only(run)
        run.reopen()
        return searcher.search(run)
    target = _target(home, host, None, profile, inventory, set_)
    spec = read_spec(home, target.name, str(target.profile), given)
    refuse_foreign(home, spec)
    searcher = _Searcher(home, talk, store, target, spec)
    if dry_run:
        return searcher.plan_only(None)
    run = store.new_run("tune", searcher.meta())
    run.write_json("spec.json", searcher.spec.as_json())
    return searcher.search(run)


def _target(
    home: Path, host: str | None, spec: Spec | None, profile: str | None = None, inventory: Sequence[str] = (),
    sets: Sequence[str] = (),
) -> Target:  # fmt: skip
    if spec is not None:
        profile, inventory, sets = spec.profile, spec.inventory, spec.sets
    chosen = targets(home, host, inventory, profile=profile, sets=sets, reveal=True)
    if len(chosen) != 1:
        raise UsageError(f"tune searches on one host, not on {len(chosen)}: name it with --host")
    if chosen[0].profile is None:
        raise UsageError("which profile? --profile NAME", next_commands=["mtpdeploy profiles"])
    return chosen[0]


def _broken(store: Store, resume: str, given: Mapping[str, Any]) -> Run:
    """The run to go on with. Options that it has of its own cannot be changed in its middle."""
    run = store.run(resume, kind="tune" if resume == "last" else None)
    if run.kind != "tune":
        raise UsageError(f"run {run.id} is a {run.kind}, not a search", next_commands=["mtpdeploy runs --kind tune"])
    if said := [
        f"--{name.rstrip('_').replace('_', '-')}" for name, value in given.items() if value and name not in RESUMED
    ]:
        raise UsageError(
            f"--resume goes on with the settings of run {run.id}: leave out {', '.join(said)}, or begin a new search",
            next_commands=[f"mtpdeploy tune --resume {run.id}"],
        )
    if given["host"] and given["host"] != run.meta.get("host"):
        raise UsageError(f"run {run.id} searches on {run.meta.get('host')}, not on {given['host']}")
    if run.status == "done":
        raise UsageError(f"search {run.id} is complete", next_commands=[f"mtpdeploy runs show {run.id}"])
    return run


class _Searcher:
    """One search on one host."""

    def __init__(self, home: Path, talk: Talk, store: Store, target: Target, spec: Spec) -> None:
        self.home, self.talk, self.store, self.target = home, talk, store, target
        self.limits = limits(spec.slo)
        self.ground, self.spec = self._judge(spec)
        if self.spec.factors is None:
            factors = default_factors(self.ground, spec.loads, spec.give_up)
            self.spec = replace(self.spec, factors=factors)
        self.talk.stage(target.name, "judging the settings by the memory budget and the launch rules")
        self.space: Space = space(self.ground, self.spec.factors or {})
        bounds = {one.key.split("_")[0]: one.bound for one in self.limits if one.below}
        self.objective = Objective(spec.objective, spec.loads, bounds.get("tpot"), bounds.get("ttft"))
        self.runs: list[Measured] = []
        learned = self._learned()
        self.spec = replace(self.spec, learned_from=tuple(one.run_id for one in learned))
        self.learned = observations(learned)

    def meta(self) -> dict[str, object]:
        return {
            "host": self.target.name,
            "profile": self.spec.profile,
            "workload": self.spec.bench.get("workload"),
            "simulated": self.target.host.simulate is not None,
            "objective": self.spec.objective,
        }

    def plan_only(self, run: Run | None) -> Tuned:
        search = self._search()
        if run is not None:
            self._retell(run, search)
        ahead = tuple(search.ahead(AHEAD))
        stop = "nothing was launched: --dry-run"
        if not ahead and isinstance(said := search.propose(), Stop):
            stop = said.why
        return replace(
            self._answer(None, search, stop, None, None, None, "not searched", None),
            first=ahead,
            predicted=tuple(search.ranked(6)) if (self.learned or search.outcomes) and search.misfit is None else (),
        )

    def search(self, run: Run) -> Tuned:
        """Until the search stops, then the confirmation and the profile. Whatever breaks it off says how it goes on."""
        again = f"mtpdeploy tune --resume {run.id}"
        with run:
            try:
                return self._searched(run)
            except KeyboardInterrupt:
                self.talk.note(f"tune: interrupted; go on with: {again}")
                self.talk.note(f"tune: what {self.target.name} serves now: mtpdeploy status --host {self.target.name}")
                raise
            except MtpError as exc:
                exc.next_commands = (again, *exc.next_commands)
                raise

    def _searched(self, run: Run) -> Tuned:
        search = self._search()
        confirmed = self._retell(run, search)
        if search.outcomes:
            self.talk.note(f"tune: goes on after {len(search.outcomes)} launches of run {run.id}")
        if search.misfit is not None:
            self.talk.note(f"tune: {search.misfit.why}")
        while not isinstance(proposal := search.propose(), Stop):
            number = len(search.outcomes) + 1
            self.talk.note(f"tune {number}/{self.spec.launches}: {proposal.candidate.name}; {proposal.why}")
            believed = search.misfit is None
            search.tell(self._launch(run, proposal.candidate, "search")[0])
            if believed and search.misfit is not None:
                self.talk.note(f"tune: {search.misfit.why}")
        self.talk.note(f"tune: {proposal.why}")
        best = search.best
        if best is None:
            return self._finish(run, search, proposal.why, None, None, "no setting came up and met the objectives")
        if not best.candidate.args:
            return self._finish(
                run, search, proposal.why, None, None, "the profile as it is is the best that was found"
            )
        comparison, verdict = self._confirm(run, best, confirmed)
        only = verdict.startswith(NO_INCUMBENT)
        chosen = best if verdict == "faster" or only or self.spec.confirm == 0 else None
        return self._finish(run, search, proposal.why, chosen, comparison, verdict)

    # -- what may be launched

    def _judge(self, spec: Spec) -> tuple[Ground, Spec]:
        """What candidates are judged by. A resumed search keeps what it began with, so that its candidates stay the same."""
        deployment, host = self.target.deployment, self.target.host
        facts = stored_facts(self.home, host) or self._probed()
        known = known_of(
            deployment, facts, gpu_memory_gb=spec.gpu_memory_gb, facts_source="read from the host at the last contact"
        )
        made = make_plan(deployment, known, home=self.home)
        args = {name: value for name, value in made.args.items() if name not in ("host", "port")}
        if spec.args is not None and _plain(args) != _plain(spec.args):
            raise ConfigError(
                f"profile {spec.profile} has changed since this search began, so its launches would not be comparable",
                next_commands=[f"mtpdeploy tune --host {host.name} --profile {spec.profile} --dry-run"],
            )
        held = spec.ground
        if held is not None:
            if held["sglang_version"] != str(known.version):
                raise ConfigError(
                    f"{host.name} has SGLang {known.version} now and had {held['sglang_version']} when this search began",
                    next_commands=[f"mtpdeploy tune --host {host.name} --profile {spec.profile} --dry-run"],
                )
            known = replace(
                known, gpu_memory_gb=held["gpu_memory_gb"], available_gb=held["available_gb"],
                calibration=from_stored(held["calibration"]),
            )  # fmt: skip
        ground = self._ground(made.args, made.env, known, spec)
        stored = as_stored(known.calibration) if known.calibration else None
        kept = {"sglang_version": str(known.version), "gpu_memory_gb": known.gpu_memory_gb,
                "available_gb": known.available_gb, "calibration": stored}  # fmt: skip
        return ground, replace(spec, ground=kept, args=args)

    def _ground(self, args: Mapping[str, Any], env: Mapping[str, Any], known: Known, spec: Spec) -> Ground:
        if known.model is None or known.gpu_memory_gb is None:
            what = "the model's shape" if known.model is None else "the GPU's memory"
            raise PlanRefused(
                f"{what} is not known, so no setting can be judged before its launch"
                + (f": {known.no_memory_because}" if known.no_memory_because else ""),
                next_commands=[f"mtpdeploy doctor --host {self.target.name}", "mtpdeploy tune … --gpu-memory-gb 95"],
            )
        return Ground(
            args, env, known.version, known.model, known.gpu_memory_gb, known.available_gb, known.calibration,
            known.help_flags, spec.input_tokens + spec.output_tokens,
        )  # fmt: skip

    def _probed(self) -> dict[str, Any]:
        d, t = self.target.deployment, self.target
        self.talk.stage(t.name, "reading the host's facts")
        port = d.args.get("port")
        request = ProbeSpec(python=d.python, env=t.probe_env, port=port if isinstance(port, int) else None)
        if isinstance(path := d.args.get("model_path"), str):
            request["model_path"] = path
        with agent_at(t) as client:
            facts = dict(client.call("probe", ProbeRequest(probe=request)))
        keep_facts(self.home, t.host, facts)
        return facts

    def _learned(self) -> tuple[Measured, ...]:
        """Earlier benchmarks of this host under the same SGLang, on the same GPU and clock: the model starts from them."""
        held = benchmarks(self.store, host=self.target.name)
        if self.spec.learned_from:
            return told_apart([one for one in held if one.run_id in set(self.spec.learned_from)])
        simulate = self.target.host.simulate
        found = [
            one
            for one in held
            if one.simulated is (simulate is not None)
            and one.provenance.sglang_version == str(self.ground.version)
            and (simulate is None or one.provenance.simulated_clock in (None, simulate.clock))
        ]
        return told_apart(found[:MOST_LEARNED])

    def _search(self) -> Search:
        spec = self.spec
        search = Search(
            self.space.candidates, self.objective, float(spec.input_tokens), float(spec.output_tokens), spec.launches,
            spec.minutes, self.space.shape, learned=self.learned,
        )  # fmt: skip
        return search if spec.requests is None else replace(search, requests=spec.requests)

    # -- one launch

    def _launch(self, run: Run, candidate: Candidate, phase: str) -> tuple[Outcome, Measured | None]:
        """Deploys, measures, writes the outcome down. Only what is not the setting's fault is raised."""
        run.write_json("launching.json", {"levels": dict(candidate.levels), "phase": phase, "at_utc": _now()})
        began = time.monotonic()
        ready = began
        try:
            self._deploy(self.spec.profile, self._sets(candidate))
            ready = time.monotonic()
            run_id = self._bench(candidate)
        except NOT_THE_SETTINGS:
            raise
        except MtpError as exc:
            if isinstance(exc, RemoteError) and ready > began and self._still_ready():
                raise  # the server stands: what failed is the client beside it, and would fail for every setting
            status, cause = _failure(exc)
            outcome = Outcome(candidate, status, None, (time.monotonic() - began) / 60, cause=cause)
            self.talk.note(f"tune: {candidate.name}: {status} ({cause}), a result like any other")
            self._write(run, outcome, phase)
            return outcome, None
        minutes, launch = (time.monotonic() - began) / 60, (ready - began) / 60
        return self._measured(run, candidate, phase, run_id, minutes, launch)

    def _measured(
        self, run: Run, candidate: Candidate, phase: str, run_id: str, minutes: float, launch: float | None
    ) -> tuple[Outcome, Measured | None]:
        held = measured(self.store.run(run_id))
        outcome = self._outcome(candidate, held, minutes, launch)
        self._write(run, outcome, phase)
        if outcome.status != "ok":
            return outcome, None
        self.runs.append(held)
        return outcome, held

    def _deploy(self, profile: str, sets: Sequence[str]) -> None:
        from mtpdeploy.actions.deploy import deploy

        deploy(
            home=self.home, talk=self.talk, host=self.target.name, profile=profile, inventory=self.spec.inventory,
            set_=tuple(sets),
        )  # fmt: skip

    def _bench(self, candidate: Candidate) -> str:
        """The benchmark's run. KeyboardInterrupt where the user ended it in its middle."""
        from mtpdeploy.actions.bench import bench

        answer = bench(
            home=self.home, talk=self.talk, host=self.target.name, profile=self.spec.profile,
            inventory=self.spec.inventory, set_=self._sets(candidate),
            concurrency=",".join(map(str, self.spec.loads)), **self.spec.bench,
        )  # fmt: skip
        if answer.interrupted:
            raise KeyboardInterrupt
        return str(answer.run_id)

    def _still_ready(self) -> bool:
        from mtpdeploy.actions.launches import status

        try:
            found: Any = status(home=self.home, talk=self.talk, host=self.target.name, inventory=self.spec.inventory)
        except MtpError:
            return False
        return bool(found.result.get("word") == "ready")

    def _sets(self, candidate: Candidate) -> tuple[str, ...]:
        sets = [f"args.{name}={_yaml(value)}" for name, value in candidate.args.items()]
        if "max_running_requests" in candidate.args and self.target.deployment.slots_for is not None:
            sets.append("slots_for=null")  # the profile's own sizing would win over ours
        return (*self.spec.sets, *sets)

    def _outcome(self, candidate: Candidate, held: Measured, minutes: float, launch: float | None) -> Outcome:
        figures: dict[int, tuple[float, float, float | None]] = {}
        for one in held.passes:
            tok_s, tpot = one.number("output_tok_s"), one.number("tpot_ms", "p50")
            usable = one.valid if self.limits else one.counts_for_speed
            if usable and one.load.concurrency is not None and tok_s and tpot and self._within(one.figures):
                figures[one.load.concurrency] = (tok_s, tpot, one.number("ttft_ms", "p50"))
        if not any(one.number("completed") for one in held.passes):
            return Outcome(candidate, "hang", None, minutes, cause="no request was answered", run_id=held.run_id)
        told = positions([held])
        # The limits were applied to the points' own percentiles, which the objective does not know.
        plain = replace(self.objective, tpot_limit_ms=None, ttft_limit_ms=None)
        return Outcome(
            candidate, "ok", plain.value(figures), minutes, _named(observations([held]), candidate),
            told.by_position if told else None, None, held.run_id, launch,
        )  # fmt: skip

    def _within(self, figures: Mapping[str, object]) -> bool:
        from mtpdeploy.bench.values import Point

        point = Point.from_json(figures)
        values = [(limit, limit.of(point)) for limit in self.limits]
        return all(value is not None and limit.holds(value) for limit, value in values)

    def _write(self, run: Run, outcome: Outcome, phase: str) -> None:
        run.append_jsonl("outcomes.jsonl", [{**_told(outcome), "phase": phase, "at_utc": _now()}])
        run.file("launching.json").unlink(missing_ok=True)

    # -- after a kill

    def _retell(self, run: Run, search: Search) -> dict[str, list[tuple[Candidate, Measured]]]:
        """Tells the search what was measured before the kill; what was measured for the confirmation, by side."""
        confirmed: dict[str, list[tuple[Candidate, Measured]]] = {"incumbent": [], "winner": []}
        written = {str(line.get("run_id")) for line in run.read_jsonl("outcomes.jsonl") if line.get("run_id")}
        self._take_up(run, written)
        for line in run.read_jsonl("outcomes.jsonl"):
            levels, phase, run_id = line.get("levels"), str(line.get("phase")), line.get("run_id")
            if not isinstance(levels, Mapping):
                continue  # a line that a kill cut short
            candidate = self._candidate(levels)
            if candidate is None:
                self.talk.note(f"tune: {dict(levels)} is not among the settings any more; that launch is not counted")
                continue
            minutes, launch = _number(line.get("minutes")) or 0.0, _number(line.get("launch_minutes"))
            status = status_of(line.get("status"))
            if not isinstance(run_id, str):
                if phase == "search":
                    search.tell(Outcome(candidate, status, None, minutes, cause=_text(line.get("cause"))))
                continue
            try:
                held = measured(self.store.run(run_id))
            except MtpError as exc:
                self.talk.note(f"tune: {exc.message}; that launch will be made again")
                continue
            outcome = self._outcome(candidate, held, minutes, launch)
            if outcome.status == "ok":
                self.runs.append(held)
            if phase == "search":
                search.tell(outcome)
            elif phase in confirmed and outcome.status == "ok":
                confirmed[phase].append((candidate, held))
        return confirmed

    def _candidate(self, levels: Mapping[str, Any]) -> Candidate | None:
        if not levels:
            return self.space.incumbent
        key = Candidate(levels, {}, Setting()).key
        return next((one for one in self.space.candidates if one.key == key), None)

    def _take_up(self, run: Run, written: set[str]) -> None:
        """The launch that was under way at the kill: a benchmark that was finished, or went on alone at the host, counts.

        A load that still runs there would disturb the next measurement, so it is waited for rather than left.
        """
        from mtpdeploy.actions.bench import bench

        under_way = run.read_json("launching.json")
        if not isinstance(under_way, Mapping) or not isinstance(levels := under_way.get("levels"), Mapping):
            return
        candidate, since = self._candidate(levels), str(under_way.get("at_utc"))
        for row in self.store.runs(kind="bench", host=self.target.name):
            if candidate is None or (row.created_utc or "") < since or row.id in written:
                continue
            left = self.store.run(row.id)
            if left.meta.get("interrupted") is True or not _fits(left, candidate):
                continue  # ended by the user in its middle, or of somebody else
            if left.status == "done" or not left.meta.get("remote_run"):
                run_id = left.id if left.status == "done" else None
            else:
                self.talk.note(f"tune: taking up benchmark {left.id}, which went on at the host")
                try:
                    answer = bench(home=self.home, talk=self.talk, attach=left.id, inventory=self.spec.inventory)
                    run_id = None if answer.interrupted or not answer.points else left.id
                except (HostUnreachable, LineCut):
                    raise
                except MtpError as exc:
                    self.talk.note(f"tune: it cannot be taken up ({exc.message.splitlines()[0]}); measuring again")
                    run_id = None
            if run_id is not None:
                took = _minutes_between(since, self.store.run(run_id).finished_utc)
                self._measured(run, candidate, str(under_way.get("phase")), run_id, took, None)
            return

    # -- afterwards

    def _confirm(
        self, run: Run, best: Outcome, confirmed: dict[str, list[tuple[Candidate, Measured]]]
    ) -> tuple[Comparison | None, str]:
        """Incumbent and winner in turns, ABBA, so that drift does not decide."""
        if self.spec.confirm == 0:
            return None, "not confirmed: --confirm 0"
        turns = ["incumbent", "winner", "winner", "incumbent"] * self.spec.confirm
        sides: dict[str, list[Measured]] = {
            name: [
                held
                for candidate, held in confirmed[name]
                if name == "incumbent" or candidate.key == best.candidate.key
            ]
            for name in ("incumbent", "winner")
        }
        done = Counter({name: len(held) for name, held in sides.items()})
        for number, turn in enumerate(turns, 1):
            if done[turn] > 0:
                done[turn] -= 1  # made before the kill
                continue
            candidate = self.space.incumbent if turn == "incumbent" else best.candidate
            self.talk.note(f"tune: confirming {number}/{len(turns)}, {turn}: {candidate.name}")
            outcome, held = self._launch(run, candidate, turn)
            if held is None:
                if turn == "incumbent":
                    return None, f"{NO_INCUMBENT} ({outcome.cause}); the winner does"
                return None, f"the winner did not come up again ({outcome.cause})"
            sides[turn].append(held)
        a = [replace(one, provenance=replace(one.provenance, profile=self.spec.profile)) for one in sides["incumbent"]]
        b = [
            replace(one, provenance=replace(one.provenance, profile=self.spec.name, tuned=True))
            for one in sides["winner"]
        ]
        comparison = compare(a, b)
        return comparison, self._verdict(comparison)

    def _verdict(self, comparison: Comparison) -> str:
        """At the load that the objective is about."""
        loads = [one for one in comparison.loads if one.load.concurrency is not None]
        if not loads:
            return "can't tell"
        if self.spec.objective == "latency":
            interval = loads[0].request or loads[0].batch
        else:
            best: LoadComparison = max(loads, key=lambda one: one.b_tok_s or 0.0)
            interval = best.batch
        if interval is None or interval.low is None or interval.high is None:
            return "can't tell"
        return "faster" if interval.low > 1 else "slower" if interval.high < 1 else "can't tell"

    def _finish(
        self, run: Run, search: Search, stop: str, chosen: Outcome | None, comparison: Comparison | None, verdict: str
    ) -> Tuned:
        file = write_profile(self.home, self.target, self.spec, run.id, chosen, comparison) if chosen else None
        serving = self._leave(chosen)
        answer = self._answer(run.id, search, stop, chosen, comparison, file, verdict, serving)
        run.write_json("answer.json", answer.as_json())
        run.finish(
            {
                "verdict": verdict, "stopped_because": stop, "launches": len(search.outcomes), "chosen": chosen.candidate.name if chosen else None,
                "runs": [one.run_id for one in self.runs], "profile_file": str(file) if file else None,
            }
        )  # fmt: skip
        return answer

    def _leave(self, chosen: Outcome | None) -> str:
        """The host ends with the chosen settings, by their own file, or with the profile as it was, as asked."""
        what, sets = self.spec.profile, self.spec.sets
        if chosen and self.spec.leave == "chosen":
            # What --set says of arguments and environment is in the file; other settings are not a profile's.
            what, sets = self.spec.name, tuple(one for one in sets if not one.startswith(("args.", "env.")))
        self.talk.note(f"tune: leaving {self.target.name} with {what}")
        try:
            self._deploy(what, sets)
        except (LaunchFailed, NotReady, PlanRefused) as exc:
            return f"nothing: {exc.message.splitlines()[0]}"
        return what

    def _answer(
        self, run_id: str | None, search: Search, stop: str, chosen: Outcome | None, comparison: Comparison | None,
        file: Path | None, verdict: str, serving: str | None,
    ) -> Tuned:  # fmt: skip
        seen = [*search.learned, *(one for outcome in search.outcomes for one in outcome.observations)]
        checked = leave_one_out(seen, shape=self.space.shape) if seen else None
        return Tuned(
            run_id=run_id, spec=self.spec, candidates=len(self.space.candidates), ruled_out=self._ruled_out(),
            outcomes=tuple(search.outcomes), first=(), stop=stop, best=search.best, chosen=chosen, comparison=comparison,
            verdict=verdict, profile_file=file, serving=serving, model_error=checked.as_json() if checked else None,
            simulated=self.target.host.simulate is not None, prices=self._prices(search),
            misfit=search.misfit,
        )  # fmt: skip

    def _ruled_out(self) -> tuple[RuledOut, ...]:
        counts = Counter(one.rule for one in self.space.refused)
        first = {one.rule: one for one in reversed(self.space.refused)}
        return tuple(
            RuledOut(rule, count, Candidate(first[rule].levels, {}, Setting()).name, first[rule].why)
            for rule, count in counts.most_common()
        )

    def _prices(self, search: Search) -> tuple[Price, ...]:
        """What is held because it would be given up, and what the model expects of it beside the best without."""
        held = search.best.candidate if search.best else None
        if held is None:
            ranked = search.ranked(1)
            held = ranked[0].candidate if ranked and not search.outcomes else None
        if held is None or self.spec.own_space or search.misfit is not None:
            return ()  # nothing came up to compare with, or a model that is wrong would say it
        found = []
        for one in GIVEABLE:
            if one in self.spec.give_up:
                continue
            wide = default_factors(self.ground, self.spec.loads, (one,))
            vary = {name for name, factor in FACTORS.items() if factor.gives_up == one} | {"draft_steps", "running"}
            if all(len(wide.get(name, ())) < 2 for name in vary - {"draft_steps", "running"}):
                continue
            levels = {name: own if name in vary else (held.levels.get(name, own[0]),) for name, own in wide.items()}
            try:
                other = [made for made in space(self.ground, levels).candidates if one in made.gives_up]
            except PlanRefused:
                continue
            if other and (price := _price(one, search, held, other)).ratio.value > 1 + NOISE:
                found.append(price)
        return tuple(found)


def _price(what: str, search: Search, held: Candidate, other: Sequence[Candidate]) -> Price:
    said = search.compared(held, other)
    at = max(range(len(other)), key=lambda i: said[i][0])
    ratio = Estimate.around(math.exp(said[at][0]), said[at][1])
    return Price(what, other[at], ratio)


NO_INCUMBENT = "the profile as it is does not come up"


def _failure(exc: MtpError) -> tuple[Status, str]:
    """What a failed launch says of its settings."""
    diagnosis = exc.details.get("diagnosis")
    cause = str(diagnosis.get("cause") or exc.kind) if isinstance(diagnosis, Mapping) else exc.kind
    if isinstance(exc, PlanRefused):
        return "refused", exc.message.splitlines()[0]
    if cause in OUT_OF_MEMORY:
        return "oom", cause
    return ("hang" if isinstance(exc, NotReady) or cause in HUNG else "crash"), cause


def _fits(run: Run, candidate: Candidate) -> bool:
    """Whether that benchmark measured a launch with the candidate's arguments."""
    args = run.provenance.args
    return bool(args) and all(args.get(name) == value for name, value in candidate.args.items())


def _named(seen: Sequence[Observation], candidate: Candidate) -> tuple[Observation, ...]:
    """Under the candidate's name; its drafts and state width as planned, its running requests as the server allowed."""
    return tuple(
        replace(
            one,
            name=candidate.name,
            setting=replace(candidate.setting, running=one.setting.running or candidate.setting.running),
        )
        for one in seen
    )


def _told(outcome: Outcome) -> dict[str, object]:
    return {
        **outcome.candidate.as_json(),
        "status": outcome.status,
        "value": outcome.value,
        "minutes": outcome.minutes,
        "cause": outcome.cause,
        "run_id": outcome.run_id,
        "launch_minutes": outcome.launch_minutes,
    }


def _yaml(value: object) -> str:
    """A value as `--set` reads it back."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _plain(value: object) -> object:
    """As JSON gives it back: tuples as lists."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _now() -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def _minutes_between(begun: str, ended: str | None) -> float:
    try:
        first, last = (datetime.fromisoformat(str(one).replace("Z", "+00:00")) for one in (begun, ended))
    except ValueError:
        return 0.0
    return max(0.0, (last - first).total_seconds() / 60)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
