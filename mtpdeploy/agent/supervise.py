"""What stands between a supervisor and launch.sh: it records each boot before the server runs, and how it ended.

`boot` and `ended` are called by systemd units (ExecStart, ExecStopPost). `supervise` is the small supervisor for hosts
without systemd: it runs in a tmux pane or detached, starts the server again after a failure with a growing pause and a
limit, and is a child subreaper, so that orphaned schedulers come to it and not to PID 1.

A launch that never got as far as serving is not started again: the same words would fail the same way, and the first
log is the one worth reading.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import NoReturn

from mtpdeploy.agent import family, files, ports, process
from mtpdeploy.agent.clock import utc_now
from mtpdeploy.agent.logmask import LogMask
from mtpdeploy.agent.process import ProcessId
from mtpdeploy.agent.release import Release, Service, boot_ended, new_boot

REFUSED = 2  # as argparse: units have RestartPreventExitStatus=2
CANNOT_RECORD = 75  # EX_TEMPFAIL
_PAUSES_S = (2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
_HEALTHY_S = 600.0
_LEFTOVERS_S = 30.0
_PR_SET_CHILD_SUBREAPER = 36


def _service(folder: str) -> Service:
    path = Path(folder)
    service = Service(path.parent, path.name)
    service.check()
    return service


def refusal(release: Release) -> str | None:
    """Why this launch must not be started by itself again, or None if it may."""
    state = release.state()
    if state.get("stop"):
        return "it was asked to stop"
    first = int(state.get("asked_from", 1))
    tried = [b for b in release.boots() if b["n"] >= first and b.get("boot_id") == process.boot_id()]
    if tried and not release.was_ready():
        return "it ended before it ever served; the same command would end the same way"
    return None


def give_up(release: Release, why: str, *, crash_loop: bool = False) -> None:
    """Records that no further boot will be tried."""
    release.update(lambda state: state.update(gave_up={"utc": utc_now(), "why": why, "crash_loop": crash_loop}))


def taken(release: Release) -> str | None:
    """Who holds the server's port, in words, or None if it is free. SGLang itself notices only after the whole load."""
    asked = release.read()
    owner = ports.owner(asked["port"], asked["host"])
    return ports.describe(owner) if owner else None


def remark(release: Release, text: str) -> None:
    """Writes a line of ours into the server's log."""
    with contextlib.suppress(OSError), open(release.log, "ab") as log:
        log.write(f"# mtpdeploy {text}\n".encode())


def child_environment(release: Release, number: int, *, own_session: bool) -> dict[str, str]:
    """What launch.sh gets: this environment without what belongs to a login session.

    INVOCATION_ID stays under a unit of its own (it is proof of it); the small supervisor was given somebody else's.
    """
    dropped: tuple[str, ...] = ("SSH_", "TMUX", "XDG_SESSION", "JOURNAL_STREAM", "NOTIFY_SOCKET", "MAINPID")
    if own_session:
        dropped = (*dropped, "INVOCATION_ID")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, process.LAUNCH_VARIABLE: release.launch_id, "MTPDEPLOY_BOOT": str(number)}


def execute(release: Release, number: int, *, own_session: bool) -> NoReturn:
    """Becomes launch.sh: same pid, so the recorded identity is the server's."""
    os.chdir(release.path)
    os.execve(
        "/bin/sh",
        ["/bin/sh", str(release.path / "launch.sh")],
        child_environment(release, number, own_session=own_session),
    )


def boot(folder: str) -> int:
    """ExecStart of a unit: records this boot of the current release and becomes its launch.sh."""
    service = _service(folder)
    release = service.current()
    if release is None:
        print(f"mtpdeploy: nothing is deployed in {folder}", file=sys.stderr)
        return REFUSED
    if why := refusal(release):
        print(f"mtpdeploy: launch {release.launch_id} is not started again: {why}", file=sys.stderr)
        if not release.state().get("stop"):
            give_up(release, why)
        return REFUSED
    me = process.identify(os.getpid())
    if me is None:
        return CANNOT_RECORD
    try:
        number = new_boot(
            release,
            me,
            session=os.getsid(0),
            cgroup=process.cgroup(me.pid),
            invocation=os.environ.get("INVOCATION_ID"),
            supervisor=None,
        )
    except OSError as error:
        print(f"mtpdeploy: the boot cannot be recorded, so the server is not started: {error}", file=sys.stderr)
        return CANNOT_RECORD
    if holder := taken(release):
        remark(release, f"launch {release.launch_id} boot {number} utc {utc_now()} refused: port taken: {holder}")
        boot_ended(release, number, 1, None, f"port taken: {holder}")
        return 1
    execute(release, number, own_session=False)


def ended(folder: str) -> int:
    """ExecStopPost of a unit: records how the boot ended, in systemd's words."""
    release = _service(folder).current()
    last = release.last_boot() if release else None
    if release is None or last is None or last.get("invocation_id") != os.environ.get("INVOCATION_ID"):
        return 0
    code, status = os.environ.get("EXIT_CODE"), os.environ.get("EXIT_STATUS", "")
    exit_status = int(status) if code == "exited" and status.isdigit() else None
    signal_number = None
    if code in ("killed", "dumped"):
        signal_number = int(getattr(signal, f"SIG{status}", 0)) or None
    boot_ended(release, last["n"], exit_status, signal_number, os.environ.get("SERVICE_RESULT"))
    return 0


class Supervisor:
    """The small supervisor's loop. One per launch (a flock), also if it is started twice."""

    def __init__(self, release: Release) -> None:
        self.release = release
        asked = release.read()
        self.limit = int(asked.get("restart_limit", 3))
        self.window_s = float(asked.get("restart_window_s", 600.0))
        self.stopping = False
        self.failures: deque[float] = deque()
        self._shown = 0
        self._mask = LogMask(release)

    def run(self) -> int:
        """Runs boots until the server was asked to stop, ended in peace, or failed too often."""
        process.name_process("mtpdeploy-sup")
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Signals are waited for, not handled: nothing is interrupted half-way.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        me = process.identify(os.getpid())
        if me is None:
            return CANNOT_RECORD
        self.release.update(lambda state: state.update(supervising=me.as_json()))
        while not self.stopping:
            if why := refusal(self.release):
                self._say(f"not started again: {why}")
                if not self.release.state().get("stop"):
                    give_up(self.release, why)
                return 0
            began = time.monotonic()
            status, _ = self._one_boot(me)
            if self.stopping or self.release.state().get("stop"):
                return 0
            if status == 0:
                give_up(self.release, "it ended by itself with exit status 0")
                return 0
            if status == REFUSED:
                give_up(self.release, "its arguments were refused (exit status 2)")
                return 0
            if not self._pause(began):
                return 0
        return 0

    def _one_boot(self, me: ProcessId) -> tuple[int | None, int | None]:
        """One start of the server to its end: (exit status, signal)."""
        gate_read, gate_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._child(gate_read, gate_write)
        os.close(gate_read)
        identity = process.identify(pid)
        number = None
        try:
            if identity is None:
                raise OSError("the new process ended at once")
            number = new_boot(
                self.release,
                identity,
                session=pid,
                cgroup=process.cgroup(os.getpid()),
                invocation=None,
                supervisor=me,
            )
            holder = taken(self.release)
            if holder:
                remark(
                    self.release,
                    f"launch {self.release.launch_id} boot {number} utc {utc_now()} refused: port taken: {holder}",
                )
            else:
                os.write(gate_write, f"{number}\n".encode())
        except OSError as error:
            self._say(f"the boot cannot be recorded, so the server is not started: {error}")
            holder = str(error)
        finally:
            os.close(gate_write)  # an empty gate tells the child to leave
        status, signal_number = self._wait(pid)
        why = f"port taken: {holder}" if holder and number else holder
        if number is not None:
            with contextlib.suppress(OSError):
                boot_ended(self.release, number, status, signal_number, why)
        self._say(f"boot {number} ended: exit status {status}, signal {signal_number}")
        self._clear()
        return status, signal_number

    def _child(self, gate_read: int, gate_write: int) -> NoReturn:
        """Between fork and exec: own session, no terminal, and no server before its boot is recorded."""
        try:
            os.close(gate_write)
            os.setsid()
            signal.pthread_sigmask(signal.SIG_SETMASK, set())
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            log = os.open(
                self.release.path / "supervisor.log",
                os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW,
                0o600,
            )
            os.dup2(log, 1)
            os.dup2(log, 2)
            number = os.read(gate_read, 32).strip()
            os.closerange(3, 1024)
            if number:
                execute(self.release, int(number), own_session=True)
        finally:
            os._exit(1)

    def _wait(self, pid: int) -> tuple[int | None, int | None]:
        """Waits for the main process, reaps adopted orphans, shows the log where there is a terminal."""
        wanted = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        showing = sys.stdout.isatty()
        while True:
            while True:
                try:
                    reaped, raw = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    return None, None
                if reaped == 0:
                    break
                if reaped == pid:
                    code = os.waitstatus_to_exitcode(raw)
                    return (None, -code) if code < 0 else (code, None)
            info = signal.sigtimedwait(wanted, 0.5 if showing else 30.0)
            if info and info.si_signo in (signal.SIGTERM, signal.SIGINT):
                # Asked to stop supervising; who asks signals the server itself (see ending.stop).
                self.stopping = True
            if showing:
                self._show()

    def _pause(self, began: float) -> bool:
        """Waits before the next boot. False if there were too many failures, or a stop was asked for."""
        now = time.monotonic()
        if now - began > _HEALTHY_S:
            self.failures.clear()
        self.failures.append(now)
        while self.failures and now - self.failures[0] > self.window_s:
            self.failures.popleft()
        if len(self.failures) > self.limit:
            why = f"it failed {len(self.failures)} times within {self.window_s:.0f} s"
            give_up(self.release, why, crash_loop=True)
            self._say("given up: crash loop")
            return False
        pause = _PAUSES_S[min(len(self.failures), len(_PAUSES_S)) - 1]
        self.release.update(lambda state: state.update(restarting={"utc": utc_now(), "in_s": pause}))
        self._say(f"starting again in {pause:.0f} s ({len(self.failures)} of {self.limit})")
        deadline = now + pause
        while (left := deadline - time.monotonic()) > 0:
            info = signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, min(left, 1.0))
            if info or self.release.state().get("stop"):
                return False
        return True

    def _clear(self) -> None:
        """Ends what a dead main process left behind, so that the next boot finds its GPU memory and port free."""
        deadline = time.monotonic() + _LEFTOVERS_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            left = family.members(self.release)
            if not left:
                return
            for member in left:
                with contextlib.suppress(PermissionError):
                    process.send(member.id, signal.SIGKILL)
            time.sleep(0.1)

    def _say(self, text: str) -> None:
        """A line for the tmux pane or supervisor.log; the pane may be gone."""
        with contextlib.suppress(OSError):
            print(f"mtpdeploy {utc_now()} {self.release.launch_id}: {text}", flush=True)

    def _show(self) -> None:
        """Copies new log text to the terminal."""
        with contextlib.suppress(OSError), open(self.release.log, "rb") as log:
            log.seek(self._shown)
            data = log.read(65536)
            data = data[: len(data) - self._mask.unfinished(data)]
            data = self._mask.clean(data, self.release.log, self._shown, os.fstat(log.fileno()).st_ino)
            self._shown += len(data)
            if data:
                sys.stdout.buffer.write(data)
                sys.stdout.flush()


def supervise(folder: str) -> int:
    """Supervises the release in `folder` (tmux pane, or detached)."""
    path = Path(folder)
    service = Service(path.parent.parent.parent, path.parent.parent.name)
    service.check()
    release = Release(service, path.name)
    descriptor = os.open(
        release.path / ".supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    if not files.try_lock(descriptor):
        print(f"mtpdeploy: launch {release.launch_id} has a supervisor already", file=sys.stderr)
        return 1
    return Supervisor(release).run()
