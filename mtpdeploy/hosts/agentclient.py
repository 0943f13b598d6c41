"""Talks to the agent: one exec a stage, JSON events back, and silence understood as a cut line."""

from __future__ import annotations

import contextlib
import getpass
import json
import shlex
import socket
from collections.abc import Callable, Iterator
from typing import Any

from mtpdeploy import errors
from mtpdeploy.agent import protocol
from mtpdeploy.errors import LineCut, MtpError, RemoteError
from mtpdeploy.hosts.transport import Channel, Transport
from mtpdeploy.hosts.zipapp import agent

Event = dict[str, Any]
FIRST_ANSWER_S = 60.0  # a cold disk, a slow PAM module; heartbeats begin once the agent runs

# Begins in the unpacked agent beside its zip. Python runs a zip or a folder through runpy and would compile each file of a zip anew.
# Nearly full disks get no compiled files: see mtpdeploy.agent.zipmain.
_START = (
    "import os, sys; sys.argv[:2] = sys.argv[1:2]; sys.path.insert(0, sys.argv[0] + '.d'); f = os.statvfs(sys.argv[0]); "
    "sys.dont_write_bytecode = f.f_bavail * f.f_frsize < 16777216; "
    "from mtpdeploy.agent.__main__ import main; sys.exit(main(sys.argv[1:]))"
)

# Runs the agent if it is there. $1 work folder, $2 wanted Python, $3 agent's name, then the agent's own words.
_RUN = f"""\
echo
w=$1; p=$2; a=$3; shift 3
case $w in "~/"*) w=$HOME/${{w#"~/"}};; esac
case $p in "~/"*) p=$HOME/${{p#"~/"}};; esac
command -v "$p" >/dev/null 2>&1 || p=python3
command -v "$p" >/dev/null 2>&1 || {{ echo '{{"event":"no-python"}}'; exit 0; }}
[ -f "$w/agent/$a.pyz" ] || {{ echo '{{"event":"no-agent"}}'; exit 0; }}
[ -d "$w/agent/$a.pyz.d" ] && exec "$p" -I -S -c "{_START}" "$w/agent/$a.pyz" "$@"
exec "$p" -I -S "$w/agent/$a.pyz" "$@"
"""

# Reads the agent from stdin, writes it aside, checks it, renames it, and becomes it. What follows on stdin is its request.
_INSTALL = """\
import hashlib, os, sys
work, name, size, wanted = os.path.expanduser(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
if sys.version_info < (3, 10):
    print('{"event":"old-python","version":"%d.%d"}' % sys.version_info[:2]); sys.exit(0)
data = b""
while len(data) < size:
    part = os.read(0, size - len(data))
    if not part:
        print('{"event":"error","kind":"remote-error","message":"the agent did not arrive whole: what was sent ended after '
            '%d of %d bytes. A login script of the host that reads standard input takes it away","next_commands":'
            '["ssh HOST cat < /etc/hostname   # must print the name of the host"]}' % (len(data), size)); sys.exit(0)
    data += part
if hashlib.sha256(data).hexdigest() != wanted: sys.exit("the agent arrived damaged")
folder = os.path.join(work, "agent"); path = os.path.join(folder, name + ".pyz"); aside = "%s.%d" % (path, os.getpid())
try:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data); file.flush(); os.fsync(file.fileno())
        os.rename(aside, path)
    except OSError:
        if os.path.exists(aside): os.unlink(aside)
        raise
except OSError as error:
    import json
    print(json.dumps({"event": "error", "kind": "remote-error",
        "message": "the agent cannot be written to %s: %s" % (folder, (error.strerror or str(error)).lower()),
        "next_commands": [("ls -ld " if isinstance(error, PermissionError) else "df -h ") + work,
            "set `workdir` to a folder of this user with room"]}))
    sys.exit(0)
os.execv(sys.executable, [sys.executable, "-I", "-S", path] + sys.argv[5:])
"""

_BOOTSTRAP = """\
echo
p=$1; i=$2; shift 2
case $p in "~/"*) p=$HOME/${p#"~/"};; esac
command -v "$p" >/dev/null 2>&1 || p=python3
exec "$p" -I -S -c "$i" "$@"
"""


class AgentClient:
    """The agent of one service at one host."""

    def __init__(self, transport: Transport, *, workdir: str, service: str, python: str) -> None:
        self.transport = transport
        self.workdir, self.service, self.python = workdir, service, python

    def call(
        self,
        verb: protocol.Verb,
        request: protocol.Request | None = None,
        *,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> dict[str, Any]:
        """One stage at the host; the result's own keys.

        on_event is told everything but heartbeats as it arrives. Raises the error that the agent names, LineCut if the
        line went silent, RemoteError if the host cannot run the agent.
        """
        asked: Any = {
            "protocol": protocol.PROTOCOL,
            "workdir": self.workdir,
            "service": self.service,
            "client": whoami(),
            **(request or {}),
        }
        word = protocol.to_argument(asked)
        frame = None if word else protocol.to_frame(asked)
        packed = agent()
        command = _sh(_RUN, self.workdir, self.python, packed.digest, verb, word or "-")
        result = self._converse(verb, command, frame, on_event)
        if result is None:
            command = _sh(
                _BOOTSTRAP,
                self.python,
                _INSTALL,
                self.workdir,
                packed.digest,
                str(len(packed.content)),
                packed.sha256,
                verb,
                word or "-",
            )
            result = self._converse(verb, command, packed.content + (frame or b""), on_event)
        if result is None:
            raise RemoteError(f"{self.transport.host.name}: the agent was sent and is not there afterwards")
        return result

    def _converse(
        self, verb: str, command: str, stdin: bytes | None, on_event: Callable[[Event], None]
    ) -> dict[str, Any] | None:
        """Runs one command and hears it out. None: the agent is missing at the host."""
        name = self.transport.host.name
        channel = self.transport.exec(command)
        try:
            if stdin is not None:
                with contextlib.suppress(OSError):  # it did not want it; what it says next tells why
                    channel.send(stdin)
            channel.finish()
            greeting: list[str] = []
            for event in self._events(channel, verb, greeting):
                kind = event.pop("event", None)
                if kind == "result":
                    return event
                if kind == "error":
                    raise from_event(event, name)
                if kind == "no-agent":
                    return None
                if kind == "no-python":
                    raise RemoteError(
                        f"{name} has neither {self.python!r} nor python3; the agent needs Python 3.10 or newer",
                        next_commands=[
                            "set `python:` or `venv:` of this host in the inventory to SGLang's interpreter"
                        ],
                        runbook="server-never-ready",
                    )
                if kind == "old-python":
                    raise RemoteError(
                        f"{name}: {self.python} is Python {event['version']}; the agent needs 3.10 or newer"
                    )
                if kind != "heartbeat":
                    on_event({"event": kind, **event})
            status = channel.exit_status(5.0)
            said = channel.stderr().strip().splitlines()
            if status is None:
                raise self._cut(verb, "the connection was lost")
            raise RemoteError(
                f"{name}: the agent ended without an answer to {verb} (exit status {status})",
                evidence=[*greeting[-5:], *said[-10:]],
                next_commands=[
                    f"mtpdeploy doctor --host {name}",
                    f"ssh {name} sh -c true; echo $?   # must print 0 and nothing else",
                ],
            )
        finally:
            channel.close()

    def _events(self, channel: Channel, verb: str, greeting: list[str]) -> Iterator[Event]:
        """What is no event is put into `greeting`: what a login script or a refusing shell prints."""
        rest, limit = b"", FIRST_ANSWER_S
        while True:
            try:
                data = channel.receive(limit)
            except TimeoutError:
                raise self._cut(verb, f"nothing was heard for {limit:.0f} s") from None
            except OSError as error:
                raise self._cut(verb, str(error)) from error
            if not data:
                if rest.strip():
                    greeting.append(
                        "".join(c if c.isprintable() else " " for c in rest[:200].decode(errors="replace")).strip()
                    )
                return
            limit = protocol.SILENT_S
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    event = None
                if isinstance(event, dict) and "event" in event:
                    yield event
                elif text := "".join(
                    c if c.isprintable() else " " for c in line[:200].decode(errors="replace")
                ).strip():
                    greeting[:] = [*greeting[-4:], text]

    def _cut(self, verb: str, why: str) -> LineCut:
        name = self.transport.host.name
        changing = verb in ("deploy", "start", "stop", "rollback", "install", "prune", "adopt")
        return LineCut(
            f"{name}: the line was cut during {verb}: {why}. "
            + (
                "The agent finishes its step at the host without us; how it ended is not known here."
                if changing
                else "What runs at the host was not touched."
            ),
            next_commands=[f"mtpdeploy status --host {name}", f"mtpdeploy logs --host {name} --follow"],
            runbook="half-finished-deploy" if changing else None,
        )


def from_event(event: Event, host: str) -> MtpError:
    """The agent's error as one of ours, with the host in front."""
    kinds = {cls.__new__(cls).kind: cls for cls in _tree(MtpError)}
    made = kinds.get(str(event.get("kind")), RemoteError)
    return made(
        f"{host}: {event.get('message', 'failed without a word')}",
        evidence=[str(line) for line in event.get("evidence") or ()],
        next_commands=[_for_host(str(line), host) for line in event.get("next_commands") or ()],
        runbook=event.get("runbook"),
        details=event.get("details"),
    )


def _for_host(command: str, host: str) -> str:
    """The agent does not know what the client calls its host."""
    command = command.replace("--host HOST", f"--host {shlex.quote(host)}")
    if command.startswith("mtpdeploy ") and "--host" not in command:
        words, gap, remark = command.partition("   #")
        return f"{words} --host {shlex.quote(host)}{gap}{remark}"
    return command


def _tree(cls: type[errors.MtpError]) -> Iterator[type[errors.MtpError]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _tree(below)


def _sh(script: str, *words: str) -> str:
    """A command line that runs `script` under sh whatever the login shell is."""
    return shlex.join(["sh", "-c", script, "sh", *words])


def whoami() -> str:
    """user@host of the person's machine, for the lock, the journal and the release."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
