"""One line for each act on a service: who did what, when, why. Append-only; the file before it is kept once."""

from __future__ import annotations

import getpass
import json
import os
from pathlib import Path
from typing import Any

from mtpdeploy.agent.clock import utc_now
from mtpdeploy.agent.release import Service

_ROTATE_BYTES = 1024 * 1024


def write(service: Service, act: str, client: str, **details: Any) -> None:
    """Appends one act. OSError if it cannot be written: a change that leaves no trace is not begun."""
    path = service.folder / "journal.jsonl"
    line = json.dumps(
        {"utc": utc_now(), "act": act, "client": client, "user": _user(), "pid": os.getpid(), **details},
        separators=(",", ":"),
    )
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        # A line that an earlier full disk cut short must not swallow this one.
        broken = size > 0 and not _ends_with_newline(path)
        data = (("\n" if broken else "") + line + "\n").encode()
        if os.write(descriptor, data) != len(data):
            raise OSError(28, "No space left on device", str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if size > _ROTATE_BYTES:
        os.rename(path, service.folder / "journal.1.jsonl")


def read(service: Service, lines: int) -> list[dict[str, Any]]:
    """The last acts, oldest first; a line cut short is left out."""
    acts: list[dict[str, Any]] = []
    for name in ("journal.1.jsonl", "journal.jsonl"):
        path = service.folder / name
        if not path.is_file() or path.is_symlink():
            continue
        for line in path.read_bytes().splitlines():
            act = _parse(line)
            if act is not None:
                acts.append(act)
    return acts[-lines:] if lines > 0 else acts


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
