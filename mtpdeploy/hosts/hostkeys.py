"""Host keys: what known_hosts lists for a host, and the refusal of everything else.

Fabric loads no known_hosts and adds unknown keys by default; here nothing is added and nothing is asked.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtpdeploy.errors import HostKeyRefused
from mtpdeploy.hosts.lean import paramiko
from mtpdeploy.hosts.sshconfig import Resolved

# Best first, as OpenSSH prefers them; an RSA key is used with SHA-2 signatures only.
_SIGNATURES = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """Keys listed for one host by type; `revoked` keys are refused wherever they appear."""

    keys: tuple[paramiko.PKey, ...]
    revoked: frozenset[str]
    files: tuple[str, ...]

    @classmethod
    def read(cls, name: str, files: Sequence[str]) -> KnownKeys:
        """Hashed names, `[host]:port` and patterns are understood; lines that can't be read are left out."""
        keys: dict[str, paramiko.PKey] = {}
        revoked: set[str] = set()
        read: list[str] = []
        for path in files:
            try:
                lines = Path(path).read_text(errors="replace").splitlines()
            except OSError:
                continue
            read.append(path)
            for number, line in enumerate(lines, 1):
                words = line.split()
                if words[:1] == ["@revoked"] and len(words) >= 4:
                    revoked.add(words[3])
                    continue
                if not words or words[0].startswith(("#", "@")):
                    continue
                try:
                    entry = paramiko.hostkeys.HostKeyEntry.from_line(line, number)
                except (paramiko.SSHException, ValueError):
                    continue
                if entry is None or entry.key is None or entry.hostnames is None:
                    continue
                book = paramiko.HostKeys()
                book._entries.append(entry)  # type: ignore[attr-defined]
                if book.lookup(name) is not None:
                    keys.setdefault(entry.key.get_name(), entry.key)
        return cls(tuple(keys.values()), frozenset(revoked), tuple(read))

    def preferred_types(self, offered: Sequence[str]) -> tuple[str, ...]:
        """Signature types to negotiate: those of listed keys first, so that the server shows a key that can be checked."""
        wanted = [kind for key in self.keys for kind in _SIGNATURES.get(key.get_name(), (key.get_name(),))]
        first = [kind for kind in wanted if kind in offered]
        return (*first, *(kind for kind in offered if kind not in first))


def fingerprint(key: paramiko.PKey) -> str:
    """As ssh-keygen prints it."""
    digest = hashlib.sha256(key.asbytes()).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')} ({key.get_name()})"


class OnlyKnownKeys(paramiko.MissingHostKeyPolicy):
    """Lets a listed key pass. The client itself knows no keys, so every connection comes through here."""

    def __init__(self, target: Resolved, known: KnownKeys) -> None:
        self._target, self._known = target, known

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """HostKeyRefused for an unknown, changed or revoked key."""
        target, known = self._target, self._known
        shown = fingerprint(key)
        if key.get_base64() in known.revoked:
            raise HostKeyRefused(f"{target.name}: the host shows a revoked key, {shown}", runbook="host-key-refused")
        if any(listed == key for listed in known.keys):
            return
        place = f"-p {target.port} {target.hostname}" if target.port != 22 else target.hostname
        file = next((path for path in target.known_hosts if not path.startswith("/etc/")), "~/.ssh/known_hosts")
        same_type = [listed for listed in known.keys if listed.get_name() == key.get_name()]
        if same_type or known.keys:
            raise HostKeyRefused(
                f"{target.name}: the host key of {target.key_name} has CHANGED. It shows {shown}; known is "
                f"{', '.join(fingerprint(listed) for listed in known.keys)}. Somebody may be listening in, or the host "
                "was installed anew. Nothing was sent.",
                next_commands=[
                    f"# compare with what the host itself says: ssh-keygen -lf /etc/ssh/ssh_host_{_short(key)}_key.pub",
                    f"ssh-keygen -R '{target.key_name}' -f {file}   # only if the change is explained",
                ],
                runbook="host-key-refused",
            )
        raise HostKeyRefused(
            f"{target.name}: the host key of {target.key_name} is unknown. It shows {shown}. "
            f"Looked in {', '.join(known.files) or 'no file: none of the known_hosts files exists'}. Nothing was sent.",
            next_commands=[
                f"ssh-keyscan {place} | ssh-keygen -lf -   # compare with what the host's owner says",
                f"ssh-keyscan {place} >> {file}",
            ],
            runbook="host-key-refused",
        )


def _short(key: paramiko.PKey) -> str:
    return {"ssh-rsa": "rsa", "ssh-ed25519": "ed25519"}.get(key.get_name(), "ecdsa")
