"""The server's own counters: Prometheus text in, differences over a point out. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
STARTED = "process_start_time_seconds"  # of prometheus_client's own; vLLM has it
RANK = re.compile(r'(?:tp|pp|moe_ep)_rank="[1-9]')  # the same requests as at rank 0, seen from another rank
POSITION = re.compile(r'position="(\d+)"')
# Gauges that are a level per rank and must not be summed over ranks.
LEVELS = (
    "spec_accept_length",
    "spec_accept_rate",
    "spec_num_steps",
    "spec_num_draft_tokens",
    "token_usage",
    "cache_hit_rate",
)


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of /metrics, summed over labels (ranks, streaming or not). counters, histograms, gauges by name."""

    counters: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)

    @property
    def running(self) -> float | None:
        return self.gauges.get("sglang:num_running_reqs", self.gauges.get("vllm:num_requests_running"))

    @property
    def queued(self) -> float | None:
        return self.gauges.get("sglang:num_queue_reqs", self.gauges.get("vllm:num_requests_waiting"))

    @property
    def finished(self) -> float | None:
        """Requests so far, and output tokens so far, of any client."""
        return self.counters.get("sglang:num_requests_total", self.counters.get("vllm:request_success_total"))

    @property
    def generated(self) -> float | None:
        return self.counters.get("sglang:generation_tokens_total", self.counters.get("vllm:generation_tokens_total"))


def parse(text: str) -> Scrape:
    """Prometheus' text format; only sglang: and vllm: series. Unreadable lines and NaN are left out."""
    kinds: dict[str, str] = {}
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    histograms: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            parts = line.split()
            if len(parts) == 4:
                kinds[parts[2]] = parts[3]
            continue
        found = LINE.match(line)
        if not found or not found[1].startswith(("sglang:", "vllm:", STARTED)):
            continue
        name, labels = found[1], found[2] or ""
        if RANK.search(labels):
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if math.isnan(value):
            continue
        base, _, part = name.rpartition("_")
        if part in ("sum", "count", "bucket") and kinds.get(base) == "histogram":
            if part != "bucket":
                told = histograms.setdefault(base, {"sum": 0.0, "count": 0.0})
                told[part] += value
        elif kinds.get(name) == "counter" or kinds.get(name.removesuffix("_total")) == "counter" or part == "total":
            position = POSITION.search(labels)
            key = f"{name}:{position[1]}" if position else name
            counters[key] = counters.get(key, 0.0) + value
        elif name == STARTED or name.split(":", 1)[1] in LEVELS:
            gauges[name] = max(gauges.get(name, value), value)
        else:
            gauges[name] = gauges.get(name, 0.0) + value
    return Scrape(counters, histograms, gauges)


def difference(before: Scrape, after: Scrape) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """What counters and histograms gained. A series that is new began at 0; one that fell was reset, and is left out."""
    counters = {
        name: value - before.counters.get(name, 0.0)
        for name, value in after.counters.items()
        if value >= before.counters.get(name, 0.0)
    }
    histograms = {}
    for name, told in after.histograms.items():
        earlier = before.histograms.get(name, {"sum": 0.0, "count": 0.0})
        if told["count"] >= earlier["count"]:
            histograms[name] = {part: told[part] - earlier[part] for part in ("sum", "count")}
    return counters, histograms


def was_reset(before: Scrape, after: Scrape) -> bool:
    """A counter fell, or the process has another start time: the server was restarted in between."""
    if STARTED in before.gauges and after.gauges.get(STARTED, before.gauges[STARTED]) != before.gauges[STARTED]:
        return True
    names = ("sglang:num_requests_total", "sglang:generation_tokens_total", "vllm:generation_tokens_total")
    return any(after.counters.get(name, 0.0) < before.counters[name] for name in names if name in before.counters)
