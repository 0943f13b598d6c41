"""The one exception of the agent: it becomes the `error` line and, at the other end, a class of mtpdeploy.errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Fault(Exception):
    """A foreseeable failure. `kind` is the slug of a class of mtpdeploy.errors."""

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        evidence: Sequence[str] = (),
        next_commands: Sequence[str] = (),
        runbook: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.evidence = list(evidence)
        self.next_commands = list(next_commands)
        self.runbook = runbook
        self.details = details or {}

    def as_event(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "message": self.message,
            "evidence": self.evidence,
            "next_commands": self.next_commands,
            "runbook": self.runbook,
            "details": self.details,
        }
