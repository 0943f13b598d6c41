"""A small benchmark against the scripted server, and what it left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_server import Mock

from mtpdeploy.actions.bench import bench
from mtpdeploy.actions.report import BenchAnswer
from mtpdeploy.bench.values import Point, Record
from mtpdeploy.progress import Silent

FAST: dict[str, Any] = {"first_s": 0.01, "step_s": 0.002}


def measuring(home: Path) -> Callable[..., BenchAnswer]:
    """(server, **options of bench) → its answer: 4 requests of at most 24 tokens over two lanes, if nothing else is said."""

    def measure(server: Mock, **options: Any) -> BenchAnswer:
        given = {"concurrency": "2", "requests": 4, "output_tokens": "24"} | options
        answer = bench(home=home, talk=Silent(), url=server.url, model="mock", **given)
        assert isinstance(answer, BenchAnswer)
        return answer

    return measure


def only(answer: BenchAnswer) -> Point:
    assert len(answer.points) == 1
    return answer.points[0]


def records(answer: BenchAnswer) -> list[Record]:
    return [Record.from_json(json.loads(line)) for line in (answer.path / "records.jsonl").read_text().splitlines()]
