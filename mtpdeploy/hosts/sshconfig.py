"""What ~/.ssh/config and OpenSSH's defaults say of a host, asked of ssh itself where it exists.

Paramiko's own parser ignores Include and parts of Match, so `ssh -G` is the authority; Paramiko's parser is the fallback.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mtpdeploy.errors import ConfigError, HostUnreachable

if TYPE_CHECKING:  # the inventory brings Pydantic with it, and a connection may begin before
    from mtpdeploy.inventory.values import Host


@dataclass(frozen=True, slots=True)
class Resolved:
    """Where and how to connect. proxy: a command line whose stdin and stdout are the connection; None = directly."""

    name: str  # as the inventory calls it
    hostname: str
    port: int
    user: str | None
    key_name: str  # under which known_hosts lists its key
    identity_files: tuple[str, ...]
    only_identities: bool
    known_hosts: tuple[str, ...]
    agent_socket: str | None  # None: the environment's
    proxy: tuple[str, ...] | None
    asked: tuple[str, ...] = field(default=())  # the ssh command that would connect alike, for messages


def resolve(host: Host) -> Resolved:
    """Inventory over ssh's configuration. ConfigError if ssh refuses the configuration."""
    options = _options(host)
    target = host.address or host.name
    ssh = shutil.which("ssh")
    values = _from_ssh(ssh, options, target) if ssh else _from_paramiko(host, target)
    hostname = values["hostname"][0]
    port = host.port or int(values.get("port", ["22"])[0])
    user = host.user or values.get("user", [None])[0]
    alias = values.get("hostkeyalias", [""])[0]
    key_name = alias or (hostname if port == 22 else f"[{hostname}]:{port}")
    named = (
        *((host.ssh.known_hosts_file,) if host.ssh.known_hosts_file else ()),
        *values.get("userknownhostsfile", ["~/.ssh/known_hosts ~/.ssh/known_hosts2"])[0].split(),
        *values.get("globalknownhostsfile", ["/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"])[0].split(),
    )
    identities = (host.ssh.identity_file,) if host.ssh.identity_file else tuple(values.get("identityfile", ()))
    socket = values.get("identityagent", [""])[0]
    return Resolved(
        name=host.name,
        hostname=hostname,
        port=port,
        user=user,
        key_name=key_name,
        identity_files=tuple(os.path.expanduser(path) for path in identities),
        only_identities=bool(host.ssh.identity_file) or values.get("identitiesonly", ["no"])[0] == "yes",
        known_hosts=tuple(os.path.expanduser(path) for path in named if path != "none"),
        agent_socket=os.path.expandvars(os.path.expanduser(socket)) if socket and socket != "SSH_AUTH_SOCK" else None,
        proxy=_proxy(ssh, host, values, hostname, port, user),
        asked=("ssh", *options, target),
    )


def _options(host: Host) -> list[str]:
    options: list[str] = []
    if host.ssh.config_file:
        options += ["-F", os.path.expanduser(host.ssh.config_file)]
    if host.port:
        options += ["-p", str(host.port)]
    if host.user:
        options += ["-l", host.user]
    if host.ssh.proxy_jump:
        options += ["-J", host.ssh.proxy_jump]
    return options


def _from_ssh(ssh: str, options: Sequence[str], target: str) -> dict[str, list[str]]:
    done = subprocess.run(
        [ssh, "-G", *options, "--", target], capture_output=True, text=True, errors="replace", timeout=20, check=False
    )
    if done.returncode != 0:
        raise ConfigError(
            f"{target}: ssh cannot read its configuration: {done.stderr.strip() or done.returncode}",
            next_commands=[" ".join(["ssh", "-G", *options, target])],
        )
    values: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)
    return values


def _from_paramiko(host: Host, target: str) -> dict[str, list[str]]:
    from paramiko import SSHConfig

    path = Path(os.path.expanduser(host.ssh.config_file or "~/.ssh/config"))
    found = SSHConfig.from_path(str(path)).lookup(target) if path.is_file() else {"hostname": target}
    values: dict[str, object] = dict(found)
    return {key: [str(v) for v in value] if isinstance(value, list) else [str(value)] for key, value in values.items()}


def _proxy(
    ssh: str | None, host: Host, values: dict[str, list[str]], hostname: str, port: int, user: str | None
) -> tuple[str, ...] | None:
    """A ProxyJump is carried by OpenSSH itself, which checks the keys of the hosts on the way and asks nothing."""
    jump = host.ssh.proxy_jump or values.get("proxyjump", ["none"])[0]
    if jump and jump != "none":
        if ssh is None:
            raise HostUnreachable(
                f"{host.name}: going through {jump} needs the ssh program, which is not installed here"
            )
        *before, last = jump.split(",")
        login, _, place = last.removeprefix("ssh://").rpartition("@")
        name, colon, jump_port = place.rpartition(":")
        if not colon or not jump_port.isdigit():
            name, jump_port = place, ""
        return (
            ssh,
            *(("-F", os.path.expanduser(host.ssh.config_file)) if host.ssh.config_file else ()),
            "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes",
            "-o", f"ConnectTimeout={max(1, round(host.ssh.connect_timeout_s))}",
            *(("-J", ",".join(before)) if before else ()),
            *(("-l", login) if login else ()),
            *(("-p", jump_port) if jump_port else ()),
            "-W", f"[{hostname}]:{port}" if ":" in hostname else f"{hostname}:{port}",
            "--", name.strip("[]"),
        )  # fmt: skip
    command = values.get("proxycommand", ["none"])[0]
    if command and command != "none":
        # One pass, so that a value's own % stands for itself; quoted, since a shell reads it.
        values_of = {"%h": shlex.quote(hostname), "%p": str(port), "%r": shlex.quote(user or ""), "%%": "%"}
        command = re.sub(r"%[hpr%]", lambda mark: values_of[mark[0]], command)
        return ("/bin/sh", "-c", f"exec {command}")
    return None
