"""Two arms side by side: the verdict must be earned, and what was not alike comes first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import bench_run

from mtpdeploy.analysis.compare import Comparison, compare
from mtpdeploy.errors import UsageError
from mtpdeploy.store import Run
from mtpdeploy.store.measured import measured

GAIN = {f"p{i}": 1 + 0.02 * i for i in range(8)}


def compared(a: Run | list[Run], b: Run | list[Run]) -> Comparison:
    arms = [[measured(run) for run in (side if isinstance(side, list) else [side])] for side in (a, b)]
    return compare(*arms)


def test_a_clear_gain_is_called_faster_with_its_interval(tmp_path: Path) -> None:
    a = bench_run(tmp_path, "baseline", speeds={1: 70, 4: 65}, gain=None, noise=0.01, repeats=2, run_noise=0.005)
    b = bench_run(tmp_path, "mtp", speeds={1: 150, 4: 140}, gain=GAIN, noise=0.01, repeats=2, run_noise=0.005, seed=1)
    said = compared(a, b)
    assert said.verdict == "faster"
    assert said.likeness.differences == ()
    for one in said.loads:
        assert one.batch is not None
        assert one.batch.low is not None
        assert one.batch.high is not None
        assert one.batch.low < one.batch.value < one.batch.high
        assert 2.1 < one.batch.value < 2.5
        assert one.paired
    assert said.exit_code == 0


def test_the_ratio_is_exactly_that_of_the_points(tmp_path: Path) -> None:
    a = bench_run(tmp_path, "baseline", speeds={4: 65}, noise=0.05)
    b = bench_run(tmp_path, "mtp", speeds={4: 140}, noise=0.05, seed=3)
    (one,) = compared(a, b).loads
    assert one.batch is not None
    points = [measured(run).passes[0].number("output_tok_s") for run in (a, b)]
    assert one.batch.value == pytest.approx(points[1] / points[0])  # type: ignore[operator]


def test_pairing_by_prompt_narrows_the_interval(tmp_path: Path) -> None:
    spread = {f"p{i}": 1 + 0.3 * (i % 3) for i in range(8)}
    a = bench_run(tmp_path, "baseline", speeds={1: 70}, gain=spread, noise=0.005)
    same = bench_run(tmp_path, "mtp", speeds={1: 80}, gain=spread, noise=0.005, seed=1)
    (paired,) = compared(a, same).loads
    other = bench_run(tmp_path, "mtp", speeds={1: 80}, gain=spread, noise=0.005, seed=1)
    lines = [line | {"prompt_id": f"q{line['index']}"} for line in other.read_jsonl("records.jsonl")]
    other.file("records.jsonl").unlink()
    other.append_jsonl("records.jsonl", lines)
    (apart,) = compared(a, other).loads
    assert paired.paired
    assert not apart.paired
    assert paired.batch is not None
    assert apart.batch is not None
    assert paired.batch.relative_half_width < apart.batch.relative_half_width / 5  # type: ignore[operator]


def test_equal_arms_can_not_be_told_apart(tmp_path: Path) -> None:
    a = bench_run(tmp_path, "one", speeds={1: 70}, noise=0.03, repeats=3, run_noise=0.01)
    b = bench_run(tmp_path, "two", speeds={1: 70.3}, noise=0.03, repeats=3, run_noise=0.01, seed=7)
    said = compared(a, b)
    assert said.verdict == "can't tell"
    assert said.exit_code == 12


def test_a_small_gain_from_single_runs_is_not_enough(tmp_path: Path) -> None:
    a = bench_run(tmp_path, "one", speeds={1: 70}, noise=0.001)
    b = bench_run(tmp_path, "two", speeds={1: 72}, noise=0.001, seed=7)
    said = compared(a, b)
    assert said.verdict == "can't tell"
    assert "single runs" in said.loads[0].why
    assert any("--repeat" in note for note in said.notes)


def test_faster_alone_and_slower_together_is_said_so(tmp_path: Path) -> None:
    a = bench_run(tmp_path, "baseline", speeds={1: 70, 64: 30}, noise=0.01)
    b = bench_run(tmp_path, "mtp", speeds={1: 150, 64: 20}, noise=0.01)
    said = compared(a, b)
    assert said.verdict == "depends on the load"
    assert said.verdict_text == "mtp is faster at concurrency 1 and slower at concurrency 64"


@pytest.mark.parametrize(
    ("change", "text", "decisive"),
    [
        ({"host": "gpu2"}, "host: gpu1 against gpu2", True),
        ({"gpu": "NVIDIA B200"}, "GPU: NVIDIA H200 against NVIDIA B200", True),
        ({"simulated": True}, "one arm is simulated and the other is not", True),
        ({"model_hash": "11" * 32}, "model files: 0f0f0f0f0f0f… against 111111111111…", True),
        ({"prompts_sha256": "22" * 32}, "prompts as sent: abababababab… against 222222222222…", True),
        ({"output_tokens": 1024}, "output tokens: 128 against 1024", True),
        ({"sglang_version": "0.5.10"}, "SGLang version: 0.5.17 against 0.5.10", False),
        ({"client_place": "here"}, "place of the client: host against here", False),
        ({"contention": ("3 foreign requests",)}, "foreign work during the measurement (B: 3 foreign requests)", False),
        ({"tuned": True}, None, False),
    ],
)
def test_what_is_not_alike_comes_first(
    change: dict[str, object], text: str | None, decisive: bool, tmp_path: Path
) -> None:
    base = {"tuned": False} if "tuned" in change else {}
    a = bench_run(tmp_path, "baseline", speeds={1: 70}, **base)  # type: ignore[arg-type]
    b = bench_run(tmp_path, "mtp", speeds={1: 150}, gain=GAIN, **change)  # type: ignore[arg-type]
    said = compared(a, b)
    listed = said.as_json()["not_like_for_like"]
    assert listed == ([text] if text else ["one arm has settings found by a search, the other has not been tuned"])
    assert said.verdict == ("can't tell" if decisive else "faster")


def test_yesterdays_baseline_is_used_only_with_its_age_said(tmp_path: Path) -> None:
    a = bench_run(tmp_path, "baseline", speeds={1: 70}, session=None)
    b = bench_run(tmp_path, "mtp", speeds={1: 150}, gain=GAIN, session=None)
    head = a.read_json("run.json")
    assert isinstance(head, dict)
    a.write_json("run.json", head | {"created_utc": "2026-01-02T03:04:05Z"})
    old = measured(Run(a.path, head | {"created_utc": "2026-01-02T03:04:05Z"}))
    said = compare([old], [measured(b)])
    assert "days apart" in said.likeness.differences[0].text


def test_an_invalid_point_gives_no_ratio_and_says_why(tmp_path: Path) -> None:
    a = bench_run(tmp_path, "baseline", speeds={1: 70})
    figures = {"valid": False, "invalid_because": ["3 of 8 requests failed"]}
    b = bench_run(tmp_path, "mtp", speeds={1: 150}, figures=figures)
    (one,) = compared(a, b).loads
    assert one.batch is None
    assert "3 of 8 requests failed" in one.why


LATE = "the client was the bottleneck: its event loop was 7.0 ms late at p99"


def test_a_client_that_looked_late_widens_the_interval_and_spoils_no_clear_verdict(tmp_path: Path) -> None:
    a = bench_run(tmp_path, "baseline", speeds={1: 70}, noise=0.01)
    figures = {"valid": False, "invalid_because": [LATE], "client": {"loop_lag_p99_ms": 17.0}}
    b = bench_run(tmp_path, "mtp", speeds={1: 150}, noise=0.01, figures=figures)
    (late,) = compared(a, b).loads
    assert late.verdict == "faster"
    assert "looked late" in late.basis
    figures["invalid_because"] = [LATE + " and it used 99% of its 1 core(s)"]
    (busy,) = compared(a, bench_run(tmp_path, "mtp", speeds={1: 150}, noise=0.01, figures=figures)).loads
    assert busy.batch is None


def test_no_shared_load_is_no_comparison(tmp_path: Path) -> None:
    said = compared(bench_run(tmp_path, "a", speeds={1: 70}), bench_run(tmp_path, "b", speeds={4: 70}))
    assert said.verdict == "can't tell"
    assert [str(load) for load in said.only_a] == ["concurrency 1"]


def test_acceptance_and_step_time_multiply_to_the_speed_up(tmp_path: Path) -> None:
    a = bench_run(tmp_path, "baseline", speeds={1: 70})
    b = bench_run(tmp_path, "mtp", speeds={1: 150}, accept=3.2)
    (one,) = compared(a, b).loads
    assert one.acceptance is not None
    assert one.request is not None
    assert one.acceptance.tokens_a_step / one.acceptance.step_time == pytest.approx(one.request.value)
    assert one.acceptance.break_even is not None
    assert one.acceptance.break_even.value == pytest.approx(3.2 / (150 / 70), rel=0.01)
    assert one.acceptance.at_equal_acceptance is None


def test_a_lucky_text_is_not_taken_for_a_faster_system(tmp_path: Path) -> None:
    a = bench_run(tmp_path, "one", speeds={1: 100}, accept=2.5)
    b = bench_run(tmp_path, "two", speeds={1: 128}, accept=3.2)
    (one,) = compared(a, b).loads
    assert one.acceptance is not None
    assert one.acceptance.at_equal_acceptance == pytest.approx(1.0, abs=0.02)


def test_points_without_records_are_compared_over_runs(tmp_path: Path) -> None:
    arms = []
    for profile, speed in (("a", 70), ("b", 150)):
        run = bench_run(tmp_path, profile, speeds={1: speed}, repeats=3, run_noise=0.01, seed=speed)
        run.file("records.jsonl").unlink()
        arms.append(run)
    (one,) = compared(*arms).loads
    assert one.verdict == "faster"
    assert "no record per prompt" in one.basis


def test_damaged_records_leave_the_rest_of_the_run_readable(tmp_path: Path) -> None:
    run = bench_run(tmp_path, "a", speeds={1: 70})
    with run.file("records.jsonl").open("ab") as file:
        file.write(b'{"point": 0, "output_tokens": "x", "end_us": 1}\n{"point": 0, "tokens": 3}\nnull\n\xff\n{"po')
    assert len(measured(run).passes[0].samples) == 8


def test_outputs_that_agree_only_at_first_are_counted(tmp_path: Path) -> None:
    a, b = bench_run(tmp_path, "a", speeds={1: 70}), bench_run(tmp_path, "b", speeds={1: 150})
    for run, tail in ((a, [4, 5]), (b, [4, 6])):
        run.append_jsonl("outputs.jsonl", [{"point": 0, "index": i, "token_ids": [i, 2, 3, *tail]} for i in range(8)])
    agreement = compared(a, b).agreement
    assert agreement is not None
    assert (agreement.prompts, agreement.identical, agreement.median_first_tokens) == (8, 0, 4)


def test_interleaved_arms_of_one_run_are_named_and_compared(tmp_path: Path) -> None:
    run = bench_run(tmp_path, "campaign", speeds={1: 70}, repeats=4)
    points = run.read_json("points.json")
    assert isinstance(points, list)
    for one, arm in zip(points, "abba", strict=True):
        one["arm"] = arm
    run.write_json("points.json", points)
    with pytest.raises(UsageError, match=f"{run.id}:a or {run.id}:b"):
        measured(run)
    with pytest.raises(UsageError, match="no arm 'c'"):
        measured(run, "c")
    said = compare([measured(run, "a")], [measured(run, "b")])
    assert said.loads[0].runs == (2, 2)
    assert said.likeness.differences == ()
    assert (said.a, said.b) == ("a", "b")
    assert not any("wholly before" in note for note in said.notes)
    for one, arm in zip(points, "aabb", strict=True):
        one["arm"] = arm
    run.write_json("points.json", points)
    said = compare([measured(run, "a")], [measured(run, "b")])
    assert any("wholly before the other (AB)" in note for note in said.notes)


def test_two_settings_of_one_profile_are_told_apart_and_not_taken_for_repeats(tmp_path: Path) -> None:
    a = bench_run(tmp_path, "mtp", speeds={1: 70}, args={"max_running_requests": 4, "tp_size": 1})
    b = bench_run(tmp_path, "mtp", speeds={1: 150}, gain=GAIN, args={"max_running_requests": 16, "tp_size": 1})
    said = compared(a, b)
    assert (said.a, said.b) == ("mtp", "mtp [max_running_requests=16]")
    assert "mtp [max_running_requests=16] is faster than mtp" in said.verdict_text


def test_the_same_data_gives_the_same_json(tmp_path: Path) -> None:
    a, b = bench_run(tmp_path, "a", speeds={1: 70}, noise=0.1), bench_run(tmp_path, "b", speeds={1: 75}, noise=0.1)
    assert json.dumps(compared(a, b).as_json()) == json.dumps(compared(a, b).as_json())
