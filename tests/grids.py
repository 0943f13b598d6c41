"""Recorded grids to search in: every cell's outcome is known, so regret can be counted.

The real one was measured on an H200, twelve settings in two campaigns (tests/data/h200_grid.jsonl, h200_case_grid.jsonl). The
simulated one has a truth of another form than the model that searches it: a compute knee, a graph cliff, a memory margin that the
budget does not know, and a crash. In the odd one what the model cannot know outweighs what it knows.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from published import SETTINGS

from mtpdeploy.analysis.model import Observation, Setting
from mtpdeploy.analysis.space import Ground, space
from mtpdeploy.analysis.tune import Candidate, Objective, Outcome, Search
from mtpdeploy.sglang.model import shipped
from mtpdeploy.sglang.versions import Version

DATA = Path(__file__).parent / "data"
CAMPAIGNS = ("h200_grid.jsonl", "h200_case_grid.jsonl")
MTP: Mapping[str, Any] = {
    "model_path": "Qwen/Qwen3.6-27B",
    **SETTINGS,
    "mem_fraction_static": 0.85,
}
FACTORS = {
    "draft_steps": (0, 1, 2, 3, 4),
    "running": (4, 8, 16, 24, 32),
    "state_dtype": ("float32", "bfloat16"),
    "mem_fraction": (0.85, 0.9, 0.93),
    "kv_dtype": ("auto", "fp8_e5m2"),
    "chunked_prefill": (2048, 8192),
}


@dataclass(frozen=True)
class Grid:
    """outcome(candidate, rng) is a launch; truth holds the noiseless value of every cell, None where it dies."""

    name: str
    candidates: tuple[Candidate, ...]
    objective: Objective
    input_tokens: float
    output_tokens: float
    outcome: Callable[[Candidate, random.Random], Outcome]
    truth: Mapping[object, float | None]

    @property
    def best(self) -> float:
        return max(value for value in self.truth.values() if value is not None)

    def search(self, launches: int | None = None) -> Search:
        return Search(
            self.candidates, self.objective, self.input_tokens, self.output_tokens, launches or len(self.candidates)
        )


class _Still(random.Random):
    """No noise: a cell's truth."""

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        return mu


def observations(*campaigns: str) -> list[Observation]:
    """Every row of the real grid, or of the campaigns named."""
    return [_observation(row) for row in _rows(*campaigns)]


def real_grid(objective: Objective) -> Grid:
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in _rows():
        rows[row["setting"]].append(row)
    candidates, outcomes = [], {}
    for name, own in rows.items():
        first = own[0]
        levels = {"setting": name, "draft_tokens": first["draft_tokens"], "state": first["state_dtype"]}
        candidate = Candidate(levels, {}, _setting(first))
        figures = {row["concurrency"]: (row["output_tok_s"], row["tpot_p50_ms"], row["ttft_p50_ms"]) for row in own}
        candidates.append(candidate)
        seen = tuple(_observation(row) for row in own)
        outcomes[candidate.key] = Outcome(candidate, "ok", objective.value(figures), 1.2, seen)
    truth = {key: outcome.value for key, outcome in outcomes.items()}
    return Grid("H200", tuple(candidates), objective, 512, 384, lambda candidate, _: outcomes[candidate.key], truth)


def simulated_grid(objective: Objective) -> Grid:
    """All combinations of FACTORS that the budget lets through on a 95 GiB card, with the truth below."""
    model = shipped("qwen3.6-27b")
    found = space(Ground(MTP, {}, Version.parse("0.5.17"), model, 95.0), FACTORS)

    def outcome(candidate: Candidate, rng: random.Random) -> Outcome:
        return _launch(candidate, objective, rng)

    still = _Still()
    truth = {one.key: _launch(one, objective, still).value for one in found.candidates}
    return Grid("simulated", found.candidates, objective, 512, 384, outcome, truth)


def odd_grid(objective: Objective) -> Grid:
    """The simulated grid under another truth: each level of each factor speeds up or slows down by up to a third, at random."""
    inner = simulated_grid(objective)
    draw = random.Random(7)
    effects = {(name, str(level)): draw.uniform(-0.3, 0.3) for name, levels in FACTORS.items() for level in levels}

    def outcome(candidate: Candidate, rng: random.Random) -> Outcome:
        return _skewed(inner.outcome(candidate, rng), objective, sum(effects[level] for level in candidate.key))

    still = _Still()
    truth = {one.key: outcome(one, still).value for one in inner.candidates}
    return Grid("odd", inner.candidates, objective, 512, 384, outcome, truth)


def _skewed(outcome: Outcome, objective: Objective, effect: float) -> Outcome:
    """The same launch with every time changed by exp(-effect)."""
    factor = math.exp(-effect)
    seen = tuple(
        replace(
            one, tpot_ms=one.tpot_ms * factor, ttft_ms=(one.ttft_ms or 0.0) * factor,
            output_tok_s=(one.output_tok_s or 0.0) / factor,
        )
        for one in outcome.observations
    )  # fmt: skip
    figures = {one.concurrency: (one.output_tok_s or 0.0, one.tpot_ms, one.ttft_ms) for one in seen}
    return replace(outcome, observations=seen, value=objective.value(figures) if outcome.status == "ok" else None)


def _launch(candidate: Candidate, objective: Objective, rng: random.Random) -> Outcome:
    levels = candidate.levels
    if candidate.headroom_gb is not None and candidate.headroom_gb < 2.5:
        return Outcome(candidate, "oom", minutes=0.8, cause="oom_graph_capture")
    if levels["kv_dtype"] == "fp8_e5m2" and levels["draft_steps"] == 4:
        return Outcome(candidate, "crash", minutes=0.7, cause="kernel_crash")
    steps, bf16 = int(str(levels["draft_steps"])), levels["state_dtype"] == "bfloat16"
    accepted = [0.88, 0.71, 0.52, 0.33][:steps]
    length = 1 + sum(accepted)
    figures, seen = {}, []
    for load in objective.loads:
        running = min(load, candidate.setting.running or load)
        step = 13.8 + 0.55 * running**0.7
        if steps:
            step += 2.2 + 0.95 * steps
            step += running * (steps + 1) * (0.055 if bf16 else 0.085)
        step += max(0.0, running * (steps + 1) - 80) * 0.12  # the compute knee
        if running > 24:
            step *= 1.5  # no graph was captured for such a batch
        if levels["kv_dtype"] == "fp8_e5m2":
            step *= 1.03
        step *= math.exp(rng.gauss(0, 0.01))
        measured = length * math.exp(rng.gauss(0, 0.015)) if steps else 1.0
        tpot = step / measured
        ttft = 90 + 512 * running * (0.062 if levels["chunked_prefill"] == 8192 else 0.075)
        tok_s = running * 384 / (ttft + 383 * tpot) * 1e3
        queued = ttft + (load / running - 1) * 384 * tpot
        figures[load] = (tok_s, tpot, queued)
        seen.append(
            Observation(
                candidate.name, candidate.setting, load, 512, 384, tpot, queued, tok_s, measured if steps else None
            )
        )
    return Outcome(candidate, "ok", objective.value(figures), 1.4, tuple(seen), tuple(accepted) or None)


def _rows(*campaigns: str) -> list[dict[str, Any]]:
    return [json.loads(line) for name in campaigns or CAMPAIGNS for line in (DATA / name).read_text().splitlines()]


def _setting(row: dict[str, Any]) -> Setting:
    return Setting(row["draft_tokens"], 4 if row["state_dtype"] == "float32" else 2, row["max_running"])


def _observation(row: dict[str, Any]) -> Observation:
    return Observation(
        row["setting"], _setting(row), row["concurrency"], row["input_tokens"], row["output_tokens"],
        row["tpot_p50_ms"], row["ttft_p50_ms"], row["output_tok_s"], row["accept_length"],
    )  # fmt: skip
