"""The intervals: right on average, as wide as they claim, and silent where nothing was repeated."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import Generator

from mtpdeploy.analysis import stats
from mtpdeploy.analysis.stats import Arm, Interval, figure, mean, ratio, ratio_of_runs

TRUE = 2.0


def arm(rng: Generator, runs: int, effects: np.ndarray, run_noise: float, request_noise: float) -> Arm:
    """256 tokens a prompt at 100 tok/s, times exp(effect of the prompt), exp(noise of the run), exp(noise of the request)."""
    tokens = np.full((runs, len(effects)), 256.0)
    noise = rng.normal(0, request_noise, tokens.shape) + rng.normal(0, run_noise, (runs, 1))
    return Arm(tokens, tokens / 100 * np.exp(-(effects + noise)), np.full(runs, 4.0))


def coverage(runs: tuple[int, int], prompts: int, run_noise: float, prompt_noise: float, trials: int = 300) -> float:
    """Share of simulated comparisons whose interval holds the true ratio."""
    rng = np.random.default_rng(7)
    held = 0
    for trial in range(trials):
        common, gain = rng.normal(0, 0.3, prompts), rng.normal(np.log(TRUE), prompt_noise, prompts)
        a = arm(rng, runs[0], common, run_noise, 0.01)
        b = arm(rng, runs[1], common + gain, run_noise, 0.01)
        said = ratio(a, b, paired=True, seed=trial, draws=600)
        assert said.low is not None
        assert said.high is not None
        held += said.low <= TRUE <= said.high
    return held / trials


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runs", "prompts", "run_noise", "prompt_noise"),
    [
        ((2, 2), 8, 0.02, 0.1),
        ((2, 2), 16, 0.05, 0.02),
        ((3, 3), 16, 0.02, 0.1),
        ((4, 4), 8, 0.05, 0.05),
        ((1, 3), 16, 0.03, 0.03),
    ],
)
def test_an_interval_of_95_percent_holds_the_truth_about_as_often(
    runs: tuple[int, int], prompts: int, run_noise: float, prompt_noise: float
) -> None:
    assert 0.92 <= coverage(runs, prompts, run_noise, prompt_noise) <= 1.0


@pytest.mark.slow
def test_single_runs_hold_the_truth_only_over_prompts_which_is_why_a_verdict_wants_a_margin() -> None:
    assert coverage((1, 1), 16, 0.0, 0.1) > 0.9
    assert coverage((1, 1), 16, 0.05, 0.02) < 0.7


def test_a_ratio_is_the_geometric_mean_over_runs() -> None:
    assert ratio_of_runs([10, 40], [40, 40]).value == pytest.approx(2.0)


def test_nothing_repeated_gives_no_interval() -> None:
    alone = Arm(np.array([[100.0]]), np.array([[1.0]]), np.ones(1))
    assert ratio(alone, alone, paired=True) == Interval(1.0, None, None)
    assert ratio_of_runs([1.0], [2.0]) == Interval(2.0, None, None)
    assert mean([3.0]) == Interval(3.0, None, None)
    assert figure(alone).low is None


def test_more_runs_and_more_prompts_narrow_the_interval() -> None:
    rng = np.random.default_rng(3)

    def width(runs: int, prompts: int) -> float:
        widths = []
        for _ in range(20):
            effects = rng.normal(0, 0.1, prompts)
            pair = [arm(rng, runs, effects + rng.normal(0, 0.05, prompts), 0.03, 0.01) for _ in range(2)]
            widths.append(ratio(*pair, paired=True, draws=500).relative_half_width or 0.0)
        return float(np.median(widths))

    assert width(2, 8) > width(4, 8) > width(4, 64) > 0


def test_unequal_prompt_counts_are_not_taken_for_pairs() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="same prompts"):
        ratio(arm(rng, 1, np.zeros(4), 0, 0.1), arm(rng, 1, np.zeros(5), 0, 0.1), paired=True)


def test_the_same_seed_gives_the_same_interval() -> None:
    rng = np.random.default_rng(1)
    a, b = (arm(rng, 2, np.zeros(8), 0.02, 0.05) for _ in range(2))
    assert ratio(a, b, paired=True, seed=5) == ratio(a, b, paired=True, seed=5)


def test_a_mean_has_students_interval() -> None:
    said = mean([1.0, 2.0, 3.0])
    assert (said.value, said.low) == (2.0, pytest.approx(2 - 4.302653 / 3**0.5, rel=1e-5))


def test_many_prompts_have_the_interval_that_resampling_gives_without_its_cost() -> None:
    """Beyond RESAMPLED prompts the draws are normal: at that size both ways give the same bounds within 1 %."""
    rng = np.random.default_rng(3)
    prompts = stats.RESAMPLED
    tokens = np.full((2, prompts), 128.0)
    few = [
        stats.Arm(tokens, 128 / (speed * np.exp(rng.normal(0, 0.2, (2, prompts)))), np.ones(2)) for speed in (70, 140)
    ]
    # The same prompts and one that weighs next to nothing: the other side of the threshold.
    many = [
        stats.Arm(np.hstack([arm.weight, [[1e-9]] * 2]), np.hstack([arm.cost, [[1e-9 / 100]] * 2]), arm.scale)
        for arm in few
    ]
    for paired in (True, False):
        drawn, normal = (stats.ratio(*arms, paired=paired) for arms in (few, many))
        assert drawn.low is not None
        assert drawn.high is not None
        assert normal.value == pytest.approx(drawn.value, rel=1e-6)
        assert (normal.low, normal.high) == pytest.approx((drawn.low, drawn.high), rel=0.02)
