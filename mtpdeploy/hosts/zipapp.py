"""Packs the agent: its modules and all of ours that they import, as one zip that Python can run.

The same sources give the same bytes on every machine, so that the content's hash names the file at the host.
"""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mtpdeploy.resources import PACKAGE

ROOTS = ("mtpdeploy.agent", "mtpdeploy.bench.hostmain")
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Agent:
    """The zipapp. `digest`: the first 16 hex digits of its SHA-256."""

    content: bytes
    digest: str


@lru_cache(maxsize=1)
def agent() -> Agent:
    """The agent as this version of mtpdeploy ships it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py", _DATE), (PACKAGE / "agent" / "zipmain.py").read_bytes())
        for path in sorted(_modules()):
            info = zipfile.ZipInfo(f"mtpdeploy/{path.relative_to(PACKAGE).as_posix()}", _DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    content = buffer.getvalue()
    return Agent(content, hashlib.sha256(content).hexdigest()[:16])


def _modules() -> set[Path]:
    """Files of the roots and of every module of ours that one of them imports, at the top or inside a function."""
    found: set[Path] = set()
    todo = [path for root in ROOTS for path in _files(root)]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        found.update(parent / "__init__.py" for parent in path.parents if PACKAGE in (parent, *parent.parents))
        todo += [file for name in _imports(path) for file in _files(name)]
    return found


def _files(name: str) -> list[Path]:
    """The file of a module of ours; of a root package, all of its files."""
    path = PACKAGE.joinpath(*name.split(".")[1:])
    if path.is_dir():
        return sorted(path.glob("*.py")) if name in ROOTS else [path / "__init__.py"]
    return [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else []


# Every verb begins with this, so the text is searched: Python's own parser takes half a second for the same answer.
_TYPING_ONLY = re.compile(r"^([ \t]*)if (?:typing\.)?TYPE_CHECKING:\n(?:\1[ \t]+\S.*\n|[ \t]*\n)+", re.MULTILINE)
_FROM = re.compile(r"^[ \t]*from (mtpdeploy[\w.]*) import (\([^)]*\)|[^\n(]+)", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*import (mtpdeploy[\w.]*)", re.MULTILINE)
_NAME = re.compile(r"(\w+)(?: as \w+)?[ \t]*(?=[,)\n#]|$)")


def _imports(path: Path) -> set[str]:
    text = _TYPING_ONLY.sub("", path.read_text())
    names = set(_IMPORT.findall(text))
    for module, imported in _FROM.findall(text):
        names |= {module, *(f"{module}.{name}" for name in _NAME.findall(imported))}
    return names
