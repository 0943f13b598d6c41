"""What a benchmark decides before, and what it keeps: load, requests, raw records, facts about each point, and the figures.

The order in time: RunSpec → (client) → Record, Measured → (metrics) → Point. Records and Measured are stored as they are;
every figure of a Point can be computed again from them, with no server.

This package also runs at the host under SGLang's own Python, so it imports the standard library and aiohttp only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

SCHEMA = 1  # of records.jsonl, measured.jsonl, spec.json and points.json; a reader takes any number up to its own

Api = Literal["sglang", "openai-chat", "openai"]
Process = Literal["closed", "poisson", "constant", "gamma", "ramp", "step", "trace"]


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `kind` is its class (code, maths, chat, summary, long, structured, random, file)."""

    id: str
    kind: str
    messages: tuple[Message, ...]

    @property
    def text(self) -> str:
        """For the completion routes where no chat template is known."""
        if len(self.messages) == 1:
            return self.messages[0].content
        return "\n\n".join(message.content for message in self.messages)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a point, complete before the point starts. `at_s`: open loop, seconds after the point's start."""

    index: int
    prompt: Prompt
    output_tokens: int
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class PointSpec:
    """The load of one point. Closed loop: `concurrency` lanes without think time. Open loop: `rate` requests/s.

    concurrency with an open loop caps the requests in flight: then it is neither, and is reported as `capped`.
    """

    index: int
    requests: tuple[Request, ...]
    process: Process = "closed"
    concurrency: int | None = None
    rate: float | None = None
    input_tokens: int | None = None
    output_tokens: int = 256
    warmup: tuple[Request, ...] = ()
    repeat: int = 0
    arm: str | None = None
    output_swept: bool = False  # the run has points of other output lengths

    @property
    def open_loop(self) -> bool:
        return self.process != "closed"

    @property
    def label(self) -> str:
        """`concurrency 4`, `2 requests/s poisson`, with what else tells it from the others."""
        name = f"concurrency {self.concurrency}" if not self.open_loop else self.process
        if self.rate is not None:
            name = f"{self.rate:g} requests/s {self.process}"
        if self.open_loop and self.concurrency:
            name += f", at most {self.concurrency}"
        if self.input_tokens:
            name += f", input {self.input_tokens}"
        if self.output_swept:
            name += f", output {self.output_tokens}"
        extras = (f"{self.arm}:" if self.arm else "", name, f"(repeat {self.repeat + 1})" if self.repeat else "")
        return " ".join(extra for extra in extras if extra)


@dataclass(frozen=True, slots=True)
class Stop:
    """When a sweep ends before its last value, and what the search looks for."""

    at_saturation: bool = False
    gain: float = 0.03  # saturated: output tok/s grew by less than this share over the last value
    slo: tuple[str, ...] = ()  # with a search: points that break it end it
    search: bool = False
    requests_fixed: bool = False  # the search keeps the number of requests a point; else twice the lanes at least


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A whole benchmark against one server. The API key is passed beside it, never inside it."""

    url: str
    model: str | None
    points: tuple[PointSpec, ...]
    api: Api | None = None  # None: find out
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = False
    timeout_s: float = 600.0  # without a byte from the server
    salt: bool = True
    nonce: str | None = None  # begins every salt; None: drawn. Runs with the same one send the same requests
    expect: Mapping[str, object] = field(default_factory=dict)  # launch_id and what else must hold during the run
    stop: Stop = field(default_factory=Stop)
    flush_cache: bool = False
    extra_body: Mapping[str, object] = field(default_factory=dict)
    gpu_samples: bool = True
    client_processes: int | None = None  # None: by each point's concurrency and rate


@dataclass(frozen=True, slots=True)
class Record:
    """One request as it was seen, the raw truth of the benchmark. Times in microseconds.

    start_us:   the request's bytes were handed to the kernel; counted from the point's start (negative never occurs).
    scheduled_us: open loop, when it should have been sent; else None.
    times_us:   arrival of each chunk that carried tokens (or text, where the server counts nothing), from start_us.
    tokens:     cumulative output tokens at each of those chunks; None where the server gives no count per chunk.
    output_tokens: of the server's own count (usage, meta_info); None if it gave none. Never guessed from the request.
    end_us:     the last byte, from start_us. None if it never came.
    error:      None for a complete answer. A failed record enters no average.
    spec_*:     acceptance of this request: verify steps, accepted drafts, proposed drafts, and the histogram
                (index = drafts accepted in one step), where the server tells.
    """

    point: int
    index: int
    prompt_id: str
    prompt_class: str
    output_limit: int
    start_us: int
    scheduled_us: int | None = None
    times_us: tuple[int, ...] = ()
    tokens: tuple[int, ...] | None = None
    end_us: int | None = None
    error: str | None = None
    error_kind: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    queue_s: float | None = None
    server_e2e_s: float | None = None
    spec_verify: int | None = None
    spec_correct: int | None = None
    spec_proposed: int | None = None
    spec_histogram: tuple[int, ...] | None = None
    retractions: int | None = None
    reconnects: int = 0
    lane: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def as_json(self) -> dict[str, object]:
        """One line of records.jsonl; what is None is left out."""
        told = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        for name in ("times_us", "tokens", "spec_histogram"):  # thousands of numbers: no look at each
            if name in told:
                told[name] = list(told[name])
        return told

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Record:
        known = {f.name: value[f.name] for f in fields(cls) if value.get(f.name) is not None}
        for name in ("times_us", "tokens", "spec_histogram"):
            if name in known:
                known[name] = tuple(known[name])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Sample:
    """The server's load while a point ran: seconds after its start, running and queued requests."""

    at_s: float
    running: float | None
    queued: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Facts about one point beside its records: when, which server, what else ran, and how the client did.

    counters:   difference of the server's counters over the point, by Prometheus name, summed over ranks; {} if it has none.
    histograms: the same for histograms: name → {"sum": s, "count": n}.
    client:     loop_lag_p99_ms, cpu_share (of its processes' cores), processes, uvloop, reconnects.
    gpu:        one mapping per sample: at_s, index, memory_used_gb, power_w, utilisation, energy_mj where the card counts it.
    server_before, server_after: identity (version, launch_id, boot, started) and effective limits.
    """

    point: int
    started_utc: str
    duration_s: float
    spec: Mapping[str, object] = field(
        default_factory=dict
    )  # concurrency, rate, process, repeat, arm, lengths, requests
    counters: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    client: Mapping[str, object] = field(default_factory=dict)
    gpu: tuple[Mapping[str, object], ...] = ()
    server_before: Mapping[str, object] = field(default_factory=dict)
    server_after: Mapping[str, object] = field(default_factory=dict)
    foreign: tuple[str, ...] | None = None  # other work seen at the server; None: could not be looked for
    windows_dropped: tuple[str, ...] = ()  # the other work seen in windows before this one, which do not count
    complete: bool = True  # False: interrupted; what was measured until then is kept

    def as_json(self) -> dict[str, object]:
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Measured:
        known = {f.name: value[f.name] for f in fields(cls) if value.get(f.name) is not None}
        known["samples"] = tuple(
            Sample(item["at_s"], item.get("running"), item.get("queued")) for item in known.get("samples", ())
        )
        known["gpu"] = tuple(known.get("gpu", ()))
        for name in ("foreign", "windows_dropped"):
            if name in known:
                known[name] = tuple(known[name])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of one quantity over the completed requests; None where there are too few of them.

    missing: samples that the highest absent percentile still needs, by percentile name.
    """

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None
    mean: float | None = None
    count: int = 0
    missing: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return {
            "p50": self.p50,
            "p90": self.p90,
            "p99": self.p99,
            "max": self.max,
            "mean": self.mean,
            "count": self.count,
            "missing": dict(self.missing),
        }


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of one point: `as_json()` is an element of `points` in the answer. Formulas: docs/metrics.md."""

    index: int
    concurrency: int | None
    rate: float | None
    requests: int
    completed: int
    failed: int
    input_tokens: int | None
    output_tokens: int | None
    duration_s: float | None
    output_tok_s: float | None
    output_tok_s_steady: float | None
    request_tok_s: Spread
    ttft_ms: Spread
    tpot_ms: Spread
    chunk_gap_ms: Spread
    stall_ms: Spread
    e2e_ms: Spread
    tokens_per_chunk: Mapping[str, int]
    accept_length: float | None
    accept_length_source: str | None
    valid: bool
    invalid_because: tuple[str, ...]
    # beyond the fixed keys
    process: str = "closed"
    arm: str | None = None
    repeat: int = 0
    input_length: int | None = None
    output_length: int | None = None
    total_tok_s: float | None = None
    requests_s: float | None = None
    steady: Mapping[str, object] = field(default_factory=dict)
    tpot_bounds_ms: tuple[float, float] | None = None
    ttft_scheduled_ms: Spread = field(default_factory=Spread)
    e2e_scheduled_ms: Spread = field(default_factory=Spread)
    lag_ms: Spread = field(default_factory=Spread)
    queue_ms: Spread = field(default_factory=Spread)
    accept_rate: float | None = None
    accept_rate_definition: str | None = None
    acceptance_by_position: tuple[float, ...] | None = None
    acceptance_by_class: Mapping[str, float] = field(default_factory=dict)
    verify_steps: int | None = None
    cached_share: float | None = None
    cached_share_source: str | None = None
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    server: Mapping[str, object] = field(default_factory=dict)
    gpu: Mapping[str, object] = field(default_factory=dict)
    goodput: Mapping[str, object] = field(default_factory=dict)
    client: Mapping[str, object] = field(default_factory=dict)
    marks: tuple[str, ...] = ()  # true and worth knowing, but no reason against the numbers: `measures queueing`, …
    complete: bool = True
    windows_dropped: int = 0

    def as_json(self) -> dict[str, object]:
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Point:
        known: dict[str, Any] = {f.name: value[f.name] for f in fields(cls) if f.name in value}
        for f in fields(cls):
            item = known.get(f.name)
            if "Spread" in str(f.type):
                given = item or {}
                known[f.name] = Spread(**{g.name: given[g.name] for g in fields(Spread) if g.name in given})
            elif "tuple" in str(f.type) and item is not None:
                known[f.name] = tuple(item)
        return cls(**known)


def _plain(value: object) -> object:
    if hasattr(value, "as_json"):
        return value.as_json()
    if isinstance(value, Sample):
        return {"at_s": value.at_s, "running": value.running, "queued": value.queued}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(item) for item in value]
    return value
