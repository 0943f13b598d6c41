"""Which configurations a search may launch: every combination of levels that the budget and the launch rules let through.

A factor's levels beyond the profile's own may cost something that a benchmark does not show: precision, prefix reuse, context.
Those are searched only where they are named (`--space`) or given up (`--give-up`); each candidate says what it costs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mtpdeploy.analysis.model import Setting, Shape
from mtpdeploy.analysis.tune import Candidate, Key, Level
from mtpdeploy.errors import MtpError, PlanRefused, UsageError
from mtpdeploy.inventory.values import ArgValue
from mtpdeploy.secret import Secret
from mtpdeploy.sglang import command
from mtpdeploy.sglang.flags import HelpFlags
from mtpdeploy.sglang.memory import Calibration, Pools, allocate, kv_cell_bytes, slots_for, weight_gb, without_radix
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
MOST = 6000  # combinations; a larger space is refused with what to leave out
PRECISION, PREFIX_REUSE, CONTEXT = "precision", "prefix-reuse", "context"
GIVEABLE = (PRECISION, PREFIX_REUSE, CONTEXT)
SHORTER_CONTEXT = 32768
NARROW_CHUNK = 2048
STATE_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Factor:
    """One thing that a search may vary. argument: whose values its levels are; None: it sets several that go together.

    costs: what another level than the profile's costs besides speed. gives_up: what must be given up for it, if anything.
    """

    name: str
    argument: str | None
    costs: str
    gives_up: str | None = None

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "costs": self.costs, "gives_up": self.gives_up}


FACTORS: Mapping[str, Factor] = {
    one.name: one
    for one in (
        Factor("draft_steps", None, "a draft's weights, states and KV cache: fewer requests at once"),
        Factor("mamba_slots", "max_mamba_cache_size", "KV tokens; the slots beyond the running requests hold prefixes"),
        Factor("running", None, "KV tokens for each; fewer: the rest waits"),
        Factor("mem_fraction", "mem_fraction_static", "memory left free for peaks of prefill and of other processes"),
        Factor("state_dtype", "mamba_ssm_dtype", "a recurrent state of less precision: check the answers", PRECISION),
        Factor("strategy", "mamba_radix_cache_strategy", "another way to keep states for the prefix cache"),
        Factor("kv_dtype", "kv_cache_dtype", "a KV cache of less precision: check the answers", PRECISION),
        Factor("radix", None, "no prefix cache: a shared prompt is computed again each time", PREFIX_REUSE),
        Factor("context", "context_length", "a shorter longest request", CONTEXT),
        Factor("draft_model", "speculative_draft_model_path", "weights of another model on the host and in memory"),
        Factor("chunked_prefill", "chunked_prefill_size", "time to first token against pauses in running answers"),
        Factor("graph_max_batch", "cuda_graph_max_bs_decode", "larger batches run without a CUDA graph, and slowly"),
    )
}


@dataclass(frozen=True, slots=True)
class Ground:
    """What candidates are judged against: the profile's arguments and all that the budget needs. GiB of one GPU.

    request_tokens: prompt and answer of the workload's requests; that many KV tokens each must fit at once.
    """

    args: Mapping[str, ArgValue]
    env: Mapping[str, str | Secret]
    version: Version
    model: ModelConfig
    gpu_memory_gb: float
    available_gb: float | None = None
    calibration: Calibration | None = None
    help_flags: HelpFlags | None = None
    request_tokens: int = 0

    def pools(self, args: Mapping[str, ArgValue]) -> Pools:
        """Raises PlanRefused where a size is not known."""
        return allocate(
            args,
            self.env,
            self.version,
            self.model,
            self.gpu_memory_gb,
            self.available_gb,
            calibration=self.calibration,
        )

    def shape(self) -> Shape:
        """What a decode step of this model moves."""
        settings, _ = settle(self.args, self.env, self.version, self.model, self.gpu_memory_gb)
        pools = self.pools(self.args)
        _, draft = weight_gb(self.model, settings)
        return Shape.from_memory(
            {
                "weights_gb": pools.weights_gb,
                "draft_weights_gb": draft,
                "state_bytes_per_slot": pools.state_bytes_per_slot * 4 / STATE_WIDTH.get(settings.ssm_dtype, 4),
                "kv_bytes_per_token": pools.kv_bytes_per_token,
            }
        )


@dataclass(frozen=True, slots=True)
class Refused:
    """A combination that is not launched, and why: the budget's or a rule's own words. rule: what such reasons share."""

    levels: Mapping[str, Level]
    rule: str
    why: str

    def as_json(self) -> dict[str, object]:
        return {"levels": dict(self.levels), "rule": self.rule, "why": self.why}


@dataclass(frozen=True, slots=True)
class Space:
    """What may be launched. incumbent: the profile as it is, which need not be among the combinations."""

    candidates: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    incumbent: Candidate
    shape: Shape = field(default_factory=Shape)


def default_factors(ground: Ground, loads: Sequence[int], give_up: Sequence[str] = ()) -> dict[str, tuple[Level, ...]]:
    """Each factor with the levels that are searched unless the user says otherwise; a single level is held.

    UsageError for something in `give_up` that is none of GIVEABLE.
    """
    for one in give_up:
        if one not in GIVEABLE:
            raise UsageError(f"--give-up {one}: should be some of {', '.join(GIVEABLE)}")
    args, version = ground.args, ground.version
    settings, _ = settle(args, ground.env, version, ground.model, ground.gpu_memory_gb)
    own_steps = settings.steps if settings.algorithm else 0
    drafts = ground.model.mtp_layers > 0 or settings.draft_path
    own_running = ground.pools(args).max_running
    running = {load for load in loads if load > 1} or {1}
    if 0 < own_running <= max(loads):
        running.add(own_running)
    fraction = args.get("mem_fraction_static")
    levels: dict[str, tuple[Level, ...]] = {
        "draft_steps": tuple(sorted({0, 1, 2, 3, 4, own_steps})) if drafts else (own_steps,),
        "mamba_slots": (None,),
        "running": tuple(sorted(running)),
        "mem_fraction": tuple(sorted({0.85, 0.9, *((float(fraction),) if isinstance(fraction, (int, float)) else ())})),
        "state_dtype": _narrower(
            settings.ssm_dtype, "bfloat16", PRECISION in give_up and settings.ssm_dtype == "float32"
        ),
        "strategy": _strategies(ground, args.get("mamba_radix_cache_strategy"), settings.strategy),
        "kv_dtype": _narrower(settings.kv_dtype, "fp8_e4m3", PRECISION in give_up and settings.kv_dtype == "auto"),
        "radix": (True, False) if settings.radix and PREFIX_REUSE in give_up else (settings.radix,),
        "context": _contexts(args.get("context_length"), settings.context, CONTEXT in give_up),
        "draft_model": (_scalar(args.get("speculative_draft_model_path")),),
        "chunked_prefill": tuple(sorted({settings.chunk, NARROW_CHUNK})) if settings.chunk > 0 else (settings.chunk,),
        # From 0.5.14 on no graph is captured beyond the running requests, so there is nothing to gain.
        "graph_max_batch": (_scalar(args.get("cuda_graph_max_bs_decode")),),
    }
    if version.before("0.5.14") and args.get("cuda_graph_max_bs_decode") is None:
        levels["graph_max_batch"] = (None, max(loads))
    if not ground.model.hybrid:
        for name in ("mamba_slots", "state_dtype", "strategy"):
            del levels[name]
    return levels


def _scalar(value: ArgValue) -> Level:
    """An argument as a level; one that is a list or a mapping is none."""
    return value if isinstance(value, (bool, int, float, str)) else None


def _narrower(own: str, narrow: str, searched: bool) -> tuple[Level, ...]:
    return (own, narrow) if searched else (own,)


def _strategies(ground: Ground, asked: ArgValue, own: str | None) -> tuple[Level, ...]:
    """Lazy buffers beside eager ones, where this version has them; both keep the prefix cache."""
    if own == "extra_buffer" and ground.version.at_least("0.5.14"):
        return (own, "extra_buffer_lazy")
    return (own or (_scalar(asked)),)


def _contexts(asked: ArgValue, own: int | None, searched: bool) -> tuple[Level, ...]:
    given = asked if isinstance(asked, int) else None
    return (given, SHORTER_CONTEXT) if searched and (own is None or own > SHORTER_CONTEXT) else (given,)


def parse_factors(text: str) -> dict[str, tuple[Level, ...]]:
    """`draft_steps=0,2,3 state_dtype=bfloat16` → factor → levels. UsageError names what is wrong."""
    found: dict[str, tuple[Level, ...]] = {}
    for part in text.replace(";", " ").split():
        name, equals, values = part.partition("=")
        if name not in FACTORS or not equals or not all(values.split(",")):
            raise UsageError(f"--space {part!r}: should be FACTOR=LEVEL,LEVEL with a factor of {', '.join(FACTORS)}")
        if name in found:
            raise UsageError(f"--space {name} is given twice: put its levels into one list")
        found[name] = tuple(dict.fromkeys(_level(value) for value in values.split(",")))
        for level in found[name]:
            if wrong := _wrong(name, level):
                raise UsageError(f"--space {part!r}: {level!r} should be {wrong}")
    if not found:
        raise UsageError(f"--space is empty: should be FACTOR=LEVEL,LEVEL … with factors of {', '.join(FACTORS)}")
    return found


def _wrong(name: str, level: Level) -> str | None:
    """What a level of that factor should be; None where it may be meant."""
    whole = level if isinstance(level, int) and not isinstance(level, bool) else None
    if name == "draft_steps":
        return None if whole is not None and 0 <= whole <= 16 else "a number of drafts from 0 (no MTP) to 16"
    if name in ("running", "chunked_prefill", "graph_max_batch", "context", "mamba_slots"):
        if level is None and name != "running":
            return None
        ok = whole is not None and (whole >= 1 or (name == "chunked_prefill" and whole == -1))
        return None if ok else "a whole number above 0"
    if name == "mem_fraction":
        return None if isinstance(level, float) and 0 < level < 1 else "a share between 0 and 1, such as 0.85"
    if name == "radix":
        return None if isinstance(level, bool) else "on or off"
    return None if level is None or isinstance(level, str) else "a name"


def space(ground: Ground, factors: Mapping[str, Sequence[Level]]) -> Space:
    """Every combination of `factors` over the profile, judged. UsageError if there are too many, PlanRefused if none passes."""
    total = 1
    for levels in factors.values():
        total *= max(1, len(levels))
    if total > MOST:
        sizes = ", ".join(f"{name} {len(levels)}" for name, levels in factors.items() if len(levels) > 1)
        raise UsageError(f"{total} combinations ({sizes}) are more than {MOST}: leave out levels with --space")
    now = ground.pools(ground.args)
    broken = now.failure is not None or now.avail_end_gb <= 0
    incumbent = Candidate({}, {}, _setting(ground, now), now.avail_end_gb)
    unknown = _unknown(ground, factors)
    # A factor that is held at the profile's own level says nothing of a candidate.
    told = [name for name, levels in factors.items() if len(levels) > 1 or changed(ground, {name: levels[0]})]
    candidates: dict[Key, Candidate] = {}
    refused: list[Refused] = []
    for combination in itertools.product(*factors.values()):
        named: dict[str, Level] = dict(zip(factors, combination, strict=True))
        if _same_as_another(named, factors):
            continue
        made = next((unknown[pair] for pair in named.items() if pair in unknown), None)
        shown = {name: named[name] for name in told}
        judged = Refused(shown, "unknown", made) if made else _judged(ground, named, shown, None if broken else now)
        if isinstance(judged, Refused):
            refused.append(judged)
        else:
            candidates.setdefault(judged.key, judged)
    if not candidates:
        reasons = "; ".join(sorted({one.why for one in refused})[:3])
        raise PlanRefused(f"none of the {total} combinations would start: {reasons}")
    return Space(tuple(candidates.values()), tuple(refused), incumbent, ground.shape())


def changed(ground: Ground, levels: Mapping[str, Level]) -> dict[str, ArgValue]:
    """The arguments that a combination of levels changes: sets that only work together. None removes an argument."""
    args = ground.args
    now, _ = settle(args, ground.env, ground.version, ground.model, ground.gpu_memory_gb)
    # A level that is in force anyhow is not written down.
    in_force: Mapping[str, object] = {
        "state_dtype": now.ssm_dtype, "kv_dtype": now.kv_dtype, "strategy": now.strategy, "chunked_prefill": now.chunk,
    }  # fmt: skip
    changes: dict[str, ArgValue] = {}
    for name, level in levels.items():
        argument = FACTORS[name].argument
        if argument is not None and name != "mamba_slots" and in_force.get(name, _NONE) != level:
            changes[argument] = level
    if levels.get("radix") is True and not now.radix:
        changes["disable_radix_cache"] = None
    elif levels.get("radix") is False and now.radix:
        changes |= without_radix(ground.version)
    steps = levels.get("draft_steps")
    if steps == 0:
        changes |= {name: None for name in SPECULATIVE if args.get(name) is not None or changes.get(name) is not None}
    elif isinstance(steps, int) and (now.algorithm is None or steps != now.steps):
        changes |= {
            "speculative_algorithm": args.get("speculative_algorithm") or "NEXTN",
            "speculative_num_steps": steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": steps + 1,
        }
    running, slots = levels.get("running"), levels.get("mamba_slots")
    if isinstance(running, int) or isinstance(slots, int):
        settings, _ = settle(_merged(args, changes), ground.env, ground.version, ground.model, ground.gpu_memory_gb)
        if isinstance(running, int):
            sized = slots_for(running, settings)
        else:
            sized = slots_for(max(1, int(slots or 0) // settings.slots_per_request), settings)
        if isinstance(slots, int):
            sized["max_mamba_cache_size"] = slots
        changes["max_running_requests"] = sized["max_running_requests"]
        if ground.model.hybrid:
            changes["max_mamba_cache_size"] = sized["max_mamba_cache_size"]
    return {name: value for name, value in changes.items() if value != args.get(name)}


_NONE = object()


def _merged(args: Mapping[str, ArgValue], changes: Mapping[str, ArgValue]) -> dict[str, ArgValue]:
    return {name: value for name, value in {**args, **changes}.items() if value is not None}


def _same_as_another(levels: Mapping[str, Level], factors: Mapping[str, Sequence[Level]]) -> bool:
    """A level that has no meaning beside the others: only the first of its factor's is kept."""

    def beside(name: str) -> bool:
        return name in levels and levels[name] != factors[name][0]

    no_prefix_cache, no_drafts = levels.get("radix") is False, levels.get("draft_steps") == 0
    return (no_prefix_cache and beside("strategy")) or (no_drafts and beside("draft_model"))


def _unknown(ground: Ground, factors: Mapping[str, Sequence[Level]]) -> dict[tuple[str, Level], str]:
    """Levels that this SGLang's command line does not take, each with the reason: one look for all their combinations."""
    found: dict[tuple[str, Level], str] = {}
    for name, levels in factors.items():
        for level in levels:
            changes = changed(ground, {name: level})
            if not changes:
                continue
            try:
                command.build({**changes}, ground.version, help_flags=ground.help_flags)
            except PlanRefused as refused:
                problems = refused.details.get("problems")
                said = [str(one) for one in problems] if isinstance(problems, list) else [refused.message]
                # Without the profile's other arguments only what is said of these arguments counts.
                if own := [one for one in said if any(argument in one for argument in changes)]:
                    found[name, level] = own[0]
    return found


def _judged(
    ground: Ground, combination: Mapping[str, Level], levels: Mapping[str, Level], now: Pools | None
) -> Candidate | Refused:
    """levels: those of the combination that tell it from others. now: the profile as it is, which the costs are told
    against; None where it does not start itself."""
    changes = changed(ground, combination)
    merged = _merged(ground.args, changes)
    worst = next(iter(check(merged, ground.env, ground.version, ground.model, ground.gpu_memory_gb)), None)
    if worst is not None and worst.severity == "refuse":
        return Refused(levels, worst.rule, worst.message)
    try:
        pools = ground.pools(merged)
    except MtpError as exc:
        return Refused(levels, exc.kind, exc.message)
    if pools.failure is not None:
        return Refused(levels, pools.failure.cause, f"{pools.failure.cause}: {pools.failure.fix}")
    if pools.avail_end_gb <= 0:
        short = f"{-pools.avail_end_gb:.1f} GiB short after the pools and graphs"
        return Refused(levels, "oom_graph_capture", f"oom_graph_capture: {short}")
    running = combination.get("running")
    if isinstance(running, int) and pools.max_running < running:
        bound = pools.bound_by
        return Refused(levels, bound, f"only {pools.max_running} of {running} requests would run at once ({bound})")
    fit = pools.kv_tokens // ground.request_tokens if ground.request_tokens else pools.max_running
    if fit < min(pools.max_running, running if isinstance(running, int) else pools.max_running):
        told = f"{pools.kv_tokens:,} KV tokens hold {fit} of {pools.max_running} requests of {ground.request_tokens:,}"
        return Refused(levels, "kv_tokens", f"{told} tokens")
    promised = merged.get("context_length")
    if isinstance(promised, int) and pools.kv_tokens < promised:
        told = f"{pools.kv_tokens:,} KV tokens are fewer than the context_length of {promised:,}"
        return Refused(levels, "context_length", told)
    told_costs = _costs(pools, now, ground.model) if now is not None else ()
    return Candidate(
        levels=levels,
        args=changes,
        setting=_setting(ground, pools),
        headroom_gb=pools.avail_end_gb,
        costs=tuple(text for _, text in told_costs),
        gives_up=tuple(dict.fromkeys(what for what, _ in told_costs if what)),
    )


def _setting(ground: Ground, pools: Pools) -> Setting:
    """What the step time depends on; the running requests that both the server's limit and the KV tokens allow."""
    settings = pools.settings
    drafts = settings.draft_tokens if settings.algorithm else 1
    fit = pools.kv_tokens // ground.request_tokens if ground.request_tokens else pools.max_running
    own, _ = settle(ground.args, ground.env, ground.version, ground.model, ground.gpu_memory_gb)
    base, _ = kv_cell_bytes(ground.model, own)
    width = pools.kv_bytes_per_token / base if base else 1.0
    return Setting(max(1, drafts), STATE_WIDTH.get(settings.ssm_dtype, 4), max(1, min(pools.max_running, fit)), width)


def _costs(new: Pools, old: Pools, model: ModelConfig) -> list[tuple[str | None, str]]:
    """(what must be given up for it, or None; what it costs besides speed, with figures) against the profile as it is."""
    s, o = new.settings, old.settings
    found: list[tuple[str | None, str]] = []
    if model.hybrid and STATE_WIDTH.get(s.ssm_dtype, 4) < STATE_WIDTH.get(o.ssm_dtype, 4):
        found.append((PRECISION, f"states in {s.ssm_dtype} instead of {o.ssm_dtype}, less precise: check the answers"))
    if new.kv_bytes_per_token < old.kv_bytes_per_token:
        found.append(
            (PRECISION, f"a KV cache in {s.kv_dtype} instead of {o.kv_dtype}, less precise: check the answers")
        )
    if o.radix and not s.radix:
        found.append((PREFIX_REUSE, "no prefix cache: a shared prompt is computed again each time"))
    longest, before = (min(p.settings.context or model.context, p.kv_tokens) for p in (new, old))
    if longest < before:
        asked = (s.context or model.context) < (o.context or model.context)
        found.append((CONTEXT if asked else None, f"the longest request is {longest:,} tokens instead of {before:,}"))
    if new.kv_tokens < old.kv_tokens:
        found.append((None, f"{new.kv_tokens:,} KV tokens instead of {old.kv_tokens:,}"))
    if new.max_running < old.max_running:
        found.append((None, f"{new.max_running} requests at once instead of {old.max_running}: the rest waits"))
    if s.radix and o.radix and (spare := _spare(new)) < (spare_before := _spare(old)):
        found.append(
            (None, f"{spare} state slots beyond the running requests instead of {spare_before}: fewer prefixes stay")
        )
    if s.radix and o.radix and s.strategy != o.strategy:
        found.append((None, f"states of prefixes are kept by {s.strategy} instead of {o.strategy}: another code path"))
    if new.avail_end_gb < old.avail_end_gb - 0.05:
        found.append((None, f"{new.avail_end_gb:.1f} GiB free at the end instead of {old.avail_end_gb:.1f}"))
    if s.draft_path and not o.draft_path:
        found.append((None, "the weights of a draft model of its own"))
    if s.chunk != o.chunk:
        smaller = s.chunk < o.chunk
        trade = "later first tokens, shorter pauses" if smaller else "longer pauses, earlier first tokens"
        found.append((None, f"prompts in pieces of {s.chunk:,} instead of {o.chunk:,} tokens: {trade}"))
    if s.decode_max_bs < min(new.max_running, o.decode_max_bs):
        found.append((None, f"batches above {s.decode_max_bs} run without a CUDA graph, and slowly"))
    return found


def _spare(pools: Pools) -> int:
    """State slots that no running request needs: they hold the states of finished prompts."""
    return (pools.slots or 0) - (pools.slots_per_request or 0) * pools.max_running


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
