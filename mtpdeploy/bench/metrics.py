"""From raw records to figures: pure, so `report` can compute everything again from a stored run.

Notation (docs/metrics.md has each formula, its unit and when it does not exist): t0 = send; c_1 … c_m = arrivals of the chunks
that carried tokens; n = output tokens by the server's count; k_1 = tokens of the first chunk; N = completed requests.
Only completed requests enter a figure. A value that cannot be known is None.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mtpdeploy.bench.values import Measured, Point, Record, Spread

# Samples without which a percentile says nothing. p90: one sample must lie beyond it. p99: with fewer than 459, the chance
# that not a single sample lies beyond the true p99 is over 1 % (0.99^459 = 0.01).
NEEDED = {"p50": 1, "p90": 10, "p99": 459}
LAG_LIMIT = 0.05  # of the median TTFT, for the p99 lag of an open loop and of the client's event loop
LOOP_LAG_FLOOR_MS = 10.0  # below this, a late event loop is what any busy machine does
CLIENT_CPU_LIMIT = 0.85  # of the cores of the client's processes
FAILED_LIMIT = 0.05  # share of failed requests beyond which the load was not what the point says
FOREIGN_TOKENS_LIMIT = 0.01  # share of foreign output tokens that health probes may explain
CACHED_LIMIT = 0.05  # share of the input beyond which TTFT measures the prefix cache
BATCHED_DELTAS = 2.0  # tokens per chunk without speculation


@dataclass(frozen=True, slots=True)
class Figures:
    """What one completed request shows. Milliseconds; tok_s in output tokens per second."""

    ttft_ms: float | None
    tpot_ms: float | None
    tpot_bounds_ms: tuple[float, float] | None
    e2e_ms: float | None
    tok_s: float | None
    gaps_ms: tuple[float, ...]
    stall_ms: float | None
    chunk_tokens: tuple[int, ...]
    lag_ms: float | None


def request_figures(record: Record) -> Figures:
    """One request's figures. E2E ends with the last chunk that carries tokens: usage and [DONE] are no part of the answer."""
    times = record.times_us
    if not times:
        return Figures(None, None, None, None, None, (), None, (), _lag_ms(record))
    n = record.output_tokens
    gaps = tuple((later - earlier) / 1000 for earlier, later in itertools.pairwise(times))
    decode_ms = (times[-1] - times[0]) / 1000
    tpot = bounds = None
    steps: tuple[int, ...] = ()
    if record.tokens:
        steps = (record.tokens[0], *(b - a for a, b in zip(record.tokens, record.tokens[1:], strict=False)))
    if n is not None and len(times) > 1:
        if record.tokens:
            rest = n - record.tokens[0]
            tpot = decode_ms / rest if rest > 0 else None
        elif n >= len(times):  # k_1 lies between 1 and n - (m - 1)
            bounds = (decode_ms / (n - 1), decode_ms / (len(times) - 1))
    e2e = times[-1] / 1000
    return Figures(
        ttft_ms=times[0] / 1000,
        tpot_ms=tpot,
        tpot_bounds_ms=bounds,
        e2e_ms=e2e,
        tok_s=n / e2e * 1000 if n is not None and e2e > 0 else None,
        gaps_ms=gaps,
        stall_ms=max(gaps) if gaps else None,
        chunk_tokens=steps,
        lag_ms=_lag_ms(record),
    )


def _lag_ms(record: Record) -> float | None:
    return None if record.scheduled_us is None else (record.start_us - record.scheduled_us) / 1000


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the order statistics (as numpy's default), of a sorted, non-empty sequence."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Iterable[float | None]) -> Spread:
    ordered = sorted(value for value in values if value is not None)
    count = len(ordered)
    if not count:
        return Spread(missing=dict(NEEDED))
    named = {name: quantile(ordered, int(name[1:]) / 100) for name, needed in NEEDED.items() if count >= needed}
    return Spread(
        **named,
        max=ordered[-1],
        mean=math.fsum(ordered) / count,
        count=count,
        missing={name: needed - count for name, needed in NEEDED.items() if count < needed},
    )


# -- service level objectives


LIMIT = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=|<|>)\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*", re.ASCII)
SPREAD_KEY = re.compile(
    r"(ttft_scheduled|e2e_scheduled|ttft|tpot|e2e|chunk_gap|stall|queue|lag)_(p50|p90|p99|max|mean)_ms"
)
RATE_KEY = re.compile(r"(request)_(p50|p90)_tok_s")
PLAIN_KEYS = ("output_tok_s", "output_tok_s_steady", "total_tok_s", "requests_s", "accept_length")
KEYS_TOLD = (
    "ttft_p90_ms, tpot_p90_ms (or per_token_p90_ms), e2e_p90_ms, chunk_gap_p90_ms, stall_p90_ms, queue_p90_ms (each also with p50, "
    f"p99, max, mean), request_p50_tok_s, {', '.join(PLAIN_KEYS)}"
)


@dataclass(frozen=True, slots=True)
class Limit:
    """One objective, such as `tpot_p90_ms<20`."""

    key: str
    below: bool
    inclusive: bool
    bound: float

    def __str__(self) -> str:
        return f"{self.key}{'<' if self.below else '>'}{'=' if self.inclusive else ''}{self.bound:g}"

    def holds(self, value: float) -> bool:
        if value == self.bound:
            return self.inclusive
        return value < self.bound if self.below else value > self.bound

    def of(self, point: Point) -> float | None:
        """The point's value under this objective's key; None where the point has too few samples."""
        if found := SPREAD_KEY.fullmatch(self.key):
            value = getattr(getattr(point, f"{found[1]}_ms"), found[2])
        elif found := RATE_KEY.fullmatch(self.key):
            value = getattr(point.request_tok_s, found[2])
        else:
            value = getattr(point, self.key)
        return None if value is None else float(value)

    def undecidable(self, requests: int, what: str) -> str | None:
        """Why a load of so many requests cannot decide this objective; None where it can. what: the load, in a word.

        A percentile of too few requests is unknown, and what is unknown does not hold.
        """
        found = SPREAD_KEY.fullmatch(self.key) or RATE_KEY.fullmatch(self.key)
        needed = NEEDED.get(found[2], 0) if found else 0
        if needed <= requests:
            return None
        return f"{self} needs {needed} requests a {what}: give --requests {needed}, or use p50"

    def of_request(self, figures: Figures) -> float | None:
        """The same quantity of one request; None where a request has no such quantity."""
        found = SPREAD_KEY.fullmatch(self.key)
        name = found[1] if found else "request" if RATE_KEY.fullmatch(self.key) else None
        lag = figures.lag_ms or 0.0
        if name == "ttft_scheduled":
            return None if figures.ttft_ms is None else figures.ttft_ms + lag
        if name == "e2e_scheduled":
            return None if figures.e2e_ms is None else figures.e2e_ms + lag
        if name == "chunk_gap":
            return figures.stall_ms
        return {
            "ttft": figures.ttft_ms,
            "tpot": figures.tpot_ms,
            "e2e": figures.e2e_ms,
            "stall": figures.stall_ms,
            "lag": figures.lag_ms,
            "request": figures.tok_s,
        }.get(name or "")


def parse_slo(text: str) -> tuple[Limit, ...]:
    """`ttft_p90_ms<500,tpot_p90_ms<20` → limits; per_token_ is another name of tpot_. ValueError says which part is wrong and what would be right."""
    limits = []
    for part in text.split(","):
        if not part.strip():
            continue
        found = LIMIT.fullmatch(part)
        if not found:
            raise ValueError(
                f"{part.strip()!r} is no objective; write such as ttft_p90_ms<500, with one of {KEYS_TOLD}"
            )
        key, sign, bound = found.groups()
        key = key.replace("per_token_", "tpot_") if key.startswith("per_token_") else key
        if not (SPREAD_KEY.fullmatch(key) or RATE_KEY.fullmatch(key) or key in PLAIN_KEYS):
            raise ValueError(f"{key!r} is no figure of a point; write one of {KEYS_TOLD}")
        limits.append(Limit(key, sign[0] == "<", len(sign) == 2, float(bound)))
    if not limits:
        raise ValueError("there is no objective in it; write such as ttft_p90_ms<500,tpot_p90_ms<20")
    return tuple(limits)


# -- points


def points(
    records: Iterable[Record], measured: Sequence[Measured] = (), *, slo: Sequence[Limit] = ()
) -> tuple[Point, ...]:
    """The figures of every point that has records or facts, in order of the points' numbers."""
    grouped: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        grouped[record.point].append(record)
    facts = {item.point: item for item in measured}
    return tuple(
        point(grouped.get(index, ()), facts.get(index), index=index, slo=slo) for index in sorted({*grouped, *facts})
    )


def point(
    records: Sequence[Record], facts: Measured | None = None, *, index: int = 0, slo: Sequence[Limit] = ()
) -> Point:
    """The figures of one point. The order of the records does not matter, and a failed one changes no average."""
    records = sorted(records, key=lambda record: record.index)
    spec: Mapping[str, object] = facts.spec if facts else {}
    done = [record for record in records if record.ok]
    figures = [request_figures(record) for record in done]
    process = str(spec.get("process", "closed"))
    concurrency, rate = _int(spec.get("concurrency")), _number(spec.get("rate"))
    asked = _int(spec.get("requests"))
    duration = _duration_s(records)
    output = _total(record.output_tokens for record in done)
    taken = _total(record.input_tokens for record in done)
    steady = _steady(done, concurrency, process)
    accept = _acceptance(done, facts)
    ttft = spread(one.ttft_ms for one in figures)
    lag = spread(one.lag_ms for one in figures)
    unstable = _unstable(done, figures) if process != "closed" and concurrency is None else None
    against, marks = _judge(records, done, figures, facts, process, concurrency, asked, ttft, output)
    if unstable:
        against.append(unstable)
    cached, cached_source = _cached(done, facts)
    if cached is not None and cached > CACHED_LIMIT:
        marks.append(f"{cached:.0%} of the input came from the prefix cache: TTFT is that of a partly filled cache")
    nothing = Spread(missing=dict(NEEDED))
    made = Point(
        index=index,
        concurrency=concurrency,
        rate=rate,
        requests=len(records) if asked is None else asked,
        completed=len(done),
        failed=len(records) - len(done),
        input_tokens=taken,
        output_tokens=output,
        duration_s=duration,
        output_tok_s=_per(output, duration),
        output_tok_s_steady=_number(steady.get("tok_s")),
        request_tok_s=nothing if unstable else spread(one.tok_s for one in figures),
        ttft_ms=nothing if unstable else ttft,
        tpot_ms=spread(one.tpot_ms for one in figures),
        chunk_gap_ms=spread(gap for one in figures for gap in one.gaps_ms),
        stall_ms=spread(one.stall_ms for one in figures),
        e2e_ms=nothing if unstable else spread(one.e2e_ms for one in figures),
        tokens_per_chunk=_chunk_histogram(figures),
        accept_length=accept.length,
        accept_length_source=accept.source,
        valid=not against,
        invalid_because=tuple(against),
        process="capped" if process != "closed" and concurrency is not None else process,
        arm=_text(spec.get("arm")),
        repeat=_int(spec.get("repeat")) or 0,
        input_length=_int(spec.get("input_tokens")),
        output_length=_int(spec.get("output_tokens")),
        total_tok_s=_per(output + taken, duration) if output is not None and taken is not None else None,
        requests_s=_per(len(done), duration),
        steady=steady,
        tpot_bounds_ms=_bounds(figures),
        ttft_scheduled_ms=nothing if unstable else spread(_plus(one.ttft_ms, one.lag_ms) for one in figures),
        e2e_scheduled_ms=nothing if unstable else spread(_plus(one.e2e_ms, one.lag_ms) for one in figures),
        lag_ms=lag,
        queue_ms=spread(None if record.queue_s is None else record.queue_s * 1000 for record in done),
        accept_rate=accept.rate,
        accept_rate_definition=accept.rate_definition,
        acceptance_by_position=accept.by_position,
        acceptance_by_class=accept.by_class,
        verify_steps=accept.verify,
        cached_share=cached,
        cached_share_source=cached_source,
        finish_reasons=Counter(record.finish_reason for record in done if record.finish_reason),
        failures=Counter(record.error_kind or "error" for record in records if not record.ok),
        server=_server_side(facts, ttft, figures, output),
        gpu=_gpu(facts, output, duration),
        goodput=_goodput(figures, duration, slo),
        client=dict(facts.client) if facts else {},
        marks=tuple(marks),
        complete=facts.complete if facts else True,
        windows_dropped=len(facts.windows_dropped) if facts else 0,
    )
    return _with_objectives(made, slo) if slo else made


# -- parts of a point


def _duration_s(records: Sequence[Record]) -> float | None:
    """From the first send to the last token that arrived (or to the end of a failed request, if that came later)."""
    ends = [
        record.start_us + (record.times_us[-1] if record.ok and record.times_us else record.end_us or 0)
        for record in records
        if record.times_us or record.end_us is not None
    ]
    if not ends:
        return None
    span = (max(ends) - min(record.start_us for record in records)) / 1e6
    return span if span > 0 else None


def _steady(done: Sequence[Record], concurrency: int | None, process: str) -> dict[str, object]:
    """Output tok/s while the load was full.

    Closed loop: opens with the C-th completion (the first wave prefills together), closes with the last send (from then on
    lanes fall idle). Open loop: opens with the tenth part of the arrivals, closes with the last arrival. None where the window
    is shorter than the median request, or where the server gives no count per chunk.
    """
    rule = (
        f"from completion {concurrency} to the last send"
        if process == "closed"
        else "from 10 % of the arrivals to the last"
    )
    told: dict[str, object] = {"rule": rule, "tok_s": None, "from_s": None, "to_s": None, "share": None}
    whole = [record for record in done if record.times_us and record.tokens]
    if not whole or len(whole) != len(done):
        return told | {"why_not": "the server gives no token count per chunk" if done else "no completed request"}
    ends = sorted(record.start_us + record.times_us[-1] for record in whole)
    starts = sorted(record.start_us for record in whole)
    if process == "closed":
        if concurrency is None or len(ends) <= concurrency:
            return told | {"why_not": f"needs more than {concurrency} completed requests"}
        opens, closes = ends[concurrency - 1], starts[-1]
    else:
        opens, closes = starts[len(starts) // 10], starts[-1]
    median = quantile(sorted(record.times_us[-1] for record in whole), 0.5)
    if closes - opens < median:
        return told | {"why_not": "the window would be shorter than a request; use more --requests"}
    tokens = 0
    for record in whole:
        before = 0
        for at, total in zip(record.times_us, record.tokens or (), strict=True):
            if opens < record.start_us + at <= closes:
                tokens += total - before
            before = total
    first = starts[0]
    return told | {
        "tok_s": tokens / (closes - opens) * 1e6,
        "from_s": (opens - first) / 1e6,
        "to_s": (closes - first) / 1e6,
        "share": (closes - opens) / (ends[-1] - first),
    }


@dataclass(frozen=True, slots=True)
class Acceptance:
    length: float | None = None
    source: str | None = None
    rate: float | None = None
    rate_definition: str | None = None
    by_position: tuple[float, ...] | None = None
    by_class: Mapping[str, float] = field(default_factory=dict)
    verify: int | None = None


PER_REQUEST = "per request: sum of completion_tokens / sum of spec_verify_ct"
PER_COUNTER = "counters over the point: generation_tokens_total / spec_verify_calls_total"
PER_VLLM = "counters over the point: 1 + accepted draft tokens / drafts (vLLM)"
PER_SERVER = "the server's own average since its start or last flush, first DP rank"


def _acceptance(done: Sequence[Record], facts: Measured | None) -> Acceptance:
    """Acceptance of this point over all ranks: the requests' own counts, else counter differences, else the server's average."""
    told = [record for record in done if record.spec_verify and record.output_tokens]
    counters = facts.counters if facts else {}
    if told and len(told) >= sum(1 for record in done if (record.output_tokens or 0) > 1):
        verify = sum(record.spec_verify or 0 for record in told)
        classes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for record in told:
            pair = classes[record.prompt_class]
            pair[0] += record.output_tokens or 0
            pair[1] += record.spec_verify or 0
        correct = _total(record.spec_correct for record in told)
        proposed = _total(record.spec_proposed for record in told)
        rated = correct is not None and bool(proposed)
        return Acceptance(
            length=sum(record.output_tokens or 0 for record in told) / verify,
            source=PER_REQUEST,
            rate=correct / proposed if correct is not None and proposed else None,
            rate_definition="accepted drafts / proposed drafts, over the requests" if rated else None,
            by_position=_by_position(told),
            by_class={name: pair[0] / pair[1] for name, pair in sorted(classes.items())},
            verify=verify,
        )
    if (calls := counters.get("sglang:spec_verify_calls_total", 0.0)) > 0:
        tokens = counters.get("sglang:generation_tokens_total", 0.0)
        return Acceptance(tokens / calls if tokens else None, PER_COUNTER, verify=round(calls))
    if (drafts := counters.get("vllm:spec_decode_num_drafts_total", 0.0)) > 0:
        accepted = counters.get("vllm:spec_decode_num_accepted_tokens_total", 0.0)
        proposed_by_all = counters.get("vllm:spec_decode_num_draft_tokens_total", 0.0)
        return Acceptance(
            1 + accepted / drafts,
            PER_VLLM,
            rate=accepted / proposed_by_all if proposed_by_all else None,
            rate_definition="accepted drafts / proposed drafts, by counters" if proposed_by_all else None,
            by_position=_vllm_positions(counters, drafts),
            verify=round(drafts),
        )
    average = _number(facts.server_after.get("avg_spec_accept_length")) if facts else None
    return Acceptance(average, PER_SERVER if average is not None else None)


def _by_position(told: Sequence[Record]) -> tuple[float, ...] | None:
    """P(draft i accepted) = verify steps with at least i accepted drafts / all of them, from the requests' histograms."""
    if not told or any(record.spec_histogram is None for record in told):
        return None
    width = max(len(record.spec_histogram or ()) for record in told)
    summed = [0] * width
    for record in told:
        for place, count in enumerate(record.spec_histogram or ()):
            summed[place] += count
    steps = sum(summed)
    return tuple(sum(summed[place:]) / steps for place in range(1, width)) if steps else None


def _vllm_positions(counters: Mapping[str, float], drafts: float) -> tuple[float, ...] | None:
    found: list[float] = []
    while (name := f"vllm:spec_decode_num_accepted_tokens_per_pos_total:{len(found)}") in counters:
        found.append(counters[name] / drafts)
    return tuple(found) or None


def _cached(done: Sequence[Record], facts: Measured | None) -> tuple[float | None, str | None]:
    told = [record for record in done if record.cached_tokens is not None and record.input_tokens]
    if told and len(told) == len(done):
        share = sum(record.cached_tokens or 0 for record in told) / sum(record.input_tokens or 0 for record in told)
        return share, "per request: cached_tokens / prompt_tokens"
    counters = facts.counters if facts else {}
    for prefix, hits, asked in (
        ("sglang", "sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
        ("vllm", "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ):
        # SGLang makes the hit counter with the first hit; without one it is absent, which is not zero.
        if hits in counters and counters.get(asked):
            return counters[hits] / counters[asked], f"counters over the point ({prefix})"
    return None, None


def _chunk_histogram(figures: Sequence[Figures]) -> dict[str, int]:
    counted = Counter(step for one in figures for step in one.chunk_tokens if step > 0)
    return {str(size): counted[size] for size in sorted(counted)}


def _bounds(figures: Sequence[Figures]) -> tuple[float, float] | None:
    """Medians of the lower and upper bounds of the requests whose first chunk's size is unknown."""
    both = [one.tpot_bounds_ms for one in figures if one.tpot_bounds_ms]
    if not both:
        return None
    return quantile(sorted(low for low, _ in both), 0.5), quantile(sorted(high for _, high in both), 0.5)


def _goodput(figures: Sequence[Figures], duration: float | None, slo: Sequence[Limit]) -> dict[str, object]:
    """Requests that keep every limit by themselves, per second. Limits without a value for one request are left out."""
    by_request = [limit for limit in slo if SPREAD_KEY.fullmatch(limit.key) or RATE_KEY.fullmatch(limit.key)]
    if not by_request or not figures:
        return {}
    good = unknown = 0
    for one in figures:
        values = [(limit, limit.of_request(one)) for limit in by_request]
        if any(value is None for _, value in values):
            unknown += 1
        elif all(limit.holds(value) for limit, value in values if value is not None):
            good += 1
    known = len(figures) - unknown
    return {
        "requests_s": _per(good, duration) if known else None,
        "share": good / known if known else None,
        "good": good,
        "unknown": unknown,
    }


def _with_objectives(made: Point, slo: Sequence[Limit]) -> Point:
    """Adds which limits the point keeps; None where it has too few samples to say."""
    kept: dict[str, bool | None] = {}
    for limit in slo:
        value = limit.of(made)
        kept[str(limit)] = None if value is None else limit.holds(value)
    meets = None if None in kept.values() and False not in kept.values() else all(kept.values())
    return replace(made, goodput={**made.goodput, "limits": kept, "meets": meets})


def _server_side(
    facts: Measured | None, ttft: Spread, figures: Sequence[Figures], output: int | None
) -> dict[str, object]:
    """Means by the server's own histograms over the point, beside the client's: no network and no client in them."""
    if facts is None:
        return {}
    told: dict[str, object] = {}
    for key, names in {
        "ttft_ms_mean": ("sglang:time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
        "inter_token_ms_mean": (
            "sglang:inter_token_latency_seconds",
            "vllm:time_per_output_token_seconds",
            "vllm:inter_token_latency_seconds",
        ),
        "e2e_ms_mean": ("sglang:e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
        "queue_ms_mean": ("sglang:queue_time_seconds", "vllm:request_queue_time_seconds"),
    }.items():
        found = next((facts.histograms[name] for name in names if name in facts.histograms), None)
        told[key] = found["sum"] / found["count"] * 1000 if found and found.get("count") else None
    generated = facts.counters.get("sglang:generation_tokens_total", facts.counters.get("vllm:generation_tokens_total"))
    told["generated_tokens"] = generated
    told["counted_by_client"] = output
    own = told["ttft_ms_mean"]
    told["ttft_client_minus_server_ms"] = (
        ttft.mean - own if isinstance(own, float) and ttft.mean is not None and not facts.foreign else None
    )
    told["queued_max"] = max((sample.queued for sample in facts.samples if sample.queued is not None), default=None)
    told["running_max"] = max((sample.running for sample in facts.samples if sample.running is not None), default=None)
    return told


def _gpu(facts: Measured | None, output: int | None, duration: float | None) -> dict[str, object]:
    if facts is None or not facts.gpu:
        return {}
    by_card: dict[object, list[Mapping[str, object]]] = defaultdict(list)
    for sample in facts.gpu:
        by_card[sample.get("index")].append(sample)
    energy, source = _energy_j(by_card, duration)
    power = [_number(sample.get("power_w")) for sample in facts.gpu]
    known_power = [value for value in power if value is not None]
    used = [value for sample in facts.gpu if (value := _number(sample.get("memory_used_gb"))) is not None]
    busy = [value for sample in facts.gpu if (value := _number(sample.get("utilisation"))) is not None]
    return {
        "samples": len(facts.gpu),
        "memory_used_gb_max": max(used, default=None),
        "power_w_mean": sum(known_power) / len(known_power) if known_power else None,
        "utilisation_mean": sum(busy) / len(busy) if busy else None,
        "energy_j": energy,
        "energy_source": source,
        "energy_j_per_token": energy / output if energy is not None and output else None,
    }


def _energy_j(
    by_card: Mapping[object, Sequence[Mapping[str, object]]], duration: float | None
) -> tuple[float | None, str | None]:
    counted = [
        (_number(samples[-1].get("energy_mj")), _number(samples[0].get("energy_mj"))) for samples in by_card.values()
    ]
    if all(last is not None and first is not None and last > first for last, first in counted):
        return sum((last or 0) - (first or 0) for last, first in counted) / 1000, "the cards' energy counters"
    total = 0.0
    for samples in by_card.values():
        power = [value for sample in samples if (value := _number(sample.get("power_w"))) is not None]
        if len(power) < 3 or duration is None:
            return None, None
        total += sum(power) / len(power) * duration
    return total, "mean of the power samples times the duration"


def _judge(
    records: Sequence[Record],
    done: Sequence[Record],
    figures: Sequence[Figures],
    facts: Measured | None,
    process: str,
    concurrency: int | None,
    asked: int | None,
    ttft: Spread,
    output: int | None,
) -> tuple[list[str], list[str]]:
    """Reasons against the point's numbers, and marks that a reader must know although the numbers stand."""
    against: list[str] = []
    marks: list[str] = []
    failed = len(records) - len(done)
    if not records:
        against.append("no request was sent")
    elif not done:
        against.append(f"all {failed} requests failed: {_commonest(records)}")
    elif failed > FAILED_LIMIT * len(records):
        against.append(f"{failed} of {len(records)} requests failed: {_commonest(records)}")
    elif failed:
        marks.append(f"{failed} of {len(records)} requests failed and are in no average: {_commonest(records)}")
    if done and any(record.output_tokens is None for record in done):
        marks.append("the server sent no token count (usage) for some requests: per-token figures leave them out")
    if any(one.tpot_bounds_ms for one in figures):
        marks.append(
            "no token count per chunk: k_1 unknown, tpot_ms is null for those requests and its bounds are given"
        )
    lags = sorted(one.lag_ms for one in figures if one.lag_ms is not None)
    if process != "closed" and concurrency is None and lags and ttft.p50:
        late = quantile(lags, 0.99)
        if late > LAG_LIMIT * ttft.p50:
            against.append(
                f"the client sent late: p99 lag {late:.1f} ms is over 5 % of the median TTFT {ttft.p50:.1f} ms"
            )
    if process != "closed" and concurrency is not None:
        held = sum(1 for lag in lags if lag > 1.0)
        marks.append(f"capped open loop: {held} of {len(lags)} arrivals waited for one of {concurrency} places")
    if facts is None:
        return against, marks
    if not facts.complete:
        against.append(f"interrupted after {len(records)} of {asked if asked is not None else 'its'} requests")
    against += _identity(facts)
    against += _client_verdict(facts, ttft)
    marks += _client_marks(facts, ttft)
    against += [f"other work at the server: {what}" for what in facts.foreign or ()]
    if facts.windows_dropped:
        again = "" if facts.foreign else "; this one had none"
        marks.append(
            f"{len(facts.windows_dropped)} earlier windows held other work ({facts.windows_dropped[-1]}) and were dropped{again}"
        )
    limit = _number(facts.server_before.get("effective_max_running_requests"))
    in_flight = min(concurrency, asked or concurrency) if process == "closed" and concurrency is not None else None
    if limit is not None and in_flight is not None and in_flight > limit:
        marks.append(
            f"measures queueing: {in_flight} requests at once, the server runs at most {limit:.0f}; TTFT includes the wait"
        )
    if process == "closed" and concurrency is not None and asked is not None and asked < concurrency:
        marks.append(
            f"{asked} requests cannot keep {concurrency} in flight: there were never more than {asked} at once"
        )
    if not facts.server_before.get("speculative_algorithm") and facts.server_before.get("kind") == "sglang":
        sizes = [step for one in figures for step in one.chunk_tokens[1:]]
        if sizes and sum(sizes) / len(sizes) > BATCHED_DELTAS:
            marks.append(
                f"{sum(sizes) / len(sizes):.1f} tokens a chunk without speculation: the server gathers tokens before it "
                "sends (stream interval or a parser); TTFT, chunk gap and stall are of those batches"
            )
    return against, marks


def _identity(facts: Measured) -> list[str]:
    found = []
    for key, text in (
        ("launch_id", "the launch"),
        ("boot", "the boot"),
        ("pid", "the server process"),
        ("started", "the server's start time"),
        ("version", "the server's version"),
        ("random_seed", "the server's random seed (new at each start)"),
    ):
        before, after = facts.server_before.get(key), facts.server_after.get(key)
        if before is not None and after is not None and before != after:
            found.append(f"the server changed during the point: {text} was {before}, then {after}")
    if facts.server_after.get("reset"):
        found.append(f"the server was restarted during the point: {facts.server_after['reset']}")
    if facts.server_after.get("unproven"):
        found.append(f"who answers could not be proven after the point: {facts.server_after['unproven']}")
    if facts.server_after.get("gone"):
        found.append(f"the server no longer answered at the end: {facts.server_after['gone']}")
    return found[:1]


def _client_verdict(facts: Measured, ttft: Spread) -> list[str]:
    """The client's own lateness and share of CPU, against what it measured.

    A client past its capacity is late most of the time (p90); a single stall (p99) is what any busy machine has, and a mark.
    """
    late, share = _number(facts.client.get("loop_lag_p90_ms")), _number(facts.client.get("cpu_share"))
    found = []
    if late is not None and late > max(LOOP_LAG_FLOOR_MS, LAG_LIMIT * (ttft.p50 or 0)):
        found.append(f"its event loop was {late:.1f} ms late at p90")
    if share is not None and share > CLIENT_CPU_LIMIT:
        found.append(f"it used {share:.0%} of its {facts.client.get('processes', 1)} core(s)")
    return [f"the client was the bottleneck: {' and '.join(found)}"] if found else []


def _client_marks(facts: Measured, ttft: Spread) -> list[str]:
    late = _number(facts.client.get("loop_lag_p99_ms"))
    if late is None or late <= max(LOOP_LAG_FLOOR_MS, LAG_LIMIT * (ttft.p50 or 0)):
        return []
    return [f"the client's event loop was {late:.1f} ms late at p99: single times may be too long by that much"]


def _unstable(done: Sequence[Record], figures: Sequence[Figures]) -> str | None:
    """Open loop past capacity: requests in flight and TTFT both keep growing, so there is no steady state to report.

    Over the arrivals after the first quarter (the system fills up): both grow by more than half of their mean,
    with a slope that is more than three standard errors from zero.
    """
    rows = sorted(
        (record.start_us, record.start_us + record.times_us[-1], one.ttft_ms)
        for record, one in zip(done, figures, strict=True)
        if record.times_us and one.ttft_ms is not None
    )
    if len(rows) < 20:
        return None
    ends = sorted(end for _, end, _ in rows)
    flying = []
    finished = 0
    for place, (start, _, _) in enumerate(rows):
        while finished < len(ends) and ends[finished] <= start:
            finished += 1
        flying.append(place + 1 - finished)
    begin = len(rows) // 4
    at = [row[0] / 1e6 for row in rows[begin:]]
    growth = _growth(at, [float(value) for value in flying[begin:]])
    waiting = _growth(at, [row[2] for row in rows[begin:] if row[2] is not None])
    if growth is None or waiting is None or growth <= 0.5 or waiting <= 0.5:
        return None
    return (
        f"unstable: requests in flight grew from {flying[begin]} to {flying[-1]} and TTFT with them while requests arrived; "
        "the rate is past the server's capacity and has no steady latency"
    )


def _growth(at: Sequence[float], values: Sequence[float]) -> float | None:
    """Growth of the fitted line over the window, in units of the mean; None if the slope is not clearly positive."""
    count = len(at)
    mean_x, mean_y = sum(at) / count, sum(values) / count
    wide = sum((x - mean_x) ** 2 for x in at)
    if wide <= 0 or mean_y <= 0:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(at, values, strict=True)) / wide
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(at, values, strict=True))
    error = math.sqrt(rest / max(count - 2, 1) / wide)
    if slope <= 0 or slope < 3 * error:
        return None
    return slope * (at[-1] - at[0]) / mean_y


def saturated(earlier: Point, later: Point, gain: float = 0.03) -> bool:
    """More load brought less than `gain` more output tok/s. Only for points whose throughput is known."""
    if earlier.output_tok_s is None or later.output_tok_s is None:
        return False
    return later.output_tok_s < earlier.output_tok_s * (1 + gain)


def knee(made: Sequence[Point]) -> Point | None:
    """The last point before latency costs more than throughput gains.

    The point with the largest power, throughput / latency (Kleinrock), among valid points of one sweep; None with under three.
    """
    rated = [
        (one.output_tok_s / one.e2e_ms.p50, one) for one in made if one.valid and one.output_tok_s and one.e2e_ms.p50
    ]
    return max(rated, key=lambda pair: pair[0])[1] if len(rated) >= 3 else None


def best_under(made: Sequence[Point], slo: Sequence[Limit]) -> Point | None:
    """The valid point with the most output tok/s among those that are known to keep every limit."""
    keeping = [
        one
        for one in made
        if one.valid
        and one.output_tok_s is not None
        and all((value := limit.of(one)) is not None and limit.holds(value) for limit in slo)
    ]
    return max(keeping, key=lambda one: one.output_tok_s or 0.0, default=None)


def _commonest(records: Sequence[Record]) -> str:
    errors = Counter(record.error for record in records if record.error)
    return errors.most_common(1)[0][0] if errors else "unknown"


def _total(values: Iterable[int | None]) -> int | None:
    """The sum, or None if there is nothing or anything is unknown."""
    found = list(values)
    return sum(value for value in found if value is not None) if found and None not in found else None


def _per(amount: float | None, seconds: float | None) -> float | None:
    return None if amount is None or not seconds else amount / seconds


def _plus(value: float | None, more: float | None) -> float | None:
    return None if value is None or more is None else value + more


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
