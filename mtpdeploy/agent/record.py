"""What state.json must look like to be believed, and what a living process tells where it is damaged.

The file is written whole or not at all, but disks rot and people edit. A record that cannot be believed must neither hide a server
that runs nor start a second one: its process carries the launch id, the boot's number and the unit in its environment and cgroup.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

from mtpdeploy.agent import process
from mtpdeploy.agent.clock import spell_epoch
from mtpdeploy.agent.process import ProcessId, Stat

_RECORDS = ("supervisor", "stop", "proven", "gave_up", "supervising", "restarting")  # each an object or null
_BOOT_NEEDS: dict[str, type] = {"n": int, "pid": int, "start_time": int, "boot_id": str, "started_utc": str}
_BOOT_MAY: dict[str, type] = {"log_offset": int, "session": int, "cgroup": str, "invocation_id": str, "exit": dict,
                              "ended_utc": str, "machine_id": str}  # fmt: skip


def believed(value: Any) -> dict[str, Any] | None:
    """state.json as it was read, or None if something in it is not what it must be."""
    if not isinstance(value, dict):
        return None
    boots = value.get("boots", [])
    if not isinstance(boots, list) or not all(map(_boot, boots)) or not isinstance(value.get("asked_from", 1), int):
        return None
    if any(not isinstance(value.get(name), dict | None) for name in _RECORDS):
        return None
    if not isinstance((value.get("supervisor") or {}).get("kind"), str | None):
        return None
    schedulers = (value.get("proven") or {}).get("schedulers", [])
    if not isinstance(schedulers, list) or not all(
        isinstance(s, dict) and "title" in s and "pid" in s for s in schedulers
    ):
        return None
    if "why" not in (value.get("gave_up") or {"why": ""}):
        return None
    return value


def _boot(boot: Any) -> bool:
    return (
        isinstance(boot, dict)
        and all(isinstance(boot.get(name), kind) for name, kind in _BOOT_NEEDS.items())
        and all(isinstance(boot.get(name), kind | None) for name, kind in _BOOT_MAY.items())
    )


def found_again(launch_id: str, folder: Path, unit: str) -> dict[str, Any]:
    """A state made of what lives: at most one boot, that of the process that carries the launch id and whose parent does not.

    `damaged` is true in it. What has ended left nothing to read: then there is no boot.
    """
    state: dict[str, Any] = {"launch_id": launch_id, "boots": [], "damaged": True}
    carriers = {s.pid: s for s in process.stats() if s.state not in "ZX" and process.launch_of(s.pid) == launch_id}
    heads = [s for s in carriers.values() if s.ppid not in carriers]
    main = min(
        heads, key=lambda s: (s.pid != s.session, s.start_time), default=None
    )  # an orphaned scheduler leads no session
    if main is None:
        return state
    environ, cgroup = process.environment(main.pid) or {}, process.cgroup(main.pid)
    number = int(said) if (said := environ.get("MTPDEPLOY_BOOT", "")).isdigit() else 1
    in_unit = os.path.basename(cgroup or "") == unit
    boot = {
        "n": number,
        **ProcessId(main.pid, main.start_time, process.boot_id()).as_json(),
        "machine_id": process.machine_id(),
        "started_utc": _started(main),
        "session": main.session,
        "cgroup": cgroup,
        "invocation_id": environ.get("INVOCATION_ID") if in_unit else None,
        "supervisor": None,
        "log_offset": _header(folder / "server.log", launch_id, number),
        "log_inode": None,
        "oom_kills": None,
        "exit": None,
        "ended_utc": None,
    }
    state.update(boots=[boot], asked_from=number)
    if in_unit:
        state["supervisor"] = {"kind": "systemd-user" if "/user@" in str(cgroup) else "systemd"}
    elif (process.arguments(main.ppid) or [])[-2:] == ["supervise", str(folder)] and (
        keeper := process.identify(main.ppid)
    ):
        state["supervising"] = boot["supervisor"] = keeper.as_json()
    return state


def _started(main: Stat) -> str:
    """When a process began: its start time counts clock ticks from the machine's boot."""
    ago = time.clock_gettime(time.CLOCK_BOOTTIME) - main.start_time / os.sysconf("SC_CLK_TCK")
    return spell_epoch(time.time() - ago)


def _header(log: Path, launch_id: str, number: int) -> int:
    """Where the boot's header line is in the log; 0 if it is not there."""
    try:
        with open(log, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return max(0, text.rfind(f"# mtpdeploy launch {launch_id} boot {number} ".encode()))
    except (OSError, ValueError):  # ValueError: an empty file
        return 0
