"""How many launches a search needs: mtpdeploy's against random search and Optuna's TPE, on grids whose best is known.

    python bench/tune.py [--seeds 20]

Prints, a grid and objective: launches until a setting within 5 % of the grid's best was measured (median and worst over
the seeds), and the regret after a quarter of the grid's launches. The ratio in the last column is random search's median
launches over ours.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from grids import Grid, real_grid, simulated_grid

from mtpdeploy.analysis.tune import Candidate, Objective, Stop

Order = Callable[[Grid, int], list[Candidate]]


def ours(grid: Grid, seed: int) -> list[Candidate]:
    """The candidates in the order in which the search launches them, until it stops by itself."""
    rng, search = random.Random(seed), grid.search()
    while not isinstance(proposal := search.propose(), Stop):
        search.tell(grid.outcome(proposal.candidate, rng))
    return [one.candidate for one in search.outcomes]


def at_random(grid: Grid, seed: int) -> list[Candidate]:
    return random.Random(seed).sample(list(grid.candidates), len(grid.candidates))


def tpe(grid: Grid, seed: int) -> list[Candidate]:
    """Optuna's TPE over the same levels; a combination that the budget refuses costs it nothing, a repeat neither."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    rng = random.Random(seed)
    by_levels = {one.key: one for one in grid.candidates}
    names = list(grid.candidates[0].levels)
    choices = {name: sorted({str(one.levels[name]) for one in grid.candidates}) for name in names}
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=5)
    )
    launched: dict[object, tuple[Candidate, float]] = {}
    for _ in range(20 * len(grid.candidates)):
        if len(launched) >= max(1, len(grid.candidates) // 2):
            break
        trial = study.ask()
        key = tuple(sorted((name, trial.suggest_categorical(name, choices[name])) for name in names))
        if key not in by_levels:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        if key not in launched:
            outcome = grid.outcome(by_levels[key], rng)
            launched[key] = (by_levels[key], outcome.value or 0.0)
        study.tell(trial, launched[key][1])
    return [candidate for candidate, _ in launched.values()]


def until_good(grid: Grid, order: list[Candidate], share: float = 0.05) -> int:
    """Launches up to the first within `share` of the best; the whole grid if none of them is."""
    for count, candidate in enumerate(order, 1):
        if (grid.truth[candidate.key] or 0.0) >= (1 - share) * grid.best:
            return count
    return len(grid.candidates)


def regret(grid: Grid, order: list[Candidate], launches: int) -> float:
    return 1 - max(grid.truth[one.key] or 0.0 for one in order[:launches]) / grid.best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = range(parser.parse_args().seeds)
    print(
        f"{'grid':<10} {'objective':<11} {'cells':>5} {'method':<8} {'launches':>8} {'median':>7} {'worst':>6} {'regret':>7} {'ratio':>6}"
    )
    for make in (real_grid, simulated_grid):
        for kind in ("throughput", "latency", "mixed"):
            grid = make(Objective(kind, (1, 4, 8, 16, 32)))  # type: ignore[arg-type]
            quarter = max(1, len(grid.candidates) // 4)
            methods: tuple[tuple[str, Order], ...] = (("random", at_random), ("TPE", tpe), ("ours", ours))
            medians: dict[str, float] = {}
            for name, method in methods:
                orders = [method(grid, seed) for seed in seeds]
                counts = [until_good(grid, order) for order in orders]
                medians[name] = statistics.median(counts)
                left = statistics.median(regret(grid, order, quarter) for order in orders)
                used = statistics.median(len(order) for order in orders)
                ratio = f"{medians['random'] / medians[name]:.1f}"
                print(
                    f"{grid.name:<10} {kind:<11} {len(grid.candidates):>5} {name:<8} {used:>8.0f} {medians[name]:>7.1f} "
                    f"{max(counts):>6} {left:>7.1%} {ratio:>6}"
                )


if __name__ == "__main__":
    main()
