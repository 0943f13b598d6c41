"""`runs`: the list of what was done from this home, one run in full, its report, its numbers for other tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtpdeploy.errors import MtpError, UsageError
from mtpdeploy.progress import Talk
from mtpdeploy.store import Run, RunRow, Store


@dataclass(frozen=True, slots=True)
class RunList:
    """Newest first."""

    rows: tuple[RunRow, ...]
    folder: Path
    filtered: bool

    def as_json(self) -> dict[str, object]:
        return {"runs": [row.as_json() for row in self.rows], "folder": str(self.folder)}


@dataclass(frozen=True, slots=True)
class RunShown:
    """A run with what its files say. `damaged` names files that could not be read, with the reason."""

    run: Run
    status: str
    points: tuple[Mapping[str, object], ...]
    not_like_for_like: tuple[str, ...]
    damaged: Mapping[str, str]

    @property
    def simulated(self) -> bool:
        return self.run.provenance.simulated is True or self.run.meta.get("simulated") is True

    def as_json(self) -> dict[str, object]:
        run = self.run
        return {
            "run_id": run.id,
            "kind": run.kind,
            "status": self.status,
            "created_utc": run.created_utc,
            "finished_utc": run.finished_utc,
            "meta": run.meta,
            "summary": run.summary,
            "points": [dict(point) for point in self.points],
            "files": {str(path.relative_to(run.path)): path.stat().st_size for path in run.files()},
            "damaged": dict(self.damaged),
            "path": str(run.path),
            "simulated": self.simulated,
        }


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written for the user, or its content where it goes to stdout."""

    path: Path | None
    format: str
    runs: tuple[str, ...]
    content: str | None = None
    size_bytes: int | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "path": str(self.path) if self.path else None,
            "format": self.format,
            "runs": list(self.runs),
            "size_bytes": self.size_bytes,
            **({"content": self.content} if self.content is not None else {}),
        }


@dataclass(frozen=True, slots=True)
class Imported:
    """Runs that came in, and those that were there already."""

    runs: tuple[str, ...]
    known: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return {"imported": list(self.runs), "already_here": list(self.known)}


@dataclass(frozen=True, slots=True)
class Deleted:
    """Run folders that are gone."""

    runs: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return {"deleted": list(self.runs)}


def runs(
    *,
    home: Path,
    talk: Talk,
    kind: str | None = None,
    host: str | None = None,
    profile: str | None = None,
    workload: str | None = None,
    status: str | None = None,
    limit: int = 20,
) -> RunList:
    """What was done from this home."""
    if limit < 1:
        raise UsageError(f"--limit {limit}: should be 1 or more")
    store = Store(home)
    rows = store.runs(kind, host, profile, limit, workload=workload, status=status)
    return RunList(rows, store.folder, any((kind, host, profile, workload, status)))


def show(*, home: Path, talk: Talk, run: str) -> RunShown:
    """One run: conditions, figures, files. A damaged file is named; the others are still shown."""
    return shown(Store(home).run(run))


def shown(run: Run) -> RunShown:
    damaged: dict[str, str] = {}
    points: list[Mapping[str, object]] = []
    try:
        held = run.read_json("points.json")
        held = held.get("points") if isinstance(held, Mapping) else held
        points = [point for point in held if isinstance(point, Mapping)] if isinstance(held, list) else []
    except MtpError as exc:
        damaged["points.json"] = exc.message
    for path in run.files():
        if path.suffix == ".json" and path.name not in ("run.json", "points.json"):
            name = str(path.relative_to(run.path))
            try:
                run.read_json(name)
            except MtpError as exc:
                damaged[name] = exc.message
    said = run.summary.get("not_like_for_like")
    unlike = tuple(str(one) for one in said) if isinstance(said, list) else ()
    return RunShown(run, run.status, tuple(points), unlike, damaged)


def delete(*, home: Path, talk: Talk, run: Sequence[str]) -> Deleted:
    """Deletes run folders. Only full ids: a prefix or `last` could hit another run than the one meant."""
    store = Store(home)
    found = [store.folder / name for name in run]
    for name, path in zip(run, found, strict=True):
        if not path.is_dir() or name not in {row.id for row in store.runs()}:
            raise UsageError(
                f"{name!r}: runs delete takes the full id of an existing run", next_commands=["mtpdeploy runs"]
            )
    return Deleted(tuple(store.remove(name).name for name in run))


def import_(*, home: Path, talk: Talk, source: Sequence[str]) -> Imported:
    """Takes in runs of another home. A benchmark's figures are computed here from its raw records before it is taken."""
    from mtpdeploy.store import importing

    store = Store(home)
    came: list[str] = []
    known: list[str] = []
    for name in source:
        talk.stage("import", f"reading {name}")
        path = Path(name)
        with importing.staged(store, path) as found:
            for run in found:
                _readable(run, path)
            new = [run for run in found if not importing.is_here(store, run, path)]
            idents = [importing.run_id(run) for run in new]
            if len(set(idents)) < len(idents):
                raise UsageError(f"{name}: it holds two runs of one id; nothing was taken")
            known += [importing.run_id(run) for run in found if run not in new]
            for run in new:
                importing.take(store, run, path)
            came += idents
        talk.done("import", f"{name}: {len(found)} run{'s' if len(found) > 1 else ''}")
    return Imported(tuple(came), tuple(known))


def _readable(run: Run, source: Path) -> None:
    """A benchmark must have figures, from its records or stored; where only records are there, the figures are added."""
    from mtpdeploy.actions.report import recomputed
    from mtpdeploy.bench.values import SCHEMA

    if run.kind != "bench":
        return
    if run.file("records.jsonl").exists() or run.file("measured.jsonl").exists():
        try:
            answer = recomputed(run)
        except MtpError as exc:
            raise UsageError(f"{source}: {exc.message}") from exc
        if not run.file("points.json").exists():
            points = [point.as_json() for point in answer.points]
            run.write_json("points.json", {"schema": SCHEMA, "points": points})
    elif run.status == "done" and not run.file("points.json").exists():
        raise UsageError(
            f"{source}: a finished benchmark with neither records.jsonl nor points.json: nothing was measured"
        )


def export(*, home: Path, talk: Talk, run: Sequence[str], format: str = "json", output: str | None = None) -> Written:
    """Figures of runs for other tools (md, csv, json, parquet, rows of sglang's bench_serving), or the runs themselves (archive)."""
    from mtpdeploy.report.export import BINARY, FORMATS, archive, exported, parquet

    if format not in FORMATS:
        raise UsageError(f"--format {format}: should be one of {', '.join(FORMATS)}")
    if format in BINARY and output is None:
        raise UsageError(
            f"--format {format} is binary: give a file with --output, such as --output runs{BINARY[format]}"
        )
    store = Store(home)
    found = [store.run(name, kind="bench" if name == "last" else None) for name in run]
    names = tuple(one.id for one in found)
    if format in BINARY:
        assert output is not None
        data = archive([one.path for one in found]) if format == "archive" else parquet([shown(one) for one in found])
        return _written(Path(output), data, format, names)
    content = exported([shown(one) for one in found], format)
    if output is None:
        return Written(None, format, names, content, len(content.encode()))
    return _written(Path(output), content.encode(), format, names)


def report(
    *, home: Path, talk: Talk, run: Sequence[str] = (), format: str = "html", output: str | None = None
) -> Written:
    """One self-contained page over the runs: the comparison first where there are two sides.

    format: html, md or json, with the same content. Without `run`: the newest benchmark. `output` defaults to report.html (.md,
    .json) in the last run's folder.
    """
    from mtpdeploy.report.page import FORMATS, written
    from mtpdeploy.report.story import gathered

    if format not in FORMATS:
        raise UsageError(f"--format {format}: should be one of {', '.join(FORMATS)}")
    store = Store(home)
    talk.stage("report", "reading the runs")
    found = [store.run(name, kind="bench" if name == "last" else None) for name in (run or ("last",))]
    story = gathered(store, found)
    talk.stage("report", "drawing" if format == "html" else "writing")
    target = Path(output) if output is not None else found[-1].file(f"report.{format}")
    content = written(story, format, target.absolute().parent)
    made = _written(target, content.encode(), format, tuple(one.id for one in found))
    talk.done("report", str(made.path))
    return made


def _written(path: Path, content: bytes, format: str, names: tuple[str, ...]) -> Written:
    from mtpdeploy.store.files import write_atomically

    try:
        if path.is_dir():
            raise UsageError(f"--output {path} is a folder; give a file name")
        write_atomically(path, content)
    except OSError as exc:
        raise UsageError(f"--output {path}: cannot be written ({exc.strerror or exc})") from exc
    return Written(path.absolute(), format, names, None, len(content))
