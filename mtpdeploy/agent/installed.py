"""Which SGLang an interpreter has, without starting it each time.

A second Python costs a tenth of a second of every deploy that changes nothing. What it once answered holds as long as nothing was
touched that could change it: the interpreter, its pyvenv.cfg, and in each folder of its sys.path the entries that are SGLang's or
say where to look further (`sglang*`, `*.pth`, `*.egg-link`, `__editable__*`), by name, inode and time of change.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from mtpdeploy.agent import files

_KEPT = 8  # interpreters with their environment; a service has one, a work folder few
_MARKS = (".pth", ".egg-link")


def version(workdir: Path, python: str, env: dict[str, str]) -> str | None:
    """SGLang's version by its metadata, None if it has none. Remembered in <workdir>/agent/pythons.json, where that can be written."""
    program = os.path.expanduser(python)
    key = json.dumps([program, sorted(env.items()), os.environ.get("PYTHONPATH", ""), os.environ.get("PATH", "")])
    memory = workdir / "agent" / "pythons.json"
    known = files.read_json(memory)
    known = known if isinstance(known, dict) else {}
    held = known.get(key)
    if isinstance(held, dict) and isinstance(held.get("path"), list) and held.get("seen") == _seen(program, held):
        found: str | None = held["sglang_version"]
        return found

    from mtpdeploy.agent import facts  # starts Python, and costs imports of its own

    said = facts.ask_python(python, env, with_path=True)
    if said["error"] is None and said["sglang_version"] is not None:
        kept = {"sglang_version": said["sglang_version"], "executable": said["executable"], "path": said["path"]}
        others = [(k, v) for k, v in known.items() if k != key][1 - _KEPT :]
        with contextlib.suppress(OSError):  # the next one asks again
            files.replace_json(memory, {**dict(others), key: {**kept, "seen": _seen(program, kept)}})
    return said["sglang_version"]  # type: ignore[no-any-return]


def _seen(program: str, held: dict[str, Any]) -> list[Any]:
    """What the answer hangs on, as it is now."""
    home = os.path.dirname(os.path.dirname(str(held.get("executable"))))
    single = [program, str(held.get("executable")), os.path.join(home, "pyvenv.cfg")]
    return [*(_stat(path) for path in single), *(_folder(str(path)) for path in held["path"])]


def _stat(path: str) -> list[int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_ino, found.st_mtime_ns]


def _folder(path: str) -> list[Any]:
    try:
        with os.scandir(path or ".") as entries:
            names = sorted(
                e.name for e in entries if e.name.startswith(("sglang", "__editable__")) or e.name.endswith(_MARKS)
            )
    except OSError:
        return []
    return [[name, _stat(os.path.join(path, name))] for name in names]
