"""Deploying what runs already: in one exec, without planning where nothing has changed, and without stopping anybody's server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_host import AgentHost, build_agent, free_port

from mtpdeploy import sim
from mtpdeploy.actions import recall
from mtpdeploy.actions.deploy import Deployed, deploy
from mtpdeploy.actions.launches import stop
from mtpdeploy.agent import deploying, installed
from mtpdeploy.agent.fault import Fault
from mtpdeploy.agent.release import Service
from mtpdeploy.agent.stream import Stream
from mtpdeploy.hosts import ssh
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.inventory.values import Simulate
from mtpdeploy.progress import Silent
from mtpdeploy.store import Store
from tests.sshd import Sshd

# ---------------------------------------------------------------- the agent


@pytest.fixture
def agent_host(tmp_path: Path) -> Iterator[AgentHost]:
    host = AgentHost(tmp_path / "work", build_agent(tmp_path / "agent.pyz"), service=f"t{os.getpid()}")
    yield host
    host.clean()


def again(host: AgentHost, monkeypatch: pytest.MonkeyPatch | None = None, look_s: float = 12.0) -> Any:
    """A second deploy of the same, in this process."""
    if monkeypatch is not None:
        monkeypatch.setattr(deploying, "_LOOK_AGAIN_S", look_s)
        monkeypatch.setattr(deploying, "_LOOK_AGAIN_EACH_S", 0.05)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        return deploying.deploy(Service(host.workdir, host.service), Stream(sink), {"fingerprint": "one"})
    finally:
        os.close(sink)


def test_a_server_that_is_still_loading_is_watched_and_not_started_again(agent_host: AgentHost) -> None:
    first = agent_host.deploy(env={"AGENT_SERVER_LOAD_S": "3"})
    second = agent_host.call("deploy", fingerprint="one")
    assert (second["outcome"], second["launch_id"]) == ("starting", first["launch_id"])
    assert agent_host.call("watch", launch_id=first["launch_id"], silence_s=20)["outcome"] == "ready"
    assert len(agent_host.state(first["launch_id"])["boots"]) == 1


def test_a_server_that_is_unready_for_a_moment_is_looked_at_again_and_left_alone(
    agent_host: AgentHost, tmp_path: Path
) -> None:
    busy = tmp_path / "busy"
    first = agent_host.up(env={"AGENT_SERVER_UNREADY": str(busy)})
    busy.touch()
    second = agent_host.begin("deploy", fingerprint="one")
    second.wait_for(lambda event: event["event"] == "note" and "looking again" in event["text"])
    busy.unlink()
    said = second.finish()
    assert (said["outcome"], said["launch_id"]) == ("unchanged", first["launch_id"])
    assert len(agent_host.state(first["launch_id"])["boots"]) == 1


def test_a_server_that_stays_unready_is_refused_to_be_torn_down_and_the_ways_out_are_said(
    agent_host: AgentHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = tmp_path / "busy"
    first = agent_host.up(env={"AGENT_SERVER_UNREADY": str(busy)})
    busy.touch()
    with pytest.raises(Fault, match=r"degraded for 0 s: it answers 503.*nothing was touched") as told:
        again(agent_host, monkeypatch, look_s=0.2)
    assert told.value.kind == "not-ready"
    assert any("--force" in line for line in told.value.next_commands)
    assert agent_host.living()
    assert len(agent_host.state(first["launch_id"])["boots"]) == 1


def test_a_server_whose_scheduler_is_dead_may_be_replaced(agent_host: AgentHost) -> None:
    first = agent_host.up()
    scheduler = agent_host.state(first["launch_id"])["proven"]["schedulers"][0]["pid"]
    os.kill(scheduler, 9)
    while Path(f"/proc/{scheduler}").exists() and " Z " not in Path(f"/proc/{scheduler}/stat").read_text():
        time.sleep(0.01)
    assert again(agent_host)["outcome"] == "needs-files"


# ---------------------------------------------------------------- which SGLang is installed


def test_a_version_is_asked_once_and_again_when_it_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    plain = subprocess.run

    def counted(words: Any, *more: Any, **named: Any) -> Any:
        asked.append(str(words[0]))
        return plain(words, *more, **named)

    monkeypatch.setattr(subprocess, "run", counted)
    env = {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "agent").mkdir()

    def install(version: str) -> None:
        for old in tmp_path.glob("sglang-*"):
            (old / "METADATA").unlink()
            old.rmdir()
        (tmp_path / f"sglang-{version}.dist-info").mkdir()
        (tmp_path / f"sglang-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
        )

    install("0.5.18")
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    assert installed.version(tmp_path, sys.executable, env) == "0.5.18"
    assert installed.version(tmp_path, sys.executable, env) == "0.5.18"
    assert len(asked) == 1
    install("0.5.20")
    assert installed.version(tmp_path, sys.executable, env) == "0.5.20"
    assert len(asked) == 2
    (tmp_path / "more.pth").write_text("/elsewhere\n")
    installed.version(tmp_path, sys.executable, env)
    assert len(asked) == 3


# ---------------------------------------------------------------- the client


class Home:
    """A home with one host: a real sshd, the simulated SGLang."""

    def __init__(self, folder: Path, sshd: Sshd) -> None:
        self.path = folder / "home"
        self.sshd = sshd
        said: dict[str, Any] = sshd.inventory_host()
        said |= {
            "python": sys.executable,
            "workdir": str(folder / "work"),
            "supervisor": "detached",
            "drain_timeout_s": 1,
            "env": sim.install(folder / "shim", Simulate(clock=100), sys.executable),
            "args": {"port": free_port()},
        }
        (self.path / "inventories").mkdir(parents=True)
        self.inventory = self.path / "inventories" / "gpu.yml"
        self.inventory.write_text(yaml.safe_dump({"hosts": {"gpu1": said}}))

    def deploy(self, **more: Any) -> Deployed:
        options: dict[str, Any] = {"host": "gpu1", "profile": "mtp", "inventory": (), "set_": (), **more}
        answer = deploy(home=self.path, talk=Silent(), **options)
        assert isinstance(answer, Deployed)
        return answer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Deployed, and once found unchanged."""
    folder = tmp_path_factory.mktemp("again")
    home = Home(folder, Sshd(folder / "sshd").start())
    try:
        assert home.deploy().outcome == "ready"
        assert home.deploy().outcome == "unchanged"
        yield home
    finally:
        stop(home=home.path, talk=Silent(), host="gpu1", inventory=())
        home.sshd.stop()


@pytest.mark.hosts
@pytest.mark.slow
class TestAnUnchangedDeploy:
    @pytest.fixture
    def execs(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes]]:
        """What was run at the host, and what it was given on stdin."""
        seen: list[tuple[str, bytes]] = []
        plain = ssh.SshTransport.exec

        def noted(self: ssh.SshTransport, command: str) -> ssh.SshChannel:
            channel = plain(self, command)
            seen.append((command, b""))
            send = channel.send

            def sent(data: bytes) -> None:
                seen[-1] = (command, seen[-1][1] + data)
                send(data)

            monkeypatch.setattr(channel, "send", sent)
            return channel

        monkeypatch.setattr(ssh.SshTransport, "exec", noted)
        return seen

    def planned(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        from mtpdeploy.actions import deploying as client

        made: list[str] = []
        plain = client.make_plan
        monkeypatch.setattr(client, "make_plan", lambda *a, **k: (made.append("plan"), plain(*a, **k))[1])
        return made

    def test_is_one_exec_without_stdin_and_without_a_plan(
        self, served: Home, execs: list[tuple[str, bytes]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served.deploy()  # HOME is another one in each test
        execs.clear()
        made = self.planned(monkeypatch)
        before = len(served.sshd.children)
        assert served.deploy().outcome == "unchanged"
        assert [stdin for _, stdin in execs] == [b""]
        assert made == []
        assert len(served.sshd.children) == before + 1, "the early connection is the one that is used"

    def test_was_begun_by_a_run_that_says_that_the_host_plays_a_simulator(self, served: Home) -> None:
        """The inventory of a host behind SSH need not say so; the host itself does."""
        assert "simulate" not in served.inventory.read_text()
        assert [row.simulated for row in Store(served.path).runs(kind="deploy")][-1] is True

    def test_answers_as_one_that_was_planned(self, served: Home) -> None:
        quick = served.deploy().as_json()
        (served.path / "runs" / "hosts" / ".planned.json").unlink()
        whole = served.deploy().as_json()
        for answer in (quick, whole):
            answer.pop("seconds")
        assert json.dumps(quick, sort_keys=True) == json.dumps(whole, sort_keys=True)

    @pytest.mark.parametrize(
        "change", ["inventory", "template", "profile", "facts", "option", "environment", "file of ours"]
    )
    def test_is_planned_again_when_anything_that_it_follows_from_was_touched(
        self, served: Home, change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        served.deploy()
        more: dict[str, Any] = {}
        undo = lambda: None  # noqa: E731
        match change:
            case "inventory":
                text = served.inventory.read_text()
                served.inventory.write_text(text + "# seen\n")
                undo = lambda: served.inventory.write_text(text) and None  # noqa: E731
            case "template" | "profile":
                folder = served.path / {"template": "templates", "profile": "inventories/profiles"}[change]
                folder.mkdir(exist_ok=True)
                (folder / "other.yml").write_text("description: another\nmodel: a/b\n")
                undo = (folder / "other.yml").unlink
            case "facts":
                facts = served.path / "runs" / "hosts" / "gpu1.json"
                facts.write_text(facts.read_text() + " ")
            case "option":
                more = {"set_": ("ready_timeout_s=600",)}
            case "environment":
                monkeypatch.setenv("MTPDEPLOY_ANY", "1")
            case "file of ours":
                monkeypatch.setattr(recall, "PACKAGE", tmp_path)
                (tmp_path / "new.py").touch()
        made = self.planned(monkeypatch)
        try:
            served.deploy(**more)
            assert made
        finally:
            undo()

    def test_that_finds_the_server_stopped_goes_the_whole_way_on_the_same_connection(self, served: Home) -> None:
        served.deploy()
        stop(home=served.path, talk=Silent(), host="gpu1", inventory=())
        before = len(served.sshd.children)
        assert served.deploy(no_wait=True).outcome == "started"
        assert len(served.sshd.children) == before + 1
        while served.deploy().outcome != "unchanged":
            time.sleep(0.1)

    def test_does_not_use_a_connection_to_where_the_inventory_no_longer_leads(
        self, served: Home, execs: list[tuple[str, bytes]]
    ) -> None:
        served.deploy()
        moved = Sshd(served.path.parent / f"moved-{time.monotonic_ns()}").start()
        text = served.inventory.read_text()
        said = yaml.safe_load(text)
        said["hosts"]["gpu1"] |= moved.inventory_host()
        served.inventory.write_text(yaml.safe_dump(said))
        try:
            assert served.deploy().outcome == "unchanged"
            assert len(moved.children) == 1
        finally:
            served.inventory.write_text(text)
            moved.stop()

    def test_reads_nothing_that_is_not_in_the_state_by_which_it_is_remembered(self, served: Home) -> None:
        """Whoever makes planning read another file has to add it to `recall.state`."""
        (served.path / "runs" / "hosts" / ".planned.json").unlink(missing_ok=True)
        opened: set[str] = set()
        here, armed = threading.get_ident(), [True]

        def hook(event: str, details: tuple[Any, ...]) -> None:
            if (
                armed[0]
                and event == "open"
                and threading.get_ident() == here
                and isinstance(details[0], (str, os.PathLike))
            ):
                mode, flags = details[1], details[2]
                if not (isinstance(mode, str) and set(mode) & set("wax+")) and not flags & (os.O_WRONLY | os.O_RDWR):
                    opened.add(os.path.abspath(os.fspath(details[0])))

        sys.addaudithook(hook)
        try:
            served.deploy()
        finally:
            armed[0] = False
        covered = (
            str(recall.PACKAGE),
            str(recall.bundled("templates")),
            str(recall.bundled("inventories")),
            str(served.path / "inventories"),
            str(served.path / "templates"),
            str(served.path / "runs" / "hosts"),
            str(served.path / "runs" / "deployed.json"),  # which host and profile, if neither was named
        )
        elsewhere = {
            path
            for path in opened
            if not path.startswith((*covered, sys.prefix, sys.base_prefix, "/proc", "/dev", "/etc", "/usr"))
        }
        connection = {str(served.sshd.folder / name) for name in ("user", "user.pub", "user-cert.pub", "known_hosts")}
        assert {path for path in elsewhere if path not in connection and "/.ssh/" not in path} == set()
        assert any(path.startswith(str(served.path / "inventories")) for path in opened)


@pytest.mark.parametrize(
    "secret", ["api_key: {from_env: OUR_KEY}", "env: {HF_TOKEN: {from_env: OUR_KEY}}", "env: {HF_TOKEN: plain}"]
)
def test_a_deploy_with_a_secret_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    from mtpdeploy.actions.reach import targets

    home = tmp_path / "home"
    (home / "inventories").mkdir(parents=True)
    (home / "inventories" / "gpu.yml").write_text(
        f"hosts:\n  gpu1:\n    address: 127.0.0.1\n    {secret}\n    models: {{Qwen/Qwen3.6-27B: /m}}\n"
    )
    monkeypatch.setenv("OUR_KEY", "sesame-street")
    options: dict[str, Any] = {"host": "gpu1", "profile": "mtp", "inventory": (), "sets": (), "overrides": {}}
    (target,) = targets(home, "gpu1", (), profile="mtp", reveal=True)
    recall.Recall(home, **options).keep([(target, {"fingerprint": "f"}, [])])
    assert not (home / "runs" / "hosts" / ".planned.json").exists()
    text = (home / "inventories" / "gpu.yml").read_text()
    (home / "inventories" / "gpu.yml").write_text(text.replace(secret, "workdir: ~/w"))
    (target,) = targets(home, "gpu1", (), profile="mtp", reveal=True)
    recall.Recall(home, **options).keep([(target, {"fingerprint": "f"}, [])])
    assert (home / "runs" / "hosts" / ".planned.json").exists()


def test_a_remembered_place_that_no_longer_answers_does_not_hide_that_the_host_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Sshd(tmp_path / "sshd").start()
    try:
        home = tmp_path / "home"
        (home / "inventories").mkdir(parents=True)
        said = {**server.inventory_host(), "python": sys.executable, "workdir": str(tmp_path / "work")}
        (home / "inventories" / "gpu.yml").write_text(yaml.safe_dump({"hosts": {"gpu1": said}}))
        from mtpdeploy.hosts.early import EARLY
        from mtpdeploy.inventory import load

        (gpu1,) = load(home, ()).choose("gpu1")
        for _ in range(2):
            EARLY.begin(home, "gpu1", ())
            with ssh.SshTransport(gpu1) as transport:
                client = AgentClient(transport, workdir=str(tmp_path / "work"), service="sglang", python=sys.executable)
                assert client.call("status")["word"] == "not deployed"
            EARLY.end()
        remembered = home / "runs" / "hosts" / ".reached.json"
        kept = json.loads(remembered.read_text())
        for places in kept.values():
            places[0]["target"]["port"] = 1
        remembered.write_text(json.dumps(kept))
        EARLY.begin(home, "gpu1", ())
        with ssh.SshTransport(gpu1) as transport:
            client = AgentClient(transport, workdir=str(tmp_path / "work"), service="sglang", python=sys.executable)
            assert client.call("status")["word"] == "not deployed"
        EARLY.end()
        remembered.write_text('{"broken": [{"target": 3}], "x": 1}')
        EARLY.begin(home, "gpu1", ())
        EARLY.end()
    finally:
        server.stop()
