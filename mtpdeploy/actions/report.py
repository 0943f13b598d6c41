"""A benchmark's answer, always computed from the run's raw records: by `bench` at its end, by `report` at any time after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpdeploy.bench import metrics
from mtpdeploy.bench.values import SCHEMA, Measured, Point, Record
from mtpdeploy.errors import BenchInvalid, ConfigError, UsageError
from mtpdeploy.progress import Talk
from mtpdeploy.store import Run, Store


@dataclass(frozen=True, slots=True)
class BenchAnswer:
    """The figures of a run. exit_code: 0, 13 if a point is invalid, 130 if it was interrupted."""

    run_id: str
    path: Path
    points: tuple[Point, ...]
    not_like_for_like: tuple[str, ...]
    simulated: bool | None
    interrupted: bool
    meta: Mapping[str, Any]
    slo: tuple[metrics.Limit, ...] = ()

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return 130
        return 0 if self.points and all(point.valid for point in self.points) else BenchInvalid.exit_code

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(str(note) for note in self.meta.get("notes", ()))

    @property
    def windows_dropped(self) -> int:
        """Windows that held other work: dropped and measured again, or left as an invalid point in the end."""
        return sum(
            point.windows_dropped + any(why.startswith("other work") for why in point.invalid_because)
            for point in self.points
        )

    @property
    def knee(self) -> Point | None:
        """Of the first repeat of a sweep with one kind of request and one arm; None otherwise."""
        first = [point for point in self.points if point.repeat == 0]
        kinds = {(point.arm, point.input_length, point.output_length, point.process) for point in first}
        return metrics.knee(first) if len(kinds) == 1 else None

    @property
    def best(self) -> Point | None:
        return metrics.best_under(self.points, self.slo) if self.slo else None

    def as_json(self) -> dict[str, object]:
        provenance = self.meta.get("provenance")
        return {
            "run_id": self.run_id,
            "points": [point.as_json() for point in self.points],
            "not_like_for_like": list(self.not_like_for_like),
            "simulated": self.simulated,
            "schema": SCHEMA,
            "interrupted": self.interrupted,
            "windows_dropped": self.windows_dropped,
            "knee": _load(self.knee),
            "slo": [str(limit) for limit in self.slo],
            "best_under_slo": _load(self.best),
            "skipped": list(self.meta.get("skipped", ())),
            "notes": list(self.notes),
            "host": self.meta.get("host"),
            "profile": self.meta.get("profile"),
            "workload": self.meta.get("workload"),
            "api": self.meta.get("api"),
            "template": self.meta.get("template"),
            "provenance": dict(provenance) if isinstance(provenance, Mapping) else {},
            "path": str(self.path),
        }


def _load(point: Point | None) -> dict[str, object] | None:
    if point is None:
        return None
    return {
        "point": point.index,
        "concurrency": point.concurrency,
        "rate": point.rate,
        "output_tok_s": point.output_tok_s,
        "requests_s": point.requests_s,
    }


def report(*, home: Path, talk: Talk, run: str | None = None, slo: str | None = None) -> BenchAnswer:
    """The figures of a stored run, from records.jsonl and measured.jsonl alone."""
    found = Store(home).run(run or "last", kind="bench" if run in (None, "last") else None)
    talk.stage("report", f"reading the records of {found.id}")
    answer = recomputed(found, limits(slo) if slo else None)
    talk.done("report", f"{len(answer.points)} points from the records of {found.id}")
    return answer


def limits(text: str) -> tuple[metrics.Limit, ...]:
    try:
        return metrics.parse_slo(text)
    except ValueError as exc:
        raise UsageError(f"--slo: {exc}") from exc


def recomputed(run: Run, slo: Sequence[metrics.Limit] | None = None) -> BenchAnswer:
    """Reads the raw files of a run and computes its figures. `slo` None: the objectives that the run was made with."""
    schema = run.meta.get("schema", SCHEMA)
    if isinstance(schema, int) and schema > SCHEMA:
        raise ConfigError(
            f"run {run.id} was written by a newer mtpdeploy (schema {schema}, this one reads up to {SCHEMA})"
        )
    if slo is None:
        kept = run.meta.get("slo")
        slo = metrics.parse_slo(",".join(str(one) for one in kept)) if isinstance(kept, list) and kept else ()
    try:
        records = [Record.from_json(row) for row in run.read_jsonl("records.jsonl")]
        measured = [Measured.from_json(row) for row in run.read_jsonl("measured.jsonl")]
    except (KeyError, TypeError) as exc:
        raise ConfigError(f"run {run.id}: records.jsonl or measured.jsonl is damaged: {exc}") from exc
    except FileNotFoundError:
        records, measured = [], []
    if not records and not measured:
        raise UsageError(
            f"run {run.id} ({run.kind}) has no benchmark records", next_commands=["mtpdeploy runs --kind bench"]
        )
    unlike = run.meta.get("not_like_for_like")
    simulated = run.meta.get("simulated")
    return BenchAnswer(
        run_id=run.id,
        path=run.path,
        points=metrics.points(records, measured, slo=slo),
        not_like_for_like=tuple(str(one) for one in unlike) if isinstance(unlike, list) else (),
        simulated=simulated if isinstance(simulated, bool) else None,
        interrupted=run.status == "interrupted" or run.meta.get("interrupted") is True,
        meta=run.meta,
        slo=tuple(slo),
    )
