"""What is known to kill a launch, or to make it something else than was asked for, checked before anything is touched.

Each rule names the versions it holds for. Sources: server_args.py (to 0.5.18), arg_groups/{speculative,mamba,validation,attention}_hook.py
(0.5.19 on), configs/model_config.py, mem_cache/kv_cache_configurator.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mtpdeploy.inventory.values import ArgValue
from mtpdeploy.secret import Secret
from mtpdeploy.sglang.model import ModelConfig
from mtpdeploy.sglang.overrides import ADAPTIVE_STEPS, EAGLE_KIND, Settings, settle, truthy
from mtpdeploy.sglang.versions import Version

Severity = Literal["refuse", "warn", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """refuse: SGLang would not start, or not serve. warn: it starts as something else than was meant. note: good to know.

    fix: settings that would be right, to be set together; empty where a person must decide.
    """

    severity: Severity
    rule: str
    message: str
    fix: Mapping[str, ArgValue] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return {"severity": self.severity, "rule": self.rule, "message": self.message, "fix": dict(self.fix)}


@dataclass(frozen=True, slots=True)
class _Launch:
    args: Mapping[str, ArgValue]
    env: Mapping[str, str | Secret]
    version: Version
    model: ModelConfig | None
    settings: Settings

    def whole(self, name: str, default: int | None = None) -> int | None:
        value = self.args.get(name, default)
        return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def text(self, name: str) -> str | None:
        value = self.args.get(name)
        return value if isinstance(value, str) else None

    @property
    def hybrid(self) -> bool:
        """Unknown models are judged as hybrids only where a hybrid's own flag is given."""
        if self.model is not None:
            return self.model.hybrid
        return any(self.args.get(n) is not None for n in ("mamba_radix_cache_strategy", "max_mamba_cache_size"))


_Rule = Callable[[_Launch], Iterator[Finding]]


def check(
    args: Mapping[str, ArgValue],
    env: Mapping[str, str | Secret],
    version: Version,
    model: ModelConfig | None = None,
    gpu_memory_gb: float | None = None,
) -> tuple[Finding, ...]:
    """All findings, the worst first. args: canonical names with the values' own types."""
    settings, _ = settle(args, env, version, model, gpu_memory_gb)
    launch = _Launch(args, env, version, model, settings)
    found = [finding for rule in _RULES for finding in rule(launch)]
    order = {"refuse": 0, "warn": 1, "note": 2}
    return tuple(sorted(found, key=lambda f: order[f.severity]))


def _speculative_parameters(launch: _Launch) -> Iterator[Finding]:
    s, v = launch.settings, launch.version
    steps, topk, draft = (launch.whole(f"speculative_{n}") for n in ("num_steps", "eagle_topk", "num_draft_tokens"))
    if s.algorithm is None:
        if given := [
            n for n, x in (("num_steps", steps), ("eagle_topk", topk), ("num_draft_tokens", draft)) if x is not None
        ]:
            yield Finding(
                "warn",
                "speculation-off",
                f"speculative_{given[0]} is set and speculative_algorithm is not: no SGLang version speculates then",
                {"speculative_algorithm": "NEXTN"},
            )
        return
    if s.algorithm not in EAGLE_KIND:
        return
    if steps is None and not (s.adaptive and draft is None) and (topk is not None or draft is not None):
        wanted = draft - 1 if draft else 3
        yield Finding(
            "refuse",
            "steps-missing",
            f"speculative_eagle_topk or speculative_num_draft_tokens without speculative_num_steps: every version up to {v} stops "
            f"with an AssertionError without text; give all three (such as {wanted}, 1, {wanted + 1}) or none",
            {"speculative_num_steps": wanted, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": wanted + 1},
        )
    elif steps is not None and topk is None and not s.adaptive:
        yield Finding(
            "refuse",
            "topk-missing",
            "speculative_num_steps without speculative_eagle_topk: SGLang compares None with 1 and stops with a TypeError "
            "(all versions); give all three or none",
            {"speculative_num_steps": steps, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": steps + 1},
        )
    elif topk is not None and topk > 1 and draft is None:
        yield Finding(
            "refuse",
            "draft-tokens-missing",
            f"speculative_eagle_topk {topk} needs speculative_num_draft_tokens: only with topk 1 SGLang knows it (steps + 1)",
        )
    if topk == 1 and steps is not None and draft is not None and draft != steps + 1:
        yield Finding(
            "note",
            "draft-tokens-adjusted",
            f"with topk 1 every version uses steps + 1 = {steps + 1} draft tokens; the {draft} asked for have no effect",
            {"speculative_num_draft_tokens": steps + 1},
        )
    if topk is not None and topk > 1:
        if v.before("0.5.11") and truthy(launch.env.get("SGLANG_ENABLE_SPEC_V2")):
            yield Finding(
                "refuse",
                "topk-spec-v2",
                f"SGLang {v} with SGLANG_ENABLE_SPEC_V2=1 takes topk 1 only (ValueError)",
                {"speculative_eagle_topk": 1},
            )
        if "trtllm_mha" in (launch.text(f"{p}attention_backend") for p in ("", "decode_", "prefill_")):
            yield Finding(
                "refuse",
                "topk-trtllm",
                "trtllm_mha takes topk 1 only (ValueError, all versions)",
                {"speculative_eagle_topk": 1},
            )
        backends = ("flashinfer", "fa3") if v.before("0.5.13") else ("flashinfer", "fa3", "triton")
        if s.page_size > 1 and (backend := launch.text("attention_backend")) and backend not in backends:
            yield Finding(
                "refuse",
                "topk-page-size",
                f"topk {topk} with page_size {s.page_size} works with {' or '.join(backends)} only, not {backend} (ValueError)",
                {"page_size": 1},
            )


def _algorithm(launch: _Launch) -> Iterator[Finding]:
    s, v, model = launch.settings, launch.version, launch.model
    if s.algorithm is None:
        return
    known = ["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"]
    since = {"DFLASH": "0.5.11", "FROZEN_KV_MTP": "0.5.12", "DSPARK": "0.5.16", "UNO": "0.5.20"}
    known += [name for name, first in since.items() if v.at_least(first)]
    if s.algorithm not in known:
        close = difflib.get_close_matches(s.algorithm, known, n=1, cutoff=0.5)
        fix: dict[str, ArgValue] = {"speculative_algorithm": close[0]} if close else {}
        yield Finding(
            "refuse" if close else "warn",
            "unknown-algorithm",
            f"speculative_algorithm {s.algorithm}: SGLang {v} knows {', '.join(known)}"
            + (f" (did you mean {close[0]}?)" if close else "; anything else must come from a plugin"),
            fix,
        )
    if s.algorithm == "EAGLE" and model is not None and not model.mtp_layers and not s.draft_path:
        yield Finding(
            "refuse",
            "no-draft",
            f"{model.architecture}'s config.json has no MTP layer (mtp_num_hidden_layers), and no speculative_draft_model_path is given: "
            "there is nothing to draft with",
        )
    prefill_node = launch.text("disaggregation_mode") == "prefill"
    if s.pp > 1 and (v.before("0.5.21") or not (prefill_node or truthy(launch.env.get("SGLANG_ENABLE_PP_SPEC")))):
        yield Finding(
            "refuse",
            "pipeline-speculation",
            f"pp_size {s.pp} with speculation is an AssertionError: never allowed up to 0.5.20, later on prefill nodes or with "
            f"SGLANG_ENABLE_PP_SPEC=1 (this is {v})",
            {"pp_size": 1},
        )
    if launch.text("kv_cache_dtype") == "nvfp4":
        yield Finding(
            "warn",
            "nvfp4-speculation",
            "speculation with kv_cache_dtype nvfp4 is known to crash (sglang #36001); fp8_e4m3 works",
            {"kv_cache_dtype": "fp8_e4m3"},
        )


def _strategy(launch: _Launch) -> Iterator[Finding]:
    s, v = launch.settings, launch.version
    if not launch.hybrid:
        return
    asked = launch.text("mamba_radix_cache_strategy") or "auto"
    option = "mamba_scheduler_strategy" if v.before("0.5.14") else "mamba_radix_cache_strategy"
    radix_off = bool(launch.args.get("disable_radix_cache"))
    buffered = asked in ("extra_buffer", "extra_buffer_lazy")
    middle = v.at_least("0.5.10") and v.before("0.5.14")
    if middle and s.algorithm and not radix_off and not buffered:
        yield Finding(
            "refuse",
            "no-buffer-speculation",
            f"{option} {asked}{' (which is no_buffer up to 0.5.13)' if asked == 'auto' else ''} with speculation and the radix cache: "
            f"SGLang 0.5.10 to 0.5.13 stop with a ValueError (this is {v}); set extra_buffer, or disable_radix_cache",
            {"mamba_radix_cache_strategy": "extra_buffer"},
        )
    if middle and buffered and radix_off:
        yield Finding(
            "refuse",
            "extra-buffer-radix-off",
            f"{option} {asked} with disable_radix_cache: SGLang 0.5.10 to 0.5.13 stop with a ValueError (this is {v}); "
            "set no_buffer, which overlaps without the radix cache",
            {"mamba_radix_cache_strategy": "no_buffer"},
        )
    if v.at_least("0.5.9") and v.before("0.5.10") and s.algorithm and not radix_off and not buffered:
        yield Finding(
            "warn",
            "radix-cache-dropped",
            f"SGLang {v} turns the radix cache off without a word where speculation meets {option} {asked}; extra_buffer keeps it",
            {"mamba_radix_cache_strategy": "extra_buffer"},
        )
    if v.at_least("0.5.14") and asked == "no_buffer" and not radix_off:
        if not launch.args.get("disable_overlap_schedule"):
            yield Finding(
                "refuse",
                "no-buffer-overlap",
                f"{option} no_buffer needs disable_overlap_schedule from 0.5.14 on (AssertionError in {v}); extra_buffer overlaps",
                {"mamba_radix_cache_strategy": "extra_buffer"},
            )
        if s.page_size != 1:
            yield Finding(
                "refuse",
                "no-buffer-page-size",
                f"{option} no_buffer takes page_size 1 only from 0.5.14 on, not {s.page_size} (AssertionError)",
                {"page_size": 1},
            )
        if launch.text("attention_backend") == "trtllm_mha":
            yield Finding(
                "refuse",
                "no-buffer-trtllm",
                f"{option} no_buffer does not go with attention_backend trtllm_mha (AssertionError from 0.5.14 on)",
                {"mamba_radix_cache_strategy": "extra_buffer"},
            )
    if asked == "extra_buffer_lazy" and not radix_off:
        if v.before("0.5.14") and v.at_least("0.5.13") and s.algorithm:
            yield Finding(
                "refuse",
                "lazy-speculation",
                f"extra_buffer_lazy works with speculation from 0.5.14 on; {v} stops with an AssertionError",
                {"mamba_radix_cache_strategy": "extra_buffer"},
            )
        if not s.overlap:
            yield Finding(
                "refuse",
                "lazy-overlap",
                "extra_buffer_lazy needs the overlap scheduler (AssertionError)",
                {"mamba_radix_cache_strategy": "extra_buffer"},
            )
        if launch.text("disaggregation_mode") not in (None, "null"):
            yield Finding(
                "refuse",
                "lazy-disaggregation",
                "extra_buffer_lazy does not go with prefill/decode disaggregation (AssertionError)",
                {"mamba_radix_cache_strategy": "extra_buffer"},
            )
    if buffered and not radix_off:
        yield from _extra_buffer(launch, asked)
    if asked in ("auto", "no_buffer") and v.before("0.5.14") and not s.algorithm and not radix_off:
        yield Finding(
            "note",
            "overlap-off",
            f"SGLang {v} runs {option} {asked} without the overlap scheduler; extra_buffer overlaps at two state slots a request more",
            {"mamba_radix_cache_strategy": "extra_buffer"},
        )


def _extra_buffer(launch: _Launch, asked: str) -> Iterator[Finding]:
    s, v, model = launch.settings, launch.version, launch.model
    if model is not None and not model.supports_extra_buffer:
        yield Finding(
            "refuse",
            "extra-buffer-architecture",
            f"{asked} is not supported for {model.architecture} (AssertionError); no_buffer with disable_overlap_schedule is",
            {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
        )
    if v.at_least("0.5.14") and (backend := launch.text("linear_attn_backend")) not in (None, "triton"):
        yield Finding(
            "refuse",
            "extra-buffer-backend",
            f"{asked} needs linear_attn_backend triton, not {backend} (AssertionError from 0.5.14 on)",
            {"linear_attn_backend": "triton"},
        )
    interval = launch.whole("mamba_track_interval", 256) or 256
    if s.draft_tokens and interval < s.draft_tokens:
        yield Finding(
            "refuse",
            "track-interval",
            f"mamba_track_interval {interval} is smaller than the {s.draft_tokens} draft tokens: AssertionError without text; "
            "at least the number of draft tokens",
            {"mamba_track_interval": 256},
        )
    if interval % s.page_size:
        yield Finding(
            "refuse",
            "track-interval-page",
            f"mamba_track_interval {interval} is no multiple of page_size {s.page_size}: AssertionError without text",
            {"mamba_track_interval": max(1, 256 // s.page_size) * s.page_size},
        )
    if v.before("0.5.14") and max(64, s.page_size) % min(64, s.page_size):
        yield Finding(
            "refuse",
            "page-size-chunk",
            f"page_size {s.page_size} neither divides 64 nor is a multiple of it: AssertionError with extra_buffer",
            {"page_size": 64},
        )


def _slots(launch: _Launch) -> Iterator[Finding]:
    s, v = launch.settings, launch.version
    slots = s.requested_slots
    if slots is None or not launch.hybrid:
        return
    if v.before("0.5.7") and s.radix:
        yield Finding(
            "warn",
            "slots-ignored",
            f"SGLang {v} overwrites max_mamba_cache_size where the radix cache is on: it is computed from mamba_full_memory_ratio",
        )
        return
    each, own = s.slots_per_request, slots // s.attn_dp
    serves = own // each
    wanted = s.requested_running // s.attn_dp if s.requested_running is not None else None
    if serves < 1:
        ends = "stops with a RuntimeError" if v.at_least("0.5.13") else "would serve no request"
        yield Finding(
            "refuse",
            "slots-too-few",
            f"max_mamba_cache_size {slots}{f' over {s.attn_dp} attention-DP workers' if s.attn_dp > 1 else ''} is less than the {each} state "
            f"slots of one request ({_why_slots(s)}): SGLang {v} {ends}",
            {"max_mamba_cache_size": each * s.attn_dp},
        )
    elif wanted is None or serves < wanted:
        asked = (
            "any number"
            if wanted is None
            else f"the default {wanted} requests"
            if s.running_is_default
            else f"{wanted} requests"
        )
        extra = ""
        if s.algorithm and v.at_least("0.5.9") and v.before("0.5.13") and wanted:
            extra = f"; SGLang {v} sets memory aside for the states of all {wanted} all the same, and leaves it unused"
        yield Finding(
            "warn",
            "slots-cap-running",
            f"max_mamba_cache_size {slots} at {each} state slots a request ({_why_slots(s)}) serves {serves} at once, not {asked}: "
            f"the rest queues{extra}. Raise both together: {each} slots for each request",
            {"max_running_requests": 16 * s.attn_dp, "max_mamba_cache_size": 16 * each * s.attn_dp},
        )


def _why_slots(s: Settings) -> str:
    if not s.radix:
        return "radix cache off"
    return f"{s.strategy or 'no_buffer'}, overlap {'on' if s.overlap else 'off'}"


def _speculation_v2(launch: _Launch) -> Iterator[Finding]:
    s, v = launch.settings, launch.version
    value = launch.env.get("SGLANG_ENABLE_SPEC_V2")
    if s.algorithm not in EAGLE_KIND:
        return
    if v.before("0.5.11") and not truthy(value) and s.topk == 1:
        slots = ", and a request takes 4 state slots instead of 5" if s.strategy == "extra_buffer" else ""
        yield Finding(
            "warn",
            "spec-v2-off",
            f"SGLang {v} speculates without the overlap scheduler unless SGLANG_ENABLE_SPEC_V2=1 is in its environment{slots}",
            {"env.SGLANG_ENABLE_SPEC_V2": "1"},
        )
    if v.at_least("0.5.11") and v.before("0.5.14") and value is not None and not truthy(value):
        yield Finding(
            "warn",
            "spec-v2-off",
            f"SGLANG_ENABLE_SPEC_V2={value} turns the overlap scheduler off in {v}",
            {"env.SGLANG_ENABLE_SPEC_V2": "1"},
        )
    if v.at_least("0.5.14") and value is not None:
        yield Finding("note", "spec-v2-gone", f"SGLANG_ENABLE_SPEC_V2 has no effect from 0.5.14 on (this is {v})")


def _adaptive(launch: _Launch) -> Iterator[Finding]:
    s, v = launch.settings, launch.version
    if not launch.args.get("speculative_adaptive"):
        return
    if not s.adaptive:
        yield Finding(
            "warn",
            "adaptive-off",
            "speculative_adaptive is turned off by SGLang: it needs EAGLE or EAGLE3, topk 1 and no attention-DP",
        )
        return
    if (
        launch.text("speculative_adaptive_config") is None
        and (steps := launch.whole("speculative_num_steps")) is not None
        and steps not in ADAPTIVE_STEPS
    ):
        yield Finding(
            "refuse",
            "adaptive-steps",
            f"speculative_num_steps {steps} is none of the adaptive candidates {', '.join(map(str, ADAPTIVE_STEPS))} (ValueError in {v})",
            {"speculative_num_steps": 3},
        )
    if launch.hybrid:
        yield Finding(
            "warn",
            "adaptive-memory",
            f"adaptive speculation allocates intermediate states for {s.allocated_draft_tokens} draft tokens but budgets {s.draft_tokens}: "
            "the difference comes out of what mem_fraction_static leaves; lower the fraction",
        )


def _replay(launch: _Launch) -> Iterator[Finding]:
    s, v = launch.settings, launch.version
    if launch.args.get("enable_linear_replayssm_spec"):
        if s.algorithm and s.topk > 1:
            yield Finding(
                "refuse",
                "replay-topk",
                f"enable_linear_replayssm_spec needs topk 1, not {s.topk} (ValueError)",
                {"speculative_eagle_topk": 1},
            )
        if launch.args.get("enable_linear_replayssm"):
            yield Finding(
                "refuse",
                "replay-both",
                "enable_linear_replayssm and enable_linear_replayssm_spec exclude each other (ValueError)",
                {"enable_linear_replayssm": False},
            )
    if launch.args.get("enable_linear_replayssm") and s.strategy not in (None, "no_buffer"):
        yield Finding(
            "refuse",
            "replay-strategy",
            f"enable_linear_replayssm needs mamba_radix_cache_strategy no_buffer, and {s.strategy} is in force in {v} (ValueError)",
            {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
        )


def _model(launch: _Launch) -> Iterator[Finding]:
    s, v, model = launch.settings, launch.version, launch.model
    context = launch.whole("context_length")
    if model is None:
        return
    if context and context > model.context and not truthy(launch.env.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")):
        yield Finding(
            "refuse",
            "context-length",
            f"context_length {context} is more than the model's {model.context}: SGLang stops (all versions) unless "
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 is set, and then answers may be wrong",
            {"context_length": model.context},
        )
    if model.architecture.startswith("Qwen3_5"):
        if v.before("0.5.9"):
            yield Finding(
                "refuse",
                "architecture",
                f"{model.architecture} (Qwen3.5, 3.6, 3.8) is served from SGLang 0.5.9 on; {v} does not know it",
            )
        elif v.before("0.5.10"):
            yield Finding(
                "warn", "architecture-early", f"SGLang's recipes ask for 0.5.10 or newer for Qwen3.6; this is {v}"
            )
        if launch.args.get("language_model_only"):
            yield Finding(
                "refuse",
                "language-model-only",
                f"language_model_only is refused for {model.architecture} (ValueError)",
                {"language_model_only": False},
            )
    counts = {"attention heads": model.heads}
    if model.linear:
        counts |= {"linear value heads": model.linear.value_heads, "linear key heads": model.linear.key_heads}
    odd = [f"{count} {name}" for name, count in counts.items() if count % s.attn_tp]
    if odd:
        yield Finding("refuse", "tensor-parallel", f"tp_size {s.tp} does not divide the model's {', '.join(odd)}")


def _numbers(launch: _Launch) -> Iterator[Finding]:
    s, v = launch.settings, launch.version
    fraction = launch.args.get("mem_fraction_static")
    if isinstance(fraction, (int, float)) and not 0 < fraction < 1:
        yield Finding(
            "refuse",
            "fraction",
            f"mem_fraction_static {fraction}: a fraction between 0 and 1 would be right, such as 0.85",
        )
    chunk = launch.whole("chunked_prefill_size")
    if chunk and chunk > 0 and chunk % s.page_size:
        yield Finding(
            "refuse",
            "chunk-page-size",
            f"chunked_prefill_size {chunk} is no multiple of page_size {s.page_size} (AssertionError, all versions)",
            {"chunked_prefill_size": max(1, chunk // s.page_size) * s.page_size},
        )
    nodes = launch.whole("nnodes", 1) or 1
    if (s.tp * s.pp) % nodes:
        yield Finding(
            "refuse",
            "nodes",
            f"tp_size {s.tp} times pp_size {s.pp} is no multiple of nnodes {nodes} (AssertionError, all versions)",
        )
    if nodes > 1 and (launch.whole("dp_size", 1) or 1) > 1 and s.attn_dp == 1:
        yield Finding(
            "refuse",
            "data-parallel-nodes",
            "dp_size over several nodes is an AssertionError: run one server a node and a router before them",
        )
    rank = launch.whole("node_rank", 0) or 0
    if not 0 <= rank < nodes:
        yield Finding("refuse", "node-rank", f"node_rank {rank} is not below nnodes {nodes}")
    for name in ("port", "nccl_port"):
        port = launch.whole(name)
        if port is not None and not 0 < port < 65536:
            yield Finding("refuse", "port", f"{name} {port}: a number from 1 to 65535 would be right")
    for name in (
        "max_running_requests",
        "max_mamba_cache_size",
        "max_total_tokens",
        "tp_size",
        "speculative_num_steps",
        "speculative_num_draft_tokens",
    ):
        value = launch.whole(name)
        least = 0 if name == "speculative_num_steps" else 1
        if value is not None and value < least:
            yield Finding("refuse", "not-positive", f"{name} {value}: a whole number from {least} on would be right")
    if v.before("0.5.14") and s.algorithm and s.running_is_default and launch.whole("cuda_graph_max_bs_decode") is None:
        yield Finding(
            "note",
            "graphs-follow-default",
            f"SGLang {v} captures decode graphs up to the default batch, not up to the requests that can run: "
            "an explicit max_running_requests saves memory and start time",
        )


def _names(launch: _Launch) -> Iterator[Finding]:
    name = launch.text("served_model_name")
    if name and ":" in name:
        yield Finding(
            "refuse",
            "served-model-name",
            f"served_model_name {name!r} holds a colon, which SGLang refuses (all versions): what follows it selects a LoRA adapter",
            {"served_model_name": name.replace(":", "-")},
        )
    if launch.args.get("config") is not None:
        yield Finding(
            "warn",
            "config-file",
            "config: settings in that file are not seen here. SGLang reads `--config FILE` as two words only, keys there are spelled "
            "with dashes, and an empty value becomes the text None",
        )


def _environment(launch: _Launch) -> Iterator[Finding]:
    simulated = launch.env.get("SGLANG_SIMULATE_ACC_LEN")
    if isinstance(simulated, str) and simulated.strip() not in ("", "-1", "-1.0"):
        yield Finding(
            "warn",
            "simulated-acceptance",
            f"SGLANG_SIMULATE_ACC_LEN={simulated}: drafts are accepted whatever they say. The text is garbage and the numbers are fictitious",
        )


_RULES: tuple[_Rule, ...] = (
    _speculative_parameters,
    _algorithm,
    _strategy,
    _slots,
    _speculation_v2,
    _adaptive,
    _replay,
    _model,
    _numbers,
    _names,
    _environment,
)
