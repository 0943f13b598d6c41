"""Takes in runs that were made from another home: a run folder, a folder of such, or an archive of either.

Nothing of it enters the store before it was read and understood. An archive is untrusted: only plain files at plain places below
a run's folder are taken out of it, up to a limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import IO, get_args

from mtpdeploy.errors import UsageError
from mtpdeploy.store.files import write_json
from mtpdeploy.store.store import RUN_ID, Kind, Run, Status, Store

WANTED = "should be a run's folder (with run.json in it), a folder of such, or an archive of them (.tar, .tar.gz, .zip)"
FILES_LIMIT = 20_000
BYTES_LIMIT = 8 * 2**30


@contextlib.contextmanager
def staged(store: Store, source: Path) -> Iterator[tuple[Run, ...]]:
    """The runs of `source`, copied aside on the store's own disk. UsageError, naming file and fault, if it holds none or odd ones."""
    store.folder.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=".import-", dir=store.folder))
    try:
        if source.is_dir():
            found = _of_folder(source)
            for number, place in enumerate(found):
                _copy(place, stage / str(number))
        elif source.is_file():
            _unpack(source, stage)
        else:
            raise UsageError(f"{source}: there is no such file or folder; it {WANTED}")
        places = sorted(path.parent for path in stage.rglob("run.json"))
        if not places:
            raise UsageError(f"{source}: no run.json in it; it {WANTED}")
        yield tuple(_understood(place, source) for place in places)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def is_here(store: Store, run: Run, source: Path) -> bool:
    """Whether the very same run is in the store. UsageError if another one has its id."""
    target = store.folder / run_id(run)
    if not target.exists():
        return False
    if _content(target) == _content(run.path):
        return True
    raise UsageError(
        f"{source}: run {target.name} is in this home already, with another content; nothing was taken",
        next_commands=[f"mtpdeploy runs show {target.name}", f"mtpdeploy runs delete {target.name}"],
    )


def take(store: Store, run: Run, source: Path) -> None:
    """Moves a staged run in, with a word on where it came from."""
    target = store.folder / run_id(run)
    head = json.loads((run.path / "run.json").read_bytes())
    head["imported"] = {"from": str(source), "at_utc": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"}
    if head.get("status") == "running":  # its writer is of another home: here nobody writes it
        head["status"] = "interrupted"
    write_json(run.path / "run.json", head)
    run.path.rename(target)


def run_id(run: Run) -> str:
    """The id that the run was made with, whatever its folder is called now."""
    return str(json.loads((run.path / "run.json").read_bytes())["run_id"])


def _content(folder: Path) -> dict[str, str]:
    """Digests of the files by name; run.json without what an import adds, and without what is made from the others."""
    told = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.suffix == ".part" or path.name.startswith("report."):
            continue
        data = path.read_bytes()
        if path.name == "run.json":
            head = json.loads(data)
            head.pop("imported", None)
            if head.get("status") == "running":
                head["status"] = "interrupted"
            data = json.dumps(head, sort_keys=True).encode()
        told[path.relative_to(folder).as_posix()] = hashlib.sha256(data).hexdigest()
    return told


def _of_folder(source: Path) -> list[Path]:
    if (source / "run.json").is_file():
        return [source]
    inside = source / "runs" if (source / "runs").is_dir() else source
    return sorted(path.parent for path in inside.glob("*/run.json"))


def _copy(place: Path, target: Path) -> None:
    size = count = 0
    for path in sorted(place.rglob("*")):
        if path.is_symlink() or not path.is_file() or path.suffix == ".part":
            continue
        count, size = count + 1, size + path.stat().st_size
        _within(place, count, size)
        aside = target / path.relative_to(place)
        aside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, aside)


def _within(source: Path, count: int, size: int) -> None:
    if count > FILES_LIMIT or size > BYTES_LIMIT:
        raise UsageError(f"{source}: over {FILES_LIMIT} files or {BYTES_LIMIT // 2**30} GiB: that is no run")


def _unpack(source: Path, stage: Path) -> None:
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                members = [
                    (info.filename, info.file_size, info) for info in archive.infolist()
                    if not info.is_dir() and (info.external_attr >> 16) & 0o170000 in (0, 0o100000)
                ]  # fmt: skip
                _check(source, [(name, size) for name, size, _ in members])
                for name, size, info in members:
                    with archive.open(info) as file:
                        _write(source, stage / PurePosixPath(name), file, size)
            return
        with tarfile.open(source) as tar:
            files = [member for member in tar.getmembers() if member.isreg()]
            _check(source, [(member.name, member.size) for member in files])
            for member in files:
                content = tar.extractfile(member)
                assert content is not None
                with content:
                    _write(source, stage / PurePosixPath(member.name), content, member.size)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as exc:
        why = str(exc).splitlines()[0].rstrip(":") if str(exc) else type(exc).__name__
        raise UsageError(f"{source}: not readable as an archive ({why}); it {WANTED}") from exc
    except OSError as exc:
        raise UsageError(f"{source}: cannot be unpacked ({exc.strerror or exc})") from exc


def _check(source: Path, members: list[tuple[str, int]]) -> None:
    _within(source, len(members), sum(size for _, size in members))
    for name, _ in members:
        parts = PurePosixPath(name).parts
        if PurePosixPath(name).is_absolute() or ".." in parts or not parts or "\0" in name or "\\" in name:
            raise UsageError(f"{source}: {name!r} would lie outside a run's folder; nothing was taken")


def _write(source: Path, target: Path, content: IO[bytes], size: int) -> None:
    if target.suffix == ".part":
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        left = size
        while left > 0 and (data := content.read(min(left, 2**20))):
            file.write(data)
            left -= len(data)
        if content.read(1):
            raise UsageError(f"{source}: {target.name} is longer than the archive says; nothing was taken")
    os.chmod(target, 0o644)


def _understood(place: Path, source: Path) -> Run:
    """The staged run. UsageError for what this release cannot read."""
    name = f"{source}: run.json"
    try:
        head = json.loads((place / "run.json").read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise UsageError(f"{name} is not readable as JSON ({exc})") from exc
    if not isinstance(head, dict):
        raise UsageError(f"{name} holds {type(head).__name__}, and should hold an object")
    ident, kind, status = head.get("run_id"), head.get("kind"), head.get("status")
    if not isinstance(ident, str) or not RUN_ID.fullmatch(ident):
        raise UsageError(f"{name}: run_id is {ident!r}, and should be such as 20261130-101500-3fa9")
    if kind not in get_args(Kind):
        raise UsageError(f"{name}: kind is {kind!r}, and should be one of {', '.join(get_args(Kind))}")
    if status not in get_args(Status):
        raise UsageError(f"{name}: status is {status!r}, and should be one of {', '.join(get_args(Status))}")
    for key in ("meta", "summary"):
        if not isinstance(head.get(key, {}), dict):
            raise UsageError(f"{name}: {key} should be an object")
    return Run(place, head)
