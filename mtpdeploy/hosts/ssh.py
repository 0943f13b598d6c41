"""A host over SSH: one Fabric connection on our own socket, strict about host keys, impatient with silence."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import socket
import subprocess
import threading
from collections import deque
from types import TracebackType
from typing import Any

import paramiko
import tenacity
from fabric import Config, Connection

from mtpdeploy.errors import HostUnreachable, MtpError
from mtpdeploy.hosts.hostkeys import KnownKeys, OnlyKnownKeys
from mtpdeploy.hosts.sshconfig import Resolved, resolve
from mtpdeploy.inventory.values import Host

ATTEMPTS = 3
_STDERR_KEPT = 64 * 1024
_USER_TIMEOUT_MS = 15_000  # unacknowledged data after which the kernel gives the connection up


class SshChannel:
    """One exec on the connection."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._stderr: deque[bytes] = deque(maxlen=64)

    def send(self, data: bytes) -> None:
        self._channel.settimeout(60.0)
        self._channel.sendall(data)

    def finish(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def receive(self, timeout_s: float | None) -> bytes:
        self._drain()
        self._channel.settimeout(timeout_s)
        try:
            data = self._channel.recv(64 * 1024)
        except TimeoutError:
            raise TimeoutError(f"no output for {timeout_s:.0f} s") from None
        self._drain()
        return data

    def _drain(self) -> None:
        while self._channel.recv_stderr_ready():
            if not (data := self._channel.recv_stderr(4096)):
                return
            self._stderr.append(data)

    def stderr(self) -> str:
        self._drain()
        return b"".join(self._stderr)[-_STDERR_KEPT:].decode(errors="replace")

    def exit_status(self, timeout_s: float) -> int | None:
        if not self._channel.status_event.wait(timeout_s):
            return None
        status = self._channel.recv_exit_status()
        return None if status == -1 else status  # -1: the transport was lost; that is no exit status

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()


class SshForward:
    """A listening socket here whose connections go to `address:port` as the host sees it."""

    def __init__(self, transport: paramiko.Transport, port: int, address: str) -> None:
        self._transport, self._target = transport, (address, port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the connection below still stands."""
        return self._transport.is_active()

    def _accept(self) -> None:
        while True:
            try:
                client, peer = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client, peer), daemon=True).start()

    def _carry(self, client: socket.socket, peer: tuple[str, int]) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            channel = self._transport.open_channel("direct-tcpip", self._target, peer, timeout=10)
        except (paramiko.SSHException, OSError):
            client.close()
            return
        try:
            while True:
                both: list[Any] = [client, channel]
                readable = select.select(both, [], [])[0]
                if client in readable:
                    if not (data := client.recv(64 * 1024)):
                        return
                    channel.sendall(data)
                if channel in readable:
                    if not (data := channel.recv(64 * 1024)):
                        return
                    client.sendall(data)
        except OSError:
            return
        finally:
            channel.close()
            client.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class SshTransport:
    """Connects at first use and keeps the connection; a lost one is opened anew for the next command."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._connection: Connection | None = None
        self._proxy: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def exec(self, command: str) -> SshChannel:
        transport = self._transport()
        try:
            channel = transport.open_session(timeout=10)
            if self.host.ssh.forward_agent:
                paramiko.agent.AgentRequestHandler(channel)
            channel.exec_command(command)
        except (paramiko.SSHException, OSError, EOFError) as error:
            self.close()
            raise HostUnreachable(
                f"{self.host.name}: the connection was lost before the command began: {error or type(error).__name__}",
                next_commands=[f"mtpdeploy status --host {self.host.name}"],
            ) from error
        return SshChannel(channel)

    def forward(self, port: int, address: str = "127.0.0.1") -> SshForward:
        return SshForward(self._transport(), port, address)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError, EOFError):
                connection.close()
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            proxy.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                proxy.wait(2)

    def __enter__(self) -> SshTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ connecting

    def _transport(self) -> paramiko.Transport:
        with self._lock:
            connection = self._connection
            if connection is None or not connection.is_connected:
                self.close()
                connection = self._connection = self._connect()
            transport: paramiko.Transport = connection.transport
            return transport

    def _connect(self) -> Connection:
        """Tries again where a second try may help: never after a refused key or login."""
        target = resolve(self.host)
        known = KnownKeys.read(target.key_name, target.known_hosts)
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            wait=tenacity.wait_exponential(multiplier=0.3, max=2),
            retry=tenacity.retry_if_exception_type((OSError, EOFError, paramiko.SSHException))
            & tenacity.retry_if_not_exception_type(
                (paramiko.AuthenticationException, paramiko.PasswordRequiredException, socket.gaierror)
            ),
            reraise=True,
        )
        try:
            return retrying(self._open, target, known)
        except MtpError:
            raise
        except paramiko.PasswordRequiredException as error:
            locked = [path for path in target.identity_files if os.path.exists(path)]
            raise HostUnreachable(
                f"{self.host.name}: no login as {target.user or 'the default user'}: a key file has a passphrase, and nothing "
                "is asked here. Its agent can hold it.",
                next_commands=[f"ssh-add {shlex.quote(path)}" for path in locked],
            ) from error
        except paramiko.AuthenticationException as error:
            tried = [path for path in target.identity_files if os.path.exists(path)]
            raise HostUnreachable(
                f"{self.host.name}: the host refused the login of {target.user or 'the default user'}: {error}. "
                f"Tried: {', '.join([*tried, *(() if target.only_identities else ('the keys of ssh-agent',))])}.",
                next_commands=[" ".join((*target.asked[:-1], "-v", target.asked[-1], "true"))],
            ) from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise HostUnreachable(
                f"{self.host.name}: no connection to {target.hostname} port {target.port}"
                + (" through the jump host" if target.proxy else "")
                + f": {_why(error, self._proxy_said())}",
                next_commands=[" ".join((*target.asked[:-1], "-v", target.asked[-1], "true"))],
            ) from error

    def _open(self, target: Resolved, known: KnownKeys) -> Connection:
        limit = self.host.ssh.connect_timeout_s
        config = Config(overrides={"load_ssh_configs": False}, lazy=True, ssh_config=paramiko.SSHConfig())
        sock = self._socket(target, limit)
        connection = Connection(
            target.hostname,
            user=target.user,
            port=target.port,
            config=config,
            connect_timeout=limit,
            connect_kwargs={
                "sock": sock,
                "key_filename": [path for path in target.identity_files if os.path.exists(path)],
                "look_for_keys": False,
                "allow_agent": not target.only_identities or bool(target.agent_socket),
                "banner_timeout": limit,
                "auth_timeout": max(limit, 20.0),
                "channel_timeout": 15.0,
                "transport_factory": _transport_factory(known),
            },
        )
        connection.client.set_missing_host_key_policy(OnlyKnownKeys(target, known))
        try:
            with _agent_socket(target.agent_socket):
                connection.open()
        except BaseException:
            connection.client.close()  # ends Paramiko's thread before its descriptor can be used again
            sock.close()  # a proxy sees the end of its stdin and goes
            raise
        return connection

    def _socket(self, target: Resolved, limit: float) -> socket.socket:
        """Ours, since Paramiko leaves Nagle's algorithm on (40 ms a command) and never notices a dead peer."""
        if target.proxy is not None:
            ours, theirs = socket.socketpair()
            self._proxy = subprocess.Popen(
                target.proxy,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            theirs.close()
            return ours
        sock = socket.create_connection((target.hostname, target.port), timeout=limit)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
        return sock

    def _proxy_said(self) -> str:
        if self._proxy is None or self._proxy.stderr is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._proxy.wait(1)
        if self._proxy.poll() is None:
            return ""
        lines = self._proxy.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _transport_factory(known: KnownKeys) -> Any:
    def make(sock: socket.socket, **options: Any) -> paramiko.Transport:
        transport = paramiko.Transport(sock, **options)
        security = transport.get_security_options()
        security.key_types = known.preferred_types(security.key_types)
        return transport

    return make


@contextlib.contextmanager
def _agent_socket(path: str | None) -> Any:
    """Paramiko finds the agent by the environment alone."""
    if path is None:
        yield
        return
    before = os.environ.get("SSH_AUTH_SOCK")
    os.environ["SSH_AUTH_SOCK"] = path
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("SSH_AUTH_SOCK", None)
        else:
            os.environ["SSH_AUTH_SOCK"] = before


def _why(error: BaseException, proxy: str) -> str:
    if proxy:
        return proxy
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(error, TimeoutError) or "timed out" in str(error):
        return "it does not answer"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there"
    return str(error) or type(error).__name__
