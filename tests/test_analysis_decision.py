"""Frontier and recommendation: honest about evidence, and able to read the story that the project begins with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published import SETTINGS as MTP
from runs import bench_run

from mtpdeploy.actions.compare import compare
from mtpdeploy.actions.frontier import frontier
from mtpdeploy.actions.recommend import recommend
from mtpdeploy.errors import NotFound, UsageError
from mtpdeploy.progress import Silent
from mtpdeploy.sglang.memory import budget
from mtpdeploy.sglang.model import shipped
from mtpdeploy.sglang.verify import acceptance_mismatch
from mtpdeploy.sglang.versions import Version
from mtpdeploy.store import Run, Store

TALK = Silent()
REAL = "hosts:\n  gpu1:\n    address: 192.0.2.1\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "inventories").mkdir()
    (tmp_path / "inventories" / "site.yml").write_text(REAL)
    return tmp_path


def crossing_runs(home: Path) -> tuple[Run, Run]:
    a = bench_run(home, "baseline", speeds={1: 70, 4: 65, 16: 55, 64: 40}, noise=0.01, repeats=2, args={"tp_size": 1})
    b = bench_run(home, "mtp", speeds={1: 150, 4: 140, 16: 75, 64: 25}, noise=0.01, repeats=2, accept=3.2, args=MTP)
    return a, b


def aged(run: Run, stamp: str) -> None:
    head = run.read_json("run.json")
    assert isinstance(head, dict)
    run.write_json("run.json", {**head, "created_utc": stamp})


def test_the_front_holds_exactly_what_nothing_beats_in_both(home: Path) -> None:
    crossing_runs(home)
    said = frontier(home=home, talk=TALK)
    for spot in said.spots:
        beaten = any(
            other.user_tok_s.value > spot.user_tok_s.value and other.gpu_tok_s.value > spot.gpu_tok_s.value
            for other in said.spots
        )
        assert spot.front is not beaten
    assert {spot.profile for spot in said.spots if spot.front} == {"baseline", "mtp"}


def test_the_crossover_lies_between_the_loads_that_it_separates(home: Path) -> None:
    crossing_runs(home)
    (crossing,) = frontier(home=home, talk=TALK).crossovers
    assert crossing.at is not None
    assert crossing.low is not None
    assert crossing.high is not None
    assert 16 < crossing.low <= crossing.at <= crossing.high < 64
    assert crossing.text.startswith("mtp stops paying against baseline at concurrency")


def test_without_a_crossing_none_is_invented(home: Path) -> None:
    bench_run(home, "baseline", speeds={1: 70, 4: 65})
    bench_run(home, "mtp", speeds={1: 150, 4: 140})
    (crossing,) = frontier(home=home, talk=TALK).crossovers
    assert crossing.at is None
    assert "at every measured concurrency" in crossing.text


def test_break_even_is_the_ratio_of_the_step_times(home: Path) -> None:
    crossing_runs(home)
    rows = frontier(home=home, talk=TALK).as_json()["break_even"]
    assert isinstance(rows, list)
    assert [row["concurrency"] for row in rows] == [1, 4, 16, 64]
    for row, ratio in zip(rows, (150 / 70, 140 / 65, 75 / 55, 25 / 40), strict=True):
        assert row["break_even_accept_length"] == pytest.approx(3.2 / ratio, rel=0.03)


def test_interactive_and_batch_work_get_different_answers(home: Path) -> None:
    crossing_runs(home)
    one = recommend(home=home, talk=TALK, workload="interactive")
    many = recommend(home=home, talk=TALK, workload="batch")
    assert one.chosen is not None
    assert many.chosen is not None
    assert (one.chosen.spot.profile, one.chosen.spot.load.concurrency) == ("mtp", 1)
    assert (many.chosen.spot.profile, many.chosen.spot.load.concurrency) == ("baseline", 64)
    assert any("output tok/s" in text for text in one.gives_up)
    assert any("concurrent requests" in text for text in one.would_change)


def test_objectives_choose_the_most_throughput_that_keeps_them(home: Path) -> None:
    crossing_runs(home)
    said = recommend(home=home, talk=TALK, workload="interactive", slo="tpot_p90_ms<10")
    assert said.chosen is not None
    assert (said.chosen.spot.profile, said.chosen.spot.load.concurrency) == ("mtp", 4)
    assert all(one.meets is (not one.broken and not one.unknown) for one in said.judged)


def test_nothing_meeting_the_objectives_names_the_nearest_and_the_next_experiment(home: Path) -> None:
    crossing_runs(home)
    said = recommend(home=home, talk=TALK, workload="interactive", slo="tpot_p90_ms<1")
    assert said.chosen is None
    assert said.exit_code == 12
    assert said.nearest is not None
    assert said.nearest.spot.profile == "mtp"
    assert said.experiments
    assert "no measured profile meets it" in said.why


def test_an_objective_with_too_few_samples_is_not_taken_as_met(home: Path) -> None:
    crossing_runs(home)
    said = recommend(home=home, talk=TALK, workload="interactive", slo="ttft_p99_ms<10000")
    assert said.chosen is None
    assert any("--requests" in one.command for one in said.experiments)


def test_a_rate_beyond_what_was_turned_over_is_not_promised(home: Path) -> None:
    crossing_runs(home)
    assert recommend(home=home, talk=TALK, workload="batch", rate=1.0).chosen is not None
    assert recommend(home=home, talk=TALK, workload="batch", rate=1000.0).chosen is None


def test_simulated_runs_never_speak_for_a_real_host(home: Path) -> None:
    bench_run(home, "mtp", speeds={1: 900}, simulated=True)
    with pytest.raises(NotFound, match="no finished real benchmark"):
        recommend(home=home, talk=TALK, host="gpu1")
    bench_run(home, "baseline", speeds={1: 70})
    said = recommend(home=home, talk=TALK, host="gpu1", workload="interactive")
    assert {one.spot.profile for one in said.judged} == {"baseline"}
    assert not said.frontier.simulated


@pytest.mark.parametrize("slo", ["tpot<20", "nonsense_p90_ms<1", "ttft_p90_ms=3", "ttft_p90_ms<"])
def test_objectives_that_cannot_be_meant_are_refused(slo: str, home: Path) -> None:
    crossing_runs(home)
    with pytest.raises(UsageError, match="--slo"):
        recommend(home=home, talk=TALK, slo=slo)


def test_the_text_of_both_is_printed_in_a_pipe(home: Path) -> None:
    import io

    from rich.console import Console

    from mtpdeploy.report import frontier as frontier_text
    from mtpdeploy.report import recommend as recommend_text

    crossing_runs(home)
    out = io.StringIO()
    console = Console(file=out, width=80, markup=False)
    frontier_text.text(frontier(home=home, talk=TALK), console)
    recommend_text.text(recommend(home=home, talk=TALK), console)
    assert "tok/s for a user" in out.getvalue()


# -- the story: one run each, a baseline of another day, and a limit taken for the memory's


@pytest.fixture
def story(home: Path) -> Path:
    """26.7 tok/s without MTP on another day; 62 to 77 with it at 1, 234 at 4; accept length 3.2, rate 0.84; 24 slots."""
    old = bench_run(
        home, "baseline", speeds={1: 26.7}, session=None, workload="other", output_tokens=256, prompts_sha256=None
    )
    aged(old, "2026-11-01T10:00:00Z")
    memory = budget(
        MTP, {"SGLANG_ENABLE_SPEC_V2": "1"}, Version.parse("0.5.10"), shipped("qwen3.6-27b"), gpu_memory_gb=95.0
    ).as_json()
    capacity = {"max_running_requests": 4, "slots": 24, "slots_per_request": 5}
    new = bench_run(
        home, "mtp", speeds={1: 69.5, 4: 58.5}, session=None, args=MTP, accept=3.2, figures={"accept_rate": 0.84},
        capacity=capacity, workload="story",
    )  # fmt: skip
    new.write_json("plan.json", {"memory": memory})
    return home


def test_the_storys_limit_is_the_slots_and_not_the_memory(story: Path) -> None:
    said = recommend(home=story, talk=TALK, host="gpu1", workload="mixed")
    assert any("24 state slots // 5" in text and "not the memory" in text for text in said.limits)


def test_the_story_is_told_which_flags_give_8_16_and_32_and_what_they_cost(story: Path) -> None:
    said = recommend(home=story, talk=TALK, host="gpu1", workload="mixed").as_json()["suggestions"]
    assert isinstance(said, list)
    offered = {one["set"].get("max_running_requests"): one for one in reversed(said)}
    for requests in (8, 16, 32):
        assert offered[requests]["set"]["max_mamba_cache_size"] == 5 * requests
        assert isinstance(offered[requests]["cost_gb"], float)
        assert f"{requests} requests at once" in offered[requests]["effect"]


def test_the_storys_baseline_is_called_not_like_for_like_first(story: Path) -> None:
    from mtpdeploy.actions.compare import compare

    runs = [row.id for row in Store(story).runs(kind="bench")]
    said = compare(
        home=story, talk=TALK, a=min(runs, key=lambda name: Store(story).run(name).created_utc or ""), b=runs[0]
    )
    document = said.as_json()
    assert next(iter(document)) == "a"
    texts = document["not_like_for_like"]
    assert isinstance(texts, list)
    assert any("another time" in text for text in texts)
    assert any("workload" in text for text in texts)
    assert said.verdict == "can't tell"
    json.dumps(document)


def test_the_storys_accept_rate_fits_neither_definition(story: Path) -> None:
    told = recommend(home=story, talk=TALK, host="gpu1", workload="mixed").notes
    (note,) = {text.split(": ", 1)[1] for text in told if "accept rate" in text}
    assert "0.80" in note
    assert "0.73" in note
    assert "3.36 or 3.52" in note
    assert acceptance_mismatch(3.2, 0.8, 4) is None
    assert acceptance_mismatch(3.2, 0.733, 4) is None


# -- several runs an arm, several arms


def test_runs_of_other_loads_are_not_taken_for_other_prompts(home: Path) -> None:
    """A run's digest is over its first point, and more lanes send more prompts: only the same load can be compared."""
    from mtpdeploy.actions.compare import compare

    bench_run(home, "baseline", speeds={1: 70, 4: 65, 16: 55}, prompts_sha256="11" * 32)
    one = bench_run(home, "mtp", speeds={1: 150, 4: 140}, prompts_sha256="11" * 32)
    other = bench_run(home, "mtp", speeds={16: 75}, prompts_sha256="22" * 32)
    said = compare(home=home, talk=TALK, a="baseline", b=f"{one.id},{other.id}")
    assert "prompts as sent" not in {difference.what for difference in said.likeness.differences}
    assert [at.verdict for at in said.loads] == ["faster"] * 3


def test_other_prompts_at_one_load_spoil_that_load_alone(home: Path) -> None:
    from mtpdeploy.actions.compare import compare

    bench_run(home, "baseline", speeds={1: 70}, prompts_sha256="11" * 32)
    bench_run(home, "baseline", speeds={4: 65}, prompts_sha256="22" * 32)
    bench_run(home, "mtp", speeds={1: 150}, prompts_sha256="11" * 32)
    bench_run(home, "mtp", speeds={4: 140}, prompts=6, prompts_sha256="33" * 32)
    said = compare(home=home, talk=TALK, a="baseline", b="mtp")
    (difference,) = said.likeness.differences
    assert (difference.text, difference.decisive) == ("prompts as sent: not the same at concurrency 4", False)
    assert [(at.load.concurrency, at.verdict) for at in said.loads] == [(1, "faster"), (4, "can't tell")]


def test_several_arms_have_one_line_for_each_kind_of_difference(home: Path) -> None:
    for place, version in enumerate(("0.5.17", "0.5.17", "0.5.18", "0.5.20")):
        bench_run(home, f"p{place}", speeds={1: 70 + place, 4: 60}, sglang_version=version)
    said = frontier(home=home, talk=TALK, run=["p0", "p1", "p2", "p3"]).not_like_for_like
    assert said == ("SGLang version: p0, p1: 0.5.17; p2: 0.5.18; p3: 0.5.20",)


def test_a_baseline_of_another_day_is_named_with_its_age_before_all_else(home: Path) -> None:
    from mtpdeploy.actions.compare import compare

    old = bench_run(home, "baseline", speeds={1: 70, 4: 65}, session="day0", temperature=0.7)
    aged(old, "2026-11-01T10:00:00Z")
    new = bench_run(home, "mtp", speeds={1: 150, 4: 140})
    aged(new, "2026-11-05T10:00:00Z")
    texts = compare(home=home, talk=TALK, a=old.id, b=new.id).as_json()["not_like_for_like"]
    assert isinstance(texts, list)
    assert texts[0].startswith("measured at another time: 4 days apart")
    assert any("temperature" in text for text in texts)


def test_a_profiles_runs_of_the_other_sides_session_come_before_newer_ones(home: Path) -> None:
    from mtpdeploy.actions.compare import compare

    own = bench_run(home, "baseline", speeds={1: 70}, session="campaign1")
    bench_run(home, "mtp", speeds={1: 150}, session="campaign1")
    newer = bench_run(home, "baseline", speeds={1: 60}, session="day2")
    said = compare(home=home, talk=TALK, a="baseline", b="mtp")
    assert said.a_runs == (own.id,)
    assert newer.id not in said.a_runs


def test_a_ratio_that_rises_through_one_is_no_gain_at_every_load(home: Path) -> None:
    bench_run(home, "baseline", speeds={1: 100, 4: 60})
    bench_run(home, "mtp", speeds={1: 80, 4: 90})
    (crossing,) = frontier(home=home, talk=TALK).crossovers
    assert crossing.at is None
    assert crossing.text == "mtp is slower than baseline up to concurrency 1, and faster from 4 on"


def test_the_break_even_has_the_interval_of_the_ratio(home: Path) -> None:
    crossing_runs(home)
    rows = frontier(home=home, talk=TALK).as_json()["break_even"]
    assert isinstance(rows, list)
    for row in rows:
        assert row["low"] < row["break_even_accept_length"] < row["high"]


# -- recommend, as it is typed


def test_per_token_is_another_name_of_tpot(home: Path) -> None:
    crossing_runs(home)
    said = [
        recommend(home=home, talk=TALK, workload="interactive", slo=f"ttft_p90_ms<500,{name}_p90_ms<10")
        for name in ("tpot", "per_token")
    ]
    assert said[0].as_json() == said[1].as_json()
    assert said[0].slo == ("ttft_p90_ms<500", "tpot_p90_ms<10")


@pytest.mark.parametrize("slo", ["ttft_p90_ms<", "speed<3", "ttft<500", ",", "tpot_p90_ms<nan"])
def test_a_refused_objective_names_the_keys_that_there_are(slo: str, home: Path) -> None:
    crossing_runs(home)
    with pytest.raises(UsageError, match="ttft_p90_ms") as caught:
        recommend(home=home, talk=TALK, slo=slo)
    assert "--slo" in caught.value.message


def test_a_workload_file_counts_only_runs_under_it_and_says_what_to_measure(home: Path) -> None:
    file = home / "my load.yml"
    file.write_text("concurrency: [8]\nrequests: 8\noutput_tokens: 64\n")
    crossing_runs(home)
    with pytest.raises(NotFound, match="under workload my load") as caught:
        recommend(home=home, talk=TALK, host="gpu1", workload=str(file))
    assert caught.value.next_commands[0] == f"mtpdeploy campaign --host gpu1 --workload '{file}'"
    bench_run(home, "mtp", speeds={8: 50}, workload="my load")
    said = recommend(home=home, talk=TALK, host="gpu1", workload=str(file))
    assert said.kind == "batch"
    assert [one.spot.load.concurrency for one in said.judged] == [8]


def test_a_rate_that_is_missed_says_what_is_turned_over(home: Path) -> None:
    crossing_runs(home)
    said = recommend(home=home, talk=TALK, workload="batch", rate=1000.0)
    assert "it turns over" in said.why
    assert said.nearest is not None
    assert said.experiments


def test_named_runs_alone_are_judged_and_simulated_ones_never_for_a_real_host(home: Path) -> None:
    a, b = crossing_runs(home)
    simulated = bench_run(home, "mtp-fast", speeds={1: 900}, simulated=True)
    said = recommend(home=home, talk=TALK, workload="batch", run=[b.id, simulated.id])
    assert {one.spot.profile for one in said.judged} == {"mtp"}
    with pytest.raises(NotFound, match="only simulated runs"):
        recommend(home=home, talk=TALK, run=[simulated.id])
    campaign = Store(home).new_run("campaign", {"runs": [a.id, b.id]})
    campaign.finish({})
    whole = recommend(home=home, talk=TALK, workload="batch", run=[campaign.id])
    assert {one.spot.profile for one in whole.judged} == {"baseline", "mtp"}


def test_a_baseline_that_was_not_measured_is_refused_with_those_that_were(home: Path) -> None:
    crossing_runs(home)
    for ask in (frontier, recommend):
        with pytest.raises(NotFound, match="--baseline nope: measured here are baseline, mtp"):
            ask(home=home, talk=TALK, host="gpu1", baseline="nope")  # type: ignore[operator]


def test_one_benchmark_of_another_length_hides_no_pair_that_was_measured_alike(home: Path) -> None:
    short = {"speeds": {1: 60.0}, "workload": None, "session": None, "output_tokens": 64}
    a, b = bench_run(home, "baseline", **short), bench_run(home, "mtp", **short)  # type: ignore[arg-type]
    alone = bench_run(home, "baseline", **{**short, "output_tokens": 900})  # type: ignore[arg-type]
    for run, hour in ((a, 10), (b, 11), (alone, 12)):
        aged(run, f"2026-04-01T{hour}:00:00Z")
    compared = compare(home=home, talk=TALK, a="baseline", b="mtp")
    assert (compared.a_runs, compared.b_runs) == ((a.id,), (b.id,))
    (note,) = (one for one in recommend(home=home, talk=TALK, host="gpu1").notes if one.startswith("not used: mtp,"))
    assert f"--run {b.id}" in note
