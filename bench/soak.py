"""The load client over a long time, or with very many streams: is every request recorded, and does its memory stay flat?

    python bench/soak.py --minutes 60 --streams 16
    python bench/soak.py --minutes 2 --streams 10000 --step-ms 1000 --mocks 2 --client-processes 2

The whole path of a benchmark (probe, warm-up, load, records, figures) against the mock of bench/mock_sse.py; memory is that of all client
processes together (what they share is counted once in each), read from /proc while the load runs. Ends with 1 if a request
has no record, failed, or lost a token.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mtpdeploy.bench import metrics, protocol
from mtpdeploy.bench.values import Measured, Message, PointSpec, Prompt, Record, Request, RunSpec

HERE = Path(__file__).resolve().parent


def processes(root: int) -> list[int]:
    """The process and its children."""
    found = [root]
    for thread in Path(f"/proc/{root}/task").iterdir():
        found += [int(word) for word in (thread / "children").read_text().split()]
    return found


def resident_mb(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0.0)


class Memory(threading.Thread):
    """Samples the clients' memory until told to stop; the mock is no part of it."""

    def __init__(self, every_s: float, without: int) -> None:
        super().__init__(daemon=True)
        self.every_s, self.without = every_s, without
        self.samples: list[tuple[float, float]] = []
        self.over = threading.Event()
        self.begun = time.monotonic()

    def run(self) -> None:
        while not self.over.wait(self.every_s):
            total = sum(resident_mb(pid) for pid in processes(os.getpid()) if pid != self.without)
            self.samples.append((time.monotonic() - self.begun, total))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--first-ms", type=float, default=200.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--mocks", type=int, default=1, help="processes of the mock")
    parser.add_argument("--client-processes", type=int)
    parser.add_argument("--json", help="write samples and verdict to this file")
    options = parser.parse_args()

    each_s = (options.first_ms + (options.tokens - 1) * options.step_ms) / 1000
    turns = max(1, math.ceil(options.minutes * 60 / each_s))
    prompt = Prompt("soak", "chat", (Message("user", "hello"),))
    point = PointSpec(
        0, tuple(Request(place, prompt, options.tokens) for place in range(turns * options.streams)),
        concurrency=options.streams,
    )  # fmt: skip
    words = (
        f"--tokens {options.tokens} --per-chunk 1 --first-ms {options.first_ms} --step-ms {options.step_ms} "
        f"--processes {options.mocks}"
    )
    mock = subprocess.Popen(
        [sys.executable, str(HERE / "mock_sse.py"), *words.split()], stdout=subprocess.PIPE, text=True
    )
    records: list[Record] = []
    facts: list[Measured] = []
    marks: dict[str, float] = {}

    def take(event: dict[str, Any]) -> None:
        if event["what"] == "records":
            marks["load ended"] = time.monotonic()
            records.extend(Record.from_json(row) for row in event["records"])
        elif event["what"] == "measured":
            facts.append(Measured.from_json(event["measured"]))
        elif event["what"] == "progress" and event["stage"] == "load":
            marks.setdefault("load began", time.monotonic())
            if sys.stderr.isatty():
                print(f"\r{event['done']}/{event['requests']} requests", end="", file=sys.stderr)

    memory = Memory(min(10.0, options.minutes * 60 / 20), mock.pid)
    try:
        assert mock.stdout is not None
        url = f"http://127.0.0.1:{mock.stdout.readline().split()[1]}"
        memory.start()
        protocol.run(RunSpec(url, "mock", (point,), gpu_samples=False, client_processes=options.client_processes), take)
    finally:
        memory.over.set()
        mock.terminate()
        mock.wait()
    figures = metrics.point(records, facts[0])
    begun, ended = marks["load began"] - memory.begun, facts[0].duration_s + marks["load began"] - memory.begun
    during = [(at - begun, size) for at, size in memory.samples if begun + 5 < at < ended - 1]
    wanted = turns * options.streams
    lost = wanted - len({record.index for record in records})
    short = sum(1 for record in records if record.ok and record.output_tokens != options.tokens)
    half = during[len(during) // 2 :] or during
    growth = (half[-1][1] - half[0][1]) / max(half[-1][0] - half[0][0], 1e-9) * 3600 if len(half) > 1 else None
    verdict: dict[str, Any] = {
        "streams": options.streams,
        "minutes": facts[0].duration_s / 60,
        "requests": wanted,
        "lost": lost,
        "failed": figures.failed,
        "short": short,
        "chunks": sum(len(record.times_us) for record in records),
        "memory_mb": {f"{at / 60:.0f} min": round(size, 1) for at, size in during[:: max(1, len(during) // 12)]},
        "memory_peak_during_load_mb": max((size for _, size in during), default=None),
        "growth_in_second_half_mb_per_hour": growth,
        "ttft_ms": {"truth": options.first_ms, "p50": figures.ttft_ms.p50, "p99": figures.ttft_ms.p99},
        "tpot_ms": {"truth": options.step_ms, "p50": figures.tpot_ms.p50},
        "client": dict(facts[0].client),
        "valid": figures.valid,
        "invalid_because": list(figures.invalid_because),
    }
    print(json.dumps(verdict, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(verdict | {"samples": memory.samples}, indent=1))
    raise SystemExit(1 if lost or figures.failed or short else 0)


if __name__ == "__main__":
    main()
