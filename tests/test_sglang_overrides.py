"""What each version makes of the arguments."""

import pytest

from mtpdeploy.sglang.model import shipped
from mtpdeploy.sglang.overrides import effective, prefill_graph_sizes, settle
from mtpdeploy.sglang.versions import RELEASES, Version

V = Version.parse
MODEL = shipped("qwen3.6-27b")
MTP = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
EXTRA = {**MTP, "mamba_radix_cache_strategy": "extra_buffer"}
ON = {"SGLANG_ENABLE_SPEC_V2": "1"}


def settled(args, version, env=None, gpu=None):
    return settle(args, env or {}, V(version), MODEL, gpu)[0]


@pytest.mark.parametrize("version", RELEASES)
def test_nextn_becomes_eagle_and_the_unsaid_limit_48_in_every_version(version):
    found = effective(MTP, {}, V(version), MODEL)
    assert found["speculative_algorithm"][0] == "EAGLE"
    assert found["max_running_requests"][0] == 48
    assert "max_running_requests" not in effective({**MTP, "max_running_requests": 8}, {}, V(version), MODEL)
    assert "max_running_requests" not in effective({}, {}, V(version), MODEL)


@pytest.mark.parametrize(
    ("args", "version", "env", "slots"),
    [
        # extra_buffer: 5 with the overlap scheduler, 4 without it.
        (EXTRA, "0.5.17", {}, 5),
        ({**EXTRA, "disable_overlap_schedule": True}, "0.5.17", {}, 4),
        (EXTRA, "0.5.10", ON, 5),
        (EXTRA, "0.5.10", {}, 4),
        (EXTRA, "0.5.11", {}, 5),
        (EXTRA, "0.5.12", {"SGLANG_ENABLE_SPEC_V2": "0"}, 4),
        (EXTRA, "0.5.14", {"SGLANG_ENABLE_SPEC_V2": "0"}, 5),
        ({**EXTRA, "speculative_eagle_topk": 2}, "0.5.12", {}, 4),
        ({**EXTRA, "speculative_eagle_topk": 2}, "0.5.13", {}, 5),
        ({**EXTRA, "speculative_algorithm": "NGRAM"}, "0.5.13", {}, 4),
        ({**EXTRA, "speculative_algorithm": "NGRAM"}, "0.5.14", {}, 5),
        # auto: no_buffer up to 0.5.13, extra_buffer after.
        (MTP, "0.5.8", {}, 3),
        (MTP, "0.5.9", {}, 1),
        (MTP, "0.5.14", {}, 5),
        ({}, "0.5.13", {}, 3),
        ({}, "0.5.14", {}, 5),
        ({"disable_overlap_schedule": True}, "0.5.14", {}, 3),
        ({**MTP, "mamba_radix_cache_strategy": "extra_buffer_lazy"}, "0.5.17", {}, 4),
        ({**MTP, "mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}, "0.5.17", {}, 3),
        ({**EXTRA, "disable_radix_cache": True}, "0.5.17", {}, 1),
        (EXTRA, "0.5.17", {"SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK": "1"}, 4),
        (EXTRA, "0.5.16", {"SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK": "1"}, 5),
        (
            {**MTP, "mamba_radix_cache_strategy": "extra_buffer_lazy"},
            "0.5.17",
            {"SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK": "1"},
            3,
        ),
        (EXTRA, "0.5.6", {}, 3),
    ],
)
def test_state_slots_a_request_follow_strategy_overlap_and_version(args, version, env, slots):
    assert settled(args, version, env).slots_per_request == slots


def test_draft_tokens_follow_steps_with_topk_1_and_the_rule_is_told():
    args = {**MTP, "speculative_num_draft_tokens": 8}
    value, rule = effective(args, {}, V("0.5.17"), MODEL)["speculative_num_draft_tokens"]
    assert value == 4
    assert "steps + 1" in rule
    assert "8" in rule


def test_mixed_chunks_and_an_unreadable_cache_type_are_rewritten_with_the_rule():
    args = {**EXTRA, "enable_mixed_chunk": True, "attention_backend": "fa3", "kv_cache_dtype": "fp8_e5m2"}
    old, new = (effective(args, {}, V(v), MODEL) for v in ("0.5.18", "0.5.19"))
    assert old["enable_mixed_chunk"][0] is False
    assert "enable_mixed_chunk" not in new
    assert new["attention_backend"][0] == "triton"


def test_only_the_algorithm_gives_steps_topk_and_draft_tokens_3_1_4():
    found = settled({"speculative_algorithm": "eagle"}, "0.5.17")
    assert (found.algorithm, found.steps, found.topk, found.draft_tokens) == ("EAGLE", 3, 1, 4)


@pytest.mark.parametrize(
    ("args", "env", "version", "dtype"),
    [
        ({}, {}, "0.5.17", "float32"),
        ({"mamba_ssm_dtype": "bfloat16"}, {"SGLANG_MAMBA_SSM_DTYPE": "float32"}, "0.5.17", "bfloat16"),
        ({}, {"SGLANG_MAMBA_SSM_DTYPE": "bfloat16"}, "0.5.17", "bfloat16"),
        ({}, {"SGLANG_MAMBA_SSM_DTYPE": "bfloat16"}, "0.5.8", "float32"),
    ],
)
def test_the_state_type_is_resolved_flag_first_then_environment_then_config(args, env, version, dtype):
    assert settled(args, version, env).ssm_dtype == dtype


def test_adaptive_speculation_allocates_for_more_than_it_budgets():
    found = settled({**EXTRA, "speculative_adaptive": True}, "0.5.17")
    assert (found.draft_tokens, found.allocated_draft_tokens) == (4, 8)
    off = effective({**EXTRA, "speculative_adaptive": True, "speculative_eagle_topk": 2}, {}, V("0.5.17"), MODEL)
    assert off["speculative_adaptive"][0] is False


@pytest.mark.parametrize(
    ("gpu_gb", "fraction"), [(79.65, 0.768), (140.4, 0.835), (95.6, 0.793), (40.0, 0.761), (32.0, 0.719)]
)
def test_the_automatic_fraction_is_sglangs_for_image_models(gpu_gb, fraction):
    assert settled({}, "0.5.23", gpu=gpu_gb).fraction == pytest.approx(fraction, abs=0.0015)


def test_speculation_lowers_the_automatic_fraction_up_to_0_5_13_only():
    def fraction(version, args):
        return settled(args, version, gpu=79.65).fraction

    assert fraction("0.5.13", EXTRA) < fraction("0.5.13", {}) - 0.04
    assert fraction("0.5.14", EXTRA) == fraction("0.5.14", {})


def test_an_explicit_limit_lowers_the_largest_decode_graph_and_the_default_48_does_not():
    assert settled(EXTRA, "0.5.17", gpu=95).decode_max_bs == 256
    assert settled({**EXTRA, "max_running_requests": 8}, "0.5.17", gpu=95).decode_max_bs == 8


def test_prefill_graph_sizes_are_those_of_a_real_log():
    sizes = prefill_graph_sizes(8192)
    assert len(sizes) == 58
    assert sizes[:3] == (4, 8, 12)
    assert sizes[-3:] == (7168, 7680, 8192)
