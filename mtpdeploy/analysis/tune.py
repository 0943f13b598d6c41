"""Finds the best setting in few launches.

A launch costs minutes, so the search thinks before each: it fits the step model to all that was measured, adds what each
level of the other factors was seen to do, and proposes the candidate with the largest expected gain per minute. What the
memory budget or the launch rules refuse is never among the candidates. A launch that dies of memory is a result: nothing
that leaves less memory free is tried after it; one that hangs or crashes makes its like less likely.

Pure: the caller measures and tells. The same outcomes in the same order give the same next proposal, so a broken search
resumes by telling the recorded outcomes again.

Where launches keep coming out beside what was predicted of them, the model does not describe the host. It still proposes what it
expects a gain of, with effects as large as were seen; where it expects none, that ends nothing any more: Optuna's TPE proposes, and the
search ends when nothing better was found for a while.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, norm

from mtpdeploy.analysis import tpe
from mtpdeploy.analysis.model import NOISE, Acceptance, Estimate, Observation, Setting, Shape, StepModel, fit

Status = Literal["ok", "oom", "hang", "crash", "refused"]
Level = bool | int | float | str | None
Key = tuple[tuple[str, str], ...]

# Spread of the log effect of a level beyond the step model, before anything is seen of it. Drafts and batch are in the
# model, but cliffs are not; what only moves capacity, which is in the model, does hardly anything else.
EFFECT_SPREAD: Mapping[str, float] = {
    "draft_steps": 0.08, "running": 0.12, "mem_fraction": 0.01, "context": 0.01, "mamba_slots": 0.01,
}  # fmt: skip
USUAL_EFFECT = 0.05
SCALES = (1.0, 1.4, 2.0, 2.8, 4.0, 5.6)  # of all of them together; SCALE_SPREAD: of its logarithm, beforehand
SCALE_SPREAD = 0.7
LAUNCH_MINUTES = 1.5  # of a launch without its benchmark, before one was timed
REQUESTS = 16  # a load, where the workload does not say
PRIOR_ACCEPTANCE = Acceptance([0.85, 0.72, 0.61])  # 3.2 tokens a step at three drafts
OUTSIDE = 1.96  # deviations from its prediction beyond which a launch is outside of the model's 95 % interval
BY_CHANCE = 0.1  # of as many launches outside by chance, below which the model is not believed any more
PATIENCE = 12  # launches without a better one, after which a search ends whose model is not believed
FIRST_STEP_MS = 15.0  # only ratios matter before the first measurement


def status_of(text: object) -> Status:
    """A status as it was written down; anything else was no success."""
    for known in get_args(Status):
        if text == known:
            found: Status = known
            return found
    return "crash"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration that the budget and the rules let through.

    levels: factor → level, its identity. args: SGLang arguments over the profile's (None removes one).
    headroom_gb: memory that the budget expects to be left; None unknown. costs: what it costs besides speed, in words.
    gives_up: of them what the profile has and this has not (precision, prefix-reuse, context).
    """

    levels: Mapping[str, Level]
    args: Mapping[str, object]
    setting: Setting
    headroom_gb: float | None = None
    costs: tuple[str, ...] = ()
    gives_up: tuple[str, ...] = ()
    key: Key = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", tuple(sorted((name, str(value)) for name, value in self.levels.items())))

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.levels.items()) or "as it is"

    def as_json(self) -> dict[str, object]:
        return {
            "levels": dict(self.levels),
            "args": dict(self.args),
            "headroom_gb": self.headroom_gb,
            "costs": list(self.costs),
            "gives_up": list(self.gives_up),
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a launch gave. value: the objective, bigger is better; None where it failed or missed the limits.

    minutes: of the launch and its benchmark; launch_minutes: of the launch alone, None where it was not timed by itself.
    """

    candidate: Candidate
    status: Status
    value: float | None = None
    minutes: float | None = None
    observations: tuple[Observation, ...] = ()
    by_position: tuple[float, ...] | None = None
    cause: str | None = None
    run_id: str | None = None
    launch_minutes: float | None = None


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

    def relaxed(self, factor: float) -> Objective:
        """The same with limits wider by that factor."""

        def wider(limit: float | None) -> float | None:
            return None if limit is None else limit * factor

        return replace(self, tpot_limit_ms=wider(self.tpot_limit_ms), ttft_limit_ms=wider(self.ttft_limit_ms))


@dataclass(frozen=True, slots=True)
class Proposal:
    """The next launch, and why: the gain that is expected of it, as a share of the best so far, and per minute.

    predicted, low, high: None where the model is not believed. by: whose proposal it is.
    """

    candidate: Candidate
    predicted: float | None
    low: float | None
    high: float | None
    expected_gain: float | None
    gain_per_minute: float | None
    minutes: float
    why: str
    by: Literal["model", "tpe"] = "model"

    def as_json(self) -> dict[str, object]:
        return {
            "candidate": self.candidate.as_json(),
            "by": self.by,
            "predicted": {"value": self.predicted, "low": self.low, "high": self.high},
            "expected_gain": self.expected_gain,
            "gain_per_minute": self.gain_per_minute,
            "minutes": self.minutes,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Stop:
    """No further launch, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class Error:
    """A launch beside what was predicted of it before: by the usual error bars, in logs."""

    launch: int
    error: float
    deviations: float

    @property
    def outside(self) -> bool:
        return abs(self.deviations) > OUTSIDE

    def __str__(self) -> str:
        return f"launch {self.launch} {math.expm1(self.error):+.0%}, {abs(self.deviations):.1f} deviations"


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why the step model is not believed on this host. launch: the first one after that. by: who proposes beside it."""

    launch: int
    errors: tuple[Error, ...]
    by: Literal["model", "tpe"]

    @property
    def why(self) -> str:
        said = "; ".join(str(one) for one in self.errors)
        who = "TPE proposes" if self.by == "tpe" else f"its best guess is launched ({tpe.WITHOUT})"
        return (
            f"the step model does not describe this host ({said}): from launch {self.launch} on, where it expects no gain, {who}, "
            f"until {PATIENCE} launches are not better"
        )

    def as_json(self) -> dict[str, object]:
        errors = [
            {"launch": one.launch, "error": math.expm1(one.error), "deviations": one.deviations} for one in self.errors
        ]
        return {"from_launch": self.launch, "by": self.by, "errors": errors, "why": self.why}


@dataclass
class Search:
    """The state of a search: what may be launched, and what was learned.

    input_tokens, output_tokens: of the workload's requests, of which each load sends `requests`.
    launches, minutes: the budget; the confirmation is outside of it.
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
    requests: int = REQUESTS
    errors: list[Error] = field(default_factory=list)
    misfit: Misfit | None = None

    def tell(self, outcome: Outcome) -> None:
        """Takes a result up, and holds it against what the model said of it before."""
        known = self.learned or any(one.observations for one in self.outcomes)
        if self.misfit is None and known and outcome.status == "ok" and outcome.value:
            ((mean, deviation),) = self.predictions([outcome.candidate], scale=1.0)
            if math.isfinite(mean):
                error = math.log(outcome.value) - mean
                self.errors.append(Error(len(self.outcomes) + 1, error, error / math.hypot(deviation, NOISE)))
        self.outcomes.append(outcome)
        outside = [one for one in self.errors if one.outside]
        if self.misfit is None and _improbable(len(outside), len(self.errors)):
            self.misfit = Misfit(len(self.outcomes) + 1, tuple(outside), "tpe" if tpe.installed() else "model")

    @property
    def best(self) -> Outcome | None:
        """The best outcome; of equal ones the first."""
        done = [one for one in self.outcomes if one.status == "ok" and one.value is not None]
        return max(done, key=lambda one: one.value or 0.0, default=None)

    @property
    def spent_minutes(self) -> float:
        return sum(one.minutes or 0.0 for one in self.outcomes)

    def propose(self) -> Proposal | Stop:
        """The candidate with the largest expected gain per minute; Stop where no gain above the noise is expected.

        Of equal ones that with the fewest costs, then that with the most memory left.
        """
        if len(self.outcomes) >= self.launches:
            return Stop(f"the budget of {self.launches} launches is spent")
        open_ = self.open()
        if not open_:
            return Stop("every candidate was measured or ruled out")
        if self.misfit is not None and (since := self._since_better()) >= PATIENCE:
            return Stop(f"the last {since} launches were not better than the best before them")
        predicted = self.predictions(open_)
        chances = self._chances(open_)
        minutes = self._minutes(open_, chances)
        best = self.best
        gains: list[float | None]
        if best is None or best.value is None:
            gains = [None] * len(open_)
            missed = Counter(one.candidate.setting for one in self.outcomes if one.status == "ok")
            # What came up and missed the limits is not tried at once under another name.
            scores = [
                mean + math.log(max(chance, 1e-9)) - missed[one.setting]
                for one, (mean, _), chance in zip(open_, predicted, chances, strict=True)
            ]
        else:
            level = math.log(best.value)
            gains = [
                chance * expected_gain(mean - level, deviation)
                for (mean, deviation), chance in zip(predicted, chances, strict=True)
            ]
            least = NOISE
            if max(gain or 0.0 for gain in gains) < NOISE:
                if self.misfit is not None and self.misfit.by == "tpe":
                    return self._by_tpe(open_)
                at = max(range(len(open_)), key=lambda i: gains[i] or 0.0)
                said = f"{gains[at]:.1%} by {open_[at].name}"
                if self.misfit is None:
                    return Stop(f"the best expected gain, {said}, is below the noise of {NOISE:.0%}")
                least = 0.0  # what a wrong model expects ends nothing
            scores = [
                (gain or 0.0) / each if (gain or 0.0) >= least else 0.0
                for gain, each in zip(gains, minutes, strict=True)
            ]
        index = max(
            range(len(open_)), key=lambda i: (round(scores[i], 6), -len(open_[i].costs), open_[i].headroom_gb or 0.0)
        )
        if (over := self._over(minutes[index])) is not None:
            return over
        gain = gains[index]
        if best is None or gain is None:
            why = "the model's best guess before any success"
            return _proposal(open_[index], *predicted[index], None, None, minutes[index], why)
        why = f"expected gain {gain:.1%} over {best.candidate.name}, about {minutes[index]:.1f} min"
        return _proposal(open_[index], *predicted[index], gain, gain / minutes[index], minutes[index], why)

    def _over(self, minutes: float) -> Stop | None:
        """Where a launch of so many minutes would pass the budget."""
        if self.minutes is None or self.spent_minutes + minutes <= self.minutes:
            return None
        return Stop(
            f"the next launch, of about {minutes:.1f} minutes, would pass the budget of {self.minutes:g} minutes"
        )

    def _by_tpe(self, open_: Sequence[Candidate]) -> Proposal | Stop:
        """What TPE asks for after all that was launched. Minutes as those of the launches so far."""
        timed = [one.minutes for one in self.outcomes if one.minutes]
        minutes = sum(timed) / len(timed) if timed else LAUNCH_MINUTES
        if (over := self._over(minutes)) is not None:
            return over
        seen = [(dict(one.candidate.key), one.value) for one in self.outcomes]
        index = tpe.next_of([dict(one.key) for one in open_], seen)
        why = (
            f"proposed by TPE: the step model does not describe this host and expects no gain; about {minutes:.1f} min"
        )
        return Proposal(open_[index], None, None, None, None, None, minutes, why, "tpe")

    def _since_better(self) -> int:
        """Launches since the model was given up that did not beat the best before them by more than the noise."""
        first = self.misfit.launch - 1 if self.misfit else 0
        best, since = 0.0, 0
        for number, one in enumerate(self.outcomes):
            better = (one.value or 0.0) > best * (1 + NOISE)
            best = max(best, one.value or 0.0)
            since = 0 if better or number < first else since + 1
        return since

    def ahead(self, count: int) -> list[Proposal]:
        """The next proposals if each launch came out as it is predicted; fewer where the search would stop.

        Only the next one where nothing is predicted.
        """
        other = replace(self, outcomes=list(self.outcomes), errors=list(self.errors))
        found: list[Proposal] = []
        while len(found) < count and not isinstance(said := other.propose(), Stop):
            found.append(said)
            if said.predicted is None:
                break
            seen = other._expected(said.candidate)
            other.tell(Outcome(said.candidate, "ok", said.predicted, said.minutes, seen))
        return found

    def _expected(self, candidate: Candidate) -> tuple[Observation, ...]:
        """What its benchmark would show by the model."""
        model, found = self.model(), []
        for load in self.objective.loads:
            said = model.predict(
                candidate.setting, load, input_tokens=self.input_tokens, output_tokens=self.output_tokens
            )
            found.append(
                Observation(
                    candidate.name, candidate.setting, load, self.input_tokens, self.output_tokens, said.tpot_ms.value,
                    said.ttft_ms.value if said.ttft_ms else None, said.output_tok_s.value,
                    said.accept_length if candidate.setting.draft_steps else None,
                )
            )  # fmt: skip
        return tuple(found)

    def compared(self, one: Candidate, with_: Sequence[Candidate]) -> list[tuple[float, float]]:
        """(mean, deviation) of the log ratio of each one's objective over `one`'s; what both do not know of cancels."""
        model = self.model()
        (base, _), *others = self.predictions([one, *with_])
        load, context = max(self.objective.loads), self.input_tokens + self.output_tokens / 2
        effects = _Effects(self._residuals(model))
        found = []
        for candidate, (mean, _) in zip(with_, others, strict=True):
            own = model.doubt_between(candidate.setting, one.setting, load, context)
            changed = sum(effects.scale**2 * _spread(name) ** 2 for name, _ in set(candidate.key) - set(one.key))
            found.append((mean - base, math.hypot(own, math.sqrt(changed))))
        return found

    def ranked(self, count: int) -> list[Proposal]:
        """The open candidates that the model thinks best, with its error bars: settings not run yet. One for each setting."""
        open_ = self.open()
        said = sorted(
            zip(open_, self.predictions(open_), strict=True),
            key=lambda pair: (-pair[1][0], len(pair[0].costs), -(pair[0].headroom_gb or 0.0)),
        )
        found: dict[tuple[Setting, float], Proposal] = {}
        for one, (mean, deviation) in said:
            same = one.setting, round(mean, 3)
            if same not in found and len(found) < count:
                found[same] = _proposal(one, mean, math.hypot(deviation, NOISE), None, None, 0.0, "predicted")
        return list(found.values())

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

    def predictions(self, candidates: Sequence[Candidate], *, scale: float | None = None) -> list[tuple[float, float]]:
        """(mean, standard deviation) of the log objective, by the step model and the levels' effects.

        scale: how many times as large as usual effects are taken to be; learned from the outcomes where it is not given.
        """
        model = self.model()
        by_setting = {setting: self._by_model(model, setting) for setting in {one.setting for one in candidates}}
        effects = _Effects(self._residuals(model), scale).of(candidates)
        return [
            (by_setting[one.setting][0] + shift, math.hypot(by_setting[one.setting][1], spread))
            for one, (shift, spread) in zip(candidates, effects, strict=True)
        ]

    def model(self) -> StepModel:
        """Fitted to every observation; before the first, the prior at an arbitrary speed (only ratios count then)."""
        seen = [*self.learned, *(one for outcome in self.outcomes for one in outcome.observations)]
        positions = max((one.by_position or () for one in self.outcomes), key=len, default=())
        measured = Acceptance(positions) if positions else None
        if not seen:
            guess = Observation("prior", Setting(), 1, self.input_tokens, self.output_tokens, FIRST_STEP_MS, 100.0)
            return fit([guess], shape=self.shape, acceptance=measured or PRIOR_ACCEPTANCE)
        made = fit(seen, shape=self.shape, acceptance=measured)
        if made.acceptance is None:
            made.acceptance = PRIOR_ACCEPTANCE
        return made

    def _by_model(self, model: StepModel, setting: Setting) -> tuple[float, float]:
        figures: dict[int, tuple[float, float, float | None]] = {}
        deviation = 0.0
        for load in self.objective.loads:
            said = model.predict(setting, load, input_tokens=self.input_tokens, output_tokens=self.output_tokens)
            figures[load] = (said.output_tok_s.value, said.tpot_ms.value, said.ttft_ms.value if said.ttft_ms else None)
            # Not the misfit, which all candidates of a setting share: the levels' effects learn that.
            own = model.doubt(setting, said.running, self.input_tokens + self.output_tokens / 2)
            deviation = max(deviation, own)
        # A setting that may be within the limits is worth a look; what is measured is held to them as they stand.
        value = self.objective.relaxed(math.exp(math.hypot(deviation, NOISE))).value(figures)
        return (-math.inf, 0.0) if value is None or value <= 0 else (math.log(value), deviation)

    def _residuals(self, model: StepModel) -> list[tuple[Candidate, float]]:
        """What measured values leave unexplained by the step model, in logs."""
        found = []
        for one in self.outcomes:
            if one.status == "ok" and one.value:
                mean, _ = self._by_model(model, one.candidate.setting)
                if math.isfinite(mean):
                    found.append((one.candidate, math.log(one.value) - mean))
        return found

    def _minutes(self, candidates: Sequence[Candidate], chances: Sequence[float]) -> list[float]:
        """Expected minutes of each: a launch, and its benchmark if it comes up."""
        timed = [one.launch_minutes for one in self.outcomes if one.launch_minutes]
        timed += [one.minutes for one in self.outcomes if one.minutes and one.status != "ok"]
        launch = sum(timed) / len(timed) if timed else LAUNCH_MINUTES
        model = self.model()
        benchmarks: dict[Setting, float] = {}
        for setting in {one.setting for one in candidates}:
            said = (
                model.predict(setting, load, input_tokens=self.input_tokens, output_tokens=self.output_tokens)
                for load in self.objective.loads
            )
            benchmarks[setting] = sum(
                max(self.requests, one.concurrency) * self.output_tokens / one.output_tok_s.value / 60 for one in said
            )
        return [launch + chance * benchmarks[one.setting] for one, chance in zip(candidates, chances, strict=True)]

    def _chances(self, candidates: Sequence[Candidate]) -> list[float]:
        """Of each that it comes up, by what it shares with launches that hung or crashed."""
        suspects = self._suspects()
        found = []
        for candidate in candidates:
            levels, chance = set(candidate.key), 1.0
            for blamed in suspects:
                chance *= 1 - min(0.98, sum(weight for one, weight in blamed.items() if one <= levels))
            found.append(chance)
        return found

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
    """Log effects of levels, by ridge regression on what the step model left over: each is small until seen to be large.

    How large effects are here is itself learned: the usual spreads are scaled to what makes the residuals most likely.
    """

    def __init__(self, residuals: Sequence[tuple[Candidate, float]], scale: float | None = None) -> None:
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
        values = np.array([value for _, value in residuals])
        spreads = np.array([USUAL_EFFECT, *(_spread(name) for name, _ in self.columns)])
        if scale is None:
            scale = max(SCALES, key=lambda one: _likelihood(rows * spreads, values, one)) if residuals else 1.0
        self.scale = scale
        precision = rows.T @ rows / NOISE**2 + np.diag(1 / (self.scale * spreads) ** 2)
        self.covariance = np.linalg.inv(precision)
        self.mean = self.covariance @ rows.T @ values / NOISE**2

    def of(self, candidates: Sequence[Candidate]) -> list[tuple[float, float]]:
        """(mean, deviation) of each one's levels together."""
        rows = np.zeros((len(candidates), len(self.mean)))
        rows[:, 0] = 1.0
        unseen = np.zeros(len(candidates))
        for number, candidate in enumerate(candidates):
            for level in candidate.key:
                if level in self.columns:
                    rows[number, 1 + self.columns[level]] = 1.0
                else:
                    unseen[number] += (self.scale * _spread(level[0])) ** 2
        variances = np.einsum("ij,jk,ik->i", rows, self.covariance, rows) + unseen
        return list(zip((rows @ self.mean).tolist(), np.sqrt(variances).tolist(), strict=True))


def _likelihood(rows: NDArray[np.float64], values: NDArray[np.float64], scale: float) -> float:
    """Log likelihood of the residuals where all effects are `scale` times as large as usual, which itself is unlikely."""
    covariance = scale**2 * rows @ rows.T + NOISE**2 * np.eye(len(values))
    _, logarithm = np.linalg.slogdet(covariance)
    fit_ = float(values @ np.linalg.solve(covariance, values))
    return -0.5 * (float(logarithm) + fit_ + (math.log(scale) / SCALE_SPREAD) ** 2)


def _improbable(outside: int, of: int) -> bool:
    """More than one outside of its 95 % interval, and hardly by chance."""
    return outside > 1 and float(binom.sf(outside - 1, of, 2 * norm.sf(OUTSIDE))) < BY_CHANCE


def _spread(factor: str) -> float:
    return EFFECT_SPREAD.get(factor, USUAL_EFFECT)


def _proposal(
    candidate: Candidate,
    mean: float,
    deviation: float,
    gain: float | None,
    rate: float | None,
    minutes: float,
    why: str,
) -> Proposal:
    said = Estimate.around(math.exp(mean) if math.isfinite(mean) else 0.0, deviation)
    return Proposal(candidate, said.value, said.low, said.high, gain, rate, minutes, why)
