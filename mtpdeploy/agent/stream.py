"""The line to the other side: one JSON object a line on stdout, a heartbeat each second, and the news that nobody
listens."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from mtpdeploy.agent.protocol import HEARTBEAT_S


class Stream:
    """Writes events to a file descriptor, from any thread.

    When the reader has gone, `gone` is set and writing becomes a no-op: a verb that changes the host ends what it
    has begun, one that only watches looks at `gone` and leaves.
    """

    def __init__(self, descriptor: int = 1) -> None:
        self.gone = threading.Event()
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def emit(self, event: str, **fields: Any) -> None:
        """Writes one event. Values must be JSON-able; odd surrogates of file names are escaped by JSON itself."""
        line = (json.dumps({"event": event, **fields}, separators=(",", ":")) + "\n").encode()
        with self._lock:
            self._write(line)

    def step(self, do: str, why: str = "") -> None:
        """Says what is about to be done."""
        self.emit("step", do=do, why=why)

    def note(self, text: str) -> None:
        """Says something that a person should know."""
        self.emit("note", text=text)

    def start_heartbeat(self) -> None:
        """Begins the heartbeat at once, so that the other side sees life before the first real event."""
        self.emit("heartbeat")
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop_heartbeat(self) -> None:
        """Ends it; called before the last event, which must be the last line."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S) and not self.gone.is_set():
            with self._lock:
                if not self._stopped.is_set():
                    self._write(b'{"event":"heartbeat"}\n')

    def _write(self, line: bytes) -> None:
        if self.gone.is_set():
            return
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:  # EPIPE, or EIO of a terminal that is gone
            self.gone.set()
