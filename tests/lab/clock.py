"""A clock that is wrong by some seconds, in this process only: the machine's own is never touched.

libfaketime cannot be used: its clock_nanosleep breaks the time.sleep of Python 3.11. As a program it stands in for a host's python:

    python clock.py SECONDS NAME [-I] [-S] (-c CODE | -m MODULE | FILE) [WORD…]
"""

from __future__ import annotations

import datetime as datetimes
import runpy
import sys
import time
from typing import Any


def shift(seconds: float) -> None:
    """From now on `time` and `datetime` are off by `seconds`, also where they were imported already."""
    real_time, real_gmtime, real_localtime, real_strftime = time.time, time.gmtime, time.localtime, time.strftime
    real = datetimes.datetime

    class Shifted(real):  # type: ignore[misc, valid-type]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real.now(tz) + datetimes.timedelta(seconds=seconds)

        @classmethod
        def utcnow(cls) -> Any:
            return real.utcnow() + datetimes.timedelta(seconds=seconds)

    def now() -> float:
        return real_time() + seconds

    time.time = now
    time.time_ns = lambda: int(now() * 1e9)
    time.gmtime = lambda at=None: real_gmtime(now() if at is None else at)  # type: ignore[assignment]
    time.localtime = lambda at=None: real_localtime(now() if at is None else at)  # type: ignore[assignment]
    time.strftime = lambda form, at=None: real_strftime(form, time.localtime() if at is None else at)  # type: ignore[assignment]
    datetimes.datetime = Shifted  # type: ignore[misc]
    for module in list(sys.modules.values()):
        if module.__name__.startswith("mtpdeploy.") and getattr(module, "datetime", None) is real:
            module.datetime = Shifted  # type: ignore[attr-defined]


def main(seconds: str, name: str, words: list[str]) -> None:
    """Goes on as `python WORDS…` would."""
    shift(float(seconds))
    sys.executable = name  # what it starts has the same clock
    sys.path.pop(0)
    while words and words[0] in ("-I", "-S", "-B", "-u"):
        words = words[1:]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
