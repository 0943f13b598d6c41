"""How long the two doors take to show help, as a ratio to `python -c "import click, fabric"` measured in the same run.

The limit is 3 for both: `python bench/startup.py` exits 1 beyond it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

LIMIT = 3.0
ROUNDS = 7
BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parent.parent
BARE = [sys.executable, "-c", "import click, fabric"]
DOORS = {"mtpdeploy --help": [str(BIN / "mtpdeploy"), "--help"], "fab --list": [str(BIN / "fab"), "--list"]}


def seconds(argv: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return time.perf_counter() - began


def ratios() -> dict[str, float]:
    """The least of several interleaved runs of each, over the least of the bare import: noise only ever adds."""
    times: dict[str, list[float]] = {name: [] for name in ("bare", *DOORS)}
    for _ in range(ROUNDS):
        times["bare"].append(seconds(BARE))
        for name, argv in DOORS.items():
            times[name].append(seconds(argv))
    bare = min(times["bare"])
    print(f'python -c "import click, fabric": {bare * 1000:.0f} ms')
    return {name: min(times[name]) / bare for name in DOORS}


def main() -> int:
    found = ratios()
    for name, ratio in found.items():
        print(f"{name}: ratio {ratio:.2f} (limit {LIMIT:.0f})")
    return int(any(ratio > LIMIT for ratio in found.values()))


if __name__ == "__main__":
    sys.exit(main())
