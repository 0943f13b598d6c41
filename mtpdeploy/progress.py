"""What a long use case says while it works. Doors decide how it looks; use cases only call it."""

from __future__ import annotations

from typing import Protocol


class Talk(Protocol):
    """Told on stderr, never on stdout. Every call is cheap and may come from a worker thread."""

    def note(self, text: str) -> None:
        """One line that stays on the screen."""

    def stage(self, key: str, text: str, fraction: float | None = None) -> None:
        """The state of a running piece of work, `key` (a host, a bench point …); `fraction` 0…1 where known. Replaces the last one."""

    def done(self, key: str, text: str) -> None:
        """That piece of work has ended; `text` stays on the screen."""


class Silent:
    """Says nothing: for tests and for --quiet."""

    def note(self, text: str) -> None: ...

    def stage(self, key: str, text: str, fraction: float | None = None) -> None: ...

    def done(self, key: str, text: str) -> None: ...
