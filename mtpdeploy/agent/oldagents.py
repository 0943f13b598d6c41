"""Agents of earlier versions in the work folder: their zips and the folders unpacked beside them.

One is in use if a release's unit or session names it (a reboot starts it), if a living process of this machine was started from it,
or if it is the one that is asked. The rest was left behind by an upgrade.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from mtpdeploy.agent import process
from mtpdeploy.agent.release import Service

_AGENT = re.compile(r"[0-9a-f]{16}\.pyz")
_NAMING = (".service", "tmux.sh")


def prune(workdir: Path, *, dry_run: bool = False) -> list[str]:
    """Removes what is not in use; the names of the zips."""
    folder = workdir / "agent"
    found = {match.group() for name in _names(folder) if (match := _AGENT.match(name))}
    unused = sorted(found - _named(workdir) - _running())
    for name in unused if not dry_run else ():
        aside = folder / f"{name}.d.old.{os.getpid()}"
        with contextlib.suppress(OSError):
            os.rename(folder / f"{name}.d", aside)  # whole or not at all: half an agent would be run
        shutil.rmtree(aside, ignore_errors=True)
        for left in _names(folder):
            if left.startswith(name):
                with contextlib.suppress(OSError):
                    os.unlink(folder / left)
    return unused


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _named(workdir: Path) -> set[str]:
    """Agents that a release of any service, or its unit, names."""
    found: set[str] = set()
    for name in _names(workdir):
        if name == "agent":
            continue
        for release in Service(workdir, name).history():
            for file in _names(release.path):
                if file.endswith(_NAMING):
                    with contextlib.suppress(OSError, ValueError):
                        found |= set(_AGENT.findall((release.path / file).read_text()))
    return found


def _running() -> set[str]:
    """Agents that living processes were started from, this one among them."""
    found: set[str] = set()
    for pid in process.pids():
        with contextlib.suppress(OSError):
            found |= set(_AGENT.findall(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")))
    return found
