"""Watches a launch until it is proven ready or has ended, and streams its log meanwhile.

Ready is proven by a real generation whose answer comes from a process of this boot: after the log's ready line, or, for a
version that words it differently, once the server's port answers. Waiting has no limit in all, only one on silence: a large
model on a slow disk loads for a long time and says so.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from mtpdeploy.agent import ports, process
from mtpdeploy.agent.clock import utc_now
from mtpdeploy.agent.logtail import LogTail, offset_of_last_lines, offset_of_moment
from mtpdeploy.agent.process import ProcessId
from mtpdeploy.agent.protocol import WatchResult
from mtpdeploy.agent.release import READY_LINE, Release, Service
from mtpdeploy.agent.server import Server
from mtpdeploy.agent.status import prove, schedulers, status
from mtpdeploy.agent.stream import Stream

_LOOK_LOG_S = 0.03
_LOOK_PROCESS_S = 0.2
_LOOK_PORT_S = 1.0
_GENERATION_TRIES = 3
SILENCE_S = 600.0


def tail(
    service: Service,
    stream: Stream,
    *,
    launch_id: str | None,
    inode: int | None,
    offset: int | None,
    lines: int,
    follow: bool,
    since: str | None = None,
) -> dict[str, Any]:
    """Streams a log from a place, or its last lines; with `follow` until the reader goes away."""
    release = service.release(launch_id)
    if offset is None:
        offset = offset_of_moment(release.log, since) if since else offset_of_last_lines(release.log, lines)
    place = LogTail(release, inode, offset)
    try:
        while True:
            for name, fields in place.events():
                stream.emit(name, **fields)
            if not follow or stream.gone.is_set():
                break
            if launch_id is None and (newer := service.current()) and newer.launch_id != release.launch_id:
                stream.note(f"launch {newer.launch_id} has taken the place of {release.launch_id}")
                place.close()
                release, place = newer, LogTail(newer)
            time.sleep(_LOOK_LOG_S)
    finally:
        place.close()
    return {"launch_id": release.launch_id, "inode": place.inode, "offset": place.offset, "boot": place.boot}


class Watch:
    """One launch under watch."""

    def __init__(
        self,
        release: Release,
        stream: Stream,
        *,
        inode: int | None,
        offset: int | None,
        silence_s: float,
        generate: bool,
    ) -> None:
        self.release = release
        self.stream = stream
        self.silence_s = silence_s
        self.generate = generate
        self.host, self.port = release.read()["host"], release.read()["port"]
        first = int(release.state().get("asked_from", 1))
        started = next((b for b in release.boots() if b["n"] >= first), None)
        begin = int(started.get("log_offset") or 0) if started and offset is None else int(offset or 0)
        self.place = LogTail(release, inode, begin)
        self.ready_boot: int | None = None  # the boot whose log has said that it is ready
        self.carry = b""
        self.last_news = time.monotonic()
        self.generation: dict[str, Any] | None = None
        self._prover: threading.Thread | None = None
        self._failed_proofs = 0

    def run(self) -> WatchResult:
        """Until ready, ended, silent for too long, or nobody listens to us."""
        next_process = next_port = 0.0
        boot_seen = 0
        if (last := self.release.last_boot()) and self._said_ready_already(last):
            self.ready_boot = last["n"]
        try:
            while not self.stream.gone.is_set():
                self._send_log()
                now = time.monotonic()
                if now >= next_process:
                    next_process = now + _LOOK_PROCESS_S
                    boot = self.release.last_boot() or {}
                    if boot.get("n", 0) != boot_seen:
                        boot_seen = boot.get("n", 0)
                        if self.ready_boot is not None and self.ready_boot < boot_seen:
                            self.ready_boot, self._failed_proofs = None, 0  # that boot has gone, with what it said
                        self.last_news = now
                        self.stream.emit(
                            "state", word="starting", why=f"boot {boot_seen}, pid {boot.get('pid')}", boot=boot_seen
                        )
                    if (ended := self._ended(boot)) is not None:
                        self._send_log()
                        return ended
                if self.ready_boot is None and now >= next_port:
                    next_port = now + _LOOK_PORT_S
                    self._look_at_port()
                if (proven := self._prove()) is not None:
                    return proven
                if now - self.last_news > self.silence_s:
                    return self._result("silent")
                if self._prover is not None:
                    self._prover.join(_LOOK_LOG_S)  # its answer is news that is not slept through
                else:
                    time.sleep(_LOOK_LOG_S)
        finally:
            self.place.close()
        return self._result("silent")

    def _said_ready_already(self, boot: dict[str, Any]) -> bool:
        """A watch that resumes behind the ready line would wait for it in vain."""
        from mtpdeploy.agent.status import said_ready

        return said_ready(self.release, boot)

    def _send_log(self) -> None:
        for name, fields in self.place.events():
            self.last_news = time.monotonic()
            self.stream.emit(name, **fields)
            if name != "log":
                self.carry = b""
                continue
            import base64

            text = self.carry + base64.b64decode(fields["data"])
            if READY_LINE in text:
                self.ready_boot = fields["boot"]
            self.carry = text[-len(READY_LINE) :]

    def _ended(self, boot: dict[str, Any]) -> WatchResult | None:
        """The result if the launch will not go on: given up, stopped, or its process has gone and nobody restarts it."""
        state = self.release.state()
        if state.get("stop"):
            return self._result("stopped")
        main = ProcessId.from_json(boot)
        if main is None or process.alive(main):
            return None
        # The exit is recorded a moment after the process has gone; a restart, too.
        if boot.get("ended_utc") is None and self._grace(boot):
            return None
        if state.get("gave_up"):
            return self._result("ended", crash_loop=bool(state["gave_up"].get("crash_loop")))
        if not self.release.was_ready():
            if self._grace(boot, 2.0):
                return None
            return self._result("ended")
        if boot["boot_id"] != process.boot_id():
            return self._result("ended")
        from mtpdeploy.agent import supervisor

        kind = (state.get("supervisor") or {}).get("kind")
        unit = supervisor.unit_state(self.release, kind)
        if unit.get("ActiveState") in ("failed", "inactive") or (not unit and self.release.supervisor() is None):
            return self._result("ended", crash_loop=int(unit.get("NRestarts") or 0) > 0)
        return None

    def _grace(self, boot: dict[str, Any], seconds: float = 3.0) -> bool:
        """Whether the dead process was first seen dead less than `seconds` ago."""
        if getattr(self, "_dead_boot", None) != boot["n"]:
            self._dead_boot, self._dead_since = boot["n"], time.monotonic()
        return time.monotonic() - self._dead_since < seconds

    def _look_at_port(self) -> None:
        """For versions whose ready line reads differently: the port answers."""
        if ports.listeners(self.port):
            reply = Server.of(self.release).ask("/ready", timeout_s=2)
            if reply.status == 200:
                self.ready_boot = (self.release.last_boot() or {}).get("n")

    def _prove(self) -> WatchResult | None:
        """Starts the generation once it makes sense, and judges it when it is there."""
        if self._prover is None:
            if self.ready_boot is None:
                return None
            if not self.generate:
                return self._proven({})
            self.stream.emit(
                "state", word="starting", why="says it is ready; a real generation is the proof", boot=self.ready_boot
            )
            self._prover = threading.Thread(target=self._generate, name="generation", daemon=True)
            self._prover.start()
            return None
        if self._prover.is_alive():
            self.last_news = time.monotonic()
            return None
        answer = self.generation or {}
        self._prover = None
        if answer.get("ok"):
            return self._proven(answer)
        self._failed_proofs += 1
        self.stream.note(f"the generation failed: {answer.get('error')}")
        if self._failed_proofs >= _GENERATION_TRIES:
            return self._result(
                "ended", evidence=[f"{answer.get('endpoint')} → {answer.get('status')}: {answer.get('error')}"]
            )
        time.sleep(1.0)
        return None

    def _generate(self) -> None:
        self.generation = Server.of(self.release).generate()

    def _proven(self, answer: dict[str, Any]) -> WatchResult | None:
        """Ready, if what answered belongs to this boot."""
        boot = self.release.last_boot()
        main = self.release.main()
        proof, identity = prove(self.release, ports.owner(self.port, self.host), main)
        if boot is None or main is None:
            return None
        if identity != "ours":
            return self._result(
                "ended",
                evidence=[
                    f"{p['check']}: expected {p['expected']}, found {p['found']}"
                    for p in proof
                    if p["holds"] is not True
                ],
            )
        record = {"boot": boot["n"], "utc": utc_now(), "tokens": answer.get("tokens"), "schedulers": schedulers(main)}
        with contextlib.suppress(OSError):  # a full disk does not make the server less ready
            self.release.update(lambda state: state.update(proven=record))
        self._send_log()
        self.stream.emit("state", word="ready", why="", boot=boot["n"])
        return self._result("ready", generation=answer or None, ready_utc=record["utc"])

    def _result(self, outcome: str, **more: Any) -> WatchResult:
        boot = self.release.last_boot() or {}
        result = WatchResult(
            outcome=outcome,  # type: ignore[typeddict-item]
            launch_id=self.release.launch_id,
            boot=boot.get("n", 0),
            exit=boot.get("exit"),
            crash_loop=bool(more.get("crash_loop")),
            inode=self.place.inode,
            offset=self.place.offset,
            ready_utc=more.get("ready_utc"),
            generation=more.get("generation"),
            evidence=list(more.get("evidence") or ()),
            # Without nvidia-smi, which takes tenths of a second: ready is told at once, and a failed launch leaves its own bundle.
            status=status(self.release.service, launch_id=self.release.launch_id, with_gpus=False),
            oom_killed=True if (boot.get("exit") or {}).get("result") == "oom-kill" else None,
        )
        return result
