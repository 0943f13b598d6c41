"""Figures that somebody tells, without the runs behind them: what they can say, and that they decide nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtpdeploy.analysis.provenance import Provenance
from mtpdeploy.analysis.recommend import Experiment, Kind, Limit, Recommendation, recommend
from mtpdeploy.analysis.samples import Load, Measured, Pass

FIGURE = re.compile(r"(?P<arm>[^\s@=]+)@(?P<load>\d+)=(?P<low>\d+(?:\.\d+)?)(?:(?:\.\.|-|–)(?P<high>\d+(?:\.\d+)?))?")
SAID = re.compile(r"(?P<arm>[^\s@=.]+)\.(?P<key>[a-z_]+)=(?P<value>\S+)")
CONDITIONS = ("day", "host", "gpu", "sglang_version", "model", "workload", "prompts", "output_tokens", "runs")
NUMBERS = ("accept_length", "accept_rate", "draft_tokens")
# What a fair comparison holds equal, in the order in which it is asked for.
WANTED = (("day", "day"), ("host", "host"), ("gpu", "GPU"), ("sglang_version", "SGLang version"), ("workload", "workload"),
          ("output_tokens", "output tokens"))  # fmt: skip
EXAMPLE = "baseline@1=26.7 mtp@1=62..77 mtp@4=234 mtp.accept_length=3.2 mtp.accept_rate=0.84"


@dataclass(frozen=True, slots=True)
class Claim:
    """What is told of one arm. points: concurrency → output tok/s of all requests together, as a range."""

    arm: str
    points: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)

    def number(self, key: str) -> float | None:
        return float(self.said[key]) if key in self.said else None

    @property
    def repeats(self) -> int:
        """Runs behind a figure, as told; 1 where nobody says."""
        told = self.said.get("runs", "1")
        return int(told) if told.isdigit() else 1


@dataclass(frozen=True, slots=True)
class Known:
    """What the log of a launch tells of the arm that it is of: its arguments and what caps its running requests."""

    args: Mapping[str, object] = field(default_factory=dict)
    memory: Mapping[str, object] = field(default_factory=dict)
    sglang_version: str | None = None


def parse(text: str) -> tuple[Claim, ...]:
    """`baseline@1=26.7 mtp@1=62..77 mtp.accept_length=3.2` → a claim an arm, in the order of naming.

    ValueError says which part is wrong and what would be right.
    """
    points: dict[str, dict[int, tuple[float, float]]] = {}
    said: dict[str, dict[str, str]] = {}
    for part in filter(None, re.split(r"[\s,;]+", text)):
        if found := FIGURE.fullmatch(part):
            low, high = _positive(part, found["low"]), _positive(part, found["high"] or found["low"])
            load = int(found["load"])
            if not 0 < load < 1_000_000 or high < low:
                raise ValueError(
                    f"{part!r}: should be ARM@CONCURRENCY=TOK_S, or a range from low to high such as mtp@1=62..77"
                )
            points.setdefault(found["arm"], {})[load] = (low, high)
            said.setdefault(found["arm"], {})
        elif (found := SAID.fullmatch(part)) and found["key"] in (*CONDITIONS, *NUMBERS):
            if found["key"] in NUMBERS:
                _positive(part, found["value"])
            said.setdefault(found["arm"], {})[found["key"]] = found["value"]
        else:
            raise ValueError(
                f"{part!r} is no figure; write ARM@CONCURRENCY=TOK_S, or ARM.KEY=VALUE with one of "
                f"{', '.join((*NUMBERS, *CONDITIONS))}; such as {EXAMPLE}"
            )
    without = [arm for arm in said if arm not in points]
    if not points or without:
        raise ValueError(f"{', '.join(without) or 'nobody'} has no tok/s; write such as {EXAMPLE}")
    return tuple(Claim(arm, points[arm], said[arm]) for arm in points)


def _positive(part: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{part!r}: {text!r} is no number") from None
    if not 0 < value < 1e9:
        raise ValueError(f"{part!r}: should be above 0")
    return value


def advise(
    claims: Sequence[Claim],
    kind: Kind,
    *,
    baseline: str | None = None,
    slo: Sequence[Limit] = (),
    rate: float | None = None,
    known: Mapping[str, Known] | None = None,
) -> Recommendation:
    """As `recommend`, with `told` set: nothing is chosen, and the first thing said is what these figures leave open."""
    known = known or {}
    base = baseline or ("baseline" if any(one.arm == "baseline" for one in claims) else None)
    measured = [_measured(one, known.get(one.arm, Known())) for one in claims]
    made = recommend(
        measured, kind, slo=slo, rate=rate, baseline=base,
        memory={arm: one.memory for arm, one in known.items() if one.memory},
    )  # fmt: skip
    unlike = _unlike(claims, base, known)
    subject = made.chosen or made.nearest
    assert subject is not None
    figures = "; ".join(
        f"{one.arm} at concurrency {load}: {_range(low, high)} tok/s"
        for one in claims
        for load, (low, high) in sorted(one.points.items())
    )
    # The limits that matter are those of the arm whose log is there, whichever of them came out ahead.
    limits, suggestions = made.limits, made.suggestions
    for arm, one in known.items():
        if one.memory and arm != subject.spot.profile:
            own = recommend([m for m in measured if m.name == arm], kind, memory={arm: one.memory})
            limits, suggestions = (*limits, *own.limits), (*suggestions, *own.suggestions)
    return replace(
        made,
        told=True,
        chosen=None,
        nearest=subject,
        why=f"told, not measured here, so nothing is recommended from it: {figures}",
        gives_up=(),
        would_change=(),
        limits=limits,
        suggestions=suggestions,
        experiments=(_campaign(claims, base, made.host), *(one for one in made.experiments if "deploy" in one.command)),
        frontier=replace(made.frontier, not_like_for_like=(*unlike, *made.frontier.not_like_for_like)),
        notes=(
            *made.notes,
            "a user's tok/s is the whole over the concurrency here: the figures carry no time to the first token",
        ),
    )


def _measured(claim: Claim, known: Known) -> Measured:
    args: dict[str, object] = dict(known.args)
    if (drafts := claim.number("draft_tokens")) is not None:
        args["speculative_num_draft_tokens"] = int(drafts)
    said: dict[str, Any] = {
        key: value for key, value in claim.said.items() if key in CONDITIONS and key not in ("day", "runs")
    }
    if "output_tokens" in said:
        said["output_tokens"] = int(said["output_tokens"]) if said["output_tokens"].isdigit() else None
    said.setdefault("sglang_version", known.sglang_version)
    own = Provenance.from_json({**said, "profile": claim.arm, "args": args})
    passes = []
    for index, (load, (low, high)) in enumerate(sorted(claim.points.items())):
        speed = math.sqrt(low * high)
        figures = {
            "index": index, "concurrency": load, "output_tok_s": speed, "tpot_ms": {"p50": 1e3 * load / speed},
            "accept_length": claim.number("accept_length"), "accept_rate": claim.number("accept_rate"),
        }  # fmt: skip
        passes.append(Pass(Load(load), figures))
    day = claim.said.get("day")
    return Measured(f"told:{claim.arm}", f"{day}T00:00:00Z" if day else None, own, tuple(passes))


def _unlike(claims: Sequence[Claim], base: str | None, known: Mapping[str, Known]) -> tuple[str, ...]:
    """What is not the same, or not said to be, before any ratio of told figures."""
    found = []
    by_arm = {one.arm: one for one in claims}
    others = [one for one in claims if one.arm != base]
    for other in others if base else ():
        own = by_arm[str(base)]
        missing = []
        for key, name in WANTED:
            lacking = [
                one.arm
                for one in (own, other)
                if key not in one.said and not (key == "sglang_version" and known.get(one.arm, Known()).sglang_version)
            ]
            if lacking:
                missing.append(name if len(lacking) == 2 else f"{name} of {lacking[0]}")
        if missing:
            found.append(
                f"the baseline ({own.arm}) is not like for like with {other.arm} as far as these figures tell: "
                f"not given: {', '.join(missing)}"
            )
        alone = sorted(set(other.points) - set(own.points))
        if alone:
            found.append(
                f"{other.arm} at concurrency {', '.join(map(str, alone))} has no {own.arm} at the same concurrency beside it"
            )
    single = [one.arm for one in claims if one.repeats < 2]
    if single:
        found.append(f"one figure each of {', '.join(single)}: nothing was repeated that could show how far they vary")
    return tuple(found)


def _range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _campaign(claims: Sequence[Claim], base: str | None, host: str | None) -> Experiment:
    loads = ",".join(map(str, sorted({load for one in claims for load in one.points})))
    others = ",".join(one.arm for one in claims if one.arm != base) or claims[0].arm
    at = f" --host {host}" if host else ""
    against = f" --baseline {base}" if base and base != "baseline" else ""
    return Experiment(
        f"mtpdeploy campaign{at}{against} --profile {others} --concurrency {loads}",
        "measures both in turns, on one day, with the same prompts, more than once",
    )
