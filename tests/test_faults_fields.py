"""Hostile values in every field of an inventory and a profile: refused with the key that holds them, or taken as plain text.

What reaches a host is looked at there by test_faults_host.py; here it is looked at that nothing runs on this machine, that no other
exception than ours is raised, and that the scripts stay scripts.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtpdeploy import inventory
from mtpdeploy.errors import MtpError
from mtpdeploy.hosts import sshconfig
from mtpdeploy.plan import known_of, make_plan

VALUES = {
    "quotes": "a'b\"c",
    "command": "$(touch {mark})",
    "backticks": "`touch {mark}`",
    "semicolon": "x; touch {mark}",
    "newline": "a\ntouch {mark}",
    "percent": "%n%s%%i%h",
    "option": "-oProxyCommand=touch {mark}",
    "unicode": "ü☃\u202e日本",
    "control": "a\x1b]0;x\x07b",
    "long": "x" * 100_000,
    "traversal": "../../../etc/passwd",
}
HOST_FIELDS = (
    "address", "user", "python", "venv", "workdir", "service", "model", "model_config", "sglang_version", "supervisor",
    "ssh.identity_file", "ssh.proxy_jump", "ssh.config_file", "ssh.known_hosts_file", "args.model_path",
    "args.served_model_name", "args.host", "env.SGLANG_X", "env.PATH", "groups", "models", "api_key",
)  # fmt: skip


def put(document: dict[str, Any], field: str, value: str) -> None:
    """Sets `a.b` in a document, in the shape that the field has."""
    *path, last = field.split(".")
    for name in path:
        document = document.setdefault(name, {})
    shaped: Any = {"groups": [value], "models": {"m": value}, "api_key": {"from_env": value}}.get(field, value)
    document[last] = shaped


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a value would make if it ran; in a folder whose name is one plain word."""
    monkeypatch.chdir(tmp_path)
    return Path("owned")


def through_everything(home: Path, profile: str, field: str) -> str | None:
    """From the files to the scripts and the connection's settings. None if it was taken, else the refusal."""
    try:
        known = inventory.load(home, ())
        (host,) = known.choose("h", None)
        deployment = inventory.resolve(known, host, profile, (), {}, reveal=False)
        if field.startswith(("address", "user", "ssh")):
            sshconfig.resolve(host)
            return None
        deployment = replace(deployment, sglang_version=deployment.sglang_version or "0.5.18")
        plan = make_plan(deployment, known_of(deployment, None), home=home)
        for file in plan.files("20260101T000000Z-abcdef"):
            if file.path == "launch.sh":
                checked = subprocess.run(["sh", "-n"], input=file.content, text=True, capture_output=True, check=False)
                assert checked.returncode == 0, checked.stderr
            if file.path.endswith(".service"):
                assert "touch" not in file.content
    except MtpError as refused:
        return refused.message
    return None


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("where", ["inventory", "profile"])
def test_a_hostile_value_in_any_field_is_refused_by_name_or_taken_as_text(
    home: Path, mark: Path, name: str, where: str
) -> None:
    value = VALUES[name].format(mark=mark)
    folder = home / "inventories"
    (folder / "profiles").mkdir(parents=True)
    base_host = {"address": "192.0.2.1", "python": "/usr/bin/python3", "gpus": [{"memory_gb": 95}]}
    for field in HOST_FIELDS:
        if where == "profile" and field.partition(".")[0] in ("address", "user", "ssh", "groups", "models"):
            continue
        host: dict[str, Any] = {"hosts": {"h": dict(base_host)}}
        profile: dict[str, Any] = {"extends": "mtp"}
        put(host["hosts"]["h"] if where == "inventory" else profile, field, value)
        (folder / "lab.yml").write_text(yaml.safe_dump(host))
        (folder / "profiles" / "p.yml").write_text(yaml.safe_dump(profile))
        refused = through_everything(home, "p", field)
        assert not mark.exists(), f"{field} ran {value!r}"
        assert refused is None or len(refused) < 3000, f"{field}: a refusal of {len(refused)} characters"


@pytest.mark.parametrize("name", VALUES)
def test_a_hostile_name_of_a_host_a_profile_or_a_service_is_refused(home: Path, mark: Path, name: str) -> None:
    value = VALUES[name].format(mark=mark)
    folder = home / "inventories"
    folder.mkdir(parents=True)
    (folder / "lab.yml").write_text(yaml.safe_dump({"hosts": {value: {"address": "192.0.2.1"}}}))
    with pytest.raises(MtpError):
        inventory.load(home, ())
    (folder / "lab.yml").write_text(yaml.safe_dump({"hosts": {"h": {"address": "192.0.2.1", "service": value}}}))
    with pytest.raises(MtpError):
        inventory.load(home, ())
    (folder / "lab.yml").write_text(yaml.safe_dump({"hosts": {"h": {"address": "192.0.2.1"}}}))
    known = inventory.load(home, ())
    with pytest.raises(MtpError):
        inventory.resolve(known, known.choose("h", None)[0], value, (), {}, reveal=False)
    assert not mark.exists()


def test_a_proxy_command_gets_host_and_user_as_one_word_each(home: Path, mark: Path, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n  ProxyCommand echo %h %p %r %%\n")
    folder = home / "inventories"
    folder.mkdir(parents=True)
    entry = {"address": "192.0.2.1", "user": "x%h", "ssh": {"config_file": str(config)}}
    (folder / "lab.yml").write_text(yaml.safe_dump({"hosts": {"h": entry}}))
    proxy = sshconfig.resolve(inventory.load(home, ()).choose("h", None)[0]).proxy
    assert proxy
    said = subprocess.run(proxy, capture_output=True, text=True, check=True).stdout
    assert said == "192.0.2.1 22 x%h %\n"
    assert not mark.exists()
