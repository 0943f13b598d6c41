"""The search: few launches, failures as results, and the same next step after a kill."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any

import pytest
from grids import FACTORS, MTP, Grid, odd_grid, real_grid, simulated_grid

from mtpdeploy.analysis import tpe
from mtpdeploy.analysis.model import Setting
from mtpdeploy.analysis.space import FACTORS as KNOWN
from mtpdeploy.analysis.space import Ground, changed, default_factors, parse_factors, space
from mtpdeploy.analysis.tune import (
    PATIENCE,
    Candidate,
    Error,
    Misfit,
    Objective,
    Outcome,
    Proposal,
    Search,
    Stop,
    expected_gain,
    run,
)
from mtpdeploy.errors import PlanRefused, UsageError
from mtpdeploy.sglang.model import shipped
from mtpdeploy.sglang.versions import Version

LOADS = (1, 4, 8, 16, 32)
MODEL, VERSION = shipped("qwen3.6-27b"), Version.parse("0.5.17")
GROUND = Ground(MTP, {}, VERSION, MODEL, 95.0)


@pytest.fixture(scope="module", params=["throughput", "latency", "mixed"])
def simulated(request: pytest.FixtureRequest) -> Grid:
    return simulated_grid(Objective(request.param, LOADS))


def searched(grid: Grid, seed: int, launches: int) -> Search:
    search, rng = grid.search(launches), random.Random(seed)
    run(search, lambda candidate: grid.outcome(candidate, rng))
    return search


@pytest.mark.parametrize("kind", ["throughput", "latency", "mixed"])
def test_on_the_real_grid_a_quarter_of_its_launches_is_within_5_percent_of_the_best(kind: Any) -> None:
    grid = real_grid(Objective(kind, LOADS))
    search = searched(grid, 0, len(grid.candidates) // 4)
    assert len(search.outcomes) <= 3
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


def plain(count: int) -> list[Candidate]:
    return [Candidate({"running": n}, {}, Setting(4, 4, n), headroom_gb=20.0 - n) for n in range(1, count + 1)]


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
    chances = dict(zip([one.name for one in cells], search._chances(cells), strict=True))
    assert chances["kv=b drafts=1"] == 1.0  # it came up itself
    assert chances["kv=a drafts=2"] < 1.0
    search.tell(Outcome(cells[1], "ok", 100.0))
    assert search._chances([cells[0]]) == [1.0]
    assert search._chances([cells[3]])[0] < 0.05  # only the pair is left


def test_every_launch_failing_is_a_result_and_ends() -> None:
    search = Search(plain(5), Objective("throughput", (1, 4)), 512, 256)
    stop = run(search, lambda candidate: Outcome(candidate, "hang", None, 1.0, cause="watchdog_hang"))
    assert search.best is None
    assert "every candidate" in stop.why


@pytest.mark.parametrize("budget", [{"launches": 2}, {"minutes": 5.0}])
def test_the_budget_is_kept(budget: dict[str, Any]) -> None:
    search = Search(plain(8), Objective("throughput", (1, 4)), 512, 256, **budget)
    run(search, lambda candidate: Outcome(candidate, "crash", None, 2.0))
    assert len(search.outcomes) == 2


def test_a_limit_that_nothing_meets_leaves_no_best() -> None:
    grid = real_grid(Objective("throughput", LOADS, tpot_limit_ms=0.1))
    search = searched(grid, 0, 6)
    assert search.best is None
    assert isinstance(search.propose(), Stop)


def test_a_setting_that_missed_the_limits_is_not_tried_again_under_another_name() -> None:
    cells = [Candidate({"running": n, "fraction": f}, {}, Setting(1, 4, n)) for n in (8, 4) for f in (0.85, 0.9)]
    search = Search(cells, Objective("throughput", (8,)), 512, 256)
    first = search.propose()
    assert isinstance(first, Proposal)
    search.tell(Outcome(first.candidate, "ok", None, 1.0))
    second = search.propose()
    assert isinstance(second, Proposal)
    assert second.candidate.setting != first.candidate.setting


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
    found = space(GROUND, factors)
    assert {one.levels["running"] for one in found.candidates} == {4}
    assert not [one for one in found.candidates if one.levels["draft_steps"] and one.levels["strategy"] == "no_buffer"]
    assert all(one.why for one in found.refused)
    assert len(found.candidates) + len(found.refused) == 8


def test_flags_that_only_work_together_are_set_together() -> None:
    args = changed(GROUND, {"running": 16, "draft_steps": 2})
    assert args == {
        "speculative_num_steps": 2,
        "speculative_num_draft_tokens": 3,
        "max_running_requests": 16,
        "max_mamba_cache_size": 80,
    }
    gone = changed(GROUND, {"draft_steps": 0})
    assert gone["speculative_algorithm"] is None
    assert gone["speculative_num_draft_tokens"] is None


def test_a_candidate_says_what_it_costs_besides_speed() -> None:
    found = space(GROUND, {"state_dtype": ("float32", "bfloat16"), "running": (2, 8)})
    costs = {one.name: one.costs for one in found.candidates}
    assert not any("precise" in cost for cost in costs["state_dtype=float32 running=8"])
    assert any("precise" in cost for cost in costs["state_dtype=bfloat16 running=8"])
    assert any("2 requests at once instead of 4" in cost for cost in costs["state_dtype=float32 running=2"])
    given_up = {one.name: one.gives_up for one in found.candidates}
    assert given_up["state_dtype=bfloat16 running=8"] == ("precision",)
    assert given_up["state_dtype=float32 running=8"] == ()


def test_a_card_on_which_nothing_fits_is_refused_with_the_reasons() -> None:
    with pytest.raises(PlanRefused, match="none of the"):
        space(replace(GROUND, gpu_memory_gb=40.0), {"running": (4, 8)})


@pytest.mark.parametrize("text", ["nonsense=1", "running", "running=", "=3", "", "running=4 running=8", "running=4,,8"])
def test_a_space_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"FACTOR=LEVEL|given twice"):
        parse_factors(text)


@pytest.mark.parametrize(
    "text",
    ["draft_steps=-1", "draft_steps=99", "draft_steps=on", "running=0", "running=default", "mem_fraction=2",
     "mem_fraction=0.0", "radix=maybe", "chunked_prefill=0", "context=x", "kv_dtype=3", "graph_max_batch=-1"],
)  # fmt: skip
def test_a_level_that_its_factor_cannot_have_is_refused_with_what_it_should_be(text: str) -> None:
    with pytest.raises(UsageError, match="should be"):
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
        space(GROUND, {**FACTORS, "context": tuple(range(1024, 1044))})


def test_the_default_space_reaches_beyond_the_loads_asked_for() -> None:
    factors = default_factors(GROUND, (1, 4, 16))
    assert tuple(factors) == tuple(KNOWN)
    assert factors["running"] == (4, 16)
    assert factors["draft_steps"] == (0, 1, 2, 3, 4)
    assert all(not one.gives_up for one in space(GROUND, factors).candidates)


@pytest.mark.parametrize(
    ("give_up", "factor", "level"),
    [("precision", "state_dtype", "bfloat16"), ("precision", "kv_dtype", "fp8_e4m3"), ("prefix-reuse", "radix", False),
     ("context", "context", 32768)],
)  # fmt: skip
def test_what_may_be_given_up_is_searched_too_and_said_of_the_candidates(
    give_up: str, factor: str, level: object
) -> None:
    factors = default_factors(GROUND, (1, 4), (give_up,))
    assert level in factors[factor]
    assert level not in default_factors(GROUND, (1, 4))[factor]
    found = space(GROUND, {"running": (4,), factor: factors[factor]}).candidates
    assert {one.gives_up for one in found if one.levels[factor] == level} == {(give_up,)}
    assert {one.gives_up for one in found if one.levels[factor] != level} == {()}


def test_nothing_else_can_be_given_up() -> None:
    with pytest.raises(UsageError, match="precision, prefix-reuse, context"):
        default_factors(GROUND, (1, 4), ("quality",))


def test_a_profile_without_mtp_is_searched_with_it() -> None:
    bare = replace(GROUND, args={"model_path": "Qwen/Qwen3.6-27B", "mem_fraction_static": 0.85})
    found = space(bare, {"draft_steps": (0, 3), "running": (8,)})
    by_steps = {one.levels["draft_steps"]: one for one in found.candidates}
    assert by_steps[3].args["speculative_algorithm"] == "NEXTN"
    assert by_steps[3].args["max_mamba_cache_size"] == 40
    assert by_steps[3].setting.draft_tokens == 4
    assert "speculative_algorithm" not in by_steps[0].args


def test_slots_beyond_the_running_requests_cost_kv_tokens_and_too_few_are_refused() -> None:
    found = space(GROUND, {"running": (8,), "mamba_slots": (30, None, 60)})
    slots = {one.levels["mamba_slots"]: one.args["max_mamba_cache_size"] for one in found.candidates}
    assert slots == {None: 40, 60: 60}
    (refused,) = found.refused
    assert "6 of 8" in refused.why


def test_a_value_that_this_version_does_not_take_is_refused_for_all_its_combinations_with_the_reason() -> None:
    old = replace(GROUND, version=Version.parse("0.5.12"))
    found = space(old, {"running": (4, 8), "strategy": ("extra_buffer", "extra_buffer_lazy")})
    assert {one.levels["strategy"] for one in found.candidates} == {"extra_buffer"}
    assert len(found.refused) == 2
    assert all("extra_buffer_lazy" in one.why for one in found.refused)


def test_requests_that_do_not_fit_into_the_kv_cache_together_are_not_launched() -> None:
    found = space(replace(GROUND, request_tokens=30_000), {"running": (4, 16)})
    assert {one.levels["running"] for one in found.candidates} == {4}
    assert "KV tokens hold" in found.refused[0].why


def test_a_context_that_the_profile_promises_is_kept() -> None:
    promised = replace(GROUND, args={**MTP, "context_length": 131072})
    found = space(promised, {"running": (4, 16)})
    assert {one.levels["running"] for one in found.candidates} == {4}
    assert found.refused[0].rule == "context_length"


def test_every_factor_says_what_it_costs() -> None:
    assert len(KNOWN) == 12
    assert all(one.costs for one in KNOWN.values())


def test_a_dry_run_sees_ahead_without_launching_and_without_a_repeat() -> None:
    search = Search(plain(8), Objective("throughput", (1, 8)), 512, 256)
    ahead = search.ahead(3)
    assert not search.outcomes
    assert len({one.candidate.key for one in ahead}) == len(ahead) >= 1
    assert ahead[0].minutes > 0


def test_a_setting_that_serves_faster_is_expected_to_take_fewer_minutes() -> None:
    """Gains are weighed by the minute, and a benchmark of a fast setting is soon over."""
    fast, slow = Candidate({"a": 1}, {}, Setting(1, 4, 16)), Candidate({"a": 2}, {}, Setting(1, 4, 1))
    search = Search([fast, slow], Objective("latency", (1, 16)), 512, 256, requests=64)
    minutes = search._minutes([fast, slow], [1.0, 1.0])
    assert minutes[0] < 0.7 * minutes[1]


@pytest.mark.slow
def test_effects_much_larger_than_usual_are_believed_once_they_are_seen() -> None:
    """Otherwise the search stops, sure that no level is worth more than a few percent."""
    grid = odd_grid(Objective("throughput", LOADS))
    search = searched(grid, 0, 25)
    assert search.best is not None
    assert (grid.truth[search.best.candidate.key] or 0) >= 0.95 * grid.best


def test_an_outcome_of_another_setting_does_not_count_as_this_one() -> None:
    one = plain(2)
    search = Search(one, Objective("throughput", (1,)), 512, 256)
    search.tell(Outcome(replace(one[0], levels={"running": 99}), "ok", 1.0))
    assert len(search.open()) == 2


# -- a host that the model does not describe


def misled(grid: Grid, seed: int = 0, launches: int = 14) -> Search:
    """An odd host's search until the model is not believed any more."""
    search, rng = grid.search(launches), random.Random(seed)
    while search.misfit is None and not isinstance(proposal := search.propose(), Stop):
        search.tell(grid.outcome(proposal.candidate, rng))
    return search


@pytest.fixture(scope="module")
def odd() -> Grid:
    return odd_grid(Objective("mixed", LOADS))


def test_a_model_whose_predictions_keep_missing_is_not_believed_and_the_answer_names_the_errors(odd: Grid) -> None:
    search = misled(odd)
    assert search.misfit is not None
    assert len(search.misfit.errors) >= 2
    assert all(abs(one.deviations) > 1.96 for one in search.misfit.errors)
    assert search.misfit.launch == len(search.outcomes) + 1
    said = search.misfit.as_json()
    assert said["from_launch"] == search.misfit.launch
    assert "does not describe this host (launch " in search.misfit.why
    assert "TPE proposes" in search.misfit.why


@pytest.mark.parametrize("kind", ["throughput", "latency", "mixed"])
def test_the_model_is_believed_where_it_holds(kind: Any) -> None:
    for grid in (real_grid(Objective(kind, LOADS)), simulated_grid(Objective(kind, LOADS))):
        assert searched(grid, 0, 10).misfit is None


def wrong(count: int, launched: int, monkeypatch: pytest.MonkeyPatch, by: Any = "tpe") -> Search:
    """A search of equal settings under a model that expects no gain and is known to be wrong."""
    monkeypatch.setattr(Search, "predictions", lambda self, candidates, **_: [(-1.0, 0.01) for _ in candidates])
    cells = [Candidate({"running": n % 4, "a": n // 4}, {}, Setting(1, 4, 4), headroom_gb=9.0) for n in range(count)]
    search = Search(cells, Objective("throughput", (1,)), 512, 256, launches=100)
    for one in cells[:launched]:
        search.tell(Outcome(one, "ok", 1.0 + 0.001 * int(str(one.levels["a"])), 1.0))
    search.misfit = Misfit(launched + 1, (Error(2, 0.3, 4.0), Error(3, 0.3, 4.0)), by)
    return search


def test_a_model_known_to_be_wrong_ends_nothing_tpe_proposes_what_may_be_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = wrong(40, 8, monkeypatch)
    believing = replace(search, misfit=None, outcomes=list(search.outcomes), errors=[])
    assert isinstance(stop := believing.propose(), Stop)
    assert "below the noise" in stop.why
    said = search.propose()
    assert isinstance(said, Proposal)
    assert said.by == "tpe"
    assert said.predicted is None
    assert said.candidate.key in {one.key for one in search.open()}
    assert said.as_json()["by"] == "tpe"
    assert [one.by for one in search.ahead(3)] == ["tpe"]  # nothing is predicted of it, so nothing follows from it


def test_a_search_whose_model_is_not_believed_ends_when_nothing_better_was_found_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = wrong(60, 6, monkeypatch)
    stop = run(search, lambda candidate: Outcome(candidate, "ok", 1.0, 1.0))
    assert stop.why == f"the last {PATIENCE} launches were not better than the best before them"
    assert len(search.outcomes) == 6 + PATIENCE
    better = wrong(60, 6, monkeypatch)
    run(better, lambda candidate: Outcome(candidate, "ok", 2.0 if len(better.outcomes) == 10 else 1.0, 1.0))
    assert len(better.outcomes) == 11 + PATIENCE  # the count begins again with each better one


@pytest.mark.parametrize("budget", [{"launches": 9}, {"minutes": 9.4}])
def test_tpe_keeps_the_budget_too(budget: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    search = replace(wrong(40, 6, monkeypatch), **budget)
    run(search, lambda candidate: Outcome(candidate, "ok", 1.0, 1.0))
    assert len(search.outcomes) == 9


def test_without_optuna_the_search_says_what_to_install_and_goes_on_with_the_model(
    monkeypatch: pytest.MonkeyPatch, odd: Grid
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert not tpe.installed()
    search = misled(odd)
    assert search.misfit is not None
    assert search.misfit.by == "model"
    assert "pip install 'mtpdeploy[tune]'" in search.misfit.why
    monkeypatch.setattr(tpe, "next_of", None)
    stopped = wrong(40, 6, monkeypatch, "model")
    said = stopped.propose()
    assert isinstance(said, Proposal)
    assert said.by == "model"


def test_tpe_after_a_kill_asks_for_the_same_and_learns_from_what_died() -> None:
    open_ = [{"a": str(a), "b": str(b)} for a in range(4) for b in range(5)]
    # Everything with a=0 died, and of the rest what has b=4 is best.
    seen = [(one, None if one["a"] == "0" else float(one["b"])) for one in open_ if one["a"] in "01"]
    left = [one for one in open_ if one["a"] in "23"]
    first = tpe.next_of(left, seen)
    assert first == tpe.next_of(left, seen)
    good = [{"a": "0", "b": "9"}, {"a": "1", "b": "9"}]
    assert tpe.next_of(good, [*seen, *(({"a": "0", "b": str(b)}, None) for b in range(4, 9))]) == 1


def test_a_search_that_was_given_to_tpe_resumes_with_the_same_state(odd: Grid) -> None:
    whole = misled(odd)
    again = odd.search(14)
    for outcome in whole.outcomes:
        again.tell(outcome)
    assert again.misfit == whole.misfit
    assert again.errors == whole.errors
    assert again.propose() == whole.propose()
