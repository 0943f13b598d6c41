"""How honest the interval of a comparison is, against plain ones, and what it costs.

    python bench/stats.py [--trials 400]

Simulates comparisons whose true ratio is known (8 to 16 prompts, 1 to 4 runs an arm, noise of prompts and of runs) and
prints how often each 95 % interval holds the truth, and its width. Peers: the percentile bootstrap over all requests,
which most tools would use, and SciPy's BCa bootstrap over prompts. The last line is the time of one interval as a ratio
to SciPy's.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.stats import bootstrap

from mtpdeploy.analysis.stats import Arm, ratio

TRUE = 2.0
CASES = (
    # (runs of a, runs of b), prompts, noise of a run, of a prompt's gain
    ((1, 1), 16, 0.00, 0.10),
    ((1, 1), 16, 0.03, 0.03),
    ((2, 2), 8, 0.02, 0.10),
    ((2, 2), 16, 0.05, 0.02),
    ((3, 3), 16, 0.02, 0.10),
    ((4, 4), 8, 0.05, 0.05),
)
Array = NDArray[np.float64]


def speeds(rng: Generator, runs: int, effects: Array, run_noise: float) -> Array:
    """tok/s of each request, shape (runs, prompts)."""
    noise = rng.normal(0, 0.01, (runs, len(effects))) + rng.normal(0, run_noise, (runs, 1))
    result: Array = 100 * np.exp(effects + noise)
    return result


def ours(a: Array, b: Array, seed: int) -> tuple[float, float]:
    arms = [Arm(np.full(one.shape, 256.0), 256.0 / one, np.ones(one.shape[0])) for one in (a, b)]
    said = ratio(arms[0], arms[1], paired=True, seed=seed, draws=1000)
    assert said.low is not None
    assert said.high is not None
    return said.low, said.high


def percentile(a: Array, b: Array, seed: int) -> tuple[float, float]:
    """Every request by itself, unpaired: what a tool does that forgets where its numbers come from."""
    rng = np.random.default_rng(seed)
    draws = [rng.choice(one.ravel(), (1000, one.size)).mean(axis=1) for one in (a, b)]
    low, high = np.quantile(draws[1] / draws[0], [0.025, 0.975])
    return float(low), float(high)


def bca(a: Array, b: Array, seed: int) -> tuple[float, float]:
    """SciPy's best, over prompts: the mean log ratio of the runs' means."""
    logs = np.log(b).mean(axis=0) - np.log(a).mean(axis=0)
    said = bootstrap((logs,), np.mean, n_resamples=1000, method="BCa", rng=np.random.default_rng(seed))
    return math.exp(said.confidence_interval.low), math.exp(said.confidence_interval.high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=400)
    trials = parser.parse_args().trials
    warnings.simplefilter("ignore")
    methods = {"ours": ours, "percentile over requests": percentile, "BCa over prompts (SciPy)": bca}
    spent = dict.fromkeys(methods, 0.0)
    print(
        f"{'runs':<6} {'prompts':>7} {'run noise':>9} {'prompt noise':>12}  {'method':<26} {'holds truth':>11} {'width':>7}"
    )
    for runs, prompts, run_noise, prompt_noise in CASES:
        held, widths = dict.fromkeys(methods, 0), {name: [] for name in methods}
        rng = np.random.default_rng(1)
        for trial in range(trials):
            common, gain = rng.normal(0, 0.3, prompts), rng.normal(math.log(TRUE), prompt_noise, prompts)
            a, b = speeds(rng, runs[0], common, run_noise), speeds(rng, runs[1], common + gain, run_noise)
            for name, method in methods.items():
                began = time.perf_counter()
                low, high = method(a, b, trial)
                spent[name] += time.perf_counter() - began
                held[name] += low <= TRUE <= high
                widths[name].append(high / low - 1)
        for name in methods:
            print(
                f"{runs[0]}+{runs[1]:<4} {prompts:>7} {run_noise:>9.0%} {prompt_noise:>12.0%}  {name:<26} "
                f"{held[name] / trials:>11.1%} {np.mean(widths[name]):>7.1%}"
            )
    print(f"time of an interval, ours / SciPy's BCa: {spent['ours'] / spent['BCa over prompts (SciPy)']:.2f}")


if __name__ == "__main__":
    main()
