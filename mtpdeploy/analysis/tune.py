"""Finds the best setting in few launches.

A launch costs minutes, so the search thinks before each: it fits the step model to all that was measured, adds what each
level of the other factors was seen to do, and proposes the candidate with the largest expected gain per minute. What the
memory budget or the launch rules refuse is never among the candidates. A launch that dies of memory is a result: nothing
that leaves less memory free is tried after it; one that hangs or crashes makes its like less likely.

Pure: the caller measures and tells. The same outcomes in the same order give the same next proposal, so a broken search
resumes by telling the recorded outcomes again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.stats import norm

from mtpdeploy.analysis.model import NOISE, Acceptance, Observation, Setting, Shape, StepModel, fit

Status = Literal["ok", "oom", "hang", "crash", "refused"]
Level = bool | int | float | str | None

# Spread of the log effect of a level beyond the step model, before anything is seen of it. Drafts and batch are in the
# model, but cliffs are not; the memory fraction moves capacity, which is in the model, and hardly anything else.
EFFECT_SPREAD: Mapping[str, float] = {"draft_steps": 0.08, "running": 0.12, "mem_fraction": 0.01, "context": 0.01}
USUAL_EFFECT = 0.05
MINUTES = 2.0  # a launch with its benchmark, before one was timed
PRIOR_ACCEPTANCE = Acceptance([0.85, 0.72, 0.61])  # 3.2 tokens a step at three drafts
FIRST_STEP_MS = 15.0  # only ratios matter before the first measurement


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration that the budget and the rules let through.

    levels: factor → level, its identity. args: SGLang arguments over the profile's (None removes one).
    headroom_gb: memory that the budget expects to be left; None unknown. costs: what it gives up besides speed.
    """

    levels: Mapping[str, Level]
    args: Mapping[str, object]
    setting: Setting
    headroom_gb: float | None = None
    costs: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        return tuple(sorted((name, str(value)) for name, value in self.levels.items()))

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.levels.items()) or "as it is"

    def as_json(self) -> dict[str, object]:
        return {
            "levels": dict(self.levels),
            "args": dict(self.args),
            "headroom_gb": self.headroom_gb,
            "costs": list(self.costs),
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a launch gave. value: the objective, bigger is better; None where it failed or missed the limits."""

    candidate: Candidate
    status: Status
    value: float | None = None
    minutes: float | None = None
    observations: tuple[Observation, ...] = ()
    by_position: tuple[float, ...] | None = None
    cause: str | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """What is maximised, from one figure a load: (concurrency → output tok/s), (concurrency → decode tok/s of a request).

    kind: `throughput` the best output tok/s of any load; `latency` decode tok/s of a request at the lowest concurrency;
    `mixed` the geometric mean of both. limits: a load that breaks one counts for nothing (measured loads only have TTFT).
    """

    kind: Literal["throughput", "latency", "mixed"] = "throughput"
    loads: tuple[int, ...] = (1, 4, 8, 16)
    tpot_limit_ms: float | None = None
    ttft_limit_ms: float | None = None

    def value(self, figures: Mapping[int, tuple[float, float, float | None]]) -> float | None:
        """figures: concurrency → (output tok/s, TPOT ms, TTFT ms or None). None where no load is within the limits."""
        good = {
            at: one
            for at, one in figures.items()
            if (self.tpot_limit_ms is None or one[1] <= self.tpot_limit_ms)
            and (self.ttft_limit_ms is None or one[2] is None or one[2] <= self.ttft_limit_ms)
        }
        if not good:
            return None
        total = max(one[0] for one in good.values())
        user = 1e3 / good[min(good)][1]
        if self.kind == "throughput":
            return total
        return user if self.kind == "latency" else math.sqrt(total * user)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The next launch, and why: the gain that is expected of it, as a share of the best so far, and per minute."""

    candidate: Candidate
    predicted: float
    low: float
    high: float
    expected_gain: float | None
    gain_per_minute: float | None
    why: str

    def as_json(self) -> dict[str, object]:
        return {
            "candidate": self.candidate.as_json(),
            "predicted": {"value": self.predicted, "low": self.low, "high": self.high},
            "expected_gain": self.expected_gain,
            "gain_per_minute": self.gain_per_minute,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Stop:
    """No further launch, and why."""

    why: str


@dataclass
class Search:
    """The state of a search: what may be launched, and what was learned.

    input_tokens, output_tokens: of the workload. launches, minutes: the budget; the confirmation is outside of it.
    learned: what earlier runs on the same host measured; the model knows it, but no launch of this search was it.
    """

    candidates: Sequence[Candidate]
    objective: Objective
    input_tokens: float
    output_tokens: float
    launches: int = 12
    minutes: float | None = None
    shape: Shape = field(default_factory=Shape)
    outcomes: list[Outcome] = field(default_factory=list)
    learned: Sequence[Observation] = ()

    def tell(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    @property
    def best(self) -> Outcome | None:
        """The best outcome; of equal ones the first."""
        done = [one for one in self.outcomes if one.status == "ok" and one.value is not None]
        return max(done, key=lambda one: one.value or 0.0, default=None)

    @property
    def spent_minutes(self) -> float:
        return sum(one.minutes or 0.0 for one in self.outcomes)

    def propose(self) -> Proposal | Stop:
        """The candidate with the largest expected gain per minute; Stop where it is below the noise or the budget is spent."""
        if len(self.outcomes) >= self.launches:
            return Stop(f"the budget of {self.launches} launches is spent")
        if self.minutes is not None and self.spent_minutes + self._minutes() > self.minutes:
            return Stop(f"the next launch would pass the budget of {self.minutes:g} minutes")
        open_ = self.open()
        if not open_:
            return Stop("every candidate was measured or ruled out")
        predicted = self.predictions(open_)
        ok = {one.key: self._chance(one) for one in open_}
        best = self.best
        minutes = self._minutes()
        if best is None or best.value is None:
            index = max(range(len(open_)), key=lambda i: predicted[i][0] + math.log(ok[open_[i].key]))
            mean, deviation = predicted[index]
            return _proposal(open_[index], mean, deviation, None, None, "the model's best guess before any success")
        gains = [
            ok[one.key] * expected_gain(mean - math.log(best.value), deviation)
            for one, (mean, deviation) in zip(open_, predicted, strict=True)
        ]
        index = max(range(len(open_)), key=lambda i: gains[i])
        if gains[index] < NOISE / 2:
            return Stop(f"the best expected gain, {gains[index]:.1%} by {open_[index].name}, is below the noise")
        mean, deviation = predicted[index]
        why = f"expected gain {gains[index]:.1%} over {best.candidate.name}"
        return _proposal(open_[index], mean, deviation, gains[index], gains[index] / minutes, why)

    def ranked(self, count: int) -> list[Proposal]:
        """The open candidates that the model thinks best, with its error bars: settings not run yet."""
        open_ = self.open()
        said = sorted(zip(open_, self.predictions(open_), strict=True), key=lambda pair: (-pair[1][0], pair[0].key))
        return [
            _proposal(one, mean, math.hypot(deviation, NOISE), None, None, "predicted")
            for one, (mean, deviation) in said[:count]
        ]

    def open(self) -> list[Candidate]:
        """Neither measured, nor with less memory left than one that ran out of it."""
        measured = {one.candidate.key for one in self.outcomes}
        short = [one.candidate.headroom_gb for one in self.outcomes if one.status == "oom"]
        floor = max((value for value in short if value is not None), default=None)
        return [
            one
            for one in self.candidates
            if one.key not in measured and (floor is None or one.headroom_gb is None or one.headroom_gb > floor)
        ]

    def predictions(self, candidates: Sequence[Candidate]) -> list[tuple[float, float]]:
        """(mean, standard deviation) of the log objective, by the step model and the levels' effects."""
        model = self.model()
        base = [self._by_model(model, one) for one in candidates]
        effects = _Effects(self._residuals(model))
        return [
            (mean + shift, math.hypot(deviation, spread))
            for (mean, deviation), (shift, spread) in zip(base, map(effects.of, candidates), strict=True)
        ]

    def model(self) -> StepModel:
        """Fitted to every observation; before the first, the prior at an arbitrary speed (only ratios count then)."""
        seen = [*self.learned, *(one for outcome in self.outcomes for one in outcome.observations)]
        positions = max((one.by_position or () for one in self.outcomes), key=len) if self.outcomes else ()
        if not seen:
            guess = Observation("prior", Setting(), 1, self.input_tokens, self.output_tokens, FIRST_STEP_MS, 100.0)
            made = fit([guess], shape=self.shape)
            made.acceptance = PRIOR_ACCEPTANCE
        else:
            made = fit(seen, shape=self.shape)
            if made.acceptance is None:
                made.acceptance = PRIOR_ACCEPTANCE
        if positions:
            made.acceptance = Acceptance(positions)
        return made

    def _by_model(self, model: StepModel, candidate: Candidate) -> tuple[float, float]:
        figures: dict[int, tuple[float, float, float | None]] = {}
        deviations: dict[int, float] = {}
        for load in self.objective.loads:
            said = model.predict(
                candidate.setting, load, input_tokens=self.input_tokens, output_tokens=self.output_tokens
            )
            ttft = said.ttft_ms
            queued = load > said.running and ttft is not None
            wait = said.output_tok_s and load / said.output_tok_s * self.output_tokens * 1e3
            figures[load] = (said.output_tok_s, said.tpot_ms, wait if queued else ttft)
            # Not the misfit, which all candidates of a setting share: the levels' effects learn that.
            deviations[load] = model.doubt(candidate.setting, said.running, self.input_tokens + self.output_tokens / 2)
        value = self.objective.value(figures)
        if value is None or value <= 0:
            return -math.inf, 0.0
        return math.log(value), max(deviations.values())

    def _residuals(self, model: StepModel) -> list[tuple[Candidate, float]]:
        """What measured values leave unexplained by the step model, in logs."""
        found = []
        for one in self.outcomes:
            if one.status == "ok" and one.value:
                mean, _ = self._by_model(model, one.candidate)
                if math.isfinite(mean):
                    found.append((one.candidate, math.log(one.value) - mean))
        return found

    def _minutes(self) -> float:
        timed = [one.minutes for one in self.outcomes if one.minutes]
        return sum(timed) / len(timed) if timed else MINUTES

    def _chance(self, candidate: Candidate) -> float:
        """That it comes up, by what it shares with launches that hung or crashed."""
        chance = 1.0
        for suspects in self._suspects():
            chance *= 1 - min(0.98, sum(weight for one, weight in suspects.items() if one <= set(candidate.key)))
        return chance

    def _suspects(self) -> list[dict[frozenset[tuple[str, str]], float]]:
        """For each hang or crash, the levels and pairs of levels that may be to blame, with their shares.

        What has come up in a good launch is cleared; what stands in several failures is likelier to be the cause.
        """
        failed = [set(one.candidate.key) for one in self.outcomes if one.status in ("hang", "crash", "refused")]
        good = [set(one.candidate.key) for one in self.outcomes if one.status == "ok"]
        found = []
        for levels in failed:
            parts = [frozenset(part) for size in (1, 2) for part in itertools.combinations(sorted(levels), size)]
            open_ = [part for part in parts if not any(part <= one for one in good)] or [frozenset(levels)]
            weights = {part: sum(part <= other for other in failed) ** 2 for part in open_}
            total = sum(weights.values())
            found.append({part: weight / total for part, weight in weights.items()})
        return found


def run(search: Search, measure: Callable[[Candidate], Outcome]) -> Stop:
    """Proposes, measures and tells until the search stops. `measure` records each outcome where it must survive a kill."""
    while not isinstance(proposal := search.propose(), Stop):
        search.tell(measure(proposal.candidate))
    return proposal


def expected_gain(difference: float, deviation: float) -> float:
    """E[max(0, exp(x) - 1)] for x normal: the share by which the best so far is expected to be beaten."""
    if deviation <= 0 or not math.isfinite(difference):
        return max(0.0, math.expm1(difference)) if math.isfinite(difference) else 0.0
    above = math.exp(difference + deviation**2 / 2) * norm.cdf(difference / deviation + deviation)
    return max(0.0, float(above - norm.cdf(difference / deviation)))


class _Effects:
    """Log effects of levels, by ridge regression on what the step model left over: each is small until seen to be large."""

    def __init__(self, residuals: Sequence[tuple[Candidate, float]]) -> None:
        self.columns: dict[tuple[str, str], int] = {}
        for candidate, _ in residuals:
            for level in candidate.key:
                self.columns.setdefault(level, len(self.columns))
        width = len(self.columns) + 1  # and a constant
        rows = np.zeros((len(residuals), width))
        for number, (candidate, _) in enumerate(residuals):
            rows[number, 0] = 1.0
            for level in candidate.key:
                rows[number, 1 + self.columns[level]] = 1.0
        spreads = [USUAL_EFFECT, *(_spread(name) for name, _ in self.columns)]
        precision = rows.T @ rows / NOISE**2 + np.diag([1 / spread**2 for spread in spreads])
        self.covariance = np.linalg.inv(precision)
        self.mean = self.covariance @ rows.T @ np.array([value for _, value in residuals]) / NOISE**2

    def of(self, candidate: Candidate) -> tuple[float, float]:
        row = np.zeros(len(self.mean))
        row[0] = 1.0
        unseen = 0.0
        for level in candidate.key:
            if level in self.columns:
                row[1 + self.columns[level]] = 1.0
            else:
                unseen += _spread(level[0]) ** 2
        variance = float(row @ self.covariance @ row) + unseen
        return float(row @ self.mean), math.sqrt(variance)


def _spread(factor: str) -> float:
    return EFFECT_SPREAD.get(factor, USUAL_EFFECT)


def _proposal(
    candidate: Candidate, mean: float, deviation: float, gain: float | None, rate: float | None, why: str
) -> Proposal:
    factor = math.exp(1.96 * min(deviation, 50.0))
    value = math.exp(mean) if math.isfinite(mean) else 0.0
    return Proposal(candidate, value, value / factor, value * factor, gain, rate, why)
