"""From what was asked for (lists of concurrencies, rates, lengths) to the points of a run, each with its requests. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mtpdeploy.bench import arrivals, prompting
from mtpdeploy.bench.values import PointSpec, Process, Prompt, Request

WARMUP_TOKENS = 12  # with the probe's four, at most 16 tokens a lane
SWEPT = ("concurrency", "rate", "input", "output")
ENOUGH = 2  # requests per lane where the number was left to us


@dataclass(frozen=True, slots=True)
class Asked:
    """The load as asked for. Lists are swept; concurrency and rate exclude each other unless `cap` is meant.

    requests: per point; None: 16, or twice the concurrency if that is more.
    trace: arrival times in seconds, for process `trace`.
    """

    concurrency: tuple[int, ...] = ()
    rate: tuple[float, ...] = ()
    cap: int | None = None
    process: Process = "poisson"
    trace: tuple[float, ...] = ()
    requests: int | None = None
    repeat: int = 1
    input_tokens: tuple[int | None, ...] = (None,)
    output_tokens: tuple[int, ...] = (256,)
    prompts: str = "mixed"
    seed: int = 0


def points(asked: Asked, *, arm: str | None = None, first: int = 0, repeat: int | None = None) -> tuple[PointSpec, ...]:
    """The points in the order in which they are measured: whole sweeps, one repeat after the other.

    Every point sends the same prompts in the same order (the salt makes each request new to the prefix cache), so points, repeats
    and arms are paired by prompt. `repeat`: only that repeat, for arms that take turns.
    """
    made: list[PointSpec] = []
    repeats = range(asked.repeat) if repeat is None else (repeat,)
    for turn in repeats:
        for length in asked.input_tokens:
            for limit in asked.output_tokens:
                for concurrency, rate, process in _loads(asked):
                    made.append(_point(asked, first + len(made), turn, arm, length, limit, concurrency, rate, process))
    return tuple(made)


def _loads(asked: Asked) -> list[tuple[int | None, float | None, Process]]:
    if asked.trace:
        return [(asked.cap, None, "trace")]
    if asked.rate:
        return [(asked.cap, rate, asked.process) for rate in asked.rate]
    return [(concurrency, None, "closed") for concurrency in asked.concurrency]


def _point(
    asked: Asked,
    index: int,
    repeat: int,
    arm: str | None,
    length: int | None,
    limit: int,
    concurrency: int | None,
    rate: float | None,
    process: Process,
) -> PointSpec:
    count = asked.requests or max(16, ENOUGH * (concurrency or 0))
    due: Sequence[float | None]
    if process == "closed":
        due = [None] * count
    elif process == "trace":
        count = min(asked.requests or len(asked.trace), len(asked.trace))
        due = asked.trace[:count]
        rate = (count - 1) / due[-1] if count > 1 and due[-1] else None
    else:
        assert rate is not None
        due = arrivals.schedule(process, rate, count, seed=asked.seed + repeat)
    prompts = prompting.choose(asked.prompts, count, seed=asked.seed, input_tokens=length)
    lanes = min(concurrency or 8, count)
    return PointSpec(
        index=index,
        requests=tuple(
            Request(place, prompt, limit, at) for place, (prompt, at) in enumerate(zip(prompts, due, strict=True))
        ),
        process=process,
        concurrency=concurrency,
        rate=rate,
        input_tokens=length,
        output_tokens=limit,
        warmup=tuple(
            Request(place, prompt, min(WARMUP_TOKENS, limit))
            for place, prompt in enumerate(prompting.warmup(lanes, input_tokens=length))
        ),
        repeat=repeat,
        arm=arm,
        output_swept=len(asked.output_tokens) > 1,
    )


def prompts_of(made: Sequence[PointSpec]) -> tuple[Prompt, ...]:
    """The prompts of the first point: all points of a run send these."""
    return tuple(request.prompt for request in made[0].requests) if made else ()


def numbers(text: str, kind: type[int] | type[float], what: str) -> tuple[int, ...] | tuple[float, ...]:
    """`1,2,4` or `1..16` (doubling) → numbers, each above 0. ValueError says what would be right."""
    if found := re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text):
        low, high = int(found[1]), int(found[2])
        if not 0 < low <= high:
            raise ValueError(f"{what}: {text!r} should go upwards from at least 1, such as 1..16")
        doubled = []
        while low < high:
            doubled.append(low)
            low *= 2
        return (*(kind(value) for value in doubled), kind(high))
    try:
        found_numbers = tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{what}: {text!r} should be numbers with commas, such as 1,2,4 or 1..16") from None
    if not found_numbers or any(not value > 0 or value == float("inf") for value in found_numbers):
        raise ValueError(f"{what}: {text!r} should be numbers above 0, such as 1,2,4 or 1..16")
    return found_numbers


def sweep(text: str) -> tuple[str, str]:
    """`rate=1,2,4` → its name and its values. ValueError names what can be swept."""
    name, sign, values = text.partition("=")
    name = name.strip().replace("-", "_").removesuffix("_tokens")
    if not sign or name not in SWEPT:
        raise ValueError(
            f"--sweep {text!r}: should be one of {', '.join(f'{one}=…' for one in SWEPT)}, such as concurrency=1,2,4"
        )
    return name, values
