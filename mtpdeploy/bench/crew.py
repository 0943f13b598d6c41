"""Several client processes that act as one client: one load split between them, one start, one stream of records.

A process of its own per core, because one interpreter uses one. Each is a plain start of this Python with `main` below; jobs and
records pass as length-prefixed pickles over a socket pair, so nothing (a key least of all) stands in a command line, and a client
whose parent is gone ends at once.

How a load is split: request i of a closed loop belongs to lane i modulo the lanes, lane k to process k modulo the processes; request i
of an open loop to process i modulo the processes, at its own time. All processes count from one moment of CLOCK_MONOTONIC, which the
processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtpdeploy.bench.client import Client, Endpoint, EndpointError, Outcome, Ready, Told
from mtpdeploy.bench.values import PointSpec, Record

STREAMS_EACH = 512  # concurrent streams that one process follows with room to spare
RATE_EACH = 500.0  # requests per second
HEAD_START_S = 0.1  # from the word to all processes until the first request
TELL_S = 0.25  # records leave a client process so often
_LENGTH = struct.Struct("!I")
_START = "import sys; sys.path[:] = sys.argv[2:]; from mtpdeploy.bench.crew import main; main(int(sys.argv[1]))"


def wanted(point: PointSpec, asked: int | None, cores: int | None = None) -> int:
    """How many client processes a point gets: as asked for, else by its concurrency or rate, leaving half of the cores to others.

    Never more than it has lanes (closed loop) or places under its cap.
    """
    cores = cores or _cores()
    lanes = point.concurrency
    need = max(math.ceil((lanes or 0) / STREAMS_EACH), math.ceil((point.rate or 0.0) / RATE_EACH), 1)
    count = asked or min(need, max(1, cores // 2))
    return max(1, min(count, lanes or len(point.requests), len(point.requests) or 1))


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Clients:
    """The client for each point: one in this process, or a crew."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float, processes: int | None) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._processes = processes
        self._made: dict[int, Client | Crew] = {}
        self._stopped = False

    def of(self, point: PointSpec) -> Client | Crew:
        count = wanted(point, self._processes)
        if count not in self._made:
            one = count == 1
            make = (
                Client(self.endpoint, timeout_s=self._timeout_s) if one else Crew(self.endpoint, count, self._timeout_s)
            )
            self._made[count] = make
        return self._made[count]

    def close(self) -> None:
        for client in self._made.values():
            client.close()


@dataclass(frozen=True, slots=True)
class Job:
    """One process's part of a load."""

    work: Sequence[Ready]
    point: int
    lanes: int | None
    cap: int | None


@dataclass
class _Hand:
    """One client process, as its parent sees it."""

    number: int
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    line: socket.socket
    told: set[int] = field(default_factory=set)  # indexes of the requests whose records have come

    def say(self, *words: object) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):
            _write(self.writer, words)

    async def hear(self) -> tuple[Any, ...]:
        try:
            return await _read(self.reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            return ("gone",)


class Crew:
    """`count` client processes with the interface of Client."""

    def __init__(self, endpoint: Endpoint, count: int, timeout_s: float) -> None:
        self.endpoint = endpoint
        self.count = count
        self.timeout_s = timeout_s
        self._hands: list[_Hand] = []
        self._stopping = False

    async def closed_loop(self, work: Sequence[Ready], lanes: int, point: int, told: Told) -> Outcome:
        """As Client's. A process whose part is done early leaves its lanes empty, so the last requests end a little later."""
        lanes = min(lanes, len(work))
        shares = [len(range(number, lanes, self.count)) for number in range(self.count)]
        parts = [[one for place, one in enumerate(work) if place % lanes % self.count == n] for n in range(self.count)]
        jobs = [Job(part, point, share, None) for part, share in zip(parts, shares, strict=True)]
        return await self._run(jobs, told)

    async def open_loop(self, work: Sequence[Ready], point: int, told: Told, *, cap: int | None = None) -> Outcome:
        """As Client's; a cap is shared out."""
        caps = [None if cap is None else len(range(number, cap, self.count)) for number in range(self.count)]
        jobs = [Job(work[number :: self.count], point, None, caps[number]) for number in range(self.count)]
        return await self._run(jobs, told)

    def stop(self) -> None:
        self._stopping = True
        for hand in self._hands:
            hand.say("stop")

    def close(self) -> None:
        """The processes end when their end of the line is closed; one that does not is ended."""
        for hand in self._hands:
            with contextlib.suppress(OSError):
                hand.line.shutdown(socket.SHUT_RDWR)  # at once: the loop may not turn again
            hand.line.close()
            hand.writer.close()
        for hand in self._hands:
            _end(hand.process)
        self._hands = []

    async def _run(self, jobs: Sequence[Job], told: Told) -> Outcome:
        self._stopping = False
        self._hands = [hand for hand in self._hands if hand.process.poll() is None]
        if len(self._hands) < self.count:
            self.close()
            self._hands = [await _start(number, self.endpoint, self.timeout_s) for number in range(self.count)]
        used = [(hand, job) for hand, job in zip(self._hands, jobs, strict=True) if job.work]
        for hand, job in used:
            hand.told = set()
            hand.say("run", job)
        answers = await asyncio.gather(*(hand.hear() for hand, _ in used))
        for answer in answers:
            if answer[0] != "ready":
                self.close()
                if answer[0] == "failed":
                    raise EndpointError(*answer[1:])
                raise EndpointError("client", "a client process ended before the load began; its words are above")
        start = time.monotonic_ns() + round(HEAD_START_S * 1e9)
        for hand, _ in used:
            hand.say("go", start)
        if self._stopping:
            self.stop()
        parts = await asyncio.gather(*(self._follow(hand, job, start, told) for hand, job in used))
        return _merged(parts, start)

    async def _follow(self, hand: _Hand, job: Job, start: int, told: Told) -> Outcome:
        while True:
            word, *rest = await hand.hear()
            if word == "records":
                for record in rest[0]:
                    hand.told.add(record.index)
                    told(
                        record if record.lane is None else replace(record, lane=record.lane * self.count + hand.number)
                    )
            elif word == "done":
                outcome: Outcome = rest[0]
                return outcome
            else:
                status = await asyncio.get_running_loop().run_in_executor(None, hand.process.wait)
                wall = time.monotonic_ns() - start
                for ready in job.work:
                    if ready.request.index not in hand.told:
                        told(
                            _lost(ready, job.point, wall // 1000, f"a client process ended ({status}) during the load")
                        )
                return Outcome(started_ns=start, wall_s=wall / 1e9, dropped=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _lost(ready: Ready, point: int, at_us: int, why: str) -> Record:
    request = ready.request
    return Record(
        point, request.index, request.prompt.id, request.prompt.kind, request.output_tokens, at_us,
        None if request.at_s is None else round(request.at_s * 1e6), end_us=0, error=why, error_kind="client",
    )  # fmt: skip


def _merged(parts: Sequence[Outcome], start: int) -> Outcome:
    whole = Outcome(started_ns=start, parts=tuple(parts))
    whole.wall_s = max((part.wall_s for part in parts), default=0.0)
    whole.cpu_s = sum(part.cpu_s for part in parts)
    whole.reconnects = sum(part.reconnects for part in parts)
    whole.dropped = any(part.dropped for part in parts)
    for part in parts:
        whole.kept |= part.kept
    return whole


async def _start(number: int, endpoint: Endpoint, timeout_s: float) -> _Hand:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
        )  # fmt: skip
    line = ours.dup()
    reader, writer = await asyncio.open_connection(sock=ours)
    hand = _Hand(number, process, reader, writer, line)
    hand.say("serve", endpoint, timeout_s)
    return hand


def _write(writer: asyncio.StreamWriter, words: tuple[object, ...]) -> None:
    data = pickle.dumps(words, pickle.HIGHEST_PROTOCOL)
    writer.write(_LENGTH.pack(len(data)) + data)


async def _read(reader: asyncio.StreamReader) -> tuple[Any, ...]:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    words: tuple[Any, ...] = pickle.loads(await reader.readexactly(size))
    return words


def main(descriptor: int) -> None:
    """A client process: serves its parent until the line is closed. Ctrl-C is the parent's to pass on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(_serve(socket.socket(fileno=descriptor)))


async def _serve(line: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=line)
    client: Client | None = None
    running: asyncio.Task[None] | None = None
    go: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    while True:
        try:
            word, *rest = await _read(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            break
        if word == "serve":
            client = Client(rest[0], timeout_s=rest[1])
        elif word == "run" and client is not None:
            go = asyncio.get_running_loop().create_future()
            running = asyncio.ensure_future(_work(client, rest[0], go, writer))
        elif word == "go":
            go.set_result(rest[0])
        elif word == "stop" and client is not None:
            client.stop()
    if running is not None:
        running.cancel()
    if client is not None:
        client.close()


async def _work(client: Client, job: Job, go: asyncio.Future[int], writer: asyncio.StreamWriter) -> None:
    records: list[Record] = []

    def tell() -> None:
        if records:
            _write(writer, ("records", records))
            records.clear()

    async def begin() -> int:
        _write(writer, ("ready",))
        return await go

    ticking = asyncio.ensure_future(_every(TELL_S, tell))
    try:
        outcome = await _load(client, job, records.append, begin)
    except EndpointError as exc:
        _write(writer, ("failed", exc.kind, str(exc)))
        return
    except Exception:
        traceback.print_exc()  # for the parent's log; the parent sees the line closed, and says that the process ended
        os._exit(70)
    finally:
        ticking.cancel()
    tell()
    _write(writer, ("done", outcome))


def _load(client: Client, job: Job, told: Told, begin: Callable[[], Awaitable[int]]) -> Awaitable[Outcome]:
    if job.lanes is not None:
        return client.closed_loop(job.work, job.lanes, job.point, told, begin=begin)
    return client.open_loop(job.work, job.point, told, cap=job.cap, begin=begin)


async def _every(seconds: float, act: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        act()
