"""The folders of a service: in which order releases came, and the room that a stop has on a full disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtpdeploy.agent import files
from mtpdeploy.agent.fault import Fault
from mtpdeploy.agent.release import Service, install


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
