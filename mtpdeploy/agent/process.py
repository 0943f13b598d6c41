"""Processes as /proc shows them, and signals that cannot hit a stranger.

A pid alone is no identity: pids are reused, and start again near 1 after a reboot. Three values are: pid, start time
(field 22 of /proc/PID/stat, clock ticks after boot) and the kernel's boot id. See proc(5).
"""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

LAUNCH_VARIABLE = "MTPDEPLOY_LAUNCH_ID"
_SHOWN = 120  # characters of a command line that a finding shows


@lru_cache(maxsize=1)
def boot_id() -> str:
    """This boot of the host. /proc/uptime would be the outer machine's in a container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


@lru_cache(maxsize=1)
def machine_id() -> str:
    """This machine's id: names are not unique, and several machines may share the work folder's file system."""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        if path.is_file() and (text := path.read_text(errors="replace").strip()):
            return text
    return os.uname().nodename


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for all time: no other one, before or after, has these three values."""

    pid: int
    start_time: int
    boot_id: str

    def as_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "start_time": self.start_time, "boot_id": self.boot_id}

    @staticmethod
    def from_json(value: Any) -> ProcessId | None:
        """The identity in a record, or None if the record has none (or a broken one)."""
        if not isinstance(value, dict):
            return None
        pid, start, boot = value.get("pid"), value.get("start_time"), value.get("boot_id")
        if isinstance(pid, int) and isinstance(start, int) and isinstance(boot, str) and pid > 1:
            return ProcessId(pid, start, boot)
        return None


@dataclass(frozen=True, slots=True)
class Stat:
    """The part of /proc/PID/stat that is used here."""

    pid: int
    comm: str
    state: str  # R S D Z X T …
    ppid: int
    pgrp: int
    session: int
    start_time: int


def read_stat(pid: int) -> Stat | None:
    """None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    # comm may hold spaces and brackets: fields are counted after the LAST `)`.
    opening, closing = text.find("("), text.rfind(")")
    fields = text[closing + 2 :].split()
    if opening < 0 or len(fields) < 20:
        return None
    return Stat(
        pid, text[opening + 1 : closing], fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19])
    )


def identify(pid: int) -> ProcessId | None:
    """The identity of a living process; a zombie does not live."""
    stat = read_stat(pid)
    return ProcessId(pid, stat.start_time, boot_id()) if stat and stat.state not in "ZX" else None


def alive(process: ProcessId | None) -> bool:
    """Whether exactly this process still lives."""
    return process is not None and process.boot_id == boot_id() and identify(process.pid) == process


def pids() -> list[int]:
    """All process ids that are visible."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stats() -> Iterator[Stat]:
    """All visible processes."""
    for pid in pids():
        if stat := read_stat(pid):
            yield stat


def ancestors(pid: int) -> list[int]:
    """The parents of `pid`, nearest first, without pid 1; `pid` itself is not among them."""
    chain: list[int] = []
    seen = {pid}
    while (stat := read_stat(pid)) and stat.ppid > 1 and stat.ppid not in seen:
        pid = stat.ppid
        seen.add(pid)
        chain.append(pid)
    return chain


def descendants(pid: int) -> list[Stat]:
    """All living processes below `pid`."""
    children: dict[int, list[Stat]] = {}
    for stat in stats():
        children.setdefault(stat.ppid, []).append(stat)
    found: list[Stat] = []
    queue = [pid]
    while queue:
        for stat in children.get(queue.pop(), ()):
            found.append(stat)
            queue.append(stat.pid)
    return found


def command_line(pid: int) -> str | None:
    """The command line in one line of at most 120 characters, secrets masked; None if it cannot be read.

    White space is one space and other control characters are shown as \\xNN: any user of the host writes this text.
    SGLang's children show their title here.
    """
    from mtpdeploy.sglang.masking import mask

    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return None
    text = " ".join(word.decode(errors="replace") for word in words).strip()
    if not text:
        stat = read_stat(pid)
        text = f"[{stat.comm}]" if stat else ""
    return _one_line(mask(text)) or None


def _one_line(text: str) -> str:
    spaced = " ".join(text.split())
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in spaced)
    return plain if len(plain) <= _SHOWN else plain[: _SHOWN - 1] + "…"


def arguments(pid: int) -> list[str] | None:
    """A process's command line in words, secrets masked; None if it is gone or has none."""
    from mtpdeploy.sglang.masking import mask_values

    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return None
    if words == [b""]:
        return None
    masked = mask_values({"argv": [word.decode(errors="replace") for word in words]})["argv"]
    return [str(word) for word in masked] if isinstance(masked, list) else None


def environment(pid: int) -> dict[str, str] | None:
    """The environment a process was started with; None if it is not ours to read (or wiped: then it is empty)."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (item.partition(b"=") for item in data.split(b"\0") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def launch_of(pid: int) -> str | None:
    """The launch id in a process's environment, or None if it has none or cannot be read."""
    marker = LAUNCH_VARIABLE.encode() + b"="
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    for item in data.split(b"\0"):
        if item.startswith(marker):
            return os.fsdecode(item[len(marker) :])
    return None


def cgroup(pid: int) -> str | None:
    """The cgroup path: systemd's own hierarchy on a v1 or hybrid host, else that of v2.

    A container with a v2 of its own may still see the machine's v1 hierarchies, and is at their root: then v2 tells.
    """
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    named = unified = None
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if controllers == "name=systemd":
            named = path
        elif number == "0":
            unified = path
    return unified if named in (None, "/") else named


def user_of(pid: int) -> str | None:
    """The name of the process's owner."""
    try:
        return user_name(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return None


def user_name(uid: int) -> str:
    """The user's name, or its number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def send(process: ProcessId, number: signal.Signals) -> bool:
    """Signals exactly this process. False if it lives no longer. PermissionError if it is not ours to signal.

    With pidfd (Linux ≥ 5.3) the check and the signal concern the same process; without it, a race of microseconds is
    left.
    """
    if process.boot_id != boot_id():
        return False
    opener = getattr(os, "pidfd_open", None)
    if opener is not None:
        try:
            descriptor = opener(process.pid)
        except ProcessLookupError:
            return False
        except OSError:
            descriptor = None  # kernel without pidfd
        if descriptor is not None:
            try:
                if not alive(process):
                    return False
                signal.pidfd_send_signal(descriptor, number)
                return True
            except ProcessLookupError:
                return False
            finally:
                os.close(descriptor)
    if not alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def wait_until_dead(process: ProcessId, seconds: float) -> bool:
    """Whether the process ended within that time."""
    deadline = time.monotonic() + seconds
    while alive(process):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def name_process(title: str) -> None:
    """Sets the short name that `ps` and `top` show (15 bytes); a failure does not matter."""
    try:
        ctypes.CDLL(None).prctl(15, title.encode()[:15], 0, 0, 0)
    except (OSError, AttributeError):
        return
