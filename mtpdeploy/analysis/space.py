"""Which configurations a search may launch: every combination of levels that the budget and the launch rules let through."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mtpdeploy.analysis.model import Setting, Shape
from mtpdeploy.analysis.tune import Candidate, Level
from mtpdeploy.errors import MtpError, PlanRefused, UsageError
from mtpdeploy.inventory.values import ArgValue
from mtpdeploy.secret import Secret
from mtpdeploy.sglang.memory import Pools, allocate, slots_for
from mtpdeploy.sglang.model import ModelConfig
from mtpdeploy.sglang.overrides import settle
from mtpdeploy.sglang.rules import check
from mtpdeploy.sglang.versions import Version

SPECULATIVE = (
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_adaptive",
    "speculative_draft_model_path",
)
MOST = 4000  # combinations; a larger space is refused with what to leave out

# Factors whose levels are the argument's own values.
PLAIN = {
    "state_dtype": "mamba_ssm_dtype",
    "strategy": "mamba_radix_cache_strategy",
    "mem_fraction": "mem_fraction_static",
    "kv_dtype": "kv_cache_dtype",
    "context": "context_length",
    "chunked_prefill": "chunked_prefill_size",
    "graph_max_batch": "cuda_graph_max_bs_decode",
    "draft_model": "speculative_draft_model_path",
}
FACTORS = ("draft_steps", "running", "radix", *PLAIN)

COSTS: Mapping[str, str] = {
    "state_dtype": "a recurrent state of less precision: check the answers",
    "strategy": "another way to keep states for the prefix cache",
    "mem_fraction": "less memory left free for peaks of prefill and of other processes",
    "kv_dtype": "a KV cache of less precision: check the answers",
    "context": "a shorter longest context",
    "radix": "no prefix cache: a repeated prompt is computed again",
    "chunked_prefill": "another balance of time to first token against pauses in running answers",
    "graph_max_batch": "larger batches run without a CUDA graph, and slowly",
    "draft_model": "another draft model to keep",
    "running": "fewer requests at once: the rest waits",
}


@dataclass(frozen=True, slots=True)
class Refused:
    """A combination that is not launched, and why: the budget's or a rule's own words."""

    levels: Mapping[str, Level]
    why: str


@dataclass(frozen=True, slots=True)
class Space:
    """What may be launched. incumbent: the profile as it is, which need not be among the combinations."""

    candidates: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    incumbent: Candidate
    shape: Shape = field(default_factory=Shape)


def default_factors(args: Mapping[str, ArgValue], loads: Sequence[int]) -> dict[str, tuple[Level, ...]]:
    """What is searched unless the user says otherwise: drafts, running requests up to the largest load, memory, state."""
    most = max(loads)
    running = sorted({*(load for load in loads if load > 1), min(2 * most, 64)})
    fraction = args.get("mem_fraction_static")
    fractions = sorted({0.85, 0.9, *((float(fraction),) if isinstance(fraction, float) else ())})
    return {
        "draft_steps": (0, 1, 2, 3, 4),
        "running": tuple(running),
        "state_dtype": ("float32", "bfloat16"),
        "mem_fraction": tuple(fractions),
    }


def parse_factors(text: str) -> dict[str, tuple[Level, ...]]:
    """`draft_steps=0,2,3 state_dtype=bfloat16` → factor → levels. UsageError names what is wrong."""
    found: dict[str, tuple[Level, ...]] = {}
    for part in text.replace(";", " ").split():
        name, equals, values = part.partition("=")
        if name not in FACTORS or not equals or not values:
            raise UsageError(f"--space {part!r}: should be FACTOR=LEVEL,LEVEL with a factor of {', '.join(FACTORS)}")
        found[name] = tuple(_level(value) for value in values.split(","))
    return found


def space(
    args: Mapping[str, ArgValue],
    env: Mapping[str, str | Secret],
    version: Version,
    model: ModelConfig,
    gpu_memory_gb: float,
    factors: Mapping[str, Sequence[Level]],
    *,
    free_gb: float | None = None,
) -> Space:
    """Every combination of `factors` over `args`, judged. UsageError if there are too many, PlanRefused if none passes."""
    total = 1
    for levels in factors.values():
        total *= max(1, len(levels))
    if total > MOST:
        raise UsageError(f"{total} combinations are more than {MOST}: leave out levels with --space")
    own = _judged(args, {}, {}, env, version, model, gpu_memory_gb, free_gb)
    incumbent = own if isinstance(own, Candidate) else Candidate({}, {}, _setting(args, env, version, model, None))
    candidates: dict[tuple[tuple[str, str], ...], Candidate] = {}
    refused: list[Refused] = []
    for combination in itertools.product(*factors.values()):
        named: dict[str, Level] = dict(zip(factors, combination, strict=True))
        changes = changed(args, named, env, version, model, gpu_memory_gb)
        made = _judged(args, changes, named, env, version, model, gpu_memory_gb, free_gb, incumbent.setting.running)
        if isinstance(made, Refused):
            refused.append(made)
        else:
            candidates.setdefault(made.key, made)
    if not candidates:
        reasons = "; ".join(sorted({one.why for one in refused})[:3])
        raise PlanRefused(f"none of the {total} combinations would start: {reasons}")
    pools = _pools({**args}, env, version, model, gpu_memory_gb, free_gb)
    return Space(tuple(candidates.values()), tuple(refused), incumbent, _shape(pools))


def changed(
    args: Mapping[str, ArgValue],
    levels: Mapping[str, Level],
    env: Mapping[str, str | Secret],
    version: Version,
    model: ModelConfig,
    gpu_memory_gb: float,
) -> dict[str, ArgValue]:
    """The arguments that a combination of levels changes: sets that only work together. None removes an argument."""
    changes: dict[str, ArgValue] = {}
    for name, level in levels.items():
        if name in PLAIN:
            changes[PLAIN[name]] = level
        elif name == "radix":
            changes["disable_radix_cache"] = None if level else True
    steps = levels.get("draft_steps")
    if steps == 0:
        changes |= {name: None for name in SPECULATIVE if args.get(name) is not None or changes.get(name) is not None}
    elif isinstance(steps, int):
        changes |= {
            "speculative_algorithm": args.get("speculative_algorithm") or "NEXTN",
            "speculative_num_steps": steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": steps + 1,
        }
    running = levels.get("running")
    if isinstance(running, int):
        settings, _ = settle(_merged(args, changes), env, version, model, gpu_memory_gb)
        changes["max_running_requests"] = running
        if model.hybrid:
            changes |= slots_for(running, settings)
    return {name: value for name, value in changes.items() if value != args.get(name)}


def _merged(args: Mapping[str, ArgValue], changes: Mapping[str, ArgValue]) -> dict[str, ArgValue]:
    return {name: value for name, value in {**args, **changes}.items() if value is not None}


def _judged(
    args: Mapping[str, ArgValue],
    changes: Mapping[str, ArgValue],
    levels: Mapping[str, Level],
    env: Mapping[str, str | Secret],
    version: Version,
    model: ModelConfig,
    gpu_memory_gb: float,
    free_gb: float | None,
    before: int | None = None,
) -> Candidate | Refused:
    merged = _merged(args, changes)
    # `before`: the running requests of the profile as it is.
    worst = next(iter(check(merged, env, version, model, gpu_memory_gb)), None)
    if worst is not None and worst.severity == "refuse":
        return Refused(levels, f"{worst.rule}: {worst.message}")
    try:
        pools = _pools(merged, env, version, model, gpu_memory_gb, free_gb)
    except MtpError as exc:
        return Refused(levels, exc.message)
    if pools.failure is not None:
        return Refused(levels, f"{pools.failure.cause}: {pools.failure.fix}")
    if pools.avail_end_gb <= 0:
        return Refused(levels, f"oom_graph_capture: {-pools.avail_end_gb:.1f} GiB short after the pools and graphs")
    running = levels.get("running")
    if isinstance(running, int) and pools.max_running < running:
        return Refused(levels, f"only {pools.max_running} of {running} running requests would fit ({pools.bound_by})")
    return Candidate(
        levels=levels,
        args=changes,
        setting=_setting(merged, env, version, model, pools.max_running),
        headroom_gb=pools.avail_end_gb,
        costs=_costs(args, changes, levels, before),
    )


def _pools(
    args: Mapping[str, ArgValue], env: Mapping[str, str | Secret], version: Version, model: ModelConfig,
    gpu_memory_gb: float, free_gb: float | None,
) -> Pools:  # fmt: skip
    return allocate(args, env, version, model, gpu_memory_gb, free_gb)


def _setting(
    args: Mapping[str, ArgValue], env: Mapping[str, str | Secret], version: Version, model: ModelConfig,
    running: int | None,
) -> Setting:  # fmt: skip
    settings, _ = settle(args, env, version, model, None)
    drafts = settings.draft_tokens if settings.algorithm else 1
    return Setting(max(1, drafts), 2 if settings.ssm_dtype in ("bfloat16", "float16") else 4, running)


def _shape(pools: Pools) -> Shape:
    return Shape.from_memory(
        {
            "weights_gb": pools.weights_gb,
            "state_bytes_per_slot": pools.state_bytes_per_slot,
            "kv_bytes_per_token": pools.kv_bytes_per_token,
        }
    )


def _costs(
    args: Mapping[str, ArgValue], changes: Mapping[str, ArgValue], levels: Mapping[str, Level], before: int | None
) -> tuple[str, ...]:
    """Of levels that differ from the profile, what they give up besides speed."""
    found = []
    for name in levels:
        touched = {"running": "max_running_requests", "radix": "disable_radix_cache", **PLAIN}.get(name)
        if touched is None or touched not in changes:
            continue
        new, old = changes[touched], args.get(touched)
        if name == "running" and isinstance(new, int) and before is not None and new >= before:
            continue
        if name == "context" and isinstance(new, int) and isinstance(old, int) and new > old:
            continue
        if name == "radix" and new is None:
            continue
        if name == "mem_fraction" and isinstance(new, float) and isinstance(old, float) and new < old:
            continue
        if name == "state_dtype" and new == "float32":
            continue
        found.append(COSTS[name])
    return tuple(found)


def _level(text: str) -> Level:
    lowered = text.lower()
    if lowered in ("none", "null", "default"):
        return None
    if lowered in ("true", "on", "yes"):
        return True
    if lowered in ("false", "off", "no"):
        return False
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+)", text):
        return float(text)
    return text
