"""The memory budget, held against real logs, against SGLang's own arithmetic, and against itself."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import SETTINGS

from mtpdeploy.errors import ConfigError, PlanRefused
from mtpdeploy.sglang import model as model_module
from mtpdeploy.sglang.command import parse
from mtpdeploy.sglang.memory import allocate, budget, fit, state_bytes
from mtpdeploy.sglang.model import ModelConfig, recognise, shipped
from mtpdeploy.sglang.overrides import settle
from mtpdeploy.sglang.versions import RELEASES, Version

V = Version.parse
MODEL = shipped("qwen3.6-27b")
STORY = {"model_path": "m", **SETTINGS}
SLOT = 153_944_064 / 2**30
ON = {"SGLANG_ENABLE_SPEC_V2": "1"}


def without(*names):
    return {k: v for k, v in STORY.items() if k not in names}


# Real SGLang 0.5.17 on an H200 with 92.82 GB free before the load, dummy weights of the 27B's shape.
# (command, running, slots, conv, ssm, intermediate ssm, KV tokens, K+V, draft KV, free after the pools, free at the end)
MTP = "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
LEAN = "--disable-prefill-cuda-graph --skip-server-warmup --mem-fraction-static 0.85 --mamba-scheduler-strategy extra_buffer"
REAL = {
    "A": (f"{MTP} --mamba-scheduler-strategy extra_buffer --max-mamba-cache-size 24 --mem-fraction-static 0.85",
          4, 24, 0.07, 3.52, 2.81, 259066, 15.82, 0.98, 12.95, 14.47),
    "B2": (f"{LEAN} --max-mamba-cache-size 24 --mamba-full-memory-ratio 0.4", 4, 24, 0.07, 3.52, 0, 396637, 24.20, 0, 13.87, 13.62),
    "B": (f"{LEAN} --max-running-requests 64", 18, 90, 0.25, 12.80, 0, 241604, 14.74, 0, 13.91, 13.61),
    "C": (f"{MTP} {LEAN} --max-mamba-cache-size 80 --mamba-full-memory-ratio 0.4", 16, 80, 0.22, 11.39, 9.56, 14770, 0.90, 0.06, 13.91, 17.75),
    "D": (f"{MTP} {LEAN} --max-mamba-cache-size 80 --mamba-ssm-dtype bfloat16", 16, 80, 0.22, 5.70, 4.78, 186417, 11.38, 0.72, 13.23, 17.06),
    "I": (f"{MTP} {LEAN} --mamba-full-memory-ratio 0.4", 4, 21, 0.06, 3.09, 2.81, 266112, 16.24, 1.02, 12.92, 17.21),
}  # fmt: skip
OFF = "--disable-prefill-cuda-graph --mamba-ssm-dtype bfloat16"
LATER = {
    # The radix cache off: one slot a request.
    "mtp-tuned": (f"{MTP} {OFF} --mem-fraction-static 0.92 --disable-radix-cache --max-running-requests 64",
                  64, 64, 1, 0.18, 4.57, 18.28, 82273, 5.02, 0.32, 7.36, 9.40),
    "baseline-tuned": (f"{OFF} --mem-fraction-static 0.85 --disable-radix-cache --max-running-requests 64",
                       64, 64, 1, 0.18, 4.57, 0, 377558, 23.04, 0, 13.83, 13.33),
    "mtp-radix": (f"{MTP} {OFF} --mem-fraction-static 0.92 --mamba-scheduler-strategy extra_buffer"
                  " --max-mamba-cache-size 160 --max-running-requests 32",
                  32, 160, 5, 0.44, 11.32, 9.28, 120577, 7.36, 0.46, 7.10, 10.33),
    # Replayed drafts: no intermediate states, a ring of 0.195 GB.
    "mtp-replay": (f"{MTP} --disable-prefill-cuda-graph --mem-fraction-static 0.92 --disable-radix-cache"
                   " --max-running-requests 64 --enable-linear-replayssm-spec",
                   64, 64, 1, 0.18, 9.14, 0, 315419, 19.26, 1.20, 5.72, 7.76),
}  # fmt: skip

# The same card and shape without CUDA graphs: (command, running, slots, slots a request, conv, ssm, intermediate ssm,
# intermediate conv, ring, KV tokens, K+V, draft KV, free after the pools, free at the end, what binds)
MODES = {
    "lazy": ("--mamba-radix-cache-strategy extra_buffer_lazy",
             8, 34, 4, 0.10, 4.92, 5.06, 0.05, 0, 197992, 12.08, 0.76, 13.16, 17.80, "state_slots"),
    "replay": ("--mamba-radix-cache-strategy extra_buffer --enable-linear-replayssm-spec --max-mamba-cache-size 40 --max-running-requests 8",
               8, 40, 5, 0.11, 5.77, 0, 0.05, 0.122, 266448, 16.26, 1.02, 12.79, 17.42, "max_running_requests"),
    "radixoff": ("--disable-radix-cache --max-running-requests 8",
                 8, 8, 1, 0.02, 1.27, 5.06, 0.05, 0, 259066, 15.82, 0.98, 12.97, 17.59, "max_running_requests"),
    # Adaptive: set aside for the 4 drafts that were asked for, allocated for the 8 of the longest candidate.
    "adaptive": ("--mamba-radix-cache-strategy extra_buffer --max-mamba-cache-size 24 --speculative-adaptive",
                 4, 24, 5, 0.07, 3.52, 5.62, 0.05, 0, 259066, 15.82, 0.98, 10.12, 14.76, "state_slots"),
}  # fmt: skip


def near(value):
    """2 %, or what two printed decimals can hide."""
    return pytest.approx(value, rel=0.02, abs=0.0051)


@pytest.mark.parametrize("run", [*REAL, *LATER])
def test_the_budget_is_what_a_real_server_allocated(run):
    figures = LATER[run] if run in LATER else (*REAL[run][:3], 5, *REAL[run][3:])
    command, running, slots, each, conv, ssm, intermediate, tokens, kv, draft_kv, after_pools, end = figures
    args = parse(f"python -m sglang.launch_server --model-path m {command}", V("0.5.17")).args
    pools = allocate(args, {}, V("0.5.17"), MODEL, 97.0, 92.82)
    assert pools.failure is None
    assert (pools.max_running, pools.slots, pools.slots_per_request) == (running, slots, each)
    assert (pools.conv_gb, pools.ssm_gb, pools.intermediate_ssm_gb) == (near(conv), near(ssm), near(intermediate))
    assert pools.kv_tokens == pytest.approx(tokens, abs=max(200, 0.005 * tokens))
    assert pools.k_gb + pools.v_gb == near(kv)
    assert pools.draft_kv_gb == near(draft_kv)
    assert pools.weights_gb == pytest.approx(51.05, rel=0.02)
    assert pools.avail_after_pools_gb == pytest.approx(after_pools, abs=0.16)
    assert pools.avail_end_gb == pytest.approx(end, abs=0.2)
    assert pools.bound_by == ("state_slots" if run in REAL else "max_running_requests")


@pytest.mark.parametrize("mode", MODES)
def test_each_way_of_keeping_states_is_allocated_as_a_real_server_did(mode):
    command, running, slots, each, conv, ssm, inter, window, ring, tokens, kv, draft_kv, after, end, bound = MODES[mode]
    line = (
        f"python -m sglang.launch_server --model-path m {MTP} --disable-cuda-graph --mem-fraction-static 0.85 {command}"
    )
    pools = allocate(parse(line, V("0.5.17")).args, {}, V("0.5.17"), MODEL, 139.8, 92.82)
    assert pools.failure is None
    assert (pools.max_running, pools.slots, pools.slots_per_request) == (running, slots, each)
    assert (pools.conv_gb, pools.ssm_gb) == (near(conv), near(ssm))
    assert (pools.intermediate_ssm_gb, pools.intermediate_conv_gb) == (near(inter), near(window))
    assert pools.ring_gb == near(ring)
    assert pools.kv_tokens == pytest.approx(tokens, abs=200)
    assert (pools.k_gb + pools.v_gb, pools.draft_kv_gb) == (near(kv), near(draft_kv))
    assert pools.avail_after_pools_gb == pytest.approx(after, abs=0.1)
    assert pools.avail_end_gb == pytest.approx(end, abs=0.1)
    assert pools.bound_by == bound


def test_the_loaders_share_is_the_same_for_a_model_of_a_seventh_of_the_size():
    shape = json.loads((Path(model_module.__file__).parent / "models" / "qwen3.6-27b.json").read_text())
    shape["text_config"] |= {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    shape["vision_config"]["depth"] = 2
    args = {
        "mem_fraction_static": 0.5,
        "max_mamba_cache_size": 24,
        "mamba_radix_cache_strategy": "extra_buffer",
        "disable_cuda_graph": True,
    }
    pools = allocate(
        args, {}, V("0.5.17"), ModelConfig.from_json(shape), 140.4, 137.61
    )  # a real run, prefill graphs off
    assert pools.max_running == 4
    assert pools.kv_tokens == pytest.approx(15_915_003, abs=1000)
    assert pools.weights_gb == near(7.80)
    assert pools.avail_after_pools_gb == pytest.approx(68.73, abs=0.1)


CORPUS = Path(__file__).parents[2] / "shared" / "corpus" / "h200" / "runs"


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of real runs is not here")
@pytest.mark.parametrize("name", ["A-mtp24", "B-nomtp", "B2-nomtp24", "C-mtp80", "D-mtp80-bf16", "I-mtp-ratio04"])
def test_the_budget_agrees_with_what_the_servers_own_answer_says(name):
    folder = CORPUS / name
    args = parse((folder / "server.log").read_text(errors="replace").split("\n", 1)[0].lstrip("# "), V("0.5.17"))
    info = json.loads((folder / "server_info.json").read_text())
    state = info["internal_states"][0]
    pools = allocate(args.args, args.env, V("0.5.17"), MODEL, 97.0, 92.82)
    assert pools.max_running == state["effective_max_running_requests_per_dp"]
    assert pools.slots == state["max_mamba_cache_size"]
    capacity = state["memory_usage"]["token_capacity"]
    assert pools.kv_tokens == pytest.approx(capacity, abs=max(200, 0.005 * capacity))


@pytest.mark.parametrize("version", [r for r in RELEASES if V(r) >= V("0.5.9")])
def test_the_published_figures_of_the_story_come_out_to_the_digit(version):
    made = budget(STORY, ON, V(version), MODEL, gpu_memory_gb=96, available_gb=94).as_json()
    assert made["slots_per_request"] == 5
    assert made["max_running_requests"] == 4
    assert made["bound_by"] == "state_slots"
    assert round(made["ssm_gb"], 2) == 3.52
    assert round(made["intermediate_ssm_gb"], 2) == 2.81
    assert made["state_bytes_per_slot"] == 153_944_064


def test_up_to_0_5_12_the_states_of_48_requests_stand_idle_and_the_kv_cache_is_what_the_story_saw():
    made = budget(STORY, ON, V("0.5.12"), MODEL, gpu_memory_gb=96, available_gb=94)
    assert round(made.pools.reserved_intermediate_gb, 1) == 27.5
    assert 70_000 < made.pools.kv_tokens < 77_000
    assert any("27.5 GB aside" in text for text in made.assumptions)
    # Slots alone eat the KV cache; the pair gives it back.
    alone = allocate({**STORY, "max_mamba_cache_size": 40}, ON, V("0.5.12"), MODEL, 96, 94)
    pair = allocate({**STORY, "max_mamba_cache_size": 40, "max_running_requests": 8}, ON, V("0.5.12"), MODEL, 96, 94)
    assert alone.kv_tokens < made.pools.kv_tokens < pair.kv_tokens


@pytest.mark.parametrize("version", ["0.5.10", "0.5.12", "0.5.13", "0.5.17", "0.5.23"])
def test_the_first_suggestion_raises_running_requests_and_slots_together_and_does_what_it_says(version):
    made = budget(STORY, ON, V(version), MODEL, gpu_memory_gb=96)
    first = made.suggestions[0]
    assert {"max_running_requests", "max_mamba_cache_size"} <= set(first.set) <= {
        "max_running_requests", "max_mamba_cache_size", "mem_fraction_static",
    }  # fmt: skip
    assert first.set["max_mamba_cache_size"] == 5 * first.set["max_running_requests"]
    after = allocate({**STORY, **first.set}, ON, V(version), MODEL, 96)
    assert after.failure is None
    assert after.max_running == first.set["max_running_requests"] > made.pools.max_running
    assert f"{after.kv_tokens:,} KV tokens" in first.effect


# (weights, GPU free, fraction) → (slots, running, KV tokens): SGLang 0.5.23's own formula, worked out by hand.
WORKED = [
    ("bf16", 78.7, 0.80, 18, 3, 104_000), ("bf16", 78.7, 0.85, 25, 5, 133_000), ("bf16", 78.7, 0.90, 32, 6, 172_000),
    ("bf16", 139.0, 0.80, 106, 21, 518_000), ("bf16", 139.0, 0.85, 119, 23, 583_000), ("bf16", 139.0, 0.90, 132, 26, 638_000),
    ("fp8", 78.7, 0.80, 60, 12, 298_000), ("fp8", 78.7, 0.85, 67, 13, 336_000), ("fp8", 78.7, 0.90, 74, 14, 375_000),
    ("fp8", 139.0, 0.80, 148, 29, 721_000), ("fp8", 139.0, 0.85, 161, 32, 777_000), ("fp8", 139.0, 0.90, 174, 34, 841_000),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "free", "fraction", "slots", "running", "tokens"), WORKED)
def test_the_joint_solution_of_slots_and_intermediate_states_is_sglangs(kind, free, fraction, slots, running, tokens):
    args = {**without("max_mamba_cache_size", "mamba_full_memory_ratio"), "mem_fraction_static": fraction}
    loaded = 50.7 if kind == "bf16" else 27.7
    pools = allocate(args, {}, V("0.5.23"), MODEL, free + 1, free, weights_gb=loaded, draft_weights_gb=0.8)
    assert (pools.slots, pools.max_running) == (slots, running)
    assert pools.kv_tokens == pytest.approx(tokens, abs=600)


@pytest.mark.parametrize(
    ("version", "changed", "expected"),
    [
        # With the radix cache on, 0.5.6 overwrites the slots and charges each 1 + D times.
        ("0.5.6", {}, {"slots_per_request": 3, "charged": lambda p: p.reserved_intermediate_gb == pytest.approx(4 * p.slots * SLOT)}),
        # 0.5.7 and 0.5.8 reserve nothing where the slots are given.
        ("0.5.8", {}, {"reserved": 0.0}),
        ("0.5.9", {}, {"reserved": 27.53}),
        ("0.5.13", {}, {"reserved": 2.29}),
        ("0.5.16", {}, {"reserved": 2.29}),
        ("0.5.17", {}, {"reserved": 2.87}),
        # The radix cache off: one slot a request, as many slots as requests.
        ("0.5.17", {"disable_radix_cache": True, "max_running_requests": 8, "max_mamba_cache_size": None}, {"slots": 8, "reserved": 5.16}),
        ("0.5.17", {"mamba_radix_cache_strategy": "extra_buffer_lazy"}, {"running": 6, "slots_per_request": 4}),
        ("0.5.17", {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}, {"running": 8, "slots_per_request": 3}),
        ("0.5.17", {"enable_linear_replayssm_spec": True}, {"reserved": 0.0, "running": 4}),
        ("0.5.17", {"kv_cache_dtype": "fp8_e4m3"}, {"cell": 32_768}),
        ("0.5.17", {"tp_size": 2}, {"cell": 32_768, "per_slot": 153_944_064 // 2}),
        ("0.5.17", {"tp_size": 8}, {"cell": 16_384}),
        ("0.5.22", {"tp_size": 2, "attn_dp_size": 2}, {"cell": 65_536, "slots": 12, "running": 2}),
        ("0.5.17", {"mamba_ssm_dtype": "bfloat16"}, {"per_slot": 78_446_592}),
        ("0.5.17", {"max_running_requests": 2}, {"running": 2, "bound": "max_running_requests"}),
        ("0.5.17", {"max_total_tokens": 1000}, {"tokens": 1000}),
        ("0.5.17", {"page_size": 64}, {"whole_pages": lambda p: p.kv_tokens % 64 == 0}),
    ],
)  # fmt: skip
def test_each_versions_and_each_settings_formula(version, changed, expected):
    args = {k: v for k, v in {**STORY, **changed}.items() if v is not None}
    p = allocate(args, ON, V(version), MODEL, 96, 94)
    values = {
        "slots_per_request": p.slots_per_request, "slots": p.slots, "running": p.max_running, "reserved": round(p.reserved_intermediate_gb, 2),
        "cell": p.kv_bytes_per_token, "per_slot": p.state_bytes_per_slot, "bound": p.bound_by, "tokens": p.kv_tokens,
    }  # fmt: skip
    for name, wanted in expected.items():
        assert wanted(p) if callable(wanted) else values[name] == wanted, (name, values.get(name))


def test_up_to_0_5_13_the_drafts_weights_come_after_the_pools_and_may_not_fit():
    early = allocate(STORY, {}, V("0.5.13"), MODEL, 96, 94)
    late = allocate(STORY, {}, V("0.5.14"), MODEL, 96, 94)
    assert early.kv_tokens - late.kv_tokens == pytest.approx(5.53 * 2**30 / 65536, rel=0.01)
    assert early.failure is not None
    assert early.failure.cause == "oom_after_pool"
    assert late.failure is None


def test_adaptive_speculation_takes_more_than_was_set_aside():
    p = allocate({**STORY, "speculative_adaptive": True}, {}, V("0.5.17"), MODEL, 96, 94)
    assert p.intermediate_ssm_gb == pytest.approx(2 * 2.8125)
    assert p.reserved_intermediate_gb < 3


@pytest.mark.parametrize(
    ("version", "changed", "cause", "line"),
    [
        ("0.5.17", {"mem_fraction_static": 0.5}, "kv_pool_too_small", "Raise --mem-fraction-static above 0.603"),
        ("0.5.12", {"mem_fraction_static": 0.5}, "kv_pool_too_small", "Please try to increase --mem-fraction-static"),
        ("0.5.17", {"mem_fraction_static": 0.5, "max_mamba_cache_size": None}, "mamba_pool_too_small", "Computed max_mamba_cache_size=-"),
        ("0.5.17", {"max_mamba_cache_size": 4}, "mamba_pool_too_small", "max_mamba_cache_size=4, mamba_ratio=5, resulting max_num_reqs=0"),
        ("0.5.17", {"max_mamba_cache_size": 400}, "kv_pool_too_small", "Loaded weights leave no GPU memory"),
    ],
)  # fmt: skip
def test_a_launch_that_cannot_size_its_pools_says_how_it_would_die(version, changed, cause, line):
    args = {k: v for k, v in {**STORY, **changed}.items() if v is not None}
    failure = allocate(args, ON, V(version), MODEL, 96, 94).failure
    assert failure is not None
    assert failure.cause == cause
    assert line in failure.line


def test_weights_that_do_not_fit_are_told_from_pools_that_do_not():
    assert allocate(STORY, {}, V("0.5.17"), MODEL, 48).failure.cause == "oom_weights"


def test_what_would_make_a_failing_launch_start_is_suggested_and_does():
    args = {**STORY, "mem_fraction_static": 0.6}
    made = budget(args, {}, V("0.5.17"), MODEL, gpu_memory_gb=96)
    assert made.pools.failure
    assert made.suggestions
    for suggestion in made.suggestions:
        assert allocate({**args, **suggestion.set}, {}, V("0.5.17"), MODEL, 96).failure is None


def test_a_wanted_concurrency_is_turned_into_flags_that_give_it():
    found = fit(
        STORY, {}, V("0.5.17"), MODEL, requests=16, tokens_per_request=4096, gpu_memory_gb=96, available_gb=None
    )
    assert found.set is not None
    after = allocate({**STORY, **found.set}, {}, V("0.5.17"), MODEL, 96)
    assert after.max_running >= 16
    assert after.kv_tokens >= 16 * 4096
    assert found.missing_gb == 0
    none = fit(
        STORY, {}, V("0.5.17"), MODEL, requests=500, tokens_per_request=8192, gpu_memory_gb=96, available_gb=None
    )
    assert none.set is None
    assert none.missing_gb > 10
    same = fit(STORY, {}, V("0.5.17"), MODEL, requests=4, tokens_per_request=4096, gpu_memory_gb=96, available_gb=None)
    assert same.set == {}


@settings(deadline=None, max_examples=80)
@given(
    version=st.sampled_from(RELEASES),
    fraction=st.floats(0.3, 0.97),
    slots=st.none() | st.integers(1, 400),
    running=st.none() | st.integers(1, 200),
    steps=st.integers(1, 6),
    speculative=st.booleans(),
    free=st.floats(20, 180),
)
def test_pools_never_exceed_the_memory_and_every_suggestion_is_kept(
    version, fraction, slots, running, steps, speculative, free
):
    args = {
        "mem_fraction_static": fraction,
        "max_mamba_cache_size": slots,
        "max_running_requests": running,
        "mamba_radix_cache_strategy": "extra_buffer",
    }
    if speculative:
        args |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": steps, "speculative_eagle_topk": 1}
    args = {k: v for k, v in args.items() if v is not None}
    made = budget(args, ON, V(version), MODEL, gpu_memory_gb=free + 2, available_gb=free)
    p = made.pools
    assert p.kv_tokens >= 0
    assert p.max_running >= 0
    if p.failure is None:
        used = p.weights_gb + p.draft_weights_gb + p.state_gb + p.k_gb + p.v_gb + p.draft_kv_gb
        assert used <= p.pre_load_gb + 1e-6
        assert p.slots // p.slots_per_request >= p.max_running >= 1
    for suggestion in made.suggestions:
        assert allocate({**args, **suggestion.set}, ON, V(version), MODEL, free + 2, free).failure is None
    json.dumps(made.as_json(), allow_nan=False)


def test_state_bytes_are_those_of_the_published_shape():
    pinned, _ = settle(STORY, {}, V("0.5.17"), MODEL)
    assert state_bytes(MODEL, pinned) == (48 * 61_440, 48 * 3_145_728)


def test_memory_that_is_not_known_is_asked_for_and_not_guessed():
    with pytest.raises(PlanRefused, match="--gpu-memory-gb"):
        budget(STORY, {}, V("0.5.17"), MODEL)
    unknown = recognise("Qwen/Qwen3.6-27B")[0]
    with pytest.raises(PlanRefused, match="not known for quantization 'gguf'"):
        budget({**STORY, "quantization": "gguf"}, {}, V("0.5.17"), unknown, gpu_memory_gb=96)
    with pytest.raises(PlanRefused, match="draft"):
        budget({**STORY, "speculative_draft_model_path": "d"}, {}, V("0.5.17"), MODEL, gpu_memory_gb=96)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "intermediate_size": 5120, "moe_intermediate_size": 512, "num_experts": 512, "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
    "linear_key_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 151936, "max_position_embeddings": 262144, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_nextn_predict_layers": 1,
    "vocab_size": 129280, "max_position_embeddings": 163840, "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions"), [(LLAMA, 8.03), (QWEN3_30B, 30.5), (QWEN3_NEXT, 79.7), (DEEPSEEK_V3, 671.0)]
)
def test_parameter_counts_are_the_published_ones(config, billions):
    model = ModelConfig.from_json(config)
    assert (model.layer_parameters() + model.embedding_parameters()) / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_plain_model_has_a_kv_cache_and_no_states():
    made = budget(
        {"mem_fraction_static": 0.9}, {}, V("0.5.17"), ModelConfig.from_json(LLAMA), gpu_memory_gb=80
    ).as_json()
    assert made["slots"] is None
    assert made["state_bytes_per_slot"] is None
    assert made["kv_bytes_per_token"] == 131_072
    assert made["draft_weights_gb"] is None
    assert made["max_running_requests"] == 2048
    assert made["bound_by"] == "sglang_default"


def test_latent_attention_caches_one_latent_a_token():
    model = ModelConfig.from_json(DEEPSEEK_V3)
    p = allocate({"mem_fraction_static": 0.9, "tp_size": 8}, {}, V("0.5.17"), model, 141)
    assert p.kv_bytes_per_token == 61 * 576 * 2


def test_an_unknown_architecture_is_refused_by_name():
    with pytest.raises(ConfigError, match="MambaForCausalLM"):
        ModelConfig.from_json({"architectures": ["MambaForCausalLM"]})
    with pytest.raises(ConfigError, match="num_hidden_layers is None"):
        ModelConfig.from_json({"architectures": ["LlamaForCausalLM"]})


def test_exact_weight_bytes_beside_a_config_replace_the_count(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 10 * 2**30}}))
    model = ModelConfig.read(tmp_path)
    assert allocate({"mem_fraction_static": 0.9}, {}, V("0.5.17"), model, 80).weights_gb == pytest.approx(
        10.15, abs=0.01
    )
    with pytest.raises(ConfigError, match="no such file"):
        ModelConfig.read(tmp_path / "nothing" / "config.json")


@pytest.mark.parametrize(
    ("path", "weights_gb", "draft_gb"),
    [
        ("Qwen/Qwen3.6-27B", 51.1, 5.53),
        ("/models/qwen3.6-27b-fp8/", 28.4, 5.13),
        ("nvidia/Qwen3.6-27B-NVFP4", 18.5, 4.96),
    ],
)
def test_a_quantized_checkpoint_keeps_embeddings_head_and_vision_in_16_bit(path, weights_gb, draft_gb):
    model, assumed = recognise(path)
    p = allocate({**STORY, "model_path": path}, {}, V("0.5.17"), model, 96)
    assert p.weights_gb == pytest.approx(weights_gb, abs=0.1)
    assert p.draft_weights_gb == pytest.approx(draft_gb, abs=0.02)
    assert path in assumed


@pytest.mark.parametrize("path", ["Qwen/Qwen3.6-27B-GGUF", "Qwen/Qwen3.6-35B-A3B", "meta-llama/Llama-3.1-8B", "x"])
def test_a_model_that_is_only_similar_by_name_is_not_taken_for_it(path):
    assert recognise(path) is None


@pytest.mark.parametrize(("version", "record", "rows"), [("0.5.17", 4, 25), ("0.5.20", 16, 49)])
def test_replayed_drafts_keep_a_ring_instead_of_states(version, record, rows):
    p = allocate({**STORY, "enable_linear_replayssm_spec": True}, {}, V(version), MODEL, 96)
    wide = 48 * record * 128 * 2 + 16 * record * 128 * 2
    layer = 2 * wide + 48 * record * 4 if version == "0.5.20" else wide + 2 * 48 * record * 4
    assert p.intermediate_ssm_gb == 0
    assert p.ring_gb == pytest.approx(rows * 48 * layer / 2**30)
