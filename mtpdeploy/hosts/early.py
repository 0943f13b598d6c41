"""Connects to where the same words led the last time, while the rest of the program is still being loaded and the plan is made.

A connection takes six round trips, reading an inventory and planning as long again; one hides behind the other. What is remembered
(runs/hosts/.reached.json: for `--host X`, where its hosts were found) decides nothing: a connection is only used if the inventory and
ssh's configuration, once they are read, lead to the very same place with the same keys. Otherwise it is closed unused. Nothing
secret is kept: names, ports and paths. Hosts behind a proxy are left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpdeploy.hosts.sshconfig import Resolved

if TYPE_CHECKING:
    from mtpdeploy.hosts.lean import paramiko

_KEPT = 64  # different --host options of one home
_AT_ONCE = 32  # hosts
_SWITCH_S = 0.0005  # a handshake's next step waits at most so long for the thread that plans


class Early:
    """The connections of one command that were begun before it was known what they are for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[Resolved, Future[paramiko.SSHClient]] = {}
        self._file: Path | None = None
        self._key = ""
        self._before: list[Any] | None = None
        self._reached: dict[str, Any] = {}
        self._interval = sys.getswitchinterval()

    def begin(self, home: Path, host: str | None, inventory: Sequence[str]) -> None:
        """Starts connecting to where this led the last time; nothing if that is not known."""
        self._file = home / "runs" / "hosts" / ".reached.json"
        self._key = json.dumps([host, [os.path.abspath(path) for path in inventory]])
        self._reached = {}
        known = _read(self._file).get(self._key)
        self._before = known if isinstance(known, list) else None
        places = [found for each in (self._before or [])[:_AT_ONCE] if (found := _place(each)) is not None]
        if not places:
            return
        from mtpdeploy.hosts.ssh import open_client  # all of Paramiko, before other imports contend with its handshake

        sys.setswitchinterval(_SWITCH_S)
        for target, limit in places:
            answer: Future[paramiko.SSHClient] = Future()
            self._begun[target] = answer
            threading.Thread(target=_run, args=(answer, open_client, target, limit), daemon=True).start()

    def claim(self, target: Resolved) -> Future[paramiko.SSHClient] | None:
        """The connection to exactly there, once; None if none was begun. Its result, or its error, may still be under way."""
        with self._lock:
            return self._begun.pop(target, None)

    def give(self, target: Resolved, client: paramiko.SSHClient) -> None:
        """A connection that somebody else in this process may want; closed at the end if nobody did."""
        answer: Future[paramiko.SSHClient] = Future()
        answer.set_result(client)
        with self._lock:
            self._begun[target] = answer

    def reached(self, target: Resolved, limit_s: float) -> None:
        """A connection was made: noted for the next time."""
        if target.proxy is None:
            with self._lock:
                self._reached[target.name] = {"target": asdict(target), "limit_s": limit_s}

    def end(self) -> None:
        """Closes what nobody wanted, and writes down where the hosts of this command were found, if that is news."""
        with self._lock:
            left, self._begun = list(self._begun.values()), {}
            now = [self._reached[name] for name in sorted(self._reached)]
        if left:
            from mtpdeploy.hosts.ssh import close_client

            for answer in left:
                answer.add_done_callback(close_client)
        sys.setswitchinterval(self._interval)
        if self._file is None or not now or now == self._before:
            return
        known = {key: value for key, value in _read(self._file).items() if key != self._key}
        kept = dict([*known.items()][1 - _KEPT :]) | {self._key: json.loads(json.dumps(now))}
        aside = self._file.with_name(f".reached.{os.getpid()}")
        with contextlib.suppress(OSError):  # the next command connects a moment later, that is all
            self._file.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(kept))
            aside.replace(self._file)


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _place(said: Any) -> tuple[Resolved, float] | None:
    """What is remembered of one host; None if it is damaged or from another version."""
    try:
        told: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in said["target"].items()
        }
        return Resolved(**told), float(said["limit_s"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _run(
    answer: Future[paramiko.SSHClient],
    work: Callable[[Resolved, float], paramiko.SSHClient],
    target: Resolved,
    limit: float,
) -> None:
    try:
        answer.set_result(work(target, limit))
    except BaseException as error:  # raised again where it is claimed
        answer.set_exception(error)


EARLY = Early()
