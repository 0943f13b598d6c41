"""The search: few launches, failures as results, and the same next step after a kill."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from grids import FACTORS, MTP, Grid, real_grid, simulated_grid

from mtpdeploy.analysis.model import Setting
from mtpdeploy.analysis.space import changed, default_factors, parse_factors, space
from mtpdeploy.analysis.tune import Candidate, Objective, Outcome, Proposal, Search, Stop, expected_gain, run
from mtpdeploy.errors import PlanRefused, UsageError
from mtpdeploy.sglang.model import shipped
from mtpdeploy.sglang.versions import Version

LOADS = (1, 4, 8, 16, 32)
MODEL, VERSION = shipped("qwen3.6-27b"), Version.parse("0.5.17")


@pytest.fixture(scope="module", params=["throughput", "latency", "mixed"])
def simulated(request: pytest.FixtureRequest) -> Grid:
    return simulated_grid(Objective(request.param, LOADS))


def searched(grid: Grid, seed: int, launches: int) -> Search:
    search, rng = grid.search(launches), random.Random(seed)
    run(search, lambda candidate: grid.outcome(candidate, rng))
    return search


@pytest.mark.parametrize("kind", ["throughput", "latency", "mixed"])
def test_on_the_real_grid_one_launch_of_six_is_within_5_percent_of_the_best(kind: str) -> None:
    grid = real_grid(Objective(kind, LOADS))  # type: ignore[arg-type]
    search = searched(grid, 0, max(1, len(grid.candidates) // 4))
    assert len(search.outcomes) == 1
    assert search.best is not None
    assert (grid.truth[search.best.candidate.key] or 0) >= 0.95 * grid.best


@pytest.mark.slow
def test_on_the_simulated_grid_a_fraction_of_a_quarter_is_enough(simulated: Grid) -> None:
    for seed in range(2):
        search = searched(simulated, seed, 8)
        assert search.best is not None
        assert (simulated.truth[search.best.candidate.key] or 0) >= 0.95 * simulated.best
        assert len(search.outcomes) < len(simulated.candidates) // 4


def test_the_search_stops_by_itself_when_the_gain_is_below_the_noise() -> None:
    grid = real_grid(Objective("mixed", LOADS))
    search = grid.search()
    stop = run(search, lambda candidate: grid.outcome(candidate, random.Random(0)))
    assert "below the noise" in stop.why
    assert len(search.outcomes) < len(grid.candidates)


def test_a_broken_search_goes_on_with_the_same_proposal(simulated: Grid) -> None:
    rng = random.Random(2)
    whole = simulated.search(4)
    run(whole, lambda candidate: simulated.outcome(candidate, rng))
    for kept in range(len(whole.outcomes)):
        again = simulated.search(4)
        for outcome in whole.outcomes[:kept]:
            again.tell(outcome)
        proposal = again.propose()
        assert isinstance(proposal, Proposal)
        assert proposal.candidate.key == whole.outcomes[kept].candidate.key


def plain(count: int, **more: float) -> list[Candidate]:
    return [Candidate({"running": n}, {}, Setting(4, 4, n), headroom_gb=20.0 - n, **more) for n in range(1, count + 1)]  # type: ignore[arg-type]


def test_nothing_with_less_memory_is_launched_after_one_ran_out_of_it() -> None:
    candidates = plain(10)
    search = Search(candidates, Objective("throughput", (1, 8)), 512, 256)
    search.tell(Outcome(candidates[5], "oom", cause="oom_graph_capture"))
    assert [one.levels["running"] for one in search.open()] == [1, 2, 3, 4, 5]


def test_a_crash_blames_what_no_good_launch_has_cleared() -> None:
    cells = [
        Candidate({"kv": kv, "drafts": drafts}, {}, Setting(drafts + 1, 4, 4)) for kv in ("a", "b") for drafts in (1, 2)
    ]
    search = Search(cells, Objective("latency", (1,)), 512, 256)
    search.tell(Outcome(cells[3], "crash"))
    search.tell(Outcome(cells[2], "ok", 100.0))
    chances = {one.name: search._chance(one) for one in cells}
    assert chances["kv=b drafts=1"] == 1.0  # it came up itself
    assert chances["kv=a drafts=2"] < 1.0
    search.tell(Outcome(cells[1], "ok", 100.0))
    assert search._chance(cells[0]) == 1.0
    assert search._chance(cells[3]) < 0.05  # only the pair is left


def test_every_launch_failing_is_a_result_and_ends() -> None:
    search = Search(plain(5), Objective("throughput", (1, 4)), 512, 256)
    stop = run(search, lambda candidate: Outcome(candidate, "hang", None, 1.0, cause="watchdog_hang"))
    assert search.best is None
    assert "every candidate" in stop.why


@pytest.mark.parametrize("budget", [{"launches": 2}, {"minutes": 5.0}])
def test_the_budget_is_kept(budget: dict[str, float]) -> None:
    search = Search(plain(8), Objective("throughput", (1, 4)), 512, 256, **budget)  # type: ignore[arg-type]
    run(search, lambda candidate: Outcome(candidate, "crash", None, 2.0))
    assert len(search.outcomes) == 2


def test_a_limit_that_nothing_meets_leaves_no_best() -> None:
    grid = real_grid(Objective("throughput", LOADS, tpot_limit_ms=0.1))
    search = searched(grid, 0, 6)
    assert search.best is None
    assert isinstance(search.propose(), Stop)


def test_a_latency_limit_moves_the_choice_to_fewer_drafts_or_requests() -> None:
    free, bounded = (real_grid(Objective("throughput", LOADS, limit)) for limit in (None, 7.0))
    best = max(free.truth, key=lambda key: free.truth[key] or 0)
    assert (bounded.truth[best] or 0) < (free.truth[best] or 0)


@pytest.mark.parametrize(("difference", "deviation"), [(0.0, 0.1), (-0.5, 0.1), (0.5, 0.1), (-3.0, 0.0), (0.2, 0.0)])
def test_the_expected_gain_is_what_a_million_draws_give(difference: float, deviation: float) -> None:
    import numpy as np

    draws = np.random.default_rng(0).normal(difference, deviation, 400_000)
    expected = float(np.maximum(0, np.expm1(draws)).mean())
    assert expected_gain(difference, deviation) == pytest.approx(expected, abs=2e-3)


# -- the space


def test_what_the_budget_or_a_rule_refuses_is_not_a_candidate() -> None:
    factors = {
        "draft_steps": (0, 3),
        "running": (4, 96),
        "state_dtype": ("float32",),
        "strategy": ("no_buffer", "extra_buffer"),
    }
    found = space(MTP, {}, VERSION, MODEL, 95.0, factors)
    assert {one.levels["running"] for one in found.candidates} == {4}
    assert not [one for one in found.candidates if one.levels["draft_steps"] and one.levels["strategy"] == "no_buffer"]
    assert all(one.why for one in found.refused)
    assert len(found.candidates) + len(found.refused) == 8


def test_flags_that_only_work_together_are_set_together() -> None:
    args = changed(MTP, {"running": 16, "draft_steps": 2}, {}, VERSION, MODEL, 95.0)
    assert args == {
        "speculative_num_steps": 2,
        "speculative_num_draft_tokens": 3,
        "max_running_requests": 16,
        "max_mamba_cache_size": 80,
    }
    gone = changed(MTP, {"draft_steps": 0}, {}, VERSION, MODEL, 95.0)
    assert gone["speculative_algorithm"] is None
    assert gone["speculative_num_draft_tokens"] is None


def test_a_candidate_says_what_it_costs_besides_speed() -> None:
    found = space(MTP, {}, VERSION, MODEL, 95.0, {"state_dtype": ("float32", "bfloat16"), "running": (2, 8)})
    costs = {one.name: one.costs for one in found.candidates}
    assert costs["state_dtype=float32 running=8"] == ()
    assert any("precision" in cost for cost in costs["state_dtype=bfloat16 running=8"])
    assert any("fewer requests" in cost for cost in costs["state_dtype=float32 running=2"])


def test_a_card_on_which_nothing_fits_is_refused_with_the_reasons() -> None:
    with pytest.raises(PlanRefused, match="none of the"):
        space(MTP, {}, VERSION, MODEL, 40.0, {"running": (4, 8)})


@pytest.mark.parametrize("text", ["nonsense=1", "running", "running=", "=3"])
def test_a_space_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="FACTOR=LEVEL"):
        parse_factors(text)


def test_a_space_is_read_with_its_types() -> None:
    said = parse_factors("draft_steps=0,3 mem_fraction=0.9 radix=off kv_dtype=fp8_e5m2,auto context=default")
    assert said == {
        "draft_steps": (0, 3),
        "mem_fraction": (0.9,),
        "radix": (False,),
        "kv_dtype": ("fp8_e5m2", "auto"),
        "context": (None,),
    }


def test_a_space_too_large_to_judge_is_refused() -> None:
    with pytest.raises(UsageError, match="more than"):
        space(MTP, {}, VERSION, MODEL, 95.0, {**FACTORS, "context": tuple(range(1024, 1044))})


def test_the_default_space_reaches_beyond_the_loads_asked_for() -> None:
    factors = default_factors(MTP, (1, 4, 16))
    assert max(factors["running"]) == 32  # type: ignore[type-var]
    assert 0 in factors["draft_steps"]


def test_an_outcome_of_another_setting_does_not_count_as_this_one() -> None:
    one = plain(2)
    search = Search(one, Objective("throughput", (1,)), 512, 256)
    search.tell(Outcome(replace(one[0], levels={"running": 99}), "ok", 1.0))
    assert len(search.open()) == 2
