"""What the analysis works on: the points of a run, and the requests behind each, as plain values.

Made from a run folder's points.json and records.jsonl by `mtpdeploy.store.measured`; nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mtpdeploy.analysis.provenance import Provenance

# No figure of a point is negative or as large as this; one that is comes from a damaged file and counts as unknown.
IMPLAUSIBLE = 1e12


@dataclass(frozen=True, slots=True)
class Sample:
    """One completed request.

    decode_tokens, decode_s: tokens after the first chunk and the time they took; None where the first chunk's size is
        unknown.
    accept_length: tokens a verify step, from the server's own count for this request; None without MTP or without
        that count.
    output: the answer's beginning, as token ids or as text, where it was kept.
    sent: a digest of the request as it was sent, salt included, where the output was kept: equal only for the same request.
    """

    prompt: str
    output_tokens: int
    e2e_s: float
    ttft_s: float | None = None
    decode_tokens: int | None = None
    decode_s: float | None = None
    input_tokens: int | None = None
    accept_length: float | None = None
    verify_steps: int | None = None
    category: str | None = None
    output: tuple[int, ...] | str | None = None
    sent: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Closed loop at `concurrency`, or open loop at `rate` requests/s. Orders as a sweep is read."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def order(self) -> tuple[int, float]:
        return (0, self.concurrency) if self.concurrency is not None else (1, self.rate or 0.0)

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return f"{self.rate:g} requests/s" if self.rate is not None else "unknown load"


@dataclass(frozen=True, slots=True)
class Pass:
    """One measurement of one load.

    A point, once. `figures` is its entry in points.json (CONTRACT's names and units).
    """

    load: Load
    figures: Mapping[str, object]
    samples: tuple[Sample, ...] = ()
    valid: bool = True
    invalid_because: tuple[str, ...] = ()

    @property
    def counts_for_speed(self) -> bool:
        """Whether its tok/s may be used: valid, or invalid only because the client looked late.

        A late client sees each arrival up to its lag late, which spoils latencies and hardly moves tok/s; `lateness` says
        by how much.
        """
        return self.valid or (bool(self.invalid_because) and all(map(_only_late, self.invalid_because)))

    @property
    def lateness(self) -> float:
        """The share by which a request may have ended earlier than the client saw; 0 for a valid pass."""
        lag, length = self.number("client", "loop_lag_p99_ms"), self.number("e2e_ms", "p50")
        return 0.0 if self.valid or not lag or not length else min(lag / length, 0.5)

    def number(self, *path: str) -> float | None:
        """A figure such as `number("ttft_ms", "p90")`; None where it is unknown."""
        value: object = self.figures
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if 0 <= value < IMPLAUSIBLE else None


def _only_late(reason: str) -> bool:
    return reason.startswith("the client was the bottleneck: its event loop was") and " it used " not in reason


@dataclass(frozen=True, slots=True)
class Measured:
    """A benchmark run as the analysis sees it.

    memory: the plan's budget, where the run has one. variant: what sets it apart from other settings of its profile.
    """

    run_id: str
    created_utc: str | None
    provenance: Provenance
    passes: tuple[Pass, ...]
    memory: Mapping[str, object] = field(default_factory=dict)
    variant: str = ""

    @property
    def name(self) -> str:
        """The profile, else the endpoint, else the run."""
        return self.provenance.profile or self.provenance.endpoint or self.run_id

    @property
    def label(self) -> str:
        """The name, with the settings that `told_apart` found to differ."""
        return f"{self.name} [{self.variant}]" if self.variant else self.name

    @property
    def simulated(self) -> bool:
        return self.provenance.simulated is True

    def loads(self) -> tuple[Load, ...]:
        return tuple(sorted({one.load for one in self.passes}, key=lambda load: load.order))


def told_apart(measurements: Sequence[Measured]) -> tuple[Measured, ...]:
    """The same; where runs of one profile had different arguments (`--set`), later ones carry the difference in their label.

    Without that, two settings would be taken for repeats of one.
    """
    first: dict[str, Mapping[str, object]] = {}
    for one in sorted(measurements, key=lambda one: one.created_utc or one.run_id):
        first.setdefault(one.name, one.provenance.args)
    return tuple(replace(one, variant=_variant(first[one.name], one.provenance.args)) for one in measurements)


def _variant(base: Mapping[str, object], args: Mapping[str, object]) -> str:
    changed = [name for name in sorted({*base, *args} - {"host", "port"}) if base.get(name) != args.get(name)]
    shown = [f"{name}={args.get(name, 'default')}" for name in changed[:3]]
    return ", ".join([*shown, *(["…"] if len(changed) > 3 else [])])
