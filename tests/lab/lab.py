"""The lab's hosts from Python: up and down, the simulated SGLang on each, and an inventory that leads to them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mtpdeploy.inventory.values import Simulate

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = Path(__file__).with_name("hosts.sh")
# Labs with different numbers share nothing: one for each worker of pytest-xdist, ten for each MTPDEPLOY_LAB.
NUMBER = int(os.environ.get("MTPDEPLOY_LAB", "0")) * 10 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
FOLDER = Path(f"/var/tmp/mtpdeploy-lab-{NUMBER}")
TOOLS = ("systemd-nspawn", "sshd", "ssh", "ip", "tmux", "nsenter", "sudo")
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def why_not() -> str | None:
    """Why there can be no lab here; None if there can."""
    if os.geteuid() != 0:
        return "real hosts need root"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=SEARCH) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Lab:
    """`names`: the hosts, mtph1, mtph2, ... in every lab. Users of each: root, deploy (no sudo), ops (sudo without a password)."""

    names: tuple[str, ...]

    @classmethod
    def up(cls, count: int) -> Lab:
        script("up", str(count))
        return cls(tuple(f"mtph{n}" for n in range(1, count + 1)))

    def down(self) -> None:
        script("down")

    def at(self, name: str, command: str, check: bool = True) -> str:
        """What `command` prints, as root inside the host and not through ssh."""
        return script("exec", name, "sh", "-c", command, check=check)

    def simulate(self, name: str, user: str, played: Simulate) -> dict[str, str]:
        """Puts the simulated SGLang into the user's home; the environment that makes it the host's SGLang."""
        told = {key: getattr(played, key) for key in played.__slots__}
        code = (
            "import json, sys, pathlib\nfrom mtpdeploy import sim\nfrom mtpdeploy.inventory.values import Simulate\n"
            "print(json.dumps(sim.install(pathlib.Path.home() / 'sim', Simulate(**json.loads(sys.argv[1])))))"
        )
        line = shlex.join([sys.executable, "-c", code, json.dumps(told)])
        env: dict[str, str] = json.loads(self.at(name, f"runuser -l {user} -c {shlex.quote(line)}"))
        return env

    def host(self, name: str, user: str, played: Simulate, **said: Any) -> dict[str, Any]:
        """The host as an inventory says it."""
        return {
            "address": f"10.79.{NUMBER}.{10 + int(name.removeprefix('mtph'))}",
            "user": user,
            "python": sys.executable,
            "ready_timeout_s": 20,
            "drain_timeout_s": 2,
            "ssh": {
                "config_file": "/dev/null",
                "identity_file": str(FOLDER / "ssh" / "user"),
                "known_hosts_file": str(FOLDER / "ssh" / "known_hosts"),
                "connect_timeout_s": 4,
            },
            "env": self.simulate(name, user, played),
            "args": {"port": 30000},
            **said,
        }


def script(*words: str, check: bool = True) -> str:
    binds = sorted({str(ROOT), str(Path(sys.base_prefix).resolve())} - {"/usr"})
    environ = {**os.environ, "PATH": SEARCH, "LAB": str(NUMBER), "LAB_BIND": " ".join(binds)}
    named = [f"mtp{NUMBER}h{word[4:]}" if re.fullmatch(r"mtph[1-9]", word) else word for word in words]
    done = subprocess.run([str(SCRIPT), *named], capture_output=True, text=True, env=environ, timeout=120)
    if check and done.returncode:
        raise RuntimeError(f"hosts.sh {' '.join(words)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class Person:
    """Somebody at a laptop: a home folder with an inventory, and the two doors."""

    home: Path

    def knows(self, hosts: dict[str, dict[str, Any]]) -> None:
        folder = self.home / "inventories"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lab.yml").write_text(yaml.safe_dump({"hosts": hosts}))

    def start(self, *words: str, door: str = "mtpdeploy") -> subprocess.Popen[str]:
        """A command that goes on; its session is its own, so that it can be killed with all it started."""
        return subprocess.Popen(
            self._argv(door, words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.home,
            env=self._environ(), start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )  # fmt: skip

    def run(self, *words: str, code: int | None = 0, door: str = "mtpdeploy") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self._argv(door, words), capture_output=True, text=True, cwd=self.home, env=self._environ(), timeout=120
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert code is None or done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def ask(self, *words: str, code: int | None = 0, door: str = "mtpdeploy") -> Any:
        """The answer as JSON."""
        return json.loads(self.run(*words, "--json", code=code, door=door).stdout)

    def _argv(self, door: str, words: tuple[str, ...]) -> list[str]:
        return [str(Path(sys.executable).parent / door), *words]

    def _environ(self) -> dict[str, str]:
        return {**os.environ, "MTPDEPLOY_HOME": str(self.home), "PYTHONPATH": str(ROOT)}
