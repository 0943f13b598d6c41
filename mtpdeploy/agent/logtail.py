"""Follows one launch's log byte for byte: each byte once, also over a cut line, a truncation or a replaced file.

A place in a log is (inode, offset). A reader that was cut off gives the place after the last byte it has; if the file there is
still the same, the stream goes on with the next byte, else the gap is said.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from typing import Any

from mtpdeploy.agent.logmask import LogMask
from mtpdeploy.agent.protocol import LOG_CHUNK
from mtpdeploy.agent.release import Release

_STAMP = re.compile(rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", re.MULTILINE)
_HEADER = re.compile(rb"^# mtpdeploy launch (\S+) boot (\d+) ", re.MULTILINE)

_BACK_BYTES, _BACK_LEAST = 16 * 1024, 1024 * 1024


class LogTail:
    """A place in a release's log that moves forward. `boot` is that of the next byte, 0 if unknown."""

    def __init__(self, release: Release, inode: int | None = None, offset: int = 0) -> None:
        self.release = release
        self.inode = inode
        self.offset = offset
        self.boot = self._boot_at(offset)
        self._descriptor: int | None = None
        self._mask = LogMask(release)

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is new since the last call: (`log` | `log-gap`, fields). Reads at most what is there now."""
        try:
            named = os.stat(self.release.log)
        except FileNotFoundError:
            named = None
        if self._descriptor is None:
            if named is None:
                return
            try:
                self._descriptor = os.open(self.release.log, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                return
            found = os.fstat(self._descriptor)
            if self.inode is not None and found.st_ino != self.inode:
                yield self._gap(found.st_ino, "the log file was replaced")
            self.inode = found.st_ino
        yield from self._read()
        if named is not None and named.st_ino != self.inode:
            # Everything of the old file was read; now the file that has its name.
            self.close()
            yield self._gap(named.st_ino, "the log file was replaced")
            yield from self.events()

    def _read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        if size < self.offset:
            yield self._gap(self.inode, f"the log was cut from {self.offset} to {size} bytes")
        while self.offset < size:
            data = os.pread(self._descriptor, min(LOG_CHUNK, size - self.offset), self.offset)
            data = data[: len(data) - self._mask.unfinished(data)]
            if not data:
                return
            data = self._mask.clean(data, self.release.log, self.offset, os.fstat(self._descriptor).st_ino)
            yield from self._pieces(data)

    def _pieces(self, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
        """One event a boot: data is split where a header line begins."""
        cuts = [m.start() for m in _HEADER.finditer(data) if m.start() > 0]
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            piece = data[start:end]
            if header := _HEADER.match(piece):
                self.boot = int(header.group(2))
            yield (
                "log",
                {
                    "launch_id": self.release.launch_id,
                    "boot": self.boot,
                    "inode": self.inode,
                    "offset": self.offset,
                    "data": base64.b64encode(piece).decode(),
                },
            )
            self.offset += len(piece)

    def _gap(self, inode: int | None, why: str) -> tuple[str, dict[str, Any]]:
        self.inode, self.offset, self.boot = inode, 0, self._boot_at(0)
        return "log-gap", {"launch_id": self.release.launch_id, "inode": inode, "offset": 0, "why": why}

    def _boot_at(self, offset: int) -> int:
        """The boot that was writing at `offset`, by the recorded starts."""
        number = 0
        for boot in self.release.boots():
            if isinstance(boot.get("log_offset"), int) and boot["log_offset"] <= offset:
                number = boot["n"]
        return number


def offset_of_last_lines(path: os.PathLike[str], lines: int) -> int:
    """Where the last `lines` lines of a file begin; 0 if it has fewer (or does not exist).

    Lines that are no lines (a gigabyte without an end) are not looked through: at most `_BACK_BYTES` a line and `_BACK_LEAST` in all.
    """
    try:
        with open(path, "rb") as file:
            end = position = file.seek(0, os.SEEK_END)
            wanted = lines
            if end and _byte_at(file, end - 1) == b"\n":
                wanted += 1  # the newline at the end ends the last line and begins none
            least = max(0, end - max(_BACK_LEAST, lines * _BACK_BYTES))
            while position > least and wanted > 0:
                step = min(65536, position)
                position -= step
                file.seek(position)
                block = file.read(step)
                found = block.count(b"\n")
                if found >= wanted:
                    at = len(block)
                    for _ in range(wanted):
                        at = block.rfind(b"\n", 0, at)
                    return position + at + 1
                wanted -= found
            return position
    except OSError:
        return 0


def offset_of_moment(path: os.PathLike[str], stamp: str) -> int:
    """An offset before the first line whose stamp (`2026-01-31 12:00:00`) is not earlier; a gigabyte is not read for it.

    One stamp is looked at in each `_BACK_LEAST` bytes, so more than was asked for may follow; 0 if that is the whole file.
    """
    try:
        with open(path, "rb") as file:
            size, before = file.seek(0, os.SEEK_END), 0
            for start in range(_BACK_LEAST, size, _BACK_LEAST):
                file.seek(start)
                found = _STAMP.search(file.read(_BACK_BYTES))
                if found and found.group(1).decode() >= stamp:
                    return before
                before = start
            return max(0, before - _BACK_BYTES)
    except OSError:
        return 0


def _byte_at(file: Any, position: int) -> bytes:
    file.seek(position)
    data: bytes = file.read(1)
    return data
