"""The load client against its peers: CPU per 1,000 chunks, error of TTFT and time per token, open-loop punctuality, start-up, memory.

    python bench/client.py [--quick] [--peers FOLDER --tokenizer FOLDER] [--without NAME …] [--only PART …] [--json FILE]

In one session, on the same mock server (pinned to the first core) every client runs pinned to the second, all of its processes, one after
the other, in rounds. CPU and memory are those of the whole process tree, and each cell of CPU is the least of its rounds, because whatever
else the machine does only adds to it; errors are medians. Every comparison is a ratio from this session. Peers that are always there:
`aiohttp iter_any` (a bytes test on whatever has come) and `aiohttp lines` (line by line, json.loads: a straightforward script),
both under uvloop. The others (SGLang's Rust client and bench_serving, vLLM, AIPerf, GuideLLM, evalscope) run if
`python bench/peers.py --install FOLDER` has put them somewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from peers import Load, Peer, found

from mtpdeploy.bench.arrivals import schedule

HERE = Path(__file__).resolve().parent
SERVER_CPU, CLIENT_CPU = 0, 1
LIMIT_S = 180.0  # for one run of one client
OURS_NAME, ANY = "mtpdeploy", "aiohttp iter_any"


@contextmanager
def mock(*, tokens: int, per_chunk: int, first_ms: float, step_ms: float) -> Iterator[int]:
    words = f"--tokens {tokens} --per-chunk {per_chunk} --first-ms {first_ms} --step-ms {step_ms} --cpu {SERVER_CPU}".split()
    process = subprocess.Popen([sys.executable, str(HERE / "mock_sse.py"), *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline().split()[1])
    finally:
        process.terminate()
        process.wait()


def truth(port: int) -> list[tuple[float, float]]:
    """What the mock itself saw since the last look: (seconds to the first token, time of arrival) per request."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/record", timeout=10) as answer:
        return [(float(a), float(b)) for a, b in json.load(answer)]


def ended(port: int) -> list[tuple[float, float]]:
    """When each request was parsed and when its last event was handed to the kernel, since the last look."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ended", timeout=10) as answer:
        return [(float(a), float(b)) for a, b in json.load(answer)]


# -- clients: each is a command that prints one JSON object {ttft_ms, tpot_ms, gap_ms, requests}


NAIVE = r"""
import asyncio, json, sys, time
import aiohttp
how, port, streams, requests, tokens = sys.argv[1], *map(int, sys.argv[2:6])
import uvloop
async def main():
    ttft, tpot, gaps = [], [], []
    gate = asyncio.Semaphore(streams)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async def one():
            async with gate:
                t0 = time.perf_counter()
                body = {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "stream": True,
                        "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
                times, count = [], 0
                async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
                    if how == "json":
                        async for line in answer.content:
                            if not line.startswith(b"data: {"): continue
                            event = json.loads(line[6:])
                            if event["choices"] and event["choices"][0]["delta"].get("content"):
                                times.append(time.perf_counter()); count = event["usage"]["completion_tokens"]
                    else:
                        async for data in answer.content.iter_any():
                            if b'"content":" ' in data: times.append(time.perf_counter())
                        count = tokens
                ttft.append(times[0] - t0)
                if count > 1: tpot.append((times[-1] - times[0]) / (count - 1))
                gaps.extend(b - a for a, b in zip(times, times[1:]))
        await asyncio.gather(*(one() for _ in range(requests)))
    mean = lambda values: sum(values) / len(values) * 1000 if values else None
    print(json.dumps({"ttft_ms": mean(ttft), "tpot_ms": mean(tpot), "gap_ms": mean(gaps), "requests": len(ttft)}))
uvloop.install(); asyncio.run(main())
"""

OURS = r"""
import json, sys
port, streams, requests, tokens, rate = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
from mtpdeploy.bench import arrivals, metrics, protocol
from mtpdeploy.bench.values import Message, Measured, PointSpec, Prompt, Record, Request, RunSpec
prompt = Prompt("p", "chat", (Message("user", "hello"),))
due = arrivals.schedule("poisson", rate, requests) if rate else [None] * requests
made = tuple(Request(i, prompt, tokens, at) for i, at in enumerate(due))
point = PointSpec(0, made, process="poisson" if rate else "closed", concurrency=None if rate else streams, rate=rate or None)
kept = {}
def take(event):
    kept.setdefault(event["what"], []).append(event)
protocol.run(RunSpec(f"http://127.0.0.1:{port}", "mock", (point,), gpu_samples=False), take)
records = [Record.from_json(row) for event in kept["records"] for row in event["records"]]
facts = Measured.from_json(kept["measured"][0]["measured"])
got = metrics.point(records, facts)
sent = sorted(r.start_us for r in records)
print(json.dumps({"ttft_ms": got.ttft_ms.mean, "tpot_ms": got.tpot_ms.mean, "gap_ms": got.chunk_gap_ms.mean, "requests": got.completed,
                  "lag_p50_ms": got.lag_ms.p50, "lag_p99_ms": got.lag_ms.p99, "invalid": got.invalid_because, "client": facts.client}))
"""


def ours(place: Path, load: Load) -> list[str]:
    return [
        sys.executable, "-c", OURS, str(load.port), str(load.streams), str(load.requests), str(load.tokens), str(load.rate),
    ]  # fmt: skip


def naive(how: str) -> Callable[[Path, Load], list[str]]:
    return lambda place, load: [
        sys.executable, "-c", NAIVE, how, str(load.port), str(load.streams), str(load.requests), str(load.tokens),
    ]  # fmt: skip


OWN = Peer(OURS_NAME, ours, lambda place: {}, {})
PLAIN = (Peer(ANY, naive("bytes"), lambda place: {}, {}), Peer("aiohttp lines", naive("json"), lambda place: {}, {}))


def measure(peer: Peer, load: Load) -> dict[str, Any]:
    """Runs one client pinned to its core: what it says, CPU seconds of its process tree, and the tree's peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        begun = time.perf_counter()
        with open(place / "stdout", "w+") as out, open(place / "stderr", "w+") as errors:
            process = subprocess.Popen(
                peer.command(place, load), stdout=out, stderr=errors, stdin=subprocess.DEVNULL,
                env={**os.environ, **peer.env}, start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, {CLIENT_CPU}),
            )  # fmt: skip
            tree = Tree(process.pid)
            tree.start()
            try:
                _, status, usage = wait(process.pid, LIMIT_S)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)  # the session that was made for it above
                os.wait4(process.pid, 0)
                raise PeerError(f"did not end in {LIMIT_S:.0f} s") from None
            finally:
                tree.over.set()
                tree.join()
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode != 0:
                errors.seek(0)
                out.seek(0)
                raise PeerError(f"failed: {(out.read() + errors.read()).strip()[-1500:]}")
            out.seek(0)
            told = peer.read(place) or json.loads(out.read().strip().splitlines()[-1])
    return told | {
        "cpu_s": usage.ru_utime + usage.ru_stime,  # of the process and of all children that it waited for
        "memory_mb": max(tree.peak_mb, usage.ru_maxrss / 1024),
        "wall_s": time.perf_counter() - begun,
    }


def wait(pid: int, limit_s: float) -> tuple[int, int, Any]:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return done, status, usage
        time.sleep(0.02)
    raise TimeoutError


class PeerError(Exception):
    """A client that did not do its work; the benchmark goes on without it."""


class Tree(threading.Thread):
    """Peak memory of a process and its children, looked at now and then."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.root, self.peak_mb, self.over = root, 0.0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.25):
            total, left = 0.0, [self.root]
            while left:
                pid = left.pop()
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                    left += [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
                except OSError:
                    continue
                total += next(
                    (int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0.0
                )
            self.peak_mb = max(self.peak_mb, total)


def table(title: str, heads: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}\n")
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, fewer streams: about a minute")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, help="folder of bench/peers.py --install")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer's folder, for the peers that want one")
    parser.add_argument(
        "--without", action="append", default=[], metavar="NAME", help="leave out peers with this in their name"
    )
    parser.add_argument("--only", action="append", default=[], help="parts: cpu, blast, error, mtp, open")
    parser.add_argument("--json", type=Path, help="write the raw cells to this file")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("needs two cores: one for the mock, one for the client")
    peers = [OWN, *PLAIN]
    if options.peers:
        if not options.tokenizer:
            raise SystemExit("--peers needs --tokenizer")
        peers += found(options.peers.resolve(), options.tokenizer.resolve())
    peers = [peer for peer in peers if not any(word in peer.name for word in options.without)]
    session = Session(peers, 1 if options.quick else options.rounds, options.quick, options.json)
    print(f"clients: {', '.join(peer.name for peer in peers)}", file=sys.stderr)
    for name, part in (("cpu", cpu), ("blast", blast), ("error", error), ("mtp", mtp), ("open", open_loop)):
        if not options.only or name in options.only:
            part(session)
    if session.out:
        print(f"\nleft out: {'; '.join(f'{name} ({why})' for name, why in session.out.items())}")


class Session:
    """The clients that take part, and every cell that was measured."""

    def __init__(self, peers: list[Peer], rounds: int, quick: bool, file: Path | None) -> None:
        self.peers, self.rounds, self.quick, self.file = peers, rounds, quick, file
        self.out: dict[str, str] = {}
        self.cells: dict[str, Any] = {
            "cores": os.cpu_count(), "python": sys.version.split()[0], "load_before": os.getloadavg()[0],
        }  # fmt: skip

    def rounds_of(self, peers: list[Peer]) -> Iterator[Peer]:
        """Every client once, then every client again: what disturbs the machine disturbs all."""
        for _ in range(self.rounds):
            yield from (peer for peer in peers if peer.name not in self.out)

    def run(self, peer: Peer, load: Load, part: str) -> dict[str, Any] | None:
        try:
            told = measure(peer, load)
        except (PeerError, OSError, ValueError, KeyError, IndexError, StopIteration) as exc:
            print(f"{peer.name}: {exc}", file=sys.stderr)
            self.out[peer.name] = f"{part}: {str(exc).splitlines()[-1][:100]}"
            return None
        print(
            f"{part} {peer.name}: {load.streams} streams, {told['cpu_s']:.2f} CPU s of {told['wall_s']:.1f} s",
            file=sys.stderr,
        )
        self.keep(part, peer, {"streams": load.streams, "load_1m": os.getloadavg()[0], **told})
        return told

    def keep(self, part: str, peer: Peer, cell: dict[str, Any]) -> None:
        self.cells.setdefault(part, {}).setdefault(peer.name, []).append(cell)
        if self.file:
            self.file.write_text(json.dumps(self.cells, indent=1))


def cpu(session: Session) -> None:
    """CPU per 1,000 paced chunks: the slope between a short and a long run, so that starting costs nothing here."""
    each = 100
    requests = 64 * (2 if session.quick else 4)
    slopes: dict[str, list[float]] = {}
    starts: dict[str, list[float]] = {}
    with mock(tokens=each, per_chunk=1, first_ms=100, step_ms=20) as port:
        for peer in session.rounds_of(session.peers):
            base = session.run(peer, Load(port, 1, 1, 1), "start")
            full = session.run(peer, Load(port, 64, requests, each), "cpu")
            if base and full:
                starts.setdefault(peer.name, []).append(base["cpu_s"])
                slopes.setdefault(peer.name, []).append((full["cpu_s"] - base["cpu_s"]) / (requests * each) * 1e6)
    mine, plain = min(slopes[OURS_NAME]), min(slopes[ANY])
    table(
        f"CPU per 1,000 chunks, 64 streams, 50 chunks/s each, one core ({requests * each} chunks, least of {session.rounds} round(s))",
        ["client", "CPU ms per 1,000 chunks", "this : aiohttp iter_any", "mtpdeploy : this", "start-up CPU s (least)"],
        [
            [
                name,
                f"{min(cells):.1f}",
                f"{min(cells) / plain:.2f}",
                f"{mine / min(cells):.2f}",
                f"{min(starts[name]):.2f}",
            ]
            for name, cells in slopes.items()
        ],
    )


def blast(session: Session) -> None:
    """Events per second where the server sends as fast as it can: the client is the limit."""
    each, requests = 2000, 64
    speeds: dict[str, list[float]] = {}
    with mock(tokens=each, per_chunk=1, first_ms=50, step_ms=0) as port:
        for peer in session.rounds_of(session.peers):
            truth(port)
            if session.run(peer, Load(port, 64, requests, each), "blast"):
                seen = ended(port)[-requests:]
                speeds.setdefault(peer.name, []).append(
                    requests * each / (max(b for _, b in seen) - min(a for a, _ in seen))
                )
    table(
        "A server that does not pause: events/s taken in, one core, 64 streams (best round)",
        ["client", "events/s"],
        [[name, f"{max(cells):,.0f}"] for name, cells in speeds.items()],
    )


def error(session: Session) -> None:
    """TTFT and chunk gap against the mock's own record of the same requests."""
    levels = [1, 16, 64] if session.quick else [1, 16, 64, 256, 1024]
    errors: dict[str, dict[int, list[tuple[float, float]]]] = {}
    memory: dict[str, dict[int, float]] = {}
    with mock(tokens=25, per_chunk=1, first_ms=200, step_ms=20) as port:
        for peer in session.rounds_of(session.peers):
            for streams in levels:
                truth(port)
                told = session.run(peer, Load(port, streams, streams, 25), "error")
                if told is None:
                    break
                seen = truth(port)[-streams:]  # the last ones: a client may probe before
                real = statistics.fmean(first for first, _ in seen) * 1000
                if told["gap_ms"] is not None:
                    errors.setdefault(peer.name, {}).setdefault(streams, []).append(
                        (told["ttft_ms"] - real, told["gap_ms"] - 20.0)
                    )
                kept = memory.setdefault(peer.name, {})
                kept[streams] = max(kept.get(streams, 0.0), told["memory_mb"])
    for what, place in (("Mean TTFT minus the mock's own record, ms", 0), ("Mean chunk gap minus 20 ms, ms", 1)):
        table(
            f"{what}, by streams, one core (median of {session.rounds} round(s))",
            ["client", *map(str, levels)],
            [
                [
                    name,
                    *(f"{statistics.median([c[place] for c in cells[n]]):.2f}" if n in cells else "–" for n in levels),
                ]
                for name, cells in errors.items()
            ],
        )
    table(
        "Peak memory of the whole process tree, MB, by streams",
        ["client", *map(str, levels)],
        [[name, *(f"{sizes[n]:.0f}" if n in sizes else "–" for n in levels)] for name, sizes in memory.items()],
    )


def mtp(session: Session) -> None:
    seen: dict[str, dict[str, Any]] = {}
    with mock(tokens=129, per_chunk=3, first_ms=200, step_ms=30) as port:
        for peer in session.peers:
            if peer.name not in session.out and (told := session.run(peer, Load(port, 16, 32, 129), "mtp")):
                seen[peer.name] = told
    table(
        "An MTP stream: 3 tokens every 30 ms, 129 tokens, 16 streams. Truth: 10.00 ms a token, 30.00 ms a chunk",
        ["client", "what it calls time per output token", "what it calls inter-token (ours, AIPerf: chunk) time"],
        [[name, _two(told["tpot_ms"]), _two(told["gap_ms"])] for name, told in seen.items()],
    )


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def open_loop(session: Session) -> None:
    """Poisson arrivals at 400 requests/s, as the mock saw them."""
    count, rate = (1000, 400.0) if session.quick else (3000, 400.0)
    rows = []
    planned = schedule("poisson", rate, count)
    drawn = [later - earlier for earlier, later in pairwise(planned)]
    rows.append(["as our client draws it", f"{1 / statistics.fmean(drawn):.1f}", f"{_cv(drawn):.3f}", "", ""])
    with mock(tokens=4, per_chunk=1, first_ms=20, step_ms=5) as port:
        for peer in session.peers:
            if peer in PLAIN or peer.name in session.out:
                continue
            best: tuple[float, float, float | None, float | None] | None = None
            for _ in range(session.rounds):
                truth(port)
                told = session.run(peer, Load(port, 64, count, 4, rate), "open")
                if told is None:
                    break
                arrived = sorted(at for _, at in truth(port))[-count:]
                gaps = [later - earlier for earlier, later in pairwise(arrived)]
                found_now = (1 / statistics.fmean(gaps), _cv(gaps), told.get("lag_p50_ms"), told.get("lag_p99_ms"))
                session.keep("open seen", peer, {"rate": found_now[0], "cv": found_now[1]})
                if best is None or abs(found_now[1] - 1) < abs(best[1] - 1):
                    best = found_now
            if best is not None:
                rows.append([peer.name, f"{best[0]:.1f}", f"{best[1]:.3f}", _two(best[2]), _two(best[3])])
    table(
        f"Open loop, Poisson, 400 requests/s asked, {count} requests, one core (of {session.rounds} round(s) the one whose CV is nearest to 1)",
        ["client", "requests/s at the mock", "CV of the gaps", "its own lag p50 ms", "lag p99 ms"],
        rows,
    )


def _cv(gaps: list[float]) -> float:
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


if __name__ == "__main__":
    main()
