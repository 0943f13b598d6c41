"""Which processes belong to a launch, also orphans that PID 1 has adopted. No name or pattern is ever looked at.

A process belongs to a launch if one of these holds: it is the recorded main process or descends from it; its
environment carries the launch id (launch.sh exports SPT_NOENV=1, or SGLang's setproctitle would wipe it); it is in
the session that the main process leads; it is in the cgroup of the launch's own unit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mtpdeploy.agent import process
from mtpdeploy.agent.process import ProcessId, Stat
from mtpdeploy.agent.release import Release, unit_name


@dataclass(frozen=True, slots=True)
class Member:
    """A process of a launch, and what shows it."""

    id: ProcessId
    state: str
    comm: str
    because: str


def members(release: Release) -> list[Member]:
    """All living processes of the launch (zombies are no longer living), apart from supervisors and this agent."""
    boots = [b for b in release.boots() if b.get("boot_id") == process.boot_id()]
    mains = {ident for b in boots if (ident := ProcessId.from_json(b))}
    main_pids = {ident.pid: ident for ident in mains}
    own_cgroups = {b["cgroup"] for b in boots if b.get("cgroup") and _is_own_cgroup(release, b["cgroup"])}
    spared = {os.getpid(), *process.ancestors(os.getpid())}
    supervisors = {s.pid for b in boots if (s := ProcessId.from_json(b.get("supervisor"))) and process.alive(s)}
    everything = {stat.pid: stat for stat in process.stats()}
    found: dict[int, Member] = {}
    for stat in everything.values():
        if stat.state in "ZX" or stat.pid in spared or stat.pid in supervisors:
            continue
        because = _because(stat, everything, release.launch_id, main_pids, own_cgroups)
        if because:
            ident = ProcessId(stat.pid, stat.start_time, process.boot_id())
            found[stat.pid] = Member(ident, stat.state, stat.comm, because)
    return list(found.values())


def _because(
    stat: Stat,
    everything: dict[int, Stat],
    launch_id: str,
    mains: dict[int, ProcessId],
    own_cgroups: set[str],
) -> str | None:
    main = mains.get(stat.pid)
    if main and main.start_time == stat.start_time:
        return "main process"
    leader = mains.get(stat.session)
    # A session keeps its number while a member lives, so a member younger than the leader is of this launch.
    if leader and stat.session == leader.pid and stat.start_time >= leader.start_time and stat.pid != leader.pid:
        return "session"
    if process.launch_of(stat.pid) == launch_id:
        return "environment"
    if own_cgroups and process.cgroup(stat.pid) in own_cgroups:
        return "cgroup"
    above, seen = stat, {stat.pid}
    while (parent := everything.get(above.ppid)) and parent.pid not in seen:
        ident = mains.get(parent.pid)
        if ident and ident.start_time == parent.start_time:
            return "descendant"
        seen.add(parent.pid)
        above = parent
    return None


def _is_own_cgroup(release: Release, path: str) -> bool:
    """Whether the cgroup is that of the service's own unit, and not a login session's or the container's whole."""
    return os.path.basename(path) == unit_name(release.service.name)
