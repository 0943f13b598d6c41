"""What SGLang makes of the arguments before it starts: the rewrites of each version, each with its rule.

Read from server_args.py (0.5.6 … 0.5.18) and arg_groups/{speculative,mamba,memory}_hook.py, overrides.py (0.5.19 on).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtpdeploy.inventory.values import ArgValue
from mtpdeploy.secret import Secret
from mtpdeploy.sglang.model import ModelConfig
from mtpdeploy.sglang.versions import Version

EAGLE_KIND = frozenset({"EAGLE", "EAGLE3", "STANDALONE"})
DEFAULT_STEPS, DEFAULT_TOPK, DEFAULT_DRAFT_TOKENS = 3, 1, 4
SPECULATIVE_RUNNING = 48  # what None becomes under speculation, in every version
DEFAULT_RATIO = 0.9
ADAPTIVE_STEPS = (0, 1, 3, 5, 7)  # union of the default candidates (speculative/adaptive_spec_params.py)
_MIB = 1 / 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in force, as far as they decide speed, memory and whether the server starts. Sizes in GiB.

    algorithm:        EAGLE, EAGLE3, NGRAM …; None without speculation
    draft_tokens:     D, what the budget reserves for; allocated_draft_tokens: D*, what is allocated (more with adaptive)
    strategy:         no_buffer, extra_buffer, extra_buffer_lazy; None: no linear attention, or radix cache off
    requested_running: None only without speculation
    fraction:         mem_fraction_static; None: automatic and the GPU's memory is not known
    """

    algorithm: str | None
    steps: int
    topk: int
    draft_tokens: int
    allocated_draft_tokens: int
    adaptive: bool
    draft_path: bool
    replayssm: bool
    replay_record: int
    radix: bool
    strategy: str | None
    overlap: bool
    skip_decode_lock: bool
    requested_running: int | None
    running_is_default: bool
    requested_slots: int | None
    ratio: float
    fraction: float | None
    ssm_dtype: str
    conv_dtype: str
    kv_dtype: str
    page_size: int
    context: int | None
    max_total_tokens: int | None
    chunk: int
    decode_max_bs: int
    prefill_graphs: bool
    decode_graphs: bool
    tp: int
    pp: int
    attn_dp: int
    mm_ipc: bool
    quantization: str | None

    @property
    def attn_tp(self) -> int:
        return max(1, self.tp // self.attn_dp)

    @property
    def slots_per_request(self) -> int:
        """State slots that one running request occupies (kv_cache_configurator.py, _calculate_mamba_ratio)."""
        if not self.radix:
            return 1
        base = 2 if self.skip_decode_lock else 3
        if self.strategy == "extra_buffer":
            return base + (2 if self.overlap else 1)
        if self.strategy == "extra_buffer_lazy":
            return base + 1
        return 3


def truthy(value: str | Secret | None) -> bool:
    """SGLang's reading of a boolean environment variable (environ.py)."""
    return isinstance(value, str) and value.strip().lower() in ("1", "true", "yes", "y", "on")


def _whole(args: Mapping[str, ArgValue], name: str) -> int | None:
    value = args.get(name)
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)) and float(value).is_integer():
        return int(value)
    return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else None


def _text(args: Mapping[str, ArgValue], name: str) -> str | None:
    value = args.get(name)
    return value if isinstance(value, str) and value else None


def _algorithm(args: Mapping[str, ArgValue]) -> str | None:
    written = _text(args, "speculative_algorithm")
    return None if written is None else "EAGLE" if written.upper() == "NEXTN" else written.upper()


def settle(
    args: Mapping[str, ArgValue],
    env: Mapping[str, str | Secret],
    version: Version,
    model: ModelConfig | None,
    gpu_memory_gb: float | None = None,
) -> tuple[Settings, dict[str, tuple[object, str]]]:
    """The settings in force, and each argument that SGLang changes or fills: name → (value, rule)."""
    changed: dict[str, tuple[object, str]] = {}
    since = version.at_least

    algorithm = _algorithm(args)
    written = args.get("speculative_algorithm")
    if algorithm is not None and written != algorithm:
        changed["speculative_algorithm"] = (
            algorithm,
            "NEXTN is an alias of EAGLE" if algorithm == "EAGLE" else "names are upper case",
        )
    eagle = algorithm in EAGLE_KIND
    steps, topk, draft = (_whole(args, f"speculative_{n}") for n in ("num_steps", "eagle_topk", "num_draft_tokens"))
    adaptive = bool(args.get("speculative_adaptive")) and since("0.5.11")
    tp = _whole(args, "tp_size") or 1
    pp = _whole(args, "pp_size") or 1
    attn_dp = _whole(args, "attn_dp_size") or ((_whole(args, "dp_size") or 1) if args.get("enable_dp_attention") else 1)
    if adaptive and (algorithm not in ("EAGLE", "EAGLE3") or (topk or 1) != 1 or attn_dp > 1):
        adaptive = False
        changed["speculative_adaptive"] = (
            False,
            "adaptive speculation needs EAGLE or EAGLE3, topk 1 and no data-parallel attention",
        )
    if eagle and steps is None:
        steps, topk, draft = DEFAULT_STEPS, DEFAULT_TOPK, DEFAULT_DRAFT_TOKENS
        if model and model.architecture == "LlamaForCausalLM":
            steps, topk, draft = 5, 4, 8
        for name, value in (("num_steps", steps), ("eagle_topk", topk), ("num_draft_tokens", draft)):
            changed[f"speculative_{name}"] = value, "the default where speculative_num_steps is not given"
    if eagle and topk == 1 and steps is not None and draft != steps + 1:
        changed["speculative_num_draft_tokens"] = (
            steps + 1,
            f"with topk 1 the number of draft tokens is always steps + 1 ({draft} was asked for)"
            if draft is not None
            else "with topk 1 the number of draft tokens is steps + 1",
        )
        draft = steps + 1
    if algorithm == "NGRAM" and draft is None:
        draft = 12
    spec = algorithm is not None
    steps, topk, draft = steps or 0, topk or 1, (draft or 1) if spec else 0

    running = _whole(args, "max_running_requests")
    running_is_default = spec and running is None
    if running_is_default:
        running = SPECULATIVE_RUNNING
        changed["max_running_requests"] = running, "speculation sets 48 where max_running_requests is not given"

    overlap = not args.get("disable_overlap_schedule")
    overlap, why = _overlap(overlap, algorithm, topk, env, version, pp)
    radix = not args.get("disable_radix_cache")
    strategy: str | None = None
    if model is None or model.hybrid:
        strategy, radix, overlap, reason = _strategy(args, version, model, spec, radix, overlap)
        why = reason or why
        asked = args.get("mamba_radix_cache_strategy")
        if strategy and asked in (None, "auto"):
            changed["mamba_radix_cache_strategy"] = (
                strategy,
                f"auto is {strategy} in {version}" + (f": {reason}" if reason else ""),
            )
        if not radix and not args.get("disable_radix_cache"):
            changed["disable_radix_cache"] = (
                True,
                f"SGLang {version} turns the radix cache off under speculation with no_buffer",
            )
    if why and overlap == bool(args.get("disable_overlap_schedule")):
        changed["disable_overlap_schedule"] = not overlap, why

    if spec and args.get("enable_mixed_chunk") and (version.before("0.5.19") or algorithm == "NGRAM"):
        changed["enable_mixed_chunk"] = False, "speculation turns mixed chunks off up to 0.5.18, NGRAM in every version"

    replay = bool(args.get("enable_linear_replayssm_spec")) and spec
    record = _whole(args, "linear_replayssm_cache_len") or 16
    if replay and since("0.5.17") and version.before("0.5.20"):
        record = draft
    ssm, rule = _ssm_dtype(args, env, version, model, replay)
    if model and model.hybrid and _text(args, "mamba_ssm_dtype") != ssm:
        changed["mamba_ssm_dtype"] = ssm, rule

    gpu_mib = gpu_memory_gb / _MIB if gpu_memory_gb else None
    chunk_default, bs_default = _by_gpu(gpu_mib, tp)
    chunk = _whole(args, "chunked_prefill_size")
    if chunk is None:
        chunk = chunk_default
        if gpu_mib:
            changed["chunked_prefill_size"] = chunk, "by the GPU's memory"
    decode_bs = _whole(args, "cuda_graph_max_bs_decode")
    listed = args.get("cuda_graph_bs_decode")
    if decode_bs is None and isinstance(listed, (list, tuple)) and listed:
        decode_bs = max(int(b) for b in listed if isinstance(b, (int, float, str)))
    if decode_bs is None:
        decode_bs = min(bs_default, running) if running is not None and not running_is_default else bs_default
        if gpu_mib:
            changed["cuda_graph_max_bs_decode"] = (
                decode_bs,
                "by the GPU's memory, and no more than an explicit max_running_requests",
            )
    no_graphs = bool(args.get("disable_cuda_graph"))
    prefill_off = (
        no_graphs
        or bool(args.get("disable_prefill_cuda_graph"))
        or args.get("cuda_graph_backend_prefill") == "disabled"
    )
    decode_off = (
        no_graphs or bool(args.get("disable_decode_cuda_graph")) or args.get("cuda_graph_backend_decode") == "disabled"
    )
    prefill_graphs = since("0.5.10") and not prefill_off

    page = _whole(args, "page_size") or (64 if args.get("attention_backend") == "trtllm_mha" else 1)
    ratio_given = args.get("mamba_full_memory_ratio")
    ratio = float(ratio_given) if isinstance(ratio_given, (int, float)) else DEFAULT_RATIO
    if ratio_given is None and model and model.hybrid:
        changed["mamba_full_memory_ratio"] = ratio, "0.9 where it is not given"
    fraction_given = args.get("mem_fraction_static")
    fraction = float(fraction_given) if isinstance(fraction_given, (int, float)) else None
    if fraction is None and gpu_mib:
        fraction = automatic_fraction(
            version, gpu_mib, chunk, decode_bs, prefill_graphs, algorithm, tp, pp, attn_dp, model.multimodal if model else False,
            vision_hidden=model.vision.hidden if model and model.vision else 1152,
        )  # fmt: skip
        changed["mem_fraction_static"] = (
            fraction,
            "computed from the GPU's memory, chunk size, graph sizes and model kind",
        )
    kv = _text(args, "kv_cache_dtype") or "auto"
    if kv == "fp8_e5m2" and args.get("attention_backend") == "fa3":
        changed["attention_backend"] = "triton", "fa3 cannot read an fp8_e5m2 cache"
    if attn_dp > 1 and (given := _whole(args, "max_mamba_cache_size")) is not None:
        changed["max_mamba_cache_size"] = given // attn_dp, f"divided over {attn_dp} attention-DP workers"
    settings = Settings(
        algorithm=algorithm,
        steps=steps,
        topk=topk,
        draft_tokens=draft,
        allocated_draft_tokens=max(draft, max(ADAPTIVE_STEPS) + 1) if adaptive else draft,
        adaptive=adaptive,
        draft_path=_text(args, "speculative_draft_model_path") is not None,
        replayssm=replay,
        replay_record=record,
        radix=radix,
        strategy=strategy if radix else None,
        overlap=overlap,
        skip_decode_lock=since("0.5.17") and truthy(env.get("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK")),
        requested_running=running,
        running_is_default=running_is_default,
        requested_slots=_whole(args, "max_mamba_cache_size"),
        ratio=ratio,
        fraction=fraction,
        ssm_dtype=ssm,
        conv_dtype=str(env.get("SGLANG_MAMBA_CONV_DTYPE") or "bfloat16"),
        kv_dtype=kv,
        page_size=page,
        context=_whole(args, "context_length") or (model.context if model else None),
        max_total_tokens=_whole(args, "max_total_tokens"),
        chunk=chunk,
        decode_max_bs=decode_bs,
        prefill_graphs=prefill_graphs,
        decode_graphs=not decode_off,
        tp=tp,
        pp=pp,
        attn_dp=attn_dp,
        mm_ipc=args.get("mm_feature_transport") in ("cuda_ipc", "cuda_vmm"),
        quantization=_text(args, "quantization") or (model.quantization if model else None),
    )
    return settings, changed


def effective(
    args: Mapping[str, ArgValue],
    env: Mapping[str, str | Secret],
    version: Version,
    model: ModelConfig | None = None,
    gpu_memory_gb: float | None = None,
) -> dict[str, tuple[object, str]]:
    """Each argument that SGLang of this version changes or fills: canonical name → (value in force, the rule)."""
    return settle(args, env, version, model, gpu_memory_gb)[1]


def _overlap(
    wanted: bool,
    algorithm: str | None,
    topk: int,
    env: Mapping[str, str | Secret],
    version: Version,
    pp: int,
) -> tuple[bool, str | None]:
    """Whether the overlap scheduler runs, and the rule if it was changed."""
    if pp > 1:
        return False, "pipeline parallelism runs without the overlap scheduler"
    if algorithm == "NGRAM" and version.before("0.5.14"):
        return False, f"NGRAM runs without the overlap scheduler up to 0.5.13 (this is {version})"
    if algorithm not in EAGLE_KIND:
        return wanted, None
    v2 = env.get("SGLANG_ENABLE_SPEC_V2")
    if version.before("0.5.11"):
        on = truthy(v2)
        return on, (
            "SGLANG_ENABLE_SPEC_V2 is set: speculation turns the overlap scheduler on"
            if on
            else f"SGLang {version} speculates without the overlap scheduler unless SGLANG_ENABLE_SPEC_V2=1 is set"
        )
    if version.before("0.5.13") and topk > 1:
        return False, f"SGLang {version} overlaps speculation only with topk 1"
    if version.before("0.5.14") and v2 is not None and not truthy(v2):
        return False, "SGLANG_ENABLE_SPEC_V2 is off"
    return wanted, None


def _strategy(
    args: Mapping[str, ArgValue],
    version: Version,
    model: ModelConfig | None,
    spec: bool,
    radix: bool,
    overlap: bool,
) -> tuple[str | None, bool, bool, str | None]:
    """(strategy, radix cache on, overlap on, the rule that changed one of them) for a hybrid model."""
    asked = _text(args, "mamba_radix_cache_strategy") or "auto"
    if version.before("0.5.7"):
        asked = "no_buffer"
    if not radix:
        return None, False, overlap, None
    if asked != "auto":
        strategy, why = asked, None
    elif version.before("0.5.14"):
        strategy, why = "no_buffer", "auto means no_buffer up to 0.5.13"
    else:
        paged = (_whole(args, "page_size") or 1) > 1
        fits = (model is None or model.supports_extra_buffer) and args.get("linear_attn_backend", "triton") == "triton"
        strategy = "extra_buffer" if (overlap or paged) and fits else "no_buffer"
        why = "auto takes extra_buffer where overlap or pages allow it and the model supports it"
    if strategy != "no_buffer":
        return strategy, True, overlap, why
    if spec and version.at_least("0.5.9") and version.before("0.5.10"):
        return None, False, overlap, f"SGLang {version} turns the radix cache off under speculation with no_buffer"
    if version.before("0.5.14") and not spec:
        return strategy, True, False, "no_buffer does not overlap"
    if version.at_least("0.5.14") and asked == "auto":
        return strategy, True, False, why
    if spec and version.before("0.5.9"):
        return strategy, True, False, "no_buffer does not overlap"
    return strategy, True, overlap, why


def _ssm_dtype(
    args: Mapping[str, ArgValue],
    env: Mapping[str, str | Secret],
    version: Version,
    model: ModelConfig | None,
    replay: bool,
) -> tuple[str, str]:
    if given := _text(args, "mamba_ssm_dtype"):
        return given, "as given"
    if isinstance(named := env.get("SGLANG_MAMBA_SSM_DTYPE"), str) and version.at_least("0.5.9"):
        return named, "from SGLANG_MAMBA_SSM_DTYPE"
    if version.before("0.5.9"):
        return "float32", f"the default of SGLang {version}"
    if replay:
        return "float32", "replay of the draft needs float32 where nothing is given"
    if model and model.linear and model.linear.ssm_dtype:
        return model.linear.ssm_dtype, "from the model's config.json (mamba_ssm_dtype)"
    return "float32", "the default where config.json says nothing"


def _by_gpu(gpu_mib: float | None, tp: int) -> tuple[int, int]:
    """(chunked_prefill_size, largest decode graph) by the GPU's memory (memory_hook.py:60-165)."""
    wide = tp >= 4
    if gpu_mib is None:
        return 4096, 160
    if gpu_mib < 20 * 1024:
        return 2048, 8
    if gpu_mib < 35 * 1024:
        return 4096, 160 if wide else 48
    if gpu_mib < 60 * 1024:
        return 4096, 160 if wide else 32
    if gpu_mib < 160 * 1024:
        return 8192, 512 if wide else 256
    return 16384, 512


def prefill_graph_sizes(largest: int) -> tuple[int, ...]:
    """Token counts of the prefill graphs up to `largest` (cuda_graph_hook.py)."""
    sizes = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
    ]
    sizes += range(4608, largest + 1, 512)
    return tuple(s for s in sizes if s <= largest)


def automatic_fraction(
    version: Version,
    gpu_mib: float,
    chunk: int,
    decode_max_bs: int,
    prefill_graphs: bool,
    algorithm: str | None,
    tp: int,
    pp: int,
    attn_dp: int,
    multimodal: bool,
    *,
    vision_hidden: int,
) -> float:
    """mem_fraction_static where it is not given (server_args.py up to 0.5.18, memory_hook.py:282-345 after).

    gpu_mib: the smallest total memory that nvidia-smi reports, MiB.
    """
    reserved = 512 + max(chunk if chunk > 0 else 16384, 2048) * 1.5 + 1024 * tp * pp / 8 + 2 * decode_max_bs
    if attn_dp > 1:
        reserved += decode_max_bs * attn_dp * (3 + (1.5 if decode_max_bs > 300 else 0))
    if prefill_graphs:
        reserved += 8 * len(prefill_graph_sizes(chunk if version.at_least("0.5.14") else 4096))
    if gpu_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    if version.before("0.5.14") and algorithm is not None and algorithm != "NGRAM":
        reserved += 6144 if algorithm == "STANDALONE" else 2048 if version.before("0.5.10") else 4096
    fraction = round((gpu_mib - reserved) / gpu_mib, 3)
    if not multimodal:
        return fraction
    # Qwen's vision_config has no num_hidden_layers, so 24 layers are assumed whatever its depth.
    weight = 24 * vision_hidden**2 / (24 * 1024**2)
    return fraction * 0.95 * min(max(1 - 0.1 * (weight - 1), 0.8), 1.05)
