"""Faults of the host, its disk, its processes and its clock, on real hosts. Each test is a row of docs/reliability.md."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpdeploy.inventory.values import Simulate
from tests.lab.doors import Doors
from tests.lab.faults import Row, disorder, in_order, look, together, until
from tests.lab.lab import ROOT, Lab, Person, script

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

QUICK = Simulate(clock=200)
HOSTS = {
    "gpu1": ("mtph1", "deploy", "systemd-user"),
    "gpu2": ("mtph2", "ops", "systemd"),
    "gpu3": ("mtph3", "deploy", "tmux"),
}


def workdir(host: str) -> str:
    return f"/home/{HOSTS[host][1]}/.mtpdeploy"


def hosts_of(lab: Lab, played: Simulate = QUICK) -> dict[str, Any]:
    return {
        host: lab.host(name, user, played, supervisor=supervisor, groups=["all"])
        for host, (name, user, supervisor) in HOSTS.items()
    }


@pytest.fixture(scope="module")
def person(lab: Lab, doors: Doors, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """gpu1: a user unit; gpu2: a system unit; gpu3: tmux."""
    somebody = Person(tmp_path_factory.mktemp("home"), doors)
    somebody.knows(hosts_of(lab))
    yield somebody
    together(*(lambda host=host: somebody.run("stop", "--host", host, "--abort-requests", code=None) for host in HOSTS))


def word(person: Person, host: str) -> str:
    return str(person.ask("status", "--host", host)["word"])


def main_pid(person: Person, host: str) -> int:
    return int(person.ask("status", "--host", host)["main_pid"])


# ---------------------------------------------------------------- begun first, since it mostly waits


@pytest.fixture(scope="module", autouse=True)
def crash_loops(lab: Lab, doors: Doors, person: Person, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two servers that served and are then killed at each start, one under tmux and one under systemd."""
    looping = Person(tmp_path_factory.mktemp("looping"), doors)
    looping.knows({
        "tmux": lab.host("mtph1", "ops", QUICK, supervisor="tmux", service="looptmux", args={"port": 30301}),
        "unit": lab.host("mtph1", "root", QUICK, supervisor="systemd", service="loopunit", args={"port": 30302}),
    })  # fmt: skip
    together(
        *(lambda host=host: looping.run("deploy", "--host", host, "--profile", "mtp") for host in ("tmux", "unit"))
    )
    killer = (
        "import glob, json, os, signal, sys, time\n"
        "seen = set()\n"
        "while True:\n"
        "    for path in glob.glob(sys.argv[1]):\n"
        "        for boot in json.load(open(path))['boots']:\n"
        "            if boot['pid'] not in seen:\n"
        "                seen.add(boot['pid']); time.sleep(0.2)\n"
        "                try: os.kill(boot['pid'], signal.SIGKILL)\n"
        "                except ProcessLookupError: pass\n"
        "    time.sleep(0.1)\n"
    )
    for name, home, service in (("mtph1", "/home/ops", "looptmux"), ("mtph1", "/root", "loopunit")):
        states = f"{home}/.mtpdeploy/{service}/releases/*/state.json"
        lab.at(
            name, shlex.join(["systemd-run", "--quiet", f"--unit=killer-{service}", "python3", "-c", killer, states])
        )
    yield looping
    lab.at("mtph1", "systemctl stop killer-looptmux", check=False)
    lab.at("mtph1", "systemctl stop killer-loopunit", check=False)


# ---------------------------------------------------------------- the host goes down


@pytest.mark.fault("the host is rebooted while a launch loads", "an orderly reboot; system unit; the client watches")
def test_a_host_rebooted_while_loading_brings_the_launch_up_and_the_client_sees_it(
    lab: Lab, person: Person, row: Row
) -> None:
    person.knows(hosts_of(lab, Simulate(clock=20)))
    deploy = person.start("deploy", "--host", "gpu2", "--profile", "mtp", "--json")
    until(lambda: "loading weights" in deploy.err, "it loads", every_s=0.02)
    script("reboot", "mtph2")
    assert deploy.wait(90) == 0, deploy.err
    deployed = json.loads(deploy.out)
    assert (deployed["outcome"], deployed["boot"]) == ("ready", 2)
    assert json.loads(deploy.out)["launch_id"] == person.ask("status", "--host", "gpu2")["launch_id"]
    person.knows(hosts_of(lab))
    row.holds("the unit brings the same launch up as boot 2; the waiting deploy reports it ready")
    in_order(lab, person, "gpu2", "mtph2", workdir("gpu2"), row)


@pytest.mark.fault("the host is rebooted while a server serves", "system unit: reboot; tmux: power loss")
def test_a_host_rebooted_while_serving_comes_back_or_is_told_as_gone(lab: Lab, person: Person, row: Row) -> None:
    def unit() -> None:
        first = person.ask("deploy", "--host", "gpu2", "--profile", "mtp")
        before = person.ask("status", "--host", "gpu2")["boot"]
        script("reboot", "mtph2")
        until(lambda: word(person, "gpu2") == "ready", "it serves again", 60, 0.3)
        status = person.ask("status", "--host", "gpu2")
        assert (status["launch_id"], status["boot"]) == (first["launch_id"], before + 1)
        row.holds("under systemd the same launch serves again as its next boot")

    def tmux() -> None:
        person.run("deploy", "--host", "gpu3", "--profile", "mtp")
        script("crash", "mtph3")
        status = person.ask("status", "--host", "gpu3")
        assert status["word"] == "crashed"
        assert "rebooted" in status["why"]
        row.holds("under tmux it is told as crashed, with the reboot as the reason")

    together(unit, tmux)
    in_order(lab, person, "gpu2", "mtph2", workdir("gpu2"), row)
    in_order(lab, person, "gpu3", "mtph3", workdir("gpu3"), row)


@pytest.mark.fault(
    "a recorded pid is somebody else's now", "power loss, then a stranger is given the server's very pid"
)
def test_a_stranger_with_the_servers_pid_is_never_taken_for_it_nor_signalled(
    lab: Lab, person: Person, row: Row
) -> None:
    person.run("deploy", "--host", "gpu3", "--profile", "mtp")
    pid = main_pid(person, "gpu3")
    script("crash", "mtph3")
    taken = lab.give_pid("mtph3", pid)
    assert "sleep 600" in taken
    status = person.ask("status", "--host", "gpu3", "--proof")
    assert (status["word"], status["main_pid"]) == ("crashed", None)
    assert person.ask("stop", "--host", "gpu3")["stopped"] is True
    row.holds("told as crashed (pid, start time and boot id must agree)")
    in_order(lab, person, "gpu3", "mtph3", workdir("gpu3"), row)
    assert "sleep 600" in lab.at("mtph3", f"tr '\\0' ' ' </proc/{pid}/cmdline && kill {pid}")
    row.holds("the stranger lived through a stop and a deploy")


# ---------------------------------------------------------------- disks


FILL = (
    "import os, sys\n"
    "folder, pages = sys.argv[1], int(sys.argv[2])\n"
    "path = folder + '/filler'\n"
    "if os.path.exists(path): os.unlink(path)\n"
    "found = os.statvfs(folder)\n"
    "size = (found.f_bavail - pages) * found.f_frsize\n"
    "with open(path, 'wb') as file: os.posix_fallocate(file.fileno(), 0, size) if size > 0 else None\n"
)


@pytest.mark.fault(
    "the disk is full", "at each write of a deploy, 4 KiB more at a time; then under a server that serves"
)
def test_a_full_disk_refuses_whole_or_starts_whole_and_never_forbids_a_stop(
    lab: Lab, doors: Doors, person: Person, row: Row, tmp_path: Path
) -> None:
    small = "/home/deploy/small"
    lab.at("mtph1", f"mkdir -p {small}; mount -t tmpfs -o size=48m,mode=700,uid=$(id -u deploy) none {small}")
    somebody = Person(tmp_path, doors)
    somebody.knows({
        "small": lab.host("mtph1", "deploy", QUICK, supervisor="tmux", workdir=small, service="small", args={"port": 30200})
    })  # fmt: skip

    def leave(pages: int) -> None:
        lab.at("mtph1", shlex.join(["python3", "-c", FILL, small, str(pages)]))

    words = ("deploy", "--host", "small", "--profile", "mtp", "--skip-preflight", "--no-wait")
    refusals = set()
    try:
        leave(0)
        refusals.add(somebody.ask(*words, code=6)["message"])  # the agent itself cannot be written
        leave(20_000)  # room for the agent and its compiled files
        somebody.run("deploy", "--host", "small", "--profile", "mtp", "--set", "args.port=22", code=4)
        for pages in (0, 1, 2, 4, 17, 19, 21, 23, 25, 27, 30, 34, 40, 60, 100):
            leave(pages)
            told = somebody.ask(*words, code=None)
            if "error" not in told:
                break
            assert told["error"] == "remote-error", told
            refusals.add(told["message"])
            assert disorder(look(lab, "mtph1", small)) == [], told
        assert "error" not in told, told
        assert all("space" in text for text in refusals), refusals
        assert len({text.split(":")[1] for text in refusals}) >= 3, refusals
        row.holds(f"refused at {len(refusals)} different writes, each named; no half release, no server")
        leave(1000)
        until(lambda: word(somebody, "small") in ("ready", "crashed"), "it is up or told as failed")
        somebody.run("deploy", "--host", "small", "--profile", "mtp", "--skip-preflight")
        leave(0)
        assert word(somebody, "small") == "ready"
        stopped = somebody.ask("stop", "--host", "small")
        assert stopped["stopped"] is True
        leave(0)
        assert word(somebody, "small") == "stopped"
        row.holds("a server on a full disk serves on; a stop works and is shown as stopped")
        lab.at("mtph1", f"rm {small}/filler")
        assert somebody.ask("deploy", "--host", "small", "--profile", "mtp", "--skip-preflight")["outcome"] == "ready"
        in_order(lab, somebody, "small", "mtph1", small, row, then="stop")
    finally:
        somebody.run("stop", "--host", "small", "--abort-requests", code=None)
        lab.at("mtph1", f"umount -l {small}", check=False)


@pytest.mark.fault("the home is read-only", "remounted under a server that serves; then writable again")
def test_a_read_only_home_refuses_a_deploy_and_forbids_no_stop(lab: Lab, person: Person, row: Row) -> None:
    first = person.ask("deploy", "--host", "gpu1", "--profile", "mtp")
    lab.at("mtph1", "mount --bind /home/deploy /home/deploy && mount -o remount,bind,ro /home/deploy")
    try:
        refused = person.ask("deploy", "--host", "gpu1", "--profile", "baseline", code=None)
        assert refused["error"] in ("plan-refused", "remote-error"), refused
        assert "cannot be written" in refused["message"] or "read-only" in refused["message"], refused
        status = person.ask("status", "--host", "gpu1")
        assert (status["word"], status["launch_id"]) == ("ready", first["launch_id"])
        row.holds("a deploy is refused with the reason, and what serves is left alone")
        stopped = person.ask("stop", "--host", "gpu1", code=None)
        assert stopped.get("stopped") or "read-only" in stopped["message"], stopped
        row.holds("a stop " + ("stops all the same" if stopped.get("stopped") else "says what is in its way"))
    finally:
        lab.at("mtph1", "umount /home/deploy")
    in_order(lab, person, "gpu1", "mtph1", workdir("gpu1"), row)


@pytest.mark.fault("the log is truncated, and replaced", "while it is followed")
def test_a_log_cut_or_replaced_under_a_follower_is_said_and_followed_on(lab: Lab, person: Person, row: Row) -> None:
    from signal import SIGINT

    person.run("deploy", "--host", "gpu1", "--profile", "mtp")
    log = lab.at("mtph1", f"readlink -f {workdir('gpu1')}/sglang/current/server.log").strip()
    follow = person.start("logs", "--host", "gpu1", "--follow", "--lines", "3")
    until(lambda: follow.out, "the last lines")
    lab.at("mtph1", f": >{log}; echo 'after the cut' >>{log}")
    until(lambda: "after the cut" in follow.out, "what follows the truncation")
    lab.at("mtph1", f"runuser -u deploy -- sh -c 'mv {log} {log}.1; echo in another file >{log}'")
    until(lambda: "in another file" in follow.out, "the file that has its name now")
    follow.signal(SIGINT)
    assert follow.wait(20) == 130
    said = follow.out + follow.err
    assert "cut from" in said
    assert "replaced" in said
    assert word(person, "gpu1") == "ready"
    row.holds("the gap is said, the follow goes on, the server stays proven ready")
    person.run("deploy", "--host", "gpu1", "--profile", "mtp", "--force")
    in_order(lab, person, "gpu1", "mtph1", workdir("gpu1"), row)


# ---------------------------------------------------------------- processes


@pytest.mark.fault("the kernel's OOM killer kills the server", "a memory limit on its control group, and a request")
def test_a_server_killed_by_the_kernel_for_memory_is_told_as_that_and_comes_back(
    lab: Lab, person: Person, row: Row
) -> None:
    person.run("deploy", "--host", "gpu3", "--profile", "mtp")
    state = f"{workdir('gpu3')}/sglang/current/state.json"
    lab.hold("mtph3", int(json.loads(lab.at("mtph3", f"cat {state}"))["supervising"]["pid"]))
    lab.at("mtph3", f"kill -KILL {main_pid(person, 'gpu3')}")  # the next boot is in the group
    until(
        lambda: (s := person.ask("status", "--host", "gpu3"))["boot"] == 2 and s["word"] == "ready", "boot 2", 40, 0.3
    )
    lab.starve("mtph3")
    code = (
        "import json, urllib.request as r; body = json.dumps({'text': 'x' * 30_000_000}).encode(); "
        "r.urlopen(r.Request('http://127.0.0.1:30000/generate', body, {'content-type': 'application/json'}), timeout=2)"
    )
    ask = f"python3 -c {shlex.quote(code)} 2>/dev/null || true"
    until(lambda: lab.at("mtph3", ask) is not None and lab.kernel_kills("mtph3") > 0, "the kernel has killed it")
    lab.feed("mtph3")
    status = until(
        lambda: (s := person.ask("status", "--host", "gpu3"))["word"] == "ready" and s["boot"] >= 3 and s,
        "boot 3",
        60,
        0.3,
    )
    assert status["restarts"] >= 2
    ended = json.loads(lab.at("mtph3", f"cat {state}"))["boots"][1]["exit"]
    assert ended["result"] == "oom-kill", ended
    row.holds("recorded as oom-kill by the group's own counter, and the next boot serves")
    in_order(lab, person, "gpu3", "mtph3", workdir("gpu3"), row)


@pytest.mark.fault("the scheduler is killed while its parent lives", "SIGKILL to the scheduler of a parent that hangs")
def test_a_dead_scheduler_under_a_living_parent_is_never_told_as_ready(lab: Lab, person: Person, row: Row) -> None:
    person.run("deploy", "--host", "gpu1", "--profile", "mtp")
    pid, boot = main_pid(person, "gpu1"), person.ask("status", "--host", "gpu1")["boot"]
    lab.at("mtph1", f"kill -STOP {pid}; kill -KILL $(pgrep -P {pid} -f 'sglang::scheduler')")
    status = person.ask("status", "--host", "gpu1")
    assert status["word"] == "degraded"
    assert "scheduler" in status["why"]
    row.holds("degraded, and the dead scheduler is named")
    lab.at("mtph1", f"kill -CONT {pid}")
    until(
        lambda: (s := person.ask("status", "--host", "gpu1"))["boot"] > boot and s["word"] == "ready", "boot 2", 60, 0.3
    )
    row.holds("when the parent follows, the supervisor brings the next boot up")
    in_order(lab, person, "gpu1", "mtph1", workdir("gpu1"), row)


@pytest.mark.fault("the port is stolen between check and bind", "a stranger binds it while the model loads")
def test_a_port_stolen_during_the_load_is_told_with_its_thief_and_is_not_ready(
    lab: Lab, person: Person, row: Row
) -> None:
    person.knows(hosts_of(lab, Simulate(clock=6)))
    deploy = person.start("deploy", "--host", "gpu3", "--profile", "mtp", "--force", "--json")
    until(lambda: "loading weights" in deploy.err, "it loads", every_s=0.02)
    lab.at(
        "mtph3", "systemd-run --quiet --collect --unit=thief --uid=deploy python3 -m http.server 30000 --bind 127.0.0.1"
    )
    try:
        assert deploy.wait(60) in (8, 10), deploy.out
        told = json.loads(deploy.out)
        assert "30000" in json.dumps([told["message"], told["evidence"]]), told["message"]
        status = person.ask("status", "--host", "gpu3")
        assert status["word"] == "stale"
        assert "http.server" in status["why"]
        row.holds("the launch fails with the port as its cause; status is stale and names the thief")
        refused = person.ask("deploy", "--host", "gpu3", "--profile", "mtp", code=4)
        assert "http.server" in refused["message"]
        assert "http.server" in lab.at("mtph3", "pgrep -af 'http[.]server'")
        row.holds("the next deploy is refused before the load, and the stranger is not touched")
    finally:
        lab.at("mtph3", "systemctl stop thief", check=False)
        person.knows(hosts_of(lab))
    in_order(lab, person, "gpu3", "mtph3", workdir("gpu3"), row)


@pytest.mark.fault("the server crashes again and again", "SIGKILL at each start, tmux and systemd")
def test_a_crash_loop_is_given_up_and_told(lab: Lab, row: Row, crash_loops: Person) -> None:
    def given_up(host: str) -> None:
        status = until(
            lambda: (s := crash_loops.ask("status", "--host", host))["word"] == "crashed"
            and ("not started again" in s["why"] or "given up" in s["why"]) and s, f"{host} is given up", 60, 0.5
        )  # fmt: skip
        assert status["boot"] >= 3
        log = crash_loops.run("logs", "--host", host, "--lines", "1000").stdout
        assert " boot 1 " in log, "the first log is still there"

    together(lambda: given_up("tmux"), lambda: given_up("unit"))
    row.holds("given up after its restarts, told as crashed, the first log kept")
    lab.at("mtph1", "systemctl stop killer-looptmux")
    lab.at("mtph1", "systemctl stop killer-loopunit")
    for host, name, home in (("tmux", "mtph1", "/home/ops"), ("unit", "mtph1", "/root")):
        assert crash_loops.ask("start", "--host", host)["outcome"] == "ready"
        in_order(lab, crash_loops, host, name, f"{home}/.mtpdeploy", row, then="stop")
    row.holds("once the cause is gone, `start` brings it up")


# ---------------------------------------------------------------- clocks and words


@pytest.mark.fault(
    "the clock is wrong by an hour",
    "±1 h at the client, then at the host (in the process: the machine's clock is not touched)",
)
def test_a_wrong_clock_changes_no_order_and_no_word(lab: Lab, person: Person, row: Row) -> None:
    first = person.ask("deploy", "--host", "gpu3", "--profile", "mtp")
    late = person.ask("deploy", "--host", "gpu3", "--profile", "baseline", clock_s=-3600)
    assert late["launch_id"] < first["launch_id"], "the later launch has the earlier name"
    rows = person.ask("history", "--host", "gpu3")["releases"]
    assert [r["launch_id"] for r in rows[:2]] == [late["launch_id"], first["launch_id"]]
    back = person.ask("rollback", "--host", "gpu3", clock_s=3600)
    assert back["launch_id"] == first["launch_id"]
    row.holds("releases keep the order in which they came, so rollback goes to the right one")

    def pythons(host: str, hours: int) -> dict[str, Any]:
        name, user, _ = HOSTS[host]
        path = f"/home/{user}/python{hours:+d}"
        text = f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/lab/clock.py {hours * 3600} "$0" "$@"\n'
        lab.at(name, f"printf %s {shlex.quote(text)} >{path}; chmod 755 {path}")
        return {**hosts_of(lab)[host], "python": path}

    person.knows({"gpu1": pythons("gpu1", 1), "gpu3": pythons("gpu3", -1)})

    def one(host: str, word_for_it: str) -> None:
        found = [f for f in person.ask("doctor", "--host", host)["findings"] if f["check"] == "clock"]
        assert any(word_for_it in f["what"] for f in found), found
        deployed = person.ask("deploy", "--host", host, "--profile", "mtp", "--force")
        assert deployed["outcome"] == "ready"
        assert any(word_for_it in note for note in deployed["notes"]), "deploy says it, too"
        assert word(person, host) == "ready"
        assert person.ask("stop", "--host", host)["stopped"] is True
        assert word(person, host) == "stopped"

    together(lambda: one("gpu1", "ahead"), lambda: one("gpu3", "behind"))
    person.knows(hosts_of(lab))
    row.holds("a host an hour ahead or behind is deployed, proven and stopped")
    in_order(lab, person, "gpu3", "mtph3", workdir("gpu3"), row)


HOSTILE = "a b'c\"d$(touch /tmp/owned)`touch /tmp/owned`%n%%${HOME};#{x}\\t*ü☃"


@pytest.mark.fault(
    "hostile values", "quotes, $(), backticks, %n, unicode, 100 kB in arguments, environment and work folder; newlines"
)
def test_hostile_values_reach_the_server_literally_under_each_supervisor(lab: Lab, person: Person, row: Row) -> None:
    name = HOSTILE
    long = "x" * 100_000

    def one(host: str) -> None:
        machine, user, supervisor = HOSTS[host]
        place = f"/home/{user}/w {HOSTILE.replace('/', '_')}"
        model = f"/home/{user}/m {HOSTILE.replace('/', '_')}"
        lab.at(machine, f"mkdir -p {shlex.quote(model)}; chown {user}: {shlex.quote(model)}")
        person_of = Person(person.home, person.doors)
        person_of.run("stop", "--host", host, "--abort-requests", code=None)  # it holds the same user's GPU
        deployed = person_of.ask(
            "deploy", "--host", f"{host}w", "--profile", "mtp", "--set", f"args.served_model_name={name}",
            "--set", f"env.SGLANG_X={name}", "--set", f"env.SGLANG_LONG={long}", "--skip-preflight",
        )  # fmt: skip
        assert (deployed["outcome"], deployed["supervisor"]) == ("ready", supervisor)
        pid = main_pid(person_of, f"{host}w")
        assert name in lab.at(machine, f"cat /proc/{pid}/cmdline").split("\0")
        environ = lab.at(machine, f"cat /proc/{pid}/environ").split("\0")
        assert f"SGLANG_X={name}" in environ
        assert f"SGLANG_LONG={long}" in environ
        assert lab.at(machine, "ls /tmp/owned 2>/dev/null || true") == ""
        again = person_of.ask(
            "deploy", "--host", f"{host}w", "--profile", "mtp", "--set", f"args.served_model_name={name}",
            "--set", f"env.SGLANG_X={name}", "--set", f"env.SGLANG_LONG={long}", "--skip-preflight",
        )  # fmt: skip
        assert again["outcome"] == "unchanged"
        assert person_of.ask("stop", "--host", f"{host}w")["stopped"] is True
        assert f"{place}/wild" in lab.at(machine, f"ls -d {shlex.quote(place)}/wild")

    refused = person.ask("deploy", "--host", "gpu1", "--profile", "mtp", "--set", "env.SGLANG_X=a\nb", code=3)
    assert "env.SGLANG_X" in refused["message"]
    row.holds("a newline is refused, with the key that holds it")
    known = hosts_of(lab)
    wild = {
        f"{host}w": {
            **known[host],
            "workdir": f"/home/{user}/w {HOSTILE.replace('/', '_')}",
            "service": "wild",
            "args": {"port": 30400},
        }
        for host, (_, user, _) in HOSTS.items()
    }
    person.knows({**known, **wild})
    together(*(lambda host=host: one(host) for host in HOSTS))
    person.knows(known)
    row.holds("argument, environment and work folder reach the server byte for byte; nothing is expanded on the way")
    in_order(lab, person, "gpu1", "mtph1", workdir("gpu1"), row)
