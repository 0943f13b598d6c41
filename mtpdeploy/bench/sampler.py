"""GPU samples while a point runs: memory, power, utilisation, energy. By NVML where its module is there, else by nvidia-smi."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from typing import Any

EVERY_S = 1.0
READINGS: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
    ("memory_used_gb", "nvmlDeviceGetMemoryInfo", lambda told: told.used / 2**30),
    ("power_w", "nvmlDeviceGetPowerUsage", lambda told: told / 1000),
    ("utilisation", "nvmlDeviceGetUtilizationRates", lambda told: told.gpu / 100),
    ("energy_mj", "nvmlDeviceGetTotalEnergyConsumption", lambda told: told),
)
QUERY = "index,memory.used,power.draw,utilization.gpu"


class GpuSamples:
    """Collects until it is stopped. At a machine without a GPU it collects nothing and says so by None."""

    def __init__(self) -> None:
        self.samples: list[dict[str, object]] = []
        self._nvml = _nvml()
        self._smi = None if self._nvml else shutil.which("nvidia-smi")

    @property
    def source(self) -> str | None:
        return "nvml" if self._nvml else "nvidia-smi" if self._smi else None

    async def run(self, started_ns: int) -> None:
        """One sample now and each second, for as long as the task lives."""
        while self.source:
            at = (time.monotonic_ns() - started_ns) / 1e9
            try:
                rows = self._by_nvml() if self._nvml else await self._by_smi()
            except Exception:  # NVML raises its own class per code; without samples the point is as good
                return
            self.samples += [{"at_s": round(at, 3), **row} for row in rows]
            await asyncio.sleep(EVERY_S)

    def _by_nvml(self) -> list[dict[str, object]]:
        nvml = self._nvml
        rows: list[dict[str, object]] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            card = nvml.nvmlDeviceGetHandleByIndex(index)
            row: dict[str, object] = {"index": index}
            for key, ask, take in READINGS:
                value = None
                with contextlib.suppress(nvml.NVMLError):  # this card does not count it
                    value = take(getattr(nvml, ask)(card))
                row[key] = value
            rows.append(row)
        return rows

    async def _by_smi(self) -> list[dict[str, object]]:
        assert self._smi is not None
        process = await asyncio.create_subprocess_exec(
            self._smi,
            f"--query-gpu={QUERY}",
            "--format=csv,noheader,nounits",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 10)
        if process.returncode != 0:
            self._smi = None
            return []
        return parse_smi(out.decode(errors="replace"))


def parse_smi(text: str) -> list[dict[str, object]]:
    """Rows of `nvidia-smi --query-gpu=index,memory.used,power.draw,utilization.gpu --format=csv,noheader,nounits`."""
    rows: list[dict[str, object]] = []
    for line in text.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) != 4 or not fields[0].isdigit():
            continue
        used, power, busy = (_number(part) for part in fields[1:])
        rows.append(
            {
                "index": int(fields[0]),
                "memory_used_gb": None if used is None else used / 1024,
                "power_w": power,
                "utilisation": None if busy is None else busy / 100,
            }
        )
    return rows


def _nvml() -> Any:
    try:
        import pynvml  # type: ignore[import-not-found]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _number(text: str) -> float | None:
    """`[N/A]` is None."""
    try:
        return float(text)
    except ValueError:
        return None
