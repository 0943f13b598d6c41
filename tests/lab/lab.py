"""The lab's hosts from Python: up and down, the simulated SGLang on each, and an inventory that leads to them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mtpdeploy.inventory.values import Simulate
from tests.lab.doors import Doors, Running

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = Path(__file__).with_name("hosts.sh")
# Labs with different numbers share nothing: one for each worker of pytest-xdist, ten for each MTPDEPLOY_LAB.
NUMBER = int(os.environ.get("MTPDEPLOY_LAB", "0")) * 10 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
FOLDER = Path(f"/var/tmp/mtpdeploy-lab-{NUMBER}")
TOOLS = ("systemd-nspawn", "sshd", "ssh", "ip", "tmux", "nsenter", "sudo")
PASSWORD = f"S3cret pass'word {4241 + NUMBER}"  # of boss; in no file as it is, so that it can be looked for
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def why_not() -> str | None:
    """Why there can be no lab here; None if there can."""
    if os.geteuid() != 0:
        return "real hosts need root"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=SEARCH) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Lab:
    """`names`: the hosts, mtph1, mtph2, ... in every lab. Users of each: root, deploy (no sudo), ops (sudo without
    a password), boss (sudo that asks for the password `PASSWORD`)."""

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

    def keys(self) -> tuple[str, str]:
        """The user's private key, and the known_hosts of the lab."""
        return str(FOLDER / "ssh" / "user"), str(FOLDER / "ssh" / "known_hosts")

    def give_pid(self, name: str, pid: int) -> str:
        """Gives a stranger (`sleep 600`) in the host exactly that pid; its command line."""
        return script("givepid", name, str(pid))

    def hold(self, name: str, pid: int) -> None:
        """Puts a process of the host, and what it starts from now on, into a control group whose memory can be limited."""
        script("hold", name, str(pid))

    def starve(self, name: str) -> None:
        """Leaves that group no memory to grow into: the kernel itself kills."""
        script(
            "limit", name, "16384", check=False
        )  # below what is used: v1 says that it is busy, and limits all the same

    def feed(self, name: str) -> None:
        """Takes the limit away."""
        script("limit", name, "max")

    def kernel_kills(self, name: str) -> int:
        """How often the kernel has killed in that group."""
        return int(script("kills", name))

    def simulate(self, name: str, user: str, played: Simulate) -> dict[str, str]:
        """Puts the simulated SGLang into the user's home; the environment that makes it the host's SGLang."""
        told = {key: getattr(played, key) for key in played.__slots__}
        code = (
            "import json, sys, pathlib\nfrom mtpdeploy import sim\nfrom mtpdeploy.inventory.values import Simulate\n"
            "print(json.dumps(sim.install(pathlib.Path.home() / 'sim', Simulate(**json.loads(sys.argv[1])))))"
        )
        line = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", code, json.dumps(told)])
        env: dict[str, str] = json.loads(self.at(name, f"runuser -l {user} -c {shlex.quote(line)}"))
        return env

    def host(self, name: str, user: str, played: Simulate, **said: Any) -> dict[str, Any]:
        """The host as an inventory says it."""
        return {
            "address": address(name),
            "user": user,
            "python": sys.executable,
            "ready_timeout_s": 20,
            "drain_timeout_s": 2,
            "ssh": {
                "config_file": "/dev/null",
                "identity_file": self.keys()[0],
                "known_hosts_file": self.keys()[1],
                "connect_timeout_s": 4,
            },
            "env": self.simulate(name, user, played),
            "args": {"port": 30000},
            **said,
        }


def address(name: str) -> str:
    """Of a host, or of this machine as the hosts see it (`gate`)."""
    return f"10.79.{NUMBER}.{1 if name == 'gate' else 10 + int(name.removeprefix('mtph'))}"


def python() -> str:
    """The tests' interpreter, by a path that the hosts have too."""
    return shlex.quote(str(Path(sys.executable)))


def script(*words: str, check: bool = True) -> str:
    binds = sorted({str(ROOT), str(Path(sys.prefix)), str(Path(sys.base_prefix).resolve())} - {"/usr"})
    environ = {**os.environ, "PATH": SEARCH, "LAB": str(NUMBER), "LAB_BIND": " ".join(binds), "LAB_PASSWORD": PASSWORD}
    named = [f"mtp{NUMBER}h{word[4:]}" if re.fullmatch(r"mtph[1-9]", word) else word for word in words]
    done = subprocess.run([str(SCRIPT), *named], capture_output=True, text=True, env=environ, timeout=120)
    if check and done.returncode:
        raise RuntimeError(f"hosts.sh {' '.join(words)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Person:
    """Somebody at a laptop: a home folder with an inventory, and the two doors."""

    home: Path
    doors: Doors

    def knows(self, hosts: dict[str, dict[str, Any]]) -> None:
        """Replaces the inventory."""
        folder = self.home / "inventories"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lab.yml").write_text(yaml.safe_dump({"hosts": hosts}))

    def start(self, *words: str, stdin: int | None = None, env: dict[str, str] | None = None) -> Running:
        """A command that goes on; its session is its own, so that it can be killed with all it started."""
        return self.doors.start(words, env={**self._environ(), **(env or {})}, cwd=self.home, stdin=stdin)

    def run(
        self, *words: str, code: int | None = 0, door: str = "mtpdeploy", limit_s: float = 120, clock_s: int = 0
    ) -> Done:
        """A command to its end. clock_s: how wrong its clock is."""
        if door == "mtpdeploy":
            running = self.start(*words, env={"CLOCK_S": str(clock_s)})
            done = Done(running.wait(limit_s), running.out, running.err)
        else:
            argv = [str(Path(sys.executable).parent / door), *words]
            ended = subprocess.run(
                argv, capture_output=True, text=True, cwd=self.home, env=self._environ(), timeout=limit_s, check=False
            )
            done = Done(ended.returncode, ended.stdout, ended.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        assert code is None or done.returncode == code, (
            f"{[word[:80] for word in words]}: exit {done.returncode}\n{done.stdout[:1500]}\n{done.stderr[-1500:]}"[
                :4000
            ]
        )
        return done

    def ask(self, *words: str, code: int | None = 0, door: str = "mtpdeploy", **more: Any) -> Any:
        """The answer as JSON."""
        return json.loads(self.run(*words, "--json", code=code, door=door, **more).stdout)

    def _environ(self) -> dict[str, str]:
        return {**os.environ, "MTPDEPLOY_HOME": str(self.home), "PYTHONPATH": str(ROOT)}
