"""Proposals by Optuna's TPE, which knows nothing of steps or memory: for a host that the step model does not describe.

Pure: a study is made anew from the outcomes for each proposal, with their number as its seed, so the same outcomes give the
same proposal and a broken search goes on where it was. Optuna is the extra `mtpdeploy[tune]`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence

Levels = Mapping[str, str]

WITHOUT = "Optuna is not installed, which proposes better then: pip install 'mtpdeploy[tune]'"
STARTUP = 5  # results before which it would draw at random
ASKS = 400  # draws in search of a setting that may be launched


def installed() -> bool:
    """Whether Optuna is there and can be imported, which takes a second."""
    try:
        importlib.import_module("optuna")
    except ImportError:
        return False
    return True


def next_of(open_: Sequence[Levels], seen: Sequence[tuple[Levels, float | None]]) -> int:
    """Index of the setting in `open_` that TPE asks for. seen: what was launched, with its value; None where it died.

    All have the same factors. A draw that may not be launched is drawn again; where only such are drawn, the open setting
    that shares the most levels with the last one is taken. ImportError without Optuna.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    choices: dict[str, list[str]] = {}
    for levels in (*open_, *(levels for levels, _ in seen)):
        for name, level in levels.items():
            if level not in choices.setdefault(name, []):
                choices[name].append(level)
    space: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution(sorted(own)) for name, own in choices.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=len(seen), multivariate=True, n_startup_trials=STARTUP)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for levels, value in seen:
        # Only the order of values counts: what died is worse than everything that came up.
        study.add_trial(optuna.create_trial(params=dict(levels), distributions=space, value=value or 0.0))
    index = {tuple(sorted(levels.items())): number for number, levels in enumerate(open_)}
    drawn: dict[str, str] = {}
    for _ in range(ASKS):
        drawn = {name: str(level) for name, level in study.ask(space).params.items()}
        found = index.get(tuple(sorted(drawn.items())))
        if found is not None:
            return found
    return max(range(len(open_)), key=lambda at: sum(drawn[name] == level for name, level in open_[at].items()))
