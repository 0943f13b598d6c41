"""Runs on disk, and an index over them.

The folders are the truth: `<home>/runs/<run id>/run.json` and the files beside it. `index.sqlite3` only spares reading
every run.json for a list; it is brought up to date whenever it is asked, and rebuilt when it is lost, stale or damaged.
Many processes may write and read at once: a run folder belongs to the process that made it, and the index is changed
under a file lock.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import re
import secrets
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

from mtpdeploy.analysis.provenance import Provenance
from mtpdeploy.errors import ConfigError, MtpError, NotFound, UsageError
from mtpdeploy.store.files import append_jsonl, plain, read_jsonl, write_atomically, write_json

Kind = Literal["bench", "deploy", "campaign", "tune", "demo"]
Query = Callable[[sqlite3.Connection], list[tuple[object, ...]]]
Status = Literal["running", "done", "failed", "interrupted", "unreadable"]

RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
SCHEMA = 2  # of the index; another number means: rebuild it
COLUMNS = "id, kind, status, host, profile, workload, simulated, created_utc, finished_utc, summary, stamp"


@dataclass(frozen=True, slots=True)
class RunRow:
    """A line of the list of runs: what the index knows. `folder` is the run's folder."""

    id: str
    kind: str
    status: Status
    host: str | None
    profile: str | None
    workload: str | None
    simulated: bool | None
    created_utc: str | None
    finished_utc: str | None
    summary: Mapping[str, object]
    folder: Path

    def as_json(self) -> dict[str, object]:
        return {
            "run_id": self.id,
            "kind": self.kind,
            "status": self.status,
            "host": self.host,
            "profile": self.profile,
            "workload": self.workload,
            "simulated": self.simulated,
            "created_utc": self.created_utc,
            "finished_utc": self.finished_utc,
            "summary": dict(self.summary),
            "path": str(self.folder),
        }


class Run:
    """One run folder. Made by `Store.new_run`, found by `Store.run`.

    As a context manager it ends by itself: an exception makes it `failed` or `interrupted`, the reason in run.json.
    """

    def __init__(self, path: Path, head: dict[str, object]) -> None:
        self.path = path
        self._head = head

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def kind(self) -> str:
        return str(self._head.get("kind", "unknown"))

    @property
    def status(self) -> Status:
        """`running` only while its writer lives: a killed writer leaves an `interrupted` run."""
        said = self._head.get("status")
        if said == "running" and _writer_is_gone(self._head.get("writer")):
            return "interrupted"
        return said if said in get_args(Status) else "unreadable"  # type: ignore[return-value]

    @property
    def meta(self) -> dict[str, object]:
        meta = self._head.get("meta")
        return dict(meta) if isinstance(meta, dict) else {}

    @property
    def provenance(self) -> Provenance:
        return Provenance.from_json(self.meta.get("provenance"))

    @property
    def summary(self) -> dict[str, object]:
        summary = self._head.get("summary")
        return dict(summary) if isinstance(summary, dict) else {}

    @property
    def created_utc(self) -> str | None:
        return _text(self._head.get("created_utc"))

    @property
    def finished_utc(self) -> str | None:
        return _text(self._head.get("finished_utc"))

    def file(self, name: str) -> Path:
        """The path of a file of this run. `name` is relative, and stays inside the folder."""
        path = self.path / name
        if not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise UsageError(f"{name!r} is no file name inside a run folder")
        return path

    def files(self) -> tuple[Path, ...]:
        """Every finished file of the folder, sorted."""
        return tuple(
            sorted(path for path in self.path.rglob("*") if path.is_file() and not path.name.endswith(".part"))
        )

    def write_json(self, name: str, value: object) -> None:
        write_json(self.file(name), value)

    def write_text(self, name: str, text: str) -> None:
        write_atomically(self.file(name), text.encode())

    def append_jsonl(self, name: str, values: Iterable[object]) -> None:
        append_jsonl(self.file(name), values)

    def read_json(self, name: str) -> object:
        """The document, or None where there is no such file. Damaged: ConfigError naming the file."""
        path = self.file(name)
        try:
            value: object = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{path}: not readable as JSON ({exc}); the run's other files may still be good") from exc
        return value

    def read_jsonl(self, name: str) -> Iterator[dict[str, object]]:
        return read_jsonl(self.file(name))

    def update_meta(self, **meta: object) -> None:
        """Adds to meta while the run goes on, such as what is known only once the server answers."""
        self._head["meta"] = {**self.meta, **{key: plain(value) for key, value in meta.items()}}
        self._save()

    def reopen(self) -> None:
        """Takes up a run whose writer has gone (or is this process). Refused while another one lives."""
        if self.status == "running" and self._head.get("writer") != _writer():
            raise UsageError(f"run {self.id} is still being written by another process")
        self._head |= {"status": "running", "finished_utc": None, "writer": _writer()}
        self._save()

    def finish(self, summary: Mapping[str, object], status: Literal["done", "failed", "interrupted"] = "done") -> None:
        """The last act: what a list shows of this run, and how it ended."""
        self._head |= {"summary": plain(summary), "status": status, "finished_utc": _utc()}
        self._save()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is None or self._head.get("status") != "running":
            return
        stopped = isinstance(exc, (KeyboardInterrupt, SystemExit, GeneratorExit))
        reason = exc.as_json() if isinstance(exc, MtpError) else {"error": type(exc).__name__, "message": str(exc)}
        self.finish({**self.summary, "failure": reason}, "interrupted" if stopped else "failed")

    def _save(self) -> None:
        write_json(self.path / "run.json", self._head)


@dataclass(frozen=True, slots=True)
class LastDeployed:
    """What the last deploy from this home started."""

    host: str
    profile: str
    launch_id: str | None
    at_utc: str


class Store:
    """The runs of a home. Cheap to make; nothing is written before the first run."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = home / "runs"

    def new_run(self, kind: Kind, meta: Mapping[str, object] | None = None) -> Run:
        """A new folder with its run.json.

        Keys of `meta` that lists and comparisons read: host, profile, workload, simulated, provenance.
        """
        head: dict[str, object] = {
            "run_id": None,
            "kind": kind,
            "status": "running",
            "created_utc": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%S.%f}Z",  # orders runs of the same second
            "finished_utc": None,
            "by": _who(),
            "writer": _writer(),
            "meta": plain(meta or {}),
            "summary": {},
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            path = self.folder / f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
            try:
                path.mkdir()
            except FileExistsError:
                continue
            break
        run = Run(path, head | {"run_id": path.name})
        try:
            run._save()
        except OSError:  # a full disk: a run that says nothing is none
            with suppress(OSError):
                path.rmdir()
            raise
        return run

    def run(self, name: str, *, kind: str | None = None) -> Run:
        """By id, by a prefix that fits one run only, or `last` (of that kind, if given)."""
        if name == "last":
            newest = self.runs(kind=kind, limit=1)
            if not newest:
                raise NotFound(
                    f"no {kind + ' ' if kind else ''}run in {self.folder} yet", next_commands=["mtpdeploy bench"]
                )
            return self._open(newest[0].folder)
        if not re.fullmatch(r"[0-9a-f-]{1,20}", name):
            raise NotFound(
                f"{name!r} is no run id (such as 20261130-101500-3fa9), prefix of one, or `last`",
                next_commands=["mtpdeploy runs"],
            )
        fitting = [path for path in self._folders() if path.name.startswith(name)]
        if len(fitting) > 1:
            some = ", ".join(path.name for path in fitting[:5])
            raise UsageError(
                f"{name!r} fits {len(fitting)} runs: {some}{' …' if len(fitting) > 5 else ''}",
                next_commands=["mtpdeploy runs"],
            )
        if not fitting:
            raise NotFound(f"no run {name!r} in {self.folder}", next_commands=["mtpdeploy runs"])
        return self._open(fitting[0])

    def runs(
        self,
        kind: str | None = None,
        host: str | None = None,
        profile: str | None = None,
        limit: int | None = None,
        *,
        workload: str | None = None,
        status: str | None = None,
    ) -> tuple[RunRow, ...]:
        """Newest first. A folder whose run.json is missing or damaged is listed as `unreadable`, never hidden."""
        wanted = {"kind": kind, "host": host, "profile": profile, "workload": workload}
        terms = [f"{column} = ?" for column, value in wanted.items() if value is not None]
        values = [value for value in wanted.values() if value is not None]
        where = f"WHERE {' AND '.join(terms)}" if terms else ""
        query = f"SELECT {COLUMNS} FROM runs {where} ORDER BY created_utc DESC, id DESC"
        rows = self._indexed(lambda index: index.execute(query, values).fetchall())
        found = (self._row(row) for row in rows)
        chosen = tuple(row for row in found if status is None or row.status == status)
        return chosen[:limit] if limit is not None else chosen

    def remove(self, name: str) -> Path:
        """Deletes one finished run's folder and returns where it was. A running one is refused."""
        run = self.run(name)
        if run.status == "running":
            raise UsageError(f"run {run.id} is still being written by another process; stop that first")
        shutil.rmtree(run.path)
        return run.path

    def set_last_deployed(self, host: str, profile: str, launch_id: str | None) -> None:
        """Remembered for verbs that get no --host; per host too, for those that get no --profile."""
        entry = {"host": host, "profile": profile, "launch_id": launch_id, "at_utc": _utc()}
        with self._locked():
            known = self._deployed()
            hosts = known.get("hosts")
            write_json(
                self._deployed_file,
                {"last": entry, "hosts": {**(hosts if isinstance(hosts, dict) else {}), host: entry}},
            )

    def last_deployed(self, host: str | None = None) -> LastDeployed | None:
        """The last deploy from this home, or the last one to `host`."""
        known = self._deployed()
        hosts = known.get("hosts")
        entry = known.get("last") if host is None else (hosts.get(host) if isinstance(hosts, dict) else None)
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("host"), str)
            or not isinstance(entry.get("profile"), str)
        ):
            return None
        return LastDeployed(
            entry["host"], entry["profile"], _text(entry.get("launch_id")), str(entry.get("at_utc", ""))
        )

    # -- folders

    @property
    def _deployed_file(self) -> Path:
        return self.folder / "deployed.json"

    def _deployed(self) -> dict[str, object]:
        try:
            known = json.loads(self._deployed_file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return known if isinstance(known, dict) else {}

    def _folders(self) -> list[Path]:
        try:
            with os.scandir(self.folder) as entries:
                names = sorted(entry.name for entry in entries if RUN_ID.fullmatch(entry.name) and entry.is_dir())
        except FileNotFoundError:
            return []
        return [self.folder / name for name in names]

    def _open(self, path: Path) -> Run:
        head = _head(path)
        if head is None:
            raise ConfigError(
                f"{path / 'run.json'}: missing or damaged: what this run was is not known; other files are untouched",
                next_commands=[f"ls -la {path}"],
            )
        return Run(path, head)

    # -- the index

    def _row(self, row: tuple[object, ...]) -> RunRow:
        ident, kind, status, host, profile, workload, simulated, created, finished, summary, _ = row
        folder = self.folder / str(ident)
        if status == "running":  # the writer may have died since the index was written
            head = _head(folder)
            status = Run(folder, head).status if head else "unreadable"
        told = json.loads(str(summary))
        return RunRow(
            str(ident),
            str(kind),
            status,  # type: ignore[arg-type]
            _text(host),
            _text(profile),
            _text(workload),
            None if simulated is None else bool(simulated),
            _text(created),
            _text(finished),
            told if isinstance(told, dict) else {},
            folder,
        )

    def _indexed(self, ask: Query) -> list[tuple[object, ...]]:
        if not self.folder.is_dir():
            return []
        file = self.folder / "index.sqlite3"
        try:
            with self._locked():
                try:
                    return self._ask(str(file), ask)
                except sqlite3.DatabaseError:  # damaged, or of another release: it holds nothing that the folders don't
                    for leftover in self.folder.glob("index.sqlite3*"):
                        leftover.unlink()
                    return self._ask(str(file), ask)
        except (OSError, sqlite3.OperationalError):  # a read-only home can still be listed
            return self._ask(":memory:", ask)

    def _ask(
        self, file: str, ask: Callable[[sqlite3.Connection], list[tuple[object, ...]]]
    ) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(file, timeout=10)) as index:
            if index.execute("PRAGMA user_version").fetchone()[0] != SCHEMA:
                index.executescript(
                    "DROP TABLE IF EXISTS runs;"
                    "CREATE TABLE runs (id TEXT PRIMARY KEY, kind TEXT, status TEXT, host TEXT, profile TEXT,"
                    " workload TEXT, simulated INTEGER, created_utc TEXT, finished_utc TEXT, summary TEXT, stamp TEXT);"
                    f"PRAGMA user_version = {SCHEMA};"
                )
            self._refresh(index)
            return ask(index)

    def _refresh(self, index: sqlite3.Connection) -> None:
        """Only folders whose run.json changed since are read again; a folder that is gone leaves the index."""
        known = dict(index.execute("SELECT id, stamp FROM runs").fetchall())
        folders = {path.name: path for path in self._folders()}
        with index:
            index.executemany("DELETE FROM runs WHERE id = ?", [(ident,) for ident in known.keys() - folders.keys()])
            for ident, path in folders.items():
                stamp = _stamp(path)
                if known.get(ident) == stamp:
                    continue
                head = _head(path)
                row: tuple[object, ...]
                if head is None:
                    row = (ident, "unknown", "unreadable", None, None, None, None, _from_id(ident), None, "{}", stamp)
                else:
                    run = Run(path, head)
                    meta, said = run.meta, run.provenance
                    told = {meta.get("simulated"), said.simulated}  # either is enough: it must never look real
                    simulated = True if True in told else False if False in told else None
                    row = (
                        ident,
                        run.kind,
                        str(head.get("status")) if head.get("status") in get_args(Status) else "unreadable",
                        _text(meta.get("host")) or said.host,
                        _text(meta.get("profile")) or said.profile,
                        _text(meta.get("workload")) or said.workload,
                        simulated,
                        run.created_utc or _from_id(ident),
                        run.finished_utc,
                        json.dumps(run.summary),
                        stamp,
                    )
                index.execute(f"INSERT OR REPLACE INTO runs ({COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?)", row)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _head(path: Path) -> dict[str, object] | None:
    try:
        head = json.loads((path / "run.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return head if isinstance(head, dict) else None


def _stamp(path: Path) -> str:
    try:
        stat = (path / "run.json").stat()
    except OSError:
        return "none"
    return f"{stat.st_mtime_ns}-{stat.st_size}-{stat.st_ino}"


def _from_id(ident: str) -> str:
    """The time that a run id carries, for a folder that cannot say it any more."""
    day, clock = ident[:8], ident[9:15]
    return f"{day[:4]}-{day[4:6]}-{day[6:]}T{clock[:2]}:{clock[2:4]}:{clock[4:]}Z"


def _utc() -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return socket.gethostname()


def _writer() -> dict[str, object]:
    """Proof of who writes: pid, its start time and this machine. A pid alone is reused."""
    return {"pid": os.getpid(), "started": _started(os.getpid()), "machine": socket.gethostname()}


def _writer_is_gone(writer: object) -> bool:
    if not isinstance(writer, Mapping) or writer.get("machine") != socket.gethostname():
        return False  # written elsewhere: nothing here can tell
    pid = writer.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return writer.get("started") != _started(pid)


def _started(pid: int) -> str | None:
    """Start time of a process since boot, as the kernel counts it; None where there is no /proc, or of a zombie.

    A killed writer stays a zombie until its parent reads its end, which many a container's first process never does.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
