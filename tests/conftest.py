"""Every test starts from a bare environment: no settings of the person who runs it, no proxies, no home of theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.lab.doors import Doors
    from tests.lab.faults import Row
    from tests.lab.lab import Lab

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


# ---------------------------------------------------------------- real hosts


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Three real hosts of this worker's own, for all files that it runs."""
    from tests.lab.lab import Lab, why_not

    if reason := why_not():
        if os.environ.get("CI"):
            pytest.fail(f"no real hosts in CI: {reason}")
        pytest.skip(reason)
    made = Lab.up(3)
    yield made
    made.down()


@pytest.fixture(scope="session")
def doors() -> Iterator[Doors]:
    """Where commands are forked from."""
    from tests.lab.doors import Doors

    made = Doors()
    yield made
    made.close()


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Iterator[Row]:
    """The row of docs/reliability.md that the test's `fault` mark begins; kept if the test passes."""
    from tests.lab.faults import Row

    mark = request.node.get_closest_marker("fault")
    made = Row(*mark.args, test=request.node.name)
    yield made
    if getattr(request.node, "passed", False):
        made.write()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    report = yield
    if report.when == "call":
        item.passed = report.passed  # type: ignore[attr-defined]
    return report
