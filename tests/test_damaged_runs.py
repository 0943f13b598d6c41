"""Runs that were half deleted, written by another release, or hold nonsense: what can be said is said, the rest is refused by name."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import bench_run

from mtpdeploy.actions.compare import compare
from mtpdeploy.actions.frontier import frontier
from mtpdeploy.actions.recommend import recommend
from mtpdeploy.actions.runs import report
from mtpdeploy.errors import MtpError
from mtpdeploy.progress import Silent
from mtpdeploy.store import Run, Store

TALK = Silent()
Spoil = Callable[[Run, Run], object]  # (benchmark of mtp, campaign)


def points(run: Run, **changes: object) -> None:
    held: Any = run.read_json("points.json")
    run.write_text("points.json", json.dumps([{**one, **changes} for one in held]))


def records(run: Run, **changes: object) -> None:
    run.write_text(
        "records.jsonl", "".join(json.dumps({**one, **changes}) + "\n" for one in run.read_jsonl("records.jsonl"))
    )


SPOILS: dict[str, Spoil] = {
    "records deleted": lambda run, campaign: run.file("records.jsonl").unlink(),
    "points deleted": lambda run, campaign: run.file("points.json").unlink(),
    "head deleted": lambda run, campaign: run.file("run.json").unlink(),
    "folder deleted": lambda run, campaign: shutil.rmtree(run.path),
    "a newer schema": lambda run, campaign: run.update_meta(schema=99),
    "not a number": lambda run, campaign: points(run, output_tok_s=float("nan"), tpot_ms={"p50": float("inf")}),
    "endless answers": lambda run, campaign: records(run, output_tokens=float("inf")),
    "every point invalid": lambda run, campaign: points(run, valid=False, invalid_because=["x"]),
    "no request": lambda run, campaign: (
        points(run, requests=0, completed=0, output_tok_s=None),
        records(run, error="x"),
    ),
    "one load twice": lambda run, campaign: points(run, concurrency=1),
    "no points": lambda run, campaign: run.write_text("points.json", "[]"),
    "points of another kind": lambda run, campaign: run.write_text("points.json", "[3]"),
    "times of another kind": lambda run, campaign: records(run, times_us=["x", None], tokens=[None, {}]),
    "before its start": lambda run, campaign: records(run, start_us=-(10**12)),
    "log lines of another kind": lambda run, campaign: (
        run.append_jsonl("decode.jsonl", [{"at": 3}, {"at": "2026-01-01 00:00:00", "gen_throughput": "x"}]),
        run.append_jsonl("startup.jsonl", [{"phase": 3, "at": "2026-01-01 00:00:00"}, {"at": None}]),
    ),
    "campaign of another kind": lambda run, campaign: campaign.write_json(
        "campaign.json",
        {
            "arms": {"mtp": {"status": "failed", "evidence": 7}},
            "steps": [3, {}],
            "recommendation": {"suggestions": [{"set": 3}]},
        },
    ),
    "campaign cut off": lambda run, campaign: campaign.write_text("campaign.json", '{"arms": {'),
    "foreign names in it": lambda run, campaign: campaign.update_meta(runs=[run.id, 3, "nothing", "../../etc", None]),
}


def answered(use: Callable[[], Any]) -> bool:
    """False where it was refused by an error of ours; anything else that is raised fails the test."""
    with contextlib.suppress(MtpError):
        json.dumps(use().as_json(), allow_nan=False)
        return True
    return False


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
def test_what_is_damaged_ends_no_command_with_a_fault_of_ours(spoil: Spoil, home: Path) -> None:
    (home / "inventories").mkdir()
    (home / "inventories" / "site.yml").write_text("hosts:\n  gpu1:\n    address: 192.0.2.1\n")
    a = bench_run(home, "baseline", speeds={1: 70, 4: 60}, args={"tp_size": 1})
    b = bench_run(home, "mtp", speeds={1: 150, 4: 140}, accept=3.2, args={"speculative_num_steps": 3})
    campaign = Store(home).new_run("campaign", {"host": "gpu1", "runs": [a.id, b.id]})
    campaign.finish({"runs": [a.id, b.id]})
    spoil(b, campaign)
    uses: tuple[Callable[[], Any], ...] = (
        lambda: compare(home=home, talk=TALK, a=a.id, b=b.id),
        lambda: compare(home=home, talk=TALK, a=campaign.id),
        lambda: frontier(home=home, talk=TALK),
        lambda: recommend(home=home, talk=TALK, host="gpu1"),
        lambda: recommend(home=home, talk=TALK, run=[campaign.id]),
        lambda: report(home=home, talk=TALK, run=[campaign.id], format="md"),
        lambda: report(home=home, talk=TALK, run=[a.id], format="json"),
    )
    # The good run alone can still be read, judged and reported.
    assert sum(answered(use) for use in uses) >= 4
