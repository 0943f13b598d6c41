"""Takes the server's own secrets out of its log, in the file itself.

SGLang prints `api_key` in clear in its server_args line (0.5.6 to 0.5.23), and nothing that it can be told stops that. The log
is 0600, but it is copied, attached to tickets and backed up. What was printed is therefore overwritten by as many asterisks:
no byte moves, so the server goes on appending and every recorded offset stays right.
"""

from __future__ import annotations

import contextlib
import os

from mtpdeploy.agent.release import Release
from mtpdeploy.agent.server import secrets

_SURE = 8  # a shorter secret could be a word of the log's own: it is masked only where its name stands before it


class LogMask:
    """The secrets of one release as they can stand in its log."""

    def __init__(self, release: Release) -> None:
        self._found: list[tuple[bytes, int]] = []  # (what to look for, how many of its first bytes to keep)
        for name, value in secrets(release).items():
            printed = repr(value)[1:-1].encode()
            if not printed or b"\n" in printed:
                continue
            if len(printed) >= _SURE:
                self._found.append((printed, 0))
                continue
            quote = repr(value)[0]
            for lead in (f"{name.replace('-', '_')}={quote}", f"{name.replace('-', '_')}': {quote}"):
                self._found.append((lead.encode() + printed, len(lead)))

    def unfinished(self, data: bytes) -> int:
        """How many bytes at the end of `data` may be the beginning of a secret: they have to wait for what follows."""
        return max(
            (
                size
                for wanted, _ in self._found
                for size in range(min(len(wanted) - 1, len(data)), 0, -1)
                if data.endswith(wanted[:size])
            ),
            default=0,
        )

    def clean(self, data: bytes, path: os.PathLike[str], offset: int, inode: int) -> bytes:
        """`data`, read at `offset` of the log, without secrets; what was found is overwritten in the file as well.

        A file that cannot be written (a full or read-only disk) keeps what it has: what is returned never has it.
        """
        for wanted, keep in self._found:
            at = data.find(wanted)
            while at >= 0:
                stars = b"*" * (len(wanted) - keep)
                data = data[: at + keep] + stars + data[at + len(wanted) :]
                _overwrite(path, offset + at + keep, stars, inode)
                at = data.find(wanted, at + len(wanted))
        return data


def _overwrite(path: os.PathLike[str], offset: int, data: bytes, inode: int) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino == inode:
                os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)
