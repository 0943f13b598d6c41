"""A deploy's wall time and round trips against plain Fabric and against the bound of one exec, all in one run on one sshd.

    python bench/deploy.py [--runs 5] [--delay-ms 50] [--json FILE]

The host is a real OpenSSH on loopback behind a relay that delays every byte by half the round trip each way. Whole processes are
timed: Python's start, imports, connection, job. Each time is the least of interleaved runs, since noise only adds. Round trips are the
slope of the time between no delay and --delay-ms, so that what the host itself takes cancels out. The relay answers TCP's own
handshake at once, so a real network adds one to each.

    mtpdeploy        `mtpdeploy deploy` of the shipped `mtp` profile on a simulated SGLang; unchanged: the server is proven ours, fresh, ready
    fabric           Fabric as a plain script uses it: mkdir, then sha256sum, put and mv for each of three files, then start
    fabric-nodelay   the same with TCP_NODELAY on its socket
    one-exec         one Paramiko connection with TCP_NODELAY and one `sh -s` with everything on stdin: the bound

`unchanged`: nothing differs. `changed`: the files differ; what was started is not waited for. The peers' job is smaller: they look at
no process, GPU or port, and stop no server.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import queue
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PEERS = ("fabric", "fabric-nodelay", "one-exec")
FILES = {"launch.sh": 800, "env": 300, "server.service": 900}  # name → bytes, about those of a release


class Relay:
    """Carries connections to `target`, every byte `rtt_s / 2` late in each direction, in order."""

    def __init__(self, target: int) -> None:
        self._target, self.rtt_s = target, 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._listener.accept()
            there = socket.create_connection(("127.0.0.1", self._target))
            for each in (here, there):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink in ((here, there), (there, here)):
                waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(target=self._read, args=(source, waiting), daemon=True).start()
                threading.Thread(target=self._write, args=(sink, waiting), daemon=True).start()

    def _read(self, source: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"."
        while data:
            try:
                data = source.recv(256 * 1024)
            except OSError:
                data = b""
            waiting.put((time.perf_counter() + self.rtt_s / 2, data))

    def _write(self, sink: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            due, data = waiting.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            try:
                if not data:
                    return sink.shutdown(socket.SHUT_WR)
                sink.sendall(data)
            except OSError:
                return


# ---------------------------------------------------------------- the peers' job, run in a process of its own


def content(name: str, version: int) -> bytes:
    return (f"# {name} {version}\n" * 200).encode()[: FILES[name]]


def fabric_job(port: int, key: str, known_hosts: str, folder: str, version: int, nodelay: bool) -> None:
    from fabric import Connection

    options: dict[str, Any] = {"key_filename": key, "look_for_keys": False, "allow_agent": False}
    if nodelay:
        sock = socket.create_connection(("127.0.0.1", port), 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        options["sock"] = sock
    quiet: dict[str, Any] = {"hide": True, "in_stream": False}
    with Connection("127.0.0.1", user="root", port=port, connect_kwargs=options) as host:
        host.client.load_host_keys(known_hosts)
        host.run(f"mkdir -p {folder}", **quiet)
        for name in FILES:
            data, path = content(name, version), f"{folder}/{name}"
            have = host.run(f"sha256sum {path} 2>/dev/null || true", **quiet).stdout.split()
            if have[:1] != [hashlib.sha256(data).hexdigest()]:
                local = Path(tempfile.gettempdir(), f"bench-{os.getpid()}-{name}")
                local.write_bytes(data)
                host.put(str(local), f"{path}.new")
                local.unlink()
                host.run(f"chmod 644 {path}.new && mv {path}.new {path}", **quiet)
        host.run("true", **quiet)  # start


def one_exec_job(port: int, key: str, known_hosts: str, folder: str, version: int) -> None:
    import paramiko

    script = [f"set -e; mkdir -p {folder}; cd {folder}"]
    for name in FILES:
        data = content(name, version)
        script.append(
            f'if [ "$(sha256sum {name} 2>/dev/null | cut -c1-64)" = {hashlib.sha256(data).hexdigest()} ]; then cat >/dev/null; '
            f"else base64 -d >{name}.new; chmod 644 {name}.new; mv {name}.new {name}; fi <<'END'\n"
            f"{base64.encodebytes(data).decode()}END"
        )
    script.append("true")
    sock = socket.create_connection(("127.0.0.1", port), 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client = paramiko.SSHClient()
    client.load_host_keys(known_hosts)
    login = paramiko.Ed25519Key.from_private_key_file(key)
    client.connect("127.0.0.1", port, "root", pkey=login, look_for_keys=False, allow_agent=False, sock=sock)
    transport = client.get_transport()
    assert transport is not None
    channel = transport.open_session()
    channel.exec_command("sh -s")
    channel.sendall(("\n".join(script) + "\n").encode())
    channel.shutdown_write()
    while channel.recv(65536):
        pass
    assert channel.recv_exit_status() == 0
    client.close()


def peer(words: list[str]) -> None:
    name, port, key, known_hosts, folder, version = words
    if name == "one-exec":
        one_exec_job(int(port), key, known_hosts, folder, int(version))
    else:
        fabric_job(int(port), key, known_hosts, folder, int(version), name == "fabric-nodelay")


# ---------------------------------------------------------------- the measurement


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def run(argv: list[str], home: Path) -> tuple[float, str]:
    environ = {**os.environ, "MTPDEPLOY_HOME": str(home), "HOME": str(home)}
    began = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, env=environ, cwd=home, timeout=180)
    took = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{shlex.join(argv)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return took, done.stdout


def measure(runs: int, delay_ms: float) -> dict[str, dict[str, Any]]:
    import yaml

    from mtpdeploy import sim
    from mtpdeploy.inventory.values import Simulate
    from tests.sshd import Sshd

    with tempfile.TemporaryDirectory(prefix="mtpdeploy-bench-") as folder:
        base = Path(folder)
        home = base / "home"
        (home / "inventories").mkdir(parents=True)
        sshd = Sshd(base / "sshd").start()
        relay = Relay(sshd.port)
        known = base / "known_hosts"
        known.write_text(sshd.known_hosts.read_text().replace(f":{sshd.port} ", f":{relay.port} "))
        said = sshd.inventory_host()
        ssh: Any = said["ssh"]
        said |= {
            "port": relay.port,
            "python": sys.executable,
            "workdir": str(base / "work"),
            "supervisor": "detached",
            "drain_timeout_s": 1,
            "env": sim.install(base / "shim", Simulate(clock=100), sys.executable),
            "args": {"port": free_port()},
            "ssh": {**ssh, "known_hosts_file": str(known)},
        }
        (home / "inventories" / "bench.yml").write_text(yaml.safe_dump({"hosts": {"bench": said}}))
        door = [sys.executable, "-m", "mtpdeploy"]
        deploy = [*door, "deploy", "--host", "bench", "--profile", "mtp", "--json", "--quiet"]
        version = 0

        def ours(state: str) -> float:
            if state == "changed":  # a server that is still loading would be stopped differently from one that serves
                run(deploy, home)
                return run([*deploy, "--no-wait", "--set", f"env.BENCH_VERSION={version}"], home)[0]
            took, out = run(deploy, home)
            if json.loads(out)["outcome"] != "unchanged":
                sys.exit(f"an unchanged deploy changed something: {out}")
            return took

        def theirs(name: str) -> Callable[[str], float]:
            job = [
                sys.executable,
                str(Path(__file__).resolve()),
                "--peer",
                name,
                str(relay.port),
                str(ssh["identity_file"]),
            ]
            return lambda state: run([*job, str(known), str(base / name), str(version)], home)[0]

        tools: dict[str, Callable[[str], float]] = {"mtpdeploy": ours, **{name: theirs(name) for name in PEERS}}
        times: dict[tuple[str, str, float], list[float]] = {}
        try:
            for rtt in (0.0, delay_ms):
                relay.rtt_s = rtt / 1000
                for state in ("changed", "unchanged"):
                    for number in range(runs + 1):
                        version += state == "changed"
                        for name, job in tools.items():
                            if state == "unchanged" and number == 0 and name == "mtpdeploy":
                                run(deploy, home)  # back to the profile as it is
                            took = job(state)
                            if number:  # the first of each is not counted: it sends the agent, fills caches
                                times.setdefault((name, state, rtt), []).append(took)
        finally:
            relay.rtt_s = 0
            subprocess.run(
                [*door, "stop", "--host", "bench", "--quiet"],
                env={**os.environ, "MTPDEPLOY_HOME": str(home), "HOME": str(home)},
                stdout=subprocess.DEVNULL, check=False,
            )  # fmt: skip
            sshd.stop()
    result: dict[str, dict[str, Any]] = {}
    for state in ("unchanged", "changed"):
        for name in tools:
            near, far = (min(times[name, state, rtt]) for rtt in (0.0, delay_ms))
            bound = min(times["one-exec", state, delay_ms])
            plain = min(times["fabric", state, delay_ms])
            result[f"{name} {state}"] = {
                "seconds_no_delay": near,
                "seconds_delayed": far,
                "round_trips": (far - near) / (delay_ms / 1000),
                "times_the_bound": far / bound,
                "times_plain_fabric": far / plain,
            }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=50)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", nargs=6, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.peer:
        peer(told.peer)
        return 0
    result = measure(told.runs, told.delay_ms)
    print(
        f"the least of {told.runs} interleaved runs; round trip {told.delay_ms:g} ms; the server is simulated, ssh is real"
    )
    print(f"{'':26}{'no delay':>10}{'delayed':>10}{'round trips':>13}{'x one exec':>12}{'x fabric':>10}")
    for name, row in result.items():
        print(
            f"{name:26}{row['seconds_no_delay']:>8.2f} s{row['seconds_delayed']:>8.2f} s{row['round_trips']:>13.1f}"
            f"{row['times_the_bound']:>12.2f}{row['times_plain_fabric']:>10.2f}"
        )
    if told.json:
        told.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
