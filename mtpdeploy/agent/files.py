"""Files that are whole or not there: written aside, fsynced, renamed. And folders that nobody else can have prepared.

Everything below the work folder is opened without following symbolic links, so that a link planted there by somebody
else cannot turn a write into a write elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtpdeploy.agent.fault import Fault

_RESERVE = ".reserve"
_RESERVE_BYTES = 64 * 1024  # a state file, a lock and a journal line, each written aside first


def explain(error: OSError, what: str) -> Fault:
    """A failed file operation as a Fault that says what to do."""
    path = error.filename or ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Fault(
            "remote-error",
            f"{what}: no space left for {path}",
            next_commands=[f"df -h {os.path.dirname(str(path)) or '.'}", "mtpdeploy prune --keep 3"],
            runbook="half-finished-deploy",
        )
    if error.errno == errno.EROFS:
        return Fault("remote-error", f"{what}: {path} is on a read-only file system; set another `workdir`")
    if error.errno in (errno.EACCES, errno.EPERM):
        closed = _closed(Path(str(path)))
        return Fault(
            "remote-error",
            f"{what}: no permission for {path}"
            + (
                f": {closed} is this user's own and closed to it"
                if closed
                else "; set `workdir` to a folder of this user"
            ),
            next_commands=[f"chmod u+rw{'x' if closed.is_dir() else ''} {shlex.quote(str(closed))}   # at the host"]
            if closed
            else [],
        )
    return Fault("remote-error", f"{what}: {error.strerror or error} ({path})")


def _closed(path: Path) -> Path | None:
    """The outermost of `path` and its folders that belongs to this user, who may all the same not use it."""
    for one in [*reversed(path.parents), path] if path.is_absolute() else ():
        try:
            found = os.stat(one)
        except OSError:
            return None
        wanted = os.R_OK | os.W_OK | (os.X_OK if stat.S_ISDIR(found.st_mode) else 0)
        if found.st_uid == os.geteuid() != 0 and not os.access(one, wanted):
            return one
    return None


def own_folder(path: Path, *, mode: int = 0o700) -> None:
    """Makes the folder, or checks that it is a real folder of this user that nobody else may write to.

    Fault if it is a link to somebody else's place, belongs to another user, or is open to others.
    """
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise explain(error, f"making the folder {path}") from None
    check_folder(path)


def check_folder(path: Path) -> None:
    """Fault unless `path` is a folder of this user that no other user may write to."""
    try:
        link, found = os.lstat(path), os.stat(path)
    except OSError as error:
        raise explain(error, f"looking at {path}") from None
    me = os.geteuid()
    advice = "remove it or set another `workdir`"
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (me, 0):
        raise Fault("remote-error", f"{path} is a symbolic link that belongs to another user; {advice}")
    if not stat.S_ISDIR(found.st_mode):
        raise Fault("remote-error", f"{path} is not a folder; {advice}")
    if found.st_uid != me:
        raise Fault("remote-error", f"{path} belongs to another user (uid {found.st_uid}); set another `workdir`")
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise Fault(
            "remote-error",
            f"{path} can be written by other users (mode {stat.S_IMODE(found.st_mode):o})",
            next_commands=[f"chmod go-w {path}"],
        )


def sync_folder(path: Path) -> None:
    """Makes renames inside `path` last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Writes a file that must not exist yet, with exactly that mode, and fsyncs it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Puts `data` in the place of `path` as a whole: a reader sees the old file or the new one. OSError if not."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    try:
        write_new(aside, data, mode)
        os.rename(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    sync_folder(path.parent)


def replace_json(path: Path, value: Any, mode: int = 0o600) -> None:
    """`replace` for a JSON document."""
    replace(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), mode)


def read_json(path: Path) -> Any:
    """The document, or None if the file is missing or no JSON (a file of ours is never half-written, but a disk may
    rot)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        try:
            return json.loads(file.read())
        except (ValueError, OSError, RecursionError):
            return None


def point(link: Path, target: str) -> None:
    """Makes the symbolic link `link` point to `target` in one step."""
    aside = link.with_name(f".{link.name}.{os.getpid()}.new")
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    os.symlink(target, aside)
    try:
        os.rename(aside, link)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    sync_folder(link.parent)


def keep_reserve(folder: Path) -> None:
    """Keeps some room on the disk, so that a stop can still be recorded when everything else is full. OSError if there is none."""
    path = folder / _RESERVE
    if not path.exists():
        replace(path, os.urandom(_RESERVE_BYTES))


def give_reserve(folder: Path) -> bool:
    """Gives that room back. False if it was given already."""
    try:
        os.unlink(folder / _RESERVE)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def guard(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path` for a moment; the kernel releases it whatever happens to the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Takes the exclusive lock on an open file for as long as it stays open; False if somebody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
