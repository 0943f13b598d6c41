"""When the requests of an open loop are sent: absolute times, decided before the first is sent. Pure and seeded."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence

from mtpdeploy.bench.values import Process

PROCESSES: tuple[Process, ...] = ("poisson", "constant", "gamma", "ramp", "step", "trace")
BURSTY_CV = 2.0  # coefficient of variation of the gaps of `gamma`; Poisson has 1
RAMP_FROM = 0.1  # of the rate
STEP_FROM = 0.5  # of the rate, for the first half of the requests


def schedule(process: Process, rate: float, count: int, *, seed: int = 0, cv: float = BURSTY_CV) -> tuple[float, ...]:
    """Seconds after the start at which each of `count` requests is due; the first gap is drawn too, so 0 is no special time.

    poisson: exponential gaps, mean 1/rate. constant: gaps of 1/rate. gamma: gaps of mean 1/rate and the given CV (bursts).
    ramp: Poisson whose rate climbs linearly from a tenth of `rate` to `rate`. step: Poisson at half the rate for the first
    half of the requests, then at the rate.
    """
    if rate <= 0:
        raise ValueError(f"a rate must be above 0 requests/s, not {rate:g}")
    draw = random.Random(f"arrivals {seed}")
    due: list[float] = []
    now = 0.0
    for place in range(count):
        share = place / max(count - 1, 1)
        if process == "constant":
            gap = 1 / rate
        elif process == "gamma":
            shape = 1 / cv**2
            gap = draw.gammavariate(shape, 1 / rate / shape)
        elif process == "ramp":
            gap = draw.expovariate(rate * (RAMP_FROM + (1 - RAMP_FROM) * share))
        elif process == "step":
            gap = draw.expovariate(rate * (STEP_FROM if share < 0.5 else 1.0))
        elif process == "poisson":
            gap = draw.expovariate(rate)
        else:
            raise ValueError(f"no arrival process {process!r}; it is one of {', '.join(PROCESSES)}")
        now += gap
        due.append(now)
    return tuple(due)


def from_trace(lines: Sequence[str], count: int | None = None) -> tuple[float, ...]:
    """A trace: one time a line, in seconds, or JSON objects with `timestamp` in milliseconds (as Mooncake's traces have).

    The first arrival becomes 0; later lines must not go back in time. ValueError names the line.
    """
    due: list[float] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            value = float(json.loads(text)["timestamp"]) / 1000 if text.startswith("{") else float(text)
        except (ValueError, KeyError, TypeError) as exc:
            raise ValueError(f"line {number}: {text[:60]!r} is neither a time in seconds nor has `timestamp`") from exc
        if not math.isfinite(value):
            raise ValueError(f"line {number}: {text[:60]!r} is no time")
        if due and value < due[-1]:
            raise ValueError(f"line {number}: {value:g} s lies before the line above it ({due[-1]:g} s)")
        due.append(value)
        if count is not None and len(due) == count:
            break
    return tuple(value - due[0] for value in due)
