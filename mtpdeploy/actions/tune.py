"""`tune`: searches the settings of a profile on its host, launch by launch, and writes the winner as a profile of its own.

The state is the run folder: spec.json says what is searched, outcomes.jsonl holds a line a launch, written before the next
one starts. A broken search resumes from it with the same next proposal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import yaml

from mtpdeploy import __version__
from mtpdeploy.actions.plan import stored_facts
from mtpdeploy.actions.reach import Target, keep_facts, targets
from mtpdeploy.actions.reach import agent as agent_at
from mtpdeploy.agent.protocol import ProbeRequest, ProbeSpec
from mtpdeploy.analysis.compare import Comparison, LoadComparison, compare
from mtpdeploy.analysis.model import Observation, Setting, leave_one_out, observations, positions
from mtpdeploy.analysis.samples import Measured, told_apart
from mtpdeploy.analysis.space import Space, default_factors, parse_factors, space
from mtpdeploy.analysis.tune import Candidate, Objective, Outcome, Proposal, Search, Stop
from mtpdeploy.bench.metrics import Limit, parse_slo
from mtpdeploy.errors import (
    ConfigError,
    HostLocked,
    HostUnreachable,
    LaunchFailed,
    MtpError,
    NotReady,
    PlanRefused,
    UsageError,
)
from mtpdeploy.plan import known_of, make_plan
from mtpdeploy.progress import Talk
from mtpdeploy.store import Run, Store
from mtpdeploy.store.choose import benchmarks
from mtpdeploy.store.measured import measured

OBJECTIVES = ("throughput", "latency", "mixed")
MOST_LEARNED = 20  # earlier runs that the model starts from
OUT_OF_MEMORY = ("oom_weights", "oom_after_pool", "oom_graph_capture", "oom_runtime", "kv_pool_too_small",
                 "mamba_pool_too_small")  # fmt: skip
HUNG = ("watchdog_hang", "dist_init_hang", "launch_timeout", "nccl_timeout")


@dataclass(frozen=True, slots=True)
class Spec:
    """What is searched, as spec.json keeps it: enough to go on after a kill."""

    host: str
    profile: str
    objective: Literal["throughput", "latency", "mixed"]
    loads: tuple[int, ...]
    slo: str | None
    factors: Mapping[str, tuple[Any, ...]]
    launches: int
    minutes: float | None
    confirm: int
    leave: str
    name: str
    sets: tuple[str, ...]
    bench: Mapping[str, Any]
    learned_from: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        return {
            "host": self.host, "profile": self.profile, "objective": self.objective, "loads": list(self.loads),
            "slo": self.slo, "factors": {name: list(levels) for name, levels in self.factors.items()},
            "launches": self.launches, "minutes": self.minutes, "confirm": self.confirm, "leave": self.leave,
            "name": self.name, "sets": list(self.sets), "bench": dict(self.bench),
            "learned_from": list(self.learned_from),
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: object, run: Run) -> Spec:
        """ConfigError where the file does not hold a search."""
        try:
            assert isinstance(value, Mapping)
            return cls(
                host=value["host"], profile=value["profile"], objective=value["objective"],
                loads=tuple(value["loads"]), slo=value["slo"],
                factors={name: tuple(levels) for name, levels in value["factors"].items()},
                launches=value["launches"], minutes=value["minutes"], confirm=value["confirm"], leave=value["leave"],
                name=value["name"], sets=tuple(value["sets"]), bench=value["bench"],
                learned_from=tuple(value.get("learned_from", ())),
            )  # fmt: skip
        except (AssertionError, KeyError, TypeError, AttributeError) as exc:
            raise ConfigError(f"{run.file('spec.json')}: is not the spec of a search ({exc!r})") from exc


@dataclass(frozen=True, slots=True)
class Tuned:
    """What the search came to. chosen: None where nothing beat the profile as it is, or nothing was confirmed."""

    run_id: str | None
    spec: Spec
    candidates: int
    refused: Mapping[str, int]
    outcomes: tuple[Outcome, ...]
    proposal: Proposal | None
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

    def as_json(self) -> dict[str, object]:
        return {
            "run_id": self.run_id,
            "simulated": self.simulated,
            "not_like_for_like": self.comparison.as_json()["not_like_for_like"] if self.comparison else [],
            "verdict": self.verdict,
            **self.spec.as_json(),
            "candidates": self.candidates,
            "refused": dict(self.refused),
            "launched": [_told(one) for one in self.outcomes],
            "next": self.proposal.as_json() if self.proposal else None,
            "stopped_because": self.stop,
            "best": _told(self.best) if self.best else None,
            "chosen": _told(self.chosen) if self.chosen else None,
            "confirmation": self.comparison.as_json() if self.comparison else None,
            "profile_file": str(self.profile_file) if self.profile_file else None,
            "serving": self.serving,
            "model_error": dict(self.model_error) if self.model_error else None,
            "predicted": [one.as_json() for one in self.predicted],
        }


def tune(
    *,
    home: Path,
    talk: Talk,
    host: str | None = None,
    profile: str | None = None,
    inventory: Sequence[str] = (),
    set_: Sequence[str] = (),
    objective: str = "throughput",
    slo: str | None = None,
    concurrency: str | None = None,
    workload: str | None = None,
    requests: int | None = None,
    output_tokens: int | None = None,
    space_: str | None = None,
    budget_launches: int = 12,
    budget_minutes: float | None = None,
    confirm: int = 1,
    leave: str = "chosen",
    name: str | None = None,
    gpu_memory_gb: float | None = None,
    resume: str | None = None,
    dry_run: bool = False,
) -> Tuned:
    """Raises what deploy and bench raise where the host cannot be reached or is held by somebody else.

    A launch that fails by its settings is a result, not an error. `dry_run` plans the search and launches nothing.
    """
    store = Store(home)
    run: Run | None = None
    if resume is not None:
        run = store.run(resume, kind="tune" if resume == "last" else None)
        if run.kind != "tune":
            raise UsageError(
                f"run {run.id} is a {run.kind}, not a search", next_commands=["mtpdeploy runs --kind tune"]
            )
        spec = Spec.from_json(run.read_json("spec.json"), run)
        host, profile, set_ = spec.host, spec.profile, spec.sets
    chosen = targets(home, host, inventory, profile=profile, sets=set_, reveal=True)
    if len(chosen) != 1:
        raise UsageError(f"tune searches on one host, not on {len(chosen)}: name it with --host")
    target = chosen[0]
    if target.profile is None:
        raise UsageError("which profile? --profile NAME", next_commands=["mtpdeploy profiles"])
    if run is None:
        spec = _spec(
            home, target, set_, objective, slo, concurrency, workload, requests, output_tokens, space_, budget_launches,
            budget_minutes, confirm, leave, name,
        )  # fmt: skip
    _refuse_foreign_profile(home, spec)
    searcher = _Searcher(home, talk, store, target, spec, inventory, gpu_memory_gb)
    if dry_run:
        return searcher.plan_only()
    if run is None:
        run = store.new_run("tune", searcher.meta())
        run.write_json("spec.json", searcher.spec)
    else:
        run.reopen()
    with run:
        return searcher.search(run)


def _spec(
    home: Path, target: Target, sets: Sequence[str], objective: str, slo: str | None, concurrency: str | None,
    workload: str | None, requests: int | None, output_tokens: int | None, space_: str | None, launches: int,
    minutes: float | None, confirm: int, leave: str, name: str | None,
) -> Spec:  # fmt: skip
    from mtpdeploy.bench import load
    from mtpdeploy.inventory import workload as named

    _limits(slo)
    for option, value, least in (
        ("--budget-launches", launches, 1), ("--confirm", confirm, 0), ("--requests", requests, 1),
        ("--output-tokens", output_tokens, 2),
    ):  # fmt: skip
        if value is not None and value < least:
            raise UsageError(f"{option} {value}: should be {least} or more")
    if minutes is not None and minutes <= 0:
        raise UsageError(f"--budget-minutes {minutes:g}: should be more than 0")
    loads: tuple[int, ...] = (1, 4, 8, 16)
    held = named(home, workload) if workload else None
    if held is not None and held.concurrency:
        loads = held.concurrency
    if concurrency:
        try:
            loads = tuple(int(one) for one in load.numbers(concurrency, int, "--concurrency"))
        except ValueError as exc:
            raise UsageError(str(exc)) from exc
    if objective not in OBJECTIVES:
        raise UsageError(f"--objective {objective}: should be one of {', '.join(OBJECTIVES)}")
    factors = parse_factors(space_) if space_ else default_factors(target.deployment.args, loads)
    bench = {
        "workload": workload,
        "requests": requests,
        "output_tokens": None if output_tokens is None else str(output_tokens),
    }
    return Spec(
        host=target.name, profile=str(target.profile), objective=objective, loads=tuple(sorted(set(loads))),  # type: ignore[arg-type]
        slo=slo, factors=factors, launches=launches, minutes=minutes, confirm=confirm, leave=leave,
        name=name or f"{Path(str(target.profile)).stem}-tuned", sets=tuple(sets), bench=bench,
    )  # fmt: skip


def _limits(slo: str | None) -> tuple[Limit, ...]:
    try:
        return parse_slo(slo) if slo else ()
    except ValueError as exc:
        raise UsageError(f"--slo: {exc}") from exc


class _Searcher:
    """One search on one host."""

    def __init__(
        self, home: Path, talk: Talk, store: Store, target: Target, spec: Spec, inventory: Sequence[str],
        gpu_memory_gb: float | None,
    ) -> None:  # fmt: skip
        self.home, self.talk, self.store, self.target, self.spec = home, talk, store, target, spec
        self.inventory = tuple(inventory)
        self.limits = _limits(spec.slo)
        self.space = self._space(gpu_memory_gb)
        bounds = {one.key.split("_")[0]: one.bound for one in self.limits if one.below}
        self.objective = Objective(spec.objective, spec.loads, bounds.get("tpot"), bounds.get("ttft"))
        self.input_tokens, self.output_tokens = 512.0, float(spec.bench.get("output_tokens") or 256)
        self.runs: list[Measured] = []
        learned = self._learned()
        self.spec = replace(spec, learned_from=tuple(one.run_id for one in learned))
        self.learned = observations(learned)

    def _learned(self) -> tuple[Measured, ...]:
        """Earlier benchmarks of this host under the same SGLang, on the same GPU and clock: the model starts from them."""
        if self.spec.learned_from:
            named = set(self.spec.learned_from)
            return told_apart([one for one in benchmarks(self.store, host=self.target.name) if one.run_id in named])
        simulate = self.target.host.simulate
        found = [
            one
            for one in benchmarks(self.store, host=self.target.name)
            if one.simulated is (simulate is not None)
            and one.provenance.sglang_version == self.version
            and (simulate is None or one.provenance.simulated_clock in (None, simulate.clock))
        ]
        return told_apart(found[:MOST_LEARNED])

    def meta(self) -> dict[str, object]:
        return {
            "host": self.target.name,
            "profile": self.spec.profile,
            "workload": self.spec.bench.get("workload"),
            "simulated": self.target.host.simulate is not None,
            "objective": self.spec.objective,
        }

    def plan_only(self) -> Tuned:
        search = self._search()
        first = search.propose()
        proposal, stop = (None, first.why) if isinstance(first, Stop) else (first, "nothing was launched: --dry-run")
        return self._answer(None, search, proposal, stop, None, None, None, "not searched", None)

    def search(self, run: Run) -> Tuned:
        search = self._search()
        confirmed: dict[str, list[Measured]] = {"incumbent": [], "winner": []}
        for line in run.read_jsonl("outcomes.jsonl"):
            self._retell(line, search, confirmed)
        if search.outcomes:
            self.talk.note(f"tune: goes on after {len(search.outcomes)} launches of run {run.id}")
        while not isinstance(proposal := search.propose(), Stop):
            number = len(search.outcomes) + 1
            self.talk.note(f"tune {number}/{self.spec.launches}: {proposal.candidate.name}; {proposal.why}")
            search.tell(self._launch(run, proposal.candidate, "search")[0])
        self.talk.note(f"tune: {proposal.why}")
        best = search.best
        if best is None:
            return self._finish(run, search, proposal.why, None, None, "no setting came up and met the objectives")
        comparison, verdict = self._confirm(run, best, confirmed)
        chosen = best if verdict == "faster" or (self.spec.confirm == 0) else None
        return self._finish(run, search, proposal.why, chosen, comparison, verdict)

    # -- what may be launched

    def _space(self, gpu_memory_gb: float | None) -> Space:
        deployment, host = self.target.deployment, self.target.host
        facts = stored_facts(self.home, host) or self._probed()
        known = known_of(deployment, facts, facts_source="read from the host at the last contact")
        made = make_plan(deployment, known, home=self.home)
        memory_gb = gpu_memory_gb or known.gpu_memory_gb
        if known.model is None or memory_gb is None:
            what = "the model's shape" if known.model is None else "the GPU's memory"
            raise PlanRefused(
                f"{what} is not known, so no setting can be judged before its launch"
                + (f": {known.no_memory_because}" if known.no_memory_because else ""),
                next_commands=[f"mtpdeploy doctor --host {host.name}", "mtpdeploy tune … --gpu-memory-gb 95"],
            )
        self.version = str(known.version)
        # Free memory as it was last seen may include our own running server, which each launch replaces.
        return space(made.args, made.env, known.version, known.model, memory_gb, self.spec.factors)

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

    def _search(self) -> Search:
        return Search(
            self.space.candidates, self.objective, self.input_tokens, self.output_tokens, self.spec.launches,
            self.spec.minutes, self.space.shape, learned=self.learned,
        )  # fmt: skip

    # -- one launch

    def _launch(self, run: Run, candidate: Candidate, phase: str) -> tuple[Outcome, Measured | None]:
        """Deploys, measures, writes the outcome down. Only what is not the setting's fault is raised."""
        from mtpdeploy.actions.bench import bench
        from mtpdeploy.actions.deploy import deploy

        began = time.monotonic()
        try:
            deploy(
                home=self.home, talk=self.talk, host=self.target.name, profile=self.spec.profile,
                inventory=self.inventory, set_=self._sets(candidate),
            )  # fmt: skip
            answer = bench(
                home=self.home, talk=self.talk, host=self.target.name, profile=self.spec.profile,
                inventory=self.inventory, set_=self._sets(candidate),
                concurrency=",".join(map(str, self.spec.loads)), **self.spec.bench,
            )  # fmt: skip
        except (HostUnreachable, HostLocked, ConfigError, UsageError):
            raise
        except MtpError as exc:
            status, cause = _failure(exc)
            minutes = (time.monotonic() - began) / 60
            outcome = Outcome(candidate, status, None, minutes, cause=cause)
            self.talk.note(f"tune: {candidate.name}: {status} ({cause}), a result like any other")
            self._write(run, outcome, phase)
            return outcome, None
        held = measured(self.store.run(answer.run_id))
        outcome = self._outcome(candidate, held, (time.monotonic() - began) / 60)
        self._write(run, outcome, phase)
        self.runs.append(held)
        return outcome, held

    def _sets(self, candidate: Candidate) -> tuple[str, ...]:
        sets = [f"args.{name}={_yaml(value)}" for name, value in candidate.args.items()]
        if "max_running_requests" in candidate.args and self.target.deployment.slots_for is not None:
            sets.append("slots_for=null")  # the profile's own sizing would win over ours
        return (*self.spec.sets, *sets)

    def _outcome(self, candidate: Candidate, held: Measured, minutes: float) -> Outcome:
        figures: dict[int, tuple[float, float, float | None]] = {}
        for one in held.passes:
            tok_s, tpot = one.number("output_tok_s"), one.number("tpot_ms", "p50")
            usable = one.valid if self.limits else one.counts_for_speed
            if usable and one.load.concurrency is not None and tok_s and tpot and self._within(one.figures):
                figures[one.load.concurrency] = (tok_s, tpot, one.number("ttft_ms", "p50"))
        told = positions([held])
        # The limits were applied to the points' own percentiles, which the objective does not know.
        plain = replace(self.objective, tpot_limit_ms=None, ttft_limit_ms=None)
        return Outcome(
            candidate, "ok", plain.value(figures), minutes, _named(observations([held]), candidate),
            told.by_position if told else None, None, held.run_id,
        )  # fmt: skip

    def _within(self, figures: Mapping[str, object]) -> bool:
        from mtpdeploy.bench.values import Point

        point = Point.from_json(figures)
        values = [(limit, limit.of(point)) for limit in self.limits]
        return all(value is not None and limit.holds(value) for limit, value in values)

    def _write(self, run: Run, outcome: Outcome, phase: str) -> None:
        stamp = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
        run.append_jsonl("outcomes.jsonl", [{**_told(outcome), "phase": phase, "at_utc": stamp}])

    def _retell(self, line: Mapping[str, Any], search: Search, confirmed: dict[str, list[Measured]]) -> None:
        """An outcome of before the kill, read back from its own benchmark run."""
        levels, status = line.get("levels"), line.get("status")
        if not isinstance(levels, Mapping) or not isinstance(status, str):
            return
        key = Candidate(levels, {}, Setting()).key
        candidate = next((one for one in self.space.candidates if one.key == key), None)
        phase, run_id = line.get("phase"), line.get("run_id")
        held = None
        if isinstance(run_id, str):
            try:
                held = measured(self.store.run(run_id))
            except MtpError as exc:
                self.talk.note(f"tune: {exc.message}; that launch will be made again")
                return
        if phase in confirmed and held is not None:
            confirmed[phase].append(held)
        if phase != "search" or candidate is None:
            return
        minutes = float(line.get("minutes") or 0.0)
        if held is not None:
            self.runs.append(held)
            search.tell(self._outcome(candidate, held, minutes))
        else:
            search.tell(Outcome(candidate, status, None, minutes, cause=line.get("cause")))  # type: ignore[arg-type]

    # -- afterwards

    def _confirm(self, run: Run, best: Outcome, confirmed: dict[str, list[Measured]]) -> tuple[Comparison | None, str]:
        """Incumbent and winner in turns, ABBA, so that drift does not decide."""
        if self.spec.confirm == 0:
            return None, "not confirmed: --confirm 0"
        turns = ["incumbent", "winner", "winner", "incumbent"] * self.spec.confirm
        done = Counter({name: len(held) for name, held in confirmed.items()})
        for turn in turns:
            if done[turn] > 0:
                done[turn] -= 1  # made before the kill
                continue
            candidate = self.space.incumbent if turn == "incumbent" else best.candidate
            self.talk.note(f"tune: confirming, {turn}: {candidate.name}")
            outcome, held = self._launch(run, candidate, turn)
            if held is None:
                if turn == "incumbent":
                    return None, f"the profile as it is does not come up ({outcome.cause}); the winner does"
                return None, f"the winner did not come up again ({outcome.cause})"
            confirmed[turn].append(held)
        a = [
            replace(one, provenance=replace(one.provenance, profile=self.spec.profile))
            for one in confirmed["incumbent"]
        ]
        b = [replace(one, provenance=replace(one.provenance, profile=self.spec.name)) for one in confirmed["winner"]]
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
        if verdict.startswith("the profile as it is does not come up"):
            chosen = search.best
        file = self._write_profile(run, chosen, comparison) if chosen else None
        serving = self._leave(chosen)
        answer = self._answer(run.id, search, None, stop, chosen, comparison, file, verdict, serving)
        document = answer.as_json()
        run.write_json("answer.json", document)
        run.finish(
            {
                "verdict": verdict, "launches": len(search.outcomes), "chosen": chosen.candidate.name if chosen else None,
                "runs": [one.run_id for one in (*self.runs,)], "profile_file": str(file) if file else None,
            }
        )  # fmt: skip
        return answer

    def _leave(self, chosen: Outcome | None) -> str:
        """The host ends with the chosen settings, or as it was before, as asked."""
        from mtpdeploy.actions.deploy import deploy

        what = self.spec.name if chosen and self.spec.leave == "chosen" else self.spec.profile
        self.talk.note(f"tune: leaving {self.target.name} with {what}")
        try:
            deploy(
                home=self.home,
                talk=self.talk,
                host=self.target.name,
                profile=what,
                inventory=self.inventory,
                set_=self.spec.sets,
            )
        except (LaunchFailed, NotReady, PlanRefused) as exc:
            return f"nothing: {exc.message.splitlines()[0]}"
        return what

    def _write_profile(self, run: Run, chosen: Outcome, comparison: Comparison | None) -> Path:
        _refuse_foreign_profile(self.home, self.spec)
        path = _profile_path(self.home, self.spec)
        target, spec = self.target, self.spec
        lines = [
            f"{MADE_BY} {__version__} in run {run.id} on {datetime.now(timezone.utc):%Y-%m-%d}.",
            f"Host {target.name}{' (simulated)' if target.host.simulate else ''}, profile {spec.profile}, objective "
            f"{spec.objective} at concurrency {', '.join(map(str, spec.loads))}{f', {spec.slo}' if spec.slo else ''}.",
            f"Chosen: {chosen.candidate.name}; {chosen.value or 0:.0f} tok/s by the objective, measured in run {chosen.run_id}.",
        ]
        if comparison:
            lines.append(f"Confirmed in turns: {comparison.verdict_text} (runs {', '.join(comparison.b_runs)}).")
            lines += [f"Not like for like: {one.text}." for one in comparison.likeness.differences]
        else:
            lines.append("Not confirmed against the profile as it was.")
        lines += [f"Gives up: {cost}." for cost in chosen.candidate.costs]
        header = "".join(f"# {' '.join(line.split())}\n" for line in lines)
        document: dict[str, object] = {
            "description": f"{spec.profile}, tuned for {spec.objective} on {target.name}",
            "extends": spec.profile,
        }
        if "max_running_requests" in chosen.candidate.args and target.deployment.slots_for is not None:
            document["slots_for"] = None
        document["args"] = dict(chosen.candidate.args)
        from mtpdeploy.store.files import write_atomically

        write_atomically(path, (header + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)).encode())
        return path

    def _answer(
        self, run_id: str | None, search: Search, proposal: Proposal | None, stop: str, chosen: Outcome | None,
        comparison: Comparison | None, file: Path | None, verdict: str, serving: str | None,
    ) -> Tuned:  # fmt: skip
        seen = [*search.learned, *(one for outcome in search.outcomes for one in outcome.observations)]
        checked = leave_one_out(seen, shape=self.space.shape) if seen else None
        reasons = Counter(one.why.split(":")[0] for one in self.space.refused)
        return Tuned(
            run_id=run_id, spec=self.spec, candidates=len(self.space.candidates), refused=dict(reasons.most_common()),
            outcomes=tuple(search.outcomes), proposal=proposal, stop=stop, best=search.best, chosen=chosen,
            comparison=comparison, verdict=verdict, profile_file=file, serving=serving,
            model_error=checked.as_json() if checked else None, simulated=self.target.host.simulate is not None,
            predicted=tuple(search.ranked(6)) if seen and run_id is None else (),
        )  # fmt: skip


MADE_BY = "Written by mtpdeploy tune"


def _profile_path(home: Path, spec: Spec) -> Path:
    name = Path(spec.name)
    return name if name.suffix in (".yml", ".yaml") else home / "inventories" / "profiles" / f"{spec.name}.yml"


def _refuse_foreign_profile(home: Path, spec: Spec) -> None:
    """A profile that somebody wrote by hand is never overwritten."""
    path = _profile_path(home, spec)
    try:
        head = path.read_text(encoding="utf-8", errors="replace")[: len(MADE_BY) + 2]
    except FileNotFoundError:
        return
    except OSError as exc:
        raise UsageError(f"--name {spec.name}: {path} cannot be read ({exc.strerror})") from exc
    if not head.startswith(f"# {MADE_BY}"):
        raise UsageError(
            f"--name {spec.name}: {path} was not written by tune and is not overwritten; take another name"
        )


def _failure(exc: MtpError) -> tuple[Literal["oom", "hang", "crash", "refused"], str]:
    """What a failed launch says of its settings."""
    diagnosis = exc.details.get("diagnosis")
    cause = str(diagnosis.get("cause") or exc.kind) if isinstance(diagnosis, Mapping) else exc.kind
    if isinstance(exc, PlanRefused):
        return "refused", exc.message.splitlines()[0]
    if cause in OUT_OF_MEMORY:
        return "oom", cause
    return ("hang" if isinstance(exc, NotReady) or cause in HUNG else "crash"), cause


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
    }


def _yaml(value: object) -> str:
    """A value as `--set` reads it back."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
