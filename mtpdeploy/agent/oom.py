"""How often the kernel has killed for memory in a control group, so that a SIGKILL out of the blue has a name.

cgroup v2 counts in memory.events, v1 in memory.oom_control (`oom_kill N` in both). A process's group is in /proc/PID/cgroup, as
seen from the mount that /proc/self/mountinfo shows. See cgroups(7) and the kernel's admin-guide/cgroup-v2.
"""

from __future__ import annotations

import os
from pathlib import Path

WORD = "oom-kill"  # systemd's own word for it, in SERVICE_RESULT


def kills() -> int | None:
    """Kills for memory so far in this process's own group; None where nothing counts them."""
    found = [count for place in _files() if (count := _count(place)) is not None]
    return max(found) if found else None


def more_than(before: object) -> bool:
    """Whether the kernel has killed in this group since `before` was read."""
    now = kills()
    return isinstance(before, int) and now is not None and now > before


def _files() -> list[Path]:
    """Where this process's group is counted: v1's memory controller, else v2."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return []
    places = []
    for number, controllers, path in groups:
        if number == "0":
            kind, name, option = "cgroup2", "memory.events", None
        elif "memory" in controllers.split(","):
            kind, name, option = "cgroup", "memory.oom_control", "memory"
        else:
            continue
        for fields in mounts:
            after = fields.index("-") + 1
            if fields[after] != kind or (option and option not in fields[after + 2].split(",")):
                continue
            root, point = fields[3], fields[4]
            inside = os.path.relpath(path, root)
            if inside != ".." and not inside.startswith("../"):
                places.append(Path(point, inside, name))
    return places


def _count(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
