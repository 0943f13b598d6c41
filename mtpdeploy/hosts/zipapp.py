"""Packs the agent: its modules and all of ours that they import, as one zip that Python can run.

The same sources have the same digest on every machine, and it names the file at the host.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mtpdeploy.resources import PACKAGE

ROOTS = ("mtpdeploy.agent", "mtpdeploy.bench.hostmain")
_DATE = (1980, 1, 1, 0, 0, 0)


class Agent:
    """The zipapp. `digest`: 16 hex digits of its modules' names and texts. It is packed when it has to be sent, which is rare."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        hashed = hashlib.sha256()
        for name, data in files.items():
            hashed.update(f"{name} {len(data)}\n".encode() + data)
        self.digest = hashed.hexdigest()[:16]
        self._lock = threading.Lock()
        self._packed: bytes | None = None

    @property
    def content(self) -> bytes:
        with self._lock:  # several hosts may want it at once
            if self._packed is None:
                self._packed = self._pack()
            return self._packed

    def _pack(self) -> bytes:
        import zipfile

        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in self._files.items():
                info = zipfile.ZipInfo(name, _DATE)
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, data)
        return buffer.getvalue()

    @property
    def sha256(self) -> str:
        """Of the zip itself, by which the host sees that it arrived whole."""
        return hashlib.sha256(self.content).hexdigest()


_ONE = threading.Lock()


def agent() -> Agent:
    """The agent as this version of mtpdeploy ships it; read once in a process."""
    with _ONE:
        return _read()


@cache
def _read() -> Agent:
    files = {"__main__.py": (PACKAGE / "agent" / "zipmain.py").read_bytes()}
    for path in sorted(_modules()):
        files[f"mtpdeploy/{path.relative_to(PACKAGE).as_posix()}"] = path.read_bytes()
    return Agent(files)


def _modules() -> set[Path]:
    """Files of the roots and of every module of ours that one of them imports, at the top or inside a function."""
    found: set[Path] = set()
    todo = [path for root in ROOTS for path in _files(root)]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        found.update(_packages(path.parent))
        todo += [file for name in _imports(path) for file in _files(name)]
    return found


@cache
def _packages(folder: Path) -> tuple[Path, ...]:
    """The __init__.py of a package and of those around it."""
    here = (folder / "__init__.py",)
    return here if folder == PACKAGE else (*_packages(folder.parent), *here)


@cache
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
    text = path.read_text()
    if "TYPE_CHECKING" in text:
        text = _TYPING_ONLY.sub("", text)
    names = set(_IMPORT.findall(text))
    for module, imported in _FROM.findall(text):
        names |= {module, *(f"{module}.{name}" for name in _NAME.findall(imported))}
    return names
