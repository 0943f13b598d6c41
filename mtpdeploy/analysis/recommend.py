"""Which profile for a workload, by what was measured: the evidence, what it gives up, what would change the answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mtpdeploy.analysis.frontier import Frontier, Spot, by_label, frontier
from mtpdeploy.analysis.model import setting_of
from mtpdeploy.analysis.samples import Measured, Pass
from mtpdeploy.inventory.values import as_sets
from mtpdeploy.sglang.verify import acceptance_mismatch

Kind = Literal["interactive", "batch", "mixed"]


class Limit(Protocol):
    """One objective of `--slo`, such as `tpot_p90_ms<20` (mtpdeploy.bench.metrics.Limit)."""

    @property
    def key(self) -> str: ...
    @property
    def below(self) -> bool: ...
    @property
    def bound(self) -> float: ...
    def holds(self, value: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class Judged:
    """A profile at a load against the objectives.

    broken: objective → the measured value that breaks it. unknown: objectives that too few samples leave open.
    miss: by how much the worst objective is missed, as a ratio (1.0: met); score: what is maximised among those that meet.
    """

    spot: Spot
    broken: Mapping[str, float]
    unknown: tuple[str, ...]
    miss: float
    score: float
    requests_s: float | None

    @property
    def meets(self) -> bool:
        return not self.broken and not self.unknown

    def as_json(self) -> dict[str, object]:
        return {
            **self.spot.as_json(),
            "meets": self.meets,
            "broken": dict(self.broken),
            "unknown": list(self.unknown),
            "miss": self.miss,
            "requests_s": self.requests_s,
        }


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to measure next, ready to paste, and why."""

    command: str
    why: str

    def as_json(self) -> dict[str, object]:
        return {"command": self.command, "why": self.why}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """chosen: None where no measured profile meets the objectives; then `nearest` is the one that misses them least."""

    kind: Kind
    slo: tuple[str, ...]
    rate: float | None
    host: str | None
    chosen: Judged | None
    nearest: Judged | None
    args: Mapping[str, object]
    evidence: tuple[str, ...]
    why: str
    gives_up: tuple[str, ...]
    would_change: tuple[str, ...]
    limits: tuple[str, ...]
    suggestions: tuple[Mapping[str, object], ...]
    experiments: tuple[Experiment, ...]
    judged: tuple[Judged, ...]
    frontier: Frontier
    notes: tuple[str, ...]
    told: bool = False  # from figures that somebody gave: nothing was measured here

    @property
    def exit_code(self) -> int:
        return 0 if self.chosen else 12

    @property
    def verdict(self) -> str:
        if self.told:
            return "told, not measured"
        return "recommended" if self.chosen else "no measured profile meets it"

    def as_json(self) -> dict[str, object]:
        best = self.chosen or self.nearest
        return {
            "not_like_for_like": list(self.frontier.not_like_for_like),
            "simulated": self.frontier.simulated,
            "verdict": self.verdict,
            "profile": self.chosen.spot.profile if self.chosen else None,
            "concurrency": self.chosen.spot.load.concurrency if self.chosen else None,
            "why": self.why,
            "settings": dict(self.args),
            "evidence": list(self.evidence),
            "nearest": self.nearest.as_json() if self.nearest else None,
            "gives_up": list(self.gives_up),
            "would_change": list(self.would_change),
            "limits": list(self.limits),
            "suggestions": [dict(one) for one in self.suggestions],
            "next_experiments": [one.as_json() for one in self.experiments],
            "workload": self.kind,
            "slo": list(self.slo),
            "rate": self.rate,
            "host": self.host,
            "figures": best.as_json() if best else None,
            "candidates": [one.as_json() for one in self.judged],
            "crossovers": [one.as_json() for one in self.frontier.crossovers],
            "notes": list(self.notes),
        }


def recommend(
    measurements: Sequence[Measured],
    kind: Kind,
    *,
    slo: Sequence[Limit] = (),
    rate: float | None = None,
    baseline: str | None = None,
    memory: Mapping[str, Mapping[str, object]] | None = None,
) -> Recommendation:
    """Over measurements of one host. ValueError without any valid one.

    interactive: the fastest answers for one user (with objectives or a rate: the most output tok/s that keeps them);
    batch: the most output tok/s; mixed: the largest product of both. memory: profile → the budget of its launch.
    """
    memory = memory or {}
    arms = by_label(measurements)
    traded = frontier(measurements, baseline=baseline)
    if not traded.spots:
        raise ValueError("no valid point with output tok/s was measured")
    judged = tuple(
        _judge(spot, arms[spot.profile], kind, slo, rate, bounded=bool(slo) or rate is not None)
        for spot in traded.spots
    )
    good = [one for one in judged if one.meets]
    chosen = max(good, key=lambda one: one.score, default=None)
    nearest = None if chosen else min(judged, key=lambda one: (len(one.unknown), one.miss, -one.score))
    subject = chosen or nearest
    assert subject is not None
    own = arms[subject.spot.profile]
    budget = memory.get(subject.spot.profile, {})
    limits, suggestions = _limits(own, budget)
    return Recommendation(
        kind=kind,
        slo=tuple(str(limit) for limit in slo),
        rate=rate,
        host=own[-1].provenance.host or own[-1].provenance.endpoint,
        chosen=chosen,
        nearest=nearest,
        args=own[-1].provenance.args,
        evidence=subject.spot.runs,
        why=_why(subject, chosen is not None, kind),
        gives_up=_gives_up(subject, judged) if chosen else (),
        would_change=_would_change(subject, traded, rate) if chosen else (),
        limits=limits,
        suggestions=suggestions,
        experiments=_experiments(subject, judged, own, suggestions, chosen is not None, traded),
        judged=judged,
        frontier=traded,
        notes=tuple(dict.fromkeys(note for runs in arms.values() for note in _acceptance_notes(runs))),
    )


def _judge(
    spot: Spot, runs: Sequence[Measured], kind: Kind, slo: Sequence[Limit], rate: float | None, *, bounded: bool
) -> Judged:
    passes = [one for run in runs for one in run.passes if one.load == spot.load and one.valid]
    broken: dict[str, float] = {}
    unknown: list[str] = []
    miss = 1.0
    for limit in slo:
        values = [value for one in passes if (value := _figure(one, limit.key)) is not None]
        if not values:
            unknown.append(str(limit))
            continue
        worst = max(values) if limit.below else min(values)
        if not limit.holds(worst):
            broken[str(limit)] = worst
            gap = worst / limit.bound if limit.below else limit.bound / worst
            miss = max(miss, gap if math.isfinite(gap) else 1e9)
    capacity = _requests_s(passes)
    if rate is not None:
        if capacity is None:
            unknown.append(f"{rate:g} requests/s")
        elif capacity < rate:
            broken[f"{rate:g} requests/s"] = capacity
            miss = max(miss, rate / capacity)
    user, total = spot.user_tok_s.value, spot.gpu_tok_s.value
    score = {"interactive": total if bounded else user, "batch": total, "mixed": math.sqrt(user * total)}[kind]
    return Judged(spot, broken, tuple(unknown), miss, score, capacity)


def _figure(one: Pass, key: str) -> float | None:
    """`ttft_p90_ms` → ttft_ms.p90; `request_p50_tok_s` → request_tok_s.p50; others stand as they are."""
    for share in ("p50", "p90", "p99", "max", "mean"):
        if key.endswith(f"_{share}_ms"):
            return one.number(f"{key.removesuffix(f'_{share}_ms')}_ms", share)
        if key == f"request_{share}_tok_s":
            return one.number("request_tok_s", share)
    return one.number(key)


def _requests_s(passes: Sequence[Pass]) -> float | None:
    """Completed requests a second: what a closed loop of this load turns over."""
    rates = [
        done / duration
        for one in passes
        if (done := one.number("completed")) and (duration := one.number("duration_s"))
    ]
    return min(rates) if rates else None


def _why(subject: Judged, met: bool, kind: Kind) -> str:
    spot = subject.spot
    figures = (
        f"{spot.user_tok_s.value:.0f} tok/s for a user, {spot.gpu_tok_s.value:.0f} output tok/s per GPU at {spot.load}"
    )
    if met:
        return f"{spot.profile}: {figures}, the best of what was measured for {kind} work"
    parts = [
        f"it turns over {value:.3g} of the {name}" if name.endswith(" requests/s") else f"{name} is {value:.3g}"
        for name, value in subject.broken.items()
    ]
    parts += [f"{name} was not measured well enough" for name in subject.unknown]
    return f"no measured profile meets it; nearest is {spot.profile}: {figures}, but {'; '.join(parts)}"


def _gives_up(chosen: Judged, judged: Sequence[Judged]) -> tuple[str, ...]:
    """Against the best of the others in each figure."""
    found = []
    own = chosen.spot
    for text, pick in (("output tok/s per GPU", "gpu_tok_s"), ("tok/s for a user", "user_tok_s")):
        best = max((one.spot for one in judged), key=lambda spot: float(getattr(spot, pick).value))
        most, mine = getattr(best, pick).value, getattr(own, pick).value
        if most > mine * 1.02:
            found.append(
                f"{1 - mine / most:.0%} of the {text} that {best.profile} reaches at {best.load} ({most:.0f} against {mine:.0f})"
            )
    return tuple(found)


def _would_change(subject: Judged, traded: Frontier, rate: float | None) -> tuple[str, ...]:
    found = []
    profile = subject.spot.profile
    for comparison, crossing in zip(traded.comparisons, traded.crossovers, strict=True):
        if profile not in (comparison.a, comparison.b):
            continue
        if crossing.at is not None:
            found.append(f"more than {crossing.at:.0f} concurrent requests: {crossing.text}")
        found.extend(
            f"an accept length under {at.acceptance.break_even.value:.2f} at {at.load} (measured {at.acceptance.b:.2f}): "
            f"{comparison.a} would be faster"
            for at in comparison.loads
            if comparison.b == profile and at.load == subject.spot.load and at.acceptance and at.acceptance.break_even
        )
    if subject.requests_s is not None:
        found.append(f"more than {subject.requests_s:.2f} requests/s at {subject.spot.load}: it would queue")
    if rate is None and not found:
        found.append("another workload: prompts decide how many drafts are accepted")
    return tuple(found)


def _limits(
    own: Sequence[Measured], budget: Mapping[str, object]
) -> tuple[tuple[str, ...], tuple[Mapping[str, object], ...]]:
    """What caps the running requests, in words, and what moves it (with its cost) by the memory budget."""
    capacity = own[-1].provenance.capacity
    found = []
    running = capacity.get("max_running_requests", budget.get("max_running_requests"))
    slots = capacity.get("slots", budget.get("slots"))
    each = capacity.get("slots_per_request", budget.get("slots_per_request"))
    if isinstance(slots, int) and isinstance(each, int) and each and isinstance(running, int):
        bound = slots // each
        if bound == running:
            by = own[-1].provenance.args.get("max_mamba_cache_size")
            set_by = (
                "A flag sets that, not the memory" if by is not None else "SGLang sized them from the memory it had"
            )
            found.append(f"{running} requests at a time: {slots} state slots // {each} a request. {set_by}")
        else:
            found.append(f"{running} requests at a time, bound by {budget.get('bound_by', 'another limit')}")
    offered = budget.get("suggestions")
    suggestions = [one for one in offered if isinstance(one, Mapping)] if isinstance(offered, list) else []
    return tuple(found), tuple(suggestions)


def _experiments(
    subject: Judged,
    judged: Sequence[Judged],
    own: Sequence[Measured],
    suggestions: Sequence[Mapping[str, object]],
    met: bool,
    traded: Frontier,
) -> tuple[Experiment, ...]:
    host = own[-1].provenance.host
    at = f" --host {host}" if host else ""
    profile = own[-1].name
    found = []
    if subject.unknown:
        found.append(
            Experiment(
                f"mtpdeploy bench{at} --profile {profile} --concurrency {subject.spot.load.concurrency or 1} --requests 200",
                f"too few samples for {', '.join(subject.unknown)}",
            )
        )
    labels = list(dict.fromkeys(one.spot.profile.partition(" [")[0] for one in judged))
    unsure = any(
        at.verdict == "can't tell" and at.load == subject.spot.load for one in traded.comparisons for at in one.loads
    )
    if len(labels) > 1 and (traded.not_like_for_like or unsure):
        other = next(label for label in labels if label != profile)
        why = (
            "the profiles were not measured alike"
            if traded.not_like_for_like
            else f"the difference at {subject.spot.load} is not beyond the noise"
        )
        found.append(
            Experiment(f"mtpdeploy bench{at} --arms {other},{profile} --repeat 4", f"{why}: measure them in turns")
        )
    limit = setting_of(own[-1]).running
    highest = max(
        (one.spot.load.concurrency or 0 for one in judged if one.spot.profile == subject.spot.profile), default=0
    )
    if suggestions and limit is not None and highest >= limit:
        given = suggestions[0].get("set")
        sets = as_sets(given) if isinstance(given, Mapping) else ""
        if sets:
            found.append(
                Experiment(f"mtpdeploy deploy{at} --profile {profile} {sets}", f"only {limit} requests run at once now")
            )
    if not met and not found:
        found.append(
            Experiment(
                f"mtpdeploy tune{at} --profile {profile}", "no measured setting is enough: search for one that is"
            )
        )
    if len(labels) == 1:
        found.append(
            Experiment(
                f"mtpdeploy bench{at} --arms baseline,{profile}", "only one profile was measured: nothing to compare"
            )
        )
    return tuple(found)


def _acceptance_notes(runs: Sequence[Measured]) -> list[str]:
    """One line for each pair of figures that do not fit, with the loads that have it."""
    found: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        drafts = setting_of(run).draft_tokens
        for one in run.passes:
            length, rate = one.number("accept_length"), one.number("accept_rate")
            said = acceptance_mismatch(length, rate, drafts) if length and rate and drafts > 1 else None
            if said:
                found.setdefault((run.run_id, said), []).append(str(one.load))
    return [f"{run_id} at {', '.join(dict.fromkeys(loads))}: {said}" for (run_id, said), loads in found.items()]
