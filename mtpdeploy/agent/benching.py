"""Runs the benchmark's client beside the server, and keeps its records here until they were pulled.

<workdir>/bench/<run-id>/ holds spec.json, events.jsonl (each line an event, as the client wrote it), client.log, and the files
of the run. The client writes to the file and not to the connection, so that a cut line costs nothing: the next call goes on
after the last event that was seen.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mtpdeploy.agent import files, process
from mtpdeploy.agent.fault import Fault
from mtpdeploy.agent.process import ProcessId
from mtpdeploy.agent.protocol import BenchPullRequest, BenchRequest
from mtpdeploy.agent.release import Service, work_folder
from mtpdeploy.agent.server import API_KEY_VARIABLE, api_key
from mtpdeploy.agent.stream import Stream

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_PULL_BYTES = 48 * 1024
_LOOK_S = 0.05


def folder(workdir: str, run_id: object) -> Path:
    """The run's folder. Fault if the id is none."""
    if not isinstance(run_id, str) or not RUN_ID.match(run_id):
        raise Fault("usage-error", f"{run_id!r} is no run id")
    return work_folder(workdir) / "bench" / run_id


def bench(stream: Stream, request: BenchRequest) -> dict[str, Any]:
    """Starts the client (unless the run is there already) and streams its events until it ends."""
    workdir = str(request.get("workdir") or "~/.mtpdeploy")
    place = folder(workdir, request.get("run_id"))
    if not place.is_dir():
        if request.get("attach_only"):
            raise Fault("not-found", f"no benchmark {place.name} on this host")
        _start(Service.of(request), place, request)
    client = ProcessId.from_json(files.read_json(place / "client.json"))
    seen = int(request.get("from_line") or 0)
    position = 0
    line_number = 0
    carry = b""
    while True:
        alive = process.alive(client)  # asked before reading: what it wrote before it ended is then read
        data, position = _read_from(place / "events.jsonl", position)
        carry += data
        *lines, carry = carry.split(b"\n")
        for line in lines:
            line_number += 1
            if line_number > seen:
                _emit(stream, line, line_number)
        if not alive and not data:
            break
        if stream.gone.is_set():
            if not request.get("detach"):
                _end(client)
            break
        time.sleep(_LOOK_S)
    return _ended(place, line_number)


def _start(service: Service, place: Path, request: BenchRequest) -> None:
    """Runs the packed client with the deployment's own Python; it must not outlive this agent unless asked to."""
    files.own_folder(work_folder(str(request.get("workdir") or "~/.mtpdeploy")))
    files.own_folder(place.parent)
    files.own_folder(place)
    try:
        files.replace_json(place / "spec.json", request.get("spec") or {})
        events = os.open(place / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        log = os.open(place / "client.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise files.explain(error, "preparing the benchmark") from None
    env = {**os.environ, **{str(k): str(v) for k, v in (request.get("env") or {}).items()}}
    current = service.current()
    key = request.get("api_key", api_key(current) if current is not None else None)
    if key:
        env[API_KEY_VARIABLE] = key
    argv = [os.path.expanduser(str(request["python"])), *_client_command(), str(place)]
    try:
        started = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=events,
            stderr=log,
            env=env,
            cwd=place,
            start_new_session=True,
            close_fds=True,
        )
    except OSError as error:
        raise Fault("remote-error", f"the benchmark's client cannot be started: {error}") from None
    finally:
        os.close(events)
        os.close(log)
    identity = process.identify(started.pid)
    files.replace_json(place / "client.json", identity.as_json() if identity else {})


def _client_command() -> list[str]:
    program = os.path.abspath(sys.argv[0])
    return [program, "bench-client"] if program.endswith(".pyz") else ["-m", "mtpdeploy.agent", "bench-client"]


def client_main(place: str) -> int:
    """`bench-client`: the client itself, in the deployment's Python (it needs aiohttp, which SGLang brings)."""
    from mtpdeploy.bench import hostmain

    spec = files.read_json(Path(place) / "spec.json")
    return int(hostmain.main(spec, Path(place)))


def _read_from(path: Path, position: int) -> tuple[bytes, int]:
    try:
        with open(path, "rb") as file:
            file.seek(position)
            data = file.read(1024 * 1024)
    except OSError:
        return b"", position
    return data, position + len(data)


def _emit(stream: Stream, line: bytes, number: int) -> None:
    try:
        value = json.loads(line)
    except ValueError:
        value = {"text": line.decode(errors="replace")[:500]}
    stream.emit("bench", line=number, data=value)


def _end(client: ProcessId | None) -> None:
    """Nobody waits for the result: the load ends too."""
    if client is None:
        return
    process.send(client, signal.SIGTERM)
    if not process.wait_until_dead(client, 10.0):
        process.send(client, signal.SIGKILL)


def _ended(place: Path, lines: int) -> dict[str, Any]:
    names = {entry.name: entry.stat().st_size for entry in os.scandir(place) if entry.is_file(follow_symlinks=False)}
    tail: list[str] = []
    with contextlib.suppress(OSError):
        tail = (place / "client.log").read_text(errors="replace").splitlines()[-20:]
    finished = (place / "finished.json").is_file()
    return {
        "run_id": place.name,
        "folder": str(place),
        "lines": lines,
        "files": names,
        "finished": finished,
        "client_log": tail,
    }


def pull(stream: Stream, request: BenchPullRequest) -> dict[str, Any]:
    """Streams a file of a run from an offset; removes the run's folder if that was asked for."""
    place = folder(str(request.get("workdir") or "~/.mtpdeploy"), request.get("run_id"))
    name = request.get("name")
    offset = int(request.get("offset") or 0)
    if name:
        if name != os.path.basename(name) or name.startswith("."):
            raise Fault("usage-error", f"{name!r} is no file of a run")
        try:
            descriptor = os.open(place / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise Fault("not-found", f"{name} of run {place.name}: {error.strerror}") from None
        with os.fdopen(descriptor, "rb") as file:
            file.seek(offset)
            while (data := file.read(_PULL_BYTES)) and not stream.gone.is_set():
                stream.emit("file", name=name, offset=offset, data=base64.b64encode(data).decode())
                offset += len(data)
    if (
        request.get("remove")
        and place.is_dir()
        and not process.alive(ProcessId.from_json(files.read_json(place / "client.json")))
    ):
        shutil.rmtree(place, ignore_errors=True)
    return {"run_id": place.name, "name": name, "offset": offset}
