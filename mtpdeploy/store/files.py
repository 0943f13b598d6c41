"""JSON on disk: written whole or not at all, readable after a crash in the middle of a line."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import IO

from mtpdeploy.secret import Secret


def plain(value: object) -> object:
    """`value` as JSON can hold it. A secret becomes `***`; NaN and infinities become null: unknown, not a number."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Secret):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    as_json = getattr(value, "as_json", None)
    if callable(as_json):
        return plain(as_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    item = getattr(value, "item", None)  # NumPy scalars
    if callable(item):
        return plain(item())
    raise TypeError(f"{type(value).__name__} has no JSON form")


def write_atomically(path: Path, data: bytes) -> None:
    """Written aside, fsynced, renamed: a reader sees the old file or the new one, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException as exc:
        Path(aside).unlink(missing_ok=True)
        _named(exc, path)
        raise


def write_json(path: Path, value: object) -> None:
    """One JSON document, indented, in key order as given."""
    write_atomically(path, (json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def append_jsonl(path: Path, values: Iterable[object]) -> None:
    """One line a value, in one write. A line torn by an earlier crash is closed first and spoils only itself."""
    lines = "".join(json.dumps(plain(value), ensure_ascii=False, allow_nan=False) + "\n" for value in values).encode()
    if not lines:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("a+b") as file:
            if _ends_torn(file):
                lines = b"\n" + lines
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as exc:
        _named(exc, path)
        raise


def _named(exc: BaseException, path: Path) -> None:
    """A write on a full disk fails without saying where: the file's name goes into the error."""
    if isinstance(exc, OSError) and exc.filename is None:
        exc.filename = str(path)


def read_jsonl(path: Path) -> Iterator[dict[str, object]]:
    """Each line that is a whole JSON object; torn or foreign lines are passed over."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


def _ends_torn(file: IO[bytes]) -> bool:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return False
    file.seek(size - 1)
    return file.read(1) != b"\n"
