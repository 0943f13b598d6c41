"""Gathers from run folders what a report tells: the sides, the comparison, the trade, memory, arguments, the launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mtpdeploy.analysis.compare import Comparison, compare
from mtpdeploy.analysis.frontier import Frontier, by_label, frontier
from mtpdeploy.analysis.samples import Measured, told_apart
from mtpdeploy.errors import MtpError, UsageError
from mtpdeploy.store import Run, Store
from mtpdeploy.store.launches import deploys_of, document, readable
from mtpdeploy.store.measured import arms_of, measured


@dataclass(frozen=True, slots=True)
class Side:
    """One profile of the report: its measurements, and what its launch left behind.

    memory: the plan's budget; rules: argument → why SGLang changes it, by the plan; log: the log summary of the
        launch; verified: the answer of verify. Each is {} where no run has it.
    load: (seconds, running, queued) while the last point was measured, where the server told.
    """

    label: str
    measurements: tuple[Measured, ...]
    memory: Mapping[str, object] = field(default_factory=dict)
    log: Mapping[str, object] = field(default_factory=dict)
    verified: Mapping[str, object] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)
    load: tuple[tuple[float, float, float], ...] = ()


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
    labels = by_label(told_apart(found))
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
        load=_load(next((run for run in reversed(runs) if run.id in own), None)),
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


def _document(folders: Sequence[Run], name: str) -> Mapping[str, object]:
    """The newest readable one."""
    newest = sorted(folders, key=lambda run: run.id, reverse=True)
    return next((held for run in newest if (held := document(run, name))), {})
