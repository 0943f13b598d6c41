"""The SSH door against a real OpenSSH server on loopback."""

from __future__ import annotations

import os
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from mtpdeploy.agent import protocol
from mtpdeploy.errors import HostKeyRefused, HostUnreachable, LineCut
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.hosts.hostkeys import KnownKeys
from mtpdeploy.hosts.ssh import SshTransport
from mtpdeploy.hosts.sshconfig import resolve
from mtpdeploy.inventory.values import Host, SshOptions
from tests.sshd import Sshd, keygen

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd")).start()
    yield server
    server.stop()


@pytest.fixture
def host(sshd: Sshd) -> Host:
    return Host(
        "gpu1",
        address="127.0.0.1",
        port=sshd.port,
        user="root",
        ssh=SshOptions(
            identity_file=str(sshd.folder / "user"),
            config_file="/dev/null",
            known_hosts_file=str(sshd.known_hosts),
            connect_timeout_s=5,
        ),
    )


def output(transport: SshTransport, command: str) -> tuple[bytes, int | None]:
    channel = transport.exec(command)
    channel.finish()
    data = b""
    while part := channel.receive(10):
        data += part
    return data, channel.exit_status(5)


def test_a_command_answers_with_its_output_and_its_exit_status(host: Host) -> None:
    with SshTransport(host) as transport:
        assert output(transport, "printf 'a b'; exit 7") == (b"a b", 7)


def test_the_connection_is_used_again(host: Host, sshd: Sshd) -> None:
    with SshTransport(host) as transport:
        output(transport, "true")
        before = len(sshd.children)
        output(transport, "true")
        assert len(sshd.children) == before


def test_an_unknown_host_key_is_refused_with_its_fingerprint_and_what_to_type(host: Host, tmp_path: Path) -> None:
    stranger = replace(host, ssh=replace(host.ssh, known_hosts_file=str(tmp_path / "none")))
    with SshTransport(stranger) as transport, pytest.raises(HostKeyRefused, match=r"unknown.*SHA256:") as refused:
        transport.exec("true")
    assert any("ssh-keyscan" in line for line in refused.value.next_commands)


def test_a_changed_host_key_is_refused_as_changed(host: Host, sshd: Sshd, tmp_path: Path) -> None:
    other = keygen(tmp_path / "other").with_suffix(".pub").read_text().split()
    book = tmp_path / "known_hosts"
    book.write_text(f"[127.0.0.1]:{sshd.port} {other[0]} {other[1]}\n")
    with (
        SshTransport(replace(host, ssh=replace(host.ssh, known_hosts_file=str(book)))) as transport,
        pytest.raises(HostKeyRefused, match="CHANGED"),
    ):
        transport.exec("true")


def test_a_revoked_host_key_is_refused_although_it_is_listed(host: Host, sshd: Sshd, tmp_path: Path) -> None:
    listed = sshd.known_hosts.read_text()
    book = tmp_path / "known_hosts"
    book.write_text(listed + f"@revoked * {' '.join(listed.split()[1:])}\n")
    with (
        SshTransport(replace(host, ssh=replace(host.ssh, known_hosts_file=str(book)))) as transport,
        pytest.raises(HostKeyRefused, match="revoked"),
    ):
        transport.exec("true")


def test_a_host_known_by_its_rsa_key_alone_is_asked_for_that_key(tmp_path: Path, host: Host) -> None:
    server = Sshd(tmp_path / "rsa", host_key="rsa").start()
    try:
        known = replace(
            host,
            port=server.port,
            ssh=replace(host.ssh, known_hosts_file=str(server.known_hosts), identity_file=str(server.folder / "user")),
        )
        with SshTransport(known) as transport:
            assert output(transport, "echo in") == (b"in\n", 0)
    finally:
        server.stop()


def test_hashed_names_in_known_hosts_are_found(sshd: Sshd, tmp_path: Path) -> None:
    book = tmp_path / "known_hosts"
    book.write_text(sshd.known_hosts.read_text())
    os.system(f"ssh-keygen -q -H -f {book} 2>/dev/null")
    assert book.read_text().startswith("|1|")
    assert len(KnownKeys.read(f"[127.0.0.1]:{sshd.port}", [str(book)]).keys) == 1


def test_a_refused_login_names_the_user_and_the_keys_that_were_tried(host: Host, tmp_path: Path) -> None:
    wrong = str(keygen(tmp_path / "wrong"))
    with (
        SshTransport(replace(host, ssh=replace(host.ssh, identity_file=wrong))) as transport,
        pytest.raises(HostUnreachable, match=f"root.*{wrong}"),
    ):
        transport.exec("true")


def test_a_key_with_a_passphrase_is_told_as_such_and_never_prompted_for(host: Host, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret words", "-f", tmp_path / "locked"], check=True)
    locked = replace(host, ssh=replace(host.ssh, identity_file=str(tmp_path / "locked")))
    with (
        SshTransport(locked) as transport,
        pytest.raises(HostUnreachable, match="a key file has a passphrase") as caught,
    ):
        transport.exec("true")
    assert caught.value.next_commands == (f"ssh-add {tmp_path / 'locked'}",)


def test_a_port_where_nothing_listens_is_said_to_refuse(host: Host) -> None:
    with SshTransport(replace(host, port=1)) as transport, pytest.raises(HostUnreachable, match="nothing listens"):
        transport.exec("true")


def test_ssh_config_is_resolved_with_include_and_alias(tmp_path: Path) -> None:
    (tmp_path / "more").write_text("Host box\n  HostName 10.9.8.7\n  Port 2222\n  User ops\n  HostKeyAlias the-box\n")
    (tmp_path / "config").write_text(f"Include {tmp_path}/more\n")
    target = resolve(Host("gpu1", address="box", ssh=SshOptions(config_file=str(tmp_path / "config"))))
    assert (target.hostname, target.port, target.user, target.key_name) == ("10.9.8.7", 2222, "ops", "the-box")


def test_a_jump_host_carries_the_connection_and_its_key_is_checked(host: Host, sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host jump\n  HostName 127.0.0.1\n  Port {sshd.port}\n  User root\n  IdentityFile {sshd.folder}/user\n"
        f"  UserKnownHostsFile {sshd.known_hosts}\n"
    )
    beyond = replace(host, ssh=replace(host.ssh, config_file=str(config), proxy_jump="jump"))
    with SshTransport(beyond) as transport:
        assert output(transport, "echo through") == (b"through\n", 0)
    config.write_text(config.read_text().replace(str(sshd.known_hosts), "/dev/null"))
    with SshTransport(beyond) as transport, pytest.raises(HostUnreachable, match=r"(?i)host key"):
        transport.exec("true")


def test_the_agent_is_sent_once_and_found_again(host: Host, tmp_path: Path) -> None:
    with SshTransport(host) as transport:
        client = AgentClient(transport, workdir=str(tmp_path / "work"), service="sglang", python="python3")
        assert client.call("status")["word"] == "not deployed"
        sent = list((tmp_path / "work" / "agent").glob("*.pyz"))
        assert len(sent) == 1
        written = sent[0].stat().st_mtime_ns
        client.call("status")
        assert sent[0].stat().st_mtime_ns == written


def test_a_cut_line_is_told_as_a_cut_line_and_not_as_an_exit_status(host: Host, sshd: Sshd, tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("""#!/bin/sh\necho '{"event":"note","text":"begun"}'\nsleep 30\n""")
    slow.chmod(0o755)
    with SshTransport(host) as transport:
        work = tmp_path / "work"
        AgentClient(transport, workdir=str(work), service="sglang", python="python3").call("status")
        client = AgentClient(transport, workdir=str(work), service="sglang", python=str(slow))
        with pytest.raises(LineCut, match=r"cut during deploy.*finishes its step"):
            client.call("deploy", on_event=lambda event: sshd.cut() and None)


def test_silence_is_a_cut_line_too(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SILENT_S", 2.0)
    mute = tmp_path / "python"
    mute.write_text("""#!/bin/sh\necho '{"event":"heartbeat"}'\nsleep 30\n""")
    mute.chmod(0o755)
    with SshTransport(host) as transport:
        work = tmp_path / "work"
        AgentClient(transport, workdir=str(work), service="sglang", python="python3").call("status")
        client = AgentClient(transport, workdir=str(work), service="sglang", python=str(mute))
        with pytest.raises(LineCut, match="nothing was heard for 2 s"):
            client.call("status")


def test_a_port_of_the_host_is_carried_here(host: Host) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"from the host")

        def log_message(self, *words: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, daemon=True).start()
    with SshTransport(host) as transport:
        forward = transport.forward(server.server_port)
        with urllib.request.urlopen(f"http://127.0.0.1:{forward.port}/", timeout=5) as answer:
            assert answer.read() == b"from the host"
        forward.close()
    server.shutdown()
