"""The folders of a service: the order of its releases, the room that a stop has on a full disk, and what is done about damage."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpdeploy.agent import files, lock, ports, record
from mtpdeploy.agent.clock import seconds_since
from mtpdeploy.agent.fault import Fault
from mtpdeploy.agent.logtail import offset_of_last_lines, offset_of_moment
from mtpdeploy.agent.release import Release, Service, flip, install
from mtpdeploy.agent.status import status


def put(service: Service, launch_id: str) -> None:
    asked: Any = {
        "launch_id": launch_id, "service": service.name, "profile": "p", "fingerprint": "f", "host": "127.0.0.1", "port": 1,
        "python": "python3", "argv": [], "by": "a@b", "created_utc": "2026-01-01T00:00:00.000Z",
    }  # fmt: skip
    install(service, asked, [], {})


def test_releases_keep_the_order_of_their_installation_whatever_their_names_say(tmp_path: Path) -> None:
    service = Service(tmp_path, "s")
    names = ["20260101T120000Z-aaaaaa", "20260101T110000Z-bbbbbb", "20260101T130000Z-cccccc"]
    for name in names:
        put(service, name)
    assert [release.launch_id for release in service.history()] == names[::-1]
    middle = service.release(names[1])
    assert [release.launch_id for release in service.before(middle)] == [names[0]]
    (middle.path / "number").unlink()  # as one from before releases were counted
    assert service.history()[-1] == middle


def test_the_number_of_a_release_cannot_be_sent_along(tmp_path: Path) -> None:
    service = Service(tmp_path, "s")
    asked: Any = {
        "launch_id": "20260101T120000Z-aaaaaa", "service": "s", "profile": "p", "fingerprint": "f", "host": "h", "port": 1,
        "python": "p", "argv": [], "by": "b", "created_utc": "c",
    }  # fmt: skip
    with pytest.raises(Fault, match="cannot be a file of a release"):
        install(service, asked, [{"path": "number", "mode": 0o600, "content": "9"}], {})
    assert service.history() == []


def test_a_reserve_is_kept_once_and_given_once(tmp_path: Path) -> None:
    files.keep_reserve(tmp_path)
    (reserve,) = tmp_path.iterdir()
    assert reserve.stat().st_blocks * 512 >= 64 * 1024, "a file of holes keeps no room"
    files.keep_reserve(tmp_path)
    assert files.give_reserve(tmp_path) is True
    assert files.give_reserve(tmp_path) is False
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- what is damaged

ID = "20260101T120000Z-aaaaaa"
BOOT = {"n": 3, "pid": 12, "start_time": 5, "boot_id": "b", "started_utc": "2026-01-01T00:00:00.000Z"}


@pytest.fixture
def carrier(tmp_path: Path) -> Iterator[tuple[Release, subprocess.Popen[bytes]]]:
    """A launch whose server (a sleeper that carries its id, in a session of its own) lives, as its third boot."""
    service = Service(tmp_path, "s")
    put(service, ID)
    flip(service.release(ID))
    (service.releases / ID / "server.log").write_text(
        f"# mtpdeploy launch {ID} boot 2 utc x\nold\n# mtpdeploy launch {ID} boot 3 utc x\n"
    )
    server = subprocess.Popen(
        ["sleep", "60"],
        env={"MTPDEPLOY_LAUNCH_ID": ID, "MTPDEPLOY_BOOT": "3", "PATH": os.environ["PATH"]},
        start_new_session=True,
    )
    yield service.release(ID), server
    server.kill()
    server.wait()


@pytest.mark.parametrize(
    "text",
    ["", "garbage", "[]", '{"boots": "x"}', '{"boots": [null]}', '{"boots": [{"n": "a"}]}', '{"boots": {}, "proven": 3}',
     json.dumps({"boots": [BOOT], "supervisor": "x"}), json.dumps({"boots": [BOOT], "stop": [1]}),
     json.dumps({"boots": [{**BOOT, "log_offset": "0"}]}), json.dumps({"boots": [BOOT], "asked_from": None}), "[" * 100_000],
)  # fmt: skip
def test_a_server_with_a_damaged_record_is_found_again_by_its_process(
    carrier: tuple[Release, subprocess.Popen[bytes]], text: str
) -> None:
    release, server = carrier
    (release.path / "state.json").write_text(text)
    main = release.main()
    assert main is not None
    assert main.pid == server.pid
    boot = release.last_boot()
    assert boot is not None
    assert (boot["n"], boot["log_offset"]) == (
        3,
        len(f"# mtpdeploy launch {ID} boot 2 utc x\nold\n"),
    )
    assert abs(seconds_since(boot["started_utc"]) or 99) < 30
    release.update(lambda state: state.update(stop=None))
    written = json.loads((release.path / "state.json").read_text())
    assert written["boots"][0]["pid"] == server.pid
    assert "damaged" not in written


def test_a_damaged_record_of_what_has_ended_says_that_it_is_unknown(tmp_path: Path) -> None:
    service = Service(tmp_path, "s")
    put(service, ID)
    flip(service.release(ID))
    (service.releases / ID / "state.json").write_text("garbage")
    found = status(service, with_gpus=False)
    assert (found["word"], found["boot"]) == ("unknown", None)
    assert "state.json was damaged" in found["notes"][0]


def test_a_record_that_is_sound_is_believed_as_it_is() -> None:
    state = {
        "boots": [{**BOOT, "exit": None, "log_offset": 0}],
        "asked_from": 1,
        "supervisor": {"kind": "tmux"},
        "stop": None,
    }
    assert record.believed(state) == state


@pytest.mark.parametrize("damage", ["gone", "file", "folder"])
def test_a_lost_current_hides_no_server_and_what_is_no_link_is_never_taken_for_nothing(
    carrier: tuple[Release, subprocess.Popen[bytes]], damage: str
) -> None:
    release, _ = carrier
    link = release.service.folder / "current"
    link.unlink()
    if damage == "gone":
        assert release.service.release(None) == release
        found = status(release.service, with_gpus=False)
        assert (found["launch_id"], found["notes"][0].startswith("`current` is lost")) == (ID, True)
        return
    link.mkdir() if damage == "folder" else link.write_text("x")
    with pytest.raises(Fault, match="is no symbolic link") as refused:
        status(release.service)
    assert refused.value.next_commands[0].startswith("mv ")
    assert ID in refused.value.evidence[0]


@pytest.mark.parametrize("wrong", [{"port": "x"}, {"argv": 8}, {"by": None}, {"profile": 3}])
def test_a_release_file_with_a_wrong_value_is_told_as_damaged(tmp_path: Path, wrong: dict[str, Any]) -> None:
    service = Service(tmp_path, "s")
    put(service, ID)
    path = service.releases / ID / "release.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    with pytest.raises(Fault, match="is damaged"):
        service.release(ID).read()


def test_a_start_knows_which_rendered_files_it_needs(tmp_path: Path) -> None:
    service = Service(tmp_path, "s")
    put(service, ID)
    release = service.release(ID)
    assert release.lacks("systemd") == ["launch.sh", "env", "system.service"]
    (release.path / "launch.sh").write_text('exec python --config "$release/server.yml"')
    (release.path / "env").write_text("")
    assert release.lacks("detached") == ["server.yml"]


@pytest.mark.parametrize(
    "text", ["x", "[]", '{"pid": "a"}', '{"pid": 99999, "start_time": 1, "boot_id": "b"}',
             '{"pid": -1, "start_time": "", "boot_id": "", "machine_id": 7, "client": {}}'],
)  # fmt: skip
def test_what_is_no_lock_of_ours_holds_nobody_up(tmp_path: Path, text: str) -> None:
    service = Service(tmp_path, "s")
    service.prepare()
    (service.folder / "lock.json").write_text(text)
    assert lock.read(service) is None
    with lock.held(service, "ann", "a test") as note:
        assert note is None
    assert lock.unlock(service, break_lock=False) == {"removed": False, "lock": None}


@pytest.mark.parametrize("lines", [1, 5, 100])
def test_the_last_lines_of_a_log_without_lines_are_a_bounded_piece(tmp_path: Path, lines: int) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as file:
        file.truncate(1 << 30)  # a hole: a gigabyte without a newline
    began = time.monotonic()
    assert (1 << 30) - offset_of_last_lines(log, lines) <= 2 << 20
    assert time.monotonic() - began < 2
    log.write_bytes(b"a\nb\nc\n")
    assert offset_of_last_lines(log, 2) == 2


def test_a_unit_whose_agent_was_removed_is_told_before_anything_is_stopped(tmp_path: Path) -> None:
    service = Service(tmp_path, "s")
    put(service, ID)
    release = service.release(ID)
    for name in ("launch.sh", "env"):
        (release.path / name).write_text("")
    agent = tmp_path / "agent" / "0123456789abcdef.pyz"
    (release.path / "user.service").write_text(
        f'ExecStart=python "{agent}" boot\nExecStopPost=python "{agent}" ended\n'
    )
    assert release.lacks("systemd-user") == ["the agent 0123456789abcdef.pyz that user.service names"]
    agent.parent.mkdir()
    agent.write_text("")
    assert release.lacks("systemd-user") == []


def test_the_beginning_of_a_moment_is_found_without_reading_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [f"[2026-01-{day:02} {hour:02}:00:00] {'x' * 9000}\n" for day in range(1, 29) for hour in range(24)]
    log.write_text("".join(lines))
    for wanted in (0, 1, 300, 671):
        begin = sum(map(len, lines[:wanted]))
        offset = offset_of_moment(log, lines[wanted][1:20])
        assert begin - (3 << 20) <= offset <= begin
    assert log.stat().st_size - offset_of_moment(log, "2027-01-01 00:00:00") <= 2 << 20
    assert offset_of_moment(tmp_path / "none", "2027-01-01 00:00:00") == 0


def test_an_ipv6_only_listener_holds_no_ipv4_port() -> None:
    with socket.socket(socket.AF_INET6) as other:
        other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind(("::", 0))
        other.listen()
        port = other.getsockname()[1]
        assert ports.owner(port, "127.0.0.1") is None
        found = ports.owner(port, "::1")
        assert found is not None
        assert ports.describe(found).startswith(f"[::]:{port} is held by pid {os.getpid()}")
        with socket.create_server(("127.0.0.1", port)):
            beside = ports.owner(port, "127.0.0.1")
            assert beside is not None
            assert beside["address"] == "127.0.0.1"
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as both:
        assert ports.owner(both.getsockname()[1], "127.0.0.1") is not None
