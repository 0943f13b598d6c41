"""Several hosts' lines as one stream, ordered by time.

Each host's lines come in its own order and keep it. Between hosts the line with the earlier time goes first, as far as it is there: a
host that is silent is waited for no longer than `hold_s`, so a stream that is followed is ordered to that precision. Nothing piles up:
a host that is far ahead, or a reader that is slow, makes `put` wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

MOST = 512  # lines of a host that wait
HOLD_S, BEGIN_S = 0.4, 6.0


@dataclass(slots=True)
class _Line:
    when: str  # sorts as time does
    goes_on: bool  # belongs to the line before it, as a traceback's lines do
    text: str
    came: float


@dataclass(slots=True)
class _Source:
    waiting: deque[_Line] = field(default_factory=deque)
    begun: bool = False
    ended: bool = False


class Merge:
    """Lines put in by one thread a host, taken out by `run` in another.

    follow: an order that is not certain is not waited for longer than `hold_s`; without it every source is heard to its end.
    """

    def __init__(
        self, names: Iterable[str], *, follow: bool, hold_s: float = HOLD_S, begin_s: float = BEGIN_S, most: int = MOST
    ) -> None:
        self._sources = {name: _Source() for name in names}
        self._follow, self._hold_s, self._begin_s, self._most = follow, hold_s, begin_s, most
        self._changed = threading.Condition()
        self._last: str | None = None
        self._stopped = False

    def begun(self, name: str) -> None:
        """The host has answered: what it has to say comes now."""
        with self._changed:
            self._sources[name].begun = True
            self._changed.notify_all()

    def put(self, name: str, when: str, text: str, *, goes_on: bool = False) -> None:
        """A line of that host. Waits while too many of its lines wait; BrokenPipeError once nobody takes them any more."""
        source = self._sources[name]
        with self._changed:
            while len(source.waiting) >= self._most and not self._stopped:
                self._changed.wait()
            if self._stopped:
                raise BrokenPipeError("nobody takes lines any more")
            source.begun = True
            source.waiting.append(_Line(when, goes_on, text, time.monotonic()))
            self._changed.notify_all()

    def ended(self, name: str) -> None:
        """No more lines of that host."""
        with self._changed:
            self._sources[name].ended = True
            self._changed.notify_all()

    def run(self, out: Callable[[str, str], None]) -> None:
        """out(name, text) for each line, until every host has ended. What `out` raises ends all of it."""
        began = time.monotonic()
        try:
            while True:
                with self._changed:
                    while (found := self._next(began)) is None:
                        if all(source.ended and not source.waiting for source in self._sources.values()):
                            return
                        self._changed.wait(0.05)
                    name, lines = found
                    self._changed.notify_all()
                for line in lines:
                    out(name, line.text)
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()

    def _next(self, began: float) -> tuple[str, list[_Line]] | None:
        """The next lines of one host, taken out; None if it is not certain yet which ones."""
        if self._last is not None and (more := self._continued(self._last)):
            return self._last, more
        heads = {name: source.waiting[0] for name, source in self._sources.items() if source.waiting}
        if not heads:
            return None
        name = min(heads, key=lambda each: (heads[each].when, heads[each].came))
        now = time.monotonic()
        for source in self._sources.values():
            if source.waiting or source.ended:
                continue
            if not self._follow or (not source.begun and now - began < self._begin_s):
                return None
            if now - heads[name].came < self._hold_s:
                return None
        self._last = name
        return name, [self._sources[name].waiting.popleft(), *self._continued(name)]

    def _continued(self, name: str) -> list[_Line]:
        waiting, found = self._sources[name].waiting, []
        while waiting and waiting[0].goes_on:
            found.append(waiting.popleft())
        return found
