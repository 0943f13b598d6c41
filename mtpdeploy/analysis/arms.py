"""The records of repeated passes as the arrays that `stats` draws from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mtpdeploy.analysis.samples import Pass, Sample
from mtpdeploy.analysis.stats import Arm

Parts = Callable[[Sample], tuple[float, float] | None]


def batch_arm(passes: Sequence[Pass], names: Sequence[str]) -> Arm | None:
    """Output tok/s of all requests together, as tokens over request seconds, times the mean concurrency of each run."""
    return _arm(passes, names, _batch_parts, scaled=True)


def decode_arm(passes: Sequence[Pass], names: Sequence[str]) -> Arm | None:
    """Decode tok/s of one request: tokens after the first chunk over the time that they took."""
    return _arm(passes, names, _decode_parts, scaled=False)


def prompts_of(passes: Sequence[Pass]) -> list[str]:
    """Prompts that every run of the arm answered, in their order."""
    sets = [{sample.prompt for sample in one.samples} for one in passes]
    everywhere = set.intersection(*sets) if sets else set()
    return list(dict.fromkeys(sample.prompt for sample in passes[0].samples if sample.prompt in everywhere))


def _batch_parts(sample: Sample) -> tuple[float, float] | None:
    return float(sample.output_tokens), sample.e2e_s


def _decode_parts(sample: Sample) -> tuple[float, float] | None:
    if sample.decode_tokens is None or sample.decode_s is None:
        return None
    return float(sample.decode_tokens), sample.decode_s


def _arm(passes: Sequence[Pass], names: Sequence[str], parts: Parts, *, scaled: bool) -> Arm | None:
    """Sums a prompt over its requests. None where a run lacks one of the prompts, or its own figure."""
    weight, cost = np.zeros((len(passes), len(names))), np.zeros((len(passes), len(names)))
    column = {name: index for index, name in enumerate(names)}
    scale = np.ones(len(passes))
    for row, one in enumerate(passes):
        for sample in one.samples:
            held = parts(sample) if sample.prompt in column else None
            if held is not None:
                weight[row, column[sample.prompt]] += held[0]
                cost[row, column[sample.prompt]] += held[1]
        if scaled:
            figure = one.number("output_tok_s")
            if not figure or not cost[row].sum() or not weight[row].sum():
                return None
            scale[row] = figure * cost[row].sum() / weight[row].sum()
    if not names or (weight <= 0).any() or (cost <= 0).any():
        return None
    return Arm(weight, cost, scale)
