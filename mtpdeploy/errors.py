"""Everything that may go wrong for a foreseeable reason, with its exit code.

    MtpError                       1   (never raised itself)
    ├── UsageError                 2   an option or argument that cannot be meant
    ├── ConfigError                3   inventory, profile, workload or --set: file, key, what is wrong, what would be right
    ├── PlanRefused                4   SGLang would refuse or kill this launch; nothing was touched
    ├── HostUnreachable            5   no connection
    │   └── HostKeyRefused         5   unknown or changed host key
    ├── RemoteError                6   the host answered and a step there failed
    │   └── LineCut                6   the connection went silent in the middle; what is known of the host is said
    ├── HostLocked                 7   somebody else is changing this service
    ├── LaunchFailed               8   SGLang died or was killed before it was ready: cause, evidence, next command
    ├── NotReady                   9   the time limit passed while it was still loading
    ├── NotOurs                   10   what answers is stale or foreign
    ├── Differs                   11   verify: the effective arguments are not the requested ones
    ├── CannotTell                12   verify, compare: the evidence does not decide
    ├── BenchInvalid              13   the measurement broke a rule that makes its numbers meaningless
    └── NotFound                  14   no such run, launch, file or host

130 is an interrupt. Codes are stable; docs/messages.md explains each class and a test holds the two together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_ENDLESS = re.compile(r"\S{1000,}")


class MtpError(Exception):
    """A foreseeable failure. `message` is for a person at 3 a.m.; the rest helps them on.

    evidence:  literal lines (of a log, of a command) that decide it, oldest first
    next_commands: what to type next, ready to paste
    runbook:   the name of a page in docs/runbooks/ without its suffix
    details:   JSON-able facts for --json
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        evidence: Sequence[str] = (),
        next_commands: Sequence[str] = (),
        runbook: str | None = None,
        details: dict[str, object] | None = None,
    ) -> None:
        # A value that is repeated back may be anything: a word of a whole page hides the sentence around it.
        message = _ENDLESS.sub(lambda word: f"{word[0][:80]}…", message)
        super().__init__(message)
        self.message = message
        self.evidence = tuple(evidence)
        self.next_commands = tuple(next_commands)
        self.runbook = runbook
        self.details = dict(details or {})

    @property
    def kind(self) -> str:
        """A stable slug of the class, as printed in JSON: `LaunchFailed` → `launch-failed`."""
        name = type(self).__name__
        return "".join(f"-{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))

    def as_json(self) -> dict[str, object]:
        return {
            "error": self.kind,
            "exit_code": self.exit_code,
            "message": self.message,
            "evidence": list(self.evidence),
            "next_commands": list(self.next_commands),
            "runbook": self.runbook and f"docs/runbooks/{self.runbook}.md",
            **({"details": self.details} if self.details else {}),
        }


class UsageError(MtpError):
    """An option or argument that cannot be meant."""

    exit_code = 2


class ConfigError(MtpError):
    """A file or setting is wrong: the message names file, key path, what is wrong and what would be right."""

    exit_code = 3


class PlanRefused(MtpError):
    """SGLang of that version would refuse or kill this launch. Nothing was touched."""

    exit_code = 4


class HostUnreachable(MtpError):
    """No connection to the host."""

    exit_code = 5


class HostKeyRefused(HostUnreachable):
    """The host's key is unknown or has changed."""


class RemoteError(MtpError):
    """The host answered, and a step there failed."""

    exit_code = 6


class LineCut(RemoteError):
    """The connection went silent in the middle of a command; the command may go on at the host."""


class HostLocked(MtpError):
    """Somebody else holds the service's lock: who, since when, why."""

    exit_code = 7


class LaunchFailed(MtpError):
    """SGLang ended before it was ready."""

    exit_code = 8


class NotReady(MtpError):
    """The time limit passed while the server was still starting."""

    exit_code = 9


class NotOurs(MtpError):
    """What answers on the port was not started by the launch in question."""

    exit_code = 10


class Differs(MtpError):
    """The effective arguments are not the requested ones."""

    exit_code = 11


class CannotTell(MtpError):
    """The evidence does not decide."""

    exit_code = 12


class BenchInvalid(MtpError):
    """The measurement broke a rule that makes its numbers meaningless."""

    exit_code = 13


class NotFound(MtpError):
    """No such run, launch, file or host."""

    exit_code = 14
