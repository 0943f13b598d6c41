"""Inventories, profiles and workloads: what is refused and how it is told, which layer wins, which host is meant."""

from __future__ import annotations

import contextlib
import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import SETTINGS

from mtpdeploy.errors import ConfigError, MtpError, NotFound, UsageError
from mtpdeploy.inventory import (
    Inventory,
    env_for,
    load,
    load_profile,
    profile_names,
    resolve,
    workload,
    workload_names,
)
from mtpdeploy.inventory.documents import parse, read
from mtpdeploy.inventory.schema import GpuEntry, HostEntry, InventoryFile, SimulateEntry, Ssh, keys
from mtpdeploy.inventory.settings import matches
from mtpdeploy.inventory.values import Deployment, Gpu, Simulate, SshOptions
from mtpdeploy.plan import known_of
from mtpdeploy.resources import bundled
from mtpdeploy.secret import Secret
from mtpdeploy.sglang.model import shipped
from mtpdeploy.sglang.versions import Version

EXAMPLE = bundled("inventories") / "example.yml"
TWO_HOSTS = """
defaults: {workdir: /srv/mtp, args: {port: 31000}, env: {A: defaults, B: defaults}}
groups:
  big:
    args: {tp_size: 2}
    env: {B: group}
    models: {Qwen3.6-27B: /models/27b}
hosts:
  gpu1: {address: 10.0.0.1, groups: [big], venv: /opt/sglang}
  gpu2: {address: 10.0.0.2, groups: [big, spare], args: {tp_size: 4}, user: ops, port: 2222}
"""


def an_inventory(home: Path, text: str = TWO_HOSTS, name: str = "lab.yml") -> Inventory:
    write(home, f"inventories/{name}", text)
    return load(home)


def write(home: Path, name: str, text: str) -> Path:
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(home: Path, text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        an_inventory(home, text)
    return refused.value.message.replace(str(home / "inventories") + "/", "")


def deployment(home: Path, host: str = "gpu1", profile: str = "mtp", *sets: str, text: str = TWO_HOSTS) -> Deployment:
    known = an_inventory(home, text)
    return resolve(known, known.hosts[host], profile, sets)


# — What is wrong is told with file, line, key and what would be right —


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hosts:\n  gpu1:\n    adress: x\n", "lab.yml:3: hosts.gpu1.adress: unknown key; did you mean address?"),
        ("hosts:\n  a:\n    port: '22'\n", "lab.yml:3: hosts.a.port: should be a whole number, not '22'"),
        ("hosts:\n  a: {port: 70000}\n", "lab.yml:2: hosts.a.port: should be at most 65535, not 70000"),
        ("hosts:\n  a: {local: 1}\n", "should be true or false, not 1"),
        ("hosts: {a: {supervisor: runit}}", "should be one of auto, systemd, systemd-user, tmux, detached, not 'runit'"),
        ("hosts: {a: {workdir: data}}", "should be an absolute path or one below ~/, not 'data'"),
        ("hosts: {a: {address: -oProxyCommand=x}}", "should be one word, without @, that does not begin with -"),
        ("hosts: {a: {sglang_version: latest}}", "lab.yml:1: hosts.a.sglang_version: 'latest' is not a version such as 0.5.17"),
        ("hosts: {a: {sglang_version: 0.5}}", "should be text; put it in quotes"),
        ("hosts: {a: {service: 'A B'}}", "lower case letters, digits and dashes"),
        ("hosts: {a: {service: agent}}", "something else of ours under agent and bench, not 'agent'"),
        ("defaults: {service: bench}", "should be another name"),
        ("hosts: {a: {local: true, address: x}}", "stands beside local: true; keep one"),
        ("hosts: {a: {python: /p, venv: /v}}", "hosts.a.venv: stands beside python; keep one of them"),
        ("hosts: {'a b': {}}", "should be a plain name"),
        ("groups: {a: {}}\nhosts: {a: {}}", "is also the name of a group; rename one"),
        ("hosts: [a]", "hosts: should be a mapping, not ['a']"),
        ("- a", "should be a mapping of keys to values"),
        ("hosts: {a: }\nhosts: {b: }", "lab.yml:2: hosts: stands here twice, first in line 1; keep one"),
        ("hosts: {\n  a: [", "not YAML:"),
        ("hosts: {a: !!python/name:os.system {}}", "builds an object; write plain values"),
        ("a: &a [*a]", "lab.yml"),
        ("hosts: {a: {args: {mem_fraction: 0.9}}}", "has this argument; did you mean mem_fraction_static?"),
        ("hosts: {a: {args: {tp_size: two}}}", "args.tp_size: should be a whole number, not 'two'"),
        ("hosts: {a: {args: {tp_size: true}}}", "args.tp_size: should be a whole number, not True"),
        ("hosts: {a: {args: {enable_metrics: 1}}}", "args.enable_metrics: should be true or false, not 1"),
        ("hosts: {a: {args: {kv_cache_dtype: fp9}}}", "'fp9' is not one of"),
        ("hosts: {a: {args: {tp_size: 2, tensor_parallel_size: 2}}}", "means the same as tp_size; keep one"),
        ("hosts: {a: {args: {model_path: ~/m}}}", "SGLang does not expand ~"),
        ("hosts: {a: {args: {api_key: abc}}}", "a secret in args would show in the host's process list"),
        ("hosts: {a: {env: {1A: x}}}", "should be a variable's name"),
        ("hosts: {a: {env: {A: {from_evn: X}}}}", "should be {from_env: NAME} or {from_file: PATH}; did you mean from_env?"),
        ("hosts: {a: {env: {A: {value: 1, versions: old}}}}", "should be a condition such as '<=0.5.10'"),
        ("hosts: {a: {env: {A: \"x\\ny\"}}}", "should be one line of text"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_where_it_stands_and_what_would_be_right(home: Path, text: str, told: str) -> None:
    message = refusal(home, text)
    assert told in message
    assert "abc" not in message or "api_key" not in text, "the secret itself is not repeated"


def test_all_mistakes_of_all_files_are_told_at_once(home: Path) -> None:
    write(home, "inventories/a.yml", "hosts: {a: {adress: x, port: no}}")
    write(home, "inventories/b.yml", "hosts: {b: {usr: x}}")
    with pytest.raises(ConfigError) as refused:
        load(home)
    assert refused.value.message.startswith("3 things to correct:")
    assert len(refused.value.details["errors"]) == 3  # type: ignore[arg-type]


def test_a_file_that_is_not_utf8_is_told_by_line_and_byte(home: Path) -> None:
    path = write(home, "inventories/lab.yml", "")
    path.write_bytes(b"hosts:\n  a: {user: \xe9}\n")
    with pytest.raises(ConfigError, match=r"lab.yml:2: byte 0xe9 is not UTF-8"):
        load(home)


def test_a_nest_of_aliases_is_refused_before_it_fills_memory(home: Path) -> None:
    levels = "".join(f"l{n}: &l{n} [{','.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 9))
    with pytest.raises(ConfigError, match="more than"):
        parse(f"l0: &l0 [x]\n{levels}", Path("nest.yml"))


def test_a_host_in_two_files_is_refused(home: Path) -> None:
    write(home, "inventories/a.yml", "hosts: {a: {}}")
    write(home, "inventories/b.yml", "hosts: {a: {}}")
    with pytest.raises(ConfigError, match=r"b.yml:1: hosts.a: is already in .*a.yml"):
        load(home)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=st.sampled_from(string.printable + "äé\x00\u2028")))
def test_any_text_is_either_an_inventory_or_a_refusal(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, "any.yml", text)
    with contextlib.suppress(ConfigError):
        load(tmp_path, [path])


# — Hosts —


def test_the_commented_example_is_a_valid_inventory(home: Path) -> None:
    known = load(home, [EXAMPLE])
    assert list(known.hosts) == ["gpu1", "gpu2", "rehearsal"]
    assert known.groups == {"h200": ("gpu1", "gpu2")}
    assert known.hosts["gpu1"].gpus == (Gpu(0, "NVIDIA H200", 139.8),)


def test_the_commented_example_shows_every_key() -> None:
    shown: set[str] = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            shown.update(value)
            for each in value.values():
                walk(each)
        elif isinstance(value, list):
            for each in value:
                walk(each)

    walk(read(EXAMPLE).data)
    for model in (InventoryFile, HostEntry, Ssh, SimulateEntry, GpuEntry):
        missing = (
            set(keys(model)) - shown - {"index", "description"} - ({"simulate"} if model is InventoryFile else set())
        )
        assert missing == set(), model.__name__


def test_example_yml_is_never_read_as_an_inventory(home: Path) -> None:
    write(home, "inventories/example.yml", "hosts: {a: {}}")
    write(home, "inventories/lab.yml", "hosts: {b: {}}")
    assert list(load(home).hosts) == ["b"]


def test_ssh_and_simulate_defaults_are_those_of_the_values() -> None:
    assert SshOptions(**Ssh().model_dump()) == SshOptions()
    assert Simulate(**SimulateEntry().model_dump()) == Simulate()


def test_a_host_without_address_is_an_alias_of_the_ssh_configuration(home: Path) -> None:
    assert an_inventory(home, "hosts: {gpu1: }").hosts["gpu1"].address == "gpu1"


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("gpu1", ["gpu1"]),
        ("big", ["gpu1", "gpu2"]),
        ("gpu2,big", ["gpu2", "gpu1"]),
        ("spare", ["gpu2"]),
        ("gpu1,root@1.2.3.4:22", ["gpu1", "root@1.2.3.4:22"]),
    ],
)
def test_host_takes_hosts_groups_lists_and_aliases_each_once(home: Path, option: str, names: list[str]) -> None:
    assert [host.name for host in an_inventory(home).choose(option)] == names


def test_an_alias_carries_user_name_and_port(home: Path) -> None:
    known = an_inventory(home)
    (host,) = known.choose("root@box.example:2200")
    assert (host.user, host.address, host.port, host.source) == ("root", "box.example", 2200, None)
    (host,) = known.choose("root@[fe80::1]:22")
    assert (host.address, host.port) == ("fe80::1", 22)
    (host,) = known.choose("box")
    assert (host.user, host.address, host.port) == (None, "box", None)


@pytest.mark.parametrize(
    "option", ["", ",", "gpu1,,gpu2", "-oProxyCommand=x", "a b", "a;b", "a@b@c", "a:99999", "a:b", "$(x)", "-l@x"]
)
def test_what_is_no_host_name_is_refused(home: Path, option: str) -> None:
    with pytest.raises(UsageError, match="--host"):
        an_inventory(home).choose(option)


def test_without_the_option_the_last_deployed_host_is_meant_else_the_only_one_else_it_is_asked(home: Path) -> None:
    known = an_inventory(home)
    assert known.choose(None, "gpu2")[0].name == "gpu2"
    with pytest.raises(UsageError, match="gpu1, gpu2"):
        known.choose(None)
    assert an_inventory(home, "hosts: {only: }").choose(None)[0].name == "only"


# — Layers —


def test_the_stronger_layer_wins_key_by_key_and_each_value_knows_its_layer(home: Path) -> None:
    one = deployment(home, "gpu1", "mtp", "args.port=31001", "env.B=set")
    other = deployment(home, "gpu2")
    assert (one.args["tp_size"], other.args["tp_size"]) == (2, 4)
    assert (one.args["port"], other.args["port"]) == (31001, 31000)
    assert (one.env["A"], one.env["B"], other.env["B"]) == ("defaults", "set", "group")
    assert one.origin["args.tp_size"] == "group big (inventories/lab.yml)"
    assert other.origin["args.tp_size"] == "host gpu2 (inventories/lab.yml)"
    assert one.origin["args.port"] == "--set args.port"
    assert one.origin["supervisor"] == "default"
    assert one.origin["args.speculative_num_steps"].startswith("profile mtp (")
    assert (one.workdir, one.python) == ("/srv/mtp", "/opt/sglang/bin/python")


def test_null_takes_a_weaker_layer_s_argument_back(home: Path) -> None:
    assert "max_mamba_cache_size" not in deployment(home, "gpu1", "mtp", "args.max_mamba_cache_size=null").args
    assert deployment(home, "gpu1", "mtp", "args.port=null").args["port"] == 30000


def test_the_host_says_where_a_model_lies_and_without_it_the_id_stands(home: Path) -> None:
    assert deployment(home).args["model_path"] == "/models/27b"
    plain = an_inventory(home, "hosts: {gpu1: }")
    assert resolve(plain, plain.hosts["gpu1"], "mtp").args["model_path"] == "Qwen/Qwen3.6-27B"
    assert deployment(home, "gpu1", "mtp", "args.model_path=/other").args["model_path"] == "/other"


def test_a_model_without_a_place_and_without_an_organisation_is_refused(home: Path) -> None:
    write(home, "inventories/profiles/mine.yml", "model: Mine-1B\n")
    with pytest.raises(ConfigError, match="does not say where Mine-1B lies"):
        deployment(home, "gpu1", "mine")


def test_without_a_host_a_bare_model_name_is_the_models_name_and_that_is_said(home: Path) -> None:
    write(home, "inventories/profiles/mine.yml", "model: Qwen3.6-27B\n")
    hostless = resolve(an_inventory(home, "hosts: {gpu1: }"), None, "mine")
    assert hostless.args["model_path"] == "Qwen3.6-27B"
    assert any("no host is given" in note for note in hostless.notes)
    assert known_of(hostless).model == shipped("qwen3.6-27b")


def test_old_argument_names_are_understood(home: Path) -> None:
    args = deployment(home, "gpu1", "mtp", "args.mamba-scheduler-strategy=no_buffer").args
    assert args["mamba_radix_cache_strategy"] == "no_buffer"
    assert "mamba_scheduler_strategy" not in args


@pytest.mark.parametrize(
    ("assignment", "name", "value"),
    [
        ("args.mem_fraction_static=0.9", "mem_fraction_static", 0.9),
        ("args.tp_size=2", "tp_size", 2),
        ("args.enable_metrics=false", "enable_metrics", False),
        ("args.served_model_name=123", "served_model_name", "123"),
        ("args.served_model_name=no", "served_model_name", "no"),
        ("args.served_model_name=a: b=c", "served_model_name", "a: b=c"),
        ("args.served_model_name=[red] $(x) 'y\" %s", "served_model_name", "[red] $(x) 'y\" %s"),
        ("args.json_model_override_args={a: 1}", "json_model_override_args", {"a": 1}),
    ],
)
def test_set_is_typed_by_what_the_argument_takes(home: Path, assignment: str, name: str, value: object) -> None:
    assert deployment(home, "gpu1", "mtp", assignment).args[name] == value


@pytest.mark.parametrize(
    "assignment", ["", "x", "=1", "args=1", "args.=1", "nonesuch=1", "python.x=1", "hosts.a=1", "args.tp_size"]
)
def test_what_is_no_assignment_is_refused(home: Path, assignment: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        deployment(home, "gpu1", "mtp", assignment)


@pytest.mark.parametrize(
    "assignment",
    [
        "args.tp_size=two",
        "args.nonesuch=1",
        "service=A B",
        "env.1A=x",
        "workdir=../x",
        "args.served_model_name=a\nb",
        "env.A=a\nb",
    ],
)
def test_a_wrong_value_is_refused_with_its_key(home: Path, assignment: str) -> None:
    with pytest.raises(ConfigError, match=assignment.partition("=")[0]):
        deployment(home, "gpu1", "mtp", assignment)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.text())
def test_any_text_for_a_setting_is_kept_literally_or_refused(tmp_path: Path, value: str) -> None:
    known = an_inventory(tmp_path)
    try:
        resolved = resolve(known, None, "mtp", [f"env.X={value}", f"args.served_model_name={value}"])
    except MtpError:
        return
    assert resolved.env["X"] == value


# — Secrets —


def test_a_secret_is_read_when_needed_and_never_shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "hosts: {gpu1: {env: {HF_TOKEN: {from_env: TOKEN}}, api_key: {from_file: key.txt}}}"
    write(home, "inventories/key.txt", "k3y\n")
    known = an_inventory(home, text)
    with pytest.raises(ConfigError, match=r"hosts.gpu1.env.HF_TOKEN: the environment variable TOKEN is not set here"):
        resolve(known, known.hosts["gpu1"], "mtp")
    assert resolve(known, known.hosts["gpu1"], "mtp", reveal=False).env["HF_TOKEN"] == Secret("")
    monkeypatch.setenv("TOKEN", "t0ken")
    resolved = resolve(known, known.hosts["gpu1"], "mtp")
    assert isinstance(resolved.env["HF_TOKEN"], Secret)
    assert resolved.env["HF_TOKEN"].reveal() == "t0ken"
    assert resolved.api_key is not None
    assert resolved.api_key.reveal() == "k3y"
    assert "t0ken" not in repr(resolved)
    assert "k3y" not in repr(resolved)


def test_a_secret_in_clear_is_still_a_secret_and_is_remarked_on(home: Path) -> None:
    resolved = deployment(home, "gpu1", "mtp", "env.HF_TOKEN=hf_abc")
    assert resolved.env["HF_TOKEN"] == Secret("hf_abc")
    assert any("holds a secret in clear" in note for note in resolved.notes)


def test_environment_values_are_the_text_that_was_written(home: Path) -> None:
    text = "hosts: {gpu1: {env: {A: 1.50, B: true, C: 0x10, D: 'x y', E: no}}}"
    known = an_inventory(home, text)
    assert resolve(known, known.hosts["gpu1"], "mtp").env == {
        "A": "1.50",
        "B": "true",
        "C": "0x10",
        "D": "x y",
        "E": "no",
    }


# — Versions —


def test_the_mtp_profile_switches_the_overlap_worker_on_where_it_is_off(home: Path) -> None:
    resolved = deployment(home)
    for version in ("0.5.6", "0.5.10", "0.5.10.post1"):
        assert env_for(resolved, version)["SGLANG_ENABLE_SPEC_V2"] == "1"
    for version in ("0.5.11", "0.5.23", None):
        assert "SGLANG_ENABLE_SPEC_V2" not in env_for(resolved, version)


@pytest.mark.parametrize(
    ("condition", "inside", "outside"),
    [("<=0.5.10", "0.5.10", "0.5.11"), (">=0.5.7,<0.5.14", "0.5.13", "0.5.14"), ("==0.5.9", "0.5.9", "0.5.8")],
)
def test_a_condition_holds_for_the_versions_that_it_names(condition: str, inside: str, outside: str) -> None:
    assert matches(condition, Version.parse(inside))
    assert not matches(condition, Version.parse(outside))


# — Profiles and workloads —


@pytest.mark.parametrize("name", ["baseline", "mtp", "mtp-throughput", "mtp-lowmem"])
def test_shipped_profile_resolves_without_a_host(home: Path, name: str) -> None:
    resolved = resolve(load(home), None, name)
    assert resolved.args["model_path"] == "Qwen/Qwen3.6-27B"
    assert load_profile(home, name).description


def test_the_mtp_profile_is_the_published_configuration(home: Path) -> None:
    args = resolve(load(home), None, "mtp").args
    assert {name: args[name] for name in SETTINGS} == SETTINGS


def test_baseline_differs_from_mtp_by_the_speculation_and_its_slots_only(home: Path) -> None:
    known = load(home)
    mtp, baseline = resolve(known, None, "mtp").args, resolve(known, None, "baseline").args
    assert {n for n in {*mtp, *baseline} if mtp.get(n) != baseline.get(n)} == {
        "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "max_mamba_cache_size"
    }  # fmt: skip


def test_a_profile_of_the_home_shadows_the_shipped_one_and_may_build_on_it(home: Path) -> None:
    write(home, "inventories/profiles/mtp.yml", "extends: mtp\nargs: {mem_fraction_static: 0.8}\n")
    args = resolve(load(home), None, "mtp").args
    assert (args["mem_fraction_static"], args["speculative_num_steps"]) == (0.8, 3)


def test_profiles_that_extend_in_a_circle_are_refused(home: Path) -> None:
    write(home, "inventories/profiles/a.yml", "extends: b\n")
    write(home, "inventories/profiles/b.yml", "extends: a\n")
    with pytest.raises(ConfigError, match="goes round in a circle: a → b → a"):
        load_profile(home, "a")


def test_an_unknown_name_is_answered_with_the_nearest(home: Path) -> None:
    with pytest.raises(NotFound, match=r"did you mean mtp\?"):
        load_profile(home, "mpt")
    with pytest.raises(NotFound, match=r"did you mean story\?"):
        workload(home, "stroy")


def test_the_story_workload_is_the_published_measurement(home: Path) -> None:
    story = workload(home, "story")
    assert (story.concurrency, story.requests, story.output_tokens, story.ignore_eos) == ((4,), 8, 1024, True)


def test_every_shipped_file_is_valid(home: Path) -> None:
    for name in profile_names(home):
        load_profile(home, name)
    for name in workload_names(home):
        workload(home, name)


def test_a_workload_is_a_closed_loop_or_an_open_one(home: Path) -> None:
    write(home, "inventories/workloads/both.yml", "concurrency: [1, 2]\nrate: 1.5\n")
    with pytest.raises(ConfigError, match=r"both.yml:2: rate: stands beside concurrency"):
        workload(home, "both")
    write(home, "inventories/workloads/zero.yml", "concurrency: [0]\n")
    with pytest.raises(ConfigError, match="should be above 0"):
        workload(home, "zero")
