"""What one record of an SGLang log says, typed. Memory in GiB as SGLang prints it ("GB"), times in seconds.

A value that the text does not show is None. `text` is the record without prefixes, secrets masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Scalar = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Event:
    """A record. `time` and `rank` ("TP0", "DP2 TP2 EP2") as the prefix prints them; None where it has none."""

    time: str | None
    rank: str | None
    text: str

    @property
    def kind(self) -> str:
        """A stable name: `WeightsEnd` → `weights_end`."""
        name = type(self).__name__
        return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


BarKind = Literal["weights", "download", "graphs", "compile", "other"]


@dataclass(frozen=True, slots=True)
class LaunchHeader(Event):
    """`# mtpdeploy launch <id> boot <n> …`: a boot of one of our own launches begins."""

    launch_id: str
    boot: int


@dataclass(frozen=True, slots=True)
class Preamble(Event):
    """A line that SGLang prints only before its server_args. certain: no running server prints it."""

    certain: bool


@dataclass(frozen=True, slots=True)
class ServerArgsLine(Event):
    """`server_args=ServerArgs(…)` (≤0.5.18) or `server_args={…}` (≥0.5.19), secrets masked."""

    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class DistInit(Event):
    """`Init torch distributed begin/ends`, `Init parallel begin/ends` (≥0.5.21), `Memory baseline taken`."""

    done: bool


@dataclass(frozen=True, slots=True)
class WeightsBegin(Event):
    avail_gb: float | None


@dataclass(frozen=True, slots=True)
class WeightsEnd(Event):
    type: str | None
    quant: str | None
    mem_gb: float | None
    avail_gb: float | None
    elapsed_s: float | None


@dataclass(frozen=True, slots=True)
class MambaCache(Event):
    slots: int | None
    conv_gb: float | None
    ssm_gb: float | None
    intermediate_gb: float | None
    intermediate_conv_gb: float | None


@dataclass(frozen=True, slots=True)
class KvCache(Event):
    """One pool of keys and values. `size_gb` where the line has one number (MLA). provisional: an upper bound only."""

    tokens: int | None
    k_gb: float | None
    v_gb: float | None
    size_gb: float | None
    dtype: str | None
    provisional: bool


@dataclass(frozen=True, slots=True)
class SlidingWindow(Event):
    """Sizes of the two pools of a sliding-window model, in tokens; `total_gb` once they are allocated."""

    full_tokens: int | None
    swa_tokens: int | None
    total_gb: float | None


@dataclass(frozen=True, slots=True)
class PoolEnd(Event):
    avail_gb: float | None


@dataclass(frozen=True, slots=True)
class GraphBegin(Event):
    """bs: batch sizes to be captured, () where they are not printed."""

    graph: str
    avail_gb: float | None
    bs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GraphEnd(Event):
    """`graph` is the kind as printed, lower case ("target verify", "draft extend"); "" for the plain `Capture cuda graph`."""

    graph: str
    elapsed_s: float | None
    mem_gb: float | None
    avail_gb: float | None
    bs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes(Event):
    """The `max_total_num_tokens=` line: the effective limits."""

    values: Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class Capped(Event):
    """max_running_requests was lowered: to `limit`, by the state slots ("mamba") or by the KV cache ("kv")."""

    by: Literal["mamba", "kv"]
    limit: int
    slots: int | None
    slots_per_request: int | None


@dataclass(frozen=True, slots=True)
class Http(Event):
    """uvicorn is starting, listening, or shutting down."""

    state: Literal["starting", "listening", "stopping"]


@dataclass(frozen=True, slots=True)
class Access(Event):
    """An HTTP access line."""

    client: str
    method: str
    path: str
    status: int


@dataclass(frozen=True, slots=True)
class Ready(Event):
    """`The server is fired up and ready to roll!`"""


@dataclass(frozen=True, slots=True)
class Prefill(Event):
    values: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Decode(Event):
    """One decode record; keys as in the summary's `decode` (running_req, full_token_usage, accept_len, …), unknown ones kept."""

    values: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class SteadyRun(Event):
    """Many decode, prefill and access records that nothing interrupted, folded by the parser because only totals were asked for.

    posts: generation requests that were answered, counted to three; local: those came from the server's own host.
    """

    decodes: int
    first: Decode | None
    last: Decode | None
    accept_len_min: float | None
    accept_len_max: float | None
    posts: int
    local: bool


@dataclass(frozen=True, slots=True)
class Retraction(Event):
    """The KV pool was full and running requests were put back into the queue: pressure, not a failure."""


@dataclass(frozen=True, slots=True)
class HealthCheckFailed(Event):
    """Nothing came back from the detokenizer for 20 s: busy, or hung."""


@dataclass(frozen=True, slots=True)
class Bar(Event):
    """A progress bar. `what`: weights, download, graphs, compile or other."""

    what: BarKind
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class StopAsked(Event):
    """SIGTERM, a drain, Ctrl-C: somebody wanted the server to end."""


@dataclass(frozen=True, slots=True)
class Consequence(Event):
    """SIGQUIT, EOFError, a dead child: it tells that something died, never why. exit_code where it is printed."""

    dead: bool
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class WrapperSays(Event):
    """A script around SGLang reports: `ended`, or `timeout` while it waited for the server."""

    what: Literal["ended", "timeout"]
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class Traceback(Event):
    """A Python traceback, whole.

    owner: which part of SGLang reported it ("Scheduler", "warmup", "request", …); None if nothing claimed it.
    frames: the source files and functions, outermost first; messages: exception lines of all chained exceptions, the root first.
    """

    owner: str | None
    frames: tuple[str, ...]
    messages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sign(Event):
    """A line outside tracebacks that a failure signature matches."""

    cause: str


@dataclass(frozen=True, slots=True)
class Foreign(Event):
    """A line that only another program prints (vLLM, a router)."""

    program: str


@dataclass(frozen=True, slots=True)
class Note(Event):
    """Any other record with SGLang's prefix."""


@dataclass(frozen=True, slots=True)
class Raw(Event):
    """A line without a record's prefix that nothing recognises."""
