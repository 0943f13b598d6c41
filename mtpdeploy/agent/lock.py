"""The service's lock: one changer at a time, and whoever meets it learns who, since when and why.

The lock is a file with the identity of the agent process that holds it. It is stale when that process lives no longer
(killed, or the host was rebooted) and is then taken over without asking. A flock in an SSH session would not do:
after a cut line the server keeps the session, and with it the lock. While the holder works it touches the file (the
lease), so that a holder that hangs, or one on another machine with the same work folder, can be told from one that works.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtpdeploy.agent import files
from mtpdeploy.agent.clock import utc_now
from mtpdeploy.agent.fault import Fault
from mtpdeploy.agent.process import ProcessId, alive, identify, machine_id
from mtpdeploy.agent.release import Service

RENEW_S = 2.0
LEASE_S = 30.0
_GUARD = ".lock.guard"
_SAID = ("host", "client", "why", "since_utc")


def read(service: Service) -> dict[str, Any] | None:
    """The lock as it lies there, with `state`: held, hanging (its holder lives and has not renewed it), stale."""
    path = service.folder / "lock.json"
    value = files.read_json(path)
    if ProcessId.from_json(value) is None or any(not isinstance(value.get(name), str) for name in _SAID):
        return None  # written whole or not at all: this is no lock of ours, and nobody holds it
    renewed = _age(path)
    if value.get("machine_id") not in (None, machine_id()):
        # Another machine's pid says nothing here; only the lease does.
        state = "held" if renewed is not None and renewed < LEASE_S else "stale"
    elif not alive(ProcessId.from_json(value)):
        state = "stale"
    else:
        state = "held" if renewed is not None and renewed < LEASE_S else "hanging"
    return {**value, "state": state, "renewed_s": renewed}


def _age(path: Path) -> float | None:
    """Seconds since the lease was renewed, by the file system's own clock; None if the file has gone."""
    try:
        return max(0.0, time.time() - os.stat(path).st_mtime)
    except OSError:
        return None


def describe(lock: dict[str, Any]) -> str:
    """Who holds it, in words."""
    return (
        f"{lock.get('client')} has held it since {lock.get('since_utc')} for: {lock.get('why')} "
        f"(pid {lock.get('pid')} on {lock.get('host')}, renewed {lock.get('renewed_s') or 0:.0f} s ago)"
    )


@contextlib.contextmanager
def held(service: Service, client: str, why: str, *, full_disk_too: bool = False) -> Iterator[str | None]:
    """Holds the lock; yields a note if a stale one was taken over. Fault `host-locked` if somebody has it.

    full_disk_too: on a full disk the reserve is given for it. Where lock.json cannot be written all the same (a file system that
    became read-only), the guard is held, if it can be: nobody reads who holds it then, but that must not forbid a stop.
    """
    me = identify(os.getpid())
    if me is None:
        raise Fault("remote-error", "this process cannot be found in /proc; is it mounted with hidepid?")
    with contextlib.ExitStack() as stack:
        try:
            note = _take(service, me, client, why)
        except OSError as error:
            if not full_disk_too or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise files.explain(error, "taking the lock") from None
            note = _take_without_room(service, me, client, why, stack, error)
        done = threading.Event()
        threading.Thread(target=_renew, args=(service.folder / "lock.json", done), name="lease", daemon=True).start()
        stack.callback(_drop, service, me)
        stack.callback(done.set)
        yield note


def _take_without_room(
    service: Service, me: ProcessId, client: str, why: str, stack: contextlib.ExitStack, error: OSError
) -> str | None:
    """The lock where the disk is full or read-only; what to tell of it."""
    if files.give_reserve(service.folder):
        with contextlib.suppress(OSError):
            return _take(service, me, client, why)
    with contextlib.suppress(OSError):
        stack.enter_context(files.guard(service.folder / _GUARD))
    return f"{files.explain(error, 'taking the lock').message}: going on without a record of it"


def _take(service: Service, me: ProcessId, client: str, why: str) -> str | None:
    with files.guard(service.folder / _GUARD):
        before = read(service)
        if before and before["state"] != "stale":
            raise Fault(
                "host-locked",
                f"{service.name} is being changed: {describe(before)}",
                next_commands=["mtpdeploy status", "mtpdeploy unlock --break-lock   # only if that deploy hangs"],
                details={"lock": before},
                runbook="half-finished-deploy",
            )
        record = {
            **me.as_json(),
            "machine_id": machine_id(),
            "host": os.uname().nodename,
            "client": client,
            "why": why,
            "since_utc": utc_now(),
        }
        files.replace_json(service.folder / "lock.json", record)
    return f"took over a stale lock: {describe(before)}" if before else None


def _renew(path: Path, done: threading.Event) -> None:
    while not done.wait(RENEW_S):
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)


def _drop(service: Service, me: ProcessId) -> None:
    """Removes the lock if it is still ours (somebody may have broken it)."""
    if ProcessId.from_json(files.read_json(service.folder / "lock.json")) != me:
        return
    with contextlib.suppress(OSError), files.guard(service.folder / _GUARD):
        if ProcessId.from_json(files.read_json(service.folder / "lock.json")) == me:
            os.unlink(service.folder / "lock.json")


def unlock(service: Service, *, break_lock: bool) -> dict[str, Any]:
    """Removes a stale lock, or with `break_lock` any. Fault `host-locked` if its holder lives."""
    if not service.folder.is_dir():
        return {"removed": False, "lock": None}
    with files.guard(service.folder / _GUARD):
        lock = read(service)
        if lock is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(service.folder / "lock.json")  # damaged
                return {"removed": True, "lock": None}
            return {"removed": False, "lock": None}
        if lock["state"] != "stale" and not break_lock:
            raise Fault(
                "host-locked",
                f"the lock's holder lives: {describe(lock)}",
                next_commands=["mtpdeploy unlock --break-lock"],
                details={"lock": lock},
            )
        os.unlink(service.folder / "lock.json")
        return {"removed": True, "lock": lock}
