"""The load client against its peers: CPU per 1,000 chunks, error of TTFT and time per token, open-loop punctuality, start-up, memory.

    python bench/client.py [--quick] [--peer NAME=PYTHON …] [--json FILE]

In one session, on the same mock server (pinned to the first core) every client runs pinned to the second, one after the other, in
rounds; each cell is the median of the rounds and every comparison is a ratio from this session. Peers that are always there:
`aiohttp-json` (aiohttp, line by line, json.loads: what a straightforward script does) and `aiohttp-bytes` (aiohttp, iter_any, a bytes
test), both under uvloop. With --sglang FILE (bench_serving.py of SGLang 0.5.6, which runs without torch) and --vllm PYTHON (an
interpreter that has vllm's benchmark) those run too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SERVER_CPU, CLIENT_CPU = 0, 1


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


def ours(port: int, streams: int, requests: int, tokens: int, rate: float = 0.0) -> list[str]:
    return [sys.executable, "-c", OURS, str(port), str(streams), str(requests), str(tokens), str(rate)]


def naive(how: str) -> Callable[..., list[str]]:
    return lambda port, streams, requests, tokens: [
        sys.executable, "-c", NAIVE, how, str(port), str(streams), str(requests), str(tokens),
    ]  # fmt: skip


def sglang(file: str, python: str) -> Callable[..., list[str]]:
    """bench_serving.py of 0.5.6 with its own dataset; its JSONL is read back."""

    def command(port: int, streams: int, requests: int, tokens: int) -> list[str]:
        return [
            python, file, "--backend", "sglang-oai-chat", "--base-url", f"http://127.0.0.1:{port}", "--model", "mock",
            "--tokenizer", os.environ.get("BENCH_TOKENIZER", "mock"), "--dataset-name", "random-ids", "--random-input-len", "8",
            "--random-output-len", str(tokens), "--random-range-ratio", "1.0", "--num-prompts", str(requests),
            "--max-concurrency", str(streams), "--disable-tqdm", "--output-file", "OUTPUT",
        ]  # fmt: skip

    return command


def measure(command: list[str]) -> dict[str, Any]:
    """Runs one client pinned to its core: its own JSON, CPU seconds of the whole process and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.jsonl"
        words = [str(output) if word == "OUTPUT" else word for word in command]
        begun = time.perf_counter()
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {CLIENT_CPU}),
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        out = process.stdout.read()
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"{words[:3]} failed:\n{errors[-2000:]}")
        if output.exists():
            row = json.loads(output.read_text().splitlines()[-1])
            told = {
                "ttft_ms": row["mean_ttft_ms"],
                "tpot_ms": row["mean_tpot_ms"],
                "gap_ms": row["mean_itl_ms"],
                "requests": row["completed"],
            }
        else:
            told = json.loads(out.strip().splitlines()[-1])
    return told | {
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "memory_mb": usage.ru_maxrss / 1024,
        "wall_s": time.perf_counter() - begun,
    }


def median(values: list[float]) -> float:
    return statistics.median(values)


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
    parser.add_argument("--sglang", help="bench_serving.py of SGLang 0.5.6")
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument("--json", help="write the raw cells to this file")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("needs two cores: one for the mock, one for the client")
    clients: dict[str, Callable[..., list[str]]] = {
        "mtpdeploy": ours, "aiohttp-bytes": naive("bytes"), "aiohttp-json": naive("json"),
    }  # fmt: skip
    if options.sglang:
        clients["sglang 0.5.6 bench_serving"] = sglang(options.sglang, options.sglang_python)
    raw: dict[str, Any] = {"cores": os.cpu_count(), "python": sys.version.split()[0], "load_before": os.getloadavg()[0]}

    raw["cpu"] = cpu = {name: [] for name in clients}
    chunks = 64 * (2 if options.quick else 6) * 100
    with mock(tokens=100, per_chunk=1, first_ms=100, step_ms=20) as port:
        for _ in range(rounds):
            for name, command in clients.items():
                base = measure(command(port, 1, 1, 1))
                full = measure(command(port, 64, chunks // 100, 100))
                cpu[name].append(
                    {
                        "start_cpu_s": base["cpu_s"],
                        "cpu_s": full["cpu_s"],
                        "ms_per_1000": (full["cpu_s"] - base["cpu_s"]) / chunks * 1e6,
                    }
                )
    mine = median([cell["ms_per_1000"] for cell in cpu["mtpdeploy"]])
    table(
        f"CPU per 1,000 chunks, 64 streams, 50 chunks/s each, usage in every chunk, one core ({chunks} chunks, {rounds} round(s))",
        ["client", "CPU ms per 1,000 chunks", "mtpdeploy : this", "start-up CPU s"],
        [
            [name, f"{median([c['ms_per_1000'] for c in cells]):.1f}", f"{mine / median([c['ms_per_1000'] for c in cells]):.2f}",
             f"{median([c['start_cpu_s'] for c in cells]):.2f}"]
            for name, cells in cpu.items()
        ],
    )  # fmt: skip

    levels = [1, 16, 64] if options.quick else [1, 16, 64, 256, 1024]
    raw["error"] = errors = {name: {} for name in clients}
    memory: dict[str, float] = {}
    with mock(tokens=25, per_chunk=1, first_ms=200, step_ms=20) as port:
        for _ in range(rounds):
            for name, command in clients.items():
                for streams in levels:
                    truth(port)
                    got = measure(command(port, streams, streams, 25))
                    seen = truth(port)[-streams:]  # the last ones: a client may probe before
                    real = statistics.fmean(first for first, _ in seen) * 1000
                    errors[name].setdefault(streams, []).append((got["ttft_ms"] - real, got["gap_ms"] - 20.0))
                    memory[f"{name} {streams}"] = got["memory_mb"]
    raw["memory_mb"] = memory
    for what, place in (("mean TTFT minus the mock's own record, ms", 0), ("mean chunk gap minus 20 ms, ms", 1)):
        table(
            f"{what}, by streams ({rounds} round(s))",
            ["client", *map(str, levels)],
            [
                [name, *(f"{median([cell[place] for cell in cells[n]]):.2f}" for n in levels)]
                for name, cells in errors.items()
            ],
        )
    top = min(256, levels[-1])
    table(
        f"Peak memory at {top} streams, MB",
        ["client", "MB"],
        [[name, f"{memory[f'{name} {top}']:.0f}"] for name in clients],
    )

    raw["mtp"] = mtp = {}
    with mock(tokens=129, per_chunk=3, first_ms=200, step_ms=30) as port:
        for name, command in clients.items():
            mtp[name] = measure(command(port, 16, 32, 129))
    table(
        "An MTP stream: 3 tokens every 30 ms, 129 tokens, 16 streams. Truth: 10.00 ms a token, 30.00 ms a chunk",
        ["client", "ms a token", "ms a chunk (as it calls it)"],
        [[name, f"{got['tpot_ms']:.2f}", f"{got['gap_ms']:.2f}"] for name, got in mtp.items()],
    )

    with mock(tokens=4, per_chunk=1, first_ms=20, step_ms=5) as port:
        count = 1000 if options.quick else 3000
        truth(port)
        got = measure(ours(port, 1, count, 4, 400.0))
        arrived = sorted(at for _, at in truth(port))[1:]
    gaps = [b - a for a, b in pairwise(arrived)]
    from mtpdeploy.bench.arrivals import schedule

    planned = schedule("poisson", 400.0, count)
    wanted = [b - a for a, b in pairwise(planned)]
    raw["open"] = {"rate": 1 / statistics.fmean(gaps), "cv": statistics.pstdev(gaps) / statistics.fmean(gaps), **got}
    table(
        f"Open loop, Poisson, 400 requests/s, {count} requests",
        ["", "requests/s", "CV of the gaps", "lag p50 ms", "lag p99 ms"],
        [
            [
                "as drawn",
                f"{1 / statistics.fmean(wanted):.1f}",
                f"{statistics.pstdev(wanted) / statistics.fmean(wanted):.3f}",
                "",
                "",
            ],
            [
                "as they reached the mock",
                f"{raw['open']['rate']:.1f}",
                f"{raw['open']['cv']:.3f}",
                f"{got['lag_p50_ms']:.2f}",
                f"{got['lag_p99_ms']:.2f}",
            ],
        ],
    )
    if options.json:
        Path(options.json).write_text(json.dumps(raw, indent=1))
    print(
        f"\nratio: mtpdeploy takes {mine / median([c['ms_per_1000'] for c in cpu['aiohttp-bytes']]):.2f} of the CPU of a plain aiohttp reader"
    )


if __name__ == "__main__":
    main()
