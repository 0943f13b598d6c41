"""`tune` on a simulated host of this machine: real deploys, real benchmarks, a real kill; only the engine is played."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mtpdeploy.actions.tune import _failure, tune
from mtpdeploy.errors import LaunchFailed, NotReady, PlanRefused, UsageError
from mtpdeploy.progress import Silent
from mtpdeploy.resources import bundled
from mtpdeploy.store import Store

TALK = Silent()
SPACE = "draft_steps=0,3 running=4,16 state_dtype=bfloat16"
SHORT = {"concurrency": "1,16", "requests": 16, "output_tokens": 48, "space_": SPACE, "budget_launches": 2}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home with one simulated host on a port of its own; whatever was launched is stopped at the end."""
    inventory = yaml.safe_load((bundled("inventories") / "local.yml").read_text())
    host = inventory["hosts"]["local"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        host["args"]["port"] = free.getsockname()[1]
    host["simulate"]["clock"] = 5  # slow enough for a busy machine to measure
    host["workdir"] = str(tmp_path / "work")
    home = tmp_path / "home"
    (home / "inventories").mkdir(parents=True)
    (home / "inventories" / "site.yml").write_text(yaml.safe_dump(inventory))
    yield home
    from mtpdeploy.actions.launches import stop

    if Store(home).last_deployed() is not None:
        stop(home=home, talk=TALK, host="local", inventory=())


def lines(home: Path) -> list[dict[str, object]]:
    (row,) = Store(home).runs(kind="tune")
    return list(Store(home).run(row.id).read_jsonl("outcomes.jsonl"))


def test_a_dry_run_plans_the_search_and_writes_nothing(home: Path) -> None:
    said = tune(home=home, talk=TALK, host="local", profile="mtp", dry_run=True, **SHORT)  # type: ignore[arg-type]
    assert said.candidates == 4
    assert said.proposal is not None
    assert said.run_id is None
    assert Store(home).runs() == ()
    assert said.as_json()["simulated"] is True


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on_confirms_and_writes_its_profile(home: Path) -> None:
    words = [sys.executable, "-m", "mtpdeploy", "--home", str(home), "tune", "--host", "local", "--profile", "mtp"]
    for name, value in SHORT.items():
        words += [f"--{name.rstrip('_').replace('_', '-')}", str(value)]
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (rows := list((home / "runs").glob("*/outcomes.jsonl"))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert rows, "no launch was written down"
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = lines(home)
    assert len(before) == 1
    assert Store(home).runs(kind="tune")[0].status == "interrupted"

    said = tune(home=home, talk=TALK, resume="last")
    after = lines(home)
    assert after[: len(before)] == before  # nothing was measured twice
    searched = [line for line in after if line["phase"] == "search"]
    assert len(searched) == 2
    assert len({json.dumps(line["levels"]) for line in searched}) == 2
    assert [line["phase"] for line in after if line["phase"] != "search"] == [
        "incumbent",
        "winner",
        "winner",
        "incumbent",
    ]
    assert said.comparison is not None
    assert said.best is not None
    assert said.verdict == "faster", said.comparison.as_json()
    assert said.chosen is not None
    assert said.profile_file == home / "inventories" / "profiles" / "mtp-tuned.yml"
    text = said.profile_file.read_text()
    assert text.startswith("# Written by mtpdeploy tune")
    assert "(simulated)" in text
    document = yaml.safe_load(text)
    assert document["extends"] == "mtp"
    assert document["args"]["max_running_requests"] == 16
    last = Store(home).last_deployed("local")
    assert last is not None
    assert last.profile == "mtp-tuned"
    assert said.serving == "mtp-tuned"


def test_a_profile_that_somebody_wrote_is_not_overwritten(home: Path) -> None:
    own = home / "inventories" / "profiles"
    own.mkdir()
    (own / "mtp-tuned.yml").write_text("extends: mtp\n")
    with pytest.raises(UsageError, match="not overwritten"):
        tune(home=home, talk=TALK, host="local", profile="mtp", dry_run=True, **SHORT)  # type: ignore[arg-type]


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
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_anything_is_touched(
    options: dict[str, object], text: str, home: Path
) -> None:
    with pytest.raises(UsageError, match=text):
        tune(home=home, talk=TALK, host="local", profile="mtp", **{**SHORT, **options})  # type: ignore[arg-type]
    assert not (home.parent / "work").exists()


def test_a_run_that_is_no_search_cannot_be_resumed(home: Path) -> None:
    run = Store(home).new_run("bench")
    run.finish({})
    with pytest.raises(UsageError, match="is a bench, not a search"):
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
