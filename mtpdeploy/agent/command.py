"""Runs the host's own tools: argument lists only, a limit on time, and what they said kept."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from mtpdeploy.agent.fault import Fault


@dataclass(frozen=True, slots=True)
class Done:
    """A finished command. `code` None: it could not be run, or took too long (`err` says which)."""

    code: int | None
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def said(self) -> str:
        """What it said last, in one line."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1][:300] if lines else f"exit status {self.code}"


def run(
    argv: Sequence[str],
    *,
    timeout_s: float = 20.0,
    env: dict[str, str] | None = None,
    stdin: str | None = None,
    cwd: str | None = None,
) -> Done:
    """Runs `argv`. `env`: variables over the agent's own. Never raises for what the command does."""
    try:
        done = subprocess.run(
            list(argv),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, "LC_ALL": "C", **(env or {})},
            cwd=cwd,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Done(None, "", f"{argv[0]} did not end within {timeout_s:.0f} s")
    except (OSError, ValueError) as error:
        return Done(None, "", f"{argv[0]} cannot be run: {error}")
    return Done(done.returncode, done.stdout, done.stderr)


class Root:
    """Commands that need root: directly, by passwordless sudo, or by sudo with a password given once and kept only here."""

    def __init__(self, password: str | None = None) -> None:
        self._password = password

        self._way: str | None = None

    def way(self) -> str:
        """`root`, `passwordless`, `password` (one was given), `asks` (one is needed) or `none` (no sudo)."""
        if self._way is None:
            self._way = self._find_way()
        return self._way

    def _find_way(self) -> str:
        if os.geteuid() == 0:
            return "root"
        if shutil.which("sudo") is None:
            return "none"
        if run(["sudo", "-n", "true"], timeout_s=10).ok:
            return "passwordless"
        return "password" if self._password else "asks"

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0) -> Done:
        """Runs `argv` as root. The password goes through sudo's stdin, never through a command line."""
        if os.geteuid() == 0:
            return run(argv, timeout_s=timeout_s)
        if self._password:
            done = run(["sudo", "-S", "-p", "", "--", *argv], stdin=self._password + "\n", timeout_s=timeout_s)
            if done.code == 1 and "password" in done.err.lower():
                raise Fault("remote-error", "sudo did not accept the password", evidence=[done.said])
            return done
        return run(["sudo", "-n", "--", *argv], timeout_s=timeout_s)
