"""What kills a launch, and in which versions."""

import pytest
from published import DRAFTING

from mtpdeploy.sglang.model import shipped
from mtpdeploy.sglang.rules import check
from mtpdeploy.sglang.versions import RELEASES, Version

V = Version.parse
MODEL = shipped("qwen3.6-27b")
MTP = {"model_path": "m", **DRAFTING}
EXTRA = {**MTP, "mamba_radix_cache_strategy": "extra_buffer"}


def rules(args, version, env=None, model=MODEL, severity="refuse"):
    return {f.rule for f in check(args, env or {}, V(version), model) if f.severity == severity}


@pytest.mark.parametrize("version", [r for r in RELEASES if V(r) >= V("0.5.10")])
def test_the_recommended_mtp_settings_pass_everywhere_from_0_5_10(version):
    assert rules({**EXTRA, "max_running_requests": 8, "max_mamba_cache_size": 40}, version) == set()


@pytest.mark.parametrize("version", RELEASES[3:])
def test_plain_mtp_on_a_hybrid_is_refused_in_exactly_0_5_10_to_0_5_13(version):
    refused = "no-buffer-speculation" in rules(MTP, version)
    assert refused == (V("0.5.10") <= V(version) <= V("0.5.13"))
    assert "no-buffer-speculation" not in rules({**MTP, "disable_radix_cache": True}, version)


@pytest.mark.parametrize(
    ("changed", "version", "rule"),
    [
        ({"disable_radix_cache": True}, "0.5.12", "extra-buffer-radix-off"),
        ({"mamba_radix_cache_strategy": "no_buffer"}, "0.5.14", "no-buffer-overlap"),
        ({"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True, "page_size": 64}, "0.5.17", "no-buffer-page-size"),
        ({"mamba_radix_cache_strategy": "no_buffer", "attention_backend": "trtllm_mha"}, "0.5.17", "no-buffer-trtllm"),
        ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, "0.5.13", "lazy-speculation"),
        ({"mamba_radix_cache_strategy": "extra_buffer_lazy", "disable_overlap_schedule": True}, "0.5.17", "lazy-overlap"),
        ({"linear_attn_backend": "flashinfer"}, "0.5.17", "extra-buffer-backend"),
        ({"speculative_num_steps": None}, "0.5.17", "steps-missing"),
        ({"speculative_eagle_topk": None}, "0.5.17", "topk-missing"),
        ({"speculative_eagle_topk": 4, "speculative_num_draft_tokens": None}, "0.5.17", "draft-tokens-missing"),
        ({"speculative_eagle_topk": 2, "attention_backend": "trtllm_mha"}, "0.5.17", "topk-trtllm"),
        ({"speculative_algorithm": "NEXT"}, "0.5.17", "unknown-algorithm"),
        ({"mamba_track_interval": 2}, "0.5.17", "track-interval"),
        ({"mamba_track_interval": 100, "page_size": 64}, "0.5.17", "track-interval-page"),
        ({"page_size": 48}, "0.5.12", "page-size-chunk"),
        ({"context_length": 300_000}, "0.5.17", "context-length"),
        ({"speculative_adaptive": True, "speculative_num_steps": 4, "speculative_num_draft_tokens": 5}, "0.5.17", "adaptive-steps"),
        ({"chunked_prefill_size": 1000, "page_size": 64}, "0.5.17", "chunk-page-size"),
        ({"tp_size": 2, "nnodes": 3}, "0.5.17", "nodes"),
        ({"tp_size": 5}, "0.5.17", "tensor-parallel"),
        ({"served_model_name": "qwen:27b"}, "0.5.17", "served-model-name"),
        ({"language_model_only": True}, "0.5.23", "language-model-only"),
        ({"max_mamba_cache_size": 4}, "0.5.17", "slots-too-few"),
        ({"max_mamba_cache_size": 8, "tp_size": 2, "attn_dp_size": 2}, "0.5.22", "slots-too-few"),
        ({"mem_fraction_static": 92}, "0.5.17", "fraction"),
        ({"pp_size": 2}, "0.5.17", "pipeline-speculation"),
        ({"port": 70_000}, "0.5.17", "port"),
        ({"max_running_requests": 0}, "0.5.17", "not-positive"),
        ({"enable_linear_replayssm_spec": True, "speculative_eagle_topk": 2}, "0.5.17", "replay-topk"),
        ({"enable_linear_replayssm": True}, "0.5.17", "replay-strategy"),
        ({}, "0.5.8", "architecture"),
    ],
)  # fmt: skip
def test_a_launch_that_would_die_is_refused_and_the_message_names_the_version_or_the_remedy(changed, version, rule):
    args = {**EXTRA, **changed}
    found = [f for f in check(args, {}, V(version), MODEL) if f.rule == rule]
    assert [f.severity for f in found] == ["refuse"]
    assert len(found[0].message) > 40


@pytest.mark.parametrize(
    ("args", "version"),
    [
        ({**EXTRA, "disable_radix_cache": True}, "0.5.12"),
        ({**MTP, "mamba_radix_cache_strategy": "no_buffer"}, "0.5.17"),
        ({**MTP, "mamba_radix_cache_strategy": "extra_buffer_lazy"}, "0.5.13"),
        ({**MTP, "speculative_eagle_topk": None}, "0.5.17"),
        ({**EXTRA, "mamba_track_interval": 2}, "0.5.17"),
        ({**EXTRA, "max_mamba_cache_size": 4}, "0.5.17"),
        ({**EXTRA, "context_length": 300_000}, "0.5.17"),
        ({**EXTRA, "served_model_name": "qwen:27b"}, "0.5.17"),
        ({**EXTRA, "chunked_prefill_size": 1000, "page_size": 64}, "0.5.17"),
        (MTP, "0.5.10"),
    ],
)
def test_the_fix_that_is_offered_is_one(args, version):
    refused = [f for f in check(args, {}, V(version), MODEL) if f.severity == "refuse"]
    assert refused
    fixed = dict(args)
    for finding in refused:
        fixed |= finding.fix
    assert rules(fixed, version) & {f.rule for f in refused} == set()


def test_longer_context_is_allowed_where_the_environment_says_so():
    args = {**EXTRA, "context_length": 300_000}
    assert "context-length" not in rules(args, "0.5.17", {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"})


def test_the_story_is_told_before_the_launch():
    args = {**EXTRA, "max_mamba_cache_size": 24, "mamba_full_memory_ratio": 0.4}
    found = {f.rule: f for f in check(args, {"SGLANG_ENABLE_SPEC_V2": "1"}, V("0.5.10"), MODEL)}
    cap = found["slots-cap-running"]
    assert cap.severity == "warn"
    assert "serves 4 at once" in cap.message
    assert "default 48" in cap.message
    assert "leaves it unused" in cap.message
    assert set(cap.fix) == {"max_running_requests", "max_mamba_cache_size"}


def test_spec_v2_is_asked_for_where_it_matters_and_called_useless_where_it_does_not():
    assert "spec-v2-off" in rules(EXTRA, "0.5.10", severity="warn")
    assert "spec-v2-off" not in rules(EXTRA, "0.5.10", {"SGLANG_ENABLE_SPEC_V2": "true"}, severity="warn")
    assert "spec-v2-off" in rules(EXTRA, "0.5.12", {"SGLANG_ENABLE_SPEC_V2": "0"}, severity="warn")
    assert "spec-v2-gone" in rules(EXTRA, "0.5.14", {"SGLANG_ENABLE_SPEC_V2": "1"}, severity="note")


def test_simulated_acceptance_makes_numbers_fictitious():
    assert "simulated-acceptance" in rules(EXTRA, "0.5.17", {"SGLANG_SIMULATE_ACC_LEN": "3.2"}, severity="warn")
    assert "simulated-acceptance" not in rules(EXTRA, "0.5.17", {"SGLANG_SIMULATE_ACC_LEN": "-1"}, severity="warn")


def test_an_unknown_model_is_not_judged_as_a_hybrid():
    assert rules(MTP, "0.5.12", model=None) == set()
    assert rules({"model_path": "m", "mem_fraction_static": 0.9}, "0.5.12", model=None) == set()


def test_the_worst_finding_comes_first():
    found = check({**MTP, "max_mamba_cache_size": 24}, {"SGLANG_SIMULATE_ACC_LEN": "3"}, V("0.5.12"), MODEL)
    assert [f.severity for f in found] == sorted((f.severity for f in found), key=["refuse", "warn", "note"].index)
