"""`campaign`: the whole story in one command: doctor, plan, every arm deployed and measured in turns, compared, decided, reported.

The state is the run folder: spec.json says what is to be done, steps.jsonl holds a line when a step begins and one when it has
ended, before the next one begins. Whatever breaks it off (a kill, a cut line, a reboot), the same command or `--resume` goes on
from there: what was measured is not measured again, and a benchmark that went on alone at the host is taken up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Literal

from mtpdeploy.actions.bench import Wish
from mtpdeploy.actions.bencharms import turns
from mtpdeploy.actions.reach import targets
from mtpdeploy.analysis.compare import Comparison
from mtpdeploy.analysis.likeness import parse_utc
from mtpdeploy.analysis.recommend import Recommendation
from mtpdeploy.errors import ConfigError, HostLocked, UsageError
from mtpdeploy.progress import Talk
from mtpdeploy.store import Run, Store

LEAVES = ("chosen", "original", "stopped")
DEFAULT_LOADS = "1,4,16"  # one user, the few that the shipped MTP profile admits, and more than those
TAKEN_UP_WITHIN = timedelta(hours=24)  # an older broken campaign is of another day: it goes on by --resume only


@dataclass(frozen=True, slots=True)
class Spec:
    """What is to be done, as spec.json keeps it: enough to go on after a kill. arms: the baseline first."""

    host: str
    arms: tuple[str, ...]
    order: str
    repeat: int | None
    sets: tuple[str, ...]
    bench: Mapping[str, Any]
    workload: str
    slo: str | None
    rate: float | None
    tuned: tuple[str, ...]
    tune: Mapping[str, Any]
    leave: str

    def as_json(self) -> dict[str, object]:
        return {
            "host": self.host, "arms": list(self.arms), "order": self.order, "repeat": self.repeat,
            "sets": list(self.sets), "bench": dict(self.bench), "workload": self.workload, "slo": self.slo,
            "rate": self.rate, "tuned": list(self.tuned), "tune": dict(self.tune), "leave": self.leave,
        }  # fmt: skip

    @classmethod
    def of(cls, run: Run) -> Spec:
        """ConfigError where the folder does not hold a campaign."""
        value = run.read_json("spec.json")
        try:
            assert isinstance(value, Mapping)
            return cls(
                host=value["host"], arms=tuple(value["arms"]), order=value["order"], repeat=value["repeat"],
                sets=tuple(value["sets"]), bench=dict(value["bench"]), workload=value["workload"], slo=value["slo"],
                rate=value["rate"], tuned=tuple(value["tuned"]), tune=dict(value["tune"]), leave=value["leave"],
            )  # fmt: skip
        except (AssertionError, KeyError, TypeError, ValueError) as exc:
            raise ConfigError(f"{run.file('spec.json')}: is not the spec of a campaign ({exc!r})") from exc

    @property
    def turns(self) -> tuple[str, ...]:
        """The arms in the order in which they are measured."""
        return turns(self.arms, self.order, self.repeat)


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of the campaign. key: `deploy:2:mtp` is the deploy of the second turn."""

    key: str
    do: str
    why: str
    arm: str | None = None

    @property
    def what(self) -> str:
        return self.key.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Told:
    """How a step ended. failed: a result with its cause; skipped: why it was not worth doing. runs: what it left in runs/."""

    step: str
    status: Literal["done", "failed", "skipped"]
    seconds: float = 0.0
    arm: str | None = None
    cause: str | None = None
    message: str | None = None
    evidence: tuple[str, ...] = ()
    next_commands: tuple[str, ...] = ()
    exit_code: int = 0
    runs: tuple[str, ...] = ()
    facts: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "step": self.step, "status": self.status, "seconds": round(self.seconds, 1), "arm": self.arm,
            "cause": self.cause, "message": self.message, "evidence": list(self.evidence),
            "next_commands": list(self.next_commands), "exit_code": self.exit_code, "runs": list(self.runs),
            "facts": dict(self.facts) if self.facts is not None else None,
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Told | None:
        """None for a line that says that a step began, or that is damaged."""
        if value.get("status") not in ("done", "failed", "skipped") or not isinstance(value.get("step"), str):
            return None
        facts = value.get("facts")
        return cls(
            step=value["step"], status=value["status"], seconds=float(value.get("seconds") or 0.0), arm=value.get("arm"),
            cause=value.get("cause"), message=value.get("message"), evidence=tuple(value.get("evidence") or ()),
            next_commands=tuple(value.get("next_commands") or ()), exit_code=int(value.get("exit_code") or 0),
            runs=tuple(value.get("runs") or ()), facts=facts if isinstance(facts, Mapping) else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arm:
    """What became of one profile. status: measured, failed, or `not reached` where the campaign ended before it."""

    name: str
    status: Literal["measured", "failed", "not reached"]
    runs: tuple[str, ...]
    failure: Told | None
    verified: Mapping[str, Any] | None
    tuned: bool = False

    def as_json(self) -> dict[str, object]:
        failure = self.failure
        return {
            "status": self.status,
            "runs": list(self.runs),
            "tuned": self.tuned,
            "cause": failure.cause if failure else None,
            "message": failure.message if failure else None,
            "evidence": list(failure.evidence) if failure else [],
            "next_commands": list(failure.next_commands) if failure else [],
            "verified": dict(self.verified) if self.verified is not None else None,
        }


@dataclass(frozen=True, slots=True)
class Campaign:
    """The whole story. comparison: of the first MTP arm with the baseline, as they were given; None where an arm gave nothing.

    run_id None: a dry run. serving: what the host was left with, in words.
    """

    run_id: str | None
    spec: Spec
    steps: tuple[Step, ...]
    told: tuple[Told, ...]
    arms: tuple[Arm, ...]
    comparisons: tuple[Comparison, ...]
    recommendation: Recommendation | None
    report: Mapping[str, str]
    serving: str | None
    simulated: bool
    notes: tuple[str, ...] = ()

    @property
    def comparison(self) -> Comparison | None:
        return self.comparisons[0] if self.comparisons else None

    @property
    def verdict(self) -> tuple[str, str]:
        """(word, sentence)."""
        failed = [arm for arm in self.arms if arm.status == "failed"]
        if self.comparison is not None:
            return self.comparison.verdict, self.comparison.verdict_text
        if failed:
            told = "; ".join(
                f"{arm.name} gave no measurement: {arm.failure.message if arm.failure else ''}" for arm in failed
            )
            return "can't tell", told
        return "can't tell", "nothing was compared yet"

    @property
    def exit_code(self) -> int:
        """0: decided. 12: the evidence does not decide. If no arm could be measured, that of the first failure."""
        if self.run_id is None:
            return 0
        failures = [arm.failure for arm in self.arms if arm.failure is not None]
        if failures and not any(arm.status == "measured" for arm in self.arms):
            return failures[0].exit_code or 1
        return self.comparison.exit_code if self.comparison is not None else 12

    def as_json(self) -> dict[str, object]:
        word, sentence = self.verdict
        comparison = self.comparison.as_json() if self.comparison else None
        ended = {one.step: one for one in self.told}
        return {
            "run_id": self.run_id,
            "simulated": self.simulated,
            "not_like_for_like": comparison["not_like_for_like"] if comparison else [],
            "verdict": word,
            "verdict_text": sentence,
            "spec": self.spec.as_json(),
            "arms": {arm.name: arm.as_json() for arm in self.arms},
            "steps": [
                {
                    "key": step.key, "do": step.do, "why": step.why,
                    "status": ended[step.key].status if step.key in ended else "to do",
                    "seconds": round(ended[step.key].seconds, 1) if step.key in ended else None,
                    "message": ended[step.key].message if step.key in ended else None,
                    "runs": list(ended[step.key].runs) if step.key in ended else [],
                }
                for step in self.steps
            ],
            "comparison": comparison,
            "comparisons": [one.as_json() for one in self.comparisons],
            "recommendation": self.recommendation.as_json() if self.recommendation else None,
            "report": dict(self.report),
            "runs": [run for arm in self.arms for run in arm.runs],
            "serving": self.serving,
            "notes": list(self.notes),
        }  # fmt: skip


def campaign(
    *,
    home: Path,
    talk: Talk,
    host: str | None = None,
    baseline: str = "baseline",
    profile: str = "mtp",
    inventory: Sequence[str] = (),
    set_: Sequence[str] = (),
    workload: str | None = None,
    concurrency: str | None = None,
    requests: int | None = None,
    input_tokens: str | None = None,
    output_tokens: str | None = None,
    prompts: str | None = None,
    order: str | None = None,
    repeat: int | None = None,
    slo: str | None = None,
    rate: float | None = None,
    tune: bool = False,
    tune_baseline: bool = False,
    space_: str | None = None,
    budget_launches: int = 12,
    budget_minutes: float | None = None,
    leave: str = "chosen",
    resume: str | None = None,
    fresh: bool = False,
    dry_run: bool = False,
) -> Campaign:
    """An arm that cannot be launched or measured is a result; what says nothing of an arm (no connection, a lock, a wrong option)
    is raised, and the same command goes on from there."""
    from mtpdeploy.actions.campaignsteps import Conductor

    store = Store(home)
    if resume is not None:
        run = store.run(resume, kind="campaign" if resume == "last" else None)
        if run.kind != "campaign":
            raise UsageError(
                f"run {run.id} is a {run.kind}, not a campaign", next_commands=["mtpdeploy runs --kind campaign"]
            )
        conductor = Conductor(home, talk, Spec.of(run), inventory)
        if dry_run:
            return conductor.planned(run)
        run.reopen()
        return conductor.conduct(run)
    bench = {
        "workload": _measured_under(home, workload), "concurrency": concurrency, "requests": requests,
        "input_tokens": input_tokens, "output_tokens": output_tokens, "prompts": prompts,
    }  # fmt: skip
    spec = Spec(
        host=_one_host(home, host, inventory),
        arms=(baseline, *(name.strip() for name in profile.split(",") if name.strip())),
        order="", repeat=repeat, sets=tuple(set_), bench=bench, workload=workload or "mixed", slo=slo, rate=rate,
        tuned=(), tune={}, leave=leave,
    )  # fmt: skip
    letters = "".join(chr(ord("A") + place) for place in range(len(spec.arms)))
    spec = replace(spec, order=order or letters + letters[::-1])
    searched = tuple(name for name in spec.arms if name != baseline) if tune or tune_baseline else ()
    spec = replace(
        spec,
        tuned=(baseline, *searched) if tune_baseline else searched,
        tune={"space_": space_, "budget_launches": budget_launches, "budget_minutes": budget_minutes}
        if searched
        else {},
    )
    if (space_ or budget_minutes) and not searched:
        raise UsageError("--space and --budget-minutes are of a search: add --tune")
    spec = _checked(home, spec, inventory)
    conductor = Conductor(home, talk, spec, inventory)
    if dry_run:
        return conductor.planned(None)
    run_, goes_on = _begun(store, spec, fresh)
    if goes_on:
        talk.note(f"campaign: goes on with run {run_.id}, which was broken off; --fresh begins anew")
    return conductor.conduct(run_)


def _measured_under(home: Path, name: str | None) -> str | None:
    """The workload whose load is sent: `interactive` and `batch` are shipped ones, `mixed` is the default load."""
    return None if name in (None, "mixed") else name


def _one_host(home: Path, host: str | None, inventory: Sequence[str]) -> str:
    found = targets(home, host, inventory)
    if len(found) != 1:
        raise UsageError(
            f"a campaign is of one host, and --host means {len(found)}: {', '.join(one.name for one in found)}"
        )
    return found[0].name


def _checked(home: Path, spec: Spec, inventory: Sequence[str]) -> Spec:
    """Everything that can be refused before a host is touched. With the loads that are meant, so that all arms get the same."""
    from mtpdeploy.actions.recommend import meant
    from mtpdeploy.actions.report import limits

    if spec.leave not in LEAVES:
        raise UsageError(f"--leave {spec.leave}: should be one of {', '.join(LEAVES)}")
    if spec.repeat is not None and spec.repeat < 1:
        raise UsageError(f"--repeat {spec.repeat}: should be 1 or more")
    if spec.slo:
        limits(spec.slo)
    if spec.rate is not None and spec.rate <= 0:
        raise UsageError(f"--rate {spec.rate:g}: should be more than 0 requests a second")
    meant(home, spec.workload)
    _ = spec.turns  # refuses an order that does not fit the arms
    for name in spec.arms:
        targets(home, spec.host, inventory, profile=name, sets=spec.sets)
    wish = Wish.read(home, **bench_options(spec))
    if not (wish.asked.concurrency or wish.asked.rate):
        spec = replace(spec, bench={**spec.bench, "concurrency": DEFAULT_LOADS})
    if spec.tuned:
        from mtpdeploy.analysis.space import parse_factors

        if int(spec.tune["budget_launches"]) < 1:
            raise UsageError(f"--budget-launches {spec.tune['budget_launches']}: should be 1 or more")
        minutes = spec.tune["budget_minutes"]
        if minutes is not None and minutes <= 0:
            raise UsageError(f"--budget-minutes {minutes:g}: should be more than 0")
        if spec.tune["space_"]:
            parse_factors(spec.tune["space_"])
    return spec


def bench_options(spec: Spec) -> dict[str, Any]:
    """What `Wish.read` wants to know, for the loads of a campaign."""
    return {
        "rate": None, "arrivals": "poisson", "trace": None, "max_concurrency": None, "repeat": None, "ignore_eos": False,
        "dataset": None, "seed": None, "temperature": None, "sweep": (), "slo": spec.slo, "find": None, "salt": True,
        "timeout": 600.0, "client_processes": None, "api": None, "model": None, **spec.bench,
    }  # fmt: skip


def _begun(store: Store, spec: Spec, fresh: bool) -> tuple[Run, bool]:
    """A new run, or the broken one of the same spec that goes on. HostLocked while another campaign is at work on the host."""
    now = datetime.now(timezone.utc)
    for row in store.runs(kind="campaign", host=spec.host):
        if row.status == "running":
            raise HostLocked(
                f"campaign {row.id} is at work on {spec.host}", next_commands=[f"mtpdeploy runs show {row.id}"]
            )
        begun = parse_utc(row.created_utc)
        if fresh or row.status not in ("interrupted", "failed") or begun is None or now - begun > TAKEN_UP_WITHIN:
            continue
        run = store.run(row.id)
        try:
            same = Spec.of(run).as_json() == spec.as_json()
        except ConfigError:
            continue
        if same:
            run.reopen()
            return run, True
    run = store.new_run(
        "campaign",
        {"host": spec.host, "profile": " / ".join(spec.arms), "workload": spec.bench.get("workload"), "runs": []},
    )
    run.write_json("spec.json", spec)
    return run, False
