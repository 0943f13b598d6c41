"""The four ways to keep a server alive, which of them this host has, and how each is started and stopped.

What lives after logout depends on the host: with logind's KillUserProcesses=yes everything in a login session is
killed, and `systemd --user` without linger ends ten seconds after the last logout. Only something under systemd itself, or under
user@.service with linger, lives everywhere; only an enabled unit comes back after a reboot.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpdeploy.agent import files, process
from mtpdeploy.agent.command import Done, Root, run
from mtpdeploy.agent.fault import Fault
from mtpdeploy.agent.protocol import SupervisorKind
from mtpdeploy.agent.release import Release, unit_name

ORDER: tuple[SupervisorKind, ...] = ("systemd", "systemd-user", "tmux", "detached")
_SYSTEM_UNITS = Path("/etc/systemd/system")
_BOOT_WAIT_S = 20.0


def agent_command() -> list[str]:
    """How this agent is called again. -I -S: nothing of the user's Python set-up can change what it does."""
    program = os.path.abspath(sys.argv[0])
    if program.endswith(".pyz"):
        return [sys.executable, "-I", "-S", program]
    return [sys.executable, "-m", "mtpdeploy.agent"]


def file_values(release_service_folder: Path) -> dict[str, str]:
    """What stands for @@NAME@@ in the files that the host completes (see release.complete)."""
    return {
        "PYTHON": sys.executable,
        "AGENT": os.path.abspath(sys.argv[0]),
        "SERVICE_DIR": str(release_service_folder),
        "USER": process.user_name(os.geteuid()),
    }


# ---------------------------------------------------------------- what the host has


def survey(root: Root) -> dict[str, Any]:
    """{systemd, sudo, user_manager, linger, kill_user_processes, in_session, tmux, session_why}: bools, None = unknown."""
    systemd = os.path.isdir("/run/systemd/system")
    user = process.user_name(os.geteuid())
    in_session = "/session-" in (process.cgroup(os.getpid()) or "")
    return {
        "systemd": systemd,
        "sudo": root.way() if systemd else ("root" if os.geteuid() == 0 else None),
        "user_manager": systemd and user_manager_answers(),
        "linger": os.path.exists(f"/var/lib/systemd/linger/{user}"),
        "kill_user_processes": kill_user_processes(user) if systemd else False,
        "in_session": in_session,
        "tmux": tmux_version(),
    }


def tmux_version() -> str | None:
    """`tmux 3.3a` → `3.3a`; None without tmux."""
    if shutil.which("tmux") is None:
        return None
    done = run(["tmux", "-V"], timeout_s=5)
    return done.out.strip().removeprefix("tmux ").strip() or None if done.ok else None


def _user_env() -> dict[str, str]:
    """`systemctl --user` needs to know where the user's manager listens; a plain exec may not have been told."""
    return {"XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"}


def user_manager_answers() -> bool:
    """Whether `systemctl --user` works here."""
    if not os.path.exists(_user_env()["XDG_RUNTIME_DIR"] + "/systemd/private"):
        return False
    done = run(["systemctl", "--user", "is-system-running"], env=_user_env(), timeout_s=5)
    return done.out.strip() in ("running", "degraded", "starting", "initializing")


def kill_user_processes(user: str) -> bool | None:
    """Whether logind kills this user's processes at logout: its property, and who is exempt."""
    values: dict[str, str] = {}
    for name in ("KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers"):
        done = run(
            ["busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1",
             "org.freedesktop.login1.Manager", name],
            timeout_s=5,
        )  # fmt: skip
        if not done.ok:
            return None
        values[name] = done.out.strip()
    if values["KillUserProcesses"] != "b true":
        return False
    # `as 1 "root"`
    if f'"{user}"' in values["KillExcludeUsers"]:
        return False
    only = values["KillOnlyUsers"]
    return only.startswith("as 0") or f'"{user}"' in only


def enable_linger(root: Root) -> str | None:
    """Turns linger on for this user, where the host allows it. None if it is on now, else why not."""
    user = process.user_name(os.geteuid())
    done = run(["loginctl", "enable-linger"], timeout_s=10)
    if not done.ok and root.way() in ("root", "passwordless", "password"):
        done = root.run(["loginctl", "enable-linger", user], timeout_s=10)
    if not done.ok:
        return done.said
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if user_manager_answers():
            return None
        time.sleep(0.1)
    return "linger is on, but the user's systemd did not start within 5 s"


# ---------------------------------------------------------------- which one


@dataclass(frozen=True, slots=True)
class Choice:
    """A supervisor, why it was chosen, and what the server survives under it."""

    kind: SupervisorKind
    why: str
    survives: dict[str, bool]
    scope: bool = False  # tmux, detached: inside a lingering user scope

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "why": self.why, "survives": self.survives, "scope": self.scope}


_ALL = {"logout": True, "crash": True, "reboot": True}
_NO_REBOOT = {"logout": True, "crash": True, "reboot": False}


def choose(asked: str, found: dict[str, Any], root: Root) -> Choice:
    """The supervisor asked for, or for `auto` the best that this host has. Fault `plan-refused` if it would not survive."""
    reasons: list[str] = []
    for kind in ORDER if asked == "auto" else (asked,):
        choice, why_not = _consider(kind, found, root, explicit=asked != "auto")
        if choice is not None:
            why = "; ".join([choice.why, *reasons])
            return Choice(choice.kind, why, choice.survives, choice.scope)
        reasons.append(f"not {kind}: {why_not}")
    user = process.user_name(os.geteuid())
    raise Fault(
        "plan-refused",
        f"no supervisor on this host would keep the server alive ({'; '.join(reasons)})"
        if asked == "auto"
        else f"supervisor {asked} cannot be used here: {reasons[0].partition(': ')[2]}",
        next_commands=[f"sudo loginctl enable-linger {user}   # at the host, once", "mtpdeploy doctor --host HOST"],
        runbook="tmux-session-lost",
        details={"supervisors": found},
    )


def _consider(kind: str, found: dict[str, Any], root: Root, *, explicit: bool) -> tuple[Choice | None, str]:
    if kind == "systemd":
        if not found["systemd"]:
            return None, "systemd does not run this host"
        if found["sudo"] not in ("root", "passwordless", "password"):
            needed = (
                "sudo asks for a password (--ask-sudo gives it)" if found["sudo"] == "asks" else "no root and no sudo"
            )
            return None, needed
        return Choice("systemd", f"a system unit survives logout, crash and reboot ({found['sudo']})", _ALL), ""
    if kind == "systemd-user":
        if not found["systemd"]:
            return None, "systemd does not run this host"
        if os.geteuid() == 0 and not explicit:
            return None, "root has system units"
        if not found["linger"] and (why_not := enable_linger(root)):
            return (
                None,
                f"linger is off and cannot be turned on ({why_not}): a user unit would end with the last logout",
            )
        if not user_manager_answers():
            return None, "the user's systemd does not answer"
        how = "linger is on" if found["linger"] else "linger was turned on for this user"
        return Choice("systemd-user", f"a user unit with linger survives logout, crash and reboot ({how})", _ALL), ""
    scope = bool(found["linger"] and found["user_manager"] and os.geteuid() != 0)
    dies = found["kill_user_processes"] and found["in_session"]
    if kind == "tmux":
        if found["tmux"] is None:
            return None, "tmux is not installed"
        if dies and not scope:
            return None, "logind kills this user's processes at logout (KillUserProcesses=yes) and linger is off"
        return Choice("tmux", f"tmux {found['tmux']} survives logout here, not a reboot", _NO_REBOOT, scope), ""
    if kind == "detached":
        if dies and not scope:
            return None, "logind kills this user's processes at logout (KillUserProcesses=yes) and linger is off"
        return Choice("detached", "a detached process survives logout here, not a reboot", _NO_REBOOT, scope), ""
    raise Fault("usage-error", f"supervisor must be auto, {', '.join(ORDER)}, not {kind!r}")


# ---------------------------------------------------------------- starting


def start(release: Release, choice: Choice, root: Root) -> dict[str, Any]:
    """Starts the current release under the chosen supervisor and waits until its boot is recorded. Returns that boot."""
    before = max((b["n"] for b in release.boots()), default=0)

    def asked(state: dict[str, Any]) -> None:
        state.update(supervisor=choice.as_json(), asked_from=before + 1, stop=None, gave_up=None, restarting=None)

    try:
        release.update(asked)
    except OSError as error:
        raise files.explain(error, "recording the start") from None
    {"systemd": _start_unit, "systemd-user": _start_unit, "tmux": _start_tmux, "detached": _start_detached}[
        choice.kind
    ](release, choice, root)
    deadline = time.monotonic() + _BOOT_WAIT_S
    while time.monotonic() < deadline:
        last = release.last_boot()
        if last and last["n"] > before:
            return last
        time.sleep(0.02)
    raise Fault(
        "remote-error",
        f"{choice.kind} did not bring up launch {release.launch_id} within {_BOOT_WAIT_S:.0f} s",
        evidence=evidence(release, choice.kind, root),
        next_commands=["mtpdeploy doctor", "mtpdeploy logs"],
        runbook="half-finished-deploy",
    )


def _systemctl(kind: str, root: Root, *words: str, timeout_s: float = 60.0) -> Done:
    if kind == "systemd-user":
        return run(["systemctl", "--user", *words], env=_user_env(), timeout_s=timeout_s)
    return root.run(["systemctl", *words], timeout_s=timeout_s)


def _unit_path(kind: str, service: str) -> Path:
    if kind == "systemd":
        return _SYSTEM_UNITS / unit_name(service)
    home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    return Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "systemd" / "user" / unit_name(service)


def _start_unit(release: Release, choice: Choice, root: Root) -> None:
    """Installs the unit if it changed, enables and starts it."""
    kind, unit = choice.kind, unit_name(release.service.name)
    source = release.path / ("system.service" if kind == "systemd" else "user.service")
    path = _unit_path(kind, release.service.name)
    try:
        wanted = source.read_bytes()
    except OSError as error:
        raise files.explain(error, f"reading the rendered unit {source.name}") from None
    there = path.read_bytes() if path.is_file() else None
    if there is not None and f"{release.service.folder}".replace("%", "%%").encode() not in there:
        raise Fault(
            "not-ours",
            f"{path} is there and belongs to another work folder; choose another `service` name",
            evidence=[line.decode(errors="replace") for line in there.splitlines() if line.startswith(b"ExecStart")],
        )
    if there != wanted:
        if kind == "systemd":
            _must(
                root.run(["install", "-m", "0644", "-o", "root", "-g", "root", "-T", str(source), f"{path}.new"]), path
            )
            _must(root.run(["mv", "-fT", f"{path}.new", str(path)]), path)
        else:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.replace(path, wanted, 0o644)
            except OSError as error:
                raise files.explain(error, "writing the user unit") from None
        _must(_systemctl(kind, root, "daemon-reload"), path)
    _must(_systemctl(kind, root, "enable", unit), path)
    _systemctl(kind, root, "reset-failed", unit)
    done = _systemctl(kind, root, "start", unit)
    if not done.ok:
        raise Fault(
            "remote-error",
            f"systemctl start {unit} failed: {done.said}",
            evidence=evidence(release, kind, root),
            next_commands=[f"systemctl {'--user ' if kind == 'systemd-user' else ''}status {unit}"],
            runbook="half-finished-deploy",
        )


def _must(done: Done, path: Path) -> None:
    if not done.ok:
        raise Fault("remote-error", f"installing {path} failed: {done.said}", runbook="half-finished-deploy")


def _in_scope(release: Release, argv: list[str]) -> list[str]:
    """`argv` inside a scope of the user's manager, so that it is no part of the login session."""
    name = f"mtpdeploy-{release.service.name}-{release.launch_id.lower()}-{os.getpid()}.scope"
    return ["systemd-run", "--user", "--scope", "--quiet", "--collect", f"--unit={name}", "--", *argv]


def tmux_socket(service: str) -> str:
    """The name of the service's own tmux socket (`tmux -L NAME attach`)."""
    return f"mtpdeploy-{service}"


def _start_tmux(release: Release, choice: Choice, root: Root) -> None:
    socket = tmux_socket(release.service.name)
    run(["tmux", "-L", socket, "kill-server"], timeout_s=10)
    deadline = time.monotonic() + 5
    # A new server right after kill-server dies with the old one's socket; wait until nobody answers there.
    while run(["tmux", "-L", socket, "list-sessions"], timeout_s=5).ok and time.monotonic() < deadline:
        time.sleep(0.05)
    argv = ["/bin/sh", str(release.path / "tmux.sh")]
    done = run(
        _in_scope(release, argv) if choice.scope else argv, env=_user_env() if choice.scope else None, timeout_s=20
    )
    if not done.ok:
        raise Fault("remote-error", f"tmux did not start: {done.said}", runbook="tmux-session-lost")


def _start_detached(release: Release, choice: Choice, root: Root) -> None:
    """Double fork and setsid: the supervisor's parent is PID 1, it has no terminal and no session of ours."""
    argv = [*agent_command(), "supervise", str(release.path)]
    if choice.scope:
        argv = _in_scope(release, argv)
    program = shutil.which(argv[0]) or argv[0]
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.chdir("/")
        nothing = os.open(os.devnull, os.O_RDWR)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        log = os.open(release.path / "supervisor.log", flags, 0o600)
        os.dup2(nothing, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, 1024)
        os.execve(program, argv, {**os.environ, **(_user_env() if choice.scope else {})})
    finally:
        os._exit(127)


# ---------------------------------------------------------------- stopping and asking


def ask_to_stop(release: Release, kind: str | None, root: Root) -> bool:
    """Tells the supervisor to start nothing more. True if it has also signalled the main process (systemd does)."""
    if kind in ("systemd", "systemd-user"):
        _systemctl(kind, root, "disable", unit_name(release.service.name))
        done = _systemctl(kind, root, "stop", "--no-block", unit_name(release.service.name))
        return done.ok
    import signal

    keeper = release.supervisor()
    if keeper is not None:
        with contextlib.suppress(PermissionError):
            process.send(keeper, signal.SIGTERM)
    return False


def retire(previous: Release, kind: str, root: Root) -> None:
    """Keeps an earlier launch's unit from coming back at the next boot of the host, if another supervisor takes over."""
    before = (previous.state().get("supervisor") or {}).get("kind")
    if before in ("systemd", "systemd-user") and before != kind:
        _systemctl(before, root, "disable", unit_name(previous.service.name))


def kill_unit(release: Release, kind: str | None, root: Root) -> None:
    """SIGKILL to everything in the service's unit."""
    if kind in ("systemd", "systemd-user"):
        _systemctl(kind, root, "kill", "--signal=SIGKILL", unit_name(release.service.name))


def tidy(release: Release, kind: str | None, root: Root) -> None:
    """After a stop: no failed state left over, no dead tmux pane."""
    if kind in ("systemd", "systemd-user"):
        deadline = time.monotonic() + 10
        while (
            unit_state(release, kind).get("ActiveState") in ("deactivating", "active") and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        _systemctl(kind, root, "reset-failed", unit_name(release.service.name))
    elif kind == "tmux":
        run(["tmux", "-L", tmux_socket(release.service.name), "kill-server"], timeout_s=10)


def unit_state(release: Release, kind: str | None) -> dict[str, str]:
    """systemd's view of the unit; empty for other supervisors. Reading needs no root."""
    if kind not in ("systemd", "systemd-user"):
        return {}
    names = (
        "LoadState,ActiveState,SubState,Result,NRestarts,MainPID,ExecMainCode,ExecMainStatus,InvocationID,UnitFileState"
    )
    words = ["show", unit_name(release.service.name), f"--property={names}"]
    manager, env = (["--user"], _user_env()) if kind == "systemd-user" else ([], None)
    done = run(["systemctl", *manager, *words], env=env, timeout_s=10)
    pairs = (line.partition("=") for line in done.out.splitlines() if "=" in line)
    return {name: value for name, _, value in pairs}


def evidence(release: Release, kind: str | None, root: Root) -> list[str]:
    """What the supervisor itself has to say about a launch that did not come up."""
    lines: list[str] = []
    if kind in ("systemd", "systemd-user"):
        words = ["--no-pager", "--full", "-n", "20", "status", unit_name(release.service.name)]
        done = _systemctl(kind, root, *words)
        lines += (done.out or done.err).splitlines()[-30:]
    elif kind == "tmux":
        done = run(["tmux", "-L", tmux_socket(release.service.name), "capture-pane", "-p", "-t", release.service.name])
        lines += [line for line in (done.out or done.err).splitlines() if line.strip()][-20:]
    with contextlib.suppress(OSError):
        lines += (release.path / "supervisor.log").read_text(errors="replace").splitlines()[-20:]
    return lines
