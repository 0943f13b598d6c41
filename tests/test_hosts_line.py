"""A line that goes silent: on real hosts, with the cable pulled, also before the first word and behind a jump host."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from mtpdeploy.errors import LineCut, MtpError
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.hosts.ssh import SshTransport
from mtpdeploy.inventory.values import Host, SshOptions
from tests.lab.lab import Lab, address, script

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

NOTICED_S = 5.0
SPARE_S = 1.5  # for a test machine that is busy with others


def host(lab: Lab, name: str, folder: Path, *, jump: str | None = None) -> Host:
    key, known = lab.keys()
    config = folder / "ssh_config"
    config.write_text(
        f"Host jump\n  HostName {address('mtph1')}\n  User root\n  IdentityFile {key}\n  UserKnownHostsFile {known}\n"
    )
    ssh = SshOptions(identity_file=key, known_hosts_file=known, config_file=str(config), proxy_jump=jump)
    return Host(name, address=address(name), user="root", ssh=ssh)


@pytest.mark.parametrize("jump", [None, "jump"], ids=["directly", "behind a jump host"])
def test_a_cut_line_is_noticed_within_five_seconds_also_before_the_agents_first_word(
    lab: Lab, tmp_path: Path, jump: str | None
) -> None:
    mute = "/root/mute-python"
    lab.at("mtph2", f"printf '#!/bin/sh\\ntouch /tmp/begun\\nsleep 60\\n' >{mute}; chmod +x {mute}; rm -f /tmp/begun")
    with SshTransport(host(lab, "mtph2", tmp_path, jump=jump)) as transport:
        AgentClient(transport, workdir="/root/w", service="sglang", python="python3").call("status")
        cut_at: list[float] = []

        def cut() -> None:
            while not lab.at("mtph2", "ls /tmp/begun 2>/dev/null || true"):
                time.sleep(0.05)
            cut_at.append(time.monotonic())
            script("cut", "mtph2")

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            with pytest.raises(LineCut):
                AgentClient(transport, workdir="/root/w", service="sglang", python=mute).call("status")
            noticed = time.monotonic()
        finally:
            cutter.join()
            script("heal", "mtph2")
    assert noticed - cut_at[0] < NOTICED_S + SPARE_S


@pytest.mark.parametrize("jump", [None, "jump"], ids=["directly", "behind a jump host"])
def test_an_idle_connection_whose_host_is_gone_is_noticed_by_the_next_command(
    lab: Lab, tmp_path: Path, jump: str | None
) -> None:
    with SshTransport(host(lab, "mtph2", tmp_path, jump=jump)) as transport:
        client = AgentClient(transport, workdir="/root/w", service="sglang", python="python3")
        client.call("status")
        script("cut", "mtph2")
        began = time.monotonic()
        try:
            with pytest.raises(MtpError):
                client.call("status")
            assert time.monotonic() - began < NOTICED_S + SPARE_S + 5.0  # and the limit of one attempt to connect
        finally:
            script("heal", "mtph2")


def test_a_slow_login_is_waited_for(lab: Lab, tmp_path: Path) -> None:
    """A PAM module that takes longer than any silence that is taken for a cut."""
    lab.at("mtph3", "printf '#!/bin/sh\\nsleep 6\\n' >/root/slow; chmod +x /root/slow")
    lab.at(
        "mtph3", "cp /etc/pam.d/sshd /root/sshd.pam; echo 'session required pam_exec.so /root/slow' >>/etc/pam.d/sshd"
    )
    try:
        with SshTransport(host(lab, "mtph3", tmp_path)) as transport:
            client = AgentClient(transport, workdir="/root/w", service="sglang", python="python3")
            assert client.call("status")["word"] == "not deployed"
    finally:
        lab.at("mtph3", "mv /root/sshd.pam /etc/pam.d/sshd")
