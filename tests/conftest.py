"""Every test starts from a bare environment: no settings of the person who runs it, no proxies, no home of theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CLEARED = ("MTPDEPLOY_HOME", "SSH_AUTH_SOCK", "HF_TOKEN", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONPATH")


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in os.environ:
        if name in CLEARED or name.lower().endswith("_proxy") or name.startswith("SGLANG_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("user", numbered=True)))
    monkeypatch.setenv("TERM", "dumb")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="accept what the golden tests produce now")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder
