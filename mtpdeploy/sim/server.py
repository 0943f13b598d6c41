"""`python -m sglang.launch_server`, played: arguments, load, HTTP, drain, and SGLang's own end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from aiohttp import web

from mtpdeploy.sim import card, startup
from mtpdeploy.sim.api import Api
from mtpdeploy.sim.engine import Engine
from mtpdeploy.sim.launch import Launch
from mtpdeploy.sim.phases import PACE
from mtpdeploy.sim.shim import settings

_LOOK_S = 5.0


class Log:
    """Everything goes to stderr but uvicorn's access lines, which go to stdout."""

    def __init__(self, milliseconds: bool) -> None:
        self._ms = milliseconds

    def __call__(self, text: str) -> None:
        if text.startswith("\0"):
            self._write(sys.stderr, text[1:] + "\n")
        elif text.endswith(startup.BAR):
            self._write(sys.stderr, "\r" + text[:-1])
        else:
            now = time.time()
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
            if self._ms:
                stamp += f".{int(now % 1 * 1000):03d}"
            self._write(sys.stdout if ' - "' in text else sys.stderr, f"[{stamp}] {text}\n")

    def _write(self, stream: IO[str], text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()


def main(folder: Path) -> None:
    """Runs until it is stopped, crashes, or is told to fail."""
    simulate = settings(folder)
    launch = Launch.of(folder, sys.argv[1:], simulate)
    say = Log(os.environ.get("SGLANG_LOG_MS", "") not in ("", "0", "false"))
    children: list[subprocess.Popen[bytes]] = []
    say("\0# simulated: this is mtpdeploy's rehearsal of SGLang "
        f"{launch.version}, {simulate.clock:g} simulated seconds a second; no number below was measured on a GPU")  # fmt: skip
    try:
        _play(startup.before_args(launch), say, launch, None)
        say(startup.server_args(launch))
        children = [_child(title) for title in ("sglang::scheduler", "sglang::detokenizer")]
        _play(startup.load(launch), say, launch, children[0].pid)
        _play(startup.caches(launch), say, launch, None)
    except startup.Died as died:
        _end(children)
        if died.status < 0:
            os.kill(os.getpid(), -died.status)
        sys.exit(died.status)
    if (line := startup.timings(launch)) is not None:
        say(line)
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        asyncio.run(_serve(launch, say, children))
    finally:
        _end(children)
    # After a clean drain SGLang kills its own process tree with SIGKILL, itself included.
    os.kill(os.getpid(), signal.SIGKILL)


def _play(steps: Iterator[startup.Step | startup.Held], say: Log, launch: Launch, holder: int | None) -> None:
    for step in steps:
        if isinstance(step, startup.Held):
            if holder is not None:
                card.hold(launch.folder, holder, step.gb)
            continue
        seconds, text = step
        if seconds:
            time.sleep(seconds / (PACE * launch.simulate.clock))
        if text:
            say(text)


def _child(title: str) -> subprocess.Popen[bytes]:
    """A child process with SGLang's title, once it has it. Its file is run alone: importing the package would take longer."""
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("child.py")), title, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None
    child.stdout.readline()
    return child


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.kill()
        child.wait()


async def _serve(launch: Launch, say: Log, children: list[subprocess.Popen[bytes]]) -> None:
    engine = Engine(launch, say)
    api = Api(launch, engine, say)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def asked_to_end(number: signal.Signals) -> None:
        if number is signal.SIGTERM and startup.recorded(launch):
            say("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_end, number)
    say(f"INFO:     Started server process [{os.getpid()}]")
    say("INFO:     Waiting for application startup.")
    if startup.recorded(launch):
        say(
            "Using default chat sampling params from model generation config: {'temperature': 0.6, 'top_k': 20, 'top_p': 0.95}"
        )
    warms_up = not launch.given.get("skip_server_warmup")
    if not warms_up:
        say("The server is fired up and ready to roll!")
    say("INFO:     Application startup complete.")
    runner = web.AppRunner(api.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        if launch.fault == "port-taken":
            raise OSError(98, "address already in use")
        await web.TCPSite(runner, launch.host, launch.port, backlog=1024).start()
    except OSError:
        say(
            f"ERROR:    [Errno 98] error while attempting to bind on address ('{launch.host}', {launch.port}): address already in use"
        )
        say("INFO:     Waiting for application shutdown.")
        say("INFO:     Application shutdown complete.")
        await runner.cleanup()
        _end(children)
        os._exit(3)  # uvicorn's own status for a server that could not start
    say(f"INFO:     Uvicorn running on http://{launch.host}:{launch.port} (Press CTRL+C to quit)")
    work = asyncio.create_task(engine.run())
    guard = asyncio.create_task(_guard(launch, say, children))
    if warms_up:
        await _warm_up(launch, engine, say)
    api.status = "Up"
    if warms_up:
        say("The server is fired up and ready to roll!")
    up = time.monotonic()
    await stop.wait()
    # tokenizer_manager.py looks every 5 s whether it was asked to end
    await asyncio.sleep((_LOOK_S - (time.monotonic() - up) * launch.simulate.clock % _LOOK_S) / launch.simulate.clock)
    api.status = "ShuttingDown"
    while left := len(engine.running) + len(engine.waiting):
        say(
            f"Gracefully exiting... Remaining number of requests {left}. Remaining requests remaining_rids={[job.rid for job in engine.running]}."
        )
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_idle(engine), 5.0)
    for task in (work, guard):
        task.cancel()
    await runner.cleanup()


async def _idle(engine: Engine) -> None:
    while engine.running or engine.waiting:
        await asyncio.sleep(0.05)


async def _warm_up(launch: Launch, engine: Engine, say: Log) -> None:
    say('INFO:     127.0.0.1:36512 - "GET /model_info HTTP/1.1" 200 OK')
    job = engine.submit("warm-up", "The capital city of France is", 8, 8, True, 0.0)
    while job.finished is None:
        await job.changed.wait()
        job.changed.clear()
    path = "/v1/chat/completions" if launch.model.multimodal else "/generate"
    say(f'INFO:     127.0.0.1:36518 - "POST {path} HTTP/1.1" 200 OK')


async def _guard(launch: Launch, say: Log, children: list[subprocess.Popen[bytes]]) -> None:
    """A child that dies takes the server down, as SGLang's watchdog does."""
    if launch.fault == "scheduler-killed":
        await asyncio.sleep(2.0 / launch.simulate.clock)
        children[0].kill()
    while True:
        await asyncio.sleep(0.2)
        for child, name in zip(children, ("scheduler_0", "detokenizer"), strict=True):
            status = child.poll()
            if status is None:
                continue
            say(
                f"Subprocess {name} (pid={child.pid}) crashed with exit code {status}. Triggering SIGQUIT for cleanup..."
            )
            say("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
            say("Sleeping 5 seconds before crash diagnostics to let GPU activity settle.")
            await asyncio.sleep(5.0 / launch.simulate.clock)
            say("No live scheduler processes found; skipping py-spy and CUDA coredump.")
            say(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=True, pid={os.getpid()}")
            _end(children)
            os.kill(os.getpid(), signal.SIGKILL)
