"""Writes docs/reliability.md from what the fault tests saw on the real hosts (build/faults/*.json; see tests/lab/faults.py).

    .venv/bin/pytest -q tests/test_faults_*.py     # each test that passes leaves its row
    python tools/reliability.py

A row whose test was not run again keeps what the page says of it. `--check` writes nothing and exits 1 if a test has no row, or a
row no test.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
RECORDS = ROOT / "build" / "faults"
_HEAD = """\
# What was done to it, and what held

<!-- Made by tools/reliability.py from what the tests saw; run them and it, and change nothing here. -->

Each row is a test of `make test` on real hosts: machines of their own with systemd as PID 1, sshd, tmux and a cable that can be pulled
(`tests/lab/`). Only the engine is simulated, so nothing here is a claim about SGLang. After every row the same is looked at, by root
from inside the host and not through mtpdeploy:

- at most one server on the port;
- `ready` is said only of the launch whose recorded process answers;
- no half-written file is in use;
- nothing of ours runs that is not recorded;
- the next command works (a deploy, or a stop, to its end).

The seconds are those of the run that this page was made from, on two shared cores; they bound nothing. The long and repeated forms are
`python bench/faults.py`.

| fault | what is done | what held | s |
|---|---|---|---|
"""


def fault_tests() -> Mapping[str, tuple[str, str]]:
    """Name of a test → (fault, what is done) of its `fault` mark."""
    found = {}
    for path in sorted((ROOT / "tests").glob("test_faults_*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    fault, did = (ast.literal_eval(argument) for argument in mark.args)
                    found[node.name] = (fault, did)
    return found


def rows_of(page: str) -> dict[str, str]:
    """Fault → the page's line."""
    return {line.split("|")[1].strip(): line for line in page.splitlines() if re.match(r"\| (?!fault |---)", line)}


def cell(text: str) -> str:
    """Text inside a table's cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def page() -> str:
    """The whole page: rows in the order of the tests."""
    before = rows_of(PAGE.read_text()) if PAGE.exists() else {}
    seen = {record["test"]: record for record in (json.loads(path.read_text()) for path in RECORDS.glob("*.json"))}
    lines = []
    for test, (fault, did) in fault_tests().items():
        if record := seen.get(test):
            held = "; ".join(cell(text) for text in record["held"])
            lines.append(f"| {cell(fault)} | {cell(did)} | {held} | {record['seconds']:.0f} |")
        elif cell(fault) in before:
            lines.append(before[cell(fault)])
    return _HEAD + "\n".join(lines) + "\n"


def missing() -> list[str]:
    """Fault tests without a row on the page, and rows without a test."""
    there = rows_of(PAGE.read_text()) if PAGE.exists() else {}
    faults = {cell(fault) for fault, _ in fault_tests().values()}
    return sorted(faults ^ set(there))


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    for fault in missing():
        print(f"docs/reliability.md: no row, or no test, for: {fault}", file=sys.stderr)
    sys.exit(1 if missing() else 0)
