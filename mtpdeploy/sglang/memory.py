"""The memory budget of a launch, by the formulas of its version: weights, state slots, intermediate states, KV cache, what binds.

All sizes are of one GPU, in GiB (2^30), as in SGLang's log. Sources: mem_cache/kv_cache_configurator.py (0.5.16 on),
model_executor/model_runner_kv_cache_mixin.py (0.5.7 … 0.5.15), model_executor/model_runner.py (0.5.6), configs/mamba_utils.py,
mem_cache/memory_pool.py. The constants that no formula gives were measured with SGLang 0.5.17 on an H200 (a 27B hybrid in bf16)
and stand in `_MEASURED`; every use of one is named among the assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mtpdeploy.errors import PlanRefused
from mtpdeploy.inventory.values import ArgValue
from mtpdeploy.secret import Secret
from mtpdeploy.sglang.model import ModelConfig, bytes_per_weight
from mtpdeploy.sglang.overrides import Settings, settle
from mtpdeploy.sglang.versions import Version

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Measured:
    """Constants without a formula; GiB."""

    loader_gb: float = 0.148  # what loading leaves allocated beyond the parameters themselves
    process_gb: float = 1.77  # total memory less free memory before the weights: driver, context, communication
    context_gb: float = 1.18  # of it, what the server itself takes of the free memory before its weights
    image_pool_gb: float = 1.0  # SGLANG_MM_FEATURE_CACHE_MB, taken before the weights by a multimodal server
    unreleased_gb: float = 0.09  # of the draft's own embedding and head, what does not come back
    prefill_graph_gb_per_token: float = 2.83 / 8192  # all prefill graphs up to that many tokens
    decode_graph_gb: tuple[float, float] = (0.11, 0.0045)  # without speculation: constant, per running request
    spec_graph_gb: tuple[float, float] = (0.19, 0.0378)  # target verify, draft decode and draft extend together


_MEASURED = _Measured()


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants as one launch on this very host measured them, instead of ours.

    process_gb:        total memory of the card less what others held and what was free before the load
    weights_offset_gb: what loading took beyond the computed weights (their own constant included)
    end_offset_gb:     what was free at the end beyond what was computed: graphs and released weights
    source:            which launch
    """

    process_gb: float
    weights_offset_gb: float
    end_offset_gb: float
    source: str


@dataclass(frozen=True, slots=True)
class Failure:
    """How SGLang would die while sizing its pools. cause: a class of the log summary; line: what it would print."""

    cause: str
    line: str
    fix: str


@dataclass(frozen=True, slots=True)
class Pools:
    """What one GPU's memory becomes, in the order in which the log tells it. GiB.

    avail_* : free memory after that step, as the log prints it.
    reserved_intermediate_gb: what the budget sets aside for intermediate states; what is allocated is intermediate_*.
    """

    settings: Settings
    pre_load_gb: float
    weights_gb: float
    draft_weights_gb: float
    slack_gb: float
    rest_gb: float
    state_bytes_per_slot: int
    slots: int | None
    slots_per_request: int | None
    reserved_intermediate_gb: float
    conv_gb: float
    ssm_gb: float
    intermediate_ssm_gb: float
    intermediate_conv_gb: float
    ring_gb: float
    kv_bytes_per_token: int
    kv_tokens: int
    k_gb: float
    v_gb: float
    draft_kv_gb: float
    avail_after_target_pools_gb: float
    avail_after_pools_gb: float
    released_gb: float
    prefill_graph_gb: float
    decode_graph_gb: float
    avail_end_gb: float
    max_running: int
    bound_by: str
    failure: Failure | None = None

    @property
    def graph_reserve_gb(self) -> float:
        return self.prefill_graph_gb + self.decode_graph_gb

    @property
    def state_gb(self) -> float:
        """Everything that requests' states take: slots and intermediates."""
        return self.conv_gb + self.ssm_gb + self.intermediate_ssm_gb + self.intermediate_conv_gb + self.ring_gb

    @property
    def tokens_per_request(self) -> int:
        return self.kv_tokens // self.max_running if self.max_running else 0


_DTYPE_BYTES: Mapping[str, float] = {
    "float32": 4, "float": 4, "fp32": 4, "float16": 2, "half": 2, "bfloat16": 2, "bf16": 2,
    "fp8_e5m2": 1, "fp8_e4m3": 1, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "fp4_e2m1": 0.5 + 1 / 16, "fp4_mx_block16": 0.5 + 1 / 16,
}  # fmt: skip


def state_bytes(model: ModelConfig, settings: Settings, ssm_dtype: str | None = None) -> tuple[int, int]:
    """(convolution, ssm) bytes of one state slot over all linear layers of one pipeline stage (configs/mamba_utils.py)."""
    if (lin := model.linear) is None:
        return 0, 0
    tp = settings.attn_tp
    layers = math.ceil(lin.layers / settings.pp)
    conv = lin.conv_dim() // tp * (lin.kernel - 1) * int(_DTYPE_BYTES.get(settings.conv_dtype, 2))
    ssm = lin.value_heads // tp * lin.value_dim * lin.key_dim * int(_DTYPE_BYTES[ssm_dtype or settings.ssm_dtype])
    return layers * conv, layers * ssm


def kv_cell_bytes(model: ModelConfig, settings: Settings) -> tuple[int, int]:
    """(all full-attention layers of a stage, one draft layer): KV bytes a token."""
    width = float(model.dtype_bytes) if settings.kv_dtype == "auto" else _DTYPE_BYTES[settings.kv_dtype]
    if latent := model.latent:
        layer = (latent.kv_rank + latent.rope_dim) * width
    else:
        layer = max(1, model.kv_heads // settings.attn_tp) * 2 * model.head_dim * width
    return int(layer * math.ceil(model.full_layers / settings.pp)), int(layer * model.mtp_layers)


def weight_gb(model: ModelConfig, settings: Settings) -> tuple[float | None, float | None]:
    """(target, draft) of one GPU, the loader's own memory included; None: this quantization's size is not known.

    The in-checkpoint draft loads an embedding and a head of its own before it shares the target's.
    """
    width = bytes_per_weight(settings.quantization, model.dtype_bytes)
    if width is None and model.checkpoint_bytes is None:
        return None, None
    parts = settings.tp * settings.pp
    plain = model.embedding_parameters() + (model.vision.parameters() if model.vision else 0)
    per_linear = width or float(model.dtype_bytes)
    layer_bytes = model.layer_parameters() * per_linear
    draft_layer_bytes = model.draft_layer_parameters() * per_linear
    target = plain * model.dtype_bytes + layer_bytes
    if model.checkpoint_bytes is not None:
        target = model.checkpoint_bytes - draft_layer_bytes
    draft = draft_layer_bytes + model.embedding_parameters() * model.dtype_bytes
    return target / parts / GIB + _MEASURED.loader_gb, draft / parts / GIB


def ring_bytes(model: ModelConfig, settings: Settings, version: Version) -> int:
    """ReplaySSM's raw-input ring of one request (0.5.20 on) or slot (0.5.17 … 0.5.19) (mamba_utils.py, replayssm_ring_bytes_per_req)."""
    if (lin := model.linear) is None or not settings.replayssm:
        return 0
    hv, hk, n = lin.value_heads // settings.attn_tp, lin.key_heads // settings.attn_tp, settings.replay_record
    wide = hv * n * lin.value_dim * 2 + hk * n * lin.key_dim * 2
    layer = 2 * wide + hv * n * 4 if version.at_least("0.5.20") else wide + 2 * hv * n * 4
    return layer * math.ceil(lin.layers / settings.pp)


def free_before_load(gpu_memory_gb: float, model: ModelConfig, free_gb: float | None = None) -> float:
    """Free memory at "Load weight begin" on a card with this much in all, or with `free_gb` free before the server starts: an estimate."""
    images = _MEASURED.image_pool_gb if model.multimodal else 0.0
    if free_gb is not None:
        return free_gb - _MEASURED.context_gb - images
    return gpu_memory_gb - _MEASURED.process_gb - images


def allocate(
    args: Mapping[str, ArgValue],
    env: Mapping[str, str | Secret],
    version: Version,
    model: ModelConfig,
    gpu_memory_gb: float,
    free_gb: float | None = None,
    *,
    weights_gb: float | None = None,
    draft_weights_gb: float | None = None,
    calibration: Calibration | None = None,
) -> Pools:
    """Sizes every pool as this version would.

    gpu_memory_gb: the card's total, as nvidia-smi reports it. free_gb: free just before the weights load
    ("Load weight begin. avail mem"); None: estimated. weights_gb, draft_weights_gb: as loaded, where they are known.
    Where SGLang would give up, `failure` says so and the figures are those that led to it.
    Raises PlanRefused where the size of the weights cannot be known.
    """
    settings, _ = settle(args, env, version, model, gpu_memory_gb)
    speculative = settings.algorithm is not None and settings.algorithm != "NGRAM"
    target_estimate, draft_estimate = weight_gb(model, settings)
    target = weights_gb if weights_gb is not None else target_estimate
    draft = (draft_weights_gb if draft_weights_gb is not None else draft_estimate) if speculative else 0.0
    if speculative and settings.draft_path and draft_weights_gb is None:
        draft = None
    if target is None or draft is None:
        raise PlanRefused(
            f"the size of the {'draft' if target is not None else 'weights'} is not known"
            + (f" for quantization {settings.quantization!r}" if target is None else " for a draft model of its own")
            + "; it is not guessed: plan against the host, where the weight files are"
        )
    pre = free_gb
    if pre is None:
        pre = gpu_memory_gb - calibration.process_gb if calibration else free_before_load(gpu_memory_gb, model)
    if calibration and weights_gb is None:
        target += calibration.weights_offset_gb
    assert settings.fraction is not None
    early_draft = version.at_least("0.5.14")  # the draft's weights are loaded before any pool is sized
    after_weights = pre - target - (draft if early_draft else 0.0)
    slack = pre * (1 - settings.fraction)
    image_reserve = 0.0
    if model.multimodal and version.at_least("0.5.18"):
        image_reserve = (100 + (1024 if settings.mm_ipc else 0)) / 1024
    rest = after_weights - slack - image_reserve
    sizes = _states(settings, version, model, rest)
    cell, draft_cell = kv_cell_bytes(model, settings)
    charged = cell
    if speculative and settings.draft_path:
        charged = int(cell * (1 + max(1, model.mtp_layers) / max(1, model.full_layers)))
    elif speculative and model.family == "mla" and model.mtp_layers:
        charged = int(cell * (1 + model.mtp_layers / max(1, model.full_layers)))
    if not (speculative and (model.mtp_layers or settings.draft_path)):
        draft_cell = 0

    left = rest - sizes.charged_gb
    tokens = int(left * GIB) // charged
    tokens = tokens // settings.page_size * settings.page_size
    if settings.max_total_tokens is not None:
        tokens = min(tokens, settings.max_total_tokens // settings.page_size * settings.page_size)
    failure = _failure(settings, version, sizes, rest, left, after_weights, pre, tokens, target, early_draft)
    tokens = max(tokens, 0)
    running, bound = _running(settings, version, model, sizes.slots, tokens)
    per_slot = sum(state_bytes(model, settings))

    conv_slot, ssm_slot = state_bytes(model, settings)
    slots = sizes.slots
    filled = (max(slots, 0) + 1) if slots is not None else 0
    spec_rows = (running + 1) if model.linear and speculative and slots is not None else 0
    inter_ssm = 0 if settings.replayssm else spec_rows * settings.allocated_draft_tokens * ssm_slot
    inter_conv = _window_bytes(model, settings, version, spec_rows, conv_slot)
    ring = ring_bytes(model, settings, version)
    ring_total = ring * (
        ((settings.requested_running or 0) // settings.attn_dp + 1) if version.at_least("0.5.20") else filled
    )
    states = (filled * (conv_slot + ssm_slot) + inter_ssm + inter_conv + ring_total) / GIB
    kv = tokens * cell / GIB
    draft_kv = tokens * draft_cell / GIB
    after_target = after_weights - states - kv
    after_pools = after_target - draft_kv - (0.0 if early_draft else draft)
    released = 0.0
    if speculative and not settings.draft_path and model.mtp_layers:
        own = model.embedding_parameters() * model.dtype_bytes / settings.tp / settings.pp / GIB
        released = max(0.0, own - _MEASURED.unreleased_gb)
    prefill = 0.0
    if settings.prefill_graphs and after_pools + released >= 4.0:
        prefill = _MEASURED.prefill_graph_gb_per_token * max(0, settings.chunk) / settings.tp
    decode = 0.0
    if settings.decode_graphs:
        base, each = _MEASURED.spec_graph_gb if speculative else _MEASURED.decode_graph_gb
        captured = min(running, settings.decode_max_bs) if version.at_least("0.5.14") else settings.decode_max_bs
        decode = base + each * captured
    if calibration:
        decode -= calibration.end_offset_gb
    if failure is None and after_pools < 0:
        failure = Failure(
            "oom_after_pool",
            "torch.OutOfMemoryError: CUDA out of memory",
            "lower mem_fraction_static: what comes after the sized pools does not fit into the rest",
        )
    return Pools(
        settings=settings,
        pre_load_gb=pre,
        weights_gb=target,
        draft_weights_gb=draft,
        slack_gb=slack,
        rest_gb=rest,
        state_bytes_per_slot=per_slot,
        slots=slots,
        slots_per_request=settings.slots_per_request if model.hybrid else None,
        reserved_intermediate_gb=sizes.reserved_gb,
        conv_gb=filled * conv_slot / GIB,
        ssm_gb=filled * ssm_slot / GIB,
        intermediate_ssm_gb=inter_ssm / GIB,
        intermediate_conv_gb=inter_conv / GIB,
        ring_gb=ring_total / GIB,
        kv_bytes_per_token=cell,
        kv_tokens=tokens,
        k_gb=kv / 2,
        v_gb=kv / 2,
        draft_kv_gb=draft_kv,
        avail_after_target_pools_gb=after_target,
        avail_after_pools_gb=after_pools,
        released_gb=released,
        prefill_graph_gb=prefill,
        decode_graph_gb=decode,
        avail_end_gb=after_pools + released - prefill - decode,
        max_running=running,
        bound_by=bound,
        failure=failure,
    )


@dataclass(frozen=True, slots=True)
class _States:
    """slots: K; reserved_gb: set aside for intermediate states; charged_gb: both together, taken from the budget."""

    slots: int | None
    reserved_gb: float
    charged_gb: float


def _states(settings: Settings, version: Version, model: ModelConfig, rest_gb: float) -> _States:
    """K and what it costs, by the version's own solution (handle_max_mamba_cache)."""
    if not model.hybrid:
        return _States(None, 0.0, 0.0)
    per = sum(state_bytes(model, settings))
    depth = settings.draft_tokens if settings.algorithm else 0
    each = settings.slots_per_request
    wanted = settings.requested_running
    dp = settings.attn_dp
    workers = None if wanted is None else max(1, wanted // dp) if version.at_least("0.5.23") else wanted // dp
    given = settings.requested_slots
    budget = rest_gb * settings.ratio / (1 + settings.ratio) * GIB

    if version.before("0.5.7"):
        # With the radix cache on, --max-mamba-cache-size is overwritten; every slot is charged 1 + D times.
        if not settings.radix:
            slots = (given if given is not None else wanted if wanted is not None else 512) // dp
        else:
            slots = int(budget // per // (1 + depth)) // dp
        return _States(slots, slots * per * depth / GIB, slots * per * (1 + depth) / GIB)

    if version.before("0.5.13"):
        upfront = depth * per * (workers or 0) / GIB if settings.algorithm else 0.0
        if version.before("0.5.9"):
            # The reservation is made only where K is computed, and then for all data-parallel workers.
            if given is not None or not settings.radix:
                slots = (given if given is not None else wanted if wanted is not None else 512) // dp
                return _States(slots, 0.0, slots * per / GIB)
            upfront = depth * per * (wanted or 0) / GIB if settings.algorithm else 0.0
        if given is not None:
            slots = given // dp
        elif not settings.radix and workers is not None:
            slots = workers
        else:
            slots = int((rest_gb - upfront) * settings.ratio / (1 + settings.ratio) * GIB // per)
        return _States(slots, upfront, upfront + slots * per / GIB)

    pad = 1 if version.at_least("0.5.17") else 0
    reserves = settings.algorithm is not None and not (settings.replayssm and version.at_least("0.5.17"))
    ring = ring_bytes(model, settings, version) if version.at_least("0.5.17") else 0
    fixed = 0
    if ring and version.at_least("0.5.20"):
        fixed, ring = ring * ((workers or 0) + 1), 0
    if given is not None:
        slots = given // dp
        running = min(workers, slots // each) if workers is not None else 0
    elif not settings.radix and workers is not None:
        slots = running = workers
    elif reserves:
        slots = int((budget - pad * per * (1 + depth)) // (per * (1 + depth / each)))
        running = min(workers, slots // each) if workers is not None else 0
    else:
        slots = int((budget - fixed - pad * (per + ring)) // (per + ring))
        running = 0
    reserved = per * (running + pad) * depth / GIB if reserves else 0.0
    return _States(slots, reserved, reserved + ((slots + pad) * (per + ring) + fixed) / GIB)


def _window_bytes(model: ModelConfig, settings: Settings, version: Version, rows: int, conv_slot: int) -> int:
    """Intermediate convolution windows: one sliding window a request from 0.5.14 on, one copy per draft token before."""
    if (lin := model.linear) is None or not rows:
        return 0
    depth = settings.allocated_draft_tokens
    if version.before("0.5.14"):
        return rows * depth * conv_slot
    layers = math.ceil(lin.layers / settings.pp)
    return rows * layers * (lin.conv_dim() // settings.attn_tp) * (depth + lin.kernel - 2) * 2


def _running(
    settings: Settings, version: Version, model: ModelConfig, slots: int | None, tokens: int
) -> tuple[int, str]:
    """Effective max_running_requests of one data-parallel worker and which limit binds (resolve_max_num_reqs)."""
    context = settings.context or model.context
    estimated = max(min(int(tokens / context * 512), 4096), 2048)
    limits: list[tuple[int, str]] = []
    if settings.requested_running is not None:
        limits.append((max(1, settings.requested_running // settings.attn_dp), "max_running_requests"))
        if version.before("0.5.14"):
            limits.append((estimated, "sglang_default"))
        else:
            limits.append((tokens // 2, "kv_tokens"))
    else:
        limits += [(estimated, "sglang_default"), (tokens // 2, "kv_tokens")]
    if slots is not None:
        limits.append((max(0, slots // settings.slots_per_request), "state_slots"))
    value = min(n for n, _ in limits)
    return value, next(name for n, name in limits if n == value)


def _failure(
    settings: Settings,
    version: Version,
    sizes: _States,
    rest: float,
    left: float,
    after_weights: float,
    pre: float,
    tokens: int,
    target: float,
    early_draft: bool,
) -> Failure | None:
    """The line that SGLang would stop with while it sizes its pools, if it would."""
    if pre - target < 0 or (early_draft and after_weights < 0):
        return Failure(
            "oom_weights",
            "torch.OutOfMemoryError: CUDA out of memory",
            f"the weights take {pre - after_weights if early_draft else target:.1f} GB of {pre:.1f} that are free: "
            "more GPUs (tp_size) or smaller weights",
        )
    least = math.ceil((1 - after_weights / pre) * 1000) / 1000
    short = (
        "raise mem_fraction_static"
        if rest <= 0
        else "fewer state slots or a smaller max_running_requests, or a higher fraction"
    )
    slots = sizes.slots
    if slots is not None and version.at_least("0.5.13"):
        if slots <= 0:
            return Failure(
                "mamba_pool_too_small",
                "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. "
                f"Computed max_mamba_cache_size={slots} (total_rest_memory={rest - sizes.reserved_gb:.2f} GB",
                short,
            )
        if slots // settings.slots_per_request <= 0:
            return Failure(
                "mamba_pool_too_small",
                "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
                f"max_mamba_cache_size={slots}, mamba_ratio={settings.slots_per_request}, resulting max_num_reqs=0",
                f"max_mamba_cache_size of at least {settings.slots_per_request} for each concurrent request",
            )
    if version.at_least("0.5.14") and left <= 0:
        return Failure(
            "kv_pool_too_small",
            f"ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static={settings.fraction}. "
            f"Raise --mem-fraction-static above {least:.3f}",
            short,
        )
    if tokens <= 0:
        return Failure(
            "kv_pool_too_small",
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
            f"Current value: mem_fraction_static={settings.fraction}",
            short,
        )
    if slots is not None and slots // settings.slots_per_request <= 0:
        return Failure(
            "mamba_pool_too_small",
            f"no request can run: {slots} state slots, {settings.slots_per_request} per request",
            f"max_mamba_cache_size of at least {settings.slots_per_request} for each concurrent request",
        )
    return None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Flags that only help together. cost_gb: more memory for states than now; below 0 = given back."""

    set: Mapping[str, ArgValue]
    effect: str
    cost_gb: float | None

    def as_json(self) -> dict[str, object]:
        return {"set": dict(self.set), "effect": self.effect, "cost_gb": _rounded(self.cost_gb)}


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of a launch: pools, suggestions that were themselves computed, and what had to be assumed."""

    pools: Pools
    suggestions: tuple[Suggestion, ...]
    assumptions: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """The `memory` object of `plan --json`."""
        p = self.pools
        hybrid = p.slots is not None
        return {
            "weights_gb": _rounded(p.weights_gb),
            "draft_weights_gb": _rounded(p.draft_weights_gb) if p.settings.algorithm else None,
            "state_bytes_per_slot": p.state_bytes_per_slot if hybrid else None,
            "slots": max(p.slots, 0) if p.slots is not None else None,
            "slots_per_request": p.slots_per_request,
            "max_running_requests": p.max_running,
            "bound_by": p.bound_by,
            "conv_gb": _rounded(p.conv_gb) if hybrid else None,
            "ssm_gb": _rounded(p.ssm_gb) if hybrid else None,
            "intermediate_ssm_gb": _rounded(p.intermediate_ssm_gb) if hybrid and p.settings.algorithm else None,
            "intermediate_conv_gb": _rounded(p.intermediate_conv_gb) if hybrid and p.settings.algorithm else None,
            "kv_bytes_per_token": p.kv_bytes_per_token,
            "kv_tokens": p.kv_tokens,
            "kv_gb": _rounded(p.k_gb + p.v_gb),
            "draft_kv_gb": _rounded(p.draft_kv_gb) if p.settings.algorithm else None,
            "reserved_intermediate_gb": _rounded(p.reserved_intermediate_gb) if hybrid else None,
            "graph_reserve_gb": _rounded(p.graph_reserve_gb),
            "headroom_gb": _rounded(p.avail_end_gb),
            "available_gb": _rounded(p.pre_load_gb),
            "mem_fraction_static": round(p.settings.fraction, 4) if p.settings.fraction is not None else None,
            "failure": {"cause": p.failure.cause, "line": p.failure.line, "fix": p.failure.fix} if p.failure else None,
            "suggestions": [s.as_json() for s in self.suggestions],
            "assumptions": list(self.assumptions),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def budget(
    args: Mapping[str, ArgValue],
    env: Mapping[str, str | Secret],
    version: Version,
    model: ModelConfig,
    *,
    gpu_memory_gb: float | None = None,
    available_gb: float | None = None,
    weights_gb: float | None = None,
    draft_weights_gb: float | None = None,
    calibration: Calibration | None = None,
    assumptions: tuple[str, ...] = (),
    advice: bool = True,
) -> Budget:
    """The budget with suggestions, unless `advice` is False (each is a budget of its own).

    gpu_memory_gb: total of the card; available_gb: free just before the weights load; one of them is needed.

    Raises PlanRefused where neither is known, or the weights' size is not.
    """
    said = [*assumptions]
    if gpu_memory_gb is None and available_gb is None:
        raise PlanRefused(
            "the GPU's memory is not known: give --gpu-memory-gb, or --available-gb, or plan against a host that was probed"
        )
    if gpu_memory_gb is None:
        assert available_gb is not None
        gpu_memory_gb = available_gb + (
            model_total := _MEASURED.process_gb + (_MEASURED.image_pool_gb if model.multimodal else 0)
        )
        said.append(
            f"the card's total is taken as {gpu_memory_gb:.1f} GB: {available_gb:.2f} free before the load and {model_total:.2f} for the process"
        )
    elif available_gb is None and calibration is None:
        free = free_before_load(gpu_memory_gb, model)
        said.append(
            f"free memory before the load is taken as {free:.2f} GB: {gpu_memory_gb:.2f} less {gpu_memory_gb - free:.2f} for driver, context"
            + (" and image features" if model.multimodal else "")
            + " (measured with SGLang 0.5.17 on one H200); --available-gb replaces it"
        )
    known = {"weights_gb": weights_gb, "draft_weights_gb": draft_weights_gb}

    def run(changed: Mapping[str, ArgValue]) -> Pools:
        return allocate(
            {**args, **changed}, env, version, model, gpu_memory_gb, available_gb, calibration=calibration, **known
        )

    pools = run({})
    if calibration:
        said.append(
            f"calibrated by {calibration.source} on this host: {calibration.process_gb:.2f} GB for the process, weights "
            f"{calibration.weights_offset_gb:+.2f} GB, graphs and the rest {-calibration.end_offset_gb:+.2f} GB against our constants"
        )
    if weights_gb is None:
        how = (
            "the weight files' size"
            if model.checkpoint_bytes
            else f"the parameters that config.json implies ({pools.settings.quantization or model.dtype})"
        )
        said.append(
            f"weights are computed from {how}, and {_MEASURED.loader_gb} GB that loading leaves allocated (measured: 27B, 0.5.17)"
        )
    if weights_gb is None and pools.settings.quantization and model.checkpoint_bytes is None:
        said.append(
            f"every linear layer is counted as {pools.settings.quantization}; checkpoints often keep some in 16 bit: "
            "the weight files' own size (a plan against the host) is exact"
        )
    s = pools.settings
    if s.algorithm and model.mtp_layers and not s.draft_path:
        said.append(
            f"the draft loads an embedding and a head of its own; about {pools.released_gb:.1f} GB of them come free after the pools are sized"
            if version.at_least("0.5.14")
            else "up to 0.5.13 the draft's weights are loaded after the pools are sized, and must fit into what the fraction leaves"
        )
    if (
        s.algorithm
        and model.hybrid
        and version.at_least("0.5.7")
        and version.before("0.5.13")
        and pools.reserved_intermediate_gb
    ):
        used = pools.intermediate_ssm_gb + pools.intermediate_conv_gb
        said.append(
            f"SGLang {version} sets {pools.reserved_intermediate_gb:.1f} GB aside for the states of the {s.requested_running} requests"
            f" that were {'not even ' if s.running_is_default else ''}asked for, of which {used:.1f} GB are used"
        )
    if s.adaptive:
        said.append(
            f"adaptive speculation allocates for {s.allocated_draft_tokens} draft tokens and reserves for {s.draft_tokens}: "
            f"{(pools.intermediate_ssm_gb + pools.intermediate_conv_gb) - pools.reserved_intermediate_gb:.1f} GB come out of the slack"
        )
    said.append(
        "memory of CUDA graphs is an estimate from one measured 27B (triton attention, 0.5.17); activations are not in it"
    )
    if caveat := version.caveat:
        said.append(caveat)
    return Budget(pools, suggestions(run, pools, version, model) if advice else (), tuple(said))


# Suggestions. Each set is run through the same formulas before it is offered.

_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_LEAST_TOKENS = 2048  # KV tokens a request below which more concurrency is not offered
_LEAST_HEADROOM_GB = 0.75
Run = Callable[[Mapping[str, ArgValue]], Pools]


def slots_for(requests: int, settings: Settings) -> dict[str, ArgValue]:
    """The two flags that together let `requests` run at once; either alone does not. Over all data-parallel workers."""
    total = requests * settings.attn_dp
    return {"max_running_requests": total, "max_mamba_cache_size": settings.slots_per_request * total}


def suggestions(run: Run, now: Pools, version: Version, model: ModelConfig) -> tuple[Suggestion, ...]:
    """What moves the limit that binds, or what makes a failing launch start.

    Sets that change nothing but sizes come first, then those with another code path, then those that are less exact.
    """
    found: list[Suggestion] = []
    s = now.settings
    if model.hybrid:
        found += _wider(run, now, {}, "")
    found += _more_memory(run, now)
    if model.hybrid and s.algorithm:
        if s.strategy == "extra_buffer" and s.overlap and version.at_least("0.5.14"):
            lazy: dict[str, ArgValue] = {"mamba_radix_cache_strategy": "extra_buffer_lazy"}
            found += _wider(run, now, lazy, "one slot a request less (with speculation from 0.5.14)")
        if s.topk <= 1 and not s.replayssm and version.at_least("0.5.17"):
            found += _wider(run, now, {"enable_linear_replayssm_spec": True}, "no intermediate states (from 0.5.17)")
    if model.hybrid and s.ssm_dtype == "float32":
        why = "states of half the size; check answers, as the state is less exact"
        found += _wider(run, now, {"mamba_ssm_dtype": "bfloat16"}, why)
    if model.hybrid and s.radix:
        bare = without_radix(version)
        found += _wider(run, now, bare, "no prefix cache: a shared prompt is computed again for each request")
        if s.ssm_dtype == "float32":
            found += _wider(
                run, now, {**bare, "mamba_ssm_dtype": "bfloat16"}, "no prefix cache, and states of half the size"
            )
    if s.kv_dtype == "auto" and (now.failure or now.bound_by == "kv_tokens" or now.tokens_per_request < 16 * 1024):
        found += _offer(run, now, {"kv_cache_dtype": "fp8_e4m3"}, "KV cache of half the size, less exact")
    if now.failure or now.max_running < 4:
        found += _fewer_drafts(run, now)
    unique = {repr(sorted(f.set.items())): f for f in found}
    return tuple(unique.values())


def without_radix(version: Version) -> dict[str, ArgValue]:
    """The prefix cache off; 0.5.10 to 0.5.13 refuse extra_buffer then."""
    middle = version.at_least("0.5.10") and version.before("0.5.14")
    off: dict[str, ArgValue] = {"disable_radix_cache": True}
    return {**off, "mamba_radix_cache_strategy": "no_buffer"} if middle else off


def _charged(pools: Pools) -> float:
    """What the budget takes for states before the KV cache gets the rest."""
    return pools.conv_gb + pools.ssm_gb + pools.reserved_intermediate_gb + pools.ring_gb


def _good(pools: Pools) -> bool:
    return pools.failure is None and pools.max_running > 0 and pools.avail_end_gb >= _LEAST_HEADROOM_GB


def _describe(new: Pools, now: Pools, why: str) -> str:
    if now.failure:
        text = f"starts, with {_requests(new.max_running)} and {new.kv_tokens:,} KV tokens"
    else:
        text = f"{_requests(new.max_running)} at once (now {now.max_running}), {new.kv_tokens:,} KV tokens (now {now.kv_tokens:,})"
    text += f", {new.tokens_per_request:,} a request"
    return f"{text}; {why}" if why else text


def _requests(n: int) -> str:
    return f"{n} request{'' if n == 1 else 's'}"


def _offer(run: Run, now: Pools, changed: Mapping[str, ArgValue], why: str) -> list[Suggestion]:
    """That one set, if it starts and leaves more KV tokens."""
    new = run(changed)
    if not _good(new) or not (now.failure or new.kv_tokens > now.kv_tokens):
        return []
    return [Suggestion(dict(changed), _describe(new, now, why), _charged(new) - _charged(now))]


def _wider(run: Run, now: Pools, base: Mapping[str, ArgValue], why: str) -> list[Suggestion]:
    """The widest concurrency that fits, running requests and slots raised together; of plain sizes the next step too."""
    shape = run(base).settings
    fits: list[tuple[int, Mapping[str, ArgValue], Pools]] = []
    for wanted in _STEPS:
        if wanted <= now.max_running and not now.failure:
            continue
        changed, new = _with_room(run, {**base, **slots_for(wanted, shape)})
        if not _good(new) or new.max_running < wanted or new.kv_tokens < wanted * _LEAST_TOKENS:
            break
        fits.append((wanted, changed, new))
    if not fits:
        return []
    doubled = next((f for f in fits if f[0] >= 2 * max(1, now.max_running)), fits[-1])
    chosen = {f[0]: f for f in ((fits[-1],) if base else (doubled, fits[-1]))}
    each = shape.slots_per_request
    together = f"raising one of the two alone does not: {each} slot{'' if each == 1 else 's'} a request"
    text = f"{why}; {together}" if why else together
    return [
        Suggestion(dict(changed), _describe(new, now, text), _charged(new) - _charged(now))
        for _, changed, new in chosen.values()
    ]


def _with_room(run: Run, changed: dict[str, ArgValue]) -> tuple[dict[str, ArgValue], Pools]:
    """The same set, with a lower fraction where only what follows the pools (draft weights, graphs) does not fit."""
    new = run(changed)
    fraction = new.settings.fraction
    assert fraction is not None
    for step in range(1, 16):
        if _good(new) or (new.failure and new.failure.cause != "oom_after_pool"):
            break
        lower = {**changed, "mem_fraction_static": round(fraction - step / 100, 3)}
        if _good(tried := run(lower)):
            return lower, tried
    return changed, new


def _more_memory(run: Run, now: Pools) -> list[Suggestion]:
    """A higher fraction: as much as the draft's second embedding gives back, or as little as lets a failing launch start."""
    fraction = now.settings.fraction
    assert fraction is not None
    if now.failure:
        steps: Sequence[int] = range(1, int((0.95 - fraction) * 100) + 1)
    else:
        steps = [n] if (n := int(now.released_gb / now.pre_load_gb * 100)) > 0 and fraction + n / 100 <= 0.97 else []
    for step in steps:
        value = round(fraction + step / 100, 3)
        new = run({"mem_fraction_static": value})
        if new.failure is None and new.avail_end_gb >= 2.0 and new.kv_tokens > now.kv_tokens:
            why = f"{new.avail_end_gb:.1f} GB stay free at the end"
            if not now.failure:
                why = f"{now.released_gb:.1f} GB of the draft's weights come free after sizing, so {why} (now {now.avail_end_gb:.1f})"
            return [Suggestion({"mem_fraction_static": value}, _describe(new, now, why), _charged(new) - _charged(now))]
    return []


def _fewer_drafts(run: Run, now: Pools) -> list[Suggestion]:
    s = now.settings
    if not s.algorithm or s.steps < 2 or s.topk != 1:
        return []
    changed: dict[str, ArgValue] = {
        "speculative_num_steps": s.steps - 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": s.steps,
    }
    return _offer(run, now, changed, "fewer intermediate states, shorter acceptance")


# The inverse: which flags give a wanted concurrency.


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether `requests` of `tokens_per_request` each can run at once, and what has to be set for it.

    set: the smallest change found, {} where nothing has to change, None where nothing fits.
    missing_gb: of one GPU's memory, with the most frugal settings tried; 0 where it fits.
    ways: every set that fits, cheapest first (fewest changes of kind, then memory).
    """

    requests: int
    tokens_per_request: int
    set: Mapping[str, ArgValue] | None
    effect: str
    cost_gb: float | None
    missing_gb: float
    ways: tuple[Suggestion, ...] = ()

    def as_json(self) -> dict[str, object]:
        return {
            "requests": self.requests,
            "tokens_per_request": self.tokens_per_request,
            "fits": self.set is not None,
            "set": None if self.set is None else dict(self.set),
            "effect": self.effect,
            "cost_gb": _rounded(self.cost_gb),
            "missing_gb": _rounded(self.missing_gb),
            "ways": [w.as_json() for w in self.ways],
        }


def fit(
    args: Mapping[str, ArgValue],
    env: Mapping[str, str | Secret],
    version: Version,
    model: ModelConfig,
    *,
    requests: int,
    tokens_per_request: int | None,
    gpu_memory_gb: float | None,
    available_gb: float | None,
    calibration: Calibration | None = None,
) -> Fit:
    """Tries sets of changes, least intrusive first. tokens_per_request: prompt and output; None: 2048.

    Raises PlanRefused where the memory or the weights' size is not known.
    """
    now = budget(
        args, env, version, model, gpu_memory_gb=gpu_memory_gb, available_gb=available_gb, calibration=calibration,
        advice=False,
    ).pools  # fmt: skip
    total = gpu_memory_gb if gpu_memory_gb is not None else now.pre_load_gb + _MEASURED.process_gb

    def run(changed: Mapping[str, ArgValue]) -> Pools:
        return allocate({**args, **changed}, env, version, model, total, now.pre_load_gb, calibration=calibration)

    each = tokens_per_request or _LEAST_TOKENS
    workers = now.settings.attn_dp
    per_worker = -(-requests // workers)
    wanted_tokens = per_worker * each

    def holds(pools: Pools) -> bool:
        return _good(pools) and pools.max_running >= per_worker and pools.kv_tokens >= wanted_tokens

    if holds(now):
        return Fit(requests, each, {}, _describe(now, now, "nothing has to change"), 0.0, 0.0)
    found: list[tuple[int, Suggestion]] = []
    nearest_short = math.inf
    for rank, base in enumerate(_frugal(now, version, model)):
        shape = run(base).settings
        sizes: dict[str, ArgValue] = (
            slots_for(per_worker, shape) if model.hybrid else {"max_running_requests": per_worker * workers}
        )
        changed, new = _with_room(run, {**base, **sizes})
        if holds(new):
            text = f"room for {wanted_tokens:,} tokens of {new.kv_tokens:,}"
            found.append((rank, Suggestion(changed, _describe(new, now, text), _charged(new) - _charged(now))))
            continue
        spare = max(0.0, new.avail_end_gb - 2.0) if new.failure is None else 0.0
        short = (wanted_tokens * new.kv_bytes_per_token) / GIB - (new.rest_gb - _charged(new)) - spare
        nearest_short = min(nearest_short, max(short, 0.01))
        if raised := _raised(run, {**base, **sizes}, holds):
            changed, new = raised
            text = f"{new.avail_end_gb:.1f} GB stay free at the end"
            found.append((rank, Suggestion(changed, _describe(new, now, text), _charged(new) - _charged(now))))
    if not found:
        return Fit(
            requests,
            each,
            None,
            f"does not fit: about {nearest_short:.1f} GB of a GPU's memory are missing even with the most frugal settings",
            None,
            nearest_short,
        )
    ways = tuple(w for _, w in sorted(found, key=lambda f: (f[0], f[1].cost_gb or 0.0)))
    return Fit(requests, each, ways[0].set, ways[0].effect, ways[0].cost_gb, 0.0, ways)


def _frugal(now: Pools, version: Version, model: ModelConfig) -> list[dict[str, ArgValue]]:
    """Settings that save memory, in the order in which one would try them: nothing, exact ones, then less exact ones."""
    s = now.settings
    lazy: dict[str, ArgValue] = {}
    replayed: dict[str, ArgValue] = {}
    if model.hybrid and s.algorithm and version.at_least("0.5.14") and s.strategy == "extra_buffer" and s.overlap:
        lazy = {"mamba_radix_cache_strategy": "extra_buffer_lazy"}
    if model.hybrid and s.algorithm and version.at_least("0.5.17") and s.topk <= 1 and not s.replayssm:
        replayed = {"enable_linear_replayssm_spec": True}
    half: dict[str, ArgValue] = {"mamba_ssm_dtype": "bfloat16"} if model.hybrid and s.ssm_dtype == "float32" else {}
    cache: dict[str, ArgValue] = {"kv_cache_dtype": "fp8_e4m3"} if s.kv_dtype == "auto" else {}
    bare = without_radix(version) if model.hybrid and s.radix else {}
    tried: list[dict[str, ArgValue]] = [{}]
    sets = [lazy, replayed, half, cache, bare, {**half, **cache}, {**replayed, **cache}, {**bare, **half}]
    sets += [{**replayed, **half, **cache}, {**bare, **half, **cache}, {**bare, **replayed, **half, **cache}]
    for option in sets:
        if option and option not in tried:
            tried.append(option)
    return tried


def _raised(
    run: Run, changed: dict[str, ArgValue], holds: Callable[[Pools], bool]
) -> tuple[dict[str, ArgValue], Pools] | None:
    """The same with a higher fraction, as far as 2 GB stay free after everything."""
    fraction = run(changed).settings.fraction
    assert fraction is not None
    for step in range(1, int((0.95 - fraction) * 100) + 1):
        higher = {**changed, "mem_fraction_static": round(fraction + step / 100, 3)}
        new = run(higher)
        if holds(new) and new.avail_end_gb >= 2.0:
            return higher, new
    return None
