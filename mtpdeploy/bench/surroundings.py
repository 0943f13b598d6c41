"""What stands beside the server at its host, for the run's provenance: package versions, the model's hash, the machine's load."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

PACKAGES = (
    "sglang",
    "torch",
    "sglang-kernel",
    "sgl-kernel",
    "flashinfer-python",
    "transformers",
    "triton",
    "aiohttp",
    "uvloop",
)
IDENTITY = ("config.json", "model.safetensors.index.json")  # small, and another checkpoint has another index


def look(server: Mapping[str, Any]) -> dict[str, Any]:
    """versions by package (of those installed), cuda (that torch was built for), model_hash, machine and load.

    None where it cannot be read; nothing is imported, since torch takes seconds and a GPU context.
    """
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": _versions(),
        "cuda": cuda(),
        "model_hash": model_hash(server.get("model_path")),
        "cpu_count": os.cpu_count(),
        "load_1m": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def client() -> dict[str, Any]:
    """What the client itself is made of."""
    return {"python": platform.python_version(), "uvloop": _version("uvloop")}


def cuda() -> str | None:
    """CUDA's version by torch/version.py, such as 12.8; None without torch or for a build without CUDA."""
    try:
        found = util.find_spec("torch")
        text = (Path(next(iter(found.submodule_search_locations or ()))) / "version.py").read_text() if found else ""
    except (OSError, StopIteration, ValueError):
        return None
    told = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return told[1] if told else None


def _versions() -> dict[str, str]:
    return {name: version for name in PACKAGES if (version := _version(name)) is not None}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def model_hash(path: object) -> str | None:
    """SHA-256 over config.json and the weights' index (which names every tensor and file): not over the weights."""
    if not isinstance(path, str):
        return None
    told = hashlib.sha256()
    seen = False
    for name in IDENTITY:
        try:
            content = (Path(path) / name).read_bytes()
        except OSError:
            continue
        seen = True
        told.update(f"{name} {len(content)}\n".encode())
        told.update(content)
    return told.hexdigest() if seen else None
