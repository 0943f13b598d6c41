"""`campaign` on a simulated host of this machine: real deploys, real benchmarks, real kills; only the engine is played."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rehearsal import rehearsal

from mtpdeploy.actions.campaign import campaign
from mtpdeploy.errors import ConfigError, HostLocked, NotFound, UsageError
from mtpdeploy.progress import Silent
from mtpdeploy.store import Run, Store

TALK = Silent()
SHORT: dict[str, Any] = {"host": "local", "concurrency": "1,4", "requests": 8, "output_tokens": "32"}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with rehearsal(tmp_path) as made:
        yield made


def the_run(home: Path) -> Run:
    (row,) = Store(home).runs(kind="campaign")
    return Store(home).run(row.id)


def ended(home: Path) -> list[str]:
    """The steps that have ended, as they were written down."""
    found = list((home / "runs").glob("*/steps.jsonl"))
    lines = [json.loads(line) for file in found for line in file.read_text().splitlines() if line.endswith("}")]
    return [line["step"] for line in lines if line["status"] != "begun"]


def begun(home: Path) -> list[str]:
    found = list((home / "runs").glob("*/steps.jsonl"))
    lines = [json.loads(line) for file in found for line in file.read_text().splitlines() if line.endswith("}")]
    return [line["step"] for line in lines if line["status"] == "begun"]


def started(home: Path, *more: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "mtpdeploy", "--home", str(home), "campaign", *more]
    for name, value in SHORT.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True)


def wait_for(what: Any, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)


def the_bench(home: Path) -> list[Path]:
    return [
        path.parent
        for path in (home / "runs").glob("*/records.jsonl")
        if json.loads((path.parent / "run.json").read_text())["kind"] == "bench"
    ]


def test_a_dry_run_names_every_step_and_touches_nothing(home: Path) -> None:
    said = campaign(home=home, talk=TALK, dry_run=True, tune=True, **SHORT)
    kinds = [step.what for step in said.steps]
    assert kinds[0] == "doctor"
    assert kinds[-4:] == ["compare", "recommend", "report", "leave"]
    assert [step.arm for step in said.steps if step.key.startswith("bench:")] == [
        "baseline", "mtp", "mtp", "baseline", "mtp-tuned",
    ]  # fmt: skip
    assert "tune" in kinds
    assert said.exit_code == 0
    assert said.as_json()["simulated"] is True
    assert Store(home).runs() == ()
    assert not (home.parent / "work").exists()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"order": "ABC"}, UsageError, "--order"),
        ({"repeat": 0}, UsageError, "--repeat"),
        ({"slo": "fast"}, UsageError, "--slo"),
        ({"rate": -1.0}, UsageError, "--rate"),
        ({"concurrency": "x"}, UsageError, "--concurrency"),
        ({"requests": 0}, UsageError, "--requests"),
        ({"leave": "burning"}, UsageError, "--leave"),
        ({"profile": "nothing-like-it"}, NotFound, "nothing-like-it"),
        ({"baseline": "mtp"}, UsageError, "each once"),
        ({"workload": "nothing-like-it"}, NotFound, "nothing-like-it"),
        ({"set_": ["args.no_such_flag=1"]}, ConfigError, "no_such_flag"),
        ({"tune": True, "budget_launches": 0}, UsageError, "--budget-launches"),
        ({"budget_minutes": 5.0}, UsageError, "--tune"),
        ({"resume": "last"}, NotFound, "no campaign run"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_touched(
    options: dict[str, Any], error: type[Exception], text: str, home: Path
) -> None:
    with pytest.raises(error, match=text):
        campaign(home=home, talk=TALK, **{**SHORT, **options})
    assert Store(home).runs() == ()
    assert not (home.parent / "work").exists()


def test_a_run_that_is_no_campaign_or_a_damaged_one_is_not_resumed(home: Path) -> None:
    bench = Store(home).new_run("bench")
    bench.finish({})
    with pytest.raises(UsageError, match="is a bench, not a campaign"):
        campaign(home=home, talk=TALK, resume=bench.id)
    broken = Store(home).new_run("campaign", {"host": "local"})
    broken.write_json("spec.json", {"host": "local"})
    broken.finish({}, "interrupted")
    with pytest.raises(ConfigError, match="not the spec of a campaign"):
        campaign(home=home, talk=TALK, resume=broken.id)


def test_two_campaigns_do_not_work_on_one_host(home: Path) -> None:
    Store(home).new_run("campaign", {"host": "local"})  # by this process, so it lives
    with pytest.raises(HostLocked, match="is at work on local"):
        campaign(home=home, talk=TALK, **SHORT)


@pytest.mark.slow
def test_a_campaign_killed_while_it_measures_goes_on_measures_nothing_twice_and_reports_the_arm_that_died(
    home: Path,
) -> None:
    profiles = home / "inventories" / "profiles"
    profiles.mkdir()
    (profiles / "greedy.yml").write_text("extends: mtp\nenv: {MTPDEPLOY_SIM_FAULT: graph-capture}\n")
    first = started(home, "--profile", "mtp,greedy", "--order", "ABC")
    wait_for(lambda: "bench:2:mtp" in begun(home) and len(the_bench(home)) == 2)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    before = ended(home)
    assert before == [
        "doctor", "plan:baseline", "plan:mtp", "plan:greedy", "deploy:1:baseline", "verify:1:baseline", "bench:1:baseline",
        "deploy:2:mtp", "verify:2:mtp",
    ]  # fmt: skip
    assert the_run(home).status == "interrupted"

    said = campaign(home=home, talk=TALK, profile="mtp,greedy", order="ABC", **SHORT)  # the same command again
    assert said.run_id == the_run(home).id
    assert ended(home)[: len(before)] == before
    assert len(set(ended(home))) == len(ended(home)) == len(said.steps)

    kept = Store(home)
    benches = [row.id for row in kept.runs(kind="bench")]
    assert sorted(benches) == sorted(said.as_json()["runs"])  # type: ignore[call-overload]  # the killed one was taken up
    assert {kept.run(name).provenance.session for name in benches} == {said.run_id}
    for name in benches:
        records = list(kept.run(name).read_jsonl("records.jsonl"))
        assert len(records) == 16
        assert len({(line["point"], line["index"]) for line in records}) == 16

    arms = {arm.name: arm for arm in said.arms}
    assert [arms[name].status for name in ("baseline", "mtp", "greedy")] == ["measured", "measured", "failed"]
    failure = arms["greedy"].failure
    assert failure is not None
    assert failure.cause == "oom_graph_capture"
    assert failure.evidence
    assert said.comparison is not None
    assert (said.comparison.a, said.comparison.b) == ("baseline", "mtp")
    assert said.recommendation is not None
    assert {one.spot.profile for one in said.recommendation.judged} == {"baseline", "mtp"}
    assert said.recommendation.chosen is not None
    chosen = said.recommendation.chosen.spot.profile
    assert said.serving is not None
    assert said.serving.startswith(f"{chosen} (launch ")
    last = kept.last_deployed("local")
    assert last is not None
    assert last.profile == chosen
    document = json.loads(json.dumps(said.as_json()))
    assert document["simulated"] is True
    assert [step["key"] for step in document["steps"] if step["status"] != "done"] == [
        "deploy:3:greedy", "verify:3:greedy", "bench:3:greedy",
    ]  # fmt: skip
    for path in said.report.values():
        assert "oom_graph_capture" in Path(path).read_text().replace("\\_", "_")  # Markdown escapes it
