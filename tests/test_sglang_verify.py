"""Requested against effective, and the shapes of SGLang's answers over the versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpdeploy.actions.verify import freshness
from mtpdeploy.actions.verify import verify as verify_action
from mtpdeploy.errors import NotFound, UsageError
from mtpdeploy.progress import Silent
from mtpdeploy.secret import Secret
from mtpdeploy.sglang import api, command
from mtpdeploy.sglang.logs import Summary, summarise
from mtpdeploy.sglang.model import shipped
from mtpdeploy.sglang.verify import Freshness, Verification, judge_version, rate_definition, verify
from mtpdeploy.sglang.versions import Version

GOLDEN = Path(__file__).parent / "golden"
V = Version.parse("0.5.17")
LOG = summarise([(GOLDEN / "logs" / "mtp24.log").read_bytes()])
INFO = api.server_info(json.loads((GOLDEN / "api" / "server_info-0.5.17.json").read_text()))
assert LOG.command is not None
ASKED = dict(command.parse(LOG.command, V).args)
FRESH = Freshness("fresh", (), None, 1)


def rows(v: Verification) -> dict[str, tuple[object, object, str]]:
    return {a.name: (a.requested, a.effective, a.status) for a in v.arguments}


def check(asked: Mapping[str, object] | None = None, **given: Any) -> Verification:
    given.setdefault("log", LOG)
    given.setdefault("version", V)
    given.setdefault("freshness", FRESH)
    return verify(ASKED if asked is None else asked, **given)


# -- arguments ---------------------------------------------------------------------------------------------------------------


def test_what_was_asked_for_and_is_in_force_is_the_same() -> None:
    v = check()
    assert (v.verdict, v.exit_code, v.why) == ("same", 0, ())
    assert rows(v)["speculative_algorithm"] == ("NEXTN", "EAGLE", "rewritten")
    assert {s for n, (_, _, s) in rows(v).items() if n != "speculative_algorithm"} == {"same"}


def test_the_old_spelling_in_an_older_servers_arguments_is_the_same_argument() -> None:
    args = {**(LOG.server_args or {})}
    args["mamba_scheduler_strategy"] = args.pop("mamba_radix_cache_strategy")
    v = check(log=replace(LOG, server_args=args))
    assert rows(v)["mamba_radix_cache_strategy"][2] == "same"


def test_a_difference_that_no_rule_explains_is_ignored_and_differs() -> None:
    v = check({**ASKED, "mem_fraction_static": 0.9})
    assert rows(v)["mem_fraction_static"] == (0.9, 0.85, "ignored")
    assert (v.verdict, v.exit_code) == ("differs", 11)
    assert "mem_fraction_static" in v.why[0]


def test_a_rewrite_of_a_concrete_value_names_its_rule_and_differs() -> None:
    v = check({**ASKED, "speculative_num_draft_tokens": 6})
    row = next(a for a in v.arguments if a.name == "speculative_num_draft_tokens")
    assert (row.status, row.effective) == ("rewritten", 4)
    assert "steps + 1" in (row.rule or "")
    assert "0.5.17" in (row.rule or "")
    assert v.verdict == "differs"


def test_more_requests_than_the_slots_carry_differ_with_the_limit_that_binds() -> None:
    v = check({**ASKED, "max_running_requests": 12})
    row = next(a for a in v.arguments if a.name == "max_running_requests")
    assert (row.requested, row.effective, row.status) == (12, 4, "rewritten")
    assert "state slots" in (row.rule or "")
    assert v.verdict == "differs"


def test_a_process_of_another_command_makes_the_argument_stale() -> None:
    """The story: an argument seems to be ignored because the process was started without it."""
    live = [
        "python3",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "/models/qwen36-27b",
        "--mamba-scheduler-strategy",
        "no_buffer",
    ]
    v = check({"model_path": "/models/qwen36-27b", "mamba_radix_cache_strategy": "extra_buffer"}, live=live)
    row = next(a for a in v.arguments if a.name == "mamba_radix_cache_strategy")
    assert (row.status, v.verdict) == ("stale", "differs")
    assert "no_buffer" in (row.rule or "")


def test_sources_of_another_launch_decide_nothing() -> None:
    v = check(
        log=replace(LOG, launch_id="20260101T000000Z-aaaaaa"),
        freshness=Freshness("fresh", (), "20260202T000000Z-bbbbbb", 1),
    )
    assert (v.freshness.verdict, v.verdict, v.exit_code) == ("stale", "cannot_tell", 12)
    assert {a.status for a in v.arguments} == {"stale"}


def test_without_any_source_or_any_request_nothing_is_claimed() -> None:
    assert check(log=None).verdict == "cannot_tell"
    nobody = verify(None, log=LOG, version=V)
    assert (nobody.verdict, nobody.capacity.effective) == ("cannot_tell", 4)
    assert check({**ASKED, "not_an_argument_of_any_release": 1}).verdict == "cannot_tell"


def test_secrets_are_compared_by_presence_and_never_shown() -> None:
    v = check({**ASKED, "api_key": Secret("hunter2")}, server_info=INFO)
    assert rows(v)["api_key"] == ("***", "***", "same")
    assert "hunter2" not in json.dumps(v.as_json())
    assert "sk-do-not-show" not in json.dumps(v.as_json())


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ("0.85", 0.85),
        (24, "24"),
        ([1, 2], (1, 2)),
        ('{"a": 1}', {"a": 1}),
        (True, "true"),
        ("/models/x/", "/models/x"),
        (1, 1.0),
    ],
)
def test_the_same_value_in_another_writing_is_the_same(asked: object, got: object) -> None:
    v = check({"tp_size": asked}, server_args={"tp_size": got})
    assert v.arguments[0].status == "same"


@pytest.mark.parametrize(
    ("asked", "got", "status"),
    [
        ("Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-27B", "same"),
        ("/data/Qwen3.6-27B/", "/data/Qwen3.6-27B", "same"),
        ("Qwen/Qwen3.6-27B", "/root/.cache/huggingface/hub/models--Qwen--Qwen3.6-27B/snapshots/ab12", "same"),
        ("Qwen/Qwen3.6-27B", "/data/models/Qwen3.6-27B", "same"),
        ("Qwen/Qwen3.6-27B", "/root/stage/models/qwen36-27b", "unknown"),
        ("/srv/current", "Qwen/Qwen3.6-27B", "unknown"),
        ("Qwen/Qwen3.6-27B", "Qwen/Qwen3.5-27B", "ignored"),
        ("/data/a/model", "/data/b/model", "ignored"),
    ],
)
def test_a_model_s_name_and_a_folder_decide_nothing_unless_the_folder_bears_the_name(
    asked: str, got: str, status: str
) -> None:
    v = check(
        {**ASKED, "model_path": asked}, log=replace(LOG, server_args={**(LOG.server_args or {}), "model_path": got})
    )
    assert rows(v)["model_path"] == (asked, got, status)
    assert v.verdict == {"same": "same", "unknown": "cannot_tell", "ignored": "differs"}[status]
    live = ["python3", "-m", "sglang.launch_server", "--model-path", got]
    assert rows(check({"model_path": asked}, live=live, log=None, server_args={"model_path": got}))["model_path"][
        2
    ] == {"ignored": "stale"}.get(status, status)


def test_the_memory_predicted_beside_the_log_is_the_plan_s() -> None:
    v = check(model=shipped("qwen3.6-27b"))
    for name, predicted, actual in v.memory:
        assert predicted is not None
        assert actual is not None
        assert predicted == pytest.approx(actual, rel=0.005), name


def test_values_left_to_sglang_are_no_difference() -> None:
    v = check({"attention_backend": "auto", "mamba_radix_cache_strategy": "auto"})
    assert {a.status for a in v.arguments} == {"rewritten"}
    assert v.verdict == "same"


# -- capacity ----------------------------------------------------------------------------------------------------------------


def test_capacity_of_the_story_is_bound_by_state_slots_and_cured_by_two_flags_together() -> None:
    c = check().capacity.as_json()
    running = c["max_running_requests"]
    assert isinstance(running, Mapping)
    assert (running["requested"], running["effective"], running["bound_by"]) == (None, 4, "state_slots")
    assert (c["slots"], c["slots_per_request"], c["kv_tokens"]) == (24, 5, 259066)
    assert running["suggestions"][0]["set"] == {"max_running_requests": 8, "max_mamba_cache_size": 40}


def test_suggestions_come_from_the_budget_where_the_shape_is_known() -> None:
    from mtpdeploy.sglang.model import shipped

    v = check(model=shipped("qwen3.6-27b"))
    assert len(v.capacity.suggestions) > 2
    assert all(
        {"max_running_requests", "max_mamba_cache_size"} <= set(s.set) or len(s.set) >= 1
        for s in v.capacity.suggestions
    )
    table = {name: (predicted, actual) for name, predicted, actual in v.memory}
    assert table["ssm_gb"] == (3.52, 3.52)
    assert table["max_running_requests"] == (4, 4)


def test_an_explicit_request_that_is_met_is_what_binds() -> None:
    log = replace(
        LOG,
        warnings=(),
        capped_to=None,
        max_running_requests=2,
        server_args={**(LOG.server_args or {}), "max_running_requests": 2},
    )
    v = check({**ASKED, "max_running_requests": 2}, log=log)
    assert v.capacity.bound_by == "max_running_requests"


def test_the_effective_limit_is_not_the_one_that_server_info_repeats() -> None:
    """/server_info's top level says 48, what can run is 4."""
    assert INFO.args["max_running_requests"] == 48
    assert (INFO.running_limit, INFO.slots, INFO.kv_tokens) == (4, 24, 259066)
    assert check(server_info=INFO, log=None).capacity.effective == 4


# -- acceptance --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "gate"), [(3.1, "drafting"), (1.02, "not_drafting"), (None, "no_data")])
def test_acceptance_gate(length: float | None, gate: str) -> None:
    decode = {"count": 1, "last": {"accept_len": length, "accept_rate": 0.7}} if length else {"count": 0, "last": None}
    v = check(log=replace(LOG, decode=decode, simulated_acceptance=None))
    assert v.acceptance.gate == gate


def test_forced_acceptance_is_fictitious_wherever_it_is_seen() -> None:
    quiet = replace(LOG, simulated_acceptance=None)
    assert check().acceptance.gate == "fictitious"
    assert check(log=quiet).acceptance.gate == "drafting"
    assert check(log=quiet, env={"SGLANG_SIMULATE_ACC_LEN": "3.2"}).acceptance.gate == "fictitious"
    assert check(log=quiet, env={"SGLANG_SIMULATE_ACC_LEN": "-1"}).acceptance.gate == "drafting"
    assert check(log=quiet, live_env_names=["PATH", "SGLANG_SIMULATE_ACC_LEN"]).acceptance.gate == "fictitious"


def test_accept_rate_carries_its_versions_definition() -> None:
    assert rate_definition(Version.parse("0.5.10")) != rate_definition(Version.parse("0.5.11"))
    assert check().acceptance.rate_definition == "(accept_length - 1) / (draft_tokens - 1)"


def test_speculation_off_is_said() -> None:
    nomtp = summarise([(GOLDEN / "logs" / "nomtp.log").read_bytes()])
    v = verify({"tp_size": 1}, log=nomtp, version=V)
    assert v.acceptance.gate == "off"


# -- version -----------------------------------------------------------------------------------------------------------------


def test_version_is_judged_from_the_names_of_the_arguments_or_not_at_all() -> None:
    assert LOG.server_args is not None
    assert str(judge_version(LOG.server_args)) == "0.5.17"
    assert judge_version(dict(list(LOG.server_args.items())[:60])) is None


def test_the_servers_own_version_wins_and_a_difference_is_said() -> None:
    v = check(server_info=INFO, version=Version.parse("0.5.10"))
    assert v.sglang_version == "0.5.17"
    assert any("0.5.10" in note for note in v.notes)


# -- the action ----------------------------------------------------------------------------------------------------------------


def offline(tmp_path: Path, **given: Any) -> Verification:
    options: dict[str, Any] = {
        "home": tmp_path, "talk": Silent(), "host": None, "profile": None, "inventory": (), "set_": (), "file": None, "command": None,
        "sglang_version": None, "model_config": None, "gpu_memory_gb": None, "want_concurrency": None,
    }  # fmt: skip
    answer = verify_action(**{**options, **given})
    assert isinstance(answer, Verification)
    return answer


def test_a_log_is_verified_against_a_command_line(tmp_path: Path) -> None:
    file = str(GOLDEN / "logs" / "mtp24.log")
    assert offline(tmp_path, file=file).verdict == "same"
    v = offline(
        tmp_path, file=file, command="python -m sglang.launch_server --model-path /models/qwen36-27b --tp-size 2"
    )
    assert rows(v)["tp_size"] == (2, 1, "ignored")
    v = offline(
        tmp_path,
        file=file,
        command="sglang serve --model-path /models/qwen36-27b",
        set_=("args.mem_fraction_static=0.85",),
    )
    assert v.verdict == "same"


def test_a_log_is_verified_against_a_shipped_profile(tmp_path: Path) -> None:
    v = offline(
        tmp_path, file=str(GOLDEN / "logs" / "mtp24.log"), profile="mtp", set_=("args.model_path=/models/qwen36-27b",)
    )
    assert rows(v)["mem_fraction_static"][:2] == (0.92, 0.85)
    assert rows(v)["max_mamba_cache_size"] == (24, 24, "same")
    assert v.exit_code == 11


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        offline(tmp_path, file="x", command="y", profile="mtp")
    with pytest.raises(UsageError, match="give one"):
        offline(tmp_path, file="x", host="gpu1")
    with pytest.raises(UsageError, match="sglang-version"):
        offline(tmp_path, file="x", sglang_version="newest")
    other = tmp_path / "other.log"
    other.write_text("hello\n")
    with pytest.raises(NotFound, match="not the log"):
        offline(tmp_path, file=str(other))


@pytest.mark.parametrize(
    ("identity", "holds", "verdict"),
    [
        ("ours", True, "fresh"),
        ("ours", False, "unknown"),
        ("foreign", True, "stale"),
        ("earlier launch", True, "stale"),
        ("nobody", None, "unknown"),
    ],
)
def test_freshness_is_the_agents_proof(identity: str, holds: bool | None, verdict: str) -> None:
    status = {
        "identity": identity,
        "proof": [{"check": "log file", "holds": holds, "expected": "a", "found": "b"}],
        "launch_id": "x",
        "boot": 2,
    }
    found = freshness(status)
    assert (found.verdict, found.launch_id, found.boot) == (verdict, "x", 2)
    assert any("log file" in reason for reason in found.reasons)


# -- answers of the server -------------------------------------------------------------------------------------------------------


def test_server_info_is_read_with_its_secrets_masked() -> None:
    assert (INFO.version, INFO.status) == ("0.5.17", "ready")
    assert check().capacity.graph_sizes == (1, 2, 3, 4)
    assert INFO.args["api_key"] == "***"
    assert INFO.accept_length is not None
    assert INFO.weight_gb == pytest.approx(51.051)
    assert INFO.graph_gb == pytest.approx(3.125, abs=0.01)
    assert INFO.simulated is False


def test_server_info_of_old_and_many_replicas() -> None:
    old = api.server_info(
        {
            "max_running_requests": 48,
            "internal_states": [{"memory_usage": {"weight": 1.0, "kvcache": 2.0, "graph": 0.5, "token_capacity": 9}}],
        }
    )
    assert (old.running_limit, old.graph_gb, old.kv_tokens, old.accept_length) == (None, 0.5, 9, None)
    two = api.server_info(
        {
            "internal_states": [
                {"effective_max_running_requests_per_dp": 4},
                {"effective_max_running_requests_per_dp": 3},
            ]
        }
    )
    assert (two.running_limit, two.running_limits) == (7, (4, 3))
    half = api.server_info({"internal_states": [{"effective_max_running_requests_per_dp": 4}, {}]})
    assert half.running_limit is None
    assert api.server_info({}).args == {}


def test_launch_and_simulation_are_told_by_the_server() -> None:
    info = api.server_info(
        {"simulated": True, "internal_states": [{"env_vars": {"MTPDEPLOY_LAUNCH_ID": "20260101T000000Z-aaaaaa"}}]}
    )
    assert (info.launch_id, info.simulated) == ("20260101T000000Z-aaaaaa", True)


@pytest.mark.parametrize(
    "keys",
    [
        {"spec_accept_token_num": 17, "spec_draft_token_num": 21},
        {"spec_accept_token_num": 17, "spec_draft_token_num": 21, "spec_accept_histogram": [0, 0, 4, 3]},
        {"spec_accepted_drafts": 17, "spec_proposed_drafts": 21, "spec_accept_histogram": [0, 0, 4, 3]},
        {
            "spec_num_correct_drafts": 17,
            "spec_num_proposed_drafts": 21,
            "spec_correct_drafts_histogram": [0, 0, 4, 3],
            "spec_accepted_drafts": 17,
        },
        {
            "spec_num_correct_drafts": 17,
            "spec_num_proposed_drafts": 21,
            "spec_correct_drafts_histogram": {"2": 4, "3": 3},
        },
    ],
    ids=["0.5.8", "0.5.10", "0.5.11", "0.5.17", "as a mapping"],
)
def test_meta_info_means_the_same_in_every_version(keys: dict[str, object]) -> None:
    meta = api.meta_info(
        {"completion_tokens": 24, "prompt_tokens": 5, "finish_reason": {"type": "length", "length": 24}, "spec_verify_ct": 7,
         "spec_accept_length": 24 / 7, "e2e_latency": 0.19, **keys}
    )  # fmt: skip
    s = meta.speculation
    assert s is not None
    assert (meta.finish, meta.completion_tokens, s.verify_steps, s.correct_drafts, s.proposed_drafts) == (
        "length",
        24,
        7,
        17,
        21,
    )
    assert s.by_position == ((0, 0, 4, 3) if any("histogram" in k for k in keys) else None)


def test_meta_info_without_speculation_has_none() -> None:
    meta = api.meta_info({"completion_tokens": 1, "finish_reason": None})
    assert (meta.speculation, meta.finish) == (None, None)


def test_metrics_are_summed_over_labels_but_not_over_ranks() -> None:
    found = api.metrics((GOLDEN / "api" / "metrics-0.5.17.txt").read_text())
    c = api.counters(found)
    assert c.running == 0
    assert c.queued == 4
    assert c.generation_tokens == sum(v for _, v in found.samples["generation_tokens_total"])
    assert c.verify_calls is not None
    assert c.kv_usage is not None
    assert c.state_usage == pytest.approx(0.67, abs=0.01)
    ranks = api.metrics('sglang:num_running_reqs{tp_rank="0",dp_rank="0"} 3.0\nsglang:num_running_reqs{tp_rank="1",dp_rank="0"} 3.0\n'
                        'sglang:num_running_reqs{tp_rank="0",dp_rank="1"} 2.0\nsglang:fwd_occupancy NaN\nnonsense\n')  # fmt: skip
    assert ranks.total("num_running_reqs") == 5
    assert api.counters(ranks).generation_tokens is None
    assert "fwd_occupancy" not in ranks.samples


def test_model_info_is_read() -> None:
    m = api.model_info({"model_path": "/m", "architectures": ["A"], "has_image_understanding": True})
    assert (m.model_path, m.architectures, m.image_input, m.served_model_name) == ("/m", ("A",), True, None)


def test_a_summary_without_arguments_gives_no_effective_value() -> None:
    v = verify({"tp_size": 1}, log=Summary(is_sglang=True), version=V)
    assert v.arguments[0].as_json() == {
        "name": "tp_size",
        "requested": 1,
        "effective": None,
        "status": "unknown",
        "rule": None,
        "source": None,
    }
