"""What each profile trades: speed for one user against speed for the GPU, over all loads that were measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mtpdeploy.analysis.arms import batch_arm, decode_arm, prompts_of
from mtpdeploy.analysis.compare import Comparison, compare
from mtpdeploy.analysis.likeness import collapsed, likeness
from mtpdeploy.analysis.samples import Load, Measured, Pass
from mtpdeploy.analysis.stats import Arm, Interval, figure, ratio_of_runs


@dataclass(frozen=True, slots=True)
class Spot:
    """A profile at a load. user_tok_s: decode tok/s that one user sees; gpu_tok_s: output tok/s per GPU.

    front: no other spot is better in both.
    """

    profile: str
    load: Load
    user_tok_s: Interval
    gpu_tok_s: Interval
    ttft_p90_ms: float | None
    tpot_p90_ms: float | None
    runs: tuple[str, ...]
    front: bool = False

    def as_json(self) -> dict[str, object]:
        return {
            "profile": self.profile,
            "concurrency": self.load.concurrency,
            "rate": self.load.rate,
            "user_tok_s": self.user_tok_s.as_json(),
            "gpu_tok_s": self.gpu_tok_s.as_json(),
            "ttft_p90_ms": self.ttft_p90_ms,
            "tpot_p90_ms": self.tpot_p90_ms,
            "runs": list(self.runs),
            "front": self.front,
        }


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where b stops being faster than a as concurrency grows.

    at: interpolated between measured loads, in log concurrency; None if the ratio crosses 1 nowhere in what was
        measured.
    low, high: where the interval of the ratio begins and ends to hold 1; None where that lies outside what was
        measured.
    """

    a: str
    b: str
    at: float | None
    low: float | None
    high: float | None
    text: str

    def as_json(self) -> dict[str, object]:
        return {"a": self.a, "b": self.b, "concurrency": self.at, "low": self.low, "high": self.high, "text": self.text}


@dataclass(frozen=True, slots=True)
class Frontier:
    """All spots, Pareto set marked; each MTP profile against the baseline."""

    spots: tuple[Spot, ...]
    comparisons: tuple[Comparison, ...]
    crossovers: tuple[Crossover, ...]
    not_like_for_like: tuple[str, ...]
    simulated: bool

    def as_json(self) -> dict[str, object]:
        return {
            "spots": [spot.as_json() for spot in self.spots],
            "front": [
                {"profile": spot.profile, "concurrency": spot.load.concurrency, "rate": spot.load.rate}
                for spot in self.spots
                if spot.front
            ],
            "crossovers": [one.as_json() for one in self.crossovers],
            "break_even": [
                {
                    "profile": one.b,
                    "against": one.a,
                    "concurrency": at.load.concurrency,
                    "accept_length": at.acceptance.b,
                    "break_even_accept_length": at.acceptance.break_even.value,
                    "low": at.acceptance.break_even.low,
                    "high": at.acceptance.break_even.high,
                }
                for one in self.comparisons
                for at in one.loads
                if at.acceptance and at.acceptance.break_even is not None
            ],
            "not_like_for_like": list(self.not_like_for_like),
            "simulated": self.simulated,
        }


class UnknownBaseline(LookupError):
    """The profile that the others were to be compared with was not measured among them."""


def frontier(measurements: Sequence[Measured], *, baseline: str | None = None) -> Frontier:
    """Over measurements of one host and workload; profiles are told apart by their label.

    baseline: the profile that the others are compared with; by default the one without speculative decoding, else the
    first by name. UnknownBaseline if it is not among the measured.
    """
    arms = by_label(measurements)
    if baseline is not None and baseline not in arms:  # told apart by its settings, a profile has several labels
        named = [label for label, runs in arms.items() if runs[0].name == baseline]
        if not named:
            raise UnknownBaseline(f"--baseline {baseline}: measured here are {', '.join(arms) or 'none'}")
        baseline = named[0]
    spots = pareto([spot for label, runs in arms.items() for spot in spots_of(label, runs)])
    base = baseline or _baseline(arms)
    comparisons = tuple(compare(arms[base], runs) for label, runs in arms.items() if label != base) if base else ()
    pairs = {
        (one, other): likeness(arms[one], arms[other]).differences for one, other in itertools.combinations(arms, 2)
    }
    return Frontier(
        spots=spots,
        comparisons=comparisons,
        crossovers=tuple(crossover(one) for one in comparisons),
        not_like_for_like=collapsed(pairs),
        simulated=any(one.simulated for one in measurements),
    )


def by_label(measurements: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Grouped by profile, in the order of the first run of each."""
    arms: dict[str, list[Measured]] = {}
    for one in sorted(measurements, key=lambda one: one.created_utc or one.run_id):
        arms.setdefault(one.label, []).append(one)
    return arms


def spots_of(label: str, runs: Sequence[Measured]) -> list[Spot]:
    """One spot a load; loads without a valid pass give none."""
    loads = sorted({load for run in runs for load in run.loads()}, key=lambda load: load.order)
    found = []
    for load in loads:
        passes = [one for run in runs for one in run.passes if one.load == load and one.counts_for_speed]
        user, total = user_speed(passes), total_speed(passes)
        if user is None or total is None:
            continue
        gpus = runs[-1].provenance.gpu_count or 1
        found.append(
            Spot(
                profile=label,
                load=load,
                user_tok_s=user,
                gpu_tok_s=_scaled(total, 1 / gpus),
                ttft_p90_ms=_median(passes, "ttft_ms"),
                tpot_p90_ms=_median(passes, "tpot_ms"),
                runs=tuple(run.run_id for run in runs if any(one.load == load for one in run.passes)),
            )
        )
    return found


def pareto(spots: Sequence[Spot]) -> tuple[Spot, ...]:
    """The same spots; `front` where no other is at least as good in both figures and better in one."""

    def beaten(spot: Spot) -> bool:
        own = (spot.user_tok_s.value, spot.gpu_tok_s.value)
        return any(
            (user, gpu) != own and user >= own[0] and gpu >= own[1]
            for user, gpu in ((other.user_tok_s.value, other.gpu_tok_s.value) for other in spots)
        )

    return tuple(replace(spot, front=not beaten(spot)) for spot in spots)


def user_speed(passes: Sequence[Pass]) -> Interval | None:
    """Decode tok/s of a request; from 1000 / tpot p50 where records per request are missing."""
    return _speed(passes, decode_arm, lambda one: 1e3 / tpot if (tpot := one.number("tpot_ms", "p50")) else None)


def total_speed(passes: Sequence[Pass]) -> Interval | None:
    """Output tok/s of all requests together."""
    return _speed(passes, batch_arm, lambda one: one.number("output_tok_s"))


def crossover(comparison: Comparison) -> Crossover:
    """From the ratios of a comparison, over concurrency."""
    a, b = comparison.a, comparison.b
    told = [(float(one.load.concurrency), one.batch) for one in comparison.loads if one.load.concurrency and one.batch]
    if len(told) < 2:
        return Crossover(a, b, None, None, None, f"{b} and {a} share fewer than two concurrencies: no crossover to see")
    value = _crossing([(at, batch.value) for at, batch in told])
    low = _crossing([(at, batch.low) for at, batch in told if batch.low is not None])
    high = _crossing([(at, batch.high) for at, batch in told if batch.high is not None])
    most = max(at for at, _ in told)
    above = [at for at, batch in told if batch.value >= 1]
    if value is None and above and len(above) < len(told):
        slow = max(at for at, batch in told if batch.value < 1)
        text = f"{b} is slower than {a} up to concurrency {slow:g}, and faster from {min(at for at in above if at > slow):g} on"
    elif value is None:
        side = "faster" if above else "slower"
        text = f"{b} is {side} than {a} at every measured concurrency, up to {most:g}"
    else:
        ends = [f"{end:.0f}" if end is not None else "beyond what was measured" for end in (low, high)]
        text = f"{b} stops paying against {a} at concurrency {value:.0f} ({ends[0]} to {ends[1]})"
    return Crossover(a, b, value, low, high, text)


def _crossing(ratios: Sequence[tuple[float, float]]) -> float | None:
    """The last fall through 1, interpolated in log concurrency and log ratio."""
    for (left, above), (right, below) in reversed(list(itertools.pairwise(sorted(ratios)))):
        if above >= 1 > below:
            share = math.log(above) / (math.log(above) - math.log(below))
            return math.exp(math.log(left) + share * (math.log(right) - math.log(left)))
    return None


def _baseline(arms: dict[str, list[Measured]]) -> str | None:
    if len(arms) < 2:
        return None
    plain = [
        label
        for label, runs in arms.items()
        if runs[0].provenance.args and not any(name.startswith("speculative_") for name in runs[0].provenance.args)
    ]
    return "baseline" if "baseline" in arms else min(plain or arms)


def _speed(
    passes: Sequence[Pass],
    made: Callable[[Sequence[Pass], Sequence[str]], Arm | None],
    own: Callable[[Pass], float | None],
) -> Interval | None:
    if not passes:
        return None
    arm = made(passes, prompts_of(passes))
    if arm is not None:
        return figure(arm)
    known = [value for one in passes if (value := own(one))]
    if not known:
        return None
    # Only the spread over runs is left: the ratio to 1.
    return ratio_of_runs([1.0], known)


def _scaled(interval: Interval, by: float) -> Interval:
    low = None if interval.low is None else interval.low * by
    high = None if interval.high is None else interval.high * by
    return Interval(interval.value * by, low, high)


def _median(passes: Sequence[Pass], name: str) -> float | None:
    known = [value for one in passes if (value := one.number(name, "p90")) is not None]
    return statistics.median(known) if known else None
