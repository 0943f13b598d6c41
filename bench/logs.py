"""How fast a long log is read: MB/s of `logs --file`, of `grep -c "Decode batch"` and of one regular expression a line, in one run.

    python bench/logs.py                 # 1 GB, made in a temporary folder
    python bench/logs.py --megabytes 200

All three count the same records of the same file, which stays in the page cache; one core each. Peak memory is this process's own.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mtpdeploy.actions.logfile import read_summary
from mtpdeploy.progress import Silent

_NAIVE = re.compile(
    r"^\[(?P<time>[\d-]+ [\d:]+)\] Decode batch, #running-req: (?P<running>\d+), #full token: (?P<token>\d+), full token usage: (?P<usage>[\d.]+), "
    r"mamba num: (?P<num>\d+), mamba usage: (?P<mamba>[\d.]+), accept len: (?P<accept>[\d.]+), accept rate: (?P<rate>[\d.]+), "
    r"cuda graph: (?P<graph>\w+), gen throughput \(token/s\): (?P<gen>[\d.]+), #queue-req: (?P<queue>\d+)"
)


def write(path: Path, megabytes: int, seed: int = 7) -> int:
    """A launch and then decode records, with prefill and access lines between them and a retraction now and then. Returns the records."""
    rng = random.Random(seed)
    start = (Path(__file__).parent.parent / "tests" / "golden" / "logs" / "mtp24.log").read_bytes()
    head = start[: start.index(b"The server is fired up")] + b"The server is fired up and ready to roll!\n"
    block: list[bytes] = []
    records = 0
    for i in range(20_000):
        stamp = f"[2026-11-30 {i // 3600 % 24:02d}:{i // 60 % 60:02d}:{i % 60:02d}]"
        block.append(
            f"{stamp} Decode batch, #running-req: {rng.randint(1, 16)}, #full token: {rng.randint(500, 250_000)}, full token usage: 0.{i % 100:02d}, "
            f"mamba num: {rng.randint(4, 80)}, mamba usage: 0.67, accept len: {2 + rng.random() * 2:.2f}, accept rate: 0.{rng.randint(30, 99)}, "
            f"cuda graph: True, gen throughput (token/s): {rng.random() * 1500:.2f}, #queue-req: {rng.randint(0, 9)}\n".encode()
        )
        records += 1
        if i % 12 == 0:
            block.append(
                f"{stamp} Prefill batch, #new-seq: 1, #new-token: 512, #cached-token: 0, full token usage: 0.01, mamba usage: 0.67, #running-req: 3, "
                f"#queue-req: 0, #pending-token: 0, cuda graph: True, input throughput (token/s): {rng.random() * 3000:.2f}\n"
                f'{stamp} INFO:     127.0.0.1:{rng.randint(30_000, 60_000)} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'.encode()
            )
        if i % 2_000 == 0:
            block.append(
                f"{stamp} KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.4 -> 0.9\n".encode()
            )
    data = b"".join(block)
    repeats = max(1, megabytes * 1_000_000 // len(data))
    before = head.count(b"] Decode batch")
    with path.open("wb") as file:
        file.write(head)
        for _ in range(repeats):
            file.write(data)
    return before + records * repeats


def naive(path: Path) -> int:
    """One regular expression a line, every field kept: the parser one writes first."""
    found = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if m := _NAIVE.match(line):
                m.groupdict()
                found += 1
    return found


def grep(path: Path) -> int:
    return int(
        subprocess.run(["grep", "-c", "Decode batch", str(path)], capture_output=True, text=True, check=True).stdout
    )


def ours(path: Path) -> int:
    count = read_summary(str(path), Silent()).decode["count"]
    assert isinstance(count, int)
    return count


def measure(what: Callable[[Path], int], path: Path, repeats: int) -> tuple[float, int]:
    """(best MB/s by CPU time of this process and its children, records)."""
    best, count = float("inf"), 0
    for _ in range(repeats):
        before = _cpu()
        count = what(path)
        best = min(best, max(_cpu() - before, 1e-9))
    return path.stat().st_size / 1e6 / best, count


def _cpu() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server.log"
        began = time.monotonic()
        expected = write(path, options.megabytes)
        print(
            f"{path.stat().st_size / 1e6:.0f} MB, {expected} decode records, written in {time.monotonic() - began:.1f} s",
            file=sys.stderr,
        )
        peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ours_speed, ours_count = measure(ours, path, options.repeat)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grep_speed, grep_count = measure(grep, path, options.repeat)
        naive_speed, naive_count = measure(naive, path, 1)
    print(
        json.dumps(
            {
                "megabytes": options.megabytes,
                "ours_mb_s": round(ours_speed, 1),
                "grep_mb_s": round(grep_speed, 1),
                "naive_mb_s": round(naive_speed, 1),
                "grep_over_ours": round(grep_speed / ours_speed, 2),
                "ours_over_naive": round(ours_speed / naive_speed, 2),
                "peak_mib": round(peak / 1024, 1),
                "peak_grew_mib": round((peak - peak_before) / 1024, 1),
                "records": {"ours": ours_count, "grep": grep_count, "naive": naive_count, "written": expected},
            }
        )
    )
    return 0 if ours_count == grep_count == expected else 1


if __name__ == "__main__":
    sys.exit(main())
