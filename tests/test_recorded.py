"""Everything that reads SGLang's output, held against recordings of real servers and real failures."""

from __future__ import annotations

import functools
import json
import re
import shlex
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import recorded
import tooling
from recorded import Recorded

from mtpdeploy.sglang import api
from mtpdeploy.sglang.command import parse
from mtpdeploy.sglang.failures import CLASSES, diagnose
from mtpdeploy.sglang.logs import Summary, summarise
from mtpdeploy.sglang.masking import mask
from mtpdeploy.sglang.memory import Pools, allocate
from mtpdeploy.sglang.model import shipped
from mtpdeploy.sglang.verify import Freshness, Verification, verify
from mtpdeploy.sglang.versions import Version

V = Version.parse("0.5.17")
MODEL = shipped("qwen3.6-27b")
SERVERS, ANSWERING, FAILURES = recorded.servers(), recorded.answering(), recorded.failures()
OF_THE_27B = [one for one in SERVERS if "qwen36-27b" in one.said["command"]]
by_name = pytest.mark.parametrize


@functools.cache
def _read(log: bytes) -> Summary:
    return summarise([log])


def summary(one: Recorded) -> Summary:
    return _read(one.log)


def asked(one: Recorded) -> dict[str, object]:
    return dict(parse(one.said["command"], V).args)


def pools(one: Recorded) -> Pools:
    """What the budget says before the launch, from the command and the free memory alone."""
    log = summary(one)
    assert log.weights is not None
    free = log.weights["before_gb"]
    assert isinstance(free, float)
    return allocate(parse(one.said["command"], V).args, one.said["env"], V, MODEL, 140.4, free)


def check(one: Recorded) -> Verification:
    return verify(
        asked(one),
        env=one.said["env"],
        rendered=shlex.split(one.said["command"]),
        server_info=api.server_info(one.body("server_info.json")) if "server_info.json" in one.files else None,
        log=summary(one),
        version=V,
        freshness=Freshness("fresh"),
        model=MODEL,
    )


# ------------------------------------------------------------ what is there


def test_there_are_twelve_servers_with_all_their_answers_and_eight_failures_made_on_purpose() -> None:
    assert len({one.said["command"] for one in ANSWERING}) >= 12
    assert len([one for one in ANSWERING if one.said["made_by"].startswith("mtpdeploy")]) >= 6
    assert len([one for one in FAILURES if one.said["on_purpose"]]) >= 8


@by_name("one", [*SERVERS, *FAILURES], ids=repr)
def test_no_recording_names_the_machine_that_it_was_made_on(one: Recorded) -> None:
    for data in one.files.values():
        assert re.findall(rb"/root/|/home/|/opt/torch|/tmp/", data) == []
        addresses = set(re.findall(rb"\b\d{1,3}(?:\.\d{1,3}){3}\b", data))
        assert addresses <= {b"127.0.0.1", b"0.0.0.0"}
        assert b"GPU-" not in data


# ------------------------------------------------------------ the log


@by_name("one", SERVERS, ids=repr)
def test_a_servers_log_is_read_as_one_boot_that_did_not_fail(one: Recorded) -> None:
    read = summary(one)
    # two recordings end with the pools: they were stopped when those were seen
    ready = None if one.name in ("modes-replay", "modes-radixoff") else True
    assert (read.ready, read.cause, read.failed_in, read.boots, read.simulated) == (ready, None, None, 1, None)
    assert read.server_args is not None
    assert read.server_args["load_format"] == "dummy"
    assert read.server_args["model_path"] in one.said["command"]


@by_name("one", ANSWERING, ids=repr)
def test_the_log_and_the_servers_own_answer_give_the_same_pools(one: Recorded) -> None:
    read, info = summary(one), api.server_info(one.body("server_info.json"))
    assert read.max_running_requests == info.running_limit
    assert read.max_total_num_tokens == info.kv_tokens == info.max_total_num_tokens
    assert read.mamba_cache is not None
    assert read.mamba_cache["slots"] == info.slots
    assert read.available_gpu_mem_gb == pytest.approx(info.startup_available_gb, abs=0.006)


@by_name("one", FAILURES, ids=repr)
def test_a_failure_is_read_as_what_was_done(one: Recorded) -> None:
    read = summary(one)
    made = diagnose(read, exit_status=one.said["exit_status"], host="h", profile="p")
    assert made.cause == one.said["cause"]
    assert made.evidence
    assert all(line in one.log.decode(errors="replace") for line in made.evidence)
    assert made.next_commands
    assert CLASSES[made.cause or ""].meaning == made.meaning


@by_name("one", [recorded.server("A-mtp24"), *FAILURES], ids=repr)
def test_a_log_cut_anywhere_is_read_without_a_fault(one: Recorded) -> None:
    size = len(one.log)
    for cut in range(0, size, max(1, size // 6)):
        json.dumps(summarise([one.log[:cut]]).as_json(), allow_nan=False)


# ------------------------------------------------------------ verify


@by_name("one", SERVERS, ids=repr)
def test_every_server_runs_what_was_asked_for_but_the_one_that_asked_for_more_than_its_slots(one: Recorded) -> None:
    found = check(one)
    if one.name == "B-nomtp":
        assert (found.verdict, found.capacity.requested, found.capacity.effective) == ("differs", 64, 18)
        assert "state slots" in found.why[0]
    else:
        assert (found.verdict, found.why) == ("same", ())
    assert {a.name for a in found.arguments if a.status != "same"} <= {"speculative_algorithm", "max_running_requests"}
    speculative = "speculative-algorithm" in one.said["command"]
    assert found.acceptance.gate == ("off" if not speculative else "fictitious")


@by_name("one", ANSWERING, ids=repr)
def test_another_value_than_the_one_in_force_is_seen(one: Recorded) -> None:
    wrong = {**asked(one), "mem_fraction_static": 0.5}
    info = api.server_info(one.body("server_info.json"))
    found = verify(wrong, server_info=info, log=summary(one), version=V, freshness=Freshness("fresh"))
    assert found.verdict == "differs"
    assert [a.name for a in found.arguments if a.status == "ignored"] == ["mem_fraction_static"]


# ------------------------------------------------------------ memory


@by_name("one", OF_THE_27B, ids=repr)
def test_the_budget_gives_each_pool_within_two_percent_and_slots_and_requests_exactly(one: Recorded) -> None:
    before, after = pools(one), summary(one)
    assert before.failure is None
    assert after.mamba_cache is not None
    assert after.kv_cache is not None
    real: dict[str, Any] = {**after.mamba_cache, **after.kv_cache}
    assert (before.slots, before.max_running) == (real["slots"], after.max_running_requests)
    if after.slots_per_request is not None:
        assert before.slots_per_request == after.slots_per_request
    assert before.kv_tokens == pytest.approx(after.max_total_num_tokens, rel=0.005)
    pairs = {
        "weights": (before.weights_gb, (after.weights or {}).get("mem_gb")),
        "conv": (before.conv_gb, real.get("conv_gb")),
        "ssm": (before.ssm_gb, real.get("ssm_gb")),
        "intermediate ssm": (before.intermediate_ssm_gb, real.get("intermediate_gb") or 0.0),
        "intermediate conv": (before.intermediate_conv_gb, real.get("intermediate_conv_gb") or 0.0),
        "kv": (before.k_gb + before.v_gb, real["k_gb"] + real["v_gb"]),
    }
    for name, (predicted, actual) in pairs.items():
        # two decimals are printed: of a small pool 0.005 GB is more than 2 %
        assert predicted == pytest.approx(actual, rel=0.02, abs=0.0101 if name == "kv" else 0.0051), name
    assert before.avail_end_gb == pytest.approx(after.available_gpu_mem_gb, abs=0.2)


# ------------------------------------------------------------ HTTP answers


@by_name("one", ANSWERING, ids=repr)
def test_every_field_that_this_version_gives_is_read_from_its_answers(one: Recorded) -> None:
    info = api.server_info(one.body("server_info.json"))
    speculative = "speculative-algorithm" in one.said["command"]
    assert (info.version, info.simulated, info.launch_command) == ("0.5.17", False, None)
    assert info.args["model_path"] == "/models/qwen36-27b"
    assert info.weight_gb == pytest.approx(51.05, abs=0.01)
    assert info.kv_gb
    assert info.graph_gb is not None
    assert info.startup_s["tokenizer_e2e"] > info.startup_s["scheduler_e2e"] > 0
    assert (info.accept_length is not None) is speculative
    model = api.model_info(one.body("model_info.json"))
    assert (model.model_path, model.image_input) == ("/models/qwen36-27b", True)
    found = api.counters(api.metrics(one.files["metrics.txt"].decode()))
    given = {name: getattr(found, name) for name in found.__slots__}
    absent = {name for name, value in given.items() if value is None}
    # counters that never moved are not exported
    assert absent <= {"cached_tokens", "aborted", "retracted"} | (
        set() if speculative else {"verify_calls", "accept_length"}
    )
    assert (given["generation_tokens"] or 0) > 100
    if speculative:
        assert found.generation_tokens is not None
        assert found.verify_calls
        assert found.generation_tokens / found.verify_calls == pytest.approx(3.2, abs=0.12)


# ------------------------------------------------------------ secrets


@by_name("one", SERVERS, ids=repr)
def test_a_key_in_a_servers_arguments_is_in_nothing_that_is_made_of_them(one: Recorded) -> None:
    keyed = one.log.replace(b"api_key=None", b"api_key='s3sam3-0pen'")
    assert b"s3sam3-0pen" in keyed
    read = summarise([keyed])
    assert "s3sam3-0pen" not in json.dumps(read.as_json())
    assert "s3sam3-0pen" not in mask(keyed.decode(errors="replace"))
    if "server_info.json" in one.files:
        document = one.body("server_info.json")
        document["api_key"] = document["internal_states"][0]["admin_api_key"] = "s3sam3-0pen"
        found = verify(asked(one), server_info=api.server_info(document), log=read, version=V)
        assert "s3sam3-0pen" not in json.dumps(found.as_json()) + repr(api.server_info(document))


# ------------------------------------------------------------ how they are made


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return tooling.tool("fixtures")


def test_trimming_takes_repeated_access_lines_and_nothing_else(tool: ModuleType) -> None:
    lines = [
        b'[t] INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK\n',
        b"[t] Decode batch, #running-req: 1\n",
        b'[t] INFO:     127.0.0.1:2 - "GET /health HTTP/1.1" 200 OK\n',
        b'[t] INFO:     127.0.0.1:3 - "GET /health HTTP/1.1" 503 Service Unavailable\n',
        b"[t] Decode batch, #running-req: 1\n",
        b"\r  0%|   | 0/2\r 50%|#  | 1/2\n",
    ]
    assert tool.trim(b"".join(lines)) == b"".join(lines[:2] + lines[3:])


def test_folders_of_the_recording_machine_are_replaced_and_others_stay(tool: ModuleType) -> None:
    text = "/root/stage/models/q /opt/torch/.venv/lib/python3.12/site-packages/x.py /models/y /root/mtpdeploy/sglang"
    assert tool.scrub(text) == "/models/q /site/x.py /models/y /srv/mtpdeploy/sglang"


def test_the_same_recordings_give_the_same_archives(tool: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"[t] \xff broken encoding stays\n")
    recipe = [{"name": "a", "kind": kind, "command": "c", "log": str(log)} for kind in ("server", "failure")]
    made = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        tool.pack(recipe, folder)
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "one" / "servers.tar.xz") as packed:
        stream = packed.extractfile("a/server.log")
        assert stream is not None
        assert stream.read() == log.read_bytes()
