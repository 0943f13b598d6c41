"""`model`: errors on what was not seen, predictions of what was not run, and nothing beyond what the memory holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grids import CAMPAIGNS, DATA
from runs import bench_run

from mtpdeploy.actions.model import model
from mtpdeploy.errors import ConfigError, NotFound, PlanRefused, UsageError
from mtpdeploy.progress import Silent

TALK = Silent()
GRID = str(DATA / CAMPAIGNS[0])
ON_A_CARD: dict[str, Any] = {"profile": "mtp", "gpu_memory_gb": 97.8, "sglang_version": "0.5.17"}


def test_the_error_on_settings_left_out_is_told_with_every_figure(tmp_path: Path) -> None:
    said = model(home=tmp_path, talk=TALK, measurements=GRID).as_json()
    checked: Any = said["cross_validation"]
    assert checked["settings"] == 6
    assert checked["points"] == 29
    for figure in ("step", "tpot", "ttft", "output_tok_s"):
        assert 0 < checked[f"{figure}_median_error"] <= checked[f"{figure}_p90_error"]
    assert checked["output_tok_s_within_interval"] > 0.9
    assert said["predictions"] == []
    assert "--profile" in str(said["budget"])


def test_settings_never_run_are_predicted_with_intervals_up_to_the_concurrency_that_fits(tmp_path: Path) -> None:
    said = model(home=tmp_path, talk=TALK, measurements=GRID, **ON_A_CARD)
    by_steps = {one.candidate.levels["draft_steps"]: one for one in said.predictions}
    assert set(by_steps) == {0, 1, 2, 3, 4}
    assert by_steps[0].candidate.setting.running == 32  # without drafts more fit
    assert by_steps[3].candidate.setting.running == 16
    for one in said.predictions:
        p = one.prediction
        assert p.concurrency <= (one.candidate.setting.running or 0)
        assert p.output_tok_s.low < p.output_tok_s.value < p.output_tok_s.high
        assert p.ttft_ms is not None
        assert p.tpot_ms.low < p.tpot_ms.high
    small = model(home=tmp_path, talk=TALK, measurements=GRID, **{**ON_A_CARD, "gpu_memory_gb": 80.0})
    assert {one.candidate.setting.running for one in small.predictions if one.candidate.levels["draft_steps"] == 3} == {
        8
    }


def test_runs_speak_for_themselves_and_for_their_own_budget(tmp_path: Path) -> None:
    args = {"model_path": "Qwen/Qwen3.6-27B", "host": "127.0.0.1", "mem_fraction_static": 0.85}
    mtp = {**args, "speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
           "speculative_num_draft_tokens": 4, "max_running_requests": 4, "max_mamba_cache_size": 24}  # fmt: skip
    for name, own, speed in (
        ("baseline", args, 70),
        ("mtp", mtp, 150),
        ("mtp2", {**mtp, "max_mamba_cache_size": 20}, 150),
    ):
        bench_run(tmp_path, profile=name, speeds={1: speed, 4: speed * 0.9}, args=own,
                  accept=3.2 if own is not args else None, capacity={"max_running_requests": 4})  # fmt: skip
    said = model(home=tmp_path, talk=TALK, gpu_memory_gb=97.8, sglang_version="0.5.17")
    assert said.points == 6
    assert said.validation is not None
    assert "the arguments of run" in said.budget
    assert any(not one.measured for one in said.predictions)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tpot_p50_ms": 0}, "tpot_p50_ms: should be a number above 0"),
        ({"concurrency": "4"}, "concurrency: should be a number above 0"),
        ({"concurrency": True}, "concurrency: should be a number above 0"),
        ({"output_tok_s": -1}, "output_tok_s: should be a number above 0"),
        ({"input_tokens": float("inf")}, "input_tokens: should be a number above 0"),
        ({"draft_tokens": 0}, "draft_tokens: should be 1"),
        ({"state_dtype": "fp4"}, "state_dtype: should be float32"),
        ({"setting": None}, "setting: should be there"),
    ],
)
def test_a_file_of_measurements_is_refused_by_line_and_key(
    change: dict[str, object], text: str, tmp_path: Path
) -> None:
    row = {
        "setting": "x",
        "draft_tokens": 4,
        "concurrency": 1,
        "input_tokens": 512,
        "output_tokens": 256,
        "tpot_p50_ms": 6,
    }
    path = tmp_path / "grid.jsonl"
    path.write_text(json.dumps(row) + "\n\n" + json.dumps({**row, **change}) + "\n")
    with pytest.raises(ConfigError, match=f"grid.jsonl:3: {text}"):
        model(home=tmp_path, talk=TALK, measurements=str(path))


def test_what_cannot_be_fitted_or_judged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no finished benchmark"):
        model(home=tmp_path, talk=TALK)
    with pytest.raises(UsageError, match="cannot be read"):
        model(home=tmp_path, talk=TALK, measurements=str(tmp_path))
    (tmp_path / "bad").write_text("{\n")
    with pytest.raises(ConfigError, match="bad:1: is not JSON"):
        model(home=tmp_path, talk=TALK, measurements=str(tmp_path / "bad"))
    (tmp_path / "empty").write_text("")
    with pytest.raises(NotFound, match="no valid"):
        model(home=tmp_path, talk=TALK, measurements=str(tmp_path / "empty"))
    with pytest.raises(PlanRefused, match="memory"):
        model(home=tmp_path, talk=TALK, measurements=GRID, profile="mtp")
    with pytest.raises(UsageError, match="--set"):
        model(home=tmp_path, talk=TALK, measurements=GRID, set_=("args.x=1",))
    wrongs: tuple[dict[str, Any], ...] = (
        {"concurrency": "x"},
        {"input_tokens": 0},
        {"available_gb": -1.0},
        {"space_": "gpus=1"},
    )
    for wrong in wrongs:
        with pytest.raises(UsageError):
            model(home=tmp_path, talk=TALK, measurements=GRID, **wrong)
