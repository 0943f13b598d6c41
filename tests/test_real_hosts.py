"""The main job on real hosts: systemd as PID 1, sshd, tmux, a cable that can be pulled. Only the engine is simulated."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpdeploy.inventory.values import Simulate
from tests.lab.doors import Doors
from tests.lab.faults import together, until
from tests.lab.lab import Lab, Person, script

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

PLAYED = Simulate(clock=200)
PORT = "ss -ltnH 'sport = :30000'"


@pytest.fixture(scope="module")
def person(lab: Lab, doors: Doors, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """gpu1: deploy, who has no sudo. gpu2: ops, who has. Whatever the tests leave running is stopped by what it recorded."""
    somebody = Person(tmp_path_factory.mktemp("home"), doors)
    somebody.knows(hosts_of(lab))
    yield somebody
    together(*(lambda name=name: script("heal", name) for name in ("mtph1", "mtph2")))
    together(*(lambda host=host: somebody.run("stop", "--host", host, code=None) for host in ("gpu1", "gpu2")))


def hosts_of(lab: Lab) -> dict[str, Any]:
    return {
        "gpu1": lab.host("mtph1", "deploy", PLAYED, groups=["all"]),
        "gpu2": lab.host("mtph2", "ops", PLAYED, groups=["all"]),
    }


def word(person: Person, host: str) -> str:
    return str(person.ask("status", "--host", host, code=None)["word"])


def processes(lab: Lab, name: str) -> str:
    """What runs of a server inside the host, whoever started it."""
    return lab.at(name, "pgrep -af '[s]glang|[s]upervise|[l]aunch.sh' || true")


SUPERVISORS = [
    ("gpu1", "mtph1", "systemd-user"),
    ("gpu1", "mtph1", "tmux"),
    ("gpu1", "mtph1", "detached"),
    ("gpu2", "mtph2", "systemd"),
]


@pytest.mark.parametrize(("host", "name", "supervisor"), SUPERVISORS, ids=[each[2] for each in SUPERVISORS])
def test_the_whole_job_under_each_supervisor(lab: Lab, person: Person, host: str, name: str, supervisor: str) -> None:
    deployed = person.ask("deploy", "--host", host, "--profile", "mtp", "--supervisor", supervisor)
    assert deployed["supervisor"] == supervisor
    status = person.ask("status", "--host", host, "--proof")
    assert (status["word"], status["identity"], status["simulated"]) == ("ready", "ours", True)
    assert [link for link in status["proof"] if link["holds"] is False] == []
    if supervisor.startswith("systemd"):
        verify = {"systemd": "systemd-analyze verify", "systemd-user": "systemd-analyze --user verify"}[supervisor]
        user = lab.at(
            name, "find /etc/systemd /home/*/.config/systemd -name mtpdeploy-sglang.service -type f 2>/dev/null || true"
        ).strip()
        assert lab.at(name, f"{verify} {user} 2>&1 | grep -i mtpdeploy || true") == "", "warnings about the unit"

    again = person.ask("deploy", "--host", host, "--profile", "mtp", "--supervisor", supervisor)
    assert (again["outcome"], again["launch_id"]) == ("unchanged", deployed["launch_id"])

    measured = person.ask(
        "bench", "--host", host, "--concurrency", "2", "--requests", "4", "--output-tokens", "64", code=None
    )
    (point,) = measured["points"]
    assert (point["completed"], point["failed"], measured["simulated"]) == (4, 0, True)
    assert point["accept_length"] > 1
    assert (person.home / "runs" / measured["run_id"] / "records.jsonl").is_file()

    stopped = person.ask("stop", "--host", host)
    assert stopped["stopped"] is True
    assert stopped["port_free"] is True
    assert lab.at(name, PORT) == ""
    assert processes(lab, name) == ""
    assert lab.at(name, "ls /home/*/.mtpdeploy/sglang/lock.json 2>/dev/null || true") == ""
    assert word(person, host) == "stopped"


def test_a_failed_launch_ends_with_its_cause_and_leaves_nothing(lab: Lab, person: Person) -> None:
    broken = Simulate(clock=60, fault="oom-load")
    person.knows({"gpu1": lab.host("mtph1", "deploy", broken)})
    told = person.ask("deploy", "--host", "gpu1", "--profile", "mtp", code=8)
    assert told["error"] == "launch-failed"
    assert any("out of memory" in line.lower() for line in told["evidence"])
    assert told["next_commands"]
    until(lambda: "launch_server" not in processes(lab, "mtph1"), "no process is left", 60)
    assert lab.at("mtph1", PORT) == ""
    person.knows(hosts_of(lab))


def test_a_deploy_that_fails_keeps_what_is_left_of_it_and_brings_the_previous_launch_back(
    lab: Lab, person: Person
) -> None:
    good = person.ask("deploy", "--host", "gpu1", "--profile", "mtp")
    words = ("--set", "env.MTPDEPLOY_SIM_FAULT=oom-load", "--set", "env.MY_TOKEN=s3cretABC", "--rollback-on-failure")
    told = person.ask("deploy", "--host", "gpu1", "--profile", "baseline", *words, code=8)
    assert told["details"]["rollback"] == {"launch_id": good["launch_id"], "ready": True}
    status = person.ask("status", "--host", "gpu1", "--proof")
    assert (status["word"], status["launch_id"], status["profile"]) == ("ready", good["launch_id"], "mtp")
    kept = Path(told["details"]["kept_in"])
    bundle = json.loads((kept / "corpse.json").read_text())
    assert "out of memory" in (kept / "server.log").read_text().lower()
    assert bundle["unit"]["LoadState"] == "loaded"
    assert any("mtpdeploy-sglang.service" in line for line in bundle["supervisor"])
    assert "simulated by mtpdeploy" in " ".join(bundle["nvidia_smi"])
    assert bundle["kernel"] is None or isinstance(bundle["kernel"], list)
    assert bundle["env"]["MTPDEPLOY_SIM_FAULT"] == "oom-load"
    assert "s3cretABC" not in "".join(path.read_text(errors="replace") for path in kept.iterdir())


def test_a_foreign_server_on_the_port_is_refused_and_never_touched(lab: Lab, person: Person) -> None:
    person.run("stop", "--host", "gpu1", "--abort-requests", code=None)
    lab.at("mtph1", "setsid python3 -m http.server 30000 --bind 127.0.0.1 >/dev/null 2>&1 & sleep 0.5")
    try:
        told = person.ask("deploy", "--host", "gpu1", "--profile", "mtp", code=4)
        assert "30000" in told["message"]
        assert person.ask("stop", "--host", "gpu1", code=None)
        assert "http.server" in lab.at("mtph1", "pgrep -af http.server")
    finally:
        lab.at("mtph1", "kill $(pgrep -f 'http.server 30000')", check=False)


def test_hosts_are_deployed_together_and_one_that_is_cut_off_hides_no_other(lab: Lab, person: Person) -> None:
    script("cut", "mtph2")
    told = person.ask("deploy", "--host", "all", "--profile", "mtp", code=5)
    assert told["hosts"]["gpu1"]["outcome"] in ("started", "ready", "starting")
    assert told["hosts"]["gpu2"]["error"] == "host-unreachable"
    script("heal", "mtph2")
    assert word(person, "gpu1") == "ready"


def test_a_secret_is_in_no_argument_log_answer_or_record(
    lab: Lab, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "s3cretXYZ"
    monkeypatch.setenv("TOKEN", secret)
    person.knows({"gpu1": lab.host("mtph1", "deploy", PLAYED, api_key={"from_env": "TOKEN"})})
    answers = [
        person.run("deploy", "--host", "gpu1", "--profile", "mtp", "--json"),
        person.run("status", "--host", "gpu1", "--proof", "--json"),
        person.run("logs", "--host", "gpu1", "--lines", "1000"),
        person.run("history", "--host", "gpu1", "--journal", "--json"),
        person.run(
            "bench",
            "--host",
            "gpu1",
            "--concurrency",
            "1",
            "--requests",
            "2",
            "--output-tokens",
            "16",
            "--json",
            code=None,
        ),
    ]
    for answer in answers:
        assert secret not in answer.stdout + answer.stderr
    assert secret not in lab.at("mtph1", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    holding = lab.at("mtph1", f"grep -rl {secret} /home/deploy/.mtpdeploy || true").split()
    for path in holding:
        assert lab.at("mtph1", f"stat -c %a {path}").strip() in ("600", "400"), path
    assert all("server.log" not in path for path in holding)
    person.knows(hosts_of(lab))
    for path in (person.home / "runs").rglob("*"):
        assert not path.is_file() or secret not in path.read_text(errors="replace"), path


def test_rollback_brings_the_earlier_launch_back(lab: Lab, person: Person) -> None:
    first = person.ask("deploy", "--host", "gpu1", "--profile", "mtp")
    second = person.ask("deploy", "--host", "gpu1", "--profile", "baseline")
    assert first["launch_id"] != second["launch_id"]
    back = person.ask("rollback", "--host", "gpu1")
    assert back["launch_id"] == first["launch_id"]
    assert person.ask("status", "--host", "gpu1")["profile"] == "mtp"


def test_fabric_s_door_does_the_same(lab: Lab, person: Person) -> None:
    person.run("init", ".")
    deployed = person.ask("deploy", "--host", "gpu1", "--profile", "mtp", door="fab")
    assert person.ask("status", door="fab")["launch_id"] == deployed["launch_id"]
    assert person.ask("stop", door="fab")["stopped"] is True


def test_a_dry_run_opens_no_connection(lab: Lab, person: Person) -> None:
    script("cut", "mtph1")
    try:
        began = time.monotonic()
        person.run("deploy", "--host", "gpu1", "--profile", "mtp", "--dry-run")
        assert time.monotonic() - began < 4
    finally:
        script("heal", "mtph1")
