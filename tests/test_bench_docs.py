"""docs/metrics.md defines what the code computes, no more and no less."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from mtpdeploy.bench import metrics
from mtpdeploy.bench.values import Point

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "metrics.md").read_text()


def section(name: str) -> str:
    return re.split(r"\n##+ ", TEXT.partition(f"\n### {name}\n")[2])[0]


def test_every_figure_of_a_point_is_defined_and_nothing_else_is() -> None:
    assert set(re.findall(r"^### (\w+)$", TEXT, re.MULTILINE)) == {field.name for field in fields(Point)}


def test_no_definition_is_empty() -> None:
    assert [field.name for field in fields(Point) if len(section(field.name).strip()) < 3] == []


def test_figures_that_can_be_unknown_say_when() -> None:
    optional = [
        field.name for field in fields(Point) if "None" in str(field.type) and field.name not in ("arm", "rate")
    ]
    silent = [
        name
        for name in optional
        if "null" not in section(name) and name not in ("total_tok_s", "requests_s", "verify_steps", "input_length")
        and not name.endswith(("_source", "_definition", "_length"))
    ]  # fmt: skip
    assert silent == []


def test_the_limits_in_the_text_are_the_limits_in_the_code() -> None:
    assert (metrics.NEEDED["p90"], metrics.NEEDED["p99"]) == (10, 459)
    assert "below\n  10 samples" in TEXT
    assert "p99 below 459" in TEXT
    assert f"over {metrics.LAG_LIMIT:.0%}".replace("%", " %") in section("lag_ms")
    because = section("invalid_because")
    assert f"over {metrics.FAILED_LIMIT:.0%}".replace("%", " %") in because
    assert f"over {metrics.LOOP_LAG_FLOOR_MS:.0f} ms" in because
    assert f"over {metrics.CLIENT_CPU_LIMIT:.0%}".replace("%", " %") in because
    assert f"over {metrics.FOREIGN_TOKENS_LIMIT:.0%}".replace("%", " %") in because


def test_the_estimators_of_the_accept_length_are_named() -> None:
    told = section("accept_length_source")
    for words in ("per request", "counters", "server's own average"):
        assert words in told.replace("**", "")
    assert metrics.PER_REQUEST.startswith("per request")
    assert metrics.PER_COUNTER.startswith("counters")
    assert metrics.PER_SERVER.startswith("the server's own average")
