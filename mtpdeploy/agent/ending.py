"""Stop that means stopped: drained if it can be, killed if it must be, and then looked for until nothing of it is left.

SIGTERM goes to the main process alone: a scheduler that dies first sends SGLang down its crash path and loses the drain
(tokenizer_manager.py, SIGQUIT handler). SGLang drains without a limit of its own, so the limit is ours. The exit status is
not looked at: after a clean drain SGLang kills itself.
"""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

from mtpdeploy.agent import family, files, gpus, journal, ports, process, supervisor
from mtpdeploy.agent.clock import utc_now
from mtpdeploy.agent.command import Root
from mtpdeploy.agent.family import Member
from mtpdeploy.agent.fault import Fault
from mtpdeploy.agent.process import ProcessId
from mtpdeploy.agent.protocol import GpuFacts, StopResult
from mtpdeploy.agent.release import Release
from mtpdeploy.agent.server import Server
from mtpdeploy.agent.stream import Stream

DRAIN_S = 120.0  # when neither request nor release says
_GONE_S = 20.0  # after SIGKILL
_MEMORY_S = 30.0  # GPU memory comes back seconds after the process has gone
_SLACK_GB = 0.25


def stop(
    release: Release,
    stream: Stream,
    root: Root,
    *,
    client: str,
    why: str,
    drain_timeout_s: float | None = None,
    abort_requests: bool = False,
) -> StopResult:
    """Ends a launch and says what is left, if anything is. The caller holds the lock."""
    began = time.monotonic()
    asked = _asked(release, stream)
    limit = drain_timeout_s if drain_timeout_s is not None else float(asked.get("drain_timeout_s") or DRAIN_S)
    state = release.state()
    if state.get("damaged"):
        stream.note(f"{release.path / 'state.json'} was damaged; what lives of the launch is found by its launch id")
    kind = (state.get("supervisor") or {}).get("kind")
    before = family.members(release)
    main = release.main()
    _record_request(release, stream, client, why)
    held, path = _held(release, before)
    keeper = release.supervisor()
    if not before and keeper is None and not _unit_is_up(release, kind):
        _record_done(release, [])
        return StopResult(
            stopped=True, launch_id=release.launch_id, already=True, drained=None, killed=[], seconds=0.0, left=[],
            port_free=_port_free(release), gpu_freed_gb=None, simulated=asked.get("simulated"),
        )  # fmt: skip
    if abort_requests and main is not None:
        stream.step("abort running requests", "asked for: they are answered with an error instead of drained")
        Server.of(release).abort_all()
    stream.step(
        f"SIGTERM to the main process {main.pid if main else '(gone)'}",
        f"it drains running requests, for at most {limit:.0f} s",
    )
    if not supervisor.ask_to_stop(release, kind, root) and main is not None:
        _signal(main, signal.SIGTERM)
    drained = _wait_for_drain(release, main, limit, stream)
    if main is None and before:
        drained = False  # whatever is left now is killed
    if not drained and main is not None:
        stream.step("SIGKILL", f"the main process did not end within {limit:.0f} s")
        supervisor.kill_unit(release, kind, root)
    killed = _kill_rest(release, stream)
    if keeper is not None and not process.wait_until_dead(keeper, 5.0):
        _signal(keeper, signal.SIGKILL)
    supervisor.tidy(release, kind, root)
    freed = _wait_for_memory(held, path, stream)
    left = [_describe(member, path) for member in family.members(release)]
    free = _port_free(release)
    _record_done(release, left)
    return StopResult(
        stopped=not left,
        launch_id=release.launch_id,
        already=False,
        drained=drained,
        killed=killed,
        seconds=round(time.monotonic() - began, 2),
        left=left,
        port_free=free,
        gpu_freed_gb=freed,
        simulated=asked.get("simulated"),
    )


def _asked(release: Release, stream: Stream) -> dict[str, Any]:
    """release.json; empty where it is damaged, which must not forbid a stop."""
    try:
        return dict(release.read())
    except Fault as fault:
        stream.note(f"{fault.message}; stopping all the same")
        return {}


def _record_request(release: Release, stream: Stream, client: str, why: str) -> None:
    """The record comes before the signal: whatever ends from now on, ended because it was asked to."""
    record: dict[str, Any] = {"asked_utc": utc_now(), "by": client, "why": why, "done_utc": None, "left": []}
    try:
        release.update(lambda state: state.update(stop=record, restarting=None))
        journal.write(release.service, "stop", client, launch_id=release.launch_id, why=why)
    except OSError as error:
        # A full disk is often the reason for a stop; it must not forbid it.
        stream.note(
            f"the stop could not be recorded ({files.explain(error, 'recording').message}); stopping all the same"
        )


def _record_done(release: Release, left: list[dict[str, Any]]) -> None:
    def change(state: dict[str, Any]) -> None:
        if isinstance(state.get("stop"), dict):
            state["stop"].update(done_utc=utc_now() if not left else None, left=left)

    with contextlib.suppress(OSError):
        release.update(change)


def _unit_is_up(release: Release, kind: str | None) -> bool:
    return supervisor.unit_state(release, kind).get("ActiveState") in ("active", "activating", "deactivating", "failed")


def _signal(target: ProcessId, number: signal.Signals) -> None:
    with contextlib.suppress(PermissionError):
        process.send(target, number)


def _wait_for_drain(release: Release, main: ProcessId | None, limit: float, stream: Stream) -> bool:
    """Whether the main process ended by itself. Says how many requests are left, as SGLang's log tells it."""
    if main is None:
        return True
    deadline = time.monotonic() + limit
    said = ""
    next_look = time.monotonic() + 1.0
    while process.alive(main):
        now = time.monotonic()
        if now >= deadline:
            return False
        if now >= next_look:
            next_look = now + 1.0
            text = _remaining(release)
            if text and text != said:
                stream.note(text)
                said = text
        time.sleep(0.05)
    return True


def _remaining(release: Release) -> str | None:
    """SGLang's last word on draining: `Gracefully exiting... Remaining number of requests 3. …`."""
    with contextlib.suppress(OSError), open(release.log, "rb") as log:
        log.seek(0, 2)
        log.seek(max(0, log.tell() - 4096))
        for line in reversed(log.read().decode(errors="replace").splitlines()):
            if "Gracefully exiting" in line:
                return line[line.index("Gracefully exiting") :][:120]
    return None


def _kill_rest(release: Release, stream: Stream) -> list[int]:
    """SIGKILL to what is left of the launch, each by its identity, until nothing is left or the time is up."""
    killed: list[int] = []
    deadline = time.monotonic() + _GONE_S
    grace = time.monotonic() + 1.0  # children die with the main process (PR_SET_PDEATHSIG); give them that second
    while left := family.members(release):
        now = time.monotonic()
        if now >= deadline:
            break
        if now >= grace:
            for member in left:
                if member.id.pid not in killed:
                    stream.step(f"SIGKILL pid {member.id.pid} ({member.comm})", f"left over; ours by {member.because}")
                    killed.append(member.id.pid)
                _signal(member.id, signal.SIGKILL)
        time.sleep(0.05)
    return killed


def _held(
    release: Release, members: list[Member]
) -> tuple[tuple[list[GpuFacts], dict[int, float]] | None, dict[str, str]]:
    """GPU readings before the stop, what the launch holds of them, and the PATH to ask nvidia-smi with."""
    path = {k: v for k, v in release.environment().items() if k == "PATH"}
    try:
        found = gpus.read(path)
    except gpus.NoGpus:
        return None, path
    return (found, gpus.held_by(found, {m.id.pid for m in members})), path


def _wait_for_memory(
    before: tuple[list[GpuFacts], dict[int, float]] | None, path: dict[str, str], stream: Stream
) -> float | None:
    """Waits until the memory that the launch held is free again; GiB that came back, None if it cannot be known."""
    if before is None:
        return None
    readings, held = before
    used = {gpu["index"]: gpu["used_gb"] for gpu in readings}
    deadline = time.monotonic() + _MEMORY_S
    said = False
    while True:
        try:
            now = {gpu["index"]: gpu["used_gb"] for gpu in gpus.read(path)}
        except gpus.NoGpus:
            return None
        waiting = [
            index
            for index, amount in held.items()
            if (now.get(index) or 0.0) > (used.get(index) or 0.0) - amount + _SLACK_GB
        ]
        if not waiting or time.monotonic() >= deadline:
            if waiting:
                stream.note(
                    f"GPU {', '.join(map(str, waiting))}: the memory did not come back within {_MEMORY_S:.0f} s"
                )
            return round(sum((used.get(i) or 0.0) - (now.get(i) or 0.0) for i in used), 2)
        if not said:
            stream.step("wait for GPU memory", f"{sum(held.values()):.1f} GiB were held by this launch")
            said = True
        time.sleep(0.25)


def _describe(member: Member, path: dict[str, str]) -> dict[str, Any]:
    amount = None
    with contextlib.suppress(gpus.NoGpus):
        amount = sum(gpus.held_by(gpus.read(path), {member.id.pid}).values()) or None
    stat = process.read_stat(member.id.pid)
    state = stat.state if stat else member.state
    hint = (
        "in uninterruptible sleep: a driver call does not return; the host needs a reboot"
        if state == "D"
        else f"kill -9 {member.id.pid}   # as its owner {process.user_of(member.id.pid)} or root"
    )
    return {
        "pid": member.id.pid,
        "state": state,
        "command": process.command_line(member.id.pid),
        "gpu_gb": amount,
        "hint": hint,
    }


def _port_free(release: Release) -> bool | None:
    try:
        asked = release.read()
    except Fault:
        return None
    return ports.owner(asked["port"], asked["host"]) is None
