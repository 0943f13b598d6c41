"""How many launches a search needs: mtpdeploy's against random search and Optuna's TPE, on grids whose best is known.

    python bench/tune.py [--seeds 20] [--grid H200 --grid simulated --grid odd]

Prints, a grid, objective and method: launches used until it stopped (the model: the search as it
is, with TPE where it does not believe its model; the others take a quarter of the grid),
launches until a setting within 5 % of the grid's best was measured (median and worst over the seeds; all of the grid where
none was), and the regret (share of the best that is missed) after a quarter of the grid's launches and after as many launches
as the model took (median, worst). The last column is random search's median over the method's.
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

from grids import Grid, odd_grid, real_grid, simulated_grid

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
        if len(launched) >= max(6, len(grid.candidates) // 4):
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
    """Share of the grid's best that the best of the first launches misses; 1 where none came up."""
    return 1 - max(grid.truth[one.key] or 0.0 for one in order[:launches]) / grid.best


GRIDS = {"H200": real_grid, "simulated": simulated_grid, "odd": odd_grid}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--grid", action="append", choices=tuple(GRIDS))
    given = parser.parse_args()
    seeds = range(given.seeds)
    print(
        f"{'grid':<10}{'objective':<11}{'cells':>5} {'method':<7}{'launches':>9} | {'to 5 %':>7}{'worst':>6} | "
        f"{'regret at 1/4':>13}{'worst':>8} | {'at the model':>12}{'worst':>8} | {'ratio':>5}"
    )
    for name in given.grid or GRIDS:
        for kind in ("throughput", "latency", "mixed"):
            grid = GRIDS[name](Objective(kind, (1, 4, 8, 16, 32)))
            quarter = max(1, len(grid.candidates) // 4)
            methods: tuple[tuple[str, Order], ...] = (("model", ours), ("random", at_random), ("TPE", tpe))
            orders = {said: [method(grid, seed) for seed in seeds] for said, method in methods}
            spent = [len(order) for order in orders["model"]]
            halves = statistics.median(until_good(grid, order) for order in orders["random"])
            for said, _ in methods:
                own = orders[said]
                counts = [until_good(grid, order) for order in own]
                early = [regret(grid, order, quarter) for order in own]
                same = [regret(grid, order, count) for order, count in zip(own, spent, strict=True)]
                used = statistics.median(
                    min(len(one), max(6, quarter)) if said == "random" else len(one) for one in own
                )
                print(
                    f"{name:<10}{kind:<11}{len(grid.candidates):>5} {said:<7}{used:>9.0f} | "
                    f"{statistics.median(counts):>7.1f}{max(counts):>6} | {statistics.median(early):>13.1%}{max(early):>8.1%} | "
                    f"{statistics.median(same):>12.1%}{max(same):>8.1%} | {halves / statistics.median(counts):>5.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
