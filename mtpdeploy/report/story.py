"""Gathers from run folders what a report tells: the sides, the comparison, the trade, memory, arguments, the launch."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtpdeploy.analysis.compare import Comparison, compare
from mtpdeploy.analysis.frontier import Frontier, by_label, frontier
from mtpdeploy.analysis.likeness import parse_utc
from mtpdeploy.analysis.samples import Measured, told_apart
from mtpdeploy.errors import MtpError, UsageError
from mtpdeploy.store import Run, Store
from mtpdeploy.store.launches import deploys_of, document, readable
from mtpdeploy.store.measured import arms_of, measured

BINS = 60  # of a point's time, for what arrived when
MOST_DRAWN = 400  # records of a log: more are no more to see


@dataclass(frozen=True, slots=True)
class Side:
    """One profile of the report: its measurements, and what its launch left behind.

    memory: the plan's budget; rules: argument → why SGLang changes it, by the plan; log: the log summary of the
        launch; verified: the answer of verify. Each is {} where no run has it.
    load: (seconds, running, queued) while the last point was measured, where the server told.
    arrived: (seconds, output tok/s) of the last point, as its chunks reached the client.
    decodes: the decode records of the server's log, each with `at_s`. phases: (phase, seconds) of its start, in order.
    """

    label: str
    measurements: tuple[Measured, ...]
    memory: Mapping[str, object] = field(default_factory=dict)
    log: Mapping[str, object] = field(default_factory=dict)
    verified: Mapping[str, object] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)
    load: tuple[tuple[float, float, float], ...] = ()
    arrived: tuple[tuple[float, float], ...] = ()
    decodes: tuple[Mapping[str, object], ...] = ()
    phases: tuple[tuple[str, float], ...] = ()

    def decoded(self, name: str) -> tuple[tuple[float, float], ...]:
        """(seconds, figure) of the decode records that have it."""
        return tuple(
            (float(at), float(value))
            for one in self.decodes
            if isinstance(at := one.get("at_s"), (int, float))
            and isinstance(value := one.get(name), (int, float))
            and math.isfinite(value)
        )


@dataclass(frozen=True, slots=True)
class Story:
    """Everything on the page, decided; the page only lays it out."""

    title: str
    sides: tuple[Side, ...]
    comparisons: tuple[Comparison, ...]
    frontier: Frontier | None
    runs: tuple[Run, ...]
    simulated: bool
    damaged: tuple[str, ...]
    campaign: Mapping[str, object] = field(default_factory=dict)  # its campaign.json, where the report is of a campaign


def gathered(store: Store, runs: Sequence[Run]) -> Story:
    """Of benchmarks, and of campaigns and demos, which stand for the benchmarks that they name in their summary.

    Raises UsageError if nothing among the runs was measured.
    """
    expanded = _expanded(store, runs)
    read = [(run, _arms(run)) for run in expanded]
    damaged = [held.message for _, held in read if isinstance(held, MtpError)]
    found = [one for _, held in read if not isinstance(held, MtpError) for one in held]
    kept = [run for run, held in read if not isinstance(held, MtpError)]
    if not found:
        raise UsageError(
            "nothing to report: " + ("; ".join(damaged) or "no run was given"),
            next_commands=["mtpdeploy runs --kind bench"],
        )
    apart = told_apart(found)
    grouped = by_label(apart)
    labels = {
        label: grouped[label] for label in dict.fromkeys(one.label for one in apart)
    }  # the first named is the baseline
    sides = tuple(_side(store, label, tuple(arm), kept) for label, arm in labels.items())
    first, *others = labels.values()
    comparisons = tuple(compare(first, other) for other in others)
    names = " and ".join(labels)
    where = found[-1].provenance.host or found[-1].provenance.endpoint
    return Story(
        title=f"{names} on {where}" if where else names,
        sides=sides,
        comparisons=comparisons,
        frontier=frontier([one for arm in labels.values() for one in arm], baseline=next(iter(labels))),
        runs=tuple(kept),
        simulated=any(one.simulated for one in found),
        damaged=tuple(damaged),
        campaign=next(
            (held for run in runs if run.kind == "campaign" and (held := document(run, "campaign.json"))), {}
        ),
    )


def _arms(run: Run) -> list[Measured] | MtpError:
    try:
        arms = arms_of(run)
        return [measured(run, arm) for arm in arms] if len(arms) > 1 else [measured(run)]
    except MtpError as exc:
        return exc


def _expanded(store: Store, runs: Sequence[Run]) -> list[Run]:
    """A campaign or demo is replaced by the benchmarks that it made, wherever its folder names them."""
    found: dict[str, Run] = {}
    for run in runs:
        named = [*_names(run.summary.get("runs")), *_names(run.meta.get("runs"))]
        for name in named or [run.id]:
            held = run if name == run.id else readable(store, name)
            if held is not None:
                found[name] = held
    return [run for run in found.values() if run.kind == "bench" or len(found) == 1]


def _names(value: object) -> list[str]:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [item for item in items if isinstance(item, str)]


def _side(store: Store, label: str, arm: tuple[Measured, ...], runs: Sequence[Run]) -> Side:
    own = {one.run_id.partition(":")[0] for one in arm}
    launches = {one.provenance.launch_id for one in arm if one.provenance.launch_id}
    folders = [run for run in runs if run.id in own] + list(deploys_of(store, launches))
    plan = _document(folders, "plan.json")
    last = next((run for run in reversed(runs) if run.id in own), None)
    memory, effective = plan.get("memory"), plan.get("effective")
    rules = {
        str(one.get("name")): str(one.get("rule"))
        for one in (effective if isinstance(effective, list) else ())
        if isinstance(one, Mapping)
    }
    return Side(
        label=label,
        measurements=arm,
        memory=memory if isinstance(memory, Mapping) else {},
        log=_document(folders, "log_summary.json"),
        verified=_document(folders, "verify.json"),
        rules=rules,
        load=_load(last),
        arrived=_arrived(last, arm[-1]),
        decodes=_decodes(last, arm[-1].provenance.arm),
        phases=_phases(last, arm[-1].provenance.arm),
    )


def _load(run: Run | None) -> tuple[tuple[float, float, float], ...]:
    """Of the last point with samples in measured.jsonl."""
    found: tuple[tuple[float, float, float], ...] = ()
    for line in run.read_jsonl("measured.jsonl") if run else ():
        held = line.get("samples")
        told = [
            (float(one["at_s"]), float(one["running"]), float(one["queued"]))
            for one in (held if isinstance(held, list) else ())
            if isinstance(one, Mapping)
            and all(isinstance(one.get(name), (int, float)) for name in ("at_s", "running", "queued"))
        ]
        found = tuple(told) if len(told) > 1 else found
    return found


def _arrived(run: Run | None, held: Measured) -> tuple[tuple[float, float], ...]:
    """Output tok/s in BINS equal parts of the last point. A chunk's tokens count where it arrived; () where chunks were not counted."""
    index = held.passes[-1].figures.get("index") if held.passes else None
    if run is None or not isinstance(index, int):
        return ()
    gained: list[tuple[float, float]] = []
    for line in _of_point(run, index):
        start, times, tokens = line.get("start_us"), line.get("times_us"), line.get("tokens")
        if not isinstance(start, (int, float)) or not isinstance(times, list) or not isinstance(tokens, list):
            continue
        before = 0.0
        for at, sum_ in zip(times, tokens, strict=False):
            if isinstance(at, (int, float)) and isinstance(sum_, (int, float)):
                gained.append(((start + at) / 1e6, sum_ - before))
                before = sum_
    end = max((at for at, _ in gained), default=0.0)
    if len(gained) < 2 or not 0 < end < 1e7:
        return ()
    width, bins = end / BINS, [0.0] * BINS
    for at, count in gained:
        bins[min(max(int(at / width), 0), BINS - 1)] += count
    return tuple(((place + 0.5) * width, count / width) for place, count in enumerate(bins))


def _of_point(run: Run, index: int) -> Iterator[Mapping[str, Any]]:
    """The records of one point. Only its lines are parsed: a long run has hundreds of megabytes of others."""
    named = re.compile(rb'"point":\s*%d\b' % index)
    with contextlib.suppress(OSError), run.file("records.jsonl").open("rb") as file:
        for line in file:
            if not named.search(line, 0, 200):
                continue
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, Mapping) and value.get("point") == index:
                    yield value


def _decodes(run: Run | None, arm: str | None) -> tuple[Mapping[str, object], ...]:
    """Of one rank, with seconds since the first; thinned to MOST_DRAWN."""
    lines = [line for line in run.read_jsonl("decode.jsonl") if line.get("arm") in (None, arm)] if run else []
    if not lines:
        return ()
    own = [
        (at, line)
        for line in lines
        if line.get("rank") == lines[0].get("rank") and (at := parse_utc(_text(line, "at")))
    ]
    step = max(1, len(own) // MOST_DRAWN)
    return tuple({**line, "at_s": (at - own[0][0]).total_seconds()} for at, line in own[::step])


def _phases(run: Run | None, arm: str | None) -> tuple[tuple[str, float], ...]:
    """Until the server was ready; a phase that the log's clock gives no time is left out."""
    lines = [line for line in run.read_jsonl("startup.jsonl") if line.get("arm") in (None, arm)] if run else []
    seen = [(at, str(line.get("phase"))) for line in lines if (at := parse_utc(_text(line, "at")))]
    found = []
    for (at, phase), (after, _) in itertools.pairwise(seen):
        if phase in ("ready", "serving"):
            break
        if 0 < (seconds := (after - at).total_seconds()) < 1e6:
            found.append((phase, seconds))
    return tuple(found)


def _text(line: Mapping[str, object], key: str) -> str | None:
    value = line.get(key)
    return value if isinstance(value, str) else None


def _document(folders: Sequence[Run], name: str) -> Mapping[str, object]:
    """The newest readable one."""
    newest = sorted(folders, key=lambda run: run.id, reverse=True)
    return next((held for run in newest if (held := document(run, name))), {})
