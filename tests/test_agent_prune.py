"""What `prune` removes of the agents that earlier versions left, and what it must not touch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mtpdeploy.agent import oldagents

OLD, NAMED, RUNNING = "a" * 16 + ".pyz", "b" * 16 + ".pyz", "c" * 16 + ".pyz"


def test_only_agents_that_no_unit_names_and_no_process_runs_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    for name in (OLD, NAMED, RUNNING):
        (folder / f"{name}.d" / "mtpdeploy").mkdir(parents=True)
        (folder / name).write_bytes(b"zip")
    (folder / f"{OLD}.77").write_bytes(b"half an upload")
    (folder / "pythons.json").write_text("{}")
    release = tmp_path / "sglang" / "releases" / "20260101T000000Z-abcdef"
    release.mkdir(parents=True)
    (release / "system.service").write_text(f'ExecStopPost="python" "{folder}/{NAMED}" ended\n')
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", f"{folder}/{RUNNING}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as keeper:
        assert keeper.stdout is not None
        keeper.stdout.readline()
        assert oldagents.prune(tmp_path, dry_run=True) == [OLD]
        assert (folder / OLD).exists()
        assert oldagents.prune(tmp_path) == [OLD]
    left = {f"{NAMED}", f"{NAMED}.d", f"{RUNNING}", f"{RUNNING}.d", "pythons.json"}
    assert {path.name for path in folder.iterdir()} == left
    assert oldagents.prune(tmp_path) == [RUNNING]


def test_a_work_folder_without_agents_has_nothing_to_remove(tmp_path: Path) -> None:
    assert oldagents.prune(tmp_path / "nowhere") == []
