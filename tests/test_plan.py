"""Plans: made without a host, judged before anything is touched."""

import json
import subprocess
from dataclasses import replace

import pytest
import yaml

from mtpdeploy import inventory
from mtpdeploy.actions.plan import Plans, keep_calibration, plan, with_calibrations
from mtpdeploy.errors import ConfigError, PlanRefused, UsageError
from mtpdeploy.inventory.values import Host
from mtpdeploy.plan import beside, known_of, make_plan
from mtpdeploy.plan.calibration import from_stored
from mtpdeploy.progress import Silent
from mtpdeploy.secret import MASK, Secret
from mtpdeploy.sglang.model import shipped

LID = "20260131T120000Z-0a1b2c"
COMMAND = "python -m sglang.launch_server --model-path Qwen/Qwen3.6-27B"


@pytest.fixture
def home(tmp_path):
    (tmp_path / "inventories").mkdir()
    return tmp_path


def planned(home, **options):
    given = {
        "host": None, "profile": None, "inventory": (), "set_": (), "command": None, "gpu_memory_gb": None, "available_gb": None,
        "model_config": None, "sglang_version": None, "want_concurrency": None, "tokens_per_request": None,
    }  # fmt: skip
    return plan(home=home, talk=Silent(), **{**given, **options})


def deployment(home, profile="mtp", sets=(), **changed):
    return replace(inventory.resolve(inventory.load(home), None, profile, sets), **changed)


def made(home, facts=None, *, version="0.5.17", **changed):
    d = deployment(home, **changed)
    return make_plan(d, known_of(d, facts, sglang_version=version), home=home)


MEMORY_KEYS = {
    "weights_gb", "draft_weights_gb", "state_bytes_per_slot", "slots", "slots_per_request", "max_running_requests", "bound_by", "conv_gb",
    "ssm_gb", "intermediate_ssm_gb", "intermediate_conv_gb", "kv_bytes_per_token", "kv_tokens", "graph_reserve_gb", "headroom_gb",
    "mem_fraction_static", "suggestions", "assumptions",
}  # fmt: skip


def test_the_story_is_told_by_plan_alone(home):
    answer = planned(home, profile="mtp", gpu_memory_gb=96, sglang_version="0.5.10").as_json()
    memory = answer["memory"]
    assert set(memory) >= MEMORY_KEYS
    assert {"sglang_version", "command", "env", "files", "steps", "notes", "memory"} <= set(answer)
    assert (memory["slots"], memory["slots_per_request"], memory["max_running_requests"]) == (24, 5, 4)
    assert (round(memory["ssm_gb"], 2), round(memory["intermediate_ssm_gb"], 2)) == (3.52, 2.81)
    assert memory["bound_by"] == "state_slots"
    assert any({"max_running_requests", "max_mamba_cache_size"} <= set(s["set"]) for s in memory["suggestions"])
    assert answer["env"] == {"SGLANG_ENABLE_SPEC_V2": "1"}
    assert any(f["rule"] == "slots-cap-running" for f in answer["findings"])
    json.dumps(answer, allow_nan=False)


@pytest.mark.parametrize("profile", ["baseline", "mtp", "mtp-throughput", "mtp-lowmem"])
@pytest.mark.parametrize("version", ["0.5.10", "0.5.13", "0.5.18", "0.5.23"])
def test_each_shipped_profile_has_a_plan_for_each_version_that_the_simulator_plays(home, profile, version):
    answer = planned(home, profile=profile, gpu_memory_gb=141, sglang_version=version)
    assert answer.plan.argv[1:3] == ("-m", "sglang.launch_server")
    assert not [f for f in answer.plan.findings if f.severity == "refuse"]
    assert ("--mamba-scheduler-strategy" in answer.plan.argv) == (version in ("0.5.10", "0.5.13"))


def test_slots_for_sizes_both_flags_together(home):
    answer = planned(home, profile="mtp-throughput", gpu_memory_gb=96, sglang_version="0.5.17")
    assert answer.plan.args["max_running_requests"] == 16
    assert answer.plan.args["max_mamba_cache_size"] == 80
    assert answer.as_json()["memory"]["max_running_requests"] == 16
    old = planned(
        home, profile="mtp-throughput", gpu_memory_gb=96, sglang_version="0.5.10", set_=("env.SGLANG_ENABLE_SPEC_V2=0",)
    )
    assert old.plan.args["max_mamba_cache_size"] == 64


def test_an_explicit_size_wins_over_slots_for_and_that_is_said(home):
    answer = planned(
        home, profile="mtp-throughput", set_=("args.max_running_requests=8",), sglang_version="0.5.17", gpu_memory_gb=96
    )
    assert answer.plan.args["max_running_requests"] == 8
    assert any("wins" in note for note in answer.plan.notes)


def test_a_command_is_planned_as_it_stands_with_its_own_versions_names(home):
    text = f"SGLANG_SIMULATE_ACC_LEN=3.2 {COMMAND} --mamba-scheduler-strategy extra_buffer --tp 1 --mem-fraction-static 0.8"
    answer = planned(home, command=text, gpu_memory_gb=141, sglang_version="0.5.17")
    assert answer.plan.env == {"SGLANG_SIMULATE_ACC_LEN": "3.2"}
    assert any(f.rule == "simulated-acceptance" for f in answer.plan.findings)
    assert any("deprecated" in n for n in answer.plan.notes)
    assert answer.plan.budget is not None
    with pytest.raises(PlanRefused, match="mamba-radix-cache-strategy"):
        planned(home, command=text, gpu_memory_gb=141, sglang_version="0.5.20")


def test_an_open_server_without_a_key_is_refused_from_a_profile_and_said_of_a_command(home):
    with pytest.raises(PlanRefused, match="reachable from outside"):
        planned(home, profile="mtp", set_=("args.host=0.0.0.0",), sglang_version="0.5.17")
    answer = planned(home, command=f"{COMMAND} --host 0.0.0.0", sglang_version="0.5.17")
    assert any(f.rule == "open-server" and f.severity == "warn" for f in answer.plan.findings)
    assert made(home, args={**deployment(home).args, "host": "0.0.0.0"}, api_key=Secret("k")).argv


def test_everything_that_would_kill_the_launch_is_named_at_once(home):
    sets = ("args.mamba_radix_cache_strategy=no_buffer", "args.served_model_name=a:b")
    with pytest.raises(PlanRefused) as refused:
        planned(home, profile="mtp", set_=sets, sglang_version="0.5.12")
    assert {f["rule"] for f in refused.value.details["findings"]} == {"no-buffer-speculation", "served-model-name"}
    assert "Nothing was touched" in refused.value.message
    assert refused.value.exit_code == 4
    assert "--set args.mamba_radix_cache_strategy=extra_buffer" in refused.value.next_commands[0]


def test_a_key_never_reaches_argv_json_or_the_release_and_lies_in_a_file_of_its_own(home):
    key = "sk-hunter2hunter2"
    env = {"HF_TOKEN": Secret("hf_secretsecret"), "OTHER_API_KEY": "plainly-written"}
    p = made(home, api_key=Secret(key), env=env)
    release = p.release(LID, created_utc="2026-01-31T12:00:00Z", by="me@here")
    shown = json.dumps([p.as_json(), release]) + repr(p)
    for secret in (key, "hf_secretsecret"):
        assert secret not in shown
    assert "plainly-written" not in json.dumps([p.as_json(), release])
    assert p.as_json()["env"]["HF_TOKEN"] == MASK
    files = {f.path: f for f in p.files(LID)}
    assert yaml.safe_load(files["server.yml"].content) == {"api-key": key}
    assert (files["server.yml"].mode, files["env"].mode, files["launch.sh"].mode) == (0o600, 0o600, 0o700)
    assert key not in files["launch.sh"].content
    assert "--config" in files["launch.sh"].content


def test_a_key_that_looks_like_a_number_stays_text_in_yaml(home):
    p = made(home, api_key=Secret('12e4: "x\n#'))
    content = next(f.content for f in p.files() if f.path == "server.yml")
    assert yaml.safe_load(content) == {"api-key": '12e4: "x\n#'}


def test_a_key_that_sglang_would_read_as_an_option_is_refused(home):
    with pytest.raises(ConfigError, match="begins with a dash"):
        made(home, api_key=Secret("-x"))


def test_a_token_inside_an_argument_is_masked_where_the_plan_is_shown(home):
    extra = {"token": "hf_abcdefghijkl"}
    p = made(home, args={**deployment(home).args, "model_loader_extra_config": extra})
    assert "hf_abcdefghijkl" in " ".join(p.argv)
    assert "hf_abcdefghijkl" not in json.dumps(p.as_json()["command"])


def test_the_environment_file_gives_a_shell_exactly_the_values(home, tmp_path):
    env = {"A": "plain", "B": "with 'quotes' \"and\" $dollar `x` \\", "C": "two\nlines", "D": ""}
    p = made(home, env=env, versioned_env=())
    content = next(f.content for f in p.files() if f.path == "env")
    (tmp_path / "env").write_text(content)
    script = 'set -a; . ./env; printf \'%s\\0\' "$A" "$B" "$C" "$D"'
    out = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, check=True)
    assert out.stdout.decode().split("\0")[:4] == list(env.values())


@pytest.mark.parametrize("name", ["1A", "A-B", "A B", "MTPDEPLOY_LAUNCH_ID", "SPT_NOENV", ""])
def test_an_environment_name_that_no_shell_or_launch_can_take_is_refused(home, name):
    with pytest.raises(ConfigError, match="env\\."):
        made(home, env={name: "x"}, versioned_env=()).files()


def test_launch_sh_is_valid_shell_with_hostile_values_and_execs_the_very_words(home, tmp_path):
    hostile = 'a\'b "c" $HOME `id` ; rm -rf / \\ %s'
    p = made(home, args={**deployment(home).args, "served_model_name": hostile}, versioned_env=())
    script = next(f.content for f in p.files(LID) if f.path == "launch.sh")
    assert subprocess.run(["sh", "-n"], input=script.encode(), check=False).returncode == 0
    printed = script[script.index("exec ", script.index("printf")) :].replace("exec ", "printf '%s\\0' ", 1)
    out = subprocess.run(["sh", "-c", printed], capture_output=True, check=True).stdout.decode()
    assert tuple(out.split("\0")[:-1]) == p.argv


def test_the_fingerprint_changes_with_everything_that_matters_and_with_nothing_else(home):
    base = made(home)
    assert made(home).fingerprint == base.fingerprint
    assert replace(base, notes=("other",)).fingerprint == base.fingerprint
    others = [
        made(home, version="0.5.18"),
        made(home, sets=("args.mem_fraction_static=0.9",)),
        made(home, env={"A": "1"}),
        made(home, api_key=Secret("one")),
        made(home, api_key=Secret("two")),
        made(home, supervisor="tmux"),
        made(home, python="/other/python"),
        made(home, service="second"),
        made(home, drain_timeout_s=5.0),
    ]
    assert len({p.fingerprint for p in (base, *others)}) == 1 + len(others)
    (home / "templates").mkdir()
    (home / "templates" / "launch.sh.j2").write_text('{% extends "shipped/launch.sh.j2" %}\n# mine\n')
    changed = made(home)
    (home / "templates" / "launch.sh.j2").write_text("#!/bin/sh\n# mine\nexec {{ argv | sh }}\n")
    assert made(home).fingerprint not in (base.fingerprint, changed.fingerprint)


def test_the_release_is_the_agents_own_record(home):
    from mtpdeploy.agent.protocol import ReleaseFile

    release = made(home).release(LID, created_utc="2026-01-31T12:00:00Z", by="me@here")
    assert set(ReleaseFile.__annotations__) == set(release)
    assert release["argv"] == list(made(home).argv)
    json.dumps(release, allow_nan=False)


FACTS = {
    "python": {"sglang_version": "0.5.17"},
    "gpus": [
        {"index": 0, "memory_gb": 80.0, "free_gb": 10.0, "processes": [{"pid": 1, "used_gb": 69.0, "launch_id": LID}]},
        {"index": 1, "memory_gb": 141.0, "free_gb": 140.0, "processes": []},
        {
            "index": 2,
            "memory_gb": 141.0,
            "free_gb": 60.0,
            "processes": [{"pid": 9, "used_gb": 80.0, "launch_id": None}],
        },
    ],
}


def test_the_hosts_facts_decide_version_and_memory_of_the_gpus_in_use(home):
    d = deployment(home)
    known = known_of(d, FACTS)
    assert (str(known.version), known.version_is_fact) == ("0.5.17", True)
    assert known.gpu_memory_gb == 80
    assert known.available_gb == pytest.approx(79.0 - 2.18)  # what our own server holds will be free
    on_two = known_of(replace(d, args={**d.args, "base_gpu_id": 2}), FACTS)
    assert on_two.available_gb == pytest.approx(60 - 2.18)
    assert any("did not start" in text for text in on_two.assumptions)
    assert known_of(replace(d, env={"CUDA_VISIBLE_DEVICES": "1"}), FACTS).gpu_memory_gb == 141
    assert known_of(replace(d, args={**d.args, "tp_size": 2}), FACTS).gpus == (0, 1)
    assert known_of(replace(d, args={**d.args, "dp_size": 3}), FACTS).gpus == (0, 1, 2)
    assert known_of(
        replace(d, args={**d.args, "tp_size": 2, "dp_size": 2, "enable_dp_attention": True}), FACTS
    ).gpus == (0, 1)
    assert make_plan(d, known, home=home).needs()["gpu_free_gb"].keys() == {"0"}


def one_gpu(free_gb, *processes, **more):
    return {"gpus": [{"index": 0, "memory_gb": 139.8, "free_gb": free_gb, "processes": list(processes)}], **more}


def test_only_what_this_services_own_launch_holds_comes_free(home):
    ours = {"pid": 1, "used_gb": 80.0, "launch_id": LID}
    theirs = {"pid": 2, "used_gb": 20.0, "launch_id": "20260101T000000Z-abcdef"}
    d = deployment(home)
    known = known_of(d, one_gpu(38.0, ours, theirs, living_launches={d.service: [LID], "other": [theirs["launch_id"]]}))
    assert known.available_gb == pytest.approx(38 + 80 - 2.18)
    assert any("80.00 GB that the running launch holds come free" in text for text in known.assumptions)
    assert any("another service" in text for text in known.assumptions)


@pytest.mark.parametrize("processes", [[], [{"pid": 1, "used_gb": None, "launch_id": LID}]])
def test_where_nvidia_smi_does_not_tell_what_our_launch_holds_the_plan_says_that_it_is_not_known(home, processes):
    d = deployment(home)
    known = known_of(d, one_gpu(8.0, *processes, living_launches={d.service: [LID]}))
    assert known.available_gb == pytest.approx(8 - 2.18)
    assert any("is not known" in text and "running launch" in text for text in known.assumptions)
    idle = known_of(d, one_gpu(139.0, living_launches={}))
    assert not any("running launch" in text for text in idle.assumptions)


def test_the_hosts_own_config_and_weight_bytes_are_used(home):
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    }  # fmt: skip
    d = deployment(home, "baseline")
    known = known_of(d, {**FACTS, "model": {"path": "/m", "config": config, "weights_bytes": 5 << 30}})
    assert known.model_is_fact
    assert make_plan(d, known, home=home).budget.pools.weights_gb == pytest.approx(5.15, abs=0.01)
    unknown = known_of(d, {**FACTS, "model": {"path": "/m", "config": {"architectures": ["Strange"]}}})
    p = make_plan(d, unknown, home=home)
    assert p.as_json()["memory"] is None
    assert "Strange" in p.as_json()["memory_unknown_because"]


def test_a_version_that_nobody_knows_is_assumed_and_said(home):
    d = deployment(home)
    known = known_of(d)
    assert not known.version_is_fact
    assert any("taken as 0.5.23" in note for note in known.notes)
    assert make_plan(d, known, home=home).release(LID, created_utc="", by="")["sglang_version"] is None


def test_a_build_that_the_table_lacks_is_planned_by_its_own_help(home):
    d = deployment(home)
    facts = {"python": {"sglang_version": "0.0.0.dev1+gabc"}}
    assert make_plan(d, known_of(d, facts), home=home).wants_help
    names = ["--model-path", "--host", "--port", "--speculative-algorithm", "--speculative-num-steps"]
    with pytest.raises(PlanRefused, match="mem-fraction-static"):
        make_plan(d, known_of(d, {**facts, "help_flags": names}), home=home)


def test_stored_facts_of_the_host_are_used_without_a_connection(home):
    (home / "inventories" / "hosts.yml").write_text(
        "hosts:\n  gpu1: {address: 10.0.0.1, user: me}\n  gpu2: {address: 10.0.0.2, user: me}\n"
    )
    (home / "runs" / "hosts").mkdir(parents=True)
    (home / "runs" / "hosts" / "gpu1.json").write_text(json.dumps({"facts": FACTS}))
    answer = planned(home, host="gpu1", profile="mtp").as_json()
    assert answer["sglang_version"] == "0.5.17"
    assert answer["host"] == "gpu1"
    assert answer["memory"]["slots"] == 24
    both = planned(home, host="gpu1,gpu2", profile="mtp")
    assert isinstance(both, Plans)
    assert set(both.as_json()["hosts"]) == {"gpu1", "gpu2"}
    assert both.exit_code == 0


def test_a_simulated_host_is_labelled(home):
    from mtpdeploy.inventory.values import Simulate

    d = replace(deployment(home), host=Host("here", local=True, simulate=Simulate(sglang_version="0.5.13")))
    p = make_plan(d, known_of(d), home=home)
    assert p.as_json()["simulated"] is True
    assert str(p.version) == "0.5.13"
    assert any("simulated" in text for text in p.budget.assumptions)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"profile": "mtp", "command": COMMAND}, "exclude each other"),
        ({"profile": "mtp", "tokens_per_request": 100}, "--want-concurrency"),
        ({"profile": "mtp", "gpu_memory_gb": -1.0}, "--gpu-memory-gb"),
        ({}, "which profile"),
        ({"command": COMMAND, "want_concurrency": 4, "sglang_version": "0.5.17"}, "--want-concurrency"),
        ({"command": "ls"}, "no SGLang server"),
    ],
)
def test_options_that_cannot_be_meant_are_usage_errors(home, options, words):
    with pytest.raises(UsageError, match=words):
        planned(home, **options)


def test_a_plan_that_the_budget_cannot_hold_says_how_much_is_needed_and_ends_with_4(home):
    answer = planned(home, profile="mtp", gpu_memory_gb=40, sglang_version="0.5.18")
    assert answer.exit_code == 4
    assert "the weights take 56.6 GB of 37.2 that are free" in answer.plan.findings[-1].message
    assert answer.as_json()["memory"]["slots"] >= 0
    assert planned(home, profile="mtp", gpu_memory_gb=95, sglang_version="0.5.18").exit_code == 0
    many = {"profile": "mtp", "gpu_memory_gb": 95, "sglang_version": "0.5.18", "want_concurrency": 500}
    assert planned(home, **many).exit_code == 4


def test_want_concurrency_answers_with_one_set_of_flags(home):
    answer = planned(
        home, profile="mtp", gpu_memory_gb=96, sglang_version="0.5.17", want_concurrency=16, tokens_per_request=4096
    ).as_json()
    assert answer["fit"]["fits"] is True
    assert answer["fit"]["set"]["max_mamba_cache_size"] == 5 * answer["fit"]["set"]["max_running_requests"]


def test_model_config_takes_a_file_and_overrides_the_path(home):
    from mtpdeploy.sglang import model

    file = model.__file__.replace("model.py", "models/qwen3.6-27b.json")
    text = "python -m sglang.launch_server --model-path /somewhere/else --mem-fraction-static 0.85"
    answer = planned(home, command=text, model_config=file, gpu_memory_gb=96, sglang_version="0.5.17")
    assert answer.plan.known.model == shipped("qwen3.6-27b")
    assert answer.plan.budget is not None
    without = planned(home, command=text, gpu_memory_gb=96, sglang_version="0.5.17").as_json()
    assert without["memory"] is None
    assert "--model-config" in without["memory_unknown_because"]


# What run A of a real server (0.5.17, H200, 95.0 GB free of 95.6) said of itself, as `logs --json` has it.
SUMMARY = {
    "weights": {"before_gb": 92.82, "mem_gb": 51.05},
    "draft": {"mem_gb": 5.53},
    "mamba_cache": {"slots": 24, "ssm_gb": 3.52, "intermediate_gb": 2.81},
    "max_total_num_tokens": 259066,
    "max_running_requests": 4,
    "available_gpu_mem_gb": 14.47,
}


def run_a(home, facts=None, **options):
    d = deployment(home, sets=("args.mem_fraction_static=0.85",))
    return make_plan(d, known_of(d, facts, sglang_version="0.5.17", gpu_memory_gb=95.6, **options), home=home)


def test_predicted_stands_beside_actual_after_a_launch(home):
    rows = {row.name: row for row in beside(run_a(home, available_gb=92.82), SUMMARY)}
    assert rows["state slots"].difference == 0
    assert rows["requests at once"].difference == 0
    assert abs(rows["KV tokens"].difference) < 200
    assert abs(rows["free at the end (GB)"].difference) < 0.2


def test_what_a_launch_measured_makes_the_next_plan_exact_and_is_named(home):
    host = Host("gpu1", address="10.0.0.1")
    strange = {
        **SUMMARY,
        "max_total_num_tokens": 250_000,
        "available_gpu_mem_gb": 13.0,
        "weights": {"before_gb": 92.0, "mem_gb": 51.6},
    }
    first = run_a(home)
    assert first.budget.pools.kv_tokens != 250_000
    assert keep_calibration(home, host, first, strange, LID)
    second = run_a(home, with_calibrations(home, host, {}))
    assert abs(second.budget.pools.kv_tokens - 250_000) <= 2
    assert second.budget.pools.pre_load_gb == pytest.approx(92.0)
    assert second.budget.pools.avail_end_gb == pytest.approx(13.0, abs=0.05)
    assert any(LID in text for text in second.budget.assumptions)
    assert not any(LID in text for text in run_a(home, with_calibrations(home, Host("gpu2"), {})).budget.assumptions)


def test_memory_that_others_held_while_a_launch_calibrated_is_not_subtracted_twice(home):
    # An H200 on which another process holds 44.8 GiB: free before the load 92.82, at the first launch and at the next.
    d = deployment(home, sets=("args.mem_fraction_static=0.85",))
    holder = {"pid": 9, "used_gb": 44.793, "launch_id": None}
    facts = {"python": {"sglang_version": "0.5.17"}, **one_gpu(95.0, holder)}
    first = make_plan(d, known_of(d, facts), home=home)
    host = Host("gpu1", address="10.0.0.1")
    assert keep_calibration(home, host, first, SUMMARY, LID)
    running = {
        **facts,
        **one_gpu(8.0, holder, {"pid": 7, "used_gb": 87.0, "launch_id": LID}),
        "living_launches": {d.service: [LID]},
    }
    for now in (facts, running):
        assert known_of(d, with_calibrations(home, host, now)).available_gb == pytest.approx(92.82, abs=0.01)
    alone = known_of(d, with_calibrations(home, host, {**facts, **one_gpu(139.0)}))
    assert alone.available_gb == pytest.approx(92.82 + 43.8, abs=0.01)


def test_a_calibration_that_holds_a_strangers_memory_is_not_used(home):
    stored = {"process_gb": 46.98, "weights_offset_gb": 0.0, "end_offset_gb": 0.0, "source": "launch x"}
    assert from_stored(stored) is None
    assert from_stored({**stored, "process_gb": 2.8}) is not None


@pytest.mark.parametrize(
    "changed",
    [{"max_total_num_tokens": None}, {"weights": {}}, {"mamba_cache": {"slots": 23}}, {"max_total_num_tokens": 1000}],
)
def test_a_log_that_decides_nothing_calibrates_nothing(home, changed):
    assert not keep_calibration(home, Host("gpu1"), run_a(home), {**SUMMARY, **changed}, LID)
    (home / "runs" / "hosts").mkdir(parents=True)
    (home / "runs" / "hosts" / "gpu1.calibration.json").write_text("[]")
    assert with_calibrations(home, Host("gpu1"), {})["calibrations"] == {}
