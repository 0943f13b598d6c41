"""The pure packages stay pure: what they import, and what those of our modules import, reaches no network, clock or process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "mtpdeploy"
PURE = ("inventory", "sglang", "plan", "analysis", "bench.metrics", "errors", "secret", "progress")
# May be imported by pure code although it is not pure itself: it finds shipped files, and says so.
EXCUSED = {"mtpdeploy.resources"}
FORBIDDEN = {
    "aiohttp", "asyncio", "fabric", "http", "invoke", "multiprocessing", "os", "paramiko", "requests", "select", "selectors",
    "shutil", "signal", "socket", "ssl", "subprocess", "tempfile", "tenacity", "threading", "time", "urllib", "uvloop",
}  # fmt: skip
EFFECTS = (
    "mtpdeploy.hosts",
    "mtpdeploy.agent",
    "mtpdeploy.store",
    "mtpdeploy.actions",
    "mtpdeploy.cli",
    "mtpdeploy.sim",
)


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("mtpdeploy", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def imports(name: str) -> frozenset[str]:
    """Every module that `name` imports at any place in its text, `if TYPE_CHECKING:` excepted."""
    return frozenset(_imports(name, ast.parse(MODULES[name].read_text())))


def _imports(name: str, tree: ast.Module) -> Iterator[str]:
    typing_only = {
        id(below)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for below in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            yield str(node.module)
            yield from (full for alias in node.names if (full := f"{node.module}.{alias.name}") in MODULES)


def is_pure(name: str) -> bool:
    return any(name in (f"mtpdeploy.{pure}",) or name.startswith(f"mtpdeploy.{pure}.") for pure in PURE)


def complaints(name: str) -> list[str]:
    return [
        f"{name} imports {imported}"
        for imported in sorted(imports(name))
        if imported.split(".")[0] in FORBIDDEN or imported.startswith(EFFECTS)
    ]


@pytest.mark.parametrize("name", sorted(filter(is_pure, MODULES)))
def test_pure_module_reaches_no_network_clock_or_process(name: str) -> None:
    assert complaints(name) == []


@pytest.mark.parametrize("name", sorted(filter(is_pure, MODULES)))
def test_pure_module_leans_only_on_modules_that_are_pure_too(name: str) -> None:
    pending, seen = [name], set()
    while pending:
        here = pending.pop()
        if here in seen or here in EXCUSED:
            continue
        seen.add(here)
        assert complaints(here) == [], f"{name} reaches it"
        pending += [each for each in imports(here) if each in MODULES]


def test_the_agent_needs_nothing_but_python_itself() -> None:
    import sys

    for name in (each for each in MODULES if each.startswith("mtpdeploy.agent")):
        foreign = {
            each
            for each in imports(name)
            if each.split(".")[0] not in sys.stdlib_module_names and not each.startswith("mtpdeploy")
        }
        assert foreign == set(), name


def test_there_is_no_module_for_leftovers() -> None:
    leftovers = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [name for name in MODULES if name.rpartition(".")[2] in leftovers] == []


def test_the_walk_would_notice_a_forbidden_import() -> None:
    assert any(complaints(name) for name in MODULES if name.startswith("mtpdeploy.agent"))
