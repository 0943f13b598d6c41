"""The run store: folders are the truth, and nothing that a crash leaves behind may hide a run."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mtpdeploy.errors import ConfigError, NotFound, UsageError
from mtpdeploy.secret import Secret
from mtpdeploy.store import Provenance, Store

ODD = b'{"kind": 3, "status": {}}'


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_a_finished_run_is_listed_with_what_it_measured(store: Store) -> None:
    run = store.new_run("bench", {"host": "gpu1", "profile": "mtp", "workload": "story"})
    run.finish({"output_tok_s": 234.0})
    (row,) = store.runs(kind="bench", host="gpu1", profile="mtp")
    assert (row.id, row.status, row.workload, row.summary) == (run.id, "done", "story", {"output_tok_s": 234.0})


@pytest.mark.parametrize("damage", ["lost", "garbage", "other schema"])
def test_the_index_is_rebuilt_from_the_folders_when(damage: str, store: Store) -> None:
    store.new_run("bench", {"host": "gpu1"}).finish({})
    assert len(store.runs()) == 1
    index = store.folder / "index.sqlite3"
    if damage == "lost":
        index.unlink()
    elif damage == "garbage":
        index.write_bytes(b"SQLite format 3\0" + os.urandom(4096))
    else:
        import sqlite3

        with sqlite3.connect(index) as db:
            db.executescript("DROP TABLE runs; CREATE TABLE runs (x); PRAGMA user_version = 99;")
    (row,) = store.runs()
    assert row.host == "gpu1"


def test_a_run_changed_by_another_process_shows_its_new_state(store: Store) -> None:
    run = store.new_run("bench", {"host": "gpu1"})
    assert store.runs()[0].status == "running"
    run.finish({"x": 1})
    assert Store(store.home).runs()[0].status == "done"


def test_a_folder_deleted_by_hand_leaves_the_list(store: Store) -> None:
    run = store.new_run("bench")
    run.finish({})
    store.runs()
    (run.path / "run.json").unlink()
    run.path.rmdir()
    assert store.runs() == ()


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[1]", b"\xff\xfe", b'{"kind": 3, "status": {}}', b"[" * 100_000]
)
def test_a_damaged_run_json_is_listed_as_unreadable_and_hides_no_other(content: bytes | None, store: Store) -> None:
    good = store.new_run("bench")
    good.finish({})
    bad = store.folder / "20260101-000000-abcd"
    bad.mkdir()
    if content is not None:
        (bad / "run.json").write_bytes(content)
    assert {row.id: row.status for row in store.runs()} == {good.id: "done", bad.name: "unreadable"}
    if content != ODD:
        with pytest.raises(ConfigError, match=r"run\.json"):
            store.run("20260101")


def test_a_writer_that_was_killed_leaves_an_interrupted_run(store: Store) -> None:
    code = "import sys, pathlib, mtpdeploy.store as s; s.Store(pathlib.Path(sys.argv[1])).new_run('bench')"
    subprocess.run([sys.executable, "-c", code, str(store.home)], check=True)
    (row,) = store.runs()
    assert row.status == "interrupted"
    assert store.run("last").status == "interrupted"
    assert [row.status for row in store.runs(status="interrupted")] == ["interrupted"]


def test_a_killed_writer_that_nobody_has_reaped_is_gone(store: Store) -> None:
    code = "import sys, pathlib, mtpdeploy.store as s; s.Store(pathlib.Path(sys.argv[1])).new_run('bench')"
    writer = subprocess.Popen([sys.executable, "-c", code, str(store.home)])
    try:
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{writer.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        assert store.run("last").status == "interrupted"
    finally:
        writer.wait()


def test_a_full_disk_is_told_with_its_file_and_leaves_no_nameless_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = store.new_run("bench")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as the kernel does: without a name

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*records\.jsonl'"):
        run.append_jsonl("records.jsonl", [{"point": 0}])
    with pytest.raises(OSError, match=r"No space left on device: '.*run\.json'"):
        store.new_run("bench")
    assert [each.name for each in store.folder.iterdir() if each.is_dir()] == [run.id]


def test_an_exception_inside_a_run_is_its_recorded_failure(store: Store) -> None:
    with pytest.raises(NotFound), store.new_run("deploy") as run:
        raise NotFound("no such model")
    assert (run.status, run.summary["failure"]["message"]) == ("failed", "no such model")  # type: ignore[index]
    with pytest.raises(KeyboardInterrupt), store.new_run("deploy") as run:
        raise KeyboardInterrupt
    assert run.status == "interrupted"


def test_runs_are_found_by_prefix_and_last_but_never_by_guess(store: Store) -> None:
    for name in ("20260101-000000-aaaa", "20260101-000000-aabb", "20260102-000000-cccc"):
        (store.folder / name).mkdir(parents=True)
        (store.folder / name / "run.json").write_text(json.dumps({"kind": "bench", "status": "done"}))
    assert store.run("20260102").id == "20260102-000000-cccc"
    assert store.run("last").id == "20260102-000000-cccc"
    with pytest.raises(UsageError, match="fits 2 runs"):
        store.run("20260101-000000-aa")
    for name in ("../../etc", "", "*", "20260103", "last "):
        with pytest.raises(NotFound):
            store.run(name)


def test_last_needs_a_run_of_that_kind(store: Store) -> None:
    store.new_run("deploy")
    with pytest.raises(NotFound, match="no bench run"):
        store.run("last", kind="bench")


def test_a_torn_line_spoils_only_itself(store: Store) -> None:
    run = store.new_run("bench")
    run.append_jsonl("records.jsonl", [{"n": 1}])
    with run.file("records.jsonl").open("ab") as file:
        file.write(b'{"n": 2, "text": "cut of')
    run.append_jsonl("records.jsonl", [{"n": 3}])
    assert [line["n"] for line in run.read_jsonl("records.jsonl")] == [1, 3]


def test_secrets_and_unknown_numbers_are_written_as_such(store: Store) -> None:
    run = store.new_run("bench", {"api_key": Secret("hunter2"), "path": Path("/x")})
    run.write_json("points.json", {"tok_s": float("nan"), "key": Secret("hunter2"), "both": (1, Provenance(host="h"))})
    everything = b"".join(path.read_bytes() for path in run.files())
    assert b"hunter2" not in everything
    points = run.read_json("points.json")
    assert isinstance(points, dict)
    assert points["tok_s"] is None


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", "a/../../b"])
def test_a_file_name_cannot_leave_the_run_folder(name: str, store: Store) -> None:
    with pytest.raises(UsageError):
        store.new_run("bench").write_json(name, {})


def test_the_last_deployed_host_is_remembered_also_per_host(store: Store) -> None:
    assert store.last_deployed() is None
    store.set_last_deployed("gpu1", "mtp", "L1")
    store.set_last_deployed("gpu2", "baseline", None)
    last, first = store.last_deployed(), store.last_deployed("gpu1")
    assert last is not None
    assert first is not None
    assert (last.host, first.profile, first.launch_id) == ("gpu2", "mtp", "L1")
    (store.folder / "deployed.json").write_text("{")
    assert store.last_deployed() is None


def test_many_writers_at_once_lose_no_run(store: Store) -> None:
    def one(number: int) -> str:
        run = Store(store.home).new_run("bench", {"host": f"h{number}"})
        run.finish({"number": number})
        Store(store.home).runs()
        return run.id

    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(one, range(40)))
    assert {row.id for row in store.runs()} == made
    assert len(made) == 40


def test_a_read_only_home_can_still_be_listed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.new_run("bench").finish({})

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("mtpdeploy.store.store.fcntl.flock", refuse)
    assert len(store.runs()) == 1


def test_a_running_run_is_not_deleted(store: Store) -> None:
    run = store.new_run("bench")
    with pytest.raises(UsageError, match="still being written"):
        store.remove(run.id)
    run.finish({})
    store.remove(run.id)
    assert not run.path.exists()


def test_provenance_survives_a_newer_release_and_wrong_types() -> None:
    said = Provenance.from_json(
        {"host": "gpu1", "seed": "seven", "boot": True, "future": 1, "args": [], "contention": ["x"]}
    )
    assert said == Provenance(host="gpu1", contention=("x",))
    again = Provenance.from_json(json.loads(json.dumps(Provenance(args={"tp": 1}, simulated=True).as_json())))
    assert again.args == {"tp": 1}
    assert again.simulated is True
