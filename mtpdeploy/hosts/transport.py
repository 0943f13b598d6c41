"""What the rest needs of a connection: run one command with a stream each way, and carry a TCP port."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the inventory brings Pydantic with it, and a connection may begin before
    from mtpdeploy.inventory.values import Host


class Channel(Protocol):
    """One running command at the host."""

    def send(self, data: bytes) -> None:
        """Writes to its stdin. OSError if it no longer reads."""

    def finish(self) -> None:
        """No more stdin."""

    def receive(self, timeout_s: float | None) -> bytes:
        """The next bytes of stdout, at least one; b"" at its end. TimeoutError after `timeout_s` of silence."""

    def stderr(self) -> str:
        """What came on stderr so far, at most the last 64 KiB."""

    def exit_status(self, timeout_s: float) -> int | None:
        """The exit status; None if it is not known (the transport was lost, or the time is over)."""

    def close(self) -> None:
        """Hangs up. The command may go on at the host."""


class Forward(Protocol):
    """A TCP port of the host, reachable here."""

    @property
    def port(self) -> int:
        """The local port on 127.0.0.1."""

    def close(self) -> None:
        """Ends it."""


class Transport(Protocol):
    """A connection to one host, opened at first use and kept."""

    host: Host

    def begin(self) -> None:
        """Starts connecting, if that takes time, while the caller does something else. What goes wrong is raised by what needs it."""

    def exec(self, command: str) -> Channel:
        """Starts a POSIX shell command. HostUnreachable if there is no connection; never retried once it was sent."""

    def forward(self, port: int, address: str = "127.0.0.1") -> Forward:
        """Makes `address:port`, as the host sees it, reachable on a local port."""

    def close(self) -> None:
        """Closes the connection."""

    def __enter__(self) -> Transport: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def connect(host: Host) -> Transport:
    """The transport for `host`: this machine, or SSH. Nothing is opened yet."""
    if host.local:
        from mtpdeploy.hosts.local import LocalTransport

        return LocalTransport(host)
    from mtpdeploy.hosts.ssh import SshTransport

    return SshTransport(host)
