"""Intervals for a ratio of two arms, over prompts and over runs.

The two things that vary are drawn separately, because they are not the same uncertainty:

- prompts: the arms were given the same prompts, and an arm gains more on some than on others. Prompts are resampled
  with
  replacement, the same draw for both arms (pairing), as whole clusters (all requests of a prompt).
- runs: the same prompts measured again give another number (clocks, neighbours, batch timing). The residuals of the
  runs
  around their arm's mean are pooled over both arms and resampled.

Both have few members (8 prompts, 2 to 5 runs), where a plain percentile bootstrap is too narrow. Residuals are
therefore
scaled by sqrt(n / (n - 1)) and deviations by t(n - 1) / z, the small-sample correction of Hesterberg (2015), "What
teachers should know about the bootstrap"; tests/test_analysis_stats.py measures the coverage that results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats as distributions

Array = NDArray[np.float64]
CONFIDENCE = 0.95
DRAWS = 4000
# With more prompts the resampled mean is normal for every purpose, and drawing 4000 times that many costs seconds a load.
RESAMPLED = 500


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its interval at `CONFIDENCE`.

    Low and high are None where nothing was repeated that could show spread.
    """

    value: float
    low: float | None
    high: float | None

    def as_json(self) -> dict[str, object]:
        return {"value": self.value, "low": self.low, "high": self.high}

    @property
    def relative_half_width(self) -> float | None:
        """Half the width over the value: 0.03 is ± 3 %."""
        if self.low is None or self.high is None or self.value == 0:
            return None
        return (self.high - self.low) / 2 / abs(self.value)


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison at one load.

    weight, cost: of shape (runs, prompts); the arm's figure is sum(weight) / sum(cost), such as tokens over request
        seconds.
    scale: per run, a factor on the figure that the prompts do not explain (mean concurrency for output tok/s), shape
        (runs,).
    """

    weight: Array
    cost: Array
    scale: Array

    @property
    def runs(self) -> int:
        return int(self.weight.shape[0])

    @property
    def prompts(self) -> int:
        return int(self.weight.shape[1])

    def logs(self) -> Array:
        """log of the figure of each run."""
        result: Array = np.log(self.scale * self.weight.sum(axis=1) / self.cost.sum(axis=1))
        return result


def ratio(a: Arm, b: Arm, *, paired: bool, seed: int = 0, draws: int = DRAWS) -> Interval:
    """b's figure over a's, geometric mean over runs, with its interval.

    paired: column j of both arms is the same prompt. One run an arm: the interval holds prompts only (see `Interval`).
    """
    rng = np.random.default_rng(seed)
    point = float(b.logs().mean() - a.logs().mean())
    deviations = _over_prompts(a, b, paired=paired, rng=rng, draws=draws)
    over_runs = _over_runs([a.logs(), b.logs()], rng=rng, draws=draws)
    known = [part for part in (deviations, over_runs) if part is not None]
    if not known:
        return Interval(math.exp(point), None, None)
    return _interval(point, sum(known, np.zeros(draws)))


def ratio_of_runs(a: Sequence[float], b: Sequence[float], *, seed: int = 0, draws: int = DRAWS) -> Interval:
    """b over a where only one figure a run is known."""
    logs = [np.log(np.asarray(a, float)), np.log(np.asarray(b, float))]
    point = float(logs[1].mean() - logs[0].mean())
    deviations = _over_runs(logs, rng=np.random.default_rng(seed), draws=draws)
    return Interval(math.exp(point), None, None) if deviations is None else _interval(point, deviations)


def figure(arm: Arm, *, seed: int = 0, draws: int = DRAWS) -> Interval:
    """One arm's own figure with its interval over prompts and runs."""
    rng = np.random.default_rng(seed)
    logs = arm.logs()
    prompts = (
        _normal(_influence(arm), rng, draws)
        if arm.prompts > RESAMPLED
        else _prompt_draws(arm, _pick(arm.prompts, rng, draws))
    )
    parts = [prompts, _over_runs([logs], rng=rng, draws=draws)]
    known = [part for part in parts if part is not None]
    point = float(logs.mean())
    if not known:
        return Interval(math.exp(point), None, None)
    return _interval(point, sum(known, np.zeros(draws)))


def mean(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """Mean with Student's interval; one value has none."""
    array = np.asarray(values, float)
    value = float(array.mean())
    if array.size < 2:
        return Interval(value, None, None)
    half = float(distributions.t.ppf(0.5 + confidence / 2, array.size - 1) * array.std(ddof=1) / math.sqrt(array.size))
    return Interval(value, value - half, value + half)


def _interval(point: float, deviations: Array) -> Interval:
    """Percentiles of the drawn deviations around the estimate, back from logs."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(deviations, [tail, 1 - tail])
    return Interval(math.exp(point), math.exp(point + float(low)), math.exp(point + float(high)))


def _small_sample(n: float) -> float:
    """How much wider than the normal an interval from n values must be: sqrt(n / (n - 1)) · t / z."""
    tail = 0.5 + CONFIDENCE / 2
    return math.sqrt(n / (n - 1)) * float(distributions.t.ppf(tail, n - 1) / distributions.norm.ppf(tail))


def _pick(prompts: int, rng: np.random.Generator, draws: int) -> NDArray[np.int64] | None:
    return rng.integers(0, prompts, size=(draws, prompts)) if prompts > 1 else None


def _prompt_draws(arm: Arm, picks: NDArray[np.int64] | None) -> Array | None:
    """Deviation of the mean log figure for each draw of prompts."""
    if picks is None:
        return None
    # counts @ column sums is the same as summing the picked columns, without a (draws, runs, prompts) array
    counts = np.zeros((picks.shape[0], arm.prompts))
    np.add.at(counts, (np.arange(picks.shape[0])[:, None], picks), 1.0)
    logs = np.log((counts @ arm.weight.T) / (counts @ arm.cost.T)).mean(axis=1)
    centre = np.log(arm.weight.sum(axis=1) / arm.cost.sum(axis=1)).mean()
    result: Array = (logs - centre) * _small_sample(arm.prompts)
    return result


def _influence(arm: Arm) -> Array:
    """How much each prompt moves the mean log figure, shape (prompts,): the infinitesimal jackknife of a ratio of sums."""
    shares: Array = arm.weight / arm.weight.sum(axis=1, keepdims=True) - arm.cost / arm.cost.sum(axis=1, keepdims=True)
    result: Array = shares.mean(axis=0)
    return result


def _normal(influence: Array, rng: np.random.Generator, draws: int) -> Array:
    """What drawing prompts with replacement comes to where there are many of them."""
    deviation = float(np.sqrt((influence**2).sum())) * _small_sample(len(influence))
    result: Array = rng.normal(0.0, deviation, draws)
    return result


def _over_prompts(a: Arm, b: Arm, *, paired: bool, rng: np.random.Generator, draws: int) -> Array | None:
    if paired and a.prompts != b.prompts:
        raise ValueError("paired arms have the same prompts")
    if min(a.prompts, b.prompts) > RESAMPLED:
        if paired:
            return _normal(_influence(b) - _influence(a), rng, draws)
        return _normal(_influence(b), rng, draws) - _normal(_influence(a), rng, draws)
    picks = _pick(a.prompts, rng, draws)
    of_a = _prompt_draws(a, picks)
    of_b = _prompt_draws(b, picks if paired else _pick(b.prompts, rng, draws))
    if of_a is None or of_b is None:
        return None
    return of_b - of_a


def _over_runs(arms: Sequence[Array], *, rng: np.random.Generator, draws: int) -> Array | None:
    """Deviation of the last arm's mean against the first's (or of the only arm's), from pooled residuals of runs."""
    freedom = sum(len(arm) - 1 for arm in arms)
    if freedom < 1:
        return None
    residuals = np.concatenate(
        [(arm - arm.mean()) * math.sqrt(len(arm) / (len(arm) - 1)) for arm in arms if len(arm) > 1]
    )
    tail = 0.5 + CONFIDENCE / 2
    wider = float(distributions.t.ppf(tail, freedom) / distributions.norm.ppf(tail))
    total = np.zeros(draws)
    for arm in arms:
        total += rng.choice(residuals, size=(draws, len(arm))).mean(axis=1) * rng.choice([-1.0, 1.0], size=draws)
    result: Array = total * wider
    return result
