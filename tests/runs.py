"""Run folders and measurements made of plain values, for the tests of the analysis and the reports."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtpdeploy.analysis.provenance import Provenance
from mtpdeploy.store import Run, Store

CONDITIONS = Provenance(
    host="gpu1",
    gpu="NVIDIA H200",
    gpu_count=1,
    gpu_memory_gb=95.0,
    model="qwen3.6-27b",
    model_hash="0f" * 32,
    sglang_version="0.5.17",
    workload="mixed",
    output_tokens=128,
    ignore_eos=True,
    temperature=0.0,
    seed=0,
    prompts="mixed",
    prompts_sha256="ab" * 32,
    client_place="host",
    contention=(),
    simulated=False,
    session="day1",
)


def conditions(**changes: object) -> Provenance:
    return Provenance(**{**CONDITIONS.as_json(), "contention": (), **changes})  # type: ignore[arg-type]


def point(index: int, concurrency: int, tok_s: float, **more: object) -> dict[str, Any]:
    """A point of points.json with the figures that follow from output tok/s."""
    each = tok_s / concurrency
    return {
        "index": index,
        "concurrency": concurrency,
        "rate": None,
        "requests": 8,
        "completed": 8,
        "failed": 0,
        "input_tokens": 8 * 512,
        "output_tokens": 8 * 128,
        "duration_s": 8 * 128 / tok_s,
        "output_tok_s": tok_s,
        "output_tok_s_steady": None,
        "request_tok_s": {"p50": each, "p90": each * 1.05},
        "ttft_ms": {"p50": 90.0, "p90": 120.0, "p99": None, "max": 130.0},
        "tpot_ms": {"p50": 1e3 / each, "p90": 1.1e3 / each, "p99": None, "max": 1.2e3 / each},
        "chunk_gap_ms": {"p50": 20.0, "p90": 22.0, "p99": None, "max": 30.0},
        "stall_ms": {"p50": 22.0, "p90": 25.0, "p99": None, "max": 30.0},
        "e2e_ms": {"p50": 128e3 / each, "p90": 130e3 / each, "p99": None, "max": 140e3 / each},
        "tokens_per_chunk": {"1": 100, "4": 200},
        "accept_length": None,
        "accept_length_source": None,
        "valid": True,
        "invalid_because": [],
        **more,
    }


def records(
    index: int,
    prompts: Sequence[str],
    speed: float,
    *,
    gain: Mapping[str, float] | None = None,
    noise: float = 0.0,
    accept: float | None = None,
    rng: random.Random | None = None,
) -> list[dict[str, Any]]:
    """A record a prompt: 128 tokens at `speed` tok/s * gain[prompt] * exp(noise)."""
    rng = rng or random.Random(index)
    made = []
    for number, prompt in enumerate(prompts):
        each = speed * (gain or {}).get(prompt, 1.0) * math.exp(rng.gauss(0, noise))
        end = round(128 / each * 1e6)
        line: dict[str, Any] = {
            "point": index,
            "index": number,
            "prompt_id": prompt,
            "prompt_class": "code",
            "output_limit": 128,
            "start_us": 0,
            "times_us": [end // 32, end],
            "tokens": [4, 128],
            "end_us": end,
            "output_tokens": 128,
        }
        if accept:
            line |= {"spec_verify": round(128 / accept), "spec_correct": 128 - round(128 / accept)}
        made.append(line)
    return made


def bench_run(
    home: Path,
    profile: str = "mtp",
    *,
    speeds: Mapping[int, float],
    repeats: int = 1,
    prompts: int = 8,
    gain: Mapping[str, float] | None = None,
    noise: float = 0.0,
    run_noise: float = 0.0,
    accept: float | None = None,
    seed: int = 0,
    figures: Mapping[str, object] | None = None,
    args: Mapping[str, object] | None = None,
    **changes: object,
) -> Run:
    """A finished bench run: `speeds` is request tok/s by concurrency; points and records agree with each other."""
    rng = random.Random(seed)
    names = [f"p{number}" for number in range(prompts)]
    said = conditions(profile=profile, args=dict(args or {}), **changes)
    run = Store(home).new_run("bench", {"host": said.host, "profile": profile, "provenance": said.as_json()})
    points = []
    for repeat in range(repeats):
        for concurrency, speed in speeds.items():
            index = len(points)
            drift = math.exp(rng.gauss(0, run_noise))
            lines = records(index, names, speed * drift, gain=gain, noise=noise, accept=accept, rng=rng)
            run.append_jsonl("records.jsonl", lines)
            busy = sum(line["end_us"] for line in lines) / 1e6
            tok_s = concurrency * len(lines) * 128 / busy
            more = {"repeat": repeat, "accept_length": accept, **(figures or {})}
            points.append(point(index, concurrency, tok_s, **more))
    run.write_json("points.json", points)
    run.finish({"output_tok_s": max(one["output_tok_s"] for one in points)})
    return run
