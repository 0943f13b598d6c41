"""A real OpenSSH server on loopback: a port that the kernel chose, keys and known_hosts of its own, one `sshd -i` a connection."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def keygen(path: Path, kind: str = "ed25519") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path], check=True)
    return path


@dataclass
class Sshd:
    """Runs until `stop`. `cut` ends every open connection as a pulled cable would look to the server's children: gone."""

    folder: Path
    host_key: str = "ed25519"
    port: int = 0
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> Sshd:
        self.folder.mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        keygen(self.folder / "host", self.host_key)
        keygen(self.folder / "user")
        config = self.folder / "sshd_config"
        config.write_text(
            f"HostKey {self.folder}/host\nAuthorizedKeysFile {self.folder}/user.pub\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nSubsystem sftp internal-sftp\nPermitRootLogin yes\nLogLevel ERROR\n"
        )
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        public = (self.folder / "host.pub").read_text().split()
        self.known_hosts = self.folder / "known_hosts"
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {public[0]} {public[1]}\n")
        threading.Thread(target=self._accept, args=(config,), daemon=True).start()
        return self

    def _accept(self, config: Path) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, (self.folder / "sshd.log").open("ab") as log:
                self.children.append(
                    subprocess.Popen(
                        [SSHD, "-i", "-e", "-f", str(config)],
                        stdin=connection.fileno(),
                        stdout=connection.fileno(),
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def cut(self) -> int:
        """Ends all connections at once; how many there were."""
        living = [child for child in self.children if child.poll() is None]
        for child in living:
            child.kill()
            child.wait()
        return len(living)

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts; close alone would not
        self._listener.close()
        self.cut()

    def inventory_host(self) -> dict[str, object]:
        """This server as a host of an inventory."""
        return {
            "address": "127.0.0.1",
            "port": self.port,
            "user": "root",
            "ssh": {
                "config_file": "/dev/null",
                "identity_file": str(self.folder / "user"),
                "known_hosts_file": str(self.known_hosts),
            },
        }
