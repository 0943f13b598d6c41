"""The parts of the benchmark: streams split anywhere, prompts, arrivals, counters, the specification on its way to the host."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpdeploy.bench import arrivals, counters, load, prompting, template, wire
from mtpdeploy.bench.client import Endpoint, record_of
from mtpdeploy.bench.sampler import parse_smi
from mtpdeploy.bench.sse import Answer, BadAnswer, error_text
from mtpdeploy.bench.values import Api, Message, Prompt, Record, Request, RunSpec

CORPUS = Path(__file__).resolve().parents[2] / "shared" / "corpus" / "h200"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def event(value: object) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"data: {text}\n\n".encode()


def native(total: int, reason: object = None, **meta: object) -> dict[str, Any]:
    return {
        "text": 'say "completion_tokens": 99',
        "meta_info": {"completion_tokens": total, "finish_reason": reason, **meta},
    }


def chat(
    content: str | None, total: int | None = None, reason: str | None = None, key: str = "content"
) -> dict[str, Any]:
    told: dict[str, Any] = {"choices": [{"delta": {key: content}, "finish_reason": reason}]}
    if total is not None:
        told["usage"] = {"completion_tokens": total, "prompt_tokens": 5}
    return told


def read(api: Api, events: Iterable[object]) -> tuple[Answer, Record]:
    """Each event in a read of its own, one millisecond apart."""
    answer = Answer(api)
    answer.feed(0, HEAD)
    pieces = [event(one) for one in events]
    for place, piece in enumerate(pieces, 1):
        answer.feed(place * 1_000_000, b"%x\r\n%s\r\n" % (len(piece), piece))
    answer.feed((len(pieces) + 1) * 1_000_000, b"0\r\n\r\n")
    request = Request(0, Prompt("p", "code", (Message("user", "x"),)), 64)
    return answer, record_of(request, answer, 0, 0, 0, 9_000_000, lane=0, kind=None, why=None, again=0)


STREAM = HEAD + chunked(
    event(native(2)),
    event(native(5)) + event(native(8)),
    event(native(9, {"type": "stop"}, spec_verify_ct=3)),
    event("[DONE]"),
)


@settings(max_examples=200)
@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_an_answer_is_the_same_wherever_the_network_splits_it(cuts: set[int]) -> None:
    answer = Answer("sglang")
    edges = [0, *sorted(cuts), len(STREAM)]
    for first, last in pairwise(edges):
        answer.feed(first, STREAM[first:last])
    assert answer.complete
    assert answer.chunks.tokens == [2, 5, 8, 9]
    assert answer.chunks.done
    assert answer.chunks.result()["spec_verify"] == 3


def test_text_that_looks_like_a_count_is_no_count() -> None:
    _, record = read("sglang", [native(3), native(4, {"type": "length"}), "[DONE]"])
    assert record.tokens == (3, 4)


def test_each_chunk_gets_the_time_of_the_read_that_completed_it() -> None:
    _, record = read("sglang", [native(3), native(6), native(7, {"type": "length"}), "[DONE]"])
    assert record.times_us == (1000, 2000, 3000)
    assert record.end_us == 5000


def test_the_role_chunk_is_no_token() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    _, counted = read("openai-chat", [role, chat("a", 2), chat("b", 5, "stop"), "[DONE]"])
    assert (counted.times_us, counted.tokens) == ((2000, 3000), (2, 5))
    _, uncounted = read("openai-chat", [role, chat("a"), chat("b", None, "stop"), "[DONE]"])
    assert (uncounted.times_us, uncounted.tokens) == ((2000, 3000), None)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "content"])
def test_thinking_is_output_too(key: str) -> None:
    _, record = read("openai-chat", [chat("hm", key=key), chat("yes", None, "stop"), "[DONE]"])
    assert record.times_us == (1000, 2000)


def test_usage_in_the_last_chunk_only_is_a_sum_and_no_count_per_chunk() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 7, "prompt_tokens": 5}}
    for events in (
        [chat("a"), chat("b"), chat("c", None, "stop"), usage, "[DONE]"],
        [chat("a"), chat("b"), chat("c", 7, "stop"), "[DONE]"],
    ):
        _, record = read("openai-chat", events)
        assert (record.tokens, record.output_tokens, len(record.times_us)) == (None, 7, 3)


def test_a_token_without_text_counts_where_the_server_counts() -> None:
    _, record = read("openai-chat", [chat("a", 1), chat("", 3), chat("b", 4, "stop"), "[DONE]"])
    assert record.tokens == (1, 3, 4)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([native(3)], "cut"),
        ([native(3, {"type": "abort", "message": "no room"}), "[DONE]"], "aborted"),
        ([{"error": {"message": "boom"}}, "[DONE]"], "stream error"),
        (["[DONE]"], "empty"),
    ],
)
def test_an_answer_that_is_none_is_failed(events: list[object], kind: str) -> None:
    _, record = read("sglang", events)
    assert record.error_kind == kind
    assert not record.ok


def test_acceptance_is_read_under_the_names_of_every_release() -> None:
    for correct, proposed, histogram in (
        ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"),
        ("spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),
        ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
    ):
        meta = {"spec_verify_ct": 7, correct: 17, proposed: 21, histogram: [0, 0, 4, 3]}
        _, record = read("sglang", [native(24, {"type": "length"}, **meta), "[DONE]"])
        assert (record.spec_verify, record.spec_correct, record.spec_proposed) == (7, 17, 21)
        assert record.spec_histogram == (0, 0, 4, 3)
    extension = {"choices": [], "sglext": {"spec_tokens_details": {"spec_verify_ct": 4, "spec_accept_length": 2.5}}}
    _, record = read("openai-chat", [chat("a", 10, "stop"), extension, "[DONE]"])
    assert record.spec_verify == 4


@pytest.mark.parametrize("data", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", HEAD + b"zz\r\nx"])
def test_what_is_no_http_answer_is_refused_and_not_waited_for(data: bytes) -> None:
    with pytest.raises(BadAnswer):
        Answer("sglang").feed(0, data)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"too long"}}', "too long"),
        (b'{"object":"error","message":"too long","code":400}', "too long"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b"Bad  Gateway\n", "Bad Gateway"),
        (b"", "no text"),
    ],
)
def test_the_servers_own_words_reach_the_user(body: bytes, text: str) -> None:
    assert error_text(body) == text


def exchanges() -> list[dict[str, Any]]:
    path = CORPUS / "http" / "A-mtp24.http.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.mark.skipif(not exchanges(), reason="needs the recorded exchanges")
def test_recorded_streams_of_a_real_server_are_read_token_by_token() -> None:
    found = {one["name"]: one for one in exchanges()}
    apis: dict[str, Api] = {
        "generate-stream": "sglang", "completions-stream": "openai", "completions-stream-continuous": "openai",
        "chat-stream": "openai-chat",
    }  # fmt: skip
    seen = {}
    for name, api in apis.items():
        answer = Answer(api)
        answer.feed(0, HEAD)
        for at, line in found[name]["sse"]:
            answer.feed(round(at * 1e9), chunked(f"{line}\n\n".encode()).removesuffix(b"0\r\n\r\n"))
        answer.feed(round(found[name]["sse"][-1][0] * 1e9), b"0\r\n\r\n")
        request = Request(0, Prompt("p", "code", (Message("user", "x"),)), 64)
        seen[name] = record_of(request, answer, 0, 0, 0, 0, lane=0, kind=None, why=None, again=0)
    assert all(record.ok for record in seen.values()), [record.error for record in seen.values()]
    generate = seen["generate-stream"]
    assert generate.tokens is not None
    assert (generate.output_tokens, generate.tokens[0], generate.tokens[-1]) == (40, 1, 40)
    assert generate.spec_verify is not None
    continuous = seen["completions-stream-continuous"]
    assert continuous.tokens is not None
    assert (continuous.output_tokens, continuous.tokens[:3]) == (32, (1, 4, 7))
    assert (seen["completions-stream"].tokens, seen["completions-stream"].output_tokens) == (None, 64)
    assert seen["chat-stream"].output_tokens == 64
    assert seen["chat-stream"].times_us[0] == 111400


@pytest.mark.skipif(not (CORPUS / "runs").is_dir(), reason="needs the recorded metrics")
def test_recorded_counters_give_the_acceptance_of_a_real_run() -> None:
    read = counters.parse((CORPUS / "runs" / "A-mtp24" / "metrics.txt").read_text())
    assert read.generated == 7816
    assert read.counters["sglang:spec_verify_calls_total"] == 2463
    assert read.running == 0
    assert read.gauges["sglang:spec_accept_length"] == 3.15
    assert read.histograms["sglang:queue_time_seconds"]["count"] == 20


# -- counters


def scrape(**values: float) -> counters.Scrape:
    lines = [
        f'# TYPE sglang:{name} counter\nsglang:{name}{{rank="{rank}"}} {value}'
        for name, value in values.items()
        for rank in (0, 1)
    ]
    return counters.parse("\n".join(lines))


def test_counters_are_summed_over_ranks_and_differenced() -> None:
    gained, _ = counters.difference(scrape(a_total=5), scrape(a_total=8, b_total=2))
    assert gained == {"sglang:a_total": 6, "sglang:b_total": 4}


def test_a_counter_that_fell_is_left_out_and_means_a_restart() -> None:
    before, after = scrape(num_requests_total=5), scrape(num_requests_total=1)
    assert counters.difference(before, after)[0] == {}
    assert counters.was_reset(before, after)
    assert not counters.was_reset(after, before)


def test_levels_of_ranks_are_not_summed_and_nan_is_no_value() -> None:
    text = (
        "# TYPE sglang:token_usage gauge\n" 'sglang:token_usage{r="0"} 0.5\n' 'sglang:token_usage{r="1"} 0.7\n'
        "# TYPE sglang:num_running_reqs gauge\n" 'sglang:num_running_reqs{r="0"} 2\n' 'sglang:num_running_reqs{r="1"} 3\n'
        "# TYPE sglang:x gauge\nsglang:x NaN\nprocess_cpu 5\n"
    )  # fmt: skip
    assert counters.parse(text).gauges == {"sglang:token_usage": 0.7, "sglang:num_running_reqs": 5}


# -- prompts


@pytest.mark.parametrize("kind", prompting.CLASSES)
def test_every_class_has_eight_prompts_or_more_and_no_two_alike(kind: str) -> None:
    prompts = prompting.shipped(kind)
    assert len(prompts) >= 8
    assert len({one.text for one in prompts}) == len(prompts)
    assert len({one.id for one in prompts}) == len(prompts)
    assert all(len(one.text) > 80 for one in prompts)


def test_long_prompts_are_long() -> None:
    assert min(len(one.text) for one in prompting.shipped("long")) > 9000


def test_prompts_depend_on_seed_and_source_only() -> None:
    assert prompting.choose("mixed", 40, seed=3) == prompting.choose("mixed", 40, seed=3)
    assert prompting.choose("mixed", 40, seed=3) != prompting.choose("mixed", 40, seed=4)
    assert prompting.choose("code", 5)[:3] == prompting.choose("code", 3)
    assert {one.kind for one in prompting.choose("mixed", 5)} == set(prompting.MIXED)


def test_no_warm_up_prompt_is_ever_measured() -> None:
    measured = {one.text for kind in prompting.CLASSES for one in prompting.shipped(kind)}
    assert not measured & {one.text for one in prompting.warmup(8)}


@pytest.mark.parametrize("tokens", [200, 2000, 20000])
def test_a_prompt_of_a_length_is_about_that_long_and_still_asks_its_question(tokens: int) -> None:
    short = prompting.choose("maths", 1)[0]
    long = prompting.choose("maths", 1, input_tokens=tokens)[0]
    assert len(long.text) == pytest.approx(tokens * prompting.CHARACTERS_PER_TOKEN, rel=0.05)
    assert long.text.endswith(short.text)


def test_a_users_file_is_read_in_both_known_forms(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
            ]
        },
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "answer"}], "class": "mine"},
        {"prompt": "plain"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    first, second, third = prompting.from_file(path)
    assert [one.role for one in first.messages] == ["system", "user"]
    assert (second.messages, second.kind) == ((Message("user", "q"),), "mine")
    assert third.text == "plain"
    path.write_text(json.dumps(rows))
    assert len(prompting.from_file(path)) == 3


@pytest.mark.parametrize(
    ("text", "says"), [("{}", "line 1"), ("nonsense", "JSON lines"), ("", "no prompt"), ("[1]", "item 1")]
)
def test_a_file_that_is_no_prompts_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        prompting.from_file(path)


# -- arrivals


@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("constant", 0.0), ("gamma", 2.0)])
def test_gaps_have_the_mean_and_spread_of_their_process(process: Any, cv: float) -> None:
    due = arrivals.schedule(process, 50.0, 20000, seed=1)
    gaps = [b - a for a, b in zip((0.0, *due), due, strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, abs=0.08)


def test_a_ramp_climbs_and_a_step_steps() -> None:
    ramp = arrivals.schedule("ramp", 10.0, 2000)
    assert (ramp[999] - ramp[899]) > 1.5 * (ramp[1999] - ramp[1899])
    step = arrivals.schedule("step", 10.0, 2000)
    assert step[999] == pytest.approx(2 * (step[1999] - step[999]), rel=0.15)


def test_a_trace_is_replayed_from_its_first_arrival() -> None:
    assert arrivals.from_trace(["# times", "10.5", "11", "", "12.25"]) == (0.0, 0.5, 1.75)
    assert arrivals.from_trace(['{"timestamp": 500, "x": 1}', '{"timestamp": 2000}']) == (0.0, 1.5)
    with pytest.raises(ValueError, match="line 2"):
        arrivals.from_trace(["3", "2"])
    with pytest.raises(ValueError, match="line 1"):
        arrivals.from_trace(["soon"])


# -- load


def test_points_share_prompts_so_that_repeats_and_loads_are_paired() -> None:
    points = load.points(load.Asked(concurrency=(1, 4), requests=6, repeat=2))
    assert [(one.concurrency, one.repeat) for one in points] == [(1, 0), (4, 0), (1, 1), (4, 1)]
    assert len({tuple(request.prompt.id for request in one.requests) for one in points}) == 1
    assert [one.index for one in points] == [0, 1, 2, 3]


def test_warm_up_stays_within_sixteen_tokens_a_lane_with_the_probe() -> None:
    from mtpdeploy.bench.protocol import PROBE_TOKENS

    (point,) = load.points(load.Asked(concurrency=(4,), output_tokens=(1024,)))
    assert len(point.warmup) == 4
    assert max(one.output_tokens for one in point.warmup) + PROBE_TOKENS <= 16


@pytest.mark.parametrize(
    ("text", "values"), [("1,2,4", (1, 2, 4)), ("1..16", (1, 2, 4, 8, 16)), ("2..12", (2, 4, 8, 12))]
)
def test_lists_of_numbers(text: str, values: tuple[int, ...]) -> None:
    assert load.numbers(text, int, "--concurrency") == values


def test_a_specification_survives_the_way_to_the_host() -> None:
    spec = RunSpec(
        "http://h:1", "m", load.points(load.Asked(rate=(5.0,), requests=4, cap=2)), expect={"pid": 4}, ignore_eos=True
    )
    assert wire.load(json.loads(json.dumps(wire.dump(spec)))) == spec


# -- the request


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://h:1", "/v1/completions"),
        ("http://h:1/v1", "/v1/completions"),
        ("https://h/proxy/v1/", "/proxy/v1/completions"),
    ],
)
def test_a_url_that_ends_in_v1_keeps_one(url: str, path: str) -> None:
    assert Endpoint(url, "openai").path() == path


def test_a_key_never_shows_in_an_endpoints_text() -> None:
    assert "abc" not in repr(Endpoint("http://h:1", "openai", {"Authorization": "Bearer abc"}))


def test_the_models_own_template_is_rendered_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    )
    found = template.find({"model_path": str(tmp_path), "model_type": "qwen3_5"})
    assert found is not None
    assert found.render((Message("user", "hi"),)) == "<s><user>hi<think>"
    assert str(tmp_path) in found.source
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    fallback = template.find({"model_path": str(tmp_path), "model_type": "qwen3_5"})
    assert fallback is not None
    assert fallback.source.startswith("ChatML")
    assert template.find({"model_path": "/nowhere", "model_type": "llama"}) is None


def test_nvidia_smi_rows_keep_not_available_as_unknown() -> None:
    assert parse_smi("0, 1024, 71.3, 12\n1, 2048, [N/A], 0\nnonsense\n") == [
        {"index": 0, "memory_used_gb": 1.0, "power_w": 71.3, "utilisation": 0.12},
        {"index": 1, "memory_used_gb": 2.0, "power_w": None, "utilisation": 0.0},
    ]


PACED = [
    HEAD,
    *(chunked(event(chat("a", total))).removesuffix(b"0\r\n\r\n") for total in (1, 4, 4, 7, 9)),
    chunked(event(chat("b", 11)), event(chat("c", 12))).removesuffix(b"0\r\n\r\n"),  # two chunks in one read
    chunked(event(chat('d "completion_tokens": 99 }\n\n', 13))).removesuffix(b"0\r\n\r\n"),
    chunked(event({"choices": [], "usage": {"completion_tokens": 13, "prompt_tokens": 5}}), event("[DONE]")),
]


@given(st.lists(st.integers(1, len(PACED) - 1), max_size=4), st.integers(0, 200), st.booleans())
def test_reads_taken_together_tell_what_they_tell_one_by_one(merged: list[int], cut: int, fails: bool) -> None:
    reads = list(PACED)
    if fails:
        reads.insert(
            4, chunked(event({"error": {"message": "boom", "completion_tokens": 50}})).removesuffix(b"0\r\n\r\n")
        )
    for place in sorted(set(merged), reverse=True):  # a read that took two pieces at once, another that took a part
        whole = reads[place - 1] + reads.pop(place)
        reads[place - 1 : place] = [part for part in (whole[:cut], whole[cut:]) if part]
    timed = [(place * 1_000_000, data) for place, data in enumerate(reads)]
    one_by_one, together = Answer("openai-chat"), Answer("openai-chat")
    for ns, data in timed:
        one_by_one.feed(ns, data)
    together.feed_all(timed)
    for name in ("times", "tokens", "counted", "events", "done", "error"):
        assert getattr(together.chunks, name) == getattr(one_by_one.chunks, name)
    assert together.chunks.result() == one_by_one.chunks.result()
    assert (together.complete, together.last_ns) == (one_by_one.complete, one_by_one.last_ns)
    assert together.chunks.tokens[-1] == (13 if not fails else one_by_one.chunks.tokens[-1])
