"""The client against a real server: what it times, what it counts, and what it says when the server misbehaves."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from bench_runs import FAST, measuring, only, records
from bench_server import Mock, Script

from mtpdeploy.actions.bench import bench
from mtpdeploy.actions.report import BenchAnswer, report
from mtpdeploy.errors import HostUnreachable, MtpError, RemoteError, UsageError
from mtpdeploy.progress import Silent


@pytest.fixture
def run(home: Path) -> Callable[..., BenchAnswer]:
    return measuring(home)


@pytest.mark.slow
@pytest.mark.parametrize("api", ["sglang", "openai-chat", "openai"])
def test_three_tokens_every_thirty_ms_are_ten_ms_a_token(run: Callable[..., BenchAnswer], api: str) -> None:
    with Mock(Script(k=3, step_s=0.03, first_s=0.05)) as server:
        point = only(run(server, concurrency="4", requests=4, output_tokens="129", api=api))
        # What the mock did, which on a busy machine is not quite what it was asked for.
        served = [times for times in server.script.written if len(times) == 43]
    assert len(served) == 4
    truth = median(1e3 * (times[-1] - times[0]) / (129 - 3) for times in served)
    assert point.tpot_ms.p50 == pytest.approx(truth, abs=0.05)
    assert truth == pytest.approx(10.0, abs=0.5)
    assert point.chunk_gap_ms.mean == pytest.approx(3 * truth, abs=0.15)
    assert point.tokens_per_chunk == {"3": 172}
    assert point.ttft_ms.p50 == pytest.approx(1e3 * median(times[0] for times in served), abs=15)
    assert point.valid, point.invalid_because


@pytest.mark.parametrize("kind", ["sglang", "vllm", "openai"])
def test_every_kind_of_server_is_measured_with_the_same_figures(run: Callable[..., BenchAnswer], kind: str) -> None:
    with Mock(Script(kind=kind, **FAST)) as server:
        point = only(run(server))
    assert (point.completed, point.failed, point.output_tokens, point.input_tokens) == (4, 0, 96, 40)
    assert point.tokens_per_chunk == {"3": 32}
    assert point.valid, point.invalid_because


def test_exactly_the_asked_number_is_measured_and_no_measured_prompt_warms_up(run: Callable[..., BenchAnswer]) -> None:
    with Mock(Script(**FAST)) as server:
        answer = run(server, concurrency="1,3", requests=5, output_tokens="40")
        seen = server.script.seen
    assert [point.requests for point in answer.points] == [5, 5]
    assert len(records(answer)) == 10
    limits = [one["body"]["sampling_params"]["max_new_tokens"] for one in seen]
    assert limits.count(40) == 10
    warm = [one["body"]["text"] for one in seen if one["body"]["sampling_params"]["max_new_tokens"] != 40]
    assert len(warm) == 1 + 1 + 3
    assert sum(sorted(set(limits) - {40})) <= 16
    measured = {
        one["body"]["text"].split("] ", 1)[1] for one in seen if one["body"]["sampling_params"]["max_new_tokens"] == 40
    }
    assert not measured & {text.split("] ", 1)[1] for text in warm}


def test_no_two_requests_begin_alike_unless_the_prefix_cache_is_to_be_kept(run: Callable[..., BenchAnswer]) -> None:
    def starts(prefix_cache: str) -> set[str]:
        with Mock(Script(**FAST)) as server:
            run(server, api="openai-chat", prompts="code", requests=20, prefix_cache=prefix_cache)
            return {one["body"]["messages"][0]["content"][:24] for one in server.script.seen}

    assert len(starts("salt")) == 20 + 1 + 2
    assert len(starts("keep")) == 10 + 1 + 2


def test_as_many_requests_are_in_flight_as_asked_and_never_more(run: Callable[..., BenchAnswer]) -> None:
    with Mock(Script(**FAST)) as server:
        run(server, concurrency="5", requests=20)
        assert server.script.most_active == 5


def test_connections_are_reused(run: Callable[..., BenchAnswer]) -> None:
    with Mock(Script(**FAST)) as server:
        run(server, concurrency="4", requests=32)
        assert len(server.script.connections) <= 4 + 3  # the lanes', the probe's, and two for identity and counters


def test_a_key_goes_into_the_header_and_into_nothing_that_is_stored(
    run: Callable[..., BenchAnswer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret-value")
    with Mock(Script(key="s3cret-value", **FAST)) as server:
        answer = run(server, api_key_env="MY_KEY")
        assert only(answer).completed == 4
        with pytest.raises(RemoteError, match="--api-key-env") as wrong:
            run(server)
        assert wrong.value.exit_code == 6
    stored = b"".join(path.read_bytes() for path in answer.path.rglob("*") if path.is_file())
    assert b"s3cret-value" not in stored
    assert b"do-not-store-me" not in stored  # the server's own, from /server_info


def test_a_dead_port_is_said_at_once_and_no_run_is_made(home: Path) -> None:
    with pytest.raises(HostUnreachable, match="refused"):
        bench(home=home, talk=Silent(), url="http://127.0.0.1:9", model="m", concurrency="1", requests=1)
    assert not (home / "runs").exists()


def test_a_missing_route_falls_back_and_an_endpoint_with_none_is_refused(run: Callable[..., BenchAnswer]) -> None:
    with Mock(Script(kind="openai", missing_routes=("/v1/chat/completions",), **FAST)) as server:
        assert run(server).meta["api"] == "openai"
    with (
        Mock(Script(kind="openai", missing_routes=("/v1/chat/completions", "/v1/completions"))) as server,
        pytest.raises(RemoteError, match="404"),
    ):
        run(server)


def test_a_server_that_refuses_the_fields_is_measured_without_them_and_the_loss_is_said(
    run: Callable[..., BenchAnswer],
) -> None:
    with Mock(Script(kind="openai", refuse_fields=("stream_options.continuous_usage_stats",), **FAST)) as server:
        answer = run(server)
    point = only(answer)
    assert point.tpot_ms.p50 is None
    assert point.tpot_bounds_ms is not None
    assert point.output_tokens == 96
    assert "first chunk is unknown" in answer.notes[0]
    with Mock(Script(kind="openai", refuse_fields=("stream_options",), **FAST)) as server:
        point = only(run(server))
    assert (point.output_tokens, point.output_tok_s, point.tpot_ms.p50) == (None, None, None)
    assert point.ttft_ms.p50 is not None


def test_an_early_end_counts_the_tokens_that_came_not_the_ones_asked_for(run: Callable[..., BenchAnswer]) -> None:
    for kind in ("sglang", "openai"):
        with Mock(Script(kind=kind, n=9, **FAST)) as server:
            assert only(run(server)).output_tokens == 36


@pytest.mark.parametrize(("fault", "kind"), [("cut", "cut"), ("error", "stream error"), ("abort", "aborted")])
def test_a_broken_answer_is_failed_with_its_reason_and_counts_for_nothing(
    run: Callable[..., BenchAnswer], fault: str, kind: str
) -> None:
    # 0 is the probe, 1 and 2 the warm-up
    with Mock(Script(fault=lambda number: fault if number == 4 else None, **FAST)) as server:
        answer = run(server)
    point = only(answer)
    assert (point.completed, point.failed, point.output_tokens) == (3, 1, 72)
    assert dict(point.failures) == {kind: 1}
    assert [record.error_kind for record in records(answer) if not record.ok] == [kind]
    assert not point.valid


def test_silence_ends_a_request_and_not_the_run(run: Callable[..., BenchAnswer]) -> None:
    with Mock(Script(fault=lambda number: "hang" if number == 4 else None, **FAST)) as server:
        point = only(run(server, timeout=0.6))
    assert dict(point.failures) == {"timeout": 1}
    assert point.completed == 3


def test_a_server_that_dies_in_the_middle_leaves_failed_requests_and_an_invalid_point(
    run: Callable[..., BenchAnswer],
) -> None:
    with Mock(Script(**FAST)) as server:

        def die(number: int) -> None:
            if number == 20:
                server.stop()

        server.script.fault = die
        point = only(run(server, requests=40))
    assert point.failed > 0
    assert point.completed + point.failed == 40
    assert not point.valid


def test_another_servers_start_between_two_looks_makes_the_point_invalid(run: Callable[..., BenchAnswer]) -> None:
    with Mock(Script(seed_after=5, **FAST)) as server:
        point = only(run(server))
    assert "server changed" in point.invalid_because[0]


def test_work_of_others_in_the_window_is_seen_in_the_servers_counters(run: Callable[..., BenchAnswer]) -> None:
    with Mock(Script(foreign_tokens=50, **FAST)) as server:
        answer = run(server)
    assert "200 output tokens that this client did not ask for" in only(answer).invalid_because[0]
    assert answer.as_json()["windows_dropped"] == 3  # measured three times, and each time in company
    assert answer.exit_code == 13


def test_a_point_above_the_servers_limit_is_marked_and_a_plain_bench_goes_to_that_limit(
    run: Callable[..., BenchAnswer],
) -> None:
    with Mock(Script(max_running=3, **FAST)) as server:
        assert [point.concurrency for point in run(server, concurrency=None).points] == [1, 3]
        assert "measures queueing" in only(run(server, concurrency="5")).marks[0]


@pytest.mark.slow
def test_an_open_loop_sends_on_time_at_the_asked_rate(run: Callable[..., BenchAnswer]) -> None:
    with Mock(Script(first_s=0.2, step_s=0.001)) as server:
        answer = run(server, concurrency=None, rate="100", requests=300, output_tokens="3")
        sent = sorted(record.start_us for record in records(answer))
    point = only(answer)
    assert point.valid, point.invalid_because
    gaps = [later - earlier for earlier, later in pairwise(sent)]
    assert statistics.fmean(gaps) == pytest.approx(10_000, rel=0.15)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(1.0, abs=0.15)
    assert point.lag_ms.p50 is not None
    assert point.lag_ms.p50 < 2
    assert point.ttft_scheduled_ms.p50 is not None
    assert point.ttft_ms.p50 is not None
    assert point.ttft_scheduled_ms.p50 >= point.ttft_ms.p50


def test_an_open_loop_with_a_cap_is_named_so_and_keeps_it(run: Callable[..., BenchAnswer]) -> None:
    with Mock(Script(first_s=0.05, step_s=0.002)) as server:
        point = only(run(server, concurrency=None, rate="200", requests=20, max_concurrency=2))
        assert server.script.most_active == 2
    assert point.process == "capped"
    assert "capped open loop" in point.marks[0]


def test_a_sweep_stops_once_more_load_brings_no_more_throughput(run: Callable[..., BenchAnswer]) -> None:
    with Mock(Script(max_running=2, first_s=0.03, step_s=0.002)) as server:
        answer = run(server, concurrency=None, sweep=("concurrency=1,2,2,4,8",), requests=16)
    assert len(answer.points) < 5
    assert "saturated" in answer.meta["skipped"][0]["why"]


def test_a_search_finds_the_highest_concurrency_that_keeps_the_limits(run: Callable[..., BenchAnswer]) -> None:
    with Mock(Script(lanes=5, first_s=0.05, step_s=0.002)) as server:
        answer = run(server, concurrency="1", requests=20, find="max-goodput", slo="ttft_p90_ms<90", output_tokens="12")
    assert [point.concurrency for point in answer.points][:4] == [1, 2, 4, 8]
    assert answer.best is not None
    assert answer.best.concurrency == 5
    assert {point.requests for point in answer.points} == {20}


def test_a_search_keeps_the_number_of_requests_that_was_said_and_ends_where_it_cannot_fill_the_lanes(
    run: Callable[..., BenchAnswer],
) -> None:
    with Mock(Script(first_s=0.01, step_s=0.002)) as server:
        said = run(server, concurrency="4", requests=10, find="max-goodput", slo="ttft_p90_ms<90000", output_tokens="6")
        free = run(
            server, concurrency="8", requests=None, find="max-goodput", slo="ttft_p90_ms<0.001", output_tokens="6"
        )
    assert {point.requests for point in said.points} == {10}
    assert said.points[-1].concurrency == 8
    assert "10 requests cannot fill 16 lanes; raise --requests" in said.meta["skipped"][0]["why"]
    assert all(point.requests >= 2 * (point.concurrency or 0) for point in free.points)


def test_a_search_cannot_begin_with_limits_that_its_points_cannot_decide(run: Callable[..., BenchAnswer]) -> None:
    with Mock(Script(**FAST)) as server, pytest.raises(UsageError, match="459"):
        run(server, find="max-goodput", slo="ttft_p99_ms<90")


def test_a_stored_run_is_computed_again_without_a_server(run: Callable[..., BenchAnswer], home: Path) -> None:
    with Mock(Script(**FAST)) as server:
        answer = run(server, requests=12)
    again = report(home=home, talk=Silent(), run=answer.run_id)
    assert again.as_json() == answer.as_json()
    assert report(home=home, talk=Silent(), slo="ttft_p90_ms<5000").points[0].goodput["share"] == 1.0


def test_an_interrupt_keeps_what_was_measured(run: Callable[..., BenchAnswer]) -> None:
    import os
    import signal

    with Mock(Script(**FAST)) as server:

        def press() -> None:
            while len(server.script.seen) < 20:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=press)
        thread.start()
        answer = run(server, concurrency="1,2", requests=12, output_tokens="90")
        thread.join()
    assert answer.exit_code == 130
    assert answer.points[0].valid
    assert not answer.points[-1].complete or len(answer.points) == 1
    assert answer.as_json()["interrupted"] is True


def test_a_simulated_server_is_called_simulated(run: Callable[..., BenchAnswer]) -> None:
    with Mock(Script(simulated=True, **FAST)) as server:
        assert run(server).as_json()["simulated"] is True
    with Mock(Script(**FAST)) as server:
        assert run(server).as_json()["simulated"] is False


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"concurrency": "0"}, "above 0"),
        ({"concurrency": "many"}, "1,2,4"),
        ({"concurrency": "1", "rate": "2"}, "keep one"),
        ({"requests": 0}, "1 or more"),
        ({"sweep": ("speed=1",)}, "concurrency="),
        ({"slo": "fast"}, "ttft_p90_ms<500"),
        ({"prompts": "poems"}, "poems"),
        ({"dataset": "/no/such.jsonl"}, "/no/such.jsonl"),
        ({"url": "127.0.0.1:3000"}, "http://"),
        ({"url": "http://user:pw@h/"}, "--api-key-env"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
        ({"max_concurrency": 4}, "--rate"),
        ({"host": "gpu1"}, "exclude"),
        ({"temperature": -1.0}, "0 or more"),
        ({"find": "max-goodput"}, "--slo"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_sent(
    home: Path, options: dict[str, Any], says: str
) -> None:
    given: dict[str, Any] = {"url": "http://127.0.0.1:9", "model": "m"} | options
    with pytest.raises(MtpError, match=says) as refused:
        bench(home=home, talk=Silent(), **given)
    assert isinstance(refused.value, UsageError)
