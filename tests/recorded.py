"""Recordings of real SGLang servers and of real failed launches (tests/data/h200; tools/fixtures.py made them)."""

from __future__ import annotations

import functools
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "h200"


@dataclass(frozen=True)
class Recorded:
    """One launch. said: its entry of manifest.json. files: name → bytes."""

    name: str
    said: Mapping[str, Any]
    files: Mapping[str, bytes]

    @property
    def log(self) -> bytes:
        return self.files["server.log"]

    def body(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.files[name])
        return found

    def __repr__(self) -> str:
        return self.name


@functools.cache
def _all() -> tuple[Recorded, ...]:
    files: dict[str, dict[str, bytes]] = {}
    for archive in ("servers.tar.xz", "failures.tar.xz"):
        with tarfile.open(DATA / archive) as packed:
            for member in packed:
                name, _, file = member.name.partition("/")
                stream = packed.extractfile(member)
                assert stream is not None
                files.setdefault(name, {})[file] = stream.read()
    manifest = json.loads((DATA / "manifest.json").read_text())
    return tuple(Recorded(entry["name"], entry, files[entry["name"]]) for entry in manifest)


def servers() -> list[Recorded]:
    """Launches that became ready; some without HTTP answers."""
    return [one for one in _all() if one.said["kind"] == "server"]


def answering() -> list[Recorded]:
    """Those whose /server_info, /metrics and /model_info were kept."""
    return [one for one in servers() if {"server_info.json", "metrics.txt", "model_info.json"} <= one.files.keys()]


def failures() -> list[Recorded]:
    return [one for one in _all() if one.said["kind"] == "failure"]


def server(name: str) -> Recorded:
    return next(one for one in servers() if one.name == name)
