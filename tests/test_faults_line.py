"""Faults of the client, the line and who else is there, on real hosts. Each test is a row of docs/reliability.md."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT
from typing import Any

import pytest

from mtpdeploy.inventory.values import Simulate
from tests.lab.doors import Doors, Running
from tests.lab.faults import Row, disorder, in_order, look, together, until
from tests.lab.following import follow_through_cuts
from tests.lab.lab import PASSWORD, Lab, Person, address, script

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

LOADING = Simulate(clock=40)  # long enough to be met in the middle
HOSTS = {"gpu1": ("mtph1", "deploy", "auto"), "gpu2": ("mtph2", "ops", "systemd"), "gpu3": ("mtph3", "deploy", "tmux")}


def workdir(host: str) -> str:
    return f"/home/{HOSTS[host][1]}/.mtpdeploy"


@pytest.fixture(scope="module")
def person(lab: Lab, doors: Doors, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """gpu1: a user unit; gpu2: a system unit; gpu3: tmux."""
    somebody = Person(tmp_path_factory.mktemp("home"), doors)
    somebody.knows({
        host: lab.host(name, user, LOADING, supervisor=supervisor, groups=["all"])
        for host, (name, user, supervisor) in HOSTS.items()
    })  # fmt: skip
    yield somebody
    together(*(lambda name=name: script("heal", name) for name, _, _ in HOSTS.values()))
    together(*(lambda host=host: somebody.run("stop", "--host", host, "--abort-requests", code=None) for host in HOSTS))


# What a deploy says at each of its steps, in this order.
STEPS = (
    "asking what runs there", "look at the host", "supervisor ", "write release", "SIGTERM to the main process",
    "start launch", "SGLang is starting", "loading weights", "a real generation",
)  # fmt: skip


def at_step(person: Person, host: str, profile: str, step: str) -> Running:
    """A deploy that has just said that it is at `step`."""
    deploy = person.start("deploy", "--host", host, "--profile", profile, "--force")
    until(lambda: step in deploy.err or deploy.poll() is not None, f"{host}: {step}", every_s=0.002)
    assert deploy.poll() is None or step == STEPS[-1], f"{host}: it ended before {step!r}\n{deploy.err}"
    return deploy


@pytest.mark.fault("the client is killed (SIGKILL) at a step of deploy", "at each of nine steps; three supervisors")
def test_a_client_killed_at_any_step_of_deploy_leaves_the_old_or_the_new(lab: Lab, person: Person, row: Row) -> None:
    def chain(host: str, steps: tuple[str, ...]) -> None:
        name = HOSTS[host][0]
        for number, step in enumerate(steps):
            at_step(person, host, ("baseline", "mtp")[number % 2], step).kill()
            until(lambda: not disorder(look(lab, name, workdir(host))), f"{host}: in order after {step}", 30, 0.3)
        in_order(lab, person, host, name, workdir(host), row)

    together(*(lambda host=host, n=n: chain(host, STEPS[n::3]) for n, host in enumerate(HOSTS)))
    row.holds("the agent at the host ends what it began; the next deploy goes on from there")


@pytest.mark.fault(
    "the network is dropped at a step of deploy", "the cable pulled at each of nine steps, until it is noticed"
)
def test_a_line_cut_at_any_step_of_deploy_is_noticed_and_the_deploy_is_taken_up_again(
    lab: Lab, person: Person, row: Row
) -> None:
    noticed: list[float] = []

    def chain(host: str, steps: tuple[str, ...]) -> None:
        name = HOSTS[host][0]
        for number, step in enumerate(steps):
            deploy = at_step(person, host, ("baseline", "mtp")[number % 2], step)
            script("cut", name)
            began = time.monotonic()
            until(
                lambda deploy=deploy: "cut" in deploy.err or deploy.poll() is not None, f"{host}: {step}: noticed", 80
            )
            if deploy.poll() is None:
                noticed.append(time.monotonic() - began)
            script("heal", name)
            code = deploy.wait(90)
            assert code == 0 or (code in (5, 11, 13) and step == STEPS[0]), (
                f"{host} {step}: {code}\n{deploy.err}\n{deploy.out}"
            )
        in_order(lab, person, host, name, workdir(host), row)

    together(*(lambda host=host, n=n: chain(host, STEPS[n::3]) for n, host in enumerate(HOSTS)))
    assert noticed
    row.holds(
        f"noticed after {min(noticed):.1f} s of silence, or as soon as a new connection fails (three tries of 4 s; "
        f"{max(noticed):.1f} s at most); the same command then reports the launch as ready"
    )
    assert min(noticed) < 6


@pytest.mark.fault("sshd is restarted, with all its sessions", "while a launch is loading and its log is followed")
def test_a_restarted_sshd_ends_no_launch_and_no_command(lab: Lab, person: Person, row: Row) -> None:
    deploy = at_step(person, "gpu1", "baseline", "loading weights")
    lab.at("mtph1", "systemctl restart ssh; pkill -KILL -f '^sshd: .*' || true")
    assert deploy.wait(60) == 0, deploy.err
    row.holds("the watch goes on over a new connection; the launch is proven ready")
    in_order(lab, person, "gpu1", "mtph1", workdir("gpu1"), row)


@pytest.mark.fault("two deployers at once", "two people, two profiles, the same moment")
def test_of_two_deployers_one_wins_and_the_other_is_told_who(lab: Lab, person: Person, row: Row) -> None:
    words = ("deploy", "--host", "gpu1", "--force", "--json", "--profile")
    both = [person.start(*words, profile) for profile in ("mtp", "baseline")]
    ends = [json.loads(each.out) for each in both if each.wait(90) is not None]
    told = sorted(each.get("error", "won") for each in ends)
    # The loser is either refused by the lock, or came second and stopped the first's launch: told as such.
    assert told in (["host-locked", "won"], ["launch-failed", "won"], ["won", "won"]), ends
    for each in ends:
        if each.get("error") == "host-locked":
            assert re.search(r"\w+@\S+ has held it since \S+Z for: profile", each["message"]), each["message"]
        if each.get("error") == "launch-failed":
            assert "was stopped while it was starting" in each["message"]
    row.holds("one wins; the other is told who holds the lock, or who stopped its launch")
    in_order(lab, person, "gpu1", "mtph1", workdir("gpu1"), row)


@pytest.mark.fault("a lock is left behind", "the agent killed in the middle of a deploy; and one that lives and hangs")
def test_a_lock_left_behind_is_taken_over_and_a_living_holder_s_only_when_asked(
    lab: Lab, person: Person, row: Row
) -> None:
    lock = f"{workdir('gpu1')}/sglang/lock.json"
    deploy = at_step(person, "gpu1", "baseline", "SIGTERM to the main process")
    lab.at("mtph1", f'kill -KILL $(python3 -c \'import json; print(json.load(open("{lock}"))["pid"])\')')
    assert deploy.wait(30) != 0
    assert "mtpdeploy status" in deploy.err
    told = person.run("deploy", "--host", "gpu1", "--profile", "mtp")
    assert "took over a stale lock" in told.stderr
    assert "was interrupted while the old server was being stopped" in told.stderr
    row.holds("a dead holder's lock is taken over, and that is said, with the step it had come to")

    deploy = at_step(person, "gpu1", "baseline", "SIGTERM to the main process")
    holder = lab.at("mtph1", f'python3 -c \'import json; print(json.load(open("{lock}"))["pid"])\'').strip()
    lab.at("mtph1", f"kill -STOP {holder}")
    try:
        deploy.kill()
        refused = person.ask("stop", "--host", "gpu1", code=7)
        assert "has held it since" in refused["message"]
        assert person.run("unlock", "--host", "gpu1", code=7)
        person.run("unlock", "--host", "gpu1", "--break-lock")
    finally:
        lab.at("mtph1", f"kill -KILL {holder}; kill -CONT {holder}", check=False)
    row.holds("a hanging holder's lock is broken only by --break-lock")
    in_order(lab, person, "gpu1", "mtph1", workdir("gpu1"), row)


# ---------------------------------------------------------------- keys, ways in


@pytest.mark.fault("the host's key has changed", "a new ssh host key, as after a reinstallation or an attack")
def test_a_changed_host_key_is_refused_before_anything_is_sent(lab: Lab, person: Person, row: Row) -> None:
    keys = "/etc/ssh/ssh_host_ed25519_key"
    person.run("deploy", "--host", "gpu3", "--profile", "mtp")
    lab.at(
        "mtph3",
        f"cp {keys} /root/key && cp {keys}.pub /root/key.pub && rm {keys} && ssh-keygen -q -t ed25519 -N '' -f {keys}",
    )
    lab.at("mtph3", "systemctl restart ssh")
    try:
        refused = person.ask("deploy", "--host", "gpu3", "--profile", "baseline", code=None)
        assert refused["error"] == "host-key-refused", refused
        assert "ssh-keygen -R" in " ".join(refused["next_commands"]), refused["next_commands"]
        row.holds("refused, with the key found, the key expected and what to type if the change is known")
    finally:
        lab.at("mtph3", f"mv /root/key {keys}; mv /root/key.pub {keys}.pub; systemctl restart ssh")
    in_order(lab, person, "gpu3", "mtph3", workdir("gpu3"), row)


_LATE = """
import socket, sys, threading, time
late = float(sys.argv[2]); server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
def carry(a, b):
    while data := a.recv(65536): b.sendall(data)
    b.shutdown(socket.SHUT_WR)
def serve(client):
    time.sleep(late); real = socket.create_connection(("127.0.0.1", 22))
    threading.Thread(target=carry, args=(real, client)).start(); carry(client, real)
while True: threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


@pytest.fixture(scope="module")
def slow_answer(lab: Lab, person: Person, doors: Doors, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Commands to a host whose sshd says nothing for 30 s, begun before the other tests, since they only wait."""
    late = shlex.join(["systemd-run", "--quiet", "--unit=late", "python3", "-c", _LATE])
    lab.at("mtph3", f"{late} 2222 30")
    waiting = Person(tmp_path_factory.mktemp("waiting"), doors)
    known = tmp_path_factory.mktemp("keys") / "known_hosts"
    key = lab.at("mtph3", "cut -d' ' -f1,2 /etc/ssh/ssh_host_ed25519_key.pub").strip()
    known.write_text(f"[{address('mtph3')}]:2222 {key}\n")
    said = lab.host("mtph3", "deploy", LOADING, port=2222)
    ssh = {**said["ssh"], "known_hosts_file": str(known)}
    waiting.knows({
        "patient": {**said, "ssh": {**ssh, "connect_timeout_s": 45}},
        "hurried": {**said, "ssh": {**ssh, "connect_timeout_s": 2}},
    })  # fmt: skip
    began = time.monotonic()
    hurried = waiting.start("status", "--host", "hurried", "--json")
    patient = waiting.start("status", "--host", "patient", "--json")
    yield began, hurried, patient
    lab.at("mtph3", "systemctl stop late", check=False)


@pytest.fixture(scope="module", autouse=True)
def _begin_what_only_waits(slow_answer: Any) -> None: ...


@pytest.mark.fault(
    "logind kills user processes at logout (KillUserProcesses=yes)", "with linger, and where linger is forbidden"
)
def test_where_logout_kills_deploy_says_so_before_and_picks_what_survives(lab: Lab, person: Person, row: Row) -> None:
    lab.at("mtph3", "mkdir -p /etc/systemd/logind.conf.d; printf '[Login]\\nKillUserProcesses=yes\\n' "
           ">/etc/systemd/logind.conf.d/kill.conf; systemctl restart systemd-logind")  # fmt: skip

    # Where a cable was pulled before, the host still has the dead connections.
    lab.at("mtph3", "pkill -KILL -u deploy sshd || true")

    def logged_out() -> None:
        until(lambda: not lab.at("mtph3", "pgrep -u deploy sshd || true"), "no connection of this user is left", 60)

    try:
        person.run("stop", "--host", "gpu3", "--abort-requests", code=None)
        deployed = person.ask("deploy", "--host", "gpu3", "--profile", "mtp", "--supervisor", "auto")
        assert deployed["supervisor"] == "systemd-user"
        logged_out()
        assert person.ask("status", "--host", "gpu3")["word"] == "ready"
        row.holds("with linger `auto` takes a user unit, which survives the logout")
        deployed = person.ask("deploy", "--host", "gpu3", "--profile", "mtp", "--force", "--supervisor", "tmux")
        logged_out()
        assert person.ask("status", "--host", "gpu3")["word"] == "ready"
        row.holds("tmux is put into a scope of the lingering user manager, and survives too")

        person.run("stop", "--host", "gpu3", "--abort-requests")
        lab.at("mtph3", "systemctl mask --runtime --now polkit; loginctl disable-linger deploy; sleep 0.3")
        refused = person.ask("deploy", "--host", "gpu3", "--profile", "mtp", "--supervisor", "tmux", code=4)
        assert "KillUserProcesses=yes" in refused["message"]
        assert any("enable-linger deploy" in line for line in refused["next_commands"])
        refused = person.ask("deploy", "--host", "gpu3", "--profile", "mtp", "--supervisor", "auto", code=4)
        assert "linger" in refused["message"]
        row.holds("without linger it is refused before anything is started, with the command that cures it")
    finally:
        lab.at("mtph3", "rm -f /etc/systemd/logind.conf.d/kill.conf; systemctl unmask --runtime polkit; "
               "systemctl restart systemd-logind; loginctl enable-linger deploy")  # fmt: skip
    in_order(lab, person, "gpu3", "mtph3", workdir("gpu3"), row)


@pytest.mark.fault(
    "sudo asks for a password", "not given, wrong, and right; looked for afterwards in every file and process"
)
def test_a_sudo_password_is_asked_once_used_and_kept_nowhere(lab: Lab, person: Person, row: Row) -> None:
    person.knows({
        **{host: lab.host(name, user, LOADING, supervisor=how, groups=["all"]) for host, (name, user, how) in HOSTS.items()},
        "asks": lab.host("mtph2", "boss", LOADING, service="bossy", args={"port": 30100}),
    })  # fmt: skip

    def typed(password: str, *words: str) -> Running:
        ours, theirs = pty.openpty()
        command = person.start(*words, "--ask-sudo", "--json", stdin=theirs)
        os.close(theirs)
        until(lambda: "password" in os.read(ours, 4096).decode().lower(), "the prompt")
        os.write(ours, password.encode() + b"\n")
        command.wait(90)
        os.close(ours)
        return command

    words = ("deploy", "--host", "asks", "--profile", "mtp", "--supervisor", "systemd")
    refused = person.ask(*words, code=4)
    assert "--ask-sudo" in refused["message"]
    wrong = typed("nonsense", *words)
    assert wrong.poll() != 0
    assert "password" in json.loads(wrong.out)["message"], wrong.out
    assert lab.at("mtph2", "ls /etc/systemd/system/mtpdeploy-bossy.service 2>/dev/null || true") == ""
    row.holds("without it the refusal names --ask-sudo; a wrong one is told as wrong, and nothing is started")
    right = typed(PASSWORD, *words)
    assert right.poll() == 0, right.err + right.out
    assert json.loads(right.out)["supervisor"] == "systemd"
    assert typed(PASSWORD, "stop", "--host", "asks").poll() == 0
    everywhere = "/home /etc /var/log /run /tmp"
    quoted = shlex.quote(PASSWORD)
    assert lab.at("mtph2", f"grep -rlF -e {quoted} {everywhere} 2>/dev/null; true") == ""
    assert PASSWORD not in lab.at("mtph2", "journalctl --no-pager | tail -n 3000")
    here = [path for path in person.home.rglob("*") if path.is_file() and PASSWORD in path.read_text(errors="replace")]
    assert here == []
    row.holds("the right one starts and stops a system unit; it is in no file, journal or process afterwards")
    in_order(lab, person, "gpu2", "mtph2", workdir("gpu2"), row)


@pytest.mark.fault(
    "the host is behind a ProxyJump, and the line to the jump host is cut", "deploy; then the cable of the jump host"
)
def test_a_host_behind_a_jump_host_is_deployed_and_a_cut_before_it_is_noticed(
    lab: Lab, person: Person, row: Row, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    key, known = lab.keys()
    config.write_text(
        f"Host jump\n  HostName {address('mtph1')}\n  User deploy\n  IdentityFile {key}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {known}\n"
    )
    lab.at("mtph2", f"nft add table inet lab; nft 'add chain inet lab in {{ type filter hook input priority 0; }}'; "
           f"nft add rule inet lab in ip saddr {address('gate')} drop")  # fmt: skip
    try:
        behind = lab.host("mtph2", "ops", LOADING, supervisor="systemd")
        behind["ssh"] |= {"proxy_jump": "jump", "config_file": str(config)}
        person.knows({"gpu2": behind})
        deployed = person.ask("deploy", "--host", "gpu2", "--profile", "mtp", "--force")
        assert deployed["outcome"] == "ready"
        follow = person.start("logs", "--host", "gpu2", "--follow", "--lines", "1")
        until(lambda: follow.out, "the log is followed through the jump host")
        script("cut", "mtph1")
        began = time.monotonic()
        until(lambda: "cut" in follow.err, "the cut is noticed", 20)
        seconds = time.monotonic() - began
        script("heal", "mtph1")
        lab.at("mtph2", f"echo 'after the cut' >> {workdir('gpu2')}/sglang/current/server.log")
        until(lambda: "after the cut" in follow.out, "the follow goes on")
        follow.signal(SIGINT)
        assert follow.wait(20) == 130
        assert follow.out.count("after the cut") == 1
        row.holds(f"the cut was noticed after {seconds:.1f} s, and the follow went on by itself")
        assert seconds < 9
    finally:
        script("heal", "mtph1")
        lab.at("mtph2", "nft delete table inet lab", check=False)
        person.knows({
            host: lab.host(name, user, LOADING, supervisor=how, groups=["all"]) for host, (name, user, how) in HOSTS.items()
        })  # fmt: skip
    in_order(lab, person, "gpu2", "mtph2", workdir("gpu2"), row)


# ---------------------------------------------------------------- streams


@pytest.mark.fault(
    "the line is cut while a log is followed", "6 cuts during 20,000 lines (bench/faults.py: 20 during 100,000)"
)
def test_a_followed_log_has_every_byte_once_whatever_is_cut(lab: Lab, person: Person, row: Row) -> None:
    written = follow_through_cuts(lab, person, "gpu1", "mtph1", workdir("gpu1"), lines=20_000, cuts=6)
    row.holds(f"{written:,} bytes, each once and in order")
    in_order(lab, person, "gpu1", "mtph1", workdir("gpu1"), row)


@pytest.mark.fault(
    "the line is cut while a benchmark runs at the host", "the client killed; `bench --attach` from a new process"
)
def test_a_benchmark_goes_on_at_the_host_and_is_attached_again(lab: Lab, person: Person, row: Row) -> None:
    person.run("deploy", "--host", "gpu1", "--profile", "mtp")
    words = ("bench", "--host", "gpu1", "--concurrency", "2", "--requests", "12", "--output-tokens", "256")
    bench = person.start(*words)
    requests = f"{workdir('gpu1')}/bench/*/events.jsonl"
    until(lambda: int(lab.at("mtph1", f"cat {requests} 2>/dev/null | wc -l") or 0) > 3, "the benchmark runs")
    script("cut", "mtph1")
    until(lambda: "cut" in bench.err or bench.poll() is not None, "the cut is noticed", 20)
    bench.kill()
    script("heal", "mtph1")
    answer = person.ask("bench", "--attach", "last", code=None, limit_s=90)
    (point,) = answer["points"]
    assert (point["requests"], point["completed"], point["failed"]) == (12, 12, 0)
    records = [
        json.loads(line)
        for line in (person.home / "runs" / answer["run_id"] / "records.jsonl").read_text().splitlines()
    ]
    assert len({each["id"] if "id" in each else json.dumps(each) for each in records}) == len(records)
    row.holds("the load went on beside the server; every record came, each once")
    in_order(lab, person, "gpu1", "mtph1", workdir("gpu1"), row)


@pytest.mark.fault("the host is slow: the SSH banner comes after 30 s", "connect_timeout_s 45, and 2")
def test_a_slow_host_is_waited_for_as_long_as_was_asked(lab: Lab, person: Person, row: Row, slow_answer: Any) -> None:
    began, hurried, patient = slow_answer
    assert hurried.wait(20) == 5, hurried.err
    told = json.loads(hurried.out)
    assert (told["error"], "takes the connection and does not answer" in told["message"]) == (
        "host-unreachable",
        True,
    ), told
    assert patient.wait(max(1.0, 75 - (time.monotonic() - began))) == 0, patient.err
    row.holds("waited for and answered where the time is given; told as unreachable where it is not")
    in_order(lab, person, "gpu3", "mtph3", workdir("gpu3"), row)
