"""The list, one run, exports: what other tools read must be exact, and nothing in a run may harm who reads it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from runs import bench_run

from mtpdeploy.actions import runs as actions
from mtpdeploy.actions.compare import compare
from mtpdeploy.actions.runs import RunShown
from mtpdeploy.errors import NotFound, UsageError
from mtpdeploy.progress import Silent
from mtpdeploy.report import compare as compare_text
from mtpdeploy.report import runs as text
from mtpdeploy.report.export import exported
from mtpdeploy.report.figures import number
from mtpdeploy.store import Store

TALK = Silent()


def shown(home: Path, **more: object) -> RunShown:
    bench_run(home, "mtp", speeds={1: 150, 4: 140}, accept=3.2, **more)  # type: ignore[arg-type]
    return actions.show(home=home, talk=TALK, run="last")


def printed(draw: object, answer: object, width: int = 100) -> str:
    out = io.StringIO()
    draw(answer, Console(file=out, width=width, markup=False))  # type: ignore[operator]
    return out.getvalue()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "–"), (0, "0"), (0.0, "0"), (26.7, "26.7"), (234.4, "234"), (1.777, "1.78"), (0.01234, "0.0123"),
     (14770, "14770"), (True, "True"), ("x", "x"), (1403.82, "1404")],
)  # fmt: skip
def test_figures_keep_the_digits_that_mean_something(value: object, expected: str) -> None:
    assert number(value) == expected


def test_csv_gives_back_every_figure_exactly(tmp_path: Path) -> None:
    run = shown(tmp_path)
    rows = list(csv.DictReader(io.StringIO(exported([run], "csv"))))
    assert len(rows) == 2
    for row, point in zip(rows, run.points, strict=True):
        assert float(row["output_tok_s"]) == point["output_tok_s"]
        assert row["ttft_p99_ms"] == ""
        assert row["run_id"] == run.run.id


def test_a_spreadsheet_is_given_no_formula(tmp_path: Path) -> None:
    run = shown(tmp_path, host='=HYPERLINK("http://evil")')
    row = next(iter(csv.DictReader(io.StringIO(exported([run], "csv")))))
    assert row["host"].startswith("'=")


def test_markdown_cells_cannot_break_the_table(tmp_path: Path) -> None:
    run = shown(tmp_path, host="a|b\n| c <script>", model="`x`")
    lines = exported([run], "md").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert "<script>" not in "\n".join(lines)


def test_json_is_what_runs_show_says(tmp_path: Path) -> None:
    run = shown(tmp_path)
    assert json.loads(exported([run], "json")) == [json.loads(json.dumps(run.as_json()))]


def test_bench_serving_rows_have_that_tools_names(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in exported([shown(tmp_path)], "bench-serving").splitlines()]
    assert [row["max_concurrency"] for row in rows] == [1, 4]
    needed = {"request_rate", "duration", "completed", "total_output_tokens", "output_throughput", "median_ttft_ms"}
    assert needed <= rows[0].keys()
    assert rows[0]["request_rate"] == "inf"


def test_a_dashboard_row_says_that_it_is_simulated_or_invalid(tmp_path: Path) -> None:
    run = bench_run(tmp_path, speeds={1: 50.0}, simulated=True, figures={"valid": False})
    answer = actions.show(home=tmp_path, talk=TALK, run=run.id)
    (row,) = (json.loads(line) for line in exported([answer], "bench-serving").splitlines())
    assert (row["backend"], row["simulated"], row["valid"]) == ("mtpdeploy (simulated) (invalid)", True, False)


def test_an_export_goes_to_stdout_or_to_a_file(tmp_path: Path) -> None:
    run = shown(tmp_path)
    said = actions.export(home=tmp_path, talk=TALK, run=["last"], format="csv")
    assert printed(text.exported, said) == exported([run], "csv")
    file = tmp_path / "deep" / "points.csv"
    made = actions.export(home=tmp_path, talk=TALK, run=["last"], format="csv", output=str(file))
    assert file.read_text() == exported([run], "csv")
    assert made.size_bytes == file.stat().st_size
    with pytest.raises(UsageError, match="should be one of"):
        actions.export(home=tmp_path, talk=TALK, run=["last"], format="xlsx")


def test_an_empty_home_says_what_to_type(tmp_path: Path) -> None:
    said = actions.runs(home=tmp_path, talk=TALK)
    assert "mtpdeploy bench" in printed(text.listed, said)
    with pytest.raises(NotFound):
        actions.show(home=tmp_path, talk=TALK, run="last")


def test_the_list_labels_simulated_and_unreadable_runs(tmp_path: Path) -> None:
    bench_run(tmp_path, "mtp", speeds={1: 150}, simulated=True)
    (tmp_path / "runs" / "20260101-000000-abcd").mkdir()
    said = printed(text.listed, actions.runs(home=tmp_path, talk=TALK), width=200)
    assert "(simulated)" in said
    assert "unreadable" in said


def test_a_run_with_damaged_files_is_shown_with_their_names(tmp_path: Path) -> None:
    run = shown(tmp_path).run
    run.write_text("points.json", "{")
    run.write_text("verify.json", "[1,")
    said = actions.show(home=tmp_path, talk=TALK, run=run.id)
    assert set(said.damaged) == {"points.json", "verify.json"}
    assert "verify.json" in printed(text.shown, said)


def test_control_characters_of_a_run_do_not_reach_the_terminal(tmp_path: Path) -> None:
    run = shown(tmp_path, host="a\x1b[2Jb", figures={"valid": False, "invalid_because": ["\x1b]0;x\x07"]})
    for said in (printed(text.shown, run), printed(text.listed, actions.runs(home=tmp_path, talk=TALK))):
        assert "\x1b[2J" not in said
        assert "\x07" not in said


def test_delete_takes_full_ids_only(tmp_path: Path) -> None:
    run = shown(tmp_path).run
    for name in ("last", run.id[:-1], "../x", ""):
        with pytest.raises(UsageError, match="full id"):
            actions.delete(home=tmp_path, talk=TALK, run=[name])
    assert actions.delete(home=tmp_path, talk=TALK, run=[run.id]).runs == (run.id,)
    assert Store(tmp_path).runs() == ()


def test_a_comparison_prints_what_is_not_alike_before_the_verdict(tmp_path: Path) -> None:
    bench_run(tmp_path, "baseline", speeds={1: 70})
    bench_run(tmp_path, "mtp", speeds={1: 150}, sglang_version="0.5.10", simulated=True)
    said = printed(compare_text.text, compare(home=tmp_path, talk=TALK, a="baseline", b="mtp"))
    order = [said.index(part) for part in ("simulated: no GPU", "Not like for like", "can't tell", "B / A")]
    assert order == sorted(order)


def test_profiles_are_compared_on_the_same_host_and_workload(tmp_path: Path) -> None:
    bench_run(tmp_path, "baseline", speeds={1: 70})
    bench_run(tmp_path, "baseline", speeds={1: 7}, host="gpu2")
    b = bench_run(tmp_path, "mtp", speeds={1: 150})
    said = compare(home=tmp_path, talk=TALK, a="baseline", b="mtp")
    assert said.b_runs == (b.id,)
    assert not [one for one in said.likeness.differences if one.what == "host"]
    assert compare(home=tmp_path, talk=TALK).a == "baseline"


def test_of_a_profile_s_runs_those_are_compared_whose_workload_the_other_was_measured_under(tmp_path: Path) -> None:
    bench_run(tmp_path, "baseline", speeds={1: 70}, workload=None, session=None)
    like = bench_run(tmp_path, "mtp", speeds={1: 150}, workload=None, session=None)
    bench_run(tmp_path, "mtp", speeds={1: 9}, workload="story", session=None)
    for a, b in (("baseline", "mtp"), ("mtp", "baseline")):
        said = compare(home=tmp_path, talk=TALK, a=a, b=b)
        assert like.id in (*said.a_runs, *said.b_runs)


def test_a_profile_without_a_measurement_names_those_that_have_one(tmp_path: Path) -> None:
    bench_run(tmp_path, "mtp", speeds={1: 150})
    with pytest.raises(NotFound, match="measured profiles: mtp"):
        compare(home=tmp_path, talk=TALK, a="baseline", b="mtp")
    with pytest.raises(NotFound, match="only mtp has been measured"):
        compare(home=tmp_path, talk=TALK)
    with pytest.raises(UsageError, match="two sides"):
        compare(home=tmp_path, talk=TALK, a="last")


def test_several_runs_of_a_side_are_its_repeats(tmp_path: Path) -> None:
    a = [bench_run(tmp_path, "baseline", speeds={1: 70}, noise=0.01, seed=i, session=None) for i in range(2)]
    b = [bench_run(tmp_path, "mtp", speeds={1: 150}, noise=0.01, seed=i, session=None) for i in range(2)]
    said = compare(home=tmp_path, talk=TALK, a=",".join(run.id for run in a), b=",".join(run.id for run in b))
    assert said.loads[0].runs == (2, 2)


def test_a_search_is_shown_with_its_verdict_and_a_broken_one_with_how_it_goes_on(tmp_path: Path) -> None:
    run = Store(tmp_path).new_run("tune", {"host": "h1"})
    summary = {
        "verdict": "faster", "stopped_because": "the budget of 4 launches is spent", "launches": 4,
        "chosen": "draft_steps=3", "profile_file": "/p/mtp-tuned.yml",
    }  # fmt: skip
    run.finish(summary)
    said = printed(text.shown, actions.show(home=tmp_path, talk=TALK, run=run.id))
    assert "verdict: faster" in said
    assert "chosen: draft_steps=3" in said
    assert "after 4 launches because the budget of 4 launches is spent" in said
    assert "written: /p/mtp-tuned.yml" in said
    undecided = Store(tmp_path).new_run("tune", {"host": "h1"})
    undecided.finish({"verdict": "can't tell\x1b[2J", "launches": 4, "chosen": None, "profile_file": None})
    said = printed(text.shown, actions.show(home=tmp_path, talk=TALK, run=undecided.id))
    assert "verdict: can't tell [2J" in said
    assert "chosen: none" in said
    broken = Store(tmp_path).new_run("tune", {"host": "h1"})
    broken.finish({}, "interrupted")
    said = printed(text.shown, actions.show(home=tmp_path, talk=TALK, run=broken.id))
    assert f"mtpdeploy tune --resume {broken.id}" in said
