"""The simulated GPU: who holds its memory, and the nvidia-smi that shows it.

Every simulated server leaves a file with the pid and start time of the process that holds the memory; a file whose
process is gone counts for nothing. nvidia-smi is asked often and runs this file alone, so it imports nothing of the package.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

UUID = "GPU-51a01a7e-0000-4000-8000-000000000000"
DRIVER = "580.159.04"
SETTINGS = "simulate.json"  # what shim.install was given


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None if there is no such process, or only its corpse."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def hold(folder: Path, pid: int, gb: float) -> None:
    """Says that `pid` holds so much; replaces what it said before."""
    path = folder / "card" / f"{pid}.json"
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps({"pid": pid, "start_time": start_time(pid), "mib": round(gb * 1024)}))
    aside.replace(path)


def holders(folder: Path) -> dict[int, int]:
    """pid → MiB of living processes."""
    found: dict[int, int] = {}
    for path in (folder / "card").glob("*.json"):
        try:
            said = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if said["start_time"] is not None and start_time(said["pid"]) == said["start_time"]:
            found[said["pid"]] = said["mib"]
        else:
            path.unlink(missing_ok=True)
    return found


def free_gb(folder: Path, total_gb: float) -> float:
    """What nvidia-smi would call free, GiB."""
    return total_gb - sum(holders(folder).values()) / 1024


def nvidia_smi(folder: Path, words: list[str]) -> int:
    """Answers the CSV queries; anything else as the real one would say it does not know."""
    card = json.loads((folder / SETTINGS).read_text())
    held = holders(folder)
    total = round(card["gpu_memory_gb"] * 1024)
    used = sum(held.values())
    values = {
        "index": "0", "uuid": UUID, "name": card["gpu_name"], "driver_version": DRIVER, "count": "1",
        "memory.total": str(total), "memory.used": str(used), "memory.free": str(max(0, total - used)),
        "utilization.gpu": "97" if held else "0", "power.draw": "612.00" if held else "76.00", "temperature.gpu": "54",
        "clocks.sm": "1980", "pstate": "P0", "timestamp": "[N/A]", "gpu_uuid": UUID, "gpu_name": card["gpu_name"],
    }  # fmt: skip
    query = next(
        (word.partition("=")[2] for word in words if word.startswith(("--query-gpu=", "--query-compute-apps="))), None
    )
    if query is None:
        print(f"NVIDIA-SMI (simulated by mtpdeploy)   {card['gpu_name']}   {used}MiB / {total}MiB")
        return 0
    if any(word.startswith("--query-compute-apps=") for word in words):
        for pid, mib in sorted(held.items()):
            row = {**values, "pid": str(pid), "used_memory": str(mib), "process_name": "sglang::scheduler"}
            print(", ".join(row.get(field.strip(), "[N/A]") for field in query.split(",")))
        return 0
    print(", ".join(values.get(field.strip(), "[N/A]") for field in query.split(",")))
    return 0


if __name__ == "__main__":
    sys.exit(nvidia_smi(Path(sys.argv[1]), sys.argv[2:]))
