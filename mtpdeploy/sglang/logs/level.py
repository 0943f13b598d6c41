"""How bad a log line looks. SGLang's default format has no level (`[time] text`), so it is guessed, and called so.

Sources: uvicorn's `INFO:     ` lines, PyTorch's and NCCL's own prefixes, Python's tracebacks and logging names, as they stand in
recorded logs of 0.5.6 to 0.5.23.
"""

from __future__ import annotations

import re
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")

_STAMPED = re.compile(r"^\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|^Fatal Python error|^Exception in thread ")
_NAMED: tuple[tuple[Level, re.Pattern[str]], ...] = (
    ("error", re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|^E\d{4} |\bNCCL (ERROR|error)\b")),
    ("warning", re.compile(r"\bWARN(ING)?\b|^W\d{4} |\b\w*Warning: ")),
    ("debug", re.compile(r"\bDEBUG\b|^D\d{4} ")),
    ("info", re.compile(r"^(\[[^\]]*\] )?INFO\b|^I\d{4} ")),
)
_WORDED: tuple[tuple[Level, re.Pattern[str]], ...] = (
    (
        "error",
        re.compile(
            r"\b\w+(Error|Exception)\b(:| )|out of memory|\b(crash|abort|kill|terminat)ed\b|hit an exception|Segmentation fault"
            r"|\bsigquit\b|assertion .*failed|\bfailed to\b|CUDA error",
            re.IGNORECASE,
        ),
    ),
    (
        "warning",
        re.compile(r"\bdeprecated\b|\bwarning\b|\bfall(ing)? ?back\b|\bnot supported\b|\bignored?\b", re.IGNORECASE),
    ),
)


class LevelGuess:
    """Guesses line by line: what follows a traceback's head is part of it until the next stamped line."""

    def __init__(self) -> None:
        self._inside: Level | None = None

    def of(self, line: str) -> Level:
        """The level that this line, after the ones before it, most looks like."""
        if _TRACEBACK.search(line):
            self._inside = "error"
            return "error"
        stamped = _STAMPED.match(line) is not None
        if not stamped and self._inside is not None and line.strip():
            return self._inside
        for level, pattern in (*_NAMED, *_WORDED):
            if pattern.search(line):
                self._inside = level if stamped and level == "error" else None
                return level
        self._inside = None
        return "info"


def at_least(level: Level, wanted: Level) -> bool:
    """Whether `level` is as bad as `wanted`, or worse."""
    return LEVELS.index(level) >= LEVELS.index(wanted)
