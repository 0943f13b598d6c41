"""What a window holds beside its figures: others' work, and the answers themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_runs import FAST, measuring, only, records
from bench_server import Mock, Script

from mtpdeploy.actions.report import BenchAnswer
from mtpdeploy.bench import metrics, outputs, protocol
from mtpdeploy.bench.counters import parse, was_reset
from mtpdeploy.bench.values import Measured, Message, Sample
from mtpdeploy.store import Store


@pytest.fixture
def run(home: Path) -> Callable[..., BenchAnswer]:
    return measuring(home)


def test_a_window_with_others_work_is_dropped_and_measured_again(
    run: Callable[..., BenchAnswer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "CALM_S", 0.05)
    with Mock(Script(foreign_tokens=50, **FAST)) as server:

        def calm(number: int) -> None:
            if number == 9:  # probe, twice two of warm-up, and a window of four before it
                server.script.foreign_tokens = 0

        server.script.fault = calm
        answer = run(server)
    point = only(answer)
    assert point.valid, point.invalid_because
    assert (point.completed, point.windows_dropped, answer.as_json()["windows_dropped"]) == (4, 1, 1)
    assert any("dropped" in mark for mark in point.marks)
    assert len(records(answer)) == 4
    (dropped,) = Store(answer.path.parent.parent).run(answer.run_id).read_jsonl("dropped.jsonl")
    assert len(dropped["records"]) == 4  # type: ignore[arg-type]


def test_a_request_of_others_that_never_ends_is_seen_among_those_running(run: Callable[..., BenchAnswer]) -> None:
    two = [Sample(1.0, 3.0, 0.0), Sample(2.0, 2.0, 1.0)]
    assert protocol._foreign({}, [], two, 2) == ("3 requests at the server, of which this client had at most 2",)
    assert protocol._foreign({}, [], two[:1], 2) == ()  # a health probe
    assert protocol._foreign({}, [], two, None) == ()


@pytest.mark.parametrize(("kind", "api"), [("sglang", "sglang"), ("sglang", "openai-chat"), ("openai", "openai")])
def test_greedy_answers_are_kept_for_each_prompt_and_sampled_ones_are_not(
    run: Callable[..., BenchAnswer], kind: str, api: str
) -> None:
    with Mock(Script(kind=kind, **FAST)) as server:
        answer = run(server, api=api, requests=3)
        sampled = run(server, api=api, requests=3, temperature=0.7)
    kept = list(Store(answer.path.parent.parent).run(answer.run_id).read_jsonl("outputs.jsonl"))
    assert [line["index"] for line in kept] == [0, 1, 2]
    assert {str(line["text"]) for line in kept} == {" tok" * 24}
    assert len({line["sent"] for line in kept}) == 3
    assert not (sampled.path / "outputs.jsonl").exists()


def event(**told: Any) -> bytes:
    return json.dumps(told).encode()


def test_ids_of_a_stream_count_only_if_they_are_all_there() -> None:
    whole = event(text="a b", output_ids=[1, 2], meta_info={"completion_tokens": 2})
    part = event(text="a b", output_ids=[2], meta_info={"completion_tokens": 2})
    assert outputs.read("sglang", [whole], incremental=False) == {"token_ids": [1, 2]}
    assert outputs.read("sglang", [part], incremental=False) == {"text": "a b"}
    first = event(text="a", output_ids=[1], meta_info={"completion_tokens": 1})
    assert outputs.read("sglang", [first, part, part], incremental=True) == {"token_ids": [1, 2]}


def test_a_long_answer_is_cut_and_a_broken_event_is_passed_over() -> None:
    long = event(text="x" * 10_000, meta_info={})
    assert outputs.read("sglang", [long], incremental=False) == {"text": "x" * outputs.CHARACTERS}
    chat = [
        event(choices=[{"delta": {"content": "h\u00e9"}}]),
        b"{torn",
        b"[]",
        event(choices=[{"delta": {"reasoning_content": "!"}}]),
    ]
    assert outputs.read("openai-chat", [*chat, chat[-1]], incremental=True) == {"text": "h\u00e9!"}
    assert outputs.read("openai-chat", [], incremental=True) is None
    assert outputs.read("sglang", [b""], incremental=False) is None


def test_another_salt_or_cap_is_another_request() -> None:
    said = (Message("user", "hello \ud800"),)
    assert outputs.sent(said, 10) == outputs.sent(said, 10)
    assert len({outputs.sent(said, 10), outputs.sent(said, 11), outputs.sent((Message("user", "hello"),), 10)}) == 3


def test_a_server_that_could_not_be_proven_again_or_whose_counters_fell_makes_the_point_invalid() -> None:
    for after, says in (
        ({"unproven": "gpu1: the line was cut"}, "could not be proven"),
        ({"reset": "its counters fell"}, "was restarted"),
        ({"boot": 2}, "the boot was 1, then 2"),
        ({"gone": "what answers is not the recorded launch (stale)"}, "not the recorded launch"),
    ):
        facts = Measured(0, "2026-11-30T10:00:00Z", 1.0, server_before={"boot": 1}, server_after={"boot": 1, **after})
        assert any(says in why for why in metrics.point([], facts).invalid_because)


def test_a_new_start_time_of_the_process_is_a_restart() -> None:
    before, after = (
        parse(f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {at}") for at in (5, 9)
    )
    assert was_reset(before, after)
    assert not was_reset(before, before)


def test_what_other_ranks_report_of_the_same_requests_is_not_added() -> None:
    lines = [f'sglang:num_running_reqs{{tp_rank="{tp}",dp_rank="{dp}"}} 2' for tp in (0, 1) for dp in (0, 1)]
    assert parse("\n".join(lines)).running == 4
