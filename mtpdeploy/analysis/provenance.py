"""Under which conditions a measurement was made: what a fair comparison holds equal, or says first that it doesn't."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class Provenance:
    """Stands in a run's meta under `provenance`. None means unknown, which a comparison says too.

    args:           SGLang arguments by canonical name, as requested.
    capacity:       effective figures of the running server: max_running_requests, slots, slots_per_request, kv_tokens.
    client_place:   `host` (beside the server), `here` (through a tunnel), `url` (an endpoint that somebody else runs).
    prompts_sha256: over the prompts as sent, in order.
    contention:     foreign work seen meanwhile, a sentence each; () = looked for and none seen; None = not looked for.
    session, arm:   arms measured interleaved in one session share its id; only then do they share the day's conditions.
    tuned:          the settings were chosen by a search for this arm (report: each its own best), rather than shared.
    """

    host: str | None = None
    gpu: str | None = None
    gpu_count: int | None = None
    gpu_memory_gb: float | None = None
    driver: str | None = None
    sglang_version: str | None = None
    model: str | None = None
    model_hash: str | None = None
    profile: str | None = None
    service: str | None = None
    launch_id: str | None = None
    boot: int | None = None
    args: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, object] = field(default_factory=dict)
    capacity: Mapping[str, object] = field(default_factory=dict)
    workload: str | None = None
    output_tokens: int | None = None
    input_tokens: int | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    seed: int | None = None
    prompts: str | None = None
    prompts_sha256: str | None = None
    client_place: str | None = None
    endpoint: str | None = None
    accept_length_source: str | None = None
    prefix_cache_hit_rate: float | None = None
    contention: tuple[str, ...] | None = None
    simulated: bool | None = None
    simulated_clock: float | None = None
    session: str | None = None
    arm: str | None = None
    tuned: bool | None = None
    mtpdeploy_version: str | None = None

    def as_json(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, value: object) -> Provenance:
        """Reads what any release wrote: unknown keys are dropped, a value of the wrong type counts as unknown."""
        given = value if isinstance(value, Mapping) else {}
        known: dict[str, object] = {}
        for f in fields(cls):
            item = given.get(f.name)
            kind = str(f.type)
            if item is None:
                continue
            if kind.startswith("Mapping"):
                ok = isinstance(item, Mapping)
            elif kind.startswith("tuple"):
                ok = isinstance(item, (list, tuple))
                item = tuple(str(one) for one in item) if ok else item
            elif kind.startswith("bool"):
                ok = isinstance(item, bool)
            elif kind.startswith("int"):
                ok = isinstance(item, int) and not isinstance(item, bool)
            elif kind.startswith("float"):
                ok = isinstance(item, (int, float)) and not isinstance(item, bool)
            else:
                ok = isinstance(item, str)
            if ok:
                known[f.name] = item
        return cls(**known)  # type: ignore[arg-type]
