"""This machine as a host: the same interface without SSH."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
from collections import deque
from types import TracebackType
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:  # the inventory brings Pydantic with it, and a connection may begin before
    from mtpdeploy.inventory.values import Host


_STDERR_KEPT = 64 * 1024


class LocalChannel:
    """A child process in a session of its own, so that a Ctrl-C at the terminal reaches only us."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            cwd=os.path.expanduser("~"),
        )
        self._stderr: deque[bytes] = deque(maxlen=64)
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._drain, args=(self._process.stderr,), daemon=True)
        self._reader.start()

    def _drain(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := stream.read(4096):
                self._stderr.append(data)

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) or 0 :]

    def finish(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def receive(self, timeout_s: float | None) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        if not select.select([descriptor], [], [], timeout_s)[0]:
            raise TimeoutError(f"no output for {timeout_s:.0f} s")
        return os.read(descriptor, 64 * 1024)

    def stderr(self) -> str:
        if self._process.poll() is not None:
            self._reader.join(0.2)
        return b"".join(self._stderr)[-_STDERR_KEPT:].decode(errors="replace")

    def exit_status(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        self.finish()
        for stream in (self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        threading.Thread(target=self._process.wait, daemon=True).start()  # whoever goes on is reaped when it ends


class LocalForward:
    """The port itself: nothing has to be carried."""

    def __init__(self, port: int) -> None:
        self.port = port

    def close(self) -> None: ...


class LocalTransport:
    """Runs commands with /bin/sh on this machine."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def begin(self) -> None: ...

    def exec(self, command: str) -> LocalChannel:
        return LocalChannel(command)

    def forward(self, port: int, address: str = "127.0.0.1") -> LocalForward:
        return LocalForward(port)

    def close(self) -> None: ...

    def __enter__(self) -> LocalTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
