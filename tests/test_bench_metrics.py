"""The figures of a point: exact on streams whose truth is known, unmoved by what must not move them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpdeploy.bench import metrics
from mtpdeploy.bench.client import record_of
from mtpdeploy.bench.sse import Answer
from mtpdeploy.bench.values import Measured, Message, Point, Prompt, Record, Request, Sample


def stream(
    index: int = 0,
    *,
    first_ms: float = 200.0,
    step_ms: float = 30.0,
    k: int = 3,
    k1: int = 3,
    n: int = 129,
    start_ms: float = 0.0,
    **more: object,
) -> Record:
    """A perfect answer: k_1 tokens at first_ms, then k every step."""
    times, tokens, total = [round(first_ms * 1000)], [min(k1, n)], min(k1, n)
    while total < n:
        total = min(total + k, n)
        times.append(times[-1] + round(step_ms * 1000))
        tokens.append(total)
    known = {"output_tokens": n, "input_tokens": 50, "finish_reason": "length", "end_us": times[-1] + 500} | more
    return Record(0, index, f"p{index}", "code", n, round(start_ms * 1000), None, tuple(times), tuple(tokens), **known)  # type: ignore[arg-type]


def facts(**spec: object) -> Measured:
    return Measured(0, "2026-01-01T00:00:00Z", 1.0, {"process": "closed", "concurrency": 4, **spec})


def test_an_mtp_stream_is_ten_ms_a_token_and_thirty_ms_a_chunk() -> None:
    made = metrics.point([stream()])
    assert made.tpot_ms.p50 == pytest.approx(10.0)
    assert made.chunk_gap_ms.p50 == pytest.approx(30.0)
    assert made.tokens_per_chunk == {"3": 43}


@given(k1=st.integers(1, 8), k=st.integers(1, 8), steps=st.integers(1, 60), step_ms=st.integers(1, 100))
def test_a_known_step_time_comes_back_exactly_whatever_the_first_chunk(
    k1: int, k: int, steps: int, step_ms: int
) -> None:
    made = metrics.point([stream(k=k, k1=k1, n=k1 + k * steps, step_ms=step_ms)])
    assert made.tpot_ms.p50 == pytest.approx(step_ms / k)
    assert made.chunk_gap_ms.max == step_ms
    assert sum(int(size) * count for size, count in made.tokens_per_chunk.items()) == made.output_tokens


def per_token(point: Point) -> dict[str, object]:
    """Everything that is of tokens or of the whole answer; the rest is of chunks."""
    told = point.as_json()
    return {name: value for name, value in told.items() if name not in ("chunk_gap_ms", "stall_ms", "tokens_per_chunk")}


@given(st.lists(st.integers(0, 40_000), min_size=42, max_size=42), st.lists(st.booleans(), min_size=41, max_size=41))
def test_how_tokens_are_split_into_chunks_changes_no_figure_of_tokens(gaps: list[int], keep: list[bool]) -> None:
    whole = stream(k=1, k1=1, n=43)
    assert whole.tokens is not None
    times = tuple(accumulate(gaps, initial=whole.times_us[0]))
    whole = replace(whole, times_us=times, end_us=times[-1])
    kept = [place for place in range(43) if place in (0, 42) or keep[place - 1]]
    coarse = replace(
        whole, times_us=tuple(whole.times_us[p] for p in kept), tokens=tuple(whole.tokens[p] for p in kept)
    )
    assert per_token(metrics.point([coarse])) == per_token(metrics.point([whole]))


@given(
    k1=st.integers(1, 8),
    k=st.integers(1, 8),
    steps=st.integers(1, 40),
    first_ms=st.integers(1, 500),
    step_ms=st.integers(1, 100),
    cuts=st.sets(st.integers(1, 4000), max_size=12),
)
def test_a_server_of_known_pace_gets_exactly_its_own_numbers_back(
    k1: int, k: int, steps: int, first_ms: int, step_ms: int, cuts: set[int]
) -> None:
    """From the bytes of its stream, each with its time of arrival, wherever the network cut them."""
    reads: list[tuple[int, bytes]] = [(1_000_000, b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")]
    reads.append((1_000_000, b"Transfer-Encoding: chunked\r\n\r\n"))
    n = k1 + k * steps
    for step in range(steps + 1):
        total = k1 + k * step
        meta = {
            "completion_tokens": total,
            "prompt_tokens": 7,
            "finish_reason": {"type": "length"} if total == n else None,
        }
        event = f"data: {json.dumps({'text': 'x' * total, 'meta_info': meta})}\n\n".encode()
        reads.append(((first_ms + step * step_ms) * 1_000_000, b"%x\r\n%s\r\n" % (len(event), event)))
    reads.append((reads[-1][0], b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"))
    cut, at = [], 0
    for ns, data in reads:  # the parts of a cut read come at the same time: its last byte's
        edges = [0, *sorted(edge - at for edge in cuts if 0 < edge - at < len(data)), len(data)]
        cut += [(ns, data[first:last]) for first, last in pairwise(edges)]
        at += len(data)
    answer = Answer("sglang")
    answer.feed_all(cut)
    request = Request(0, Prompt("p", "code", (Message("user", "x"),)), n)
    record = record_of(request, answer, 0, 0, 0, cut[-1][0], lane=0, kind=None, why=None, again=0)
    made = metrics.point([record])
    assert made.tpot_ms.p50 == pytest.approx(step_ms / k)
    assert (made.chunk_gap_ms.p50, made.chunk_gap_ms.max, made.ttft_ms.p50) == (step_ms, step_ms, first_ms)
    assert (made.output_tokens, made.input_tokens, made.failed) == (n, 7, 0)
    assert made.e2e_ms.p50 == first_ms + steps * step_ms
    assert made.tokens_per_chunk == {str(k): steps + (k1 == k)} | ({} if k1 == k else {str(k1): 1})


def figures_of(point: Point) -> dict[str, object]:
    """Everything that is an average or a sum over requests."""
    told = point.as_json()
    for name in ("requests", "failed", "failures", "valid", "invalid_because", "marks"):
        told.pop(name)
    return told


@given(st.randoms(use_true_random=False))
def test_a_failed_request_changes_no_figure(draw: random.Random) -> None:
    done = [stream(i, n=draw.randint(5, 80), start_ms=i * 10.0) for i in range(draw.randint(1, 12))]
    failed = Record(0, 99, "p99", "code", 64, 5000, times_us=(1000, 2000), end_us=3000, error="cut", error_kind="cut")
    assert figures_of(metrics.point([*done, failed])) == figures_of(metrics.point(done))


@given(st.randoms(use_true_random=False))
def test_the_order_of_the_records_does_not_matter(draw: random.Random) -> None:
    done = [stream(i, n=draw.randint(5, 80), start_ms=i * 10.0) for i in range(12)]
    done.append(Record(0, 99, "p99", "code", 64, 5000, times_us=(1000,), end_us=3000, error="cut", error_kind="cut"))
    mixed = done[:]
    draw.shuffle(mixed)
    assert metrics.point(mixed).as_json() == metrics.point(done).as_json()


def test_without_counts_per_chunk_the_time_per_token_is_null_and_its_bounds_hold_the_truth() -> None:
    made = metrics.point([replace(stream(), tokens=None)])
    assert made.tpot_ms.p50 is None
    assert made.tpot_bounds_ms is not None
    low, high = made.tpot_bounds_ms
    assert low <= 10.0 <= high
    assert made.tokens_per_chunk == {}
    assert any("k_1 unknown" in mark for mark in made.marks)


def test_without_any_token_count_no_speed_is_made_up_from_the_limit() -> None:
    made = metrics.point([replace(stream(), tokens=None, output_tokens=None)])
    assert made.output_tokens is None
    assert made.output_tok_s is None
    assert made.request_tok_s.p50 is None
    assert made.tpot_bounds_ms is None


def test_the_tail_after_the_last_token_is_no_part_of_the_latency() -> None:
    short = stream(n=20, k=1, k1=1)
    assert metrics.point([replace(short, end_us=9_000_000)]).e2e_ms.p50 == short.times_us[-1] / 1000


def test_percentiles_are_null_where_samples_are_too_few_and_say_how_many_are_missing() -> None:
    eight = metrics.spread([float(value) for value in range(8)])
    assert (eight.p50, eight.p90, eight.p99, eight.max) == (3.5, None, None, 7.0)
    assert eight.missing == {"p90": 2, "p99": 451}
    assert metrics.spread([float(value) for value in range(459)]).p99 is not None
    nothing = metrics.spread([])
    assert (nothing.p50, nothing.max, nothing.count) == (None, None, 0)


def test_throughput_is_all_tokens_over_the_whole_time() -> None:
    made = metrics.point([stream(0), stream(1, start_ms=1000)])
    assert made.duration_s == pytest.approx(1.0 + 0.2 + 42 * 0.03)
    assert made.output_tok_s == pytest.approx(258 / made.duration_s)


def test_the_steady_window_counts_only_the_time_at_full_load() -> None:
    """Two lanes, each with five answers of one second at 100 tok/s, after a first wave that waited one second more."""
    done = []
    for lane in range(2):
        start = 0.0
        for turn in range(5):
            wait = 1000.0 if turn == 0 else 0.0
            done.append(stream(lane * 10 + turn, start_ms=start, first_ms=10 + wait, step_ms=10, k=1, k1=1, n=100))
            start += 1000.0 + wait
    made = metrics.point(done, facts(concurrency=2))
    assert made.output_tok_s_steady == pytest.approx(200, rel=0.01)
    assert made.output_tok_s is not None
    assert made.output_tok_s < 180


def test_a_single_wave_has_no_steady_window_and_says_why() -> None:
    made = metrics.point([stream(i) for i in range(4)], facts())
    assert made.output_tok_s_steady is None
    assert "more than 4" in str(made.steady["why_not"])


def test_acceptance_is_weighted_by_verify_steps_and_names_its_estimator() -> None:
    made = metrics.point(
        [
            stream(0, n=100, spec_verify=50, spec_correct=50, spec_proposed=150, spec_histogram=(10, 30, 10, 0)),
            stream(1, n=300, spec_verify=75, spec_correct=225, spec_proposed=225, spec_histogram=(0, 0, 0, 75)),
        ],
        replace(facts(), counters={"sglang:spec_verify_calls_total": 1.0, "sglang:generation_tokens_total": 400.0}),
    )
    assert made.accept_length == pytest.approx(400 / 125)
    assert made.accept_length_source == metrics.PER_REQUEST
    assert made.acceptance_by_position == pytest.approx((115 / 125, 85 / 125, 75 / 125))
    assert made.accept_rate == pytest.approx(275 / 375)


def test_acceptance_falls_back_to_counters_then_to_the_servers_average_then_to_null() -> None:
    counted = replace(
        facts(), counters={"sglang:spec_verify_calls_total": 43.0, "sglang:generation_tokens_total": 129.0}
    )
    made = metrics.point([stream()], counted)
    assert (made.accept_length, made.accept_length_source) == (3.0, metrics.PER_COUNTER)
    average = replace(facts(), server_after={"avg_spec_accept_length": 2.9})
    assert metrics.point([stream()], average).accept_length_source == metrics.PER_SERVER
    assert metrics.point([stream()], facts()).accept_length is None
    assert metrics.point([stream()], facts()).accept_length_source is None


def test_vllm_counters_give_acceptance_by_position() -> None:
    names = "vllm:spec_decode_num_"
    counters = {
        f"{names}drafts_total": 100.0, f"{names}draft_tokens_total": 300.0, f"{names}accepted_tokens_total": 180.0,
        f"{names}accepted_tokens_per_pos_total:0": 90.0, f"{names}accepted_tokens_per_pos_total:1": 60.0,
        f"{names}accepted_tokens_per_pos_total:2": 30.0,
    }  # fmt: skip
    made = metrics.point([stream()], replace(facts(), counters=counters))
    assert made.accept_length == pytest.approx(2.8)
    assert made.acceptance_by_position == (0.9, 0.6, 0.3)
    assert made.accept_rate == pytest.approx(0.6)


def test_a_late_client_makes_an_open_loop_point_invalid() -> None:
    def sent(late_ms: float) -> Point:
        done = [replace(stream(i, start_ms=i * 100 + late_ms), scheduled_us=i * 100_000) for i in range(10)]
        return metrics.point(done, facts(process="poisson", concurrency=None, rate=10.0))

    assert sent(9.0).valid
    made = sent(11.0)  # 5 % of 200 ms are 10
    assert not made.valid
    assert "sent late" in made.invalid_because[0]
    assert made.ttft_scheduled_ms.p50 == pytest.approx(211)
    assert made.ttft_ms.p50 == pytest.approx(200)


def test_an_overloaded_open_loop_is_unstable_and_has_no_latency() -> None:
    def load(served: float) -> Point:
        done, free = [], 0.0
        for i in range(80):
            at = i * 100.0
            begin = max(at, free)
            free = begin + 1000.0 / served
            done.append(
                replace(
                    stream(i, start_ms=at, first_ms=begin - at + 20, step_ms=1, n=60), scheduled_us=round(at * 1000)
                )
            )
        return metrics.point(done, facts(process="constant", concurrency=None, rate=10.0))

    assert load(12.0).valid
    made = load(5.0)
    assert not made.valid
    assert "unstable" in made.invalid_because[0]
    assert made.ttft_ms.p50 is None
    assert made.output_tok_s is not None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"server_before": {"random_seed": 1}, "server_after": {"random_seed": 2}}, "server changed"),
        ({"server_before": {"launch_id": "a"}, "server_after": {"launch_id": "b"}}, "server changed"),
        ({"server_after": {"gone": "refused"}}, "no longer answered"),
        ({"client": {"loop_lag_p90_ms": 40.0}}, "client was the bottleneck"),
        ({"client": {"cpu_share": 0.97, "processes": 1}}, "client was the bottleneck"),
        ({"foreign": ("3 requests and 900 output tokens",)}, "other work at the server"),
        ({"complete": False}, "interrupted"),
    ],
)
def test_what_makes_numbers_meaningless_makes_the_point_invalid(change: dict[str, object], reason: str) -> None:
    assert metrics.point([stream()], facts()).valid
    made = metrics.point([stream()], replace(facts(), **change))  # type: ignore[arg-type]
    assert not made.valid
    assert reason in " ".join(made.invalid_because)


def test_one_stall_of_the_client_is_a_mark_and_no_verdict() -> None:
    made = metrics.point([stream()], replace(facts(), client={"loop_lag_p90_ms": 1.0, "loop_lag_p99_ms": 40.0}))
    assert made.valid
    assert "40.0 ms late at p99" in made.marks[0]


def test_more_requests_at_once_than_the_server_runs_are_marked_as_queueing() -> None:
    before = {"effective_max_running_requests": 4}
    assert not metrics.point([stream()], replace(facts(concurrency=4), server_before=before)).marks
    made = metrics.point([stream()], replace(facts(concurrency=8), server_before=before))
    assert made.valid
    assert "measures queueing" in made.marks[0]


def test_a_few_failures_are_a_mark_and_many_make_the_point_invalid() -> None:
    bad = Record(0, 99, "p", "code", 64, 0, end_us=10, error="HTTP 500: x", error_kind="http-500")
    few = metrics.point([*(stream(i) for i in range(30)), bad])
    assert few.valid
    assert "1 of 31" in few.marks[0]
    many = metrics.point([stream(0), bad])
    assert not many.valid
    only = metrics.point([bad])
    assert (only.completed, only.failed, only.output_tok_s, only.ttft_ms.p50) == (0, 1, None, None)
    assert "all 1 requests failed" in only.invalid_because[0]


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    done = [stream(i, first_ms=100 + 100 * i) for i in range(10)]
    made = metrics.point(done, facts(), slo=metrics.parse_slo("ttft_p90_ms<450,tpot_p90_ms<20"))
    assert made.goodput["share"] == 0.4
    assert made.goodput["limits"] == {"ttft_p90_ms<450": False, "tpot_p90_ms<20": True}
    assert made.goodput["meets"] is False
    few = metrics.point(done[:4], facts(), slo=metrics.parse_slo("ttft_p90_ms<450"))
    assert few.goodput["meets"] is None


@pytest.mark.parametrize("text", ["ttft<5", "ttft_p95_ms<5", "ttft_p90_ms=5", "speed_p90_ms<1", "ttft_p90_ms<x"])
def test_an_objective_that_names_no_figure_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ttft_p90_ms"):
        metrics.parse_slo(text)


def test_energy_comes_from_the_counter_before_power_samples_and_is_null_without_either() -> None:
    rows = tuple({"at_s": t, "index": 0, "power_w": 400.0, "energy_mj": 1e6 + t * 4e5} for t in (0.0, 1.0, 2.0))
    made = metrics.point([stream()], replace(facts(), gpu=rows))
    assert made.gpu["energy_j"] == pytest.approx(800.0)
    power = tuple({**row, "energy_mj": None} for row in rows)
    assert "power samples" in str(metrics.point([stream()], replace(facts(), gpu=power)).gpu["energy_source"])
    one = metrics.point([stream()], replace(facts(), gpu=power[:1]))
    assert one.gpu["energy_j"] is None


def test_records_and_facts_survive_being_written() -> None:
    record = stream(3, spec_histogram=(1, 2), cached_tokens=4)
    assert Record.from_json(record.as_json()) == record
    told = replace(facts(), samples=(Sample(1.0, 4.0, None),), foreign=(), gpu=({"at_s": 1.0},))
    assert Measured.from_json(told.as_json()) == told
    made = metrics.point([record], told)
    assert Point.from_json(made.as_json()) == made


@pytest.mark.parametrize(
    ("slo", "requests", "needed"),
    [("ttft_p99_ms<500", 458, 459), ("ttft_p99_ms<500", 459, None), ("tpot_p90_ms<20", 4, 10), ("tpot_p50_ms<20", 1, None),
     ("request_p90_tok_s>20", 9, 10), ("e2e_max_ms<900", 1, None), ("output_tok_s>100", 1, None)],
)  # fmt: skip
def test_a_percentile_that_a_load_is_too_short_for_is_told_with_what_would_be_enough(
    slo: str, requests: int, needed: int | None
) -> None:
    (limit,) = metrics.parse_slo(slo)
    said = limit.undecidable(requests, "point")
    assert said == (needed and f"{limit} needs {needed} requests a point: give --requests {needed}, or use p50")
