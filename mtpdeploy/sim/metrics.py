"""/metrics of the played server: the families, labels and buckets of 0.5.17 that say something about it.

Left out: those of features that are never on here (sliding windows, disaggregation, routing keys, LoRA, utilization).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

LATENCY_S = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0,
    600.0, 1200.0, 1800.0, 2400.0,
)  # fmt: skip
FIRST_TOKEN_S = LATENCY_S[:18]
TOKEN_S = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8,
    1.0, 2.0, 4.0, 6.0, 8.0,
)  # fmt: skip
QUEUE_S = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 100.0)
TOKENS = (
    100.0, 300.0, 500.0, 700.0, 1000.0, 1500.0, 2000.0, 3000.0, 4000.0, 5000.0, 6000.0, 7000.0, 8000.0, 9000.0,
    10000.0, 12500.0, 15000.0, 17500.0, 20000.0, 25000.0, 30000.0, 40000.0, 60000.0, 80000.0, 100000.0, 200000.0,
)  # fmt: skip


@dataclass(slots=True)
class Histogram:
    """Prometheus' cumulative histogram."""

    bounds: Sequence[float]
    counts: list[float] = field(default_factory=list)
    total: float = 0.0
    count: float = 0.0

    def observe(self, value: float, times: int = 1, total: float | None = None) -> None:
        """`times` observations of `value`; `total` if their sum is another than value × times."""
        if not self.counts:
            self.counts = [0.0] * len(self.bounds)
        for place, bound in enumerate(self.bounds):
            if value <= bound:
                self.counts[place] += times
        self.count += times
        self.total += value * times if total is None else total

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        """Its samples; none before the first observation, as in the client library with labels."""
        if not self.count:
            return
        yield f"# TYPE sglang:{name} histogram"
        yield f"sglang:{name}_sum{_labels(labels)} {self.total}"
        for bound, seen in (*zip(self.bounds, self.counts, strict=True), (math.inf, self.count)):
            le = "+Inf" if bound == math.inf else str(bound)
            yield f"sglang:{name}_bucket{_labels({**labels, 'le': le})} {seen}"
        yield f"sglang:{name}_count{_labels(labels)} {self.count}"


@dataclass(slots=True)
class Totals:
    """Counters since the start; spec_tokens and spec_steps since the last flush. Streaming: by "true" and "false"."""

    prompt_tokens: dict[str, float] = field(default_factory=dict)
    generation_tokens: dict[str, float] = field(default_factory=dict)
    cached_tokens: int = 0
    requests: dict[str, float] = field(default_factory=dict)
    aborted: int = 0
    retracted: int = 0
    evicted_tokens: int = 0
    verify_calls: int = 0
    spec_tokens: int = 0
    spec_steps: int = 0
    prefill_passes: int = 0
    decode_passes: int = 0
    computed_tokens: int = 0
    decoded_tokens: int = 0
    http: dict[tuple[str, str, int], float] = field(default_factory=dict)
    ttft_s: dict[str, Histogram] = field(default_factory=dict)
    e2e_s: dict[str, Histogram] = field(default_factory=dict)
    token_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_S))
    queue_s: Histogram = field(default_factory=lambda: Histogram(QUEUE_S))
    prompts: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    generations: Histogram = field(default_factory=lambda: Histogram(TOKENS))


def count(into: dict[str, float], streaming: bool, value: float = 1) -> None:
    """Adds to the counter of streaming or other requests."""
    key = str(streaming).lower()
    into[key] = into.get(key, 0) + value


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""


def exposition(
    model: str,
    gauges: Mapping[str, float],
    phased: Mapping[str, Mapping[str, float]],
    totals: Totals,
) -> str:
    """The text of /metrics. gauges: name → value now. phased: name → phase → value, of the start and of the graphs."""
    base = {"engine_type": "unified", "model_name": model}
    rank = {**base, "moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0"}
    lines: list[str] = []
    for name, value in gauges.items():
        lines += [f"# TYPE sglang:{name} gauge", f"sglang:{name}{_labels(rank)} {float(value)}"]
    for name, phases in phased.items():
        lines.append(f"# TYPE sglang:{name} gauge")
        own = rank if name == "graph_memory_usage_gb" else base
        lines += [f"sglang:{name}{_labels({**own, 'phase': phase})} {value}" for phase, value in phases.items()]
    for name, split in (
        ("prompt_tokens_total", totals.prompt_tokens),
        ("generation_tokens_total", totals.generation_tokens),
        ("num_requests_total", totals.requests),
    ):
        lines.append(f"# TYPE sglang:{name} counter")
        lines += [f"sglang:{name}{_labels({**base, 'is_streaming': kind})} {float(n)}" for kind, n in split.items()]
    # like SGLang's, these appear with their first event
    for name, number in (
        ("cached_tokens_total", totals.cached_tokens),
        ("num_aborted_requests_total", totals.aborted),
        ("num_retracted_requests_total", totals.retracted),
        ("spec_verify_calls_total", totals.verify_calls),
    ):
        if number:
            lines += [f"# TYPE sglang:{name} counter", f"sglang:{name}{_labels(base)} {float(number)}"]
    if totals.evicted_tokens:
        lines += ["# TYPE sglang:evicted_tokens_total counter"]
        lines += [f'sglang:evicted_tokens_total{{cache_type="UnifiedRadixCache"}} {float(totals.evicted_tokens)}']
    for name, modes in (
        ("cuda_graph_passes_total", {"prefill_none": totals.prefill_passes, "decode_cuda_graph": totals.decode_passes}),
        ("realtime_tokens_total", {"prefill_compute": totals.computed_tokens, "decode": totals.decoded_tokens}),
    ):
        lines.append(f"# TYPE sglang:{name} counter")
        lines += [f"sglang:{name}{_labels({**rank, 'mode': mode})} {float(n)}" for mode, n in modes.items()]
    asked: dict[tuple[str, str], float] = {}
    for (method, path, _), n in totals.http.items():
        asked[method, path] = asked.get((method, path), 0) + n
    lines.append("# TYPE sglang:http_requests_total counter")
    lines += [f"sglang:http_requests_total{_labels({'endpoint': p, 'method': m})} {n}" for (m, p), n in asked.items()]
    lines.append("# TYPE sglang:http_responses_total counter")
    lines += [
        f"sglang:http_responses_total{_labels({'endpoint': p, 'method': m, 'status_code': str(s)})} {n}"
        for (m, p, s), n in totals.http.items()
    ]
    for name, by_kind in (
        ("time_to_first_token_seconds", totals.ttft_s),
        ("e2e_request_latency_seconds", totals.e2e_s),
    ):
        for kind, seen in by_kind.items():
            lines += seen.lines(name, {**base, "is_streaming": kind})
    lines += totals.token_s.lines("inter_token_latency_seconds", base)
    lines += totals.queue_s.lines("queue_time_seconds", rank)
    lines += totals.prompts.lines("prompt_tokens_histogram", base)
    lines += totals.generations.lines("generation_tokens_histogram", base)
    return "\n".join(lines) + "\n"
