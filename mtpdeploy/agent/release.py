"""The folders of a service and what they remember.

    <workdir>/<service>/current -> releases/<launch-id>        the launch that is meant
    <workdir>/<service>/releases/<launch-id>/
        release.json   what was asked for: written once, never changed
        number         the how many-th release it is
        launch.sh, env, server.yml, *.service, tmux.sh         as rendered
        state.json     what happened: boots, stop record, proof of readiness
        server.log     all boots of this launch
    <workdir>/<service>/lock.json, journal.jsonl, intent.json

A boot is one start of the server process: {n, pid, start_time, boot_id, machine_id, started_utc, session, cgroup,
invocation_id, log_offset, log_inode, oom_kills, supervisor, ended_utc, exit}. A restart by the supervisor or a reboot of the
host is a new boot of the same launch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mtpdeploy.agent import files, oom, record
from mtpdeploy.agent.clock import utc_now
from mtpdeploy.agent.fault import Fault
from mtpdeploy.agent.process import ProcessId, alive, boot_id, machine_id
from mtpdeploy.agent.protocol import LAUNCH_ID, SERVICE_NAME, InstallFile, ReleaseFile

READY_LINE = b"The server is fired up and ready to roll!"  # http_server.py, 0.5.6 to 0.5.23
_NOT_A_SERVICE = ("agent", "bench")  # neighbours in the work folder
_KEPT_BOOTS = 100
_REQUIRED: dict[str, type] = {"launch_id": str, "service": str, "profile": str, "fingerprint": str, "host": str, "port": int,
                              "python": str, "argv": list, "by": str, "created_utc": str}  # fmt: skip


_AGENT = re.compile(r"\b[0-9a-f]{16}\.pyz")


def unit_name(service: str) -> str:
    """The systemd unit of a service."""
    return f"mtpdeploy-{service}.service"


def work_folder(text: str) -> Path:
    """The work folder named in a request; a leading `~/` is this user's home."""
    path = Path(text).expanduser() if text == "~" or text.startswith("~/") else Path(text)
    if not path.is_absolute() or "\0" in text:
        raise Fault("usage-error", f"workdir must be absolute or begin with ~/, not {text!r}")
    return Path(os.path.normpath(path))


@dataclass(frozen=True, slots=True)
class Service:
    """A service's folder."""

    workdir: Path
    name: str

    @staticmethod
    def of(request: Any) -> Service:
        """The service that a request names. Fault if the name is none."""
        name = request.get("service")
        if not isinstance(name, str) or not SERVICE_NAME.match(name) or name in _NOT_A_SERVICE:
            raise Fault(
                "usage-error",
                f"{name!r} cannot name a service: small letters, digits and hyphens, at most 41, and not "
                f"{' or '.join(_NOT_A_SERVICE)}",
            )
        return Service(work_folder(str(request.get("workdir") or "~/.mtpdeploy")), name)

    @property
    def folder(self) -> Path:
        return self.workdir / self.name

    @property
    def releases(self) -> Path:
        return self.folder / "releases"

    def prepare(self) -> None:
        """Makes the folders, each checked to be this user's own."""
        for path in (self.workdir, self.folder, self.releases):
            files.own_folder(path)

    def check(self) -> None:
        """Fault if a folder that is there is not this user's own."""
        for path in (self.workdir, self.folder, self.releases):
            if os.path.lexists(path):
                files.check_folder(path)

    def current(self) -> Release | None:
        """The launch that is meant, or None if there is none. Fault if `current` is something else than our link."""
        link = self.folder / "current"
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise files.explain(error, f"reading {link}") from None
            raise Fault(
                "remote-error",
                f"{link} is no symbolic link, so it is not known which launch is meant. Nothing was touched",
                evidence=[f"it runs: launch {one.launch_id}" for one in self.living()],
                next_commands=[
                    f"mv {shlex.quote(str(link))} {shlex.quote(str(link))}.aside   # at the host",
                    "mtpdeploy status",
                ],
                runbook="half-finished-deploy",
            ) from None
        launch_id = os.path.basename(target)
        # Read, never followed: a link to elsewhere is none of ours.
        if target != f"releases/{launch_id}" or not LAUNCH_ID.match(launch_id):
            raise Fault(
                "remote-error",
                f"{self.folder / 'current'} points to {target!r}, which is no release of this service",
                next_commands=[f"rm {shlex.quote(str(self.folder / 'current'))}"],
                runbook="half-finished-deploy",
            )
        release = Release(self, launch_id)
        return release if release.path.is_dir() else None

    def release(self, launch_id: str | None) -> Release:
        """That release, or the current one. Fault `not-found` if it is not there."""
        if launch_id is None:
            current = self.current()
            if current is None and len(alone := self.living()) == 1:
                return alone[0]  # `current` is lost, and there is no doubt
            if current is None:
                raise Fault(
                    "not-found",
                    f"nothing is deployed as {self.name} in {self.workdir}",
                    next_commands=["mtpdeploy deploy --host HOST --profile PROFILE"],
                )
            return current
        matches = [r for r in self.history() if r.launch_id == launch_id or r.launch_id.startswith(launch_id)]
        exact = [r for r in matches if r.launch_id == launch_id]
        if len(exact or matches) != 1:
            raise Fault(
                "not-found",
                f"{'no' if not matches else 'more than one'} launch of {self.name} is named {launch_id!r}",
                evidence=[r.launch_id for r in self.history()[:10]],
                next_commands=["mtpdeploy history"],
            )
        return (exact or matches)[0]

    def history(self) -> list[Release]:
        """All releases, the last installed first. A launch's name is no order: its time is another machine's clock."""
        try:
            names = os.listdir(self.releases)
        except OSError:
            return []
        found = [Release(self, name) for name in names if LAUNCH_ID.match(name)]
        return sorted(found, key=lambda release: (release.number(), release.launch_id), reverse=True)

    def before(self, release: Release) -> list[Release]:
        """What was installed before `release`, newest first."""
        everything = self.history()
        return everything[everything.index(release) + 1 :] if release in everything else everything

    def living(self) -> list[Release]:
        """Releases whose recorded main process lives: at most one, unless something went wrong."""
        return [release for release in self.history() if release.main() is not None]


def living_launches(workdir: Path) -> dict[str, list[str]]:
    """Service → launches whose recorded main process lives, of all services in this work folder; only those with one."""
    try:
        names = sorted(os.listdir(workdir))
    except OSError:
        return {}
    found: dict[str, list[str]] = {}
    for name in names:
        if SERVICE_NAME.match(name) and name not in _NOT_A_SERVICE:
            with contextlib.suppress(Fault, OSError):  # a neighbour's damaged record is the neighbour's matter
                if living := Service(workdir, name).living():
                    found[name] = [release.launch_id for release in living]
    return found


@dataclass(frozen=True, slots=True)
class Release:
    """One launch's folder."""

    service: Service
    launch_id: str

    @property
    def path(self) -> Path:
        return self.service.releases / self.launch_id

    @property
    def log(self) -> Path:
        return self.path / "server.log"

    def number(self) -> int:
        """The how many-th release of its service this is; 0 for one from before releases were counted."""
        value = files.read_json(self.path / "number")
        return value if isinstance(value, int) else 0

    def read(self) -> ReleaseFile:
        """release.json. Fault if it is damaged."""
        value = files.read_json(self.path / "release.json")
        if value is None:
            try:
                os.close(os.open(self.path / "release.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
            except PermissionError as error:
                raise files.explain(error, "reading release.json") from None
            except OSError:
                pass  # missing: damaged
        if not isinstance(value, dict) or any(
            not isinstance(value.get(name), kind) for name, kind in _REQUIRED.items()
        ):
            raise Fault(
                "remote-error",
                f"{self.path / 'release.json'} is damaged",
                next_commands=["mtpdeploy deploy --force"],
                runbook="half-finished-deploy",
            )
        return cast(ReleaseFile, value)

    def environment(self) -> dict[str, str]:
        """The variables of the release's `env` file (secrets among them: for use, never for show)."""
        try:
            text = (self.path / "env").read_text()
        except OSError:
            return {}
        return dict(_assignments(text))

    def state(self) -> dict[str, Any]:
        """state.json; an empty state if nothing happened yet. If it is damaged, what can be found again, and `damaged` in it."""
        path = self.path / "state.json"
        value = record.believed(files.read_json(path))
        if value is not None:
            return value
        if not os.path.lexists(path) and not self.log.exists():
            return {"launch_id": self.launch_id, "boots": []}
        return record.found_again(self.launch_id, self.path, unit_name(self.service.name))

    def lacks(self, supervisor: str) -> list[str]:
        """The names of rendered files that a start under this supervisor needs and that are not there."""
        wanted = ["launch.sh", "env"]
        wanted += {"systemd": ["system.service"], "systemd-user": ["user.service"], "tmux": ["tmux.sh"]}.get(
            supervisor, []
        )
        with contextlib.suppress(OSError):
            if "/server.yml" in (self.path / "launch.sh").read_text(errors="replace"):
                wanted.append("server.yml")
        missing = [name for name in wanted if not (self.path / name).is_file()]
        for name in wanted[2:]:  # a unit names the agent that is to start it
            with contextlib.suppress(OSError):
                named = set(_AGENT.findall((self.path / name).read_text(errors="replace")))
                gone = [agent for agent in named if not (self.service.workdir / "agent" / agent).exists()]
                missing += [f"the agent {agent} that {name} names" for agent in gone]
        return missing

    def update(self, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Changes state.json under its own lock and returns the new state. OSError if it cannot be written."""
        with files.guard(self.path / ".state.guard"):
            state = self.state()
            state.pop("damaged", None)  # from here on it is a record again
            change(state)
            boots = state.get("boots", [])
            if len(boots) > _KEPT_BOOTS:
                # The first boot shows how it began, the latest ones what happens now.
                state["boots"] = [boots[0], *boots[-(_KEPT_BOOTS - 1) :]]
            files.replace_json(self.path / "state.json", state)
            return state

    def boots(self) -> list[dict[str, Any]]:
        """The recorded boots, oldest first."""
        boots: list[dict[str, Any]] = self.state().get("boots", [])
        return boots

    def last_boot(self) -> dict[str, Any] | None:
        boots = self.boots()
        return boots[-1] if boots else None

    def main(self) -> ProcessId | None:
        """The main process of the last boot, if exactly that process lives."""
        process = ProcessId.from_json(self.last_boot())
        return process if alive(process) else None

    def supervisor(self) -> ProcessId | None:
        """The agent's small supervisor of this launch (tmux, detached), if it lives."""
        process = ProcessId.from_json(self.state().get("supervising"))
        return process if alive(process) else None

    def was_ready(self) -> bool:
        """Whether any boot of this launch got as far as serving: proven by a generation, or said so in its log."""
        if self.state().get("proven"):
            return True
        try:
            with open(self.log, "rb") as file:
                return any(READY_LINE in line for line in file)
        except OSError:
            return False


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    """NAME='quoted value' words of a shell file, as a shell would read them."""
    try:
        words = shlex.split(text, comments=True, posix=True)
    except ValueError:
        return
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            yield name, value


def new_boot(release: Release, process: ProcessId, *, session: int, cgroup: str | None, invocation: str | None,
             supervisor: ProcessId | None) -> int:  # fmt: skip
    """Records a boot before its server runs, and returns its number. OSError if it cannot be recorded."""
    try:
        log = os.stat(release.log)
        size, inode = log.st_size, log.st_ino
    except OSError:
        size, inode = 0, None
    number = 0

    def change(state: dict[str, Any]) -> None:
        nonlocal number
        boots = state.setdefault("boots", [])
        number = 1 + max((b.get("n", 0) for b in boots), default=0)
        boots.append(
            {
                "n": number,
                **process.as_json(),
                "machine_id": machine_id(),
                "started_utc": utc_now(),
                "session": session,
                "cgroup": cgroup,
                "invocation_id": invocation,
                "supervisor": supervisor.as_json() if supervisor else None,
                "log_offset": size,
                "log_inode": inode,
                "oom_kills": oom.kills(),
                "exit": None,
                "ended_utc": None,
            }
        )

    release.update(change)
    return number


def boot_ended(release: Release, number: int, status: int | None, signal_number: int | None, why: str | None) -> None:
    """Records how a boot ended. Called in the control group in which it ran: a kill for memory is counted there."""
    failed = bool(status) or signal_number is not None

    def change(state: dict[str, Any]) -> None:
        for boot in state.get("boots", []):
            if boot.get("n") == number and boot.get("ended_utc") is None:
                boot["ended_utc"] = utc_now()
                result = oom.WORD if failed and oom.more_than(boot.get("oom_kills")) else why
                boot["exit"] = {"status": status, "signal": signal_number, "result": result}

    release.update(change)


def install(service: Service, release: ReleaseFile, contents: list[InstallFile], values: dict[str, str]) -> Release:
    """Writes a release beside the others; it is there as a whole or not at all. `current` does not move yet.

    values: what stands for @@NAME@@ in the files that the host completes, quoted by `complete`.
    """
    launch_id = str(release.get("launch_id"))
    if not LAUNCH_ID.match(launch_id) or release.get("service") != service.name:
        raise Fault("usage-error", f"release.json names launch {launch_id!r} of service {release.get('service')!r}")
    if missing := [name for name in _REQUIRED if name not in release]:
        raise Fault("usage-error", f"release.json lacks {', '.join(missing)}")
    target = Release(service, launch_id)
    if os.path.lexists(target.path):
        raise Fault("remote-error", f"launch {launch_id} is there already; a launch is installed once")
    service.prepare()
    aside = service.releases / f".{launch_id}.{os.getpid()}.new"
    try:
        os.mkdir(aside, 0o700)
        for item in contents:
            name, mode = str(item["path"]), int(item["mode"])
            if name != os.path.basename(name) or name in (
                "",
                ".",
                "..",
                "number",
                "release.json",
                "state.json",
                "server.log",
            ):
                raise Fault("usage-error", f"{name!r} cannot be a file of a release")
            if mode & ~0o755:
                raise Fault("usage-error", f"mode {mode:o} of {name} is more than 755")
            text = complete(name, str(item["content"]), values | {"RELEASE": str(target.path)})
            files.write_new(aside / name, text.encode("utf-8", "surrogateescape"), mode)
        number = 1 + max((one.number() for one in service.history()), default=0)
        files.write_new(aside / "number", f"{number}\n".encode(), 0o600)
        files.write_new(aside / "release.json", (json.dumps(release, indent=1) + "\n").encode(), 0o600)
        files.sync_folder(aside)
        os.rename(aside, target.path)
        files.sync_folder(service.releases)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise files.explain(error, f"writing the release {launch_id}") from None
    except Fault:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


def complete(name: str, text: str, values: dict[str, str]) -> str:
    """Fills in what the host alone knows, quoted for the language of the file. Other files stay as they are."""
    quote: Callable[[str], str]
    if name.endswith(".service"):
        quote = systemd_quote
    elif name == "tmux.sh":
        quote = shlex.quote
    else:
        return text
    for key, value in values.items():
        text = text.replace(f"@@{key}@@", quote(value)).replace(f"@@{key}_PLAIN@@", systemd_path(value))
    return text


def systemd_quote(word: str) -> str:
    """One word of an ExecStart line: `%` starts a specifier, `$` a variable, quotes and backslashes an escape."""
    if any(ord(c) < 0x20 or ord(c) == 0x7F for c in word):
        raise Fault("usage-error", f"{word!r} holds a control character; systemd takes no such path")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def systemd_path(word: str) -> str:
    """A value of a setting that is no command line, such as WorkingDirectory=: only `%` is special there."""
    if any(ord(c) < 0x20 or ord(c) == 0x7F for c in word):
        raise Fault("usage-error", f"{word!r} holds a control character; systemd takes no such path")
    return word.replace("%", "%%")


def flip(release: Release) -> None:
    """Makes `release` the current one, in one step."""
    try:
        files.point(release.service.folder / "current", f"releases/{release.launch_id}")
    except OSError as error:
        raise files.explain(error, "moving `current`") from None


def sweep(service: Service) -> list[str]:
    """Removes what an interrupted install left aside; called under the lock, so nobody is writing there."""
    removed = []
    with contextlib.suppress(OSError):
        for name in os.listdir(service.releases):
            if name.startswith(".") and name.endswith(".new"):
                shutil.rmtree(service.releases / name, ignore_errors=True)
                removed.append(name)
    return removed


def host_rebooted_since(boot: dict[str, Any]) -> bool:
    """Whether the host was booted anew after this boot of the server (on this machine)."""
    return boot.get("boot_id") != boot_id() and boot.get("machine_id") in (None, machine_id())


def elsewhere(boot: dict[str, Any]) -> bool:
    """Whether this boot was recorded by another machine that shares the work folder."""
    return boot.get("machine_id") not in (None, machine_id())
