"""Who listens on a port: /proc/net/tcp for the socket, /proc/PID/fd for its holder.

Without root the holder of another user's socket cannot be seen: then the port is taken, its owner's uid is known,
and the pid is not. Nothing is guessed.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mtpdeploy.agent import process
from mtpdeploy.agent.protocol import PortOwner

_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket."""

    address: str
    port: int
    uid: int
    inode: int

    @property
    def wildcard(self) -> bool:
        return self.address in ("0.0.0.0", "::")


def _address(word: str) -> tuple[str, int]:
    """`0100007F:7530` → (`127.0.0.1`, 30000). The kernel prints 32-bit words in the machine's byte order."""
    text, port = word.split(":")
    raw = bytes.fromhex(text)
    groups = [int.from_bytes(raw[i : i + 4], "big").to_bytes(4, sys.byteorder) for i in range(0, len(raw), 4)]
    packed = b"".join(groups)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed), int(port, 16)


def listeners(port: int | None = None) -> list[Listener]:
    """All listening sockets (of one port) in this network namespace."""
    found: list[Listener] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) < 10 or fields[3] != _LISTEN:
                continue
            address, number = _address(fields[1])
            if port is None or number == port:
                found.append(Listener(address, number, int(fields[7]), int(fields[9])))
    return found


def holders(inodes: set[int], pids: Iterable[int] | None = None) -> dict[int, list[int]]:
    """Socket inode → pids that hold it, among `pids` (default: all), as far as this user may look."""
    found: dict[int, list[int]] = {}
    for pid in process.pids() if pids is None else pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            if target.startswith("socket:["):
                inode = int(target[8:-1])
                if inode in inodes and pid not in found.setdefault(inode, []):
                    found[inode].append(pid)
    return found


def conflicts(listener: Listener, host: str) -> bool:
    """Whether a server that binds to `host` meets this listener: the same address, or a wildcard on either side."""
    if listener.wildcard or host in ("0.0.0.0", "::", ""):
        return True
    try:
        wanted = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return True
    return listener.address in wanted or listener.address.removeprefix("::ffff:") in wanted


def _can_bind(host: str, port: int) -> bool:
    """Whether this IPv4 address is free. Nothing listens there for it, so a server that binds at this very moment is not disturbed."""
    with socket.socket(socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):
            return False
    return True


def owner(port: int, host: str = "0.0.0.0", likely: int | None = None) -> PortOwner | None:
    """Who listens on `host`:`port`; None if nobody does.

    likely: a pid that is looked at first. If it holds all of the port's sockets, nobody else is looked at: on a machine with thousands
    of processes that is most of the time.
    """
    sockets = [listener for listener in listeners(port) if conflicts(listener, host)]
    if exact := [listener for listener in sockets if listener.address != "::"]:
        sockets = exact  # one on `::` beside it can only be IPv6-only
    elif sockets and ":" not in host and _can_bind(host, port):
        sockets = []  # IPv6-only: /proc/net/tcp6 does not show it, but our address is free
    if not sockets:
        return None
    inodes = {listener.inode for listener in sockets}
    found = holders(inodes, [likely, *process.ancestors(likely)]) if likely is not None else {}
    if found.keys() != inodes:
        found = holders(inodes)
    for listener in sockets:
        if owners := found.get(listener.inode):
            # A forked child may hold the socket too: the one whose parent does not hold it is the owner.
            pid = next((p for p in owners if not set(process.ancestors(p)) & set(owners)), owners[0])
            identity = process.identify(pid)
            return PortOwner(
                port=port,
                address=listener.address,
                pid=pid,
                start_time=identity.start_time if identity else None,
                user=process.user_of(pid),
                command=process.command_line(pid),
                launch_id=process.launch_of(pid),
            )
    first = sockets[0]
    return PortOwner(
        port=port,
        address=first.address,
        pid=None,
        start_time=None,
        user=process.user_name(first.uid),
        command=None,
        launch_id=None,
    )


def describe(found: PortOwner) -> str:
    """A port's owner in words."""
    where = (
        f"[{found['address']}]:{found['port']}" if ":" in found["address"] else f"{found['address']}:{found['port']}"
    )
    if found["pid"] is None:
        return f"{where} is held by a process of user {found['user']} that this user may not look at"
    ours = f", launch {found['launch_id']}" if found["launch_id"] else ""
    return f"{where} is held by pid {found['pid']} of user {found['user']}{ours}: {(found['command'] or '?')[:160]}"
