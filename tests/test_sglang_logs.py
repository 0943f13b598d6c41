# ruff: noqa: E501 - log lines are as long as SGLang prints them
"""The log reader against real logs, every wrapper and format that logs come in, and hostile text."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtpdeploy.actions.logfile import Series, logfile
from mtpdeploy.errors import NotFound, UsageError
from mtpdeploy.progress import Silent
from mtpdeploy.sglang.logs import Fold, Parser, Summary, summarise
from mtpdeploy.sglang.logs import events as ev
from mtpdeploy.sglang.masking import mask, mask_values

GOLDEN = Path(__file__).parent / "golden" / "logs"
CORPUS = Path(__file__).resolve().parents[2] / "shared" / "corpus"
# Expectations of the corpus that its own text contradicts: (file, key).
NOT_IN_THE_TEXT = {("028.log", "server_args.model_path")}


def expectations(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    file = folder / "expected.jsonl"
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return [(folder / expected.pop("file"), expected) for expected in lines]


CASES = expectations(GOLDEN) + expectations(CORPUS / "public-sample") + expectations(CORPUS / "recreated")


def differences(expected: object, got: object, path: str = "") -> Iterator[str]:
    """What of `expected` is not in `got`."""
    if path.endswith("evidence"):
        text = "\n".join(got) if isinstance(got, list) else ""
        yield from (f"{path} lacks {line!r}" for line in expected if line not in text)  # type: ignore[attr-defined]
    elif isinstance(expected, Mapping):
        for key, value in expected.items():
            yield from differences(
                value, got.get(key) if isinstance(got, Mapping) else None, f"{path}.{key}".strip(".")
            )
    elif isinstance(expected, list) and path.endswith("graphs"):
        by_kind = {g["kind"]: g for g in got or []}  # type: ignore[union-attr]
        for graph in expected:
            yield from differences(graph, by_kind.get(graph["kind"]), f"{path}[{graph['kind']}]")
    elif isinstance(expected, float) and isinstance(got, (int, float)):
        if abs(expected - got) > 1e-9:
            yield f"{path}: {got!r} instead of {expected!r}"
    elif expected != got:
        yield f"{path}: {got!r} instead of {expected!r}"


def read(text: str | bytes, chunk: int = 1 << 20) -> Summary:
    data = text if isinstance(text, bytes) else text.encode()
    return summarise(data[i : i + chunk] for i in range(0, len(data), chunk))


def events(text: str) -> list[ev.Event]:
    parser = Parser()
    return [*parser.feed(text.encode()), *parser.close()]


@pytest.mark.parametrize(("file", "expected"), CASES, ids=[f"{f.parent.name}-{f.stem}" for f, _ in CASES])
def test_log_says_what_its_text_proves(file: Path, expected: dict[str, Any]) -> None:
    got = read(file.read_bytes()).as_json()
    json.dumps(got, allow_nan=False)
    found = [d for d in differences(expected, got) if (file.name, d.split(":")[0]) not in NOT_IN_THE_TEXT]
    assert found == []


@pytest.mark.parametrize("file", sorted({f for f, _ in CASES}), ids=lambda f: f.stem)
def test_chunks_of_any_size_give_the_same_summary(file: Path) -> None:
    data = file.read_bytes()[:24_000]
    whole = read(data)
    for chunk in (1, 7, 4096):
        assert read(data, chunk) == whole, f"in chunks of {chunk}"


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.log")), ids=lambda f: f.stem)
def test_totals_only_folds_to_the_same_summary_as_every_event(file: Path) -> None:
    fold, parser = Fold(), Parser()
    data = file.read_bytes()
    fold.extend(parser.feed(data))
    fold.extend(parser.close())
    assert fold.summary() == read(data)


# -- one server's records, in every coat ---------------------------------------------------------------------------------

LAUNCH = """\
[2026-08-29 07:00:10] server_args=ServerArgs(model_path='/m/hybrid', mem_fraction_static=0.85, max_running_requests=12, tp_size=1, \
speculative_algorithm='EAGLE', cuda_graph_config=CudaGraphConfig(decode=PhaseConfig(backend='full', bs=[1, 2]), x={'a': (1, 2)}), \
served_model_name="it's", api_key='sk-do-not-show', max_mamba_cache_size=None, stop=['a, b', ']'], enable_metrics=True)
[2026-08-29 07:00:20] Init torch distributed begin.
[2026-08-29 07:00:21] Init torch distributed ends. elapsed=0.26 s, mem usage=-0.03 GB
[2026-08-29 07:00:22] Load weight begin. avail mem=92.82 GB
[2026-08-29 07:01:40] Load weight end. elapsed=77.91 s, type=Qwen3_5ForConditionalGeneration, \
quant=fp8, fmt=e4m3, avail mem=41.76 GB, mem usage=51.06 GB.
[2026-08-29 07:01:41] Load weight begin. avail mem=41.73 GB
[2026-08-29 07:01:45] Load weight end. elapsed=3.50 s, type=Qwen3_5ForCausalLMMTP, avail mem=36.20 GB, mem usage=5.53 GB.
[2026-08-29 07:02:00] max_running_requests is capped to 3 by the mamba state cache (max_mamba_cache_size=15, 5 state slots per request). To raise it: x.
[2026-08-29 07:02:01] Mamba Cache is allocated. max_mamba_cache_size: 15, conv_state size: 0.03GB, ssm_state size: 0.82GB intermediate_ssm_state_cache \
size: 0.66GB intermediate_conv_window_cache size: 0.01GB\x20
[2026-08-29 07:02:01] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 301248, K size: 3.42 GB, V size: 3.43 GB
[2026-08-29 07:02:01] Memory pool end. avail mem=13.94 GB
[2026-08-29 07:02:02] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 301248, K size: 0.21 GB, V size: 0.22 GB
[2026-08-29 07:02:02] Memory pool end. avail mem=12.95 GB
[2026-08-29 07:02:03] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[1, 2, 3], avail mem=12.90 GB
[2026-08-29 07:02:10] Capture target verify CUDA graph end. elapsed=6.92 s, mem usage=-0.39 GB, avail mem=12.51 GB.
[2026-08-29 07:02:20] max_total_num_tokens=301248, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=3, context_len=131072, \
available_gpu_mem=6.97 GB
[2026-08-29 07:02:31] The server is fired up and ready to roll!
[2026-08-29 07:05:00] Decode batch, #running-req: 3, #full token: 51200, full token usage: 0.17, mamba num: 12, mamba usage: 0.80, accept len: 3.02, \
accept rate: 0.67, cuda graph: True, gen throughput (token/s): 288.17, #queue-req: 9
[2026-08-29 07:05:01] Decode batch, #running-req: 2, #full token: 51300, full token usage: 0.18, mamba num: 13, mamba usage: 0.81, accept len: 2.98, \
accept rate: 0.66, cuda graph: True, gen throughput (token/s): 299.04, #queue-req: 8
"""
PLAIN = read(LAUNCH)


def test_the_plain_log_is_understood() -> None:
    s = PLAIN
    assert s.phase == "serving"
    assert s.ready is True
    assert s.weights == {
        "type": "Qwen3_5ForConditionalGeneration", "quant": "fp8", "mem_gb": 51.06, "avail_gb": 41.76, "before_gb": 92.82, "elapsed_s": 77.91,
    }  # fmt: skip
    assert s.draft is not None
    assert (s.draft["mem_gb"], s.draft["kv_tokens"], s.draft["kv_k_gb"], s.draft["kv_v_gb"]) == (
        5.53,
        301248,
        0.21,
        0.22,
    )
    assert s.kv_cache == {"tokens": 301248, "k_gb": 3.42, "v_gb": 3.43, "dtype": "torch.bfloat16"}
    assert s.graph == {"kind": "target verify", "elapsed_s": 6.92, "mem_gb": -0.39, "avail_gb": 12.51, "bs": [1, 2, 3]}
    assert (s.capped_to, s.slots_per_request, s.max_running_requests) == (3, 5, 3)
    assert s.decode["accept_len_min"] == 2.98


def test_arguments_keep_their_types_and_hide_their_secrets() -> None:
    args = PLAIN.server_args
    assert args is not None
    assert args["api_key"] == "***"
    assert args["served_model_name"] == "it's"
    assert args["stop"] == ["a, b", "]"]
    assert args["max_mamba_cache_size"] is None
    assert args["enable_metrics"] is True
    assert "sk-do-not-show" not in json.dumps(PLAIN.as_json())


COATS = {
    "compose": lambda line: f"sglang-1  | {line}",
    "compose-blank": lambda line: f"sglang-1  | {line}\nsglang-1  | ",
    "docker-timestamps": lambda line: f"2026-08-29T07:00:10.123456789Z {line}",
    "cri": lambda line: f"2026-08-29T07:00:10.123456789+00:00 stderr F {line}",
    "journald": lambda line: f"Aug 29 07:00:10 gpu-1 python3[4711]: {line}",
    "journald-iso": lambda line: f"2026-08-29T07:00:10+0000 gpu-1 mtp-sglang[4711]: {line}",
    "ray": lambda line: f"(WorkerDict pid=9120, ip=10.0.0.11) {line}",
    "ray-padded": lambda line: f"\x1b[36m(SGLangEngine pid=9120)\x1b[0m {line:<200}",
    "ray-repeated": lambda line: (
        f"(WorkerDict pid=9120) {line} [repeated 7x across cluster] (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0)"
    ),
    "docker-json": lambda line: json.dumps(
        {"log": line + "\n", "stream": "stderr", "time": "2026-08-29T07:00:10.1Z"}, separators=(",", ":")
    ),
    "viewer": lambda line: f"[2026-08-29T07:00:10.703Z] {line}",
    "kubectl": lambda line: f"[pod/sglang-0/server] {line}",
    "kibana": lambda line: f"Aug 29, 2026 @ 07:00:10.101    {line}",
    "logging": lambda line: f"2026-08-29 07:00:10,118 - __main__ - INFO - {line}",
    "mpirun": lambda line: f"[1,0]<stderr>: {line}",
    "slurm": lambda line: f"0: {line}",
    "torchrun": lambda line: f"[default0]:{line}",
    "colours": lambda line: f"\x1b[32m{line}\x1b[0m",
    "crlf": lambda line: f"{line}\r",
    "dots": lambda line: f"....{line}",
    "host-tag": lambda line: f"gpu-box:9323{line}",
    "bar": lambda line: (
        f"\r  0%|          | 0/3 [00:00<?, ?it/s]\rCapturing batches (bs=4 avail_mem=5.00 GB):  33%|###3 | 1/3 [00:01<00:02,  1.1s/it]{line}"
    ),
    "broken-utf8": lambda line: line,
}


@pytest.mark.parametrize("coat", COATS)
def test_every_wrapper_leaves_the_same_values(coat: str) -> None:
    wrapped = "\n".join(COATS[coat](line) for line in LAUNCH.splitlines()) + "\n"
    data = wrapped.encode()
    if coat == "broken-utf8":
        data = data.replace(b"\n[2026-08-29 07:02:31]", b"\n\xff\xfe\xc3\x28 garbage\n[2026-08-29 07:02:31]")
    assert read(data) == PLAIN


@pytest.mark.parametrize("rank", ["TP0", "DP0 TP0", "DP0 TP0 EP0", "PP0 TP0", "DP0 PP0 ATTN_CP0 MOE_DP0 TP0 EP0"])
def test_ranks_of_any_kind_are_read_and_the_lowest_speaks(rank: str) -> None:
    other = rank.replace("0", "1")
    lines = []
    for line in LAUNCH.splitlines():
        if "server_args" in line or "fired up" in line:
            lines.append(line)
        else:
            stamp = line[:20]
            # The other rank speaks first, with other numbers.
            lines.append(f"{stamp} {other}{line[20:].replace('41.76', '40.00').replace('77.91', '79.10')}")
            lines.append(f"{stamp} {rank}{line[20:]}")
    s = read("\n".join(lines) + "\n")
    assert (s.rank, s.ranks_seen) == (rank, 2)
    assert s.weights is not None
    assert (s.weights["avail_gb"], s.weights["elapsed_s"], s.weights["elapsed_max_s"]) == (41.76, 77.91, 79.10)
    assert s.kv_cache == PLAIN.kv_cache
    assert s.decode["count"] == 4


@pytest.mark.parametrize("width", [80, 100, 120, 132, 160, 200])
def test_hard_wrapped_records_are_joined_or_null_but_never_wrong(width: int) -> None:
    wrapped = "\n".join(line[i : i + width] for line in LAUNCH.splitlines() for i in range(0, len(line), width)) + "\n"
    s = read(wrapped)
    for key in ("weights", "draft", "mamba_cache", "kv_cache", "graph", "decode"):
        want, got = getattr(PLAIN, key), getattr(s, key)
        for name, value in (got or {}).items():
            if isinstance(value, Mapping):
                assert all(v is None or v == want[name][n] for n, v in value.items()), (key, name)
            else:
                assert value is None or value == want[name], (key, name, value)
    assert s.kv_cache == PLAIN.kv_cache
    assert s.server_args == PLAIN.server_args
    assert s.max_running_requests == 3


@given(st.integers(min_value=1, max_value=len(LAUNCH)))
@settings(max_examples=120, deadline=None)
def test_a_log_cut_anywhere_shows_no_value_that_the_whole_does_not(end: int) -> None:
    s = read(LAUNCH[:end])
    for key in ("max_total_num_tokens", "context_len", "available_gpu_mem_gb", "pool_end_avail_gb", "capped_to"):
        assert getattr(s, key) in (None, getattr(PLAIN, key)), key
    for key in ("weights", "draft", "mamba_cache", "kv_cache", "server_args"):
        whole = getattr(PLAIN, key)
        assert all(v is None or v == whole[n] for n, v in (getattr(s, key) or {}).items()), key
    last = s.decode["last"]
    if isinstance(last, Mapping):
        text = LAUNCH[:end].splitlines()[-1]
        assert all(
            v is None or str(v) in LAUNCH or isinstance(v, bool) or f"{v:.2f}" in LAUNCH for v in last.values()
        ), text


@given(st.integers(min_value=0, max_value=len(LAUNCH)))
@settings(max_examples=120, deadline=None)
def test_a_log_that_begins_anywhere_shows_no_foreign_value(start: int) -> None:
    s = read(LAUNCH[start:])
    if s.weights is not None and s.weights["type"] is not None:
        assert s.weights["type"] == PLAIN.weights["type"]  # type: ignore[index]
    for key in ("max_total_num_tokens", "context_len", "max_running_requests"):
        assert getattr(s, key) in (None, getattr(PLAIN, key)), key


@given(st.binary(max_size=400), st.integers(0, 30))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_bytes_never_break_the_reader(junk: bytes, line: int) -> None:
    lines = LAUNCH.encode().splitlines(keepends=True)
    data = b"".join([*lines[:line], junk, b"\n", *lines[line:]])
    whole = read(data)
    json.dumps(whole.as_json(), allow_nan=False)
    assert read(data, 3) == whole


@given(st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_interleaved_ranks_give_each_value_to_its_own_rank(rng: random.Random) -> None:
    body = [line for line in LAUNCH.splitlines() if "server_args" not in line and "fired up" not in line]
    queues = {rank: [f"{line[:20]} TP{rank}{line[20:]}" for line in body] for rank in range(3)}
    lines = []
    while any(queues.values()):
        rank = rng.choice([r for r, q in queues.items() if q])
        lines.append(queues[rank].pop(0))
    s = read("\n".join(lines) + "\n")
    assert (s.weights, s.draft, s.kv_cache, s.mamba_cache) == (
        PLAIN.weights,
        PLAIN.draft,
        PLAIN.kv_cache,
        PLAIN.mamba_cache,
    )
    assert s.rank == "TP0"


# -- text that only looks like a record ----------------------------------------------------------------------------------

FAKE = (
    "[2026-08-29 07:05:00] Decode batch, #running-req: 99, #token: 1, token usage: 0.99, accept len: 9.99, "
    "gen throughput (token/s): 9999.00, #queue-req: 99"
)


@pytest.mark.parametrize(
    "line",
    [
        f"[2026-08-29 07:04:00] Receive: obj=GenerateReqInput(text='{FAKE}', rid='x')",
        f"[2026-08-29 07:04:00] Finish: obj=GenerateReqInput(rid='x'), out={{'text': '{FAKE}'}}",
        f"[2026-08-29 07:04:00] {{\"rid\": \"x\", \"text\": \"{FAKE}\"}}",
        "[2026-08-29 07:04:00] Receive: obj=GenerateReqInput(text='Traceback (most recent call last): torch.OutOfMemoryError: CUDA out of memory')",
        f"2026-08-29 07:04:00,118 - client - INFO - prompt='{FAKE}'",
        f'user said "{FAKE}"',
        "[2026-08-29 07:04:00] Receive: obj=GenerateReqInput(text='[Errno 98] error while attempting to bind on address: already in use')",
        "[2026-08-29 07:04:00] Receive: obj=GenerateReqInput(text='Watchdog timeout (self.watchdog_timeout=300)')",
        "[2026-08-29 07:04:00] Finish: obj=X(text='The server is fired up and ready to roll! server_args=ServerArgs(tp_size=8)')",
    ],
)  # fmt: skip
def test_user_text_in_a_request_log_is_no_record(line: str) -> None:
    lines = LAUNCH.splitlines()
    s = read("\n".join([*lines[:-2], line, *lines[-2:]]) + "\n")
    assert s == PLAIN


def test_a_log_of_another_program_is_not_sglang() -> None:
    vllm = "INFO 06-10 12:00:00 [api_server.py:1043] vLLM API server version 0.9.1\nINFO 06-10 12:00:02 [core.py:58] Initializing a V1 LLM engine\n"
    router = "2026-06-01 10:00:00  INFO sglang_router_rs::server: src/server.rs:123: Starting router on 0.0.0.0:30000\n"
    wrapper = "+ python -m sglang.launch_server --model-path /m\nwaiting for the server\nstill waiting\n"
    for text in (vllm, router, wrapper, "hello\n"):
        s = read(text)
        assert s.is_sglang is False, text
        assert (s.phase, s.ready, s.cause) == ("unknown", None, None)
    assert read("").is_sglang is None


# -- formats of the versions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("[21:33:44 TP0] Decode batch. #running-req: 1, #token: 45, token usage: 0.00, gen throughput (token/s): 3.45, #queue-req: 0",
         {"running_req": 1, "token": 45, "gen_throughput": 3.45}),
        ("[gpu=0] Decode batch. #running-req: 2, #token: 45, token usage: 0.01, gen throughput (token/s): 13.45, #queue-req: 1",
         {"running_req": 2, "queue_req": 1}),
        ("[2025-05-05 10:00:00] Decode batch [4711], #running-req: 1, #token: 45, token usage: 0.00, cuda graph: False, "
         "gen throughput (token/s): 3.45, #queue-req: 0, ", {"running_req": 1, "graph": False}),
        ("[2025-05-05 10:00:00 TP0] Decode batch, #running-req: 1, #token: 45, token usage: 0.00, npu graph: True, "
         "gen throughput (token/s): 3.45, #queue-req: 0", {"graph": True}),
        ("[2025-05-05 10:00:00 TP0] Decode batch, #running-req: 7, #token: 45, token usage: 0.00, pre-allocated usage: 0.12, "
         "#prealloc-req: 2, #transfer-req: 3, #retracted-req: 4, cuda graph: True, gen throughput (token/s): 3.45, #queue-req: 0",
         {"prealloc_usage": 0.12, "prealloc_req": 2, "transfer_req": 3, "retracted_req": 4, "token": 45}),
        ("[2026-05-05 10:00:00] Decode batch, #running-req: 1, #full token: 4, full token usage: 0.00, #swa token: 3, swa token usage: 0.02, "
         "cap len: 4.00, block accept len: 2.10, accept len: 2.30, accept rate: 0.10, cuda graph: True, gen throughput (token/s): nan, "
         "#queue-req: 0, est. decode TFLOPS/s (per GPU): 12.30",
         {"full_token": 4, "swa_token": 3, "swa_token_usage": 0.02, "cap_len": 4.0, "block_accept_len": 2.1, "gen_throughput": None}),
        ("[2025-05-25 19:45:03] [INFO] Decode batch. #running-req: 2, #token: 128, token usage: 0.01, accept-len: 2.10, accept-ratio: 0.40, "
         "gen throughput (token/s): 131.07, #queue-req: 0", {"running_req": 2, "accept_len": 2.1, "accept_ratio": 0.4}),
        ("12-19 06:22:10 TP0] Decode batch. #running-req: 2, #token: 128, token usage: 0.00, gen throughput (token/s): 131.07, #queue-req: 0, #cache_miss: 0",
         {"running_req": 2, "cache_miss": 0}),
    ],
)  # fmt: skip
def test_decode_records_of_every_age(line: str, values: dict[str, object]) -> None:
    s = read(line + "\n")
    assert s.decode["count"] == 1
    last = s.decode["last"]
    assert isinstance(last, Mapping)
    assert {k: last[k] for k in values} == values


def test_a_field_printed_twice_with_two_values_is_dropped() -> None:
    s = read(
        "[2026-05-05 10:00:00] Decode batch, #running-req: 1, #token: 4, token usage: 0.10, token usage: 0.20, #queue-req: 0\n"
    )
    last = s.decode["last"]
    assert isinstance(last, Mapping)
    assert "token_usage" not in last


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("Capture cuda graph end. Time elapsed: 2.40 s. mem usage=1.20 GB. avail mem=3.40 GB.", "target"),
        ("Capture npu graph end. Time elapsed: 2.40 s. mem usage=1.20 GB. avail mem=3.40 GB.", "target"),
        ("Capture cpu graph end. Time elapsed: 2.40 s. mem usage=1.20 GB. avail mem=3.40 GB.", "target"),
        ("Capture draft extend cuda graph end. Time elapsed: 2.40 s. mem usage=1.20 GB. avail mem=3.40 GB.", "draft extend"),
        ("Capture piecewise CUDA graph end. Time elapsed: 2.40 s. mem usage=1.20 GB. avail mem=3.40 GB.", "piecewise"),
        ("Capture target decode CUDA graph end. bs=[1, 2], elapsed=2.40 s, mem usage=1.20 GB, avail mem=3.40 GB.", "target decode"),
    ],
)  # fmt: skip
def test_graph_records_of_every_age(line: str, kind: str) -> None:
    s = read(f"[2026-05-05 10:00:00 TP0] {line}\n")
    (graph,) = s.graphs
    assert {**graph, "bs": None} == {"kind": kind, "elapsed_s": 2.4, "mem_gb": 1.2, "avail_gb": 3.4, "bs": None}
    assert s.phase == "graphs"
    assert (s.draft_graphs != ()) == kind.startswith("draft")


def test_dict_arguments_of_newer_releases_are_read() -> None:
    s = read(
        "[2026-09-01 00:00:00] server_args={'model_path': '/m', 'tp_size': 2, 'admin_api_key': 'abc', 'x': <Enum.A: 1>, 'ratio': inf}\n"
    )
    assert s.server_args == {
        "model_path": "/m",
        "tp_size": 2,
        "admin_api_key": "***",
        "x": "<Enum.A: 1>",
        "ratio": "inf",
    }
    assert s.phase == "args"


def test_a_cut_argument_line_leaves_the_cut_value_out() -> None:
    s = read("[2026-09-01 00:00:00] server_args=ServerArgs(model_path='/m', tp_size=2, max_running_requests=12")
    assert s.server_args == {"model_path": "/m", "tp_size": 2}


def test_draft_after_the_targets_graphs_is_still_the_draft() -> None:
    """Up to 0.5.13 the draft was loaded after the target's pools and graphs."""
    text = """\
[2026-03-01 00:00:00] server_args=ServerArgs(model_path='/m', speculative_algorithm='STANDALONE')
[2026-03-01 00:00:01] Load weight begin. avail mem=80.00 GB
[2026-03-01 00:00:02] Load weight end. elapsed=1.00 s, type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=60.00 GB, mem usage=20.00 GB.
[2026-03-01 00:00:03] KV Cache is allocated. #tokens: 1000, K size: 1.00 GB, V size: 1.00 GB
[2026-03-01 00:00:03] Memory pool end. avail mem=50.00 GB
[2026-03-01 00:00:04] Capture cuda graph begin. This can take up to several minutes. avail mem=50.00 GB
[2026-03-01 00:00:05] Capture cuda graph end. Time elapsed: 1.00 s. mem usage=1.00 GB. avail mem=49.00 GB.
[2026-03-01 00:00:06] Load weight begin. avail mem=49.00 GB
[2026-03-01 00:00:07] Load weight end. elapsed=0.50 s, type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=47.00 GB, mem usage=2.00 GB.
[2026-03-01 00:00:08] KV Cache is allocated. #tokens: 1000, K size: 0.10 GB, V size: 0.10 GB
[2026-03-01 00:00:08] Memory pool end. avail mem=46.00 GB
"""
    s = read(text)
    assert s.weights is not None
    assert s.draft is not None
    assert (s.weights["mem_gb"], s.draft["mem_gb"]) == (20.0, 2.0)
    assert (s.kv_cache or {})["k_gb"] == 1.0
    assert (s.draft["kv_k_gb"], s.pool_end_avail_gb, s.draft["pool_end_avail_gb"]) == (0.1, 50.0, 46.0)
    assert s.phase == "graphs"


# -- boots -------------------------------------------------------------------------------------------------------------------


def test_boots_of_one_launch_are_counted_and_the_last_one_speaks() -> None:
    header = "# mtpdeploy launch 20260829T070000Z-a1b2c3 boot {} of sglang\n"
    s = read(
        header.format(1)
        + LAUNCH
        + "Killed\n"
        + header.format(2)
        + "[2026-08-29 08:00:00] Init torch distributed begin.\n"
    )
    assert (s.boots, s.boot, s.launch_id) == (2, 2, "20260829T070000Z-a1b2c3")
    assert (s.phase, s.ready, s.cause, s.decode["count"], s.weights) == ("dist_init", None, None, 0, None)


def test_a_second_argument_line_begins_a_second_boot() -> None:
    s = read(LAUNCH + LAUNCH.splitlines()[0] + "\n")
    assert (s.boots, s.phase, s.ready, s.ready_lines) == (2, "args", None, 0)


def test_two_nodes_of_one_launch_are_one_boot() -> None:
    node = "[2026-08-29 07:00:10] server_args=ServerArgs(model_path='/m', nnodes=2, node_rank={}, dist_init_addr='10.0.0.1:5000')\n"
    assert read(node.format(0) + node.format(1)).boots == 1


def test_two_servers_in_one_log_are_said_to_be_mixed_and_give_no_memory_values() -> None:
    s = read((GOLDEN / "two-servers-one-log.log").read_bytes())
    assert (s.boots, s.cause, s.weights, s.kv_cache) == (2, "gpu_occupied", None, None)
    assert "interleaved_servers" in s.warnings


# -- live ----------------------------------------------------------------------------------------------------------------------


def test_progress_follows_a_launch_through_its_phases() -> None:
    parser, fold = Parser(), Fold()

    def after(text: str) -> tuple[str, str, float | None]:
        fold.extend(parser.feed(text.encode()))
        p = fold.progress()
        return p.phase, p.text, p.fraction

    assert after("[2026-08-29 07:00:20] Init torch distributed begin.\n")[0] == "dist_init"
    assert after("[2026-08-29 07:00:22] Load weight begin. avail mem=92.82 GB\n") == (
        "weights",
        "loading weights",
        None,
    )
    assert after("\rMulti-thread loading shards:  25% Completed | 2/8 [00:01<00:02,  2.45it/s]\r") == (
        "weights",
        "loading weights 2/8",
        0.25,
    )
    after("[2026-08-29 07:01:40] Load weight end. elapsed=77.91 s, type=X, avail mem=41.76 GB, mem usage=51.06 GB.\n")
    assert after("[2026-08-29 07:02:01] Memory pool end. avail mem=13.94 GB\n")[0] == "pools"
    after(
        "[2026-08-29 07:02:03] Capture target verify CUDA graph begin. backend=full, bs=[1, 2, 3], avail mem=12.90 GB\n"
    )
    bar = "\rCapturing batches (bs=4 avail_mem=5.00 GB):  33%|###3      | 1/3 [00:01<00:02,  1.10s/it]\r"
    assert after(bar) == ("graphs", "capturing target verify graphs 1/3", pytest.approx(1 / 3))
    assert (
        after("[2026-08-29 07:02:25] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)\n")[0]
        == "http_up"
    )
    assert after("[2026-08-29 07:02:26] Prefill batch, #new-seq: 1, #new-token: 7, #cached-token: 0, token usage: 0.00, #running-req: 0\n"
                 "[2026-08-29 07:02:27] INFO:     127.0.0.1:1 - \"POST /generate HTTP/1.1\" 200 OK\n")[0] == "warmup"  # fmt: skip
    assert after("[2026-08-29 07:02:31] The server is fired up and ready to roll!\n")[0] == "ready"


def test_readiness_is_seen_at_once_and_not_with_the_next_record() -> None:
    parser = Parser()
    seen = list(parser.feed(b"[2026-08-29 07:02:31] The server is fired up and ready to roll!\n"))
    assert [e.kind for e in seen] == ["ready"]


def test_a_steady_stretch_is_folded_whole() -> None:
    line = (
        "[2026-08-29 07:{:02d}:{:02d}] Decode batch, #running-req: 3, #token: 5, token usage: 0.17, accept len: {:.2f}, accept rate: 0.67, "
        "cuda graph: True, gen throughput (token/s): 288.10, #queue-req: {}\n"
    )
    text = "".join(line.format(i // 60, i % 60, 2 + i % 7 / 10, i) for i in range(500))
    parser, fold = Parser(totals_only=True), Fold()
    folded = list(parser.feed(text.encode()))
    fold.extend(folded)
    fold.extend(parser.close())
    assert sum(isinstance(e, ev.SteadyRun) for e in folded) == 1
    s = fold.summary()
    assert (s.decode["count"], s.decode["accept_len_min"], s.decode["accept_len_max"]) == (500, 2.0, 2.6)
    assert isinstance(last := s.decode["last"], Mapping)
    assert last["queue_req"] == 499


# -- files -----------------------------------------------------------------------------------------------------------------------


def lines_of(tmp_path: Path, **options: Any) -> tuple[list[str], Any]:
    file = tmp_path / "server.log"
    file.write_text(LAUNCH)
    out: list[str] = []
    answer = logfile(talk=Silent(), file=(str(file),), out=out.append, **options)
    return out, answer


def test_series_is_csv_json_or_a_plot_of_the_same_rows(tmp_path: Path) -> None:
    csv, _ = lines_of(tmp_path, series="csv")
    rows, _ = lines_of(tmp_path, series="json")
    _, plot = lines_of(tmp_path, series="plot")
    assert len(csv) == 3
    assert csv[0].startswith("time,rank,running_req,")
    assert json.loads("\n".join(rows))[1]["gen_throughput"] == 299.04
    assert [json.loads(line.rstrip(",")) for line in rows[1:-1]], "one row a line"
    assert isinstance(plot, Series)
    assert [r["queue_req"] for r in plot.rows] == [9, 8]


def test_events_are_listed_one_a_line_with_their_kind(tmp_path: Path) -> None:
    out, answer = lines_of(tmp_path, events=True, json=True)
    assert answer is None
    kinds = [json.loads(line)["kind"] for line in out]
    assert kinds[0] == "server_args_line"
    assert kinds.count("decode") == 2
    assert "sk-do-not-show" not in "".join(out)


def test_compressed_and_several_files_are_read(tmp_path: Path) -> None:
    import zstandard

    packed, squeezed = tmp_path / "a.log.gz", tmp_path / "b.log.zst"
    packed.write_bytes(gzip.compress(LAUNCH.encode()))
    squeezed.write_bytes(zstandard.ZstdCompressor().compress(LAUNCH.encode()))
    answer = logfile(talk=Silent(), file=(str(packed), str(squeezed)), out=print)
    assert answer is not None
    files = answer.as_json()["files"]
    assert isinstance(files, list)
    assert [f["phase"] for f in files] == ["serving", "serving"]
    for pipe in (packed, squeezed):
        with pipe.open("rb") as stdin, pytest.MonkeyPatch.context() as patched:
            patched.setattr("sys.stdin", io.TextIOWrapper(stdin))
            answer = logfile(talk=Silent(), file=("-",), out=print)
        assert answer is not None
        assert answer.as_json()["phase"] == "serving"


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda p: p / "nothing.log", NotFound),
        (lambda p: p, UsageError),
        (lambda p: _written(p / "torn.gz", gzip.compress(b"x" * 10_000)[:40]), UsageError),
        (lambda p: _written(p / "torn.zst", b"\x28\xb5\x2f\xfd\x00\x01\x02"), UsageError),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_told_without_a_traceback(
    tmp_path: Path, make: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        logfile(talk=Silent(), file=(str(make(tmp_path)),), out=print)


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# -- secrets -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "api_key='hunter2hunter2'",
        "'admin_api_key': 'hunter2hunter2'",
        '"api_key": "hunter2hunter2"',
        '{\\"api_key\\": \\"hunter2hunter2\\"}',
        "--api-key hunter2hunter2 --port 1",
        "--api-key=hunter2hunter2",
        "HF_TOKEN=hunter2hunter2 python3 -m x",
        "Authorization: Bearer hunter2hunter2",
        "Authorization: Basic hunter2hunter2",
        "https://user:hunter2hunter2@proxy:3128/",
        "ssl_keyfile_password='hunter2hunter2'",
        "api_key='it\\'s hunter2hunter2'",
        "AWS_SECRET_ACCESS_KEY=hunter2hunter2",
    ],
)
def test_secrets_are_masked_wherever_they_stand(text: str) -> None:
    masked = mask(f"before {text} after")
    assert "hunter2" not in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after")
    assert mask(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "max_total_tokens=4096",
        "#token: 12, token usage: 0.4",
        "api_key=None",
        "speculative_token_map='x.pt'",
        "key: value",
    ],
)
def test_what_is_no_secret_is_left_alone(text: str) -> None:
    assert mask(text) == text


def test_secret_words_of_an_argv_and_of_nested_values_are_masked() -> None:
    masked = mask_values(
        {"argv": ["--api-key", "hunter2", "--port", "1"], "a": {"admin_api_key": "hunter2"}, "max_total_tokens": 7}
    )
    assert masked == {"argv": ["--api-key", "***", "--port", "1"], "a": {"admin_api_key": "***"}, "max_total_tokens": 7}


def test_traffic_from_elsewhere_proves_readiness_however_it_is_folded() -> None:
    """An excerpt without the ready line: a request of another host is somebody's, one of the server's own may be the warm-up."""
    decode = "[2026-08-29 07:02:00] Decode batch, #running-req: 3, #token: 5, token usage: 0.17, #queue-req: 1\n" * 6
    access = '[2026-08-29 07:02:00] INFO:     {}:4711 - "POST /generate HTTP/1.1" 200 OK\n'
    for client, ready in (("10.0.0.9", True), ("127.0.0.1", None)):
        text = decode + access.format(client) + decode
        fold, parser = Fold(), Parser()
        fold.extend([*parser.feed(text.encode()), *parser.close()])
        assert read(text).ready is ready
        assert fold.summary() == read(text)


HOSTILE = {
    "brackets": "[" * 60_000,
    "open string": "[2026-05-01 10:00:00] server_args=ServerArgs(a='" + "x" * 90_000,
    "nesting": "[2026-05-01 10:00:00] server_args=ServerArgs(" + "a=(" * 20_000,
    "secret words": "[2026-05-01 10:00:00] api_key=" + "a-" * 20_000,
    "half bars": "\r 50%|###| 1/2 [" * 4_000,
    "half percent": "50% Completed | " * 4_000,
    "pairs": "[2026-05-01 10:00:00] Decode batch, " + "#a: 1, " * 9_000,
    "digits": "[2026-05-01 10:00:00] Decode batch, #token: " + "9" * 50_000 + "\n" + "9" * 50_000,
    "sizes": "[2026-05-01 10:00:00] max_total_num_tokens=" + "9" * 50_000 + ", context_len=" + "9" * 9_000,
    "exceptions": "ValueError: x\n" * 6_000,
    "frames": '  File "x", line 1, in f\n' * 6_000,
    "wrapped": "[2026-05-01 10:00:00] Decode batch, #running-req: 1\n" + ("a: 1, " * 20 + "\n") * 900,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_lines_take_time_in_proportion_to_their_length(name: str) -> None:
    """A quadratic pattern would need minutes for these."""
    import time

    began = time.process_time()
    json.dumps(read(HOSTILE[name] + "\n").as_json(), allow_nan=False)
    assert time.process_time() - began < 2
