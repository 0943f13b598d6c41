"""The load client: many HTTP/1.1 streams on connections that are opened beforehand, with a time stamp on every read.

The hot path is an asyncio.Protocol of our own rather than aiohttp's stream reader: a read costs a clock call and an append, and
parsing waits until the answer ends or 64 KiB have gathered (docs/decisions/0006 says why, bench/client.py measures it). Everything
else that speaks HTTP uses aiohttp. uvloop runs the loop where it is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import ssl
import threading
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from mtpdeploy.bench.sse import Answer, BadAnswer, error_text
from mtpdeploy.bench.values import Api, Record, Request

PARSE_AT = (
    16384  # bytes of a stream that may wait for the parser: more is more memory, and a longer stop when they are parsed
)
LAST_CHUNK = b"0\r\n\r\n"  # HTTP's
DONE = b"data: [DONE]\n\n\r\n" + LAST_CHUNK  # the last event, the end of its HTTP chunk, and the last HTTP chunk
WATCH_S = 0.02  # between looks at the loop's punctuality
GIVE_UP_S = 0.2  # after a stop, for the records of what was in flight
COLLECT_S = 60.0  # between collections of cyclic garbage during a load: others in this process (the scrapes) make some
SPARE_FILES = 128  # open files beside the connections
OPEN_AT_ONCE = 128  # connections opened side by side before the load
ROUTES: Mapping[Api, str] = {
    "sglang": "/generate",
    "openai-chat": "/v1/chat/completions",
    "openai": "/v1/completions",
}
Told = Callable[[Record], None]
Begin = Callable[
    [], Awaitable[int]
]  # says that all is ready, and gives the time (monotonic, ns) at which the load starts


class EndpointError(Exception):
    """No stream can be had from the endpoint; the text says why. `kind` is a slug: refused, dns, tls, timeout, …"""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the requests go. The headers may hold a key: they are never logged or stored."""

    url: str
    api: Api
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    connect_timeout_s: float = 10.0

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if urlsplit(self.url).scheme == "https" else None

    def path(self) -> str:
        """The route below the URL's own path; a URL that already ends in /v1 keeps one."""
        base = urlsplit(self.url).path.rstrip("/")
        route = ROUTES[self.api]
        if base.endswith("/v1") and route.startswith("/v1/"):
            base = base.removesuffix("/v1")
        return base + route

    def encode(self, body: Mapping[str, Any]) -> bytes:
        """The whole request as it goes over the wire."""
        payload = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        shown = f"[{host}]" if ":" in host else host
        lines = [
            f"POST {self.path()} HTTP/1.1",
            f"Host: {shown}{f':{parts.port}' if parts.port else ''}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "Accept-Encoding: identity",
            "User-Agent: mtpdeploy-bench",
            *(f"{name}: {value}" for name, value in self.headers.items()),
            f"Content-Length: {len(payload)}",
        ]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + payload


class Stream(asyncio.Protocol):
    """One connection, one request at a time."""

    __slots__ = ("_descriptor", "_got", "_room", "_transport", "answer", "closed", "done", "heard_ns", "sent_ns")

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._descriptor: int | None = None  # of the socket, where bytes can go straight into it
        self._got: list[tuple[int, bytes]] = []
        self._room = 0  # bytes that may still come before they are parsed
        self.answer: Answer | None = None
        self.done: Callable[[Stream, str | None, str | None], None] | None = None
        self.closed = False
        self.sent_ns = 0
        self.heard_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        sock = transport.get_extra_info("socket")
        if sock is not None and transport.get_extra_info("sslcontext") is None and os.name == "posix":
            self._descriptor = sock.fileno()

    def send(self, data: bytes, answer: Answer, done: Callable[[Stream, str | None, str | None], None]) -> None:
        """The clock starts where the bytes are handed to the kernel; `done(stream, error kind, error)` ends it.

        uvloop would write them at the end of its turn, when all other lanes have been started too, so they are written here; what the
        socket doesn't take at once is the transport's.
        """
        assert self._transport is not None
        self.answer, self.done = answer, done
        self._room = 0  # parse each read until the head has said how the end can be seen
        self.heard_ns = self.sent_ns = time.monotonic_ns()
        # The number of a closed one may be another file's.
        if self._descriptor is not None and not self._transport.is_closing():
            with contextlib.suppress(OSError):  # full, or broken: the transport finds out which
                data = data[os.write(self._descriptor, data) :]
        if data:
            self._transport.write(data)

    def data_received(self, data: bytes, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._got.append((now(), data))
        self._room -= len(data)
        if self._room < 0:
            self._settle()
        elif data.endswith(LAST_CHUNK):
            self._maybe_ended(data)

    def _maybe_ended(self, data: bytes) -> None:
        """The end that nearly every stream has is seen on the bytes; then even its parsing waits for a quiet moment."""
        before = self._got[-2][1] if len(self._got) > 1 else b""
        answer = self.answer
        if answer is not None and (before[-32:] + data).endswith(DONE) and answer.chunked and answer.keep_alive:
            answer.unread, self._got, self._room = self._got, [], 0
            self._finish(None, None)
        else:
            self._settle()

    def _settle(self) -> None:
        """Parses what has come. Most reads of a stream only wait for this."""
        got, self._got = self._got, []
        answer = self.answer
        if answer is None:  # bytes that nobody asked for
            self.abort()
            return
        try:
            answer.feed_all(got)
        except BadAnswer as exc:
            self.abort()
            self._finish("protocol", str(exc))
            return
        if got:
            self.heard_ns = got[-1][0]
        self._room = PARSE_AT if answer.chunked else 0
        if answer.complete:
            if not answer.keep_alive:
                self.abort()
            self._finish(None, None)

    def silent_for_ns(self, now: int) -> int:
        """Nanoseconds since the last byte (or since the send)."""
        return now - (self._got[-1][0] if self._got else self.heard_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.answer is None:
            return
        self._settle()
        if self.answer is not None:
            self.answer.end()
            if self.answer.complete:
                self._finish(None, None)
            else:
                kind = "cut" if self.answer.last_ns is not None else "closed"
                why = f" ({exc})" if exc else ""
                self._finish(kind, f"the server closed the connection before the end of the answer{why}")

    def fail(self, kind: str, message: str) -> None:
        """Ends the request from our side."""
        self.abort()
        self._settle()
        if self.answer is not None:
            self._finish(kind, message)

    def _finish(self, kind: str | None, message: str | None) -> None:
        done, self.done = self.done, None
        if done is not None:
            done(self, kind, message)
        if self.done is None:
            self.answer = None

    def abort(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()


@dataclass(frozen=True, slots=True)
class Ready:
    """A request with its bytes, so that nothing is encoded once the clock runs.

    keep_bytes: of the answer's events, kept for its text; None: nothing is kept. 0: only the last event, which holds all of it
    where the server sends the text so far with every event.
    """

    request: Request
    data: bytes
    keep_bytes: int | None = None


@dataclass
class Outcome:
    """How the client itself did; the records went to `told`.

    parts: of each client process, where there were several.
    """

    started_ns: int = 0
    loop_lags_ms: array[float] = field(default_factory=lambda: array("f"))
    cpu_s: float = 0.0
    wall_s: float = 0.0
    reconnects: int = 0
    dropped: bool = False  # stopped before the end
    kept: dict[int, tuple[bytes, ...]] = field(default_factory=dict)  # events by the request's index
    parts: tuple[Outcome, ...] = ()

    @property
    def cpu_share(self) -> float | None:
        """Of one core; of several processes the busiest one's."""
        if self.parts:
            return max((part.cpu_share or 0.0 for part in self.parts), default=None)
        return self.cpu_s / self.wall_s if self.wall_s > 0 else None


class Client:
    """Connections to one endpoint, reused from point to point."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float = 600.0) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._idle: deque[Stream] = deque()
        self._tls = endpoint.tls
        self._flying: set[Stream] = set()
        self._stopping = False
        self._stopped: asyncio.Future[None] | None = None
        self.reconnects = 0

    async def connect(self, count: int) -> None:
        """Opens connections until `count` are ready. Raises EndpointError where none can be had."""
        self._idle = deque(stream for stream in self._idle if not stream.closed)
        _allow_files(count)
        while len(self._idle) < count:
            wave = min(OPEN_AT_ONCE, count - len(self._idle))
            self._idle.extend(await asyncio.gather(*(self._open() for _ in range(wave))))

    async def _open(self) -> Stream:
        loop = asyncio.get_running_loop()
        where = f"{self.endpoint.host}:{self.endpoint.port}"
        try:
            _, stream = await asyncio.wait_for(
                loop.create_connection(Stream, self.endpoint.host, self.endpoint.port, ssl=self._tls),
                self.endpoint.connect_timeout_s,
            )
        except asyncio.TimeoutError:
            raise EndpointError("timeout", f"{where} did not accept a connection in time") from None
        except ssl.SSLError as exc:
            raise EndpointError("tls", f"{where}: TLS failed: {exc.reason or exc}") from exc
        except ConnectionRefusedError:
            raise EndpointError("refused", f"{where} refused the connection: nothing listens there") from None
        except OSError as exc:
            kind = "dns" if type(exc).__name__ == "gaierror" else "unreachable"
            raise EndpointError(kind, f"{where}: {exc.strerror or exc}") from exc
        return stream

    def close(self) -> None:
        for stream in (*self._idle, *self._flying):
            stream.abort()
        self._idle.clear()

    def stop(self) -> None:
        """No further request is sent; those in flight are given up. What is complete stays."""
        self._stopping = True
        for stream in tuple(self._flying):
            stream.fail("interrupted", "the benchmark was interrupted")
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    async def closed_loop(
        self, work: Sequence[Ready], lanes: int, point: int, told: Told, *, begin: Begin | None = None
    ) -> Outcome:
        """`lanes` requests at all times until the work is done; a lane sends its next one as soon as it has an answer."""
        await self.connect(min(lanes, len(work)))
        return await self._run(work, point, told, begin, lanes=lanes)

    async def open_loop(
        self, work: Sequence[Ready], point: int, told: Told, *, cap: int | None = None, begin: Begin | None = None
    ) -> Outcome:
        """Each request at its own time `at_s`, whatever became of the ones before; with `cap`, at most so many in flight."""
        await self.connect(min(cap or 64, len(work), 1024))
        return await self._run(work, point, told, begin, cap=cap)

    async def _run(
        self,
        work: Sequence[Ready],
        point: int,
        told: Told,
        start: Begin | None,
        *,
        lanes: int | None = None,
        cap: int | None = None,
    ) -> Outcome:
        loop = asyncio.get_running_loop()
        outcome = Outcome()
        left = len(work)
        finished = loop.create_future()
        waiting: deque[int] = deque()
        undigested: deque[tuple[Answer, int, int | None, int, int, str | None, str | None, int]] = deque()
        self._stopping = False
        opened_before = self.reconnects
        if not work:
            return outcome
        # A collection stops every stream: what is there already is looked at no more, what comes now only when `_watch` says so.
        gc.collect()
        gc.freeze()
        gc.disable()

        def keep(record: Record) -> None:
            nonlocal left
            left -= 1
            told(record)
            if left == 0 and not finished.done():
                finished.set_result(None)

        def begin(place: int, lane: int | None, again: int = 0) -> None:
            """Sends request `place`, on an idle connection or a new one."""
            while self._idle:
                stream = self._idle.popleft()
                if not stream.closed:
                    launch(stream, place, lane, again)
                    return
            task = loop.create_task(self._open())
            task.add_done_callback(lambda made: opened(made, place, lane, again))

        def opened(made: asyncio.Task[Stream], place: int, lane: int | None, again: int) -> None:
            failure = made.exception()
            if failure is None:
                launch(made.result(), place, lane, again)
                return
            now = time.monotonic_ns()
            kind = failure.kind if isinstance(failure, EndpointError) else "error"
            keep(failed(place, lane, now, now, kind, str(failure), again))
            follow(lane)

        def launch(stream: Stream, place: int, lane: int | None, again: int) -> None:
            answer = Answer(self.endpoint.api, work[place].keep_bytes or 0)
            self._flying.add(stream)
            stream.send(work[place].data, answer, lambda s, kind, why: ended(s, answer, place, lane, again, kind, why))

        def ended(
            stream: Stream,
            answer: Answer,
            place: int,
            lane: int | None,
            again: int,
            kind: str | None,
            why: str | None,
        ) -> None:
            now = time.monotonic_ns()
            self._flying.discard(stream)
            if kind == "closed" and again == 0 and not self._stopping:
                # A kept connection that the server had already given up: it never saw the request.
                self.reconnects += 1
                begin(place, lane, again + 1)
                return
            if not stream.closed:
                self._idle.append(stream)
            sent = stream.sent_ns
            follow(lane)  # the next request leaves before this one is looked at
            undigested.append((answer, place, lane, sent, now, kind, why, again))
            if len(undigested) == 1:
                loop.call_soon(digest)

        def digest() -> None:
            """Makes one record, then lets the loop read: answers often end together, and the last must not wait for the first."""
            answer, place, lane, sent, now, kind, why, again = undigested[0]
            try:
                answer.catch_up()
            except BadAnswer as exc:
                kind, why = kind or "protocol", why or str(exc)
            undigested.popleft()
            if undigested:
                loop.call_soon(digest)
            if work[place].keep_bytes is not None:
                outcome.kept[work[place].request.index] = (*answer.chunks.kept, answer.chunks.last)
            keep(
                record_of(
                    work[place].request,
                    answer,
                    point,
                    outcome.started_ns,
                    sent,
                    now,
                    lane=lane,
                    kind=kind,
                    why=why,
                    again=again,
                )
            )

        def failed(place: int, lane: int | None, sent: int, now: int, kind: str, why: str, again: int) -> Record:
            return record_of(
                work[place].request, Answer(self.endpoint.api), point, outcome.started_ns, sent, now,
                lane=lane, kind=kind, why=why, again=again,
            )  # fmt: skip

        upcoming = iter(range(len(work)))

        def follow(lane: int | None) -> None:
            if self._stopping:
                return
            if lanes is not None:
                place = next(upcoming, None)
                if place is not None:
                    begin(place, lane)
            elif waiting and (cap is None or len(self._flying) < cap):
                begin(waiting.popleft(), None)

        def due(place: int) -> None:
            if self._stopping or finished.done():
                return
            if cap is not None and len(self._flying) >= cap:
                waiting.append(place)
            else:
                begin(place, None)

        halt = threading.Event()
        watch = None
        cpu = time.process_time()
        try:
            outcome.started_ns = time.monotonic_ns() if start is None else await start()
            if (early := outcome.started_ns - time.monotonic_ns()) > 0:
                await asyncio.sleep(early / 1e9)
            watch = self._watch(loop, outcome)
            cpu = time.process_time()
            if lanes is not None:
                for lane in range(min(lanes, len(work))):
                    begin(next(upcoming), lane)
            else:
                threading.Thread(
                    target=_pace, args=(loop, work, outcome.started_ns, due, halt), name="pacer", daemon=True
                ).start()
            self._stopped = loop.create_future()
            if self._stopping:
                self._stopped.set_result(None)
            await asyncio.wait({finished, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not finished.done():
                await asyncio.wait(
                    {finished}, timeout=GIVE_UP_S
                )  # records of the streams that were given up are being made
        finally:
            halt.set()
            if watch is not None:
                watch()
            outcome.wall_s = (time.monotonic_ns() - outcome.started_ns) / 1e9
            outcome.cpu_s = time.process_time() - cpu
            outcome.reconnects = self.reconnects - opened_before
            outcome.dropped = left > 0
            gc.enable()
            gc.unfreeze()
        return outcome

    def _watch(self, loop: asyncio.AbstractEventLoop, outcome: Outcome) -> Callable[[], None]:
        """The client's own punctuality, and the limit on silence, until the answer is called. A callback: it costs less than a task."""
        handle: asyncio.TimerHandle | None = None
        last_check = last_collection = expected = time.monotonic()

        def look() -> None:
            nonlocal handle, last_check, last_collection, expected
            now = time.monotonic()
            outcome.loop_lags_ms.append(max(0.0, now - expected) * 1000)
            if now - last_check > 1:
                last_check = now
                self._end_silent()
                if now - last_collection > COLLECT_S:
                    last_collection = now
                    gc.collect()
            expected = time.monotonic() + WATCH_S
            handle = loop.call_later(WATCH_S, look)

        def over() -> None:
            if handle is not None:
                handle.cancel()

        expected += WATCH_S
        handle = loop.call_later(WATCH_S, look)
        return over

    def _end_silent(self) -> None:
        limit, clock = self.timeout_s * 1e9, time.monotonic_ns()
        for stream in tuple(self._flying):
            if stream.silent_for_ns(clock) > limit:
                stream.fail("timeout", f"no byte from the server for {self.timeout_s:g} s")


def _allow_files(count: int) -> None:
    """Raises this process's limit of open files for `count` connections. EndpointError if the machine's own limit is below."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    need = count + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise EndpointError(
            "files",
            f"{count} connections need {need} open files, this machine allows {hard}: raise it (ulimit -Hn {need})",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def _pace(
    loop: asyncio.AbstractEventLoop,
    work: Sequence[Ready],
    start_ns: int,
    due: Callable[[int], None],
    halt: threading.Event,
) -> None:
    """Tells the loop when a request is due. In a thread: a loop's own timers count whole milliseconds."""
    for place, ready in enumerate(work):
        wait = (ready.request.at_s or 0.0) - (time.monotonic_ns() - start_ns) / 1e9
        if wait > 0.2:
            halt.wait(wait - 0.1)
            wait = (ready.request.at_s or 0.0) - (time.monotonic_ns() - start_ns) / 1e9
        if halt.is_set():
            return
        if wait > 0:
            time.sleep(wait)  # finer than an Event's timeout
        try:
            loop.call_soon_threadsafe(due, place)
        except RuntimeError:  # the loop has ended
            return


def record_of(
    request: Request,
    answer: Answer,
    point: int,
    started_ns: int,
    sent_ns: int,
    ended_ns: int,
    *,
    lane: int | None,
    kind: str | None,
    why: str | None,
    again: int,
) -> Record:
    """A stream's answer as a record. What makes it failed: status, cut, error event, abort, no token, no end of stream."""
    chunks = answer.chunks
    told = chunks.result()
    message = told.pop("finish_message", None)
    if kind is None and answer.status != 200:
        kind, why = f"http-{answer.status}", f"HTTP {answer.status}: {error_text(answer.body)}"
    elif kind is None and not answer.stream:
        kind, why = "not-a-stream", f"the server sent no event stream: {error_text(answer.body)}"
    elif kind is None and chunks.error is not None:
        kind, why = chunks.error_kind, f"error in the stream: {chunks.error}"
    elif kind is None and told.get("finish_reason") == "abort":
        kind, why = "aborted", f"the server aborted the request{f': {message}' if message else ''}"
    elif kind is None and not chunks.done and "finish_reason" not in told:
        kind, why = "cut", "the stream ended without [DONE] and without a finish reason"
    elif kind is None and not chunks.times:
        kind, why = "empty", "the answer had no token"
    counted = chunks.counted is True and len(chunks.tokens) == len(chunks.times)
    if counted and "output_tokens" not in told and kind is None:
        told["output_tokens"] = chunks.tokens[-1]
    last = answer.last_ns if kind is None and answer.last_ns is not None else ended_ns
    return Record(
        point=point,
        index=request.index,
        prompt_id=request.prompt.id,
        prompt_class=request.prompt.kind,
        output_limit=request.output_tokens,
        start_us=(sent_ns - started_ns) // 1000,
        scheduled_us=None if request.at_s is None else round(request.at_s * 1e6),
        times_us=tuple([(at - sent_ns) // 1000 for at in chunks.times]),
        tokens=tuple(chunks.tokens) if counted else None,
        end_us=(last - sent_ns) // 1000,
        error=why if kind is not None else None,
        error_kind=kind,
        http_status=answer.status,
        reconnects=again,
        lane=lane,
        **told,
    )
