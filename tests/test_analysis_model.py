"""The step model: predicts what it has not seen, says how well, and knows what it does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grids import observations
from runs import bench_run

from mtpdeploy.analysis import model
from mtpdeploy.analysis.model import Acceptance, Observation, Setting, Shape, fit, leave_one_out
from mtpdeploy.store.measured import measured


@pytest.mark.parametrize(("campaigns", "settings"), [(("h200_grid.jsonl",), 6), ((), 12)])
def test_settings_of_an_h200_that_were_left_out_are_predicted_within_a_few_percent(
    campaigns: tuple[str, ...], settings: int
) -> None:
    checked = leave_one_out(observations(*campaigns))
    assert checked is not None
    said: Any = checked.as_json()
    assert said["settings"] == settings
    assert said["step_median_error"] < 0.03
    assert said["tpot_median_error"] < 0.03
    assert said["ttft_median_error"] < 0.20
    assert said["output_tok_s_median_error"] < 0.05


def test_the_error_bars_hold_what_they_promise_on_settings_that_were_left_out() -> None:
    checked = leave_one_out(observations())
    assert checked is not None
    assert checked.covered is not None
    assert 0.9 <= checked.covered <= 1.0


def test_a_queue_shows_in_the_first_token_and_not_in_the_throughput() -> None:
    """Measured: four run of eight; 2,993 ms to the first token."""
    fitted = fit(observations())
    said = fitted.predict(Setting(4, 4, 4), 8, input_tokens=505, output_tokens=384)
    assert said.ttft_ms is not None
    assert 2993 in said.ttft_ms
    assert said.ttft_ms.value == pytest.approx(2993, rel=0.1)


def test_acceptance_beyond_what_was_seen_widens_the_interval() -> None:
    fitted = fit(observations())
    seen, beyond = (
        fitted.predict(Setting(drafts, 4, 4), 4, input_tokens=512, output_tokens=384).tpot_ms for drafts in (4, 7)
    )
    assert beyond.high / beyond.low > 1.3 * seen.high / seen.low


@pytest.mark.parametrize(("drafts", "batch", "step_ms"), [(3, 1, 19.1), (3, 4, 20.0), (2, 1, 17.8), (2, 4, 18.6)])
def test_draft_counts_never_run_are_inside_their_error_bars(drafts: int, batch: int, step_ms: float) -> None:
    """Measured on the same H200, and not among the rows that the fit sees."""
    said = fit(observations()).predict(
        Setting(drafts, 4, batch), batch, input_tokens=512, output_tokens=384, accept_length=2.5
    )
    assert step_ms in said.step_ms
    assert said.step_ms.value == pytest.approx(step_ms, rel=0.06)


def test_one_run_already_predicts_with_wide_error_bars() -> None:
    rows = observations()
    first = fit(rows[:1])
    for row in rows:
        said = first.predict(row.setting, row.concurrency, input_tokens=512, output_tokens=row.output_tokens)
        assert row.step_ms in said.step_ms
    wide = first.predict(Setting(1), 1, input_tokens=512, output_tokens=384)
    narrow = fit(rows).predict(Setting(1), 1, input_tokens=512, output_tokens=384)
    assert wide.step_ms.high / wide.step_ms.low > 2 * narrow.step_ms.high / narrow.step_ms.low


def test_requests_beyond_the_limit_wait_and_add_no_throughput() -> None:
    fitted = fit(observations())
    at = {load: fitted.predict(Setting(4, 4, 4), load, input_tokens=512, output_tokens=384) for load in (4, 8)}
    assert at[4].output_tok_s == at[8].output_tok_s
    assert at[8].running == 4


def test_what_was_not_measured_is_said() -> None:
    fitted = fit(observations())
    said = fitted.predict(Setting(6, 4, 128), 128, input_tokens=512, output_tokens=384)
    assert any("more than 64 running requests" in text for text in said.extrapolated)
    assert any("3 draft steps" in text for text in said.extrapolated)


def test_fewer_draft_steps_follow_from_the_acceptance_per_position() -> None:
    measured_at_three = Acceptance([0.9, 0.7, 0.4])
    assert [measured_at_three.length(steps) for steps in (0, 1, 2, 3)] == pytest.approx([1.0, 1.9, 2.6, 3.0])
    assert measured_at_three.length(4) == pytest.approx(3.0 + 0.4 * 0.4 / 0.7)


@pytest.mark.parametrize(("length", "steps"), [(3.2, 3), (1.0, 3), (4.0, 3), (9.0, 3), (0.0, 2), (1.7, 1)])
def test_an_accept_length_alone_gives_back_itself(length: float, steps: int) -> None:
    assert Acceptance.from_length(length, steps).length(steps) == pytest.approx(min(max(length, 1.0), steps + 1.0))


def test_no_measurement_is_refused_and_two_settings_are_not_cross_validated() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        fit([])
    two = [one for one in observations() if one.name in ("A-mtp24", "B-nomtp")]
    assert leave_one_out(two) is None


def test_hostile_figures_do_not_break_the_fit() -> None:
    odd = Observation("x", Setting(4, 4, 0), 1, 0.0, 0.0, 1e-9, -5.0, None, 1e6)
    said = fit([odd, *observations()]).predict(Setting(4), 1, input_tokens=0, output_tokens=1)
    assert said.step_ms.value > 0


def test_a_run_speaks_by_its_recorded_arguments(tmp_path: Path) -> None:
    args = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "mamba_ssm_dtype": "bfloat16"}
    run = bench_run(tmp_path, speeds={1: 100, 4: 90}, accept=2.4, args=args, capacity={"max_running_requests": 4})
    rows = model.observations([measured(run)])
    assert {row.setting for row in rows} == {Setting(3, 2, 4)}
    assert rows[0].step_ms == pytest.approx(1e3 / 100 * 2.4, rel=0.1)


def test_the_shape_comes_from_the_budget_where_there_is_one() -> None:
    assert Shape.from_memory({"weights_gb": 10, "kv_bytes_per_token": None}).weights_gb == 10
    assert Shape.from_memory({}) == Shape()
