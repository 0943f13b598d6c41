"""A work folder on this machine with the real agent in it, run as the process that it is: by another Python, from its zip."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtpdeploy.agent import protocol
from mtpdeploy.hosts import zipapp
from mtpdeploy.resources import environment

ROOT = Path(__file__).resolve().parent.parent
SERVER = ROOT / "tests" / "agent_server.py"


def build_agent(target: Path) -> Path:
    """The agent's zip as it is sent to hosts."""
    target.write_bytes(zipapp.agent().content)
    return target


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def new_launch_id() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + secrets.token_hex(3)


@dataclass
class Call:
    """A running agent: its events so far."""

    process: subprocess.Popen[bytes]
    events: list[dict[str, Any]] = field(default_factory=list)
    reader: threading.Thread | None = None
    _enough: threading.Event = field(default_factory=threading.Event)

    def read_on(self) -> None:
        """Reads events in a thread, until their end or `hang_up`. The descriptor is the thread's own: nobody closes it under it."""
        assert self.process.stdout is not None
        descriptor = os.dup(self.process.stdout.fileno())
        self.process.stdout.close()
        self.reader = threading.Thread(target=self._read, args=(descriptor,), daemon=True)
        self.reader.start()

    def _read(self, descriptor: int) -> None:
        rest = b""
        try:
            while not self._enough.is_set():
                if not select.select([descriptor], [], [], 0.02)[0]:
                    continue
                if not (data := os.read(descriptor, 1 << 16)):
                    return
                *lines, rest = (rest + data).split(b"\n")  # a killed agent may leave half a line
                self.events += [json.loads(line) for line in lines]
        finally:
            os.close(descriptor)

    def hang_up(self) -> None:
        """From now on nobody reads what the agent says."""
        assert self.reader is not None
        self._enough.set()
        self.reader.join(5)

    def wait_for(self, test: Callable[[dict[str, Any]], bool], seconds: float = 20) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        seen = 0
        while time.monotonic() < deadline:
            while seen < len(self.events):
                if test(self.events[seen]):
                    return self.events[seen]
                seen += 1
            time.sleep(0.01)
        raise AssertionError(f"no such event among {self.events}")

    def finish(self, seconds: float = 60) -> dict[str, Any]:
        """The last event."""
        self.process.wait(seconds)
        assert self.reader is not None
        self.reader.join(5)
        assert self.events, "the agent said nothing"
        return self.events[-1]


class Failed(AssertionError):
    def __init__(self, event: dict[str, Any]) -> None:
        super().__init__(json.dumps(event, indent=1))
        self.event = event


@dataclass
class AgentHost:
    """`workdir` and the agent's zip; `call` runs a verb to its end."""

    workdir: Path
    agent: Path
    service: str = "t"
    port: int = field(default_factory=free_port)
    client: str = "ann@laptop"
    skip_preflight: bool = False
    env: dict[str, str] = field(default_factory=dict)  # of the agent
    user_prefix: list[str] = field(default_factory=list)

    def begin(self, verb: str, **request: Any) -> Call:
        full: Any = {"workdir": str(self.workdir), "service": self.service, "client": self.client, **request}
        word = protocol.to_argument(full)
        process = subprocess.Popen(
            [*self.user_prefix, sys.executable, "-I", "-S", str(self.agent), verb, word or "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.env},
            start_new_session=True,
        )
        assert process.stdin is not None
        if word is None:
            process.stdin.write(protocol.to_frame(full))
        process.stdin.close()
        call = Call(process)
        call.read_on()
        return call

    def call(self, verb: str, **request: Any) -> dict[str, Any]:
        """The result. Failed with the error event otherwise."""
        last = self.begin(verb, **request).finish()
        if last["event"] != "result":
            raise Failed(last)
        return last

    def fails(self, verb: str, **request: Any) -> dict[str, Any]:
        """The error event; AssertionError if the verb worked."""
        last = self.begin(verb, **request).finish()
        assert last["event"] == "error", last
        return last

    # ---- a deployment of tests/agent_server.py

    def release(self, *, fingerprint: str = "one", supervisor: str = "detached", env: dict[str, str] | None = None,
                args: tuple[str, ...] = (), launch_id: str | None = None, key: str | None = None, **more: Any) -> dict[str, Any]:  # fmt: skip
        """`release` and `files` of a deploy request, rendered from the shipped templates."""
        launch_id = launch_id or new_launch_id()
        argv = [sys.executable, str(SERVER), "--host", "127.0.0.1", "--port", str(self.port), *args]
        variables = dict(env or {})
        jinja = environment()
        values = {
            "launch_id": launch_id, "argv": argv, "sglang_version": "0.5.18", "config_file": False,
            "service": self.service, "drain_timeout_s": 5.0, "restart_limit": 2, "restart_window_s": 60,
        }  # fmt: skip
        files = [
            {"path": "launch.sh", "mode": 0o700, "content": jinja.get_template("launch.sh.j2").render(values)},
            {"path": "env", "mode": 0o600, "content": "".join(f"{k}={shlex.quote(v)}\n" for k, v in variables.items())},
            {
                "path": "system.service",
                "mode": 0o644,
                "content": jinja.get_template("systemd/system.service.j2").render(values),
            },
            {
                "path": "user.service",
                "mode": 0o644,
                "content": jinja.get_template("systemd/user.service.j2").render(values),
            },
            *([{"path": "server.yml", "mode": 0o600, "content": f"api-key: {json.dumps(key)}\n"}] if key else []),
            {"path": "tmux.sh", "mode": 0o700, "content": jinja.get_template("tmux/start.sh.j2").render(values)},
        ]
        release = {
            "launch_id": launch_id, "service": self.service, "profile": "mtp", "created_utc": "2026-01-01T00:00:00.000Z",
            "by": self.client, "fingerprint": fingerprint, "host": "127.0.0.1", "port": self.port, "python": sys.executable,
            "argv": argv, "args": {}, "env": {}, "sglang_version": "0.5.18", "supervisor": supervisor,
            "drain_timeout_s": 5.0, "restart_limit": 2, "restart_window_s": 60.0, **more,
        }  # fmt: skip
        return {"fingerprint": fingerprint, "release": release, "files": files, "probe": {"port": self.port}}

    def deploy(self, *, fingerprint: str = "one", force: bool = False, **more: Any) -> dict[str, Any]:
        return self.call(
            "deploy", force=force, skip_preflight=self.skip_preflight, **self.release(fingerprint=fingerprint, **more)
        )

    def up(self, **more: Any) -> dict[str, Any]:
        """Deployed and proven ready."""
        deployed = self.deploy(**more)
        watched = self.call("watch", launch_id=deployed["launch_id"], silence_s=20)
        assert watched["outcome"] == "ready", watched
        return deployed

    def folder(self, launch_id: str) -> Path:
        return self.workdir / self.service / "releases" / launch_id

    def state(self, launch_id: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.folder(launch_id) / "state.json").read_text())
        return value

    def living(self) -> list[int]:
        """Pids that carry a launch id of this work folder, or were recorded by one and live."""
        ids = {path.name for path in (self.workdir / self.service / "releases").glob("*")}
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environ = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state not in "ZX" and any(f"MTPDEPLOY_LAUNCH_ID={i}".encode() in environ for i in ids):
                found.append(int(entry.name))
        return found

    def clean(self) -> None:
        """Ends what a failed test left: processes of this work folder's launches, by their launch id and record."""
        for state in self.workdir.glob("*/releases/*/state.json"):
            value = json.loads(state.read_text())
            keeper = value.get("supervising") or {}
            if (pid := keeper.get("pid")) and self._is(pid, keeper.get("start_time")):
                os.kill(pid, signal.SIGKILL)
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["tmux", "-L", f"mtpdeploy-{self.service}", "kill-server"], capture_output=True, check=False)

    @staticmethod
    def _is(pid: int, start_time: int | None) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19] == str(start_time)
        except OSError:
            return False


def log_bytes(events: list[dict[str, Any]]) -> bytes:
    """What the log events of a call carried, in order."""
    return b"".join(base64.b64decode(e["data"]) for e in events if e["event"] == "log")
