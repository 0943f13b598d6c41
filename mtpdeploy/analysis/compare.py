"""Two arms side by side: a ratio with an interval for each load, a verdict, and first of all what was not alike."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mtpdeploy.analysis.arms import batch_arm, decode_arm, prompts_of
from mtpdeploy.analysis.likeness import Likeness, likeness
from mtpdeploy.analysis.samples import Load, Measured, Pass, told_apart
from mtpdeploy.analysis.stats import Interval, ratio, ratio_of_runs

Verdict = Literal["faster", "slower", "can't tell", "depends on the load"]

# One run an arm shows nothing of the spread between runs. Four starts of one setting on an H200 differed by up to 3 %
# in output tok/s; a verdict from single runs needs more than this.
SINGLE_RUN_MARGIN = 0.05


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The per-request speed-up taken apart: speed = tokens a step / seconds a step.

    tokens_a_step:  b's accept length over a's (no MTP: 1). Content and drafts decide it.
    step_time:      b's seconds a decode step over a's. The system decides it.
    at_equal_acceptance: the speed ratio if both arms accepted alike: what is left for the system. Only between two
        MTP arms.
    break_even: the accept length at which b would be as fast as an arm without MTP: its step time against that one's. The
        interval is that of the ratio of the speeds.
    """

    a: float
    b: float
    tokens_a_step: float
    step_time: float
    at_equal_acceptance: float | None
    break_even: Interval | None

    def as_json(self) -> dict[str, object]:
        return {
            "a": self.a,
            "b": self.b,
            "tokens_a_step_ratio": self.tokens_a_step,
            "step_time_ratio": self.step_time,
            "at_equal_acceptance": self.at_equal_acceptance,
            "break_even_accept_length": self.break_even.value if self.break_even else None,
            "break_even_low": self.break_even.low if self.break_even else None,
            "break_even_high": self.break_even.high if self.break_even else None,
        }


@dataclass(frozen=True, slots=True)
class LoadComparison:
    """b over a at one load. batch: output tok/s of all requests together; request: decode tok/s of one request."""

    load: Load
    batch: Interval | None
    request: Interval | None
    a_tok_s: float | None
    b_tok_s: float | None
    a_request_tok_s: float | None
    b_request_tok_s: float | None
    a_ttft_ms: float | None
    b_ttft_ms: float | None
    a_tpot_ms: float | None
    b_tpot_ms: float | None
    runs: tuple[int, int]
    prompts: int
    paired: bool
    basis: str
    verdict: Verdict
    why: str
    acceptance: Acceptance | None

    def as_json(self) -> dict[str, object]:
        batch, request = self.batch, self.request
        return {
            "concurrency": self.load.concurrency,
            "rate": self.load.rate,
            "ratio": batch.value if batch else None,
            "low": batch.low if batch else None,
            "high": batch.high if batch else None,
            "verdict": self.verdict,
            "why": self.why,
            "request": {
                "ratio": request.value if request else None,
                "low": request.low if request else None,
                "high": request.high if request else None,
            },
            "output_tok_s": {"a": self.a_tok_s, "b": self.b_tok_s},
            "request_tok_s_p50": {"a": self.a_request_tok_s, "b": self.b_request_tok_s},
            "ttft_ms_p50": {"a": self.a_ttft_ms, "b": self.b_ttft_ms},
            "tpot_ms_p50": {"a": self.a_tpot_ms, "b": self.b_tpot_ms},
            "runs": {"a": self.runs[0], "b": self.runs[1]},
            "prompts": self.prompts,
            "paired": self.paired,
            "basis": self.basis,
            "acceptance": self.acceptance and self.acceptance.as_json(),
        }


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the arms' greedy answers to the same prompts agree: a broken draft or state cache shows here first."""

    prompts: int
    identical: int
    median_first_tokens: float
    least_first_tokens: int
    unit: Literal["tokens", "characters"]

    def as_json(self) -> dict[str, object]:
        return {
            "prompts": self.prompts,
            "identical": self.identical,
            "median_first_agreeing": self.median_first_tokens,
            "least_first_agreeing": self.least_first_tokens,
            "unit": self.unit,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """b against a. `as_json()["speedup"]` holds the loads that both measured."""

    a: str
    b: str
    a_runs: tuple[str, ...]
    b_runs: tuple[str, ...]
    loads: tuple[LoadComparison, ...]
    verdict: Verdict
    verdict_text: str
    likeness: Likeness
    agreement: Agreement | None
    only_a: tuple[Load, ...]
    only_b: tuple[Load, ...]
    simulated: bool
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return {
            "a": self.a,
            "b": self.b,
            "a_runs": list(self.a_runs),
            "b_runs": list(self.b_runs),
            "not_like_for_like": [one.text for one in self.likeness.differences],
            "differences": [one.as_json() for one in self.likeness.differences],
            "verdict": self.verdict,
            "verdict_text": self.verdict_text,
            "speedup": [one.as_json() for one in self.loads],
            "settings": self.likeness.settings_text,
            "changed": [{"name": one.what, "a": one.a, "b": one.b} for one in self.likeness.settings],
            "agreement": self.agreement and self.agreement.as_json(),
            "only_in_a": [str(load) for load in self.only_a],
            "only_in_b": [str(load) for load in self.only_b],
            "notes": list(self.notes),
            "confidence": 0.95,
            "simulated": self.simulated,
        }

    @property
    def exit_code(self) -> int:
        return 12 if self.verdict == "can't tell" else 0


def compare(a: Sequence[Measured], b: Sequence[Measured], *, seed: int = 0) -> Comparison:
    """b over a, each of one run or more. The same data and seed give the same numbers."""
    apart = told_apart((*a, *b))
    a, b = apart[: len(a)], apart[len(a) :]
    like = likeness(a, b)
    loads_a, loads_b = {load for one in a for load in one.loads()}, {load for one in b for load in one.loads()}
    shared = sorted(loads_a & loads_b, key=lambda load: load.order)
    loads = tuple(_at(load, a, b, like.decisive or load in like.unlike_loads, seed) for load in shared)
    verdict, text = _overall(loads, like, a[0].label, b[0].label)
    notes = list(like.notes)
    if loads and min(min(one.runs) for one in loads) == 1:
        notes.append(
            "a single run of an arm shows the spread between prompts only, not between runs; "
            f"a verdict from it needs more than {SINGLE_RUN_MARGIN:.0%}. Repeat with --repeat 3"
        )
    return Comparison(
        a=a[0].label,
        b=b[0].label,
        a_runs=tuple(one.run_id for one in a),
        b_runs=tuple(one.run_id for one in b),
        loads=loads,
        verdict=verdict,
        verdict_text=text,
        likeness=like,
        agreement=_agreement(a, b),
        only_a=tuple(sorted(loads_a - loads_b, key=lambda load: load.order)),
        only_b=tuple(sorted(loads_b - loads_a, key=lambda load: load.order)),
        simulated=any(one.simulated for one in (*a, *b)),
        notes=tuple(notes),
    )


# -- one load


def _at(load: Load, a: Sequence[Measured], b: Sequence[Measured], decisive: bool, seed: int) -> LoadComparison:
    passes_a, passes_b = _passes(a, load), _passes(b, load)
    good_a, good_b = ([one for one in passes if one.counts_for_speed] for passes in (passes_a, passes_b))
    batch = request = None
    prompts, paired, basis = 0, False, "no valid measurement on both sides"
    if good_a and good_b:
        batch, request, prompts, paired, basis = _intervals(good_a, good_b, seed)
        late = max(one.lateness for one in (*good_a, *good_b))
        if late:
            batch, request = _widened(batch, late), _widened(request, late)
            basis += f", widened by {late:.1%} for a client that looked late"
    verdict, why = _verdict(batch, (len(good_a), len(good_b)), decisive, load, (*passes_a, *passes_b))
    return LoadComparison(
        load=load,
        batch=batch,
        request=request,
        a_tok_s=_geometric(one.number("output_tok_s") for one in good_a),
        b_tok_s=_geometric(one.number("output_tok_s") for one in good_b),
        a_request_tok_s=_geometric(one.number("request_tok_s", "p50") for one in good_a),
        b_request_tok_s=_geometric(one.number("request_tok_s", "p50") for one in good_b),
        a_ttft_ms=_geometric(one.number("ttft_ms", "p50") for one in good_a),
        b_ttft_ms=_geometric(one.number("ttft_ms", "p50") for one in good_b),
        a_tpot_ms=_geometric(one.number("tpot_ms", "p50") for one in good_a),
        b_tpot_ms=_geometric(one.number("tpot_ms", "p50") for one in good_b),
        runs=(len(good_a), len(good_b)),
        prompts=prompts,
        paired=paired,
        basis=basis,
        verdict=verdict,
        why=why,
        acceptance=_acceptance(good_a, good_b, request),
    )


def _widened(interval: Interval | None, share: float) -> Interval | None:
    if interval is None or interval.low is None or interval.high is None:
        return interval
    return Interval(interval.value, interval.low * (1 - share), interval.high * (1 + share))


def _passes(arm: Sequence[Measured], load: Load) -> list[Pass]:
    return [one for run in arm for one in run.passes if one.load == load]


def _geometric(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and value > 0]
    return statistics.geometric_mean(known) if known else None


def _intervals(
    a: Sequence[Pass], b: Sequence[Pass], seed: int
) -> tuple[Interval | None, Interval | None, int, bool, str]:
    """Ratio of output tok/s, of decode tok/s a request, prompts behind them, whether paired, and on what they rest."""
    names_a, names_b = prompts_of(a), prompts_of(b)
    of_b = set(names_b)
    shared = [name for name in names_a if name in of_b]
    # Unequal prompt sets are paired over what they share only if that is nearly everything.
    paired = bool(shared) and len(shared) >= 0.8 * max(len(names_a), len(names_b))
    chosen_a, chosen_b = (shared, shared) if paired else (names_a, names_b)
    runs = f"{len(a)} and {len(b)} runs" if max(len(a), len(b)) > 1 else "one run each"
    arms = [batch_arm(passes, names) for passes, names in ((a, chosen_a), (b, chosen_b))]
    if arms[0] is None or arms[1] is None:
        known_a = [value for one in a if (value := one.number("output_tok_s"))]
        known_b = [value for one in b if (value := one.number("output_tok_s"))]
        if not known_a or not known_b:
            return None, None, 0, False, "no output tok/s on both sides"
        speeds_a = [value for one in a if (value := one.number("request_tok_s", "p50"))]
        speeds_b = [value for one in b if (value := one.number("request_tok_s", "p50"))]
        request = ratio_of_runs(speeds_a, speeds_b, seed=seed) if speeds_a and speeds_b else None
        return ratio_of_runs(known_a, known_b, seed=seed), request, 0, False, f"{runs}, no record per prompt"
    batch = ratio(arms[0], arms[1], paired=paired, seed=seed)
    decode = [decode_arm(passes, names) for passes, names in ((a, chosen_a), (b, chosen_b))]
    request = ratio(decode[0], decode[1], paired=paired, seed=seed) if decode[0] and decode[1] else None
    count = len(shared) if paired else min(len(names_a), len(names_b))
    how = f"{count} prompts paired" if paired else "different prompts, not paired"
    return batch, request, count, paired, f"{how}, {runs}"


def _verdict(
    batch: Interval | None, runs: tuple[int, int], decisive: bool, load: Load, passes: Sequence[Pass]
) -> tuple[Verdict, str]:
    if batch is None:
        reasons = sorted({reason for one in passes for reason in one.invalid_because})
        return "can't tell", ": ".join(
            ["no valid measurement on both sides", *(["; ".join(reasons)] if reasons else [])]
        )
    if decisive:
        return "can't tell", "the arms were not measured alike"
    if load.concurrency is None:
        return "can't tell", "an open loop delivers what was asked for: compare its latencies, not its tok/s"
    if batch.low is None or batch.high is None:
        return "can't tell", "nothing was repeated: one prompt, one run"
    margin = SINGLE_RUN_MARGIN if min(runs) == 1 else 0.0
    if batch.low > 1 + margin:
        return "faster", f"the whole interval lies above {1 + margin:.2f}"
    if batch.high < 1 / (1 + margin):
        return "slower", f"the whole interval lies below {1 / (1 + margin):.2f}"
    if batch.low > 1 or batch.high < 1:
        return "can't tell", f"the difference is within the {margin:.0%} that single runs may differ by themselves"
    return "can't tell", "the interval holds 1"


def _overall(loads: Sequence[LoadComparison], like: Likeness, a: str, b: str) -> tuple[Verdict, str]:
    if not loads:
        return "can't tell", "the two arms share no load: nothing was measured at the same concurrency"
    by: dict[str, list[str]] = {}
    for one in loads:
        by.setdefault(one.verdict, []).append(str(one.load))
    if like.decisive:
        first = next(one.text for one in like.differences if one.decisive)
        return (
            "can't tell",
            f"{a} and {b} were not measured alike ({first}): the ratio does not speak of their settings",
        )
    if "faster" in by and "slower" in by:
        return "depends on the load", f"{b} is faster at {_and(by['faster'])} and slower at {_and(by['slower'])}"
    for word in ("faster", "slower"):
        if word in by:
            ratios = [one.batch for one in loads if one.verdict == word and one.batch]
            least, most = min(one.value for one in ratios), max(one.value for one in ratios)
            times = f"{least:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f} to {most:.2f}"
            unsure = by.get("can't tell")
            rest = f"; can't tell at {_and(unsure)}" if unsure else ""
            verdict: Verdict = "faster" if word == "faster" else "slower"
            return verdict, f"{b} is {word} than {a} at {_and(by[word])}: {times} times its output tok/s{rest}"
    return "can't tell", f"no difference between {a} and {b} can be told: {loads[0].why}"


def _and(items: Sequence[str]) -> str:
    """`concurrency 1`, `concurrency 4` → `concurrency 1 and 4`."""
    words = [item.removeprefix("concurrency ") if index else item for index, item in enumerate(items)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# -- acceptance and agreement


def _accept_length(passes: Sequence[Pass]) -> float | None:
    """Weighted by verify steps over all requests, else the points' own figure; None where unknown."""
    pairs = [
        (sample.accept_length, sample.verify_steps)
        for one in passes
        for sample in one.samples
        if sample.accept_length and sample.verify_steps
    ]
    if pairs:
        steps = sum(count for _, count in pairs if count)
        return sum(length * count for length, count in pairs if length and count) / steps
    return _geometric(one.number("accept_length") for one in passes)


def _seconds_a_token(passes: Sequence[Pass]) -> float | None:
    tokens = sum(sample.decode_tokens or 0 for one in passes for sample in one.samples)
    seconds = sum(sample.decode_s or 0.0 for one in passes for sample in one.samples)
    if tokens and seconds:
        return seconds / tokens
    tpot = _geometric(one.number("tpot_ms", "p50") for one in passes)
    return tpot / 1e3 if tpot else None


def _acceptance(a: Sequence[Pass], b: Sequence[Pass], request: Interval | None) -> Acceptance | None:
    """Takes the arm without any acceptance figure as one token a step; None where neither arm has one."""
    of_a, of_b = _accept_length(a), _accept_length(b)
    time_a, time_b = _seconds_a_token(a), _seconds_a_token(b)
    if (of_a is None and of_b is None) or time_a is None or time_b is None:
        return None
    both_mtp = of_a is not None and of_b is not None and of_a > 1 and of_b > 1
    length_a, length_b = of_a or 1.0, of_b or 1.0
    step = (time_b * length_b) / (time_a * length_a)
    return Acceptance(
        a=length_a,
        b=length_b,
        tokens_a_step=length_b / length_a,
        step_time=step,
        at_equal_acceptance=1 / step if both_mtp else None,
        break_even=_break_even(step, request) if length_a == 1.0 and length_b > 1 else None,
    )


def _break_even(step: float, request: Interval | None) -> Interval:
    """The step time's share of the speed ratio's interval: a slower b is one whose steps take longer."""
    if request is None or request.low is None or request.high is None or not request.low > 0:
        return Interval(step, None, None)
    return Interval(step, step * request.value / request.high, step * request.value / request.low)


def _agreement(a: Sequence[Measured], b: Sequence[Measured]) -> Agreement | None:
    """Over requests that both arms sent alike and whose answers both kept; only at temperature 0."""
    if any((one.provenance.temperature or 0.0) > 0 for one in (*a, *b)):
        return None
    left, right = _outputs(a), _outputs(b)
    shared = [name for name in left if name in right and type(left[name]) is type(right[name])]
    if not shared:
        return None
    lengths, identical = [], 0
    for name in shared:
        one, other = left[name], right[name]
        same = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
        lengths.append(same)
        identical += one == other
    unit: Literal["tokens", "characters"] = "characters" if isinstance(left[shared[0]], str) else "tokens"
    return Agreement(len(shared), identical, float(statistics.median(lengths)), min(lengths), unit)


def _outputs(arm: Sequence[Measured]) -> Mapping[tuple[str, str | None], tuple[int, ...] | str]:
    """By prompt and by what was sent: another salt before the same prompt may have another answer."""
    return {
        (sample.prompt, sample.sent): sample.output
        for run in arm
        for one in run.passes
        for sample in one.samples
        if sample.output is not None
    }
