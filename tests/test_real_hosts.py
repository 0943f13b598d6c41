"""The main job on real hosts: systemd as PID 1, sshd, tmux, a cable that can be pulled. Only the engine is simulated."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpdeploy.inventory.values import Simulate
from tests.lab.lab import Lab, Person, script, why_not

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

PLAYED = Simulate(clock=60)
PORT = "ss -ltnH 'sport = :30000'"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if reason := why_not():
        if os.environ.get("CI"):
            pytest.fail(f"no real hosts in CI: {reason}")
        pytest.skip(reason)
    made = Lab.up(2)
    yield made
    made.down()


@pytest.fixture
def person(lab: Lab, home: Path) -> Iterator[Person]:
    """gpu1: deploy, who has no sudo. gpu2: ops, who has. Whatever a test leaves running is stopped by what it recorded."""
    somebody = Person(home)
    somebody.knows({
        "gpu1": lab.host("mtph1", "deploy", PLAYED, groups=["all"]),
        "gpu2": lab.host("mtph2", "ops", PLAYED, groups=["all"]),
    })  # fmt: skip
    yield somebody
    for name in ("mtph1", "mtph2"):
        script("heal", name)
    for host, name in (("gpu1", "mtph1"), ("gpu2", "mtph2")):
        if processes(lab, name):
            with contextlib.suppress(AssertionError):
                somebody.run("stop", "--host", host, "--abort-requests", "--drain-timeout", "0.2", "--quiet", code=None)


def until(holds: Callable[[], Any], what: str, limit_s: float = 30) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"after {limit_s} s still not: {what}"
        time.sleep(0.2)
    return found


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


def test_a_killed_client_and_a_pulled_cable_leave_a_server_that_serves(lab: Lab, person: Person) -> None:
    deploy = person.start("deploy", "--host", "gpu1", "--profile", "mtp")
    until(lambda: "launch_server" in processes(lab, "mtph1"), "the server was started")
    os.killpg(deploy.pid, signal.SIGKILL)
    deploy.wait()
    script("cut", "mtph1")
    time.sleep(1)
    script("heal", "mtph1")
    until(lambda: word(person, "gpu1") == "ready", "the launch became ready by itself")
    assert person.ask("deploy", "--host", "gpu1", "--profile", "mtp")["outcome"] == "unchanged"


def test_following_a_log_goes_on_where_it_was_after_the_line_was_cut(lab: Lab, person: Person) -> None:
    person.run("deploy", "--host", "gpu1", "--profile", "mtp")
    log = lab.at("mtph1", "echo /home/deploy/.mtpdeploy/sglang/current/server.log").strip()
    follow = person.start("logs", "--host", "gpu1", "--follow", "--lines", "5")
    assert follow.stdout
    pipe = follow.stdout.fileno()
    os.set_blocking(pipe, False)
    seen = b""

    def told(mark: str) -> bool:
        nonlocal seen
        with contextlib.suppress(BlockingIOError):
            seen += os.read(pipe, 1 << 20)
        return mark.encode() in seen

    try:
        until(lambda: told("\n"), "the last lines")
        lab.at("mtph1", f"echo 'mark one' >> {log}")
        until(lambda: told("mark one"), "a line that was written while connected")
        script("cut", "mtph1")
        lab.at("mtph1", f"echo 'mark two' >> {log}")
        time.sleep(6)
        lab.at("mtph1", f"echo 'mark three' >> {log}")
        script("heal", "mtph1")
        until(lambda: told("mark three"), "the lines that were written meanwhile")
        assert [seen.count(mark) for mark in (b"mark one", b"mark two", b"mark three")] == [1, 1, 1]
    finally:
        os.killpg(follow.pid, signal.SIGINT)
        assert follow.wait(20) == 130


def test_a_server_under_systemd_serves_again_after_a_reboot(lab: Lab, person: Person) -> None:
    first = person.ask("deploy", "--host", "gpu2", "--profile", "mtp", "--supervisor", "systemd")
    script("reboot", "mtph2")
    until(lambda: word(person, "gpu2") == "ready", "it serves again")
    status = person.ask("status", "--host", "gpu2")
    assert (status["launch_id"], status["boot"]) == (first["launch_id"], 2)


def test_after_a_power_loss_a_tmux_launch_is_told_as_gone_and_not_as_serving(lab: Lab, person: Person) -> None:
    person.run("deploy", "--host", "gpu1", "--profile", "mtp", "--supervisor", "tmux")
    script("crash", "mtph1")
    status = person.ask("status", "--host", "gpu1")
    assert status["word"] in ("crashed", "stopped")
    assert "boot" in status["why"]
    assert person.ask("start", "--host", "gpu1", code=None)["boot"] == 2


def test_a_killed_scheduler_is_noticed_and_the_server_comes_back_as_the_next_boot(lab: Lab, person: Person) -> None:
    person.run("deploy", "--host", "gpu1", "--profile", "mtp")
    lab.at("mtph1", "kill -9 $(pgrep -f 'sglang::scheduler' | head -1)")
    until(
        lambda: person.ask("status", "--host", "gpu1", code=None)["boot"] == 2 and word(person, "gpu1") == "ready",
        "boot 2 serves",
        60,
    )


def test_a_failed_launch_ends_with_its_cause_and_leaves_nothing(lab: Lab, person: Person, home: Path) -> None:
    broken = Simulate(clock=60, fault="oom-load")
    person.knows({"gpu1": lab.host("mtph1", "deploy", broken)})
    told = person.ask("deploy", "--host", "gpu1", "--profile", "mtp", code=8)
    assert told["error"] == "launch-failed"
    assert any("out of memory" in line.lower() for line in told["evidence"])
    assert told["next_commands"]
    until(lambda: "launch_server" not in processes(lab, "mtph1"), "no process is left", 60)
    assert lab.at("mtph1", PORT) == ""
    person.knows({"gpu1": lab.host("mtph1", "deploy", PLAYED)})


def test_a_foreign_server_on_the_port_is_refused_and_never_touched(lab: Lab, person: Person) -> None:
    lab.at("mtph1", "setsid python3 -m http.server 30000 --bind 127.0.0.1 >/dev/null 2>&1 & sleep 0.5")
    try:
        told = person.ask("deploy", "--host", "gpu1", "--profile", "mtp", code=4)
        assert "30000" in told["message"]
        assert person.ask("stop", "--host", "gpu1", code=None)
        assert "http.server" in lab.at("mtph1", "pgrep -af http.server")
    finally:
        lab.at("mtph1", "kill $(pgrep -f 'http.server 30000')", check=False)


def test_two_deploys_at_once_do_not_mix_and_the_second_is_told_who_is_at_it(lab: Lab, person: Person) -> None:
    first = person.start("deploy", "--host", "gpu1", "--profile", "mtp", "--json")
    until(
        lambda: lab.at("mtph1", "ls /home/deploy/.mtpdeploy/sglang/lock.json 2>/dev/null || true"),
        "the first holds the lock",
        20,
    )
    second = person.run("deploy", "--host", "gpu1", "--profile", "baseline", "--json", code=None)
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 0, out
    if second.returncode == 7:
        assert "@" in json.loads(second.stdout)["message"], "it names who holds it"
    else:
        assert second.returncode in (0, 8), second.stdout  # the lock was free again: then it came after the first
    assert word(person, "gpu1") == "ready"


def test_hosts_are_deployed_together_and_one_that_is_cut_off_hides_no_other(lab: Lab, person: Person) -> None:
    script("cut", "mtph2")
    told = person.ask("deploy", "--host", "all", "--profile", "mtp", code=5)
    assert told["hosts"]["gpu1"]["outcome"] in ("started", "ready", "starting")
    assert told["hosts"]["gpu2"]["error"] == "host-unreachable"
    script("heal", "mtph2")
    assert word(person, "gpu1") == "ready"


@pytest.mark.parametrize(
    ("host", "name", "supervisor"),
    [SUPERVISORS[0], SUPERVISORS[1], SUPERVISORS[3]],
    ids=["systemd-user", "tmux", "systemd"],
)
def test_a_hostile_value_reaches_the_server_literally(
    lab: Lab, person: Person, host: str, name: str, supervisor: str
) -> None:
    value = "a b'c\"d$(touch /tmp/owned)`id`%n%%${HOME};#{x}\\t*"
    person.run(
        "deploy",
        "--host",
        host,
        "--profile",
        "mtp",
        "--supervisor",
        supervisor,
        "--set",
        f"args.served_model_name={value}",
        "--set",
        f"env.SGLANG_X={value}",
    )
    pid = lab.at(name, "pgrep -f 'sglang.launch_server' | head -1").strip()
    assert value in lab.at(name, f"cat /proc/{pid}/cmdline").split("\0")
    assert f"SGLANG_X={value}" in lab.at(name, f"cat /proc/{pid}/environ").split("\0")
    assert lab.at(name, "ls /tmp/owned 2>/dev/null || true") == ""


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
    began = time.monotonic()
    person.run("deploy", "--host", "gpu1", "--profile", "mtp", "--dry-run")
    assert time.monotonic() - began < 4
