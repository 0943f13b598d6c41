"""`tune` on a simulated host of this machine: real deploys, real benchmarks, a real kill; only the engine is played."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rehearsal import rehearsal
from rich.console import Console

from mtpdeploy.actions.tune import _failure, tune
from mtpdeploy.analysis.space import FACTORS
from mtpdeploy.analysis.tune import Error, Misfit
from mtpdeploy.errors import ConfigError, LaunchFailed, MtpError, NotReady, PlanRefused, UsageError
from mtpdeploy.progress import Silent
from mtpdeploy.report import tune as report
from mtpdeploy.store import Store

TALK = Silent()
SPACE = "draft_steps=0,3 running=4,16 state_dtype=bfloat16"
SHORT: dict[str, Any] = {
    "concurrency": "1,16",
    "requests": 16,
    "output_tokens": 48,
    "space_": SPACE,
    "budget_launches": 2,
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with rehearsal(tmp_path, clock=50) as made:
        yield made


def searches(home: Path) -> list[Path]:
    return sorted(path.parent for path in (home / "runs").glob("*/spec.json") if (path.parent / "run.json").exists()
                  and json.loads((path.parent / "run.json").read_text())["kind"] == "tune")  # fmt: skip


def lines(home: Path) -> list[dict[str, Any]]:
    (run,) = searches(home)
    return list(Store(home).run(run.name).read_jsonl("outcomes.jsonl"))


def under_way(home: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((searches(home)[0] / "launching.json").read_text()))
    except (IndexError, OSError, ValueError):
        return {}


# `mtpdeploy` as it is, which ends itself at a step of its work, so that no busy machine moves the moment. The whole group on
# this side dies with it, what runs at the host does not.
ENDING = """
import os, signal, sys
from mtpdeploy.__main__ import main
from mtpdeploy.actions import bench, tune

def ending(owner, name, when, after=False):
    step = getattr(owner, name)
    def ended(self, *args):
        done = step(self, *args) if after else None
        if when(*args) and not sent:
            sent.append(how)
            os.killpg(0, how)
        return done if after else step(self, *args)
    setattr(owner, name, ended)

at, how, sent = sys.argv.pop(1), int(sys.argv.pop(1)), []
if at == "launch":
    ending(tune._Searcher, "_deploy", lambda *args: True)
elif at == "benchmark":  # the first of its loads is measured, the others go on
    ending(bench.Keeper, "_measured", lambda *args: True, after=True)
else:
    ending(tune._Searcher, "_launch", lambda run, candidate, phase: phase == at)
sys.exit(main())
"""


def ended_at(home: Path, at: str, words: list[str], how: int = signal.SIGKILL) -> int:
    """Runs `mtpdeploy tune …` up to that step, where it is sent the signal with all its children on this side."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING, at, str(int(how)), "--home", str(home), "tune", *words],
        capture_output=True, text=True, start_new_session=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode in (-how, 130), done.stderr[-2000:]
    return done.returncode


def test_a_dry_run_plans_the_search_says_why_and_launches_nothing(home: Path) -> None:
    said = tune(home=home, talk=TALK, host="local", profile="mtp", dry_run=True, **SHORT)
    assert said.candidates == 4
    assert said.first[0].why
    assert said.run_id is None
    assert Store(home).runs() == ()
    document: dict[str, Any] = said.as_json()
    assert document["simulated"] is True
    assert document["first"][0] == document["next"]
    wide: dict[str, Any] = tune(
        home=home, talk=TALK, host="local", profile="mtp", dry_run=True, concurrency="1,64"
    ).as_json()
    assert {one["name"] for one in wide["space"]} == set(FACTORS)
    assert all(one["count"] and one["example"] and one["why"] for one in wide["ruled_out"])


def as_words(options: dict[str, Any]) -> list[str]:
    words = ["--host", "local", "--profile", "mtp", "--set", "args.log_level=info"]
    for name, value in options.items():
        words += [f"--{name.rstrip('_').replace('_', '-')}", str(value)]
    return words


@pytest.mark.slow
def test_a_search_killed_in_a_launch_a_benchmark_and_its_confirmation_ends_as_if_it_had_not_been(home: Path) -> None:
    once = {"space_": "draft_steps=3 running=16", "budget_launches": 1, "leave": "original", "requests": 4}
    ended_at(home, "launch", as_words({**SHORT, **once}))
    assert lines(home) == []
    assert Store(home).runs(kind="tune")[0].status == "interrupted"
    begun = under_way(home)["levels"]

    ended_at(home, "benchmark", ["--resume", "last"])
    assert lines(home) == []
    assert under_way(home)["levels"] == begun  # the same proposal again

    ended_at(home, "winner", ["--resume", "last"])
    before = lines(home)
    assert [line["phase"] for line in before] == ["search", "incumbent"]
    assert before[0]["levels"] == begun
    # What was measured when the second kill came went on at the host, and was taken up.
    assert before[0]["launch_minutes"] is None
    assert len([row for row in Store(home).runs(kind="bench") if row.status == "done"]) == 2

    said = tune(home=home, talk=TALK, resume="last")
    after = lines(home)
    assert after[:2] == before  # nothing was measured twice
    assert [line["phase"] for line in after[1:]] == ["incumbent", "winner", "winner", "incumbent"]
    assert said.comparison is not None
    assert said.best is not None
    # What a few milliseconds of a busy machine come to is not for this test; only `faster` may choose.
    faster = said.verdict == "faster"
    assert (said.chosen is not None) is (said.profile_file is not None) is faster
    assert said.serving == "mtp"
    with pytest.raises(UsageError, match="is complete"):
        tune(home=home, talk=TALK, resume="last")


@pytest.mark.slow
def test_what_is_chosen_is_written_as_a_profile_that_is_what_the_host_serves(home: Path) -> None:
    options = {**SHORT, "space_": "draft_steps=3 running=16 state_dtype=bfloat16", "budget_launches": 1, "confirm": 0}
    said = tune(home=home, talk=TALK, host="local", profile="mtp", set_=("args.log_level=info",), **options)
    assert said.chosen is not None
    assert said.verdict == "not confirmed: --confirm 0"
    assert said.profile_file == home / "inventories" / "profiles" / "mtp-tuned.yml"
    text = said.profile_file.read_text()
    assert text.startswith("# Written by mtpdeploy tune")
    assert "(simulated)" in text
    document = yaml.safe_load(text)
    assert document["extends"] == "mtp"
    assert document["args"]["max_running_requests"] == 16
    assert document["args"]["log_level"] == "info"  # --set of the search is part of what was measured
    last = Store(home).last_deployed("local")
    assert last is not None
    assert last.profile == said.serving == "mtp-tuned"

    # The file stands by itself: the plan of the profile is what runs.
    from mtpdeploy.actions.deploy import deploy

    again: Any = deploy(home=home, talk=TALK, host="local", profile="mtp-tuned", inventory=(), set_=())
    assert again.outcome == "unchanged"


@pytest.mark.slow
def test_ctrl_c_in_a_benchmark_leaves_no_half_measured_outcome(home: Path) -> None:
    words = as_words({**SHORT, "space_": "draft_steps=3 running=4", "budget_launches": 1, "confirm": 0})
    assert ended_at(home, "benchmark", words, signal.SIGINT) == 130
    assert lines(home) == []
    assert Store(home).runs(kind="tune")[0].status == "interrupted"


def test_an_answer_says_that_the_model_does_not_describe_the_host_and_by_what_errors(home: Path) -> None:
    said = tune(home=home, talk=TALK, host="local", profile="mtp", dry_run=True, **SHORT)
    assert said.as_json()["model_misfit"] is None
    errors = (Error(4, 0.3, 2.5), Error(6, -0.4, -3.1))
    wrong = replace(said, misfit=Misfit(7, errors, "tpe"), model_error={"output_tok_s_median_error": 0.02})
    out = io.StringIO()
    report.text(wrong, Console(file=out, width=400))
    assert (
        "does not describe this host (launch 4 +35%, 2.5 deviations; launch 6 -33%, 3.1 deviations)" in out.getvalue()
    )
    assert "from launch 7 on" in out.getvalue()
    assert "The model predicts" not in out.getvalue()
    document: Any = wrong.as_json()["model_misfit"]
    assert (document["from_launch"], document["by"], len(document["errors"])) == (7, "tpe", 2)


@pytest.mark.slow
def test_a_host_on_which_nothing_comes_up_is_a_result_and_not_an_error(home: Path) -> None:
    path = home / "inventories" / "site.yml"
    inventory = yaml.safe_load(path.read_text())
    inventory["hosts"]["local"]["simulate"] |= {"fault": "graph-capture", "clock": 50}
    path.write_text(yaml.safe_dump(inventory))
    said = tune(home=home, talk=TALK, host="local", profile="mtp", **{**SHORT, "space_": "draft_steps=0,3 running=16"})
    assert said.outcomes[0].status == "oom"
    assert said.outcomes[0].cause == "oom_graph_capture"
    assert said.best is None
    assert said.chosen is None
    assert said.profile_file is None
    assert said.serving is not None
    assert said.serving.startswith("nothing")


def test_a_profile_that_somebody_wrote_is_not_overwritten(home: Path) -> None:
    own = home / "inventories" / "profiles"
    own.mkdir()
    (own / "mtp-tuned.yml").write_text("extends: mtp\n")
    with pytest.raises(UsageError, match="not overwritten"):
        tune(home=home, talk=TALK, host="local", profile="mtp", dry_run=True, **SHORT)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"objective": "speed"}, "--objective"),
        ({"budget_launches": 0}, "--budget-launches"),
        ({"budget_minutes": 0.0}, "--budget-minutes"),
        ({"confirm": -1}, "--confirm"),
        ({"concurrency": "0,x"}, "--concurrency"),
        ({"slo": "fast"}, "--slo"),
        ({"space_": "gpus=3"}, "FACTOR=LEVEL"),
        ({"output_tokens": 1}, "--output-tokens"),
        ({"leave": "running"}, "--leave"),
        ({"give_up": "sleep", "space_": None}, "--give-up"),
        ({"give_up": "precision"}, "--give-up"),
        ({"name": "../evil"}, "--name"),
        ({"gpu_memory_gb": -1.0}, "--gpu-memory-gb"),
        ({"budget_minutes": float("nan")}, "--budget-minutes"),
        ({"workload": "arrivals", "concurrency": None}, "open loop"),
        ({"slo": "ttft_p99_ms<500"}, "needs 459 requests a load"),
        ({"slo": "tpot_p90_ms<20", "requests": 4}, "needs 10 requests a load"),
        ({"host": "local,local2"}, "not on 2"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_anything_is_touched(
    options: dict[str, object], text: str, home: Path
) -> None:
    with pytest.raises(MtpError, match=text):
        tune(home=home, talk=TALK, **{"host": "local", "profile": "mtp", **SHORT, **options})
    assert not (home.parent / "work").exists()


def test_files_are_kept_by_their_whole_path(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a search could not be resumed, nor its profile be deployed, from another folder."""
    monkeypatch.chdir(home)
    (home / "own.yml").write_text("extends: mtp\n")
    (home / "load.yml").write_text("concurrency: [1, 4]\nrequests: 8\noutput_tokens: 64\n")
    said = tune(home=home, talk=TALK, host="local", profile="own.yml", workload="load.yml", dry_run=True)
    assert said.spec.profile == str(home / "own.yml")
    assert said.spec.bench["workload"] == str(home / "load.yml")
    assert said.spec.loads == (1, 4)
    assert said.spec.output_tokens == 64
    assert said.spec.name == "own-tuned"


def test_a_run_that_is_no_search_cannot_be_resumed(home: Path) -> None:
    run = Store(home).new_run("bench")
    run.finish({})
    with pytest.raises(UsageError, match="is a bench, not a search"):
        tune(home=home, talk=TALK, resume=run.id)


def test_a_resumed_search_keeps_its_settings(home: Path) -> None:
    run = Store(home).new_run("tune", {"host": "local"})
    run.finish({}, "interrupted")
    with pytest.raises(UsageError, match="leave out --objective, --budget-launches"):
        tune(home=home, talk=TALK, resume=run.id, objective="mixed", budget_launches=3)
    with pytest.raises(ConfigError, match="is not the spec of a search"):
        tune(home=home, talk=TALK, resume=run.id)
    run.write_json("spec.json", {"objective": "mixed"})
    with pytest.raises(ConfigError, match="is not the spec of a search"):
        tune(home=home, talk=TALK, resume=run.id)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LaunchFailed("x", details={"diagnosis": {"cause": "oom_graph_capture"}}), "oom"),
        (LaunchFailed("x", details={"diagnosis": {"cause": "kernel_crash"}}), "crash"),
        (LaunchFailed("x", details={"diagnosis": {"cause": "watchdog_hang"}}), "hang"),
        (NotReady("silent"), "hang"),
        (PlanRefused("no"), "refused"),
        (LaunchFailed("x", details={"diagnosis": {"cause": None}}), "crash"),
    ],
)
def test_a_launch_that_dies_is_a_result_with_its_cause(error: LaunchFailed, status: str) -> None:
    assert _failure(error)[0] == status
