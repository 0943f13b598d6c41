"""One record's text → its event. Formats of SGLang 0.3 … 0.5.23; where each stands in the source is said in the pattern's comment.

Key/value pairs are read wherever SGLang prints pairs, so a field added between two others changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from mtpdeploy.sglang.logs import events as ev
from mtpdeploy.sglang.masking import mask

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE)

# Keys of batch records without blanks, '#', units: the words themselves may be wrapped anywhere.
_BATCH_KEYS = {
    "runningreq": "running_req",
    "token": "token",
    "tokenusage": "token_usage",
    "fulltoken": "full_token",
    "fulltokenusage": "full_token_usage",
    "swatoken": "swa_token",
    "swatokenusage": "swa_token_usage",
    "mambanum": "mamba_num",
    "mambausage": "mamba_usage",
    "acceptlen": "accept_len",
    "acceptrate": "accept_rate",
    "caplen": "cap_len",
    "blockacceptlen": "block_accept_len",
    "cudagraph": "graph",
    "npugraph": "graph",
    "cpugraph": "graph",
    "xpugraph": "graph",
    "musagraph": "graph",
    "genthroughput": "gen_throughput",
    "inputthroughput": "input_throughput",
    "queuereq": "queue_req",
    "pendingtoken": "pending_token",
    "newseq": "new_seq",
    "newtoken": "new_token",
    "cachedtoken": "cached_token",
    "cachehitrate": "cache_hit_rate",
    "preallocatedusage": "prealloc_usage",
    "prealloc_usage": "prealloc_usage",
    "preallocusage": "prealloc_usage",
    "preallocreq": "prealloc_req",
    "transferreq": "transfer_req",
    "retractedreq": "retracted_req",
}
_BATCH = re.compile(r"(Decode|Prefill) batch(?: ?\[\d+\])?(?=[,.: ]|$)")
_PAIR = re.compile(r"#?([A-Za-z][\w .()/#-]*?)\s*:\s*([^,]*)(?:,|$)")
_UNIT = re.compile(r"\([^)]*\)")
_FRAGMENT = re.compile(r"accept len: ?\d[\d.]*, accept rate: ?\d")

# A delimiter must follow: half a word of a cut line is no value.
_TYPE = re.compile(r"\btype=([\w.]+)(?=[, ])")
_QUANT = re.compile(r"\bquant=([\w.-]+)(?=[, ])")
_ELAPSED = re.compile(r"\b(?:elapsed=|Time elapsed: ?)(-?\d+(?:\.\d+)?)(?= ?s\b)")
_AVAIL = re.compile(r"\bavail mem=(-?\d+(?:\.\d+)?) ?GB")
_USAGE = re.compile(r"\bmem usage=(-?\d+(?:\.\d+)?) ?GB")
_KV_TOKENS = re.compile(r"#tokens: ?(-?\d{1,15})(?=\D)")
_KV_DTYPE = re.compile(r"dtype: ?([\w.]+)(?=,)")
_KV_K = re.compile(r"\bK size: ?(-?\d+\.?\d*) ?GB")
_KV_V = re.compile(r"\bV size: ?(-?\d+\.?\d*) ?GB")
_KV_SIZE = re.compile(r"\bKV size: ?(-?\d+\.?\d*) ?GB")
_MAMBA = {
    "slots": re.compile(r"max_mamba_cache_size: ?(-?\d{1,15})(?=\D)"),
    "conv": re.compile(r"conv_state size: ?(-?\d+\.?\d*) ?GB"),
    "ssm": re.compile(r"(?<!_)ssm_state size: ?(-?\d+\.?\d*) ?GB"),
    "intermediate": re.compile(r"intermediate_ssm_state_cache size: ?(-?\d+\.?\d*) ?GB"),
    "intermediate_conv": re.compile(r"intermediate_conv_window_cache size: ?(-?\d+\.?\d*) ?GB"),
}
_GRAPH = re.compile(
    r"Capture (?P<graph>[\w -]*?) ?\b(?:cuda|npu|cpu|xpu|hpu|hip|musa|mlu)? ?graph (?P<end>begin|end)\b", re.IGNORECASE
)
_GRAPH_BS = re.compile(r"\bbs[ =]\[([\d, ]*)\]")
_WHOLE = re.compile(r"\b\d{1,9}\b")
_SIZES = re.compile(
    r"\b(max_total_num_tokens|chunked_prefill_size|max_prefill_tokens|max_running_requests|context_len|available_gpu_mem)=(-?\d+(?:\.\d+)?)(?=[,\s]|$)"
)
_CAPPED = re.compile(
    r"max_running_requests is capped to (\d{1,15}) by the mamba state cache \(max_mamba_cache_size=(-?\d{1,15}), (\d{1,15}) state slots per request\)"
)
_REDUCED = re.compile(r"max_running_requests was reduced from the requested (\d{1,15}) to (\d{1,15})\b")
_SWA_USE = re.compile(r"full_layer_tokens=(\d{1,15}), swa_layer_tokens=(\d{1,15})(?=\D|$)")
_SWA_POOL = re.compile(
    r"SWAKVPool mem usage: ?(-?\d+\.?\d*) ?GB, swa size: ?(\d{1,15}), full size: ?(\d{1,15})(?=\D|$)"
)
_ACCESS = re.compile(r"""INFO:\s+(\S+?) - "([A-Z]+) (\S*)(?: HTTP/[\d.]+)?" (\d{3})\b""")
_SUBPROCESS = re.compile(r"Subprocess \S+ \(pid=\d+\) (?:crashed|exited) with exit code (-?\d{1,15})")
_DIED = re.compile(r"died during initialization \(exit code: ?(-?\d{1,15}|None)\)")
_EXIT = re.compile(
    r"(?:exited with (?:exit )?(?:code|status)|exit(?:ed)? ?code\s*:?|Exited \(|exit status|return(?:ed)? ?code\s*:?|\brc=|rc:)\s*(-?\d{1,3})\b",
    re.IGNORECASE,
)
_UNIT_END = re.compile(r"Main process exited, code=(killed|dumped|exited), status=(\d{1,15})")  # systemd
_HEADER = re.compile(r"# mtpdeploy launch (\S+) boot (\d{1,15})\b")


def number(text: str | None) -> float | int | None:
    """The number that `text` is, whole; None for anything else, also for nan and inf."""
    if text is None or len(text) > 24 or not _NUMBER.fullmatch(text):
        return None
    if text.lstrip("-").isdigit():
        return int(text)
    value = float(text)
    return value if math.isfinite(value) else None


def _found(pattern: re.Pattern[str], text: str) -> float | None:
    m = pattern.search(text)
    return float(m[1]) if m else None


def _whole(pattern: re.Pattern[str], text: str) -> int | None:
    m = pattern.search(text)
    return int(m[1]) if m else None


def pairs(text: str) -> dict[str, ev.Scalar]:
    """Key/value pairs of a batch record. A key seen twice with different values is dropped: one of them is wrong.

    A percentage keeps its number (`cache hit rate: 3.45%` → 3.45). Text values are kept only for unknown keys.
    """
    values: dict[str, ev.Scalar] = {}
    conflicts = set()
    for m in _PAIR.finditer(text):
        raw = m[2].strip().rstrip(".") if m[2].strip().endswith(".") else m[2].strip()
        name = _UNIT.sub("", m[1])
        squeezed = re.sub(r"[^a-z0-9_]", "", name.lower())
        key = _BATCH_KEYS.get(squeezed) or re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        value: ev.Scalar
        value = raw == "True" if raw in ("True", "False") else number(raw.removesuffix("%"))
        if key in values and values[key] != value:
            conflicts.add(key)
        values[key] = value
    return {k: v for k, v in values.items() if k not in conflicts}


def decode(time: str | None, rank: str | None, body: str) -> ev.Decode | ev.Prefill | None:
    """A batch record, or None where `body` is none."""
    m = _BATCH.match(body)
    if m:
        values = pairs(body[m.end() :].lstrip(",.: "))
        return (ev.Decode if m[1] == "Decode" else ev.Prefill)(time, rank, body, values)
    if _FRAGMENT.match(body):  # a decode record whose beginning was cut off
        return ev.Decode(time, rank, body, pairs(body))
    return None


def _weights_end(time: str | None, rank: str | None, body: str) -> ev.Event | None:
    # model_runner.py; ≤0.5.6 has no elapsed, 0.4 no mem usage; overlap mode prints a second line without values.
    if "Committed real weights" in body:
        return None
    kind, quant = _TYPE.search(body), _QUANT.search(body)
    return ev.WeightsEnd(
        time,
        rank,
        body,
        kind and kind[1],
        quant and quant[1],
        _found(_USAGE, body),
        _found(_AVAIL, body),
        _found(_ELAPSED, body),
    )


def _kv(time: str | None, rank: str | None, body: str) -> ev.Event:
    # mem_cache/memory_pool.py; kv_pool_runtime.py for post-capture sizing, whose first line is an upper bound.
    dtype = _KV_DTYPE.search(body)
    return ev.KvCache(
        time,
        rank,
        body,
        _whole(_KV_TOKENS, body + " "),
        _found(_KV_K, body),
        _found(_KV_V, body),
        _found(_KV_SIZE, body),
        dtype and dtype[1],
        "upper bound" in body,
    )


def _mamba(time: str | None, rank: str | None, body: str) -> ev.Event:
    return ev.MambaCache(
        time,
        rank,
        body,
        _whole(_MAMBA["slots"], body + " "),
        _found(_MAMBA["conv"], body),
        _found(_MAMBA["ssm"], body),
        _found(_MAMBA["intermediate"], body),
        _found(_MAMBA["intermediate_conv"], body),
    )


def _sizes(time: str | None, rank: str | None, body: str) -> ev.Event:
    # managers/scheduler.py, TP0 of each DP replica; chunked_prefill_size and available_gpu_mem are younger than the rest.
    values: dict[str, int | float] = {}
    for m in _SIZES.finditer(body):
        found = number(m[2])
        if found is not None:
            values["available_gpu_mem_gb" if m[1] == "available_gpu_mem" else m[1]] = found
    return ev.Sizes(time, rank, body, values)


def _graph(time: str | None, rank: str | None, body: str) -> ev.Event | None:
    listed = _GRAPH_BS.search(body)
    bs = tuple(int(n) for n in _WHOLE.findall(listed[1])) if listed else ()
    m = _GRAPH.match(body)
    if not m:
        # Up to 0.5.13 the sizes stand on a line of their own, behind the `begin`.
        return (
            ev.GraphBegin(time, rank, body, "", None, bs) if bs and body.startswith("Capture cuda graph bs") else None
        )
    name = re.sub(r"\s+", " ", m["graph"].strip().lower())
    if m["end"].lower() == "begin":
        return ev.GraphBegin(time, rank, body, name, _found(_AVAIL, body), bs)
    return ev.GraphEnd(time, rank, body, name, _found(_ELAPSED, body), _found(_USAGE, body), _found(_AVAIL, body), bs)


def _capped(time: str | None, rank: str | None, body: str) -> ev.Event | None:
    if m := _CAPPED.match(body):
        return ev.Capped(time, rank, body, "mamba", int(m[1]), int(m[2]), int(m[3]))
    if m := _REDUCED.match(body):
        return ev.Capped(time, rank, body, "kv", int(m[2]), None, None)
    return None


def _swa(time: str | None, rank: str | None, body: str) -> ev.Event | None:
    if m := _SWA_POOL.search(body):
        return ev.SlidingWindow(time, rank, body, int(m[3]), int(m[2]), float(m[1]))
    if m := _SWA_USE.search(body):
        return ev.SlidingWindow(time, rank, body, int(m[1]), int(m[2]), None)
    return None


def _info(time: str | None, rank: str | None, body: str) -> ev.Event | None:
    if m := _ACCESS.match(body):
        return ev.Access(time, rank, body, m[1], m[2], m[3], int(m[4]))
    message = body.split(":", 1)[1].strip()
    if message.startswith("Uvicorn running on"):
        return ev.Http(time, rank, body, "listening")
    if message.startswith(
        ("Started server process", "Waiting for application startup", "Application startup complete")
    ):
        return ev.Http(time, rank, body, "starting")
    if message.startswith(
        (
            "Shutting down",
            "Waiting for application shutdown",
            "Finished server process",
            "Application shutdown complete",
        )
    ):
        return ev.Http(time, rank, body, "stopping")
    return None


def _stop(time: str | None, rank: str | None, body: str) -> ev.Event:
    return ev.StopAsked(time, rank, body)


def _dead(time: str | None, rank: str | None, body: str) -> ev.Event:
    m = _SUBPROCESS.match(body) or _DIED.search(body)
    return ev.Consequence(time, rank, body, True, int(m[1]) if m and m[1] != "None" else None)


def _aftermath(time: str | None, rank: str | None, body: str) -> ev.Event:
    return ev.Consequence(time, rank, body, False, None)


# How a record begins → what reads it. Looked at only for records that are not batch records.
_BY_START: tuple[tuple[str, Callable[[str | None, str | None, str], ev.Event | None]], ...] = (
    ("INFO:", _info),
    ("Load weight end", _weights_end),
    ("Load weight begin", lambda t, r, b: ev.WeightsBegin(t, r, b, _found(_AVAIL, b))),
    ("KV Cache is allocated", _kv),
    ("Post-capture KV sizing: KV cache allocated", _kv),
    ("Mamba Cache is allocated", _mamba),
    ("Memory pool end", lambda t, r, b: ev.PoolEnd(t, r, b, _found(_AVAIL, b))),
    ("max_total_num_tokens=", _sizes),
    ("Capture ", _graph),
    ("max_running_requests ", _capped),
    ("SWAKVPool mem usage", _swa),
    ("Use sliding window memory pool", _swa),
    ("Use Sliding window memory pool", _swa),
    ("Init torch distributed begin", lambda t, r, b: ev.DistInit(t, r, b, False)),
    ("Init torch distributed end", lambda t, r, b: ev.DistInit(t, r, b, True)),
    ("Init parallel begin", lambda t, r, b: ev.DistInit(t, r, b, False)),
    ("Init parallel end", lambda t, r, b: ev.DistInit(t, r, b, True)),
    ("Init nccl begin", lambda t, r, b: ev.DistInit(t, r, b, False)),
    ("Init nccl end", lambda t, r, b: ev.DistInit(t, r, b, True)),
    ("Memory baseline taken", lambda t, r, b: ev.DistInit(t, r, b, True)),
    ("The server is fired up and ready to roll", lambda t, r, b: ev.Ready(t, r, b)),
    ("KV cache pool is full. Retract requests", lambda t, r, b: ev.Retraction(t, r, b)),
    ("Decode out of memory happened", lambda t, r, b: ev.Retraction(t, r, b)),  # ≤0.4: it retracts and goes on
    (
        "Health check failed. Server couldn't get a response from detokenizer",
        lambda t, r, b: ev.HealthCheckFailed(t, r, b),
    ),
    ("SIGTERM received", _stop),
    ("Gracefully exiting", _stop),
    ("Received SIGTERM", _stop),
    ("SIGINT received", _stop),
    ("Received sigquit from a child proc", _dead),
    ("SIGQUIT received", _dead),
    ("Subprocess ", _dead),
    (
        "Rank ",
        lambda t, r, b: _dead(t, r, b) if "scheduler is dead" in b or "died during initialization" in b else None,
    ),
    ("Initialization failed. Please see the error messages above", _dead),
    ("Sleeping 5 seconds before crash diagnostics", _aftermath),
    ("No live scheduler processes found", _aftermath),
    ("kill_process_tree called", _aftermath),
    ("Pyspy dump for PID", _aftermath),
    ("Dumping requests before crash", _aftermath),
    ("Exit code: ", lambda t, r, b: ev.Consequence(t, r, b, True, int(m[1])) if (m := _EXIT.search(b)) else None),
    ("Eof", _aftermath),
    ("Max running requests is reset to", lambda t, r, b: ev.Preamble(t, r, b, False)),
)
_STARTS = tuple(dict.fromkeys(start for start, _ in _BY_START))

# Lines that SGLang prints without its prefix, or that are so telling that a cut or missing prefix does not matter.
_UNSTAMPED_STARTS = tuple(
    s for s in _STARTS if s not in ("Capture ", "Subprocess ", "Rank ", "Eof", "Exit code: ", "max_running_requests ")
)


def known_start(body: str) -> bool:
    """Whether a line without any prefix is a record of SGLang all the same (its prefix cut off, or uvicorn's)."""
    return body.startswith(_UNSTAMPED_STARTS) or _BATCH.match(body) is not None or _FRAGMENT.match(body) is not None


def record(time: str | None, rank: str | None, body: str) -> ev.Event | None:
    """The event of a record's body, or None where no known format fits."""
    if (batch := decode(time, rank, body)) is not None:
        return batch
    if body.startswith(_STARTS):
        for start, read in _BY_START:
            if body.startswith(start):
                return read(time, rank, body)
    return None


_LONE = {
    "Killed": (True, -9),
    "Segmentation fault": (True, -11),
    "Segmentation fault (core dumped)": (True, -11),
    "Aborted": (True, -6),
    "Aborted (core dumped)": (True, -6),
    "EOFError": (False, None),
}
_LONE_SHELL = re.compile(r"\S*(?:sh|bash|zsh)?: ?(?:line \d+: *)?\d+ (Killed|Segmentation fault|Aborted)\b")
_WRAPPER_END = re.compile(
    r"(?:SGLang )?[Ss]erver (?:task|process) (?:ended|exited|terminated|has (?:exited|ended|died))\b"
)
_WRAPPER_TIMEOUT = re.compile(
    r"[Ss]erver (?:failed to (?:start|launch|become ready)|did(?: not|n't) (?:start|become ready|come up|respond)|is not ready).{0,60}?"
    r"(?:within|in|after) .{0,30}?(?:time ?out|\d+ ?(?:s\b|sec|min))|"
    r"[Tt]imed? ?out (?:after .{0,40})?(?:while )?waiting for .{0,40}?server|Timeout waiting for (?:the )?(?:sglang|SGLang|server)|"
    r"(?:launch|startup|start-up|readiness) (?:probe )?tim(?:ed? ?out|eout) (?:after|of)",
)
_FOREIGN = (
    (
        "vllm",
        re.compile(
            r"\bvLLM API server version|\bvLLM engine|\(EngineCore|\(APIServer pid=|\bvllm\.entrypoints|"
            r"\[(?:api_server|llm_engine|core|async_llm|gpu_model_runner)\.py:\d+\]"
        ),
    ),
    (
        "router",
        re.compile(
            r"\bsglang_router(?:_rs)?(?:::|\b.*Starting router)|\bsmg::|\bsgl_model_gateway|"
            r"Router (?:ready|listening|started) |policy=CacheAware|smg (?:launch|serve)"
        ),
    ),
)


def wrapper_says(text: str) -> ev.WrapperSays | None:
    """What a script around SGLang reports in this line, also where it is an exception's message."""
    if "erver" not in text and "imed out" not in text and "imeout" not in text:
        return None
    if _WRAPPER_TIMEOUT.search(text):
        return ev.WrapperSays(None, None, mask(text.strip()), "timeout", None)
    if _WRAPPER_END.search(text):
        m = _EXIT.search(text)
        return ev.WrapperSays(None, None, mask(text.strip()), "ended", int(m[1]) if m else None)
    return None


def raw_line(body: str) -> ev.Event | None:
    """The event of a line without SGLang's prefix that is still known: shells, wrappers, other programs; None otherwise."""
    stripped = body.strip()
    if m := _HEADER.match(stripped):
        return ev.LaunchHeader(None, None, mask(stripped), m[1], int(m[2]))
    if stripped in _LONE:
        dead, code = _LONE[stripped]
        return ev.Consequence(None, None, stripped, dead, code)
    if m := _LONE_SHELL.match(stripped):
        return ev.Consequence(None, None, mask(stripped), True, _LONE[m[1]][1])
    if "launch_server.py:" in body and "UserWarning" in body:
        return ev.Preamble(None, None, stripped, True)
    if stripped.startswith(("usage: sglang serve", "usage: launch_server.py")):
        return ev.Preamble(None, None, stripped, True)
    if "resource_tracker: There appear to be" in body:
        at = body.index("resource_tracker: There appear to be")
        return ev.Consequence(None, None, body[at:].strip(), False, None)
    if (said := wrapper_says(body)) is not None:
        return said
    if m := _UNIT_END.search(body):
        code = int(m[2])
        return ev.WrapperSays(None, None, mask(stripped), "ended", code if m[1] == "exited" else -code)
    if (m := _EXIT.search(body)) and len(body) < 400:
        return ev.WrapperSays(None, None, mask(stripped), "ended", int(m[1]))
    for program, pattern in _FOREIGN:
        if pattern.search(body):
            return ev.Foreign(None, None, mask(stripped)[:200], program)
    return None
