"""The job of a small deployment as other tools do it; each runs in a process of its own, started by bench/deploy.py.

The job on each host: a folder, three files if they differ (one a systemd unit), daemon-reload if the unit was changed, start.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNIT = "bench-app.service"
FILES = {
    "launch.sh": "/opt/bench-app/launch.sh",
    "app.env": "/opt/bench-app/app.env",
    UNIT: f"/etc/systemd/system/{UNIT}",
}
FRESH = f"systemctl stop {UNIT} 2>/dev/null; rm -rf /opt/bench-app /etc/systemd/system/{UNIT}; systemctl daemon-reload"


@dataclass(frozen=True)
class Job:
    """ports: one of 127.0.0.1 for each host. files: name → local path. folder: scratch of this process."""

    ports: list[int]
    key: str
    known_hosts: str
    files: dict[str, str]
    folder: str

    @classmethod
    def read(cls, path: str) -> Job:
        return cls(**json.loads(Path(path).read_text()))

    def content(self, name: str) -> bytes:
        return Path(self.files[name]).read_bytes()

    def on_each(self, work: Callable[[int], Any]) -> None:
        with ThreadPoolExecutor(len(self.ports)) as pool:
            list(pool.map(work, self.ports))


def write_files(folder: Path) -> dict[str, str]:
    """Three files of the size of a release's, in `folder`."""
    texts = {
        "launch.sh": "#!/bin/sh\n"
        + "# a comment line of some length that stands for a command\n" * 80
        + "exec sleep infinity\n",
        "app.env": "".join(f"NAME_{n}=value-{n}\n" for n in range(40)),
        UNIT: "[Unit]\nDescription=bench\n[Service]\nExecStart=/bin/sh /opt/bench-app/launch.sh\nRestart=on-failure\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: str(folder / name) for name in texts}


# ---------------------------------------------------------------- Fabric and Paramiko, in this environment


def nodelay(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def fabric(job: Job) -> None:
    """As a plain script does it: run, put, run."""
    from fabric import Connection

    def one(port: int) -> None:
        options: dict[str, Any] = {"key_filename": job.key, "look_for_keys": False, "allow_agent": False}
        quiet: dict[str, Any] = {"hide": True, "in_stream": False}
        with Connection("127.0.0.1", user="root", port=port, connect_kwargs=options) as host:
            host.client.load_host_keys(job.known_hosts)
            host.run("mkdir -p /opt/bench-app", **quiet)
            changed = set()
            for name, path in FILES.items():
                have = host.run(f"sha256sum {path} 2>/dev/null || true", **quiet).stdout.split()
                if have[:1] != [hashlib.sha256(job.content(name)).hexdigest()]:
                    host.put(job.files[name], f"{path}.new")
                    host.run(f"chmod 644 {path}.new && mv {path}.new {path}", **quiet)
                    changed.add(name)
            if UNIT in changed:
                host.run("systemctl daemon-reload", **quiet)
            host.run(f"systemctl start {UNIT}", **quiet)

    job.on_each(one)


def one_exec(job: Job) -> None:
    """The bound: one connection with TCP_NODELAY and one `sh -s` a host, everything on its stdin."""
    import paramiko

    script = ["set -e; ch=; mkdir -p /opt/bench-app"]
    for name, path in FILES.items():
        data = job.content(name)
        script.append(
            f'if [ "$(sha256sum {path} 2>/dev/null | cut -c1-64)" = {hashlib.sha256(data).hexdigest()} ]; then cat >/dev/null; '
            f"else base64 -d >{path}.new; chmod 644 {path}.new; mv {path}.new {path}; ch=\"$ch {name}\"; fi <<'END'\n"
            f"{base64.encodebytes(data).decode()}END"
        )
    script.append(f'case "$ch" in *.service*) systemctl daemon-reload;; esac; systemctl start {UNIT}\n')
    login = paramiko.Ed25519Key.from_private_key_file(job.key)

    def one(port: int) -> None:
        client = paramiko.SSHClient()
        client.load_host_keys(job.known_hosts)
        client.connect(
            "127.0.0.1", port, "root", pkey=login, look_for_keys=False, allow_agent=False, sock=nodelay(port)
        )
        transport = client.get_transport()
        assert transport is not None
        channel = transport.open_session()
        channel.exec_command("sh -s")
        channel.sendall("\n".join(script).encode())
        channel.shutdown_write()
        while channel.recv(65536):
            pass
        assert channel.recv_exit_status() == 0
        client.close()

    job.on_each(one)


# ---------------------------------------------------------------- plain ssh and scp


def ssh_scp(job: Job) -> None:
    """One ssh to look, one scp for what differs, one ssh to put it in place and start; a connection each."""
    options = ["-F", "/dev/null", "-i", job.key, "-o", f"UserKnownHostsFile={job.known_hosts}", "-o", "BatchMode=yes"]

    def one(port: int) -> None:
        def ssh(command: str) -> str:
            words = ["ssh", *options, "-p", str(port), "root@127.0.0.1", command]
            return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout

        have = ssh(f"mkdir -p /opt/bench-app; sha256sum {' '.join(FILES.values())} 2>/dev/null || true")
        wrong = [n for n, p in FILES.items() if f"{hashlib.sha256(job.content(n)).hexdigest()}  {p}" not in have]
        then = [f"systemctl start {UNIT}"]
        if wrong:
            words = [
                "scp",
                "-q",
                *options,
                "-P",
                str(port),
                *(job.files[n] for n in wrong),
                "root@127.0.0.1:/opt/bench-app/",
            ]
            subprocess.run(words, check=True)
            moves = [
                f"chmod 644 /opt/bench-app/{n}" + (f" && mv /opt/bench-app/{n} {FILES[n]}" if n == UNIT else "")
                for n in wrong
            ]
            then = [*moves, *(["systemctl daemon-reload"] if UNIT in wrong else []), *then]
        ssh(" && ".join(then))

    job.on_each(one)


# ---------------------------------------------------------------- pyinfra and Ansible, from the peers' environment


def pyinfra(job: Job) -> list[str]:
    """Its command line; inventory and operations are written into the job's folder."""
    folder = Path(job.folder)
    data = {"ssh_user": "root", "ssh_key": job.key, "ssh_known_hosts_file": job.known_hosts, "ssh_strict_host_key_checking": "yes",
            "ssh_config_file": "/dev/null", "ssh_look_for_keys": False, "ssh_allow_agent": False, "ssh_hostname": "127.0.0.1"}  # fmt: skip
    hosts = [(f"h{n}", {**data, "ssh_port": port}) for n, port in enumerate(job.ports)]
    (folder / "inventory.py").write_text(f"hosts = {hosts!r}\n")
    puts = "\n".join(
        f"{'unit' if name == UNIT else '_'} = files.put(src={job.files[name]!r}, dest={path!r}, mode='644')"
        for name, path in FILES.items()
    )
    (folder / "job.py").write_text(
        "from pyinfra.operations import files, systemd\nfiles.directory(path='/opt/bench-app', mode='755')\n"
        f"{puts}\nsystemd.daemon_reload(_if=unit.did_change)\nsystemd.service(service={UNIT!r}, running=True)\n"
    )
    return ["pyinfra", "-y", str(folder / "inventory.py"), str(folder / "job.py")]


def ansible(job: Job) -> list[str]:
    """Its command line, with pipelining and ControlPersist; the connections of the run before are still open."""
    folder = Path(job.folder)
    (folder / "ansible.cfg").write_text(
        f"[defaults]\nforks = 10\ninterpreter_python = /usr/bin/python3\ngathering = explicit\nretry_files_enabled = False\n"
        f"[ssh_connection]\npipelining = True\nssh_args = -o ControlMaster=auto -o ControlPersist=60s\ncontrol_path_dir = {folder}/cp\n"
    )
    common = f"-F /dev/null -o UserKnownHostsFile={job.known_hosts} -o IdentitiesOnly=yes"
    (folder / "hosts.ini").write_text("".join(
        f"h{n} ansible_host=127.0.0.1 ansible_port={port} ansible_user=root ansible_ssh_private_key_file={job.key} "
        f"ansible_ssh_common_args={shlex.quote(common)}\n"
        for n, port in enumerate(job.ports)
    ))  # fmt: skip
    tasks: list[dict[str, Any]] = [{"file": {"path": "/opt/bench-app", "state": "directory", "mode": "0755"}}]
    for name, path in FILES.items():
        copy: dict[str, Any] = {"copy": {"src": job.files[name], "dest": path, "mode": "0644"}}
        tasks.append({**copy, "register": "unit"} if name == UNIT else copy)
    tasks += [
        {"systemd": {"daemon_reload": True}, "when": "unit.changed"},
        {"systemd": {"name": UNIT, "state": "started"}},
    ]
    (folder / "play.yml").write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    return ["ansible-playbook", "-i", str(folder / "hosts.ini"), str(folder / "play.yml")]


HERE = {"one exec": one_exec, "fabric": fabric, "ssh + scp": ssh_scp}
ELSEWHERE = {"pyinfra": pyinfra, "ansible": ansible}

if __name__ == "__main__":
    os.environ.pop("SSH_AUTH_SOCK", None)
    HERE[sys.argv[1]](Job.read(sys.argv[2]))
