"""The agent when things go wrong: killed at each step, two at once, strangers on the port, full disks, planted links, odd values.

After each: at most one server, none that is not recorded, no half release in use, and the next command works.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_host import SERVER, AgentHost, Call, build_agent, log_bytes, new_launch_id

from mtpdeploy.agent import process
from mtpdeploy.agent.process import ProcessId


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_agent(tmp_path_factory.mktemp("agent") / "agent.pyz")


@pytest.fixture
def host(tmp_path: Path, agent: Path) -> Iterator[AgentHost]:
    host = AgentHost(tmp_path / "work", agent, service=f"f{os.getpid()}-{time.time_ns() % 100000}")
    yield host
    host.clean()


def mains(host: AgentHost) -> set[int]:
    """Living processes of our launches that listen or load: the server's own, not its children."""
    found = set()
    for pid in host.living():
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        if str(SERVER).encode() in words:
            found.add(pid)
    return found


def assert_in_order(host: AgentHost) -> None:
    """What must hold after any fault."""
    running = mains(host)
    assert len(running) <= 1, f"two servers: {running}"
    recorded = set()
    for path in host.workdir.glob(f"{host.service}/releases/*/state.json"):
        recorded |= {boot["pid"] for boot in json.loads(path.read_text())["boots"]}
    assert running <= recorded, "a server runs that nobody recorded"
    link = host.workdir / host.service / "current"
    if link.is_symlink():
        target = link.resolve()
        assert (target / "release.json").is_file()
        assert (target / "launch.sh").is_file()
    assert host.call("status")["word"] in {
        "not deployed",
        "starting",
        "ready",
        "stopped",
        "stale",
        "crashed",
        "degraded",
    }


def kill_after(call: Call, events: int) -> bool:
    """SIGKILL once that many steps were announced. False if it ended before."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if sum(1 for e in list(call.events) if e["event"] == "step") >= events:
            call.process.kill()
            call.process.wait()
            return True
        if call.process.poll() is not None:
            return False
        time.sleep(0.001)
    raise AssertionError("the agent neither ended nor came that far")


@pytest.mark.parametrize("step", range(1, 6))
def test_an_agent_killed_at_a_step_of_deploy_leaves_the_old_or_the_new_and_the_next_deploy_works(
    host: AgentHost, step: int
) -> None:
    host.up(fingerprint="one")
    call = host.begin("deploy", **host.release(fingerprint="two"))
    assert kill_after(call, step), "the deploy has fewer steps than this test thinks"
    assert_in_order(host)
    last = host.up(fingerprint="three")
    assert_in_order(host)
    status = host.call("status")
    assert (status["word"], status["launch_id"], status["unfinished"]) == ("ready", last["launch_id"], None)
    assert not list((host.workdir / host.service / "releases").glob(".*.new"))
    assert host.call("stop")["stopped"]
    assert host.living() == []


@pytest.mark.slow
@pytest.mark.parametrize("milliseconds", range(50, 1300, 300))
def test_an_agent_killed_at_any_moment_leaves_the_old_or_the_new(host: AgentHost, milliseconds: int) -> None:
    host.up(fingerprint="one")
    call = host.begin("deploy", **host.release(fingerprint="two"))
    time.sleep(milliseconds / 1000)
    call.process.kill()
    call.process.wait()
    time.sleep(0.3)  # a server that was just started records its boot itself
    assert_in_order(host)
    host.up(fingerprint="three")
    assert_in_order(host)


def test_a_client_that_goes_away_does_not_stop_a_deploy_half_way(host: AgentHost) -> None:
    host.up(fingerprint="one")
    call = host.begin("deploy", **host.release(fingerprint="two"))
    call.wait_for(lambda e: e["event"] == "step" and "SIGTERM" in e["do"])
    call.hang_up()
    call.process.wait(30)
    assert host.call("status")["release"]["fingerprint"] == "two"
    assert_in_order(host)


def test_of_two_deploys_at_once_one_is_told_who_holds_the_lock(host: AgentHost) -> None:
    host.workdir.mkdir()
    calls = [host.begin("deploy", **host.release(fingerprint=name)) for name in ("one", "two", "three")]
    ends = [call.finish() for call in calls]
    won = [e for e in ends if e["event"] == "result"]
    lost = [e for e in ends if e["event"] == "error"]
    assert won
    assert {e["kind"] for e in lost} <= {"host-locked"}
    for event in lost:
        assert "ann@laptop" in event["message"]
    time.sleep(1)
    assert_in_order(host)


def test_a_lock_whose_holder_lives_no_longer_is_taken_over_and_that_is_said(host: AgentHost) -> None:
    host.up()
    lock = host.workdir / host.service / "lock.json"
    me = process.identify(os.getpid())
    assert me is not None
    # This very pid lives; only its start time tells that it is another process.
    stale = {
        **me.as_json(),
        "start_time": me.start_time - 1,
        "client": "bob@desk",
        "why": "deploy",
        "since_utc": "x",
        "host": "h",
    }
    lock.write_text(json.dumps(stale))
    call = host.begin("stop")
    assert call.finish()["stopped"]
    assert any("stale lock" in e.get("text", "") and "bob@desk" in e["text"] for e in call.events)


def test_a_lock_of_a_living_holder_is_broken_only_when_asked(host: AgentHost) -> None:
    host.up()
    lock = host.workdir / host.service / "lock.json"
    me = process.identify(os.getpid())
    assert me is not None
    lock.write_text(json.dumps({**me.as_json(), "client": "bob@desk", "why": "deploy", "since_utc": "x", "host": "h"}))
    assert host.fails("stop")["kind"] == "host-locked"
    assert host.fails("unlock")["kind"] == "host-locked"
    assert host.call("unlock", break_lock=True)["removed"]
    assert host.call("stop")["stopped"]


def test_a_recorded_pid_that_is_now_somebody_elses_is_never_signalled(host: AgentHost) -> None:
    up = host.up()
    assert host.call("stop")["stopped"]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True) as stranger:
        path = host.folder(up["launch_id"]) / "state.json"
        state = json.loads(path.read_text())
        state["stop"] = None
        state["boots"][-1].update(pid=stranger.pid, session=stranger.pid)  # start time is the old one
        path.write_text(json.dumps(state))
        assert host.call("status")["word"] == "crashed"
        host.call("stop")
        assert stranger.poll() is None
        stranger.kill()


def test_a_record_of_another_boot_of_the_host_is_stale_even_if_pid_and_start_time_agree() -> None:
    me = process.identify(os.getpid())
    assert me is not None
    assert process.alive(me)
    assert not process.alive(ProcessId(me.pid, me.start_time, "another-boot"))
    assert not process.send(ProcessId(me.pid, me.start_time, "another-boot"), signal.SIGKILL)


def foreign_server(host: AgentHost) -> subprocess.Popen[bytes]:
    server = subprocess.Popen(
        [sys.executable, str(SERVER), "--host", "127.0.0.1", "--port", str(host.port)],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 10
    from mtpdeploy.agent import ports

    while not ports.listeners(host.port) and time.monotonic() < deadline:
        time.sleep(0.05)
    return server


def test_a_port_taken_by_a_stranger_refuses_the_deploy_before_anything_is_touched(host: AgentHost) -> None:
    server = foreign_server(host)
    try:
        error = host.fails("deploy", **host.release())
        assert error["kind"] == "plan-refused"
        assert f"pid {server.pid}" in error["message"]
        assert "Nothing was touched" in error["message"]
        assert not (host.workdir / host.service / "current").exists()
        assert server.poll() is None
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_a_stranger_on_the_port_is_stale_never_ready_and_can_be_adopted_when_asked(host: AgentHost) -> None:
    host.up()
    assert host.call("stop")["stopped"]
    server = foreign_server(host)
    try:
        status = host.call("status")
        assert status["word"] == "stale"
        assert f"pid {server.pid}" in status["why"]
        assert status["identity"] == "foreign"
        adopted = host.call("adopt", port=host.port, launch_id=new_launch_id())
        assert adopted["status"]["identity"] == "ours"
        assert host.fails("start", restart=True)["kind"] == "remote-error"
        assert host.call("stop")["stopped"]
        assert server.wait(5) is not None
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def test_a_port_stolen_between_check_and_bind_is_named_at_once(host: AgentHost) -> None:
    up = host.up(env={"AGENT_SERVER_LOAD_S": "0.2"})
    first = host.state(up["launch_id"])["boots"][0]
    os.kill(first["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 10
    server = None
    while server is None and time.monotonic() < deadline:
        if not process.alive(ProcessId.from_json(first)):
            server = foreign_server(host)
    assert server is not None
    try:
        while len(host.state(up["launch_id"])["boots"]) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.3)
        assert "port taken" in host.state(up["launch_id"])["boots"][1]["exit"]["result"]
        assert host.call("status")["word"] == "stale"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_an_earlier_launch_that_still_answers_is_stale_and_named(host: AgentHost) -> None:
    first = host.up(fingerprint="one")
    second = new_launch_id()
    host.call(
        "install", **{k: v for k, v in host.release(fingerprint="two", launch_id=second).items() if k != "fingerprint"}
    )
    (host.workdir / host.service / "current").unlink()
    os.symlink(f"releases/{second}", host.workdir / host.service / "current")
    status = host.call("status")
    assert status["word"] == "stale"
    assert first["launch_id"] in status["why"]
    assert status["identity"] in ("earlier launch", "nobody")
    third = host.up(fingerprint="three")
    assert len(mains(host)) == 1
    assert host.call("status")["launch_id"] == third["launch_id"]


HOSTILE = [
    "it's",
    'say "x"',
    "$(touch /tmp/mtpdeploy-pwned)",
    "`id`",
    "a\nb",
    "100%n %i",
    "${HOME}",
    "\\n\\",
    "ünï",
    "-rf",
    " ",
]


def test_hostile_words_arrive_in_argv_and_environment_as_they_are(host: AgentHost) -> None:
    Path("/tmp/mtpdeploy-pwned").unlink(missing_ok=True)
    env = {f"HOSTILE_{n}": value for n, value in enumerate(HOSTILE)}
    args = tuple(word for value in HOSTILE for word in ("--odd", value))
    up = host.up(env={**env, "HOSTILE_LONG": "x" * 100_000}, args=args)
    pid = host.state(up["launch_id"])["boots"][0]["pid"]
    words = [w.decode() for w in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    assert [w for before, w in itertools.pairwise(words) if before == "--odd"] == HOSTILE
    found = process.environment(pid)
    assert found is not None
    assert [found[f"HOSTILE_{n}"] for n in range(len(HOSTILE))] == HOSTILE
    assert len(found["HOSTILE_LONG"]) == 100_000
    assert not Path("/tmp/mtpdeploy-pwned").exists()
    assert host.call("status")["word"] == "ready"


@pytest.mark.parametrize("name", ["work dir", "it's $HOME", 'quo"te', "per%cent %n", "ünï"])
@pytest.mark.parametrize("supervisor", ["detached", "tmux"])
def test_a_work_folder_with_odd_characters_works(tmp_path: Path, agent: Path, name: str, supervisor: str) -> None:
    odd = tmp_path / name
    odd.mkdir()
    host = AgentHost(odd / "work", Path(shutil.copy(agent, odd / "agent.pyz")), service=f"o{time.time_ns() % 1000000}")
    try:
        host.up(supervisor=supervisor)
        assert host.call("stop")["stopped"]
    finally:
        host.clean()


def test_a_planted_link_in_the_work_folder_is_refused_and_not_followed(host: AgentHost, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    host.workdir.mkdir(mode=0o700)
    folder = host.workdir / host.service
    folder.mkdir(mode=0o700)
    for name in ("journal.jsonl", "lock.json", ".lock.guard", "intent.json"):
        (folder / name).symlink_to(precious)
    host.begin("deploy", **host.release()).finish()
    assert precious.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another owner")
def test_a_work_folder_of_another_user_or_open_to_others_is_refused(host: AgentHost) -> None:
    host.workdir.mkdir()
    host.workdir.chmod(0o777)
    assert "can be written by other users" in host.fails("deploy", **host.release())["message"]
    host.workdir.chmod(0o755)
    os.chown(host.workdir, 65534, 65534)
    assert "belongs to another user" in host.fails("deploy", **host.release())["message"]


def test_current_pointing_elsewhere_is_named_and_not_followed(host: AgentHost) -> None:
    host.up()
    link = host.workdir / host.service / "current"
    link.unlink()
    link.symlink_to("/etc")
    error = host.fails("status")
    assert "'/etc'" in error["message"]
    link.unlink()
    found = host.call("status")
    assert (found["word"], found["notes"][0].startswith("`current` is lost")) == ("ready", True), (
        "a server that runs is not hidden"
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640k,mode=700", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, leave: int) -> None:
    data = os.statvfs(place)
    free = data.f_bavail * data.f_frsize - leave
    if free > 0:
        (place / "filler").write_bytes(b"x" * free)


@pytest.mark.parametrize("leave", [0, 4096, 8192, 16384, 28672, 40960])
def test_a_full_disk_leaves_the_old_server_serving_or_says_so_and_stop_still_works(
    small_disk: Path, agent: Path, leave: int
) -> None:
    host = AgentHost(small_disk / "work", agent, service=f"d{time.time_ns() % 1000000}", skip_preflight=True)
    try:
        host.up(fingerprint="one", env={"AGENT_SERVER_LOAD_S": "0.1"})
        fill(small_disk, leave)
        end = host.begin("deploy", skip_preflight=True, **host.release(fingerprint="two")).finish()
        assert end["event"] in ("error", "result")
        if end["event"] == "error":
            assert end["kind"] in ("remote-error", "plan-refused"), end
            assert (
                "no space" in end["message"] or "could not be" in end["message"] or "did not bring up" in end["message"]
            ), end
        assert len(mains(host)) <= 1
        assert not list((host.workdir / host.service / "releases").glob(".*.new"))
        assert host.call("status")["word"] in ("ready", "starting", "stopped", "crashed")
        assert host.call("stop")["stopped"]
        assert host.living() == []
        (small_disk / "filler").unlink(missing_ok=True)
        host.up(fingerprint="three")
    finally:
        host.clean()


def test_a_log_that_is_cut_or_replaced_is_followed_and_the_gap_is_said(host: AgentHost) -> None:
    up = host.up()
    log = host.folder(up["launch_id"]) / "server.log"
    call = host.begin("tail", lines=1, follow=True)
    call.wait_for(lambda e: e["event"] == "log")
    os.truncate(log, 0)
    call.wait_for(lambda e: e["event"] == "log-gap")
    with open(log, "ab") as file:
        file.write(b"after the cut\n")
    call.wait_for(lambda e: e["event"] == "log" and b"after the cut" in log_bytes([e]))
    log.rename(log.with_suffix(".1"))
    log.write_bytes(b"another file\n")
    call.wait_for(lambda e: e["event"] == "log-gap" and "replaced" in e["why"])
    call.wait_for(lambda e: e["event"] == "log" and b"another file" in log_bytes([e]))
    call.process.kill()


@pytest.mark.slow
def test_a_tail_cut_twenty_times_loses_and_doubles_no_byte(host: AgentHost) -> None:
    up = host.up()
    log = host.folder(up["launch_id"]) / "server.log"
    before = log.stat().st_size
    script = (
        f"import time\nf=open({str(log)!r},'ab',buffering=0)\nfor n in range(100000):\n f.write(b'line %d\\n' % n)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script])
    got, place = b"", {"offset": before, "inode": log.stat().st_ino}
    for cut in range(21):
        call = host.begin("tail", follow=cut < 20, **place)
        if cut < 20:
            time.sleep(0.12)
            call.process.kill()
        else:
            writer.wait(60)
            time.sleep(0.1)
        call.process.wait(30)
        assert call.reader is not None
        call.reader.join(5)
        for event in call.events:
            if event["event"] == "log":
                assert event["offset"] == before + len(got)
                got += log_bytes([event])
        place = {"offset": before + len(got), "inode": log.stat().st_ino}
    rest = host.begin("tail", follow=False, **place)
    rest.finish()
    got += log_bytes(rest.events)
    assert got == log.read_bytes()[before:]


def test_rollback_starts_the_last_good_launch_and_not_one_that_never_served(host: AgentHost) -> None:
    good = host.up(fingerprint="one")
    bad = host.deploy(fingerprint="two", env={"AGENT_SERVER_EXIT": "1"})
    assert host.call("watch", launch_id=bad["launch_id"])["outcome"] == "ended"
    worse = host.deploy(fingerprint="three", env={"AGENT_SERVER_EXIT": "2"})
    assert host.call("watch", launch_id=worse["launch_id"])["exit"]["status"] == 2
    back = host.call("rollback")
    assert (back["launch_id"], back["boot"]) == (good["launch_id"], 2)
    assert host.call("watch", launch_id=good["launch_id"])["outcome"] == "ready"


def test_prune_keeps_the_current_the_running_and_the_last_that_served(host: AgentHost) -> None:
    launches = [host.up(fingerprint=str(n))["launch_id"] for n in range(4)]
    assert host.call("prune", keep=1, dry_run=True)["removed"] == [launches[1], launches[0]]
    assert host.call("prune", keep=1)["removed"] == [launches[1], launches[0]]
    assert [r["launch_id"] for r in host.call("history")["releases"]] == [launches[3], launches[2]]
    assert host.call("status")["word"] == "ready"


def test_the_key_reaches_the_server_and_no_process_list_log_record_or_event(host: AgentHost) -> None:
    key = "sk-very-secret-0123456789"
    deploying = host.begin("deploy", **host.release(key=key, env={"MTPDEPLOY_API_KEY": key}))
    up = deploying.finish()
    watching = host.begin("watch", launch_id=up["launch_id"])
    assert watching.finish()["outcome"] == "ready"  # its generation needed the key
    corpse = host.begin("corpse")
    corpse.finish()
    told: list[Any] = [*deploying.events, *watching.events, *corpse.events, host.call("status"), host.call("history")]
    assert key not in json.dumps(told)
    for path in (host.workdir / host.service).rglob("*"):
        if path.is_file() and key in path.read_text(errors="replace"):
            assert path.name in ("env", "server.yml")
            assert path.stat().st_mode & 0o777 == 0o600
    for pid in host.living():
        assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("service", ["", "Agent", "agent", "bench", "a/b", "../x", "a b", "x" * 50, "-x"])
def test_a_name_that_cannot_be_a_service_is_refused(host: AgentHost, service: str) -> None:
    assert host.fails("status", service=service)["kind"] == "usage-error"


def test_a_broken_request_is_answered_with_one_error_line(host: AgentHost) -> None:
    for word in ("!!!", "W10=", ""):
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(host.agent), "status", word], capture_output=True, text=True, check=False
        )
        last = json.loads(done.stdout.splitlines()[-1])
        assert (done.returncode, last["event"], last["kind"]) == (3, "error", "usage-error")
