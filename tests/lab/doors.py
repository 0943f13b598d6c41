"""Commands as processes of their own, forked from one in which everything is imported already.

A test on real hosts runs a hundred commands, and a second of imports each would be most of its time. What a person could
notice is the same: own pid, session, environment, folder, signals and exit status; only `execve` is left out.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HEAVY = (
    "mtpdeploy.cli",
    "mtpdeploy.actions.deploy",
    "mtpdeploy.actions.launches",
    "mtpdeploy.actions.logs",
    "mtpdeploy.actions.bench",
    "mtpdeploy.actions.benchhost",
    "mtpdeploy.actions.doctor",
    "mtpdeploy.report.launches",
    "mtpdeploy.report.live",
    "mtpdeploy.report.bench",
    "mtpdeploy.hosts.ssh",
    "mtpdeploy.hosts.zipapp",
    "rich.console",
)


class Running:
    """A command that was started: `pid`, its output so far, its end."""

    def __init__(self, connection: socket.socket, pid: int, out: Path, err: Path) -> None:
        self.pid = pid
        self._connection, self._out, self._err = connection, out, err
        self._said = b""
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status (negative: a signal), or None while it runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._said += self._connection.recv(64) or b"127\n"
            if self._said.endswith(b"\n"):
                self.returncode = int(self._said)
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        """The exit status. AssertionError if it takes longer; then it is killed."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                self.kill()
                raise AssertionError(f"not ended within {timeout} s\n{self.out}\n{self.err}")
            select.select([self._connection], [], [], left)
        return code

    def signal(self, number: signal.Signals) -> None:
        """To it and all that it started."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and until it has gone."""
        self.signal(signal.SIGKILL)
        if self.returncode is None:
            select.select([self._connection], [], [], 10)
            self.poll()

    @property
    def out(self) -> str:
        """Its stdout so far."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """Its stderr so far."""
        return self._err.read_text(errors="replace")


class Doors:
    """The process that forks. One for each worker of the tests; it ends with its stdin."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mtpdeploy-doors-")
        self._path = f"{self._folder.name}/socket"
        root = str(Path(__file__).resolve().parent.parent.parent)
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._path], stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
        )
        deadline = time.monotonic() + 60
        while not os.path.exists(self._path):
            assert self._process.poll() is None, "the doors' process ended"
            assert time.monotonic() < deadline, "the doors' process did not come up"
            time.sleep(0.02)

    def start(self, words: tuple[str, ...], *, env: Mapping[str, str], cwd: Path, stdin: int | None = None) -> Running:
        """Runs `mtpdeploy WORDS…`. stdin: a descriptor; a terminal becomes the command's own."""
        out, err = (tempfile.mkstemp(dir=self._folder.name) for _ in range(2))
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self._path)
        asked = json.dumps({"words": words, "env": dict(env), "cwd": str(cwd)}).encode()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            fds = array.array("i", [nothing if stdin is None else stdin, out[0], err[0]])
            connection.sendmsg([struct.pack(">I", len(asked))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            connection.sendall(asked)
        finally:
            for fd in (nothing, out[0], err[0]):
                os.close(fd)
        said = b""
        while not said.endswith(b"\n"):
            part = connection.recv(1)
            assert part, "the doors' process went away"
            said += part
        return Running(connection, int(said), Path(out[1]), Path(err[1]))

    def close(self) -> None:
        """Ends the process; commands that still run go on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._folder.cleanup()


# ---------------------------------------------------------------- the process itself


def _serve(path: str) -> None:
    for name in _HEAVY:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        readable, _, _ = select.select([listener, 0], [], [])
        if 0 in readable:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _keep(connection)
        connection.close()


def _keep(connection: socket.socket) -> None:
    """Starts one command and tells how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, fds, _, _ = socket.recv_fds(connection, 4, 3)
    length = struct.unpack(">I", head)[0]
    data = b""
    while len(data) < length:
        data += connection.recv(length - len(data))
    worker = os.fork()
    if worker == 0:
        connection.close()
        _work(json.loads(data), fds)
    for fd in fds:
        os.close(fd)
    connection.sendall(f"{worker}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def _work(asked: Any, fds: list[int]) -> None:
    import fcntl
    import termios

    code: object = 1
    try:
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.closerange(3, 64)
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        # The streams that were made at the start write to the descriptors 0 to 2, whatever these are now.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        from mtpdeploy.cli import main

        if wrong := float(asked["env"].get("CLOCK_S", 0)):
            from tests.lab.clock import shift

            shift(wrong)

        sys.argv = ["mtpdeploy", *asked["words"]]
        main()
    except SystemExit as end:
        code = end.code if end.code is not None else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _serve(sys.argv[1])
