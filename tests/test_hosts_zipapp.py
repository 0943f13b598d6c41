"""The packed agent: whole, the same everywhere, and free of what the host does not have."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import zipfile
from pathlib import Path

from mtpdeploy.hosts import agentclient
from mtpdeploy.hosts.zipapp import agent
from mtpdeploy.resources import PACKAGE


def modules() -> dict[str, ast.AST]:
    """Packed modules by dotted name."""
    with zipfile.ZipFile(io.BytesIO(agent().content)) as archive:
        return {
            name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): ast.parse(archive.read(name))
            for name in archive.namelist()
        }


def exists(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_every_module_of_ours_that_the_agent_imports_is_packed() -> None:
    packed, imported = modules(), set()
    for tree in packed.values():
        skipped = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if node in skipped:
                continue
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    ours = {name for name in imported if name.split(".")[0] == "mtpdeploy" and exists(name)}
    assert len(ours) > 20
    assert ours - set(packed) == set()


def test_another_process_packs_the_same_bytes_so_that_the_host_is_sent_them_once() -> None:
    code = "from mtpdeploy.hosts.zipapp import agent; print(agent().digest)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == agent().digest


def test_the_agent_answers_with_no_package_installed_beside_it(tmp_path: Path) -> None:
    (tmp_path / "agent.pyz").write_bytes(agent().content)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(tmp_path / "agent.pyz"), "no-such-verb", "-"],
        capture_output=True, text=True, cwd=tmp_path, env={"HOME": str(tmp_path)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "deploy, watch, status" in done.stderr  # it came as far as to tell its verbs


def test_what_the_agent_says_to_type_names_the_host_and_keeps_its_remark() -> None:
    said = {
        "message": "m",
        "next_commands": [
            "mtpdeploy unlock --break-lock   # only if it hangs",
            "mtpdeploy deploy --host HOST --profile P",
            "df -h /",
        ],
    }
    assert list(agentclient.from_event(said, "gpu1").next_commands) == [
        "mtpdeploy unlock --break-lock --host gpu1   # only if it hangs", "mtpdeploy deploy --host gpu1 --profile P", "df -h /",
    ]  # fmt: skip


def test_the_installing_program_compiles_and_asks_for_a_line_of_its_own() -> None:
    compile(agentclient._INSTALL, "install", "exec")
    assert agentclient._RUN.startswith("echo\n"), "a greeting without an end would swallow the first event"
    assert agentclient._BOOTSTRAP.startswith("echo\n")
