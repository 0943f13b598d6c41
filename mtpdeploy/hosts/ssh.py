"""A host over SSH: one Paramiko connection on our own socket, strict about host keys, impatient with silence.

A cut line is noticed within five seconds whatever is going on. On our own TCP socket the kernel sees to it (keepalive and
TCP_USER_TIMEOUT); through a proxy the far sshd is asked each second whether it is still there.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import socket
import subprocess
import threading
import time
from collections import deque
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mtpdeploy.errors import HostUnreachable, MtpError
from mtpdeploy.hosts.early import EARLY
from mtpdeploy.hosts.hostkeys import KnownKeys, OnlyKnownKeys
from mtpdeploy.hosts.lean import paramiko
from mtpdeploy.hosts.sshconfig import Resolved, resolve

if TYPE_CHECKING:  # the inventory brings Pydantic with it, and a connection may begin before
    from mtpdeploy.inventory.values import Host

ATTEMPTS = 3
_STDERR_KEPT = 64 * 1024
_USER_TIMEOUT_MS = 4_000  # unacknowledged data, or keepalives, after which the kernel gives the connection up
_PULSE_S, _PULSE_LIMIT_S = 1.0, 3.5  # how often a host behind a proxy is asked, and how long it may take to answer
_SESSION_S = 60.0  # a first session waits for the host's PAM modules; a cut line ends the wait much earlier


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
        self._client: paramiko.SSHClient | None = None
        self._pulse: threading.Thread | None = None
        self._begun: Future[paramiko.SSHClient] | None = None
        self._target: Resolved | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        answer: Future[paramiko.SSHClient] = Future()

        def run() -> None:
            try:
                answer.set_result(self._connect())
            except BaseException as error:  # raised where the connection is needed
                answer.set_exception(error)

        with self._lock:
            if self._client is None and self._begun is None:
                self._begun = answer
                threading.Thread(target=run, name=f"connect {self.host.name}", daemon=True).start()

    def exec(self, command: str) -> SshChannel:
        transport, proxied = self._connected()
        try:
            channel = transport.open_session(timeout=_SESSION_S)
            if proxied:
                self._feel_pulse(transport)
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
        transport, proxied = self._connected()
        if proxied:
            self._feel_pulse(transport)
        return SshForward(transport, port, address)

    def close(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.add_done_callback(close_client)
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(OSError, EOFError):
                client.close()  # a proxy sees the end of its stdin and goes

    def leave(self) -> None:
        """Lets go of the connection without closing it, for another transport to the same place in this process."""
        client, self._client = self._client, None
        if client is not None and self._target is not None:
            EARLY.give(self._target, client)

    def __enter__(self) -> SshTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ connecting

    def _connected(self) -> tuple[paramiko.Transport, bool]:
        """The transport, and whether it goes through a proxy."""
        with self._lock:
            client = self._client
            if client is None and self._begun is not None:
                begun, self._begun = self._begun, None
                client = self._client = begun.result()
            if client is None or (transport := client.get_transport()) is None or not transport.is_active():
                self.close()
                client = self._client = self._connect()
                transport = client.get_transport()
            assert transport is not None
            return transport, isinstance(client, _Proxied)

    def _feel_pulse(self, transport: paramiko.Transport) -> None:
        """Begins once the first session stands: until then sshd may be busy with PAM, and would not answer."""
        if self._pulse is None or not self._pulse.is_alive():
            self._pulse = threading.Thread(target=_pulse, args=(transport,), name="pulse", daemon=True)
            self._pulse.start()

    def _connect(self) -> paramiko.SSHClient:
        """Tries again where a second try may help: never after a refused key or login."""
        target, limit = resolve(self.host), self.host.ssh.connect_timeout_s
        try:
            client = self._opened(target, limit)
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
                + f": {_why(error)}",
                next_commands=[" ".join((*target.asked[:-1], "-v", target.asked[-1], "true"))],
            ) from error
        EARLY.reached(target, limit)
        self._target = target
        return client

    def _opened(self, target: Resolved, limit: float) -> paramiko.SSHClient:
        begun = EARLY.claim(target)
        try:
            return begun.result() if begun is not None else open_client(target, limit)
        except (OSError, EOFError, paramiko.SSHException) as error:
            if not _worth_another(error):
                raise
        import tenacity  # loads asyncio: only for those who need it

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(ATTEMPTS - 1),
            wait=tenacity.wait_exponential(multiplier=0.3, max=2),
            retry=tenacity.retry_if_exception(_worth_another),
            reraise=True,
        )
        time.sleep(0.3)
        return retrying(open_client, target, limit)


def close_client(answer: Future[paramiko.SSHClient]) -> None:
    """Hangs up on a connection that nobody wants any more, once it is there."""
    if answer.exception() is None:
        answer.result().close()


class _Proxied(paramiko.SSHClient):
    """A client whose bytes a program carries: the program ends with it."""

    def __init__(self, proxy: subprocess.Popen[bytes]) -> None:
        super().__init__()
        self._proxy = proxy

    def close(self) -> None:
        super().close()
        self._proxy.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._proxy.wait(2)


def open_client(target: Resolved, limit: float) -> paramiko.SSHClient:
    """One attempt. HostKeyRefused; else what Paramiko and the socket raise, with the proxy's last words in `proxy_said`.

    limit: seconds for the connection, the banner, and (20 at least) the login.
    """
    known = KnownKeys.read(target.key_name, target.known_hosts)
    proxy: subprocess.Popen[bytes] | None = None
    if target.proxy is None:
        sock = _socket(target, limit)
        client = paramiko.SSHClient()
    else:
        sock, proxy = _through(target.proxy)
        client = _Proxied(proxy)
    client.set_missing_host_key_policy(OnlyKnownKeys(target, known))
    try:
        with _agent_socket(target.agent_socket):
            client.connect(
                target.hostname,
                target.port,
                target.user,
                timeout=limit,
                sock=sock,
                key_filename=[path for path in target.identity_files if os.path.exists(path)],  # type: ignore[arg-type]
                look_for_keys=False,
                allow_agent=not target.only_identities or bool(target.agent_socket),
                banner_timeout=limit,
                auth_timeout=max(limit, 20.0),
                channel_timeout=15.0,
                transport_factory=_transport_factory(known),
            )
    except BaseException as error:
        if proxy is not None:
            error.proxy_said = _last_words(proxy)  # type: ignore[attr-defined]
        client.close()  # ends Paramiko's thread before its descriptor can be used again
        sock.close()
        raise
    return client


def _socket(target: Resolved, limit: float) -> socket.socket:
    """Ours, since Paramiko leaves Nagle's algorithm on (40 ms a command) and never notices a dead peer."""
    sock = socket.create_connection((target.hostname, target.port), timeout=limit)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # TCP_KEEPALIVE: what macOS calls the first
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPALIVE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    return sock


def _through(command: tuple[str, ...]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A socket whose other end is that program's stdin and stdout."""
    ours, theirs = socket.socketpair()
    with theirs:
        proxy = subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    return ours, proxy


def _last_words(proxy: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        proxy.wait(1)
    if proxy.poll() is None or proxy.stderr is None:
        return ""
    lines = proxy.stderr.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _pulse(transport: paramiko.Transport) -> None:
    """Asks the far sshd whether it is there; closes the transport when it no longer answers, which wakes whoever waits."""
    while transport.is_active():
        time.sleep(_PULSE_S)
        asked = threading.Thread(
            target=transport.global_request, args=("keepalive@openssh.com",), name="pulse asks", daemon=True
        )
        asked.start()
        asked.join(_PULSE_LIMIT_S)
        if asked.is_alive():
            transport.close()
            return


def _worth_another(error: BaseException) -> bool:
    hopeless = (paramiko.AuthenticationException, paramiko.PasswordRequiredException, socket.gaierror, MtpError)
    return isinstance(error, (OSError, EOFError, paramiko.SSHException)) and not isinstance(error, hopeless)


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


def _why(error: BaseException) -> str:
    if said := getattr(error, "proxy_said", ""):
        return str(said)
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(error, TimeoutError) or "timed out" in str(error):
        return "it does not answer"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there"
    if "No existing session" in str(error) or "protocol banner" in str(
        error
    ):  # Paramiko's words for a banner that never came
        return (
            "it takes the connection and does not answer as SSH does; a slow host needs a longer ssh.connect_timeout_s"
        )
    return str(error) or type(error).__name__
