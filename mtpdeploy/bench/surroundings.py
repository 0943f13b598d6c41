"""What stands beside the server at its host, for the run's provenance: package versions, the model's hash, the machine's load."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from importlib import metadata
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
    """versions by package (of those installed), model_hash (None where the files cannot be read), machine and load."""
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": _versions(),
        "model_hash": model_hash(server.get("model_path")),
        "cpu_count": os.cpu_count(),
        "load_1m": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


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
