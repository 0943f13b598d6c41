"""Progress on stderr: bars on a terminal, plain lines in a pipe or on a dumb terminal, nothing with --quiet."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from mtpdeploy.progress import Silent, Talk

if TYPE_CHECKING:  # Rich is loaded where there is a terminal to draw on
    from rich.console import Console
    from rich.progress import Progress, TaskID

PLAIN_INTERVAL_S = 2.0  # a changed stage is told at most this often where lines cannot be redrawn


@contextlib.contextmanager
def live(*, quiet: bool = False, no_color: bool = False, stream: TextIO | None = None) -> Iterator[Talk]:
    """The Talk of one command. The display ends before the answer is printed, whatever happens inside."""
    stream = stream or sys.stderr
    if quiet:
        yield Silent()
    elif stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        from rich.console import Console

        bars = Bars(Console(file=stream, no_color=no_color or None, markup=False, highlight=False, emoji=False))
        try:
            yield bars
        finally:
            bars.close()
    else:
        yield Lines(stream)


def _words(line: str) -> str:
    return re.sub(r"[\d.,]+", "#", line)


class Lines:
    """One line per change; where only the numbers change, one in two seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[str, tuple[float, str]] = {}

    def note(self, text: str) -> None:
        self._write(text)

    def stage(self, key: str, text: str, fraction: float | None = None) -> None:
        line = f"{key}: {text}" + (f" ({fraction:.0%})" if fraction is not None else "")
        with self._lock:
            told_at, told = self._told.get(key, (-PLAIN_INTERVAL_S, ""))
            now = self._clock()
            if line == told or (_words(line) == _words(told) and now - told_at < PLAIN_INTERVAL_S):
                return
            self._told[key] = (now, line)
        self._write(line)

    def done(self, key: str, text: str) -> None:
        with self._lock:
            self._told.pop(key, None)
        self._write(f"{key}: {text}")

    def _write(self, text: str) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._stream.write(text + "\n")
            self._stream.flush()


class Bars:
    """A bar, or a spinner where no fraction is known, for each running piece of work; what is done scrolls above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._progress: Progress | None = None

    def note(self, text: str) -> None:
        self._console.print(text)

    def stage(self, key: str, text: str, fraction: float | None = None) -> None:
        with self._lock:
            progress = self._started()
            if key not in self._tasks:
                self._tasks[key] = progress.add_task(key, total=None, text=text)
            progress.update(
                self._tasks[key],
                text=text,
                total=None if fraction is None else 1.0,
                completed=0 if fraction is None else min(max(fraction, 0.0), 1.0),
            )

    def done(self, key: str, text: str) -> None:
        with self._lock:
            if key in self._tasks and self._progress is not None:
                self._progress.remove_task(self._tasks.pop(key))
        self._console.print(f"✓ {key}: {text}" if self._console.encoding.startswith("utf") else f"{key}: {text}")

    def above(self, line: str) -> None:
        """A line of the answer itself, for when stdout is the terminal that the bars are drawn on."""
        self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _started(self) -> Progress:
        if self._progress is None:
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._progress.start()
        return self._progress
