"""The case study's tables are what its stored runs and recordings give, and its runs can be read by the verbs it names."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tooling

from mtpdeploy.actions.compare import compare
from mtpdeploy.actions.frontier import frontier
from mtpdeploy.actions.recommend import recommend
from mtpdeploy.analysis.frontier import Frontier
from mtpdeploy.progress import Silent

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return tooling.tool("case_study")


@pytest.fixture(scope="module")
def home(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpacked: Path = tool.unpack(tmp_path_factory.mktemp("study"))
    return unpacked


@pytest.fixture(scope="module")
def study(tool: ModuleType, home: Path) -> Any:
    return tool.Study(home)


@pytest.fixture(scope="module")
def traded(home: Path) -> Frontier:
    return frontier(home=home, talk=Silent())


def test_every_table_stands_in_the_page_once_and_nothing_else_does(tool: ModuleType) -> None:
    page = tool.PAGE.read_text()
    assert sorted(re.findall(r"<!-- table: ([\w-]+) -->", page)) == sorted(tool.TABLES)
    assert page.count("<!-- /table -->") == len(tool.TABLES)


FIXED = (
    "every-point", "story", "tuned-pair", "replay-pair", "crossing", "reached", "memory", "whole-card", "agreement",
    "bench-serving", "start-up", "by-hand",
)  # fmt: skip


@pytest.mark.parametrize("name", FIXED)
def test_a_table_of_the_page_is_what_the_recordings_give(tool: ModuleType, study: Any, name: str) -> None:
    assert tool.tables_of(tool.PAGE.read_text())[name] == list(tool.TABLES[name](study))


def test_what_the_page_predicts_is_what_the_model_says_within_a_tenth(tool: ModuleType, study: Any) -> None:
    """Not to the digit: the model learns, the measurements do not."""

    def speeds(rows: list[str]) -> dict[tuple[str, str], float]:
        cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:]]
        return {(cell[0], cell[1]): float(cell[2].split()[0].replace(",", "")) for cell in cells}

    told = speeds(tool.tables_of(tool.PAGE.read_text())["predicted"])
    now = speeds(list(tool.TABLES["predicted"](study)))
    assert now.keys() == told.keys()
    assert all(now[key] == pytest.approx(told[key], rel=0.1) for key in told)


def test_the_recorded_grid_has_six_configurations_and_the_front_holds_none_that_another_beats(traded: Frontier) -> None:
    made = traded
    assert len({spot.profile for spot in made.spots}) == 6
    assert not made.simulated
    front = [spot for spot in made.spots if spot.front]
    for spot in front:
        assert not any(
            other.user_tok_s.value > spot.user_tok_s.value and other.gpu_tok_s.value > spot.gpu_tok_s.value
            for other in made.spots
        )
    assert {spot.load.concurrency for spot in made.spots} == {1, 4, 8, 16, 32, 64}


def test_runs_of_another_answer_length_are_no_part_of_a_point(traded: Frontier) -> None:
    spot = next(s for s in traded.spots if (s.profile, s.load.concurrency) == ("mtp-replay", 64))
    assert spot.gpu_tok_s.value == pytest.approx(2131, rel=0.001)


def test_the_tuned_pair_is_decided_where_the_prompts_were_the_same_and_only_there(home: Path) -> None:
    made = compare(
        home=home,
        talk=Silent(),
        a="baseline-tuned",
        b="mtp-tuned",
    )
    assert {one.load.concurrency: one.verdict for one in made.loads} == {
        1: "can't tell", 16: "can't tell", 32: "faster", 64: "faster",
    }  # fmt: skip
    assert {one.load.concurrency for one in made.loads if one.paired} == {32, 64}


@pytest.mark.parametrize(
    ("asked", "profile", "run"),
    [
        ({}, "mtp-tuned", "20261130-061857-cdaf"),
        ({"slo": "tpot_p90_ms<10"}, "mtp-tuned", "20261130-061842-74b0"),
        ({"workload": "interactive"}, "mtp-replay", "20261130-062411-095a"),
    ],
)
def test_a_recommendation_weighs_every_load_of_a_launch_and_names_the_run(
    home: Path, asked: dict[str, Any], profile: str, run: str
) -> None:
    said = recommend(home=home, talk=Silent(), **asked).as_json()
    assert said["simulated"] is False
    assert said["profile"] == profile
    assert run in str(said)
