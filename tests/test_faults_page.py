"""docs/reliability.md has a row for each fault test, and none for a test that there is not."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import tooling

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return tooling.tool("reliability")


def test_every_fault_test_has_its_row_and_every_row_its_test(generator: ModuleType) -> None:
    assert generator.missing() == [], "run the fault tests, then tools/reliability.py"


def test_every_row_says_what_was_done_and_what_held(generator: ModuleType) -> None:
    for fault, line in generator.rows_of(generator.PAGE.read_text()).items():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert len(cells) == 4, fault
        assert all(cells), fault
        assert int(cells[3]) >= 0, fault


def test_the_tests_name_each_fault_that_was_asked_for(generator: ModuleType) -> None:
    faults = " ".join(fault for fault, _ in generator.fault_tests().values())
    for word in (
        "client is killed", "network is dropped", "sshd is restarted", "rebooted while a launch loads",
        "rebooted while a server serves", "disk is full", "lock is left behind", "two deployers", "OOM killer",
        "scheduler is killed while its parent lives", "crashes again and again", "port is stolen", "pid is somebody else's",
        "log is truncated", "home is read-only", "clock is wrong", "hostile values", "host's key has changed",
        "banner comes after 30 s", "ProxyJump", "sudo asks for a password", "KillUserProcesses", "while a log is followed",
    ):  # fmt: skip
        assert word in faults, word
