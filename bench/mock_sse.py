"""A mock of a streaming server for measuring load clients: paced server-sent events, and its own record of when it sent them.

    python bench/mock_sse.py --port 0 --tokens 129 --per-chunk 3 --first-ms 200 --step-ms 30 [--cpu 0]

Prints `port N`. Answers POST /v1/chat/completions (usage in every chunk if asked for) and /generate (cumulative text), on a schedule
that is absolute from the moment when the request was parsed. GET /record gives and forgets, per request: seconds from parsed to the
first token handed to the kernel, and the parsed time (CLOCK_MONOTONIC); GET /ended: the parsed time and that of the last event.
A raw asyncio.Protocol: it must never be the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import heapq
import json
import os
import resource
import signal
import socket
import time

RECORD: list[tuple[float, float]] = []
ENDED: list[tuple[float, float]] = []


class Pace:
    """One timer for all streams: at each tick it writes what is due."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.due: list[tuple[float, int, Stream]] = []
        self.number = 0
        self.handle: asyncio.TimerHandle | None = None

    def add(self, at: float, stream: Stream) -> None:
        self.number += 1
        heapq.heappush(self.due, (at, self.number, stream))
        if self.handle is None or self.due[0][2] is stream:
            self.arm()

    def arm(self) -> None:
        if self.handle is not None:
            self.handle.cancel()
        self.handle = self.loop.call_later(max(0.0, self.due[0][0] - time.monotonic()), self.tick)

    def tick(self) -> None:
        self.handle = None
        now = time.monotonic() + 0.0002
        while self.due and self.due[0][0] <= now:
            heapq.heappop(self.due)[2].step()
        if self.due:
            self.arm()


class Stream(asyncio.Protocol):
    """A connection: requests one after the other."""

    def __init__(self, options: argparse.Namespace, pace: Pace) -> None:
        self.options, self.pace = options, pace
        self.got = b""
        self.transport: asyncio.Transport | None = None
        self.left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self.got += data
        head, blank, body = self.got.partition(b"\r\n\r\n")
        if not blank:
            return
        line = head.split(b"\r\n", 1)[0].split()
        heads = dict(part.lower().split(b":", 1) for part in head.split(b"\r\n")[1:])
        if heads.get(b"transfer-encoding", b"").strip() == b"chunked":
            if not body.endswith(b"0\r\n\r\n"):
                return
            body = unchunked(body)
        elif len(body) < int(heads.get(b"content-length", 0)):
            return
        self.got = b""
        if line[0] != b"POST" or not line[1].endswith((b"/completions", b"/generate")):
            self.get(line[1].decode())
            return
        self.begin(line[1].decode(), json.loads(body))

    def get(self, path: str) -> None:
        assert self.transport is not None
        known: object = {"object": "list", "data": [{"id": "mock", "owned_by": "mock"}]}
        status = "200 OK"
        if path in ("/record", "/ended"):
            known = list(RECORD if path == "/record" else ENDED)
            RECORD.clear()
            ENDED.clear()
        elif path not in ("/v1/models", "/health"):
            known, status = {"detail": "Not Found"}, "404 Not Found"
        body = json.dumps(known).encode()
        self.transport.write(
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )

    def begin(self, path: str, body: dict) -> None:  # type: ignore[type-arg]
        assert self.transport is not None
        self.parsed = time.monotonic()
        self.native = path == "/generate"
        asked = body.get("sampling_params", {}).get("max_new_tokens") if self.native else body.get("max_tokens")
        self.total = min(self.options.tokens, asked or self.options.tokens)
        wanted = body.get("stream_options") or {}
        self.usage, self.sum = bool(wanted.get("continuous_usage_stats")), bool(wanted.get("include_usage"))
        self.sent = self.number = 0
        self.text = ""
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        if not self.native:
            self.write(
                {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
            )
        self.pace.add(self.parsed + self.options.first_ms / 1000, self)

    def step(self) -> None:
        if self.transport is None:
            return
        new = min(self.options.per_chunk, self.total - self.sent)
        self.sent += new
        self.number += 1
        last = self.sent >= self.total
        piece = " token" * new
        if self.number == 1:
            RECORD.append((time.monotonic() - self.parsed, self.parsed))
        if self.native:
            self.text += piece
            reason = {"type": "length", "length": self.total} if last else None
            meta = {
                "id": "0" * 32,
                "finish_reason": reason,
                "prompt_tokens": 9,
                "completion_tokens": self.sent,
                "cached_tokens": 0,
            }
            self.write({"text": self.text, "meta_info": meta})
        else:
            event: dict[str, object] = {
                "id": "0" * 32, "object": "chat.completion.chunk", "created": 1796007582, "model": "mock",
                "choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": "length" if last else None}],
            }  # fmt: skip
            if self.usage:
                event["usage"] = {"prompt_tokens": 9, "total_tokens": 9 + self.sent, "completion_tokens": self.sent}
            self.write(event)
        if not last:
            self.pace.add(self.parsed + (self.options.first_ms + self.number * self.options.step_ms) / 1000, self)
            return
        if self.sum and not self.native:
            self.write(
                {
                    "choices": [],
                    "usage": {"prompt_tokens": 9, "total_tokens": 9 + self.sent, "completion_tokens": self.sent},
                }
            )
        ENDED.append((self.parsed, time.monotonic()))
        self.piece(b"data: [DONE]\n\n")
        self.transport.write(b"0\r\n\r\n")

    def write(self, event: object) -> None:
        self.piece(f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode())

    def piece(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--per-chunk", type=int, default=1)
    parser.add_argument("--first-ms", type=float, default=200.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--cpu", type=int)
    parser.add_argument("--processes", type=int, default=1, help="that share the port; each has a /record of its own")
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(serve(options, share(options)))


def share(options: argparse.Namespace) -> socket.socket:
    """The listening socket of this process; with several, each has one of its own on the same port, and all end with the first."""
    port, first = options.port, os.getpid()
    for number in range(options.processes):
        if number and os.fork() == 0:
            prctl = ctypes.CDLL(None).prctl
            prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            if os.getppid() != first:
                raise SystemExit(0)
        elif number:
            continue
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(("127.0.0.1", port))
        one.listen(4096)
        if number:
            return one
        mine, port = one, one.getsockname()[1]
    print(f"port {port}", flush=True)
    return mine


def unchunked(body: bytes) -> bytes:
    """A request's body without HTTP's chunks."""
    plain, at = b"", 0
    while True:
        edge = body.index(b"\r\n", at)
        size = int(body[at:edge], 16)
        if not size:
            return plain
        plain += body[edge + 2 : edge + 2 + size]
        at = edge + 4 + size


async def serve(options: argparse.Namespace, listening: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    pace = Pace(loop)
    server = await loop.create_server(lambda: Stream(options, pace), sock=listening, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.install()
    except ImportError:
        pass
    main()
