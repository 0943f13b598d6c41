"""What a log says, as one value: the schema of docs/log-summary.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

Phase = Literal[
    "before_args",
    "args",
    "dist_init",
    "weights",
    "pools",
    "graphs",
    "http_up",
    "warmup",
    "ready",
    "serving",
    "stopped",
    "exited",
    "crashed",
    "hung",
    "unknown",
]
# The phases of a launch in the order in which it goes through them.
LAUNCH: tuple[Phase, ...] = (
    "before_args",
    "args",
    "dist_init",
    "weights",
    "pools",
    "graphs",
    "http_up",
    "warmup",
    "ready",
    "serving",
)

Values = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Summary:
    """One boot, the last of the text. None means: not visible there. GiB, seconds, tokens; names as in docs/log-summary.md."""

    is_sglang: bool | None = None
    phase: Phase = "unknown"
    ready: bool | None = None
    cause: str | None = None
    failed_in: Phase | None = None
    evidence: tuple[str, ...] = ()
    consequences: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    launch_id: str | None = None
    boot: int | None = None
    simulated: bool | None = None
    simulated_acceptance: bool | None = None
    command: str | None = None
    server_args: Values | None = None
    weights: Values | None = None
    draft: Values | None = None
    mamba_cache: Values | None = None
    kv_cache: Values | None = None
    swa_cache: Values | None = None
    pool_end_avail_gb: float | None = None
    graph: Values | None = None
    graphs: tuple[Values, ...] = ()
    draft_graphs: tuple[Values, ...] = ()
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    context_len: int | None = None
    available_gpu_mem_gb: float | None = None
    decode: Values = field(default_factory=lambda: {"count": 0})
    rank: str | None = None
    ranks_seen: int | None = None
    failed_ranks: tuple[str, ...] = ()
    boots: int = 0
    ready_lines: int = 0
    retractions: int = 0
    capped_to: int | None = None
    slots_per_request: int | None = None
    exit_code: int | None = None

    def as_json(self) -> dict[str, object]:
        out: dict[str, object] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, tuple):
                value = [dict(v) if isinstance(v, Mapping) else v for v in value]
            elif isinstance(value, Mapping):
                value = _copied(value)
            out[f.name] = value
        return out


def _copied(values: Values) -> dict[str, object]:
    return {k: _copied(v) if isinstance(v, Mapping) else v for k, v in values.items()}


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a launch is, for a display. fraction: 0…1 of the phase's own work where a bar shows it."""

    phase: Phase
    text: str
    fraction: float | None = None
