"""GPUs and who uses their memory, from nvidia-smi's CSV (its own contract for programs).

nvidia-smi counts MiB; here memory is GiB. In a container the process list is empty or holds pids of the outer
namespace: then who holds the memory is unknown, how much is known.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from mtpdeploy.agent import process
from mtpdeploy.agent.protocol import GpuFacts, GpuProcess

_LIMIT_S = 20.0


class NoGpus(Exception):
    """nvidia-smi is missing or failed; the text says how."""


def _query(env: Mapping[str, str], what: str) -> list[list[str]]:
    """One CSV query. NoGpus if it cannot be answered."""
    program = shutil.which("nvidia-smi", path=env.get("PATH"))
    if program is None:
        raise NoGpus("nvidia-smi is not in PATH")
    try:
        done = subprocess.run(
            [program, what, "--format=csv,noheader,nounits"],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoGpus(f"nvidia-smi did not answer within {_LIMIT_S:.0f} s: the driver may hang") from None
    except OSError as error:
        raise NoGpus(f"nvidia-smi cannot be run: {error}") from None
    if done.returncode != 0:
        text = (done.stderr or done.stdout).strip().splitlines()
        raise NoGpus(f"nvidia-smi ended with {done.returncode}: {text[0] if text else 'no message'}")
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _gb(text: str) -> float | None:
    try:
        return round(float(text) / 1024, 3)
    except ValueError:
        return None  # [N/A], [Not Supported]


def read(extra: Mapping[str, str] | None = None) -> list[GpuFacts]:
    """All GPUs with memory and processes. `extra`: variables over the agent's own (a PATH with another nvidia-smi)."""
    env = {**os.environ, **(extra or {}), "LC_ALL": "C"}
    rows = _query(env, "--query-gpu=index,uuid,name,memory.total,memory.used,memory.free,driver_version")
    users: dict[str, list[GpuProcess]] = {}
    for row in _query(env, "--query-compute-apps=gpu_uuid,pid,used_memory"):
        if len(row) >= 3 and row[1].isdigit():
            pid = int(row[1])
            users.setdefault(row[0], []).append(
                GpuProcess(
                    pid=pid,
                    used_gb=_gb(row[2]),
                    user=process.user_of(pid),
                    command=process.command_line(pid),
                    launch_id=process.launch_of(pid),
                )
            )
    gpus: list[GpuFacts] = []
    for row in rows:
        if len(row) < 6 or not row[0].isdigit():
            continue
        total, used, free = _gb(row[3]), _gb(row[4]), _gb(row[5])
        gpus.append(
            GpuFacts(
                index=int(row[0]),
                uuid=row[1],
                name=row[2],
                memory_gb=total,
                used_gb=used,
                free_gb=free,
                driver=row[6] if len(row) > 6 else None,
                processes=users.get(row[1], []),
            )
        )
    return gpus


def held_by(gpus: list[GpuFacts], wanted: set[int]) -> dict[int, float]:
    """GPU index → GiB that the processes `wanted` hold there, as far as nvidia-smi tells."""
    held: dict[int, float] = {}
    for gpu in gpus:
        amounts = [p["used_gb"] or 0.0 for p in gpu["processes"] if p["pid"] in wanted]
        if amounts:
            held[gpu["index"]] = sum(amounts)
    return held
