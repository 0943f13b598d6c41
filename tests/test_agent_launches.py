"""The agent as a process: deploy, watch, status, stop against a real server, under the supervisors that this machine has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_host import AgentHost, build_agent, log_bytes

from mtpdeploy.agent import process


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_agent(tmp_path_factory.mktemp("agent") / "agent.pyz")


@pytest.fixture
def host(tmp_path: Path, agent: Path) -> Iterator[AgentHost]:
    host = AgentHost(tmp_path / "work dir", agent, service=f"t{os.getpid()}-{time.time_ns() % 100000}")
    yield host
    host.clean()


def test_a_deployed_server_is_proven_ready_ours_and_fresh(host: AgentHost) -> None:
    deployed = host.deploy()
    assert deployed["outcome"] == "started"
    watching = host.begin("watch", launch_id=deployed["launch_id"], silence_s=20)
    watched = watching.finish()
    assert watched["outcome"] == "ready"
    assert watched["generation"]["tokens"] == 4
    assert log_bytes(watching.events) == (host.folder(deployed["launch_id"]) / "server.log").read_bytes()
    assert log_bytes(watching.events).startswith(f"# mtpdeploy launch {deployed['launch_id']} boot 1 utc ".encode())
    status = host.call("status")
    assert (status["word"], status["why"], status["identity"]) == ("ready", "", "ours")
    assert {p["check"]: p["holds"] for p in status["proof"]} == {
        "boot of the host": True,
        "main process lives": True,
        "port owner descends from it": True,
        "launch id in its environment": True,
        "session": True,
        "log file is open in it": True,
    }


def test_an_equal_fingerprint_with_a_ready_server_changes_nothing(host: AgentHost) -> None:
    first = host.up()
    again = host.call("deploy", fingerprint="one")
    assert (again["outcome"], again["launch_id"]) == ("unchanged", first["launch_id"])
    assert host.call("deploy", fingerprint="two")["outcome"] == "needs-files"
    assert len(host.state(first["launch_id"])["boots"]) == 1


def test_a_new_deploy_stops_the_old_server_before_it_starts_its_own(host: AgentHost) -> None:
    first = host.up()
    second = host.deploy(fingerprint="two")
    assert second["previous"] == first["launch_id"]
    assert host.state(first["launch_id"])["stop"]["why"] == f"replaced by launch {second['launch_id']}"
    assert host.call("watch", launch_id=second["launch_id"])["outcome"] == "ready"
    rows = host.call("history")["releases"]
    assert [(r["state"], r["current"], r["was_ready"]) for r in rows] == [
        ("running", True, True),
        ("stopped", False, True),
    ]


def test_stop_drains_leaves_nothing_and_shows_stopped_although_the_server_killed_itself(host: AgentHost) -> None:
    up = host.up(env={"AGENT_SERVER_DRAIN_S": "0.5"})
    stopped = host.call("stop", why="maintenance")
    assert stopped["stopped"]
    assert stopped["drained"]
    assert stopped["port_free"]
    assert stopped["killed"] == []
    assert stopped["left"] == []
    status = host.call("status")
    assert status["word"] == "stopped"
    assert "maintenance" in status["why"]
    assert host.living() == []
    assert host.state(up["launch_id"])["boots"][0]["exit"]["signal"] == signal.SIGKILL
    assert not (host.workdir / host.service / "lock.json").exists()
    assert host.call("stop")["already"]


def test_a_server_that_ignores_sigterm_is_killed_after_the_drain_limit(host: AgentHost) -> None:
    host.up(env={"AGENT_SERVER_IGNORE_TERM": "1"})
    stopped = host.call("stop", drain_timeout_s=0.5)
    assert stopped["stopped"]
    assert stopped["drained"] is False
    assert host.living() == []


def test_an_orphaned_scheduler_is_found_and_ended(host: AgentHost) -> None:
    host.up(env={"AGENT_SERVER_ORPHAN": "1"})
    stopped = host.call("stop")
    assert stopped["stopped"]
    assert host.living() == []


def test_a_crash_is_restarted_as_the_next_boot_of_the_same_launch(host: AgentHost) -> None:
    up = host.up()
    os.kill(host.state(up["launch_id"])["boots"][0]["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 15
    while (status := host.call("status"))["word"] != "ready" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (status["word"], status["boot"], status["launch_id"]) == ("ready", 2, up["launch_id"])
    log = (host.folder(up["launch_id"]) / "server.log").read_text()
    assert log.count("# mtpdeploy launch") == 2


def test_a_launch_that_dies_before_it_ever_served_is_not_started_again(host: AgentHost) -> None:
    deployed = host.deploy(env={"AGENT_SERVER_EXIT": "1"})
    watched = host.call("watch", launch_id=deployed["launch_id"])
    assert (watched["outcome"], watched["boot"], watched["exit"]["status"]) == ("ended", 1, 1)
    status = host.call("status")
    assert status["word"] == "crashed"
    assert "before it ever served" in status["why"]
    assert host.living() == []


def test_a_crash_loop_is_given_up_and_the_first_log_is_still_there(host: AgentHost) -> None:
    up = host.up(env={"AGENT_SERVER_EXIT_AFTER_S": "1", "AGENT_SERVER_LOAD_S": "0.05"})
    deadline = time.monotonic() + 30
    while not (state := host.state(up["launch_id"])).get("gave_up") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "failed 3 times" in state["gave_up"]["why"]
    assert [b["n"] for b in state["boots"]] == [1, 2, 3]
    assert host.call("status")["word"] == "crashed"
    assert b" boot 1 " in (host.folder(up["launch_id"]) / "server.log").read_bytes().splitlines()[0]


def test_a_dead_scheduler_under_a_living_parent_shows_as_degraded(host: AgentHost) -> None:
    up = host.up()
    scheduler = host.state(up["launch_id"])["proven"]["schedulers"][0]["pid"]
    os.kill(scheduler, signal.SIGKILL)
    time.sleep(0.2)
    status = host.call("status")
    assert status["word"] == "degraded"
    assert f"(pid {scheduler})" in status["why"]


def test_tmux_keeps_the_server_when_its_session_is_killed(host: AgentHost) -> None:
    import subprocess

    deployed = host.up(supervisor="tmux")
    assert deployed["supervisor"] == "tmux"
    subprocess.run(["tmux", "-L", f"mtpdeploy-{host.service}", "kill-server"], check=True)
    time.sleep(0.3)
    assert host.call("status")["word"] == "ready"
    assert host.call("stop")["stopped"]
    assert host.living() == []


def test_a_strangers_command_line_cannot_break_out_of_its_line() -> None:
    code = "\nimport sys\n\tprint('\x1b[31mred')\n" + "#" * 300
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        shown = process.command_line(stranger.pid)
        stranger.terminate()
    assert shown is not None
    assert "import sys print('\\x1b[31mred') ##" in shown
    assert shown.isprintable()
    assert len(shown) == 120
    assert shown.endswith("…")


def test_a_probe_tells_which_launches_of_which_service_live(host: AgentHost) -> None:
    up = host.up()
    assert host.call("probe")["living_launches"] == {host.service: [up["launch_id"]]}
    host.call("stop")
    assert host.call("probe")["living_launches"] == {}


def test_that_a_server_is_ready_is_told_without_asking_anything_slow(host: AgentHost, tmp_path: Path) -> None:
    """nvidia-smi takes tenths of a second, on some machines seconds: nothing between the ready line and the news waits for it."""
    asked = tmp_path / "asked"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho asked >>{asked}\nexit 1\n")
    program.chmod(0o755)
    host.env["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    deployed = host.deploy(env={"PATH": host.env["PATH"]})
    asked.unlink(missing_ok=True)
    assert host.call("watch", launch_id=deployed["launch_id"], silence_s=20)["outcome"] == "ready"
    assert not asked.exists()
    host.call("status")
    assert asked.exists(), "the probe of this test would notice"
