"""What a checkpoint's config.json says that decides memory: layers, heads, state shapes, parameter counts.

Covers hybrids of gated delta net and attention (Qwen3-Next, Qwen3.5/3.6/3.8), dense and mixture-of-experts decoders of the Llama
kind, and multi-head latent attention (DeepSeek V2/V3 kind). Any other architecture is refused by name: nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from mtpdeploy.errors import ConfigError

Family = Literal["hybrid", "dense", "moe", "mla"]

_FAMILIES: Mapping[str, Family] = {
    "Qwen3NextForCausalLM": "hybrid",
    "Qwen3_5ForConditionalGeneration": "hybrid",
    "Qwen3_5MoeForConditionalGeneration": "hybrid",
    "Qwen3_5ForCausalLM": "hybrid",
    "Qwen3_5MoeForCausalLM": "hybrid",
    "LlamaForCausalLM": "dense",
    "MistralForCausalLM": "dense",
    "Qwen2ForCausalLM": "dense",
    "Qwen3ForCausalLM": "dense",
    "Qwen2MoeForCausalLM": "moe",
    "Qwen3MoeForCausalLM": "moe",
    "MixtralForCausalLM": "moe",
    "DeepseekV2ForCausalLM": "mla",
    "DeepseekV3ForCausalLM": "mla",
}
# Classes that the mamba radix cache and extra_buffer accept (sglang/srt/arg_groups/overrides.py, _MAMBA_RADIX_CACHE_ARCHS).
_EXTRA_BUFFER = frozenset(
    {"Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
)
# Bytes per parameter of a quantized linear layer, scales included.
_QUANTIZED: Mapping[str, float] = {
    "fp8": 1.0 + 4 / (128 * 128),
    "w8a8_fp8": 1.0,
    "w8a8_int8": 1.0,
    "modelopt": 1.0,
    "modelopt_fp8": 1.0,
    "mxfp8": 1.0 + 1 / 32,
    "modelopt_fp4": 0.5 + 1 / 16,
    "nvfp4": 0.5 + 1 / 16,
    "nvfp4_online": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    "awq": 0.5 + 2.5 / 128,
    "awq_marlin": 0.5 + 2.5 / 128,
    "gptq": 0.5 + 2.5 / 128,
    "gptq_marlin": 0.5 + 2.5 / 128,
    "int4": 0.5 + 2.5 / 128,
}


@dataclass(frozen=True, slots=True)
class Linear:
    """The linear-attention layers of a hybrid: heads, head dimensions, convolution width."""

    layers: int
    value_heads: int
    key_heads: int
    value_dim: int
    key_dim: int
    kernel: int
    ssm_dtype: str | None  # what config.json says

    def conv_dim(self) -> int:
        """Channels of the causal convolution: value heads, and keys and queries (configs/mamba_utils.py)."""
        return self.value_heads * self.value_dim + 2 * self.key_heads * self.key_dim


@dataclass(frozen=True, slots=True)
class Experts:
    count: int
    intermediate: int
    shared_intermediate: int  # 0 without a shared expert
    dense_layers: int  # first layers without experts
    dense_intermediate: int


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: ranks and the parts of a head."""

    kv_rank: int
    q_rank: int | None
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Vision:
    depth: int
    hidden: int
    intermediate: int
    patch: int
    temporal_patch: int
    merge: int
    positions: int
    out: int
    channels: int

    def parameters(self) -> int:
        """A ViT of the Qwen3-VL kind: patch and position embedding, blocks with biases, one merger."""
        h, i = self.hidden, self.intermediate
        block = 4 * h * h + 4 * h + 2 * h * i + h + i + 4 * h
        wide = h * self.merge * self.merge
        merger = wide * wide + wide + wide * self.out + self.out + 2 * h
        patch = self.channels * self.temporal_patch * self.patch * self.patch * h + h
        return self.depth * block + merger + patch + self.positions * h


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One checkpoint. Counts are of the whole model; memory.py divides them over GPUs.

    full_layers: layers with a KV cache. mtp_layers: draft layers inside the checkpoint (0: none).
    dtype_bytes: of unquantized weights and of the KV cache by default. quantization: SGLang's name, None = none.
    checkpoint_bytes: the weight files' own size where it was read from the host (safetensors index), else None.
    """

    architecture: str
    family: Family
    layers: int
    full_layers: int
    hidden: int
    vocab: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    tied: bool
    gated_attention: bool
    qkv_bias: bool
    qk_norm: bool
    mtp_layers: int
    dtype: str
    quantization: str | None
    linear: Linear | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    vision: Vision | None = None
    checkpoint_bytes: int | None = None

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.dtype in ("float32", "float") else 2

    @property
    def hybrid(self) -> bool:
        return self.linear is not None

    @property
    def multimodal(self) -> bool:
        return self.vision is not None

    @property
    def supports_extra_buffer(self) -> bool:
        return self.architecture in _EXTRA_BUFFER

    @property
    def draft_architecture(self) -> str | None:
        """What the in-checkpoint draft calls itself in the log (configs/model_config.py)."""
        if not self.mtp_layers:
            return None
        return {
            "Qwen3NextForCausalLM": "Qwen3NextForCausalLMMTP",
            "DeepseekV3ForCausalLM": "DeepseekV3ForCausalLMNextN",
        }.get(self.architecture, "Qwen3_5ForCausalLMMTP")

    def with_checkpoint_bytes(self, total: int) -> ModelConfig:
        return replace(self, checkpoint_bytes=total)

    # Parameters

    def attention_parameters(self) -> int:
        """One full-attention layer."""
        h = self.hidden
        if latent := self.latent:
            head = latent.nope_dim + latent.rope_dim
            query = (
                h * latent.q_rank + latent.q_rank * (self.heads * head + 1) if latent.q_rank else h * self.heads * head
            )
            return (
                query
                + h * (latent.kv_rank + latent.rope_dim)
                + latent.kv_rank
                + latent.kv_rank * self.heads * (latent.nope_dim + latent.value_dim)
                + self.heads * latent.value_dim * h
            )
        q = self.heads * self.head_dim
        kv = 2 * self.kv_heads * self.head_dim
        total = h * q * (2 if self.gated_attention else 1) + h * kv + q * h
        return total + (q + kv if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)

    def linear_parameters(self) -> int:
        """One gated-delta-net layer: qkv, z, b and a projections, convolution, A_log, dt_bias, norm, output."""
        if (lin := self.linear) is None:
            return 0
        value = lin.value_heads * lin.value_dim
        return (
            self.hidden * (lin.conv_dim() + value + 2 * lin.value_heads)
            + lin.conv_dim() * lin.kernel
            + 2 * lin.value_heads
            + lin.value_dim
            + value * self.hidden
        )

    def mlp_parameters(self, layer: int) -> int:
        if (experts := self.experts) is None:
            return 3 * self.hidden * self.intermediate
        if layer < experts.dense_layers:
            return 3 * self.hidden * experts.dense_intermediate
        shared = 3 * self.hidden * experts.shared_intermediate + (self.hidden if experts.shared_intermediate else 0)
        return self.hidden * experts.count + 3 * self.hidden * experts.intermediate * experts.count + shared

    def embedding_parameters(self) -> int:
        """Embedding and output head; the same tensor where they are tied."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    def layer_parameters(self) -> int:
        """All decoder layers of the target with their norms, and the last norm."""
        linear = self.linear.layers if self.linear else 0
        mlps = sum(self.mlp_parameters(n) for n in range(self.layers))
        return (
            self.full_layers * self.attention_parameters()
            + linear * self.linear_parameters()
            + mlps
            + (2 * self.layers + 1) * self.hidden
        )

    def draft_layer_parameters(self) -> int:
        """The MTP module: the projection of hidden state and embedding, its layers, its norms."""
        if not self.mtp_layers:
            return 0
        one = self.attention_parameters() + self.mlp_parameters(self.layers) + 2 * self.hidden
        return 2 * self.hidden * self.hidden + self.mtp_layers * one + 3 * self.hidden

    # Reading

    @classmethod
    def from_json(cls, config: Mapping[str, object], source: str = "config.json") -> ModelConfig:
        """Raises ConfigError naming the architecture or the missing key."""
        names = config.get("architectures")
        architecture = str(names[0]) if isinstance(names, list) and names else str(config.get("model_type", "unnamed"))
        family = _FAMILIES.get(architecture)
        if family is None:
            raise ConfigError(
                f"{source}: the memory of {architecture} is not known; known are {', '.join(sorted(_FAMILIES))}. "
                "Without a known architecture nothing is computed rather than guessed",
                details={"architecture": architecture},
            )
        nested = config.get("text_config")
        text: Mapping[str, object] = nested if isinstance(nested, Mapping) else config

        def whole(name: str, default: int | None = None) -> int:
            value = text.get(name, config.get(name))
            if value is None and default is not None:
                return default
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{source}: {name} is {value!r}; a whole number would be right")
            return value

        layers, hidden, heads = whole("num_hidden_layers"), whole("hidden_size"), whole("num_attention_heads")
        linear = None
        full = layers
        if family == "hybrid":
            kinds = text.get("layer_types")
            full = (
                sum(1 for k in kinds if k == "full_attention")
                if isinstance(kinds, list) and kinds
                else layers // whole("full_attention_interval", 4)
            )
            linear = Linear(
                layers=layers - full,
                value_heads=whole("linear_num_value_heads"),
                key_heads=whole("linear_num_key_heads"),
                value_dim=whole("linear_value_head_dim"),
                key_dim=whole("linear_key_head_dim"),
                kernel=whole("linear_conv_kernel_dim"),
                ssm_dtype=str(v) if (v := text.get("mamba_ssm_dtype")) else None,
            )
        method = _quantization(config, text)
        qwen3 = architecture.startswith(("Qwen3", "Qwen3_5"))
        mtp = whole(
            "mtp_num_hidden_layers",
            whole("num_nextn_predict_layers", 1 if architecture == "Qwen3NextForCausalLM" else 0),
        )
        return cls(
            architecture=architecture,
            family=family,
            layers=layers,
            full_layers=full,
            hidden=hidden,
            vocab=whole("vocab_size"),
            intermediate=whole("intermediate_size", 0),
            heads=heads,
            kv_heads=whole("num_key_value_heads", heads),
            head_dim=whole("head_dim", hidden // heads),
            context=whole("max_position_embeddings"),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            gated_attention=family == "hybrid" and bool(text.get("attn_output_gate", True)),
            qkv_bias=bool(text.get("attention_bias", architecture.startswith("Qwen2"))),
            qk_norm=qwen3,
            mtp_layers=mtp,
            dtype=str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16"),
            quantization=method,
            linear=linear,
            experts=_experts(text, layers, family),
            latent=_latent(text, whole) if family == "mla" else None,
            vision=_vision(config.get("vision_config"), hidden),
        )

    @classmethod
    def read(cls, path: str | Path) -> ModelConfig:
        """From a config.json, or the folder that holds it; exact weight bytes from a safetensors index beside it."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            data = json.loads(file.read_text())
        except FileNotFoundError:
            raise ConfigError(
                f"{file}: no such file; --model-config takes a model's config.json or its folder"
            ) from None
        except (OSError, ValueError) as wrong:
            raise ConfigError(f"{file}: cannot be read as JSON: {wrong}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{file}: holds no JSON object; a model's config.json would be right")
        model = cls.from_json(data, str(file))
        index = file.with_name("model.safetensors.index.json")
        if index.is_file():
            try:
                total = json.loads(index.read_text())["metadata"]["total_size"]
            except (OSError, ValueError, KeyError, TypeError):
                return model
            return model.with_checkpoint_bytes(int(total))
        return model


def _quantization(config: Mapping[str, object], text: Mapping[str, object]) -> str | None:
    found = config.get("quantization_config") or text.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method") or found.get("quant_algo") or "unknown").lower()
    algorithm = str(found.get("quant_algo") or "").upper()
    if "FP4" in algorithm:
        method = "modelopt_fp4"
    elif method == "modelopt" and "FP8" in algorithm:
        method = "modelopt_fp8"
    elif method == "compressed-tensors":
        groups = found.get("config_groups")
        weights = (
            [g.get("weights", {}) for g in groups.values() if isinstance(g, Mapping)]
            if isinstance(groups, Mapping)
            else []
        )
        bits = {f"{w.get('num_bits')} {w.get('type')}" for w in weights if isinstance(w, Mapping)}
        named = {"8 float": "fp8", "8 int": "w8a8_int8", "4 float": "nvfp4", "4 int": "int4"}
        method = named.get(bits.pop(), method) if len(bits) == 1 else method
    return method


def _experts(text: Mapping[str, object], layers: int, family: Family) -> Experts | None:
    def number(*names: str) -> int:
        return next((v for n in names if isinstance(v := text.get(n), int)), 0)

    count = number("num_experts", "n_routed_experts", "num_local_experts")
    if not count:
        return None
    intermediate = number("moe_intermediate_size") or number("intermediate_size")
    shared = number("shared_expert_intermediate_size") or number("n_shared_experts") * intermediate
    return Experts(
        count,
        intermediate,
        shared,
        number("first_k_dense_replace") if family == "mla" else 0,
        number("intermediate_size"),
    )


def _latent(text: Mapping[str, object], whole: object) -> Latent:
    assert callable(whole)
    rank = text.get("q_lora_rank")
    return Latent(
        kv_rank=whole("kv_lora_rank"),
        q_rank=rank if isinstance(rank, int) else None,
        rope_dim=whole("qk_rope_head_dim"),
        nope_dim=whole("qk_nope_head_dim"),
        value_dim=whole("v_head_dim"),
    )


def _vision(config: object, hidden: int) -> Vision | None:
    if not isinstance(config, Mapping):
        return None

    def number(name: str, default: int) -> int:
        value = config.get(name, default)
        return value if isinstance(value, int) else default

    return Vision(
        depth=number("depth", 27),
        hidden=number("hidden_size", 1152),
        intermediate=number("intermediate_size", 4304),
        patch=number("patch_size", 16),
        temporal_patch=number("temporal_patch_size", 2),
        merge=number("spatial_merge_size", 2),
        positions=number("num_position_embeddings", 2304),
        out=number("out_hidden_size", hidden),
        channels=number("in_channels", 3),
    )


def bytes_per_weight(quantization: str | None, dtype_bytes: int) -> float | None:
    """Of a linear layer, scales included; None: this quantization's size is not known."""
    return float(dtype_bytes) if quantization in (None, "unquant", "auto") else _QUANTIZED.get(quantization)


@lru_cache(maxsize=8)
def shipped(name: str) -> ModelConfig:
    """A model whose shape comes with mtpdeploy, such as `qwen3.6-27b`."""
    return ModelConfig.read(Path(__file__).with_name("models") / f"{name}.json")


def recognise(model_path: str) -> tuple[ModelConfig, str] | None:
    """The shipped shape that a model path's last part names, and what was assumed; None: not one of them."""
    last = model_path.rstrip("/").rsplit("/", 1)[-1].lower()
    plain = (
        last.replace("_", ".").replace("qwen36", "qwen3.6").replace("qwen35", "qwen3.5").replace("qwen38", "qwen3.8")
    )
    for series in ("qwen3.6-27b", "qwen3.5-27b", "qwen3.8-27b"):
        if plain.startswith(series):
            rest = plain.removeprefix(series)
            model = shipped("qwen3.6-27b")
            method = "fp8" if "fp8" in rest else "modelopt_fp4" if "fp4" in rest else None
            if rest and method is None and rest not in ("-instruct", "-base"):
                return None
            return replace(
                model, quantization=method
            ), f"the shape of {model_path} is the published one of Qwen3.6-27B, judged by its name"
    return None
