"""A deploy's wall time and round trips beside other tools and the bound of one exec, all in one run on real hosts.

    MTPDEPLOY_LAB=1 python bench/deploy.py [--runs 5] [--hosts 1,8] [--delay-ms 50] [--peers DIR] [--json FILE]

Needs root, and what the tests' lab needs (tests/lab/hosts.sh: systemd-nspawn hosts with their own sshd and systemd). Each host is
behind a relay that delays every byte by half the round trip each way; it answers TCP's own handshake at once, so a real network adds
one round trip to each tool. Whole processes are timed: start, imports, connections, job. The tools take turns, and each time is the
least of the runs, since noise only adds. Round trips are the slope of the time between no delay and --delay-ms, so that what a host
itself takes cancels out.

    mtpdeploy    the shipped `mtp` profile on a simulated SGLang under systemd. unchanged: one exec; the server is proven ours, fresh
                 and ready. changed: one variable differs; the serving launch is stopped until its port is free, the new one is started
    one exec     one Paramiko connection with TCP_NODELAY and one `sh -s` a host, everything on its stdin: the bound
    fabric       as a plain script uses it; ssh + scp: a connection for each of three steps
    pyinfra, ansible    from the environment --peers, made if it is not there (bench/requirements-deploy-peers.txt); Ansible with
                 pipelining, and with ControlPersist: its connections are open already

`unchanged`: nothing differs. `changed`: for the peers nothing is there yet. Their job is smaller: a folder, three files, reload, start;
they prove nothing, look at no port or GPU, and stop no server. So `changed` is no comparison of like with like, and `unchanged` is one
in which mtpdeploy does more.
"""

from __future__ import annotations

import argparse
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
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import deploypeers  # noqa: E402
import yaml  # noqa: E402
from deploypeers import ELSEWHERE, FRESH, HERE, Job, write_files  # noqa: E402

from mtpdeploy.inventory.values import Simulate  # noqa: E402
from tests.lab.lab import Lab, address, script, why_not  # noqa: E402


class Relay:
    """Carries connections to `target`, every byte `rtt_s / 2` late in each direction, in order."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target, self.rtt_s = target, 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._listener.accept()
            there = socket.create_connection(self._target)
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


# ---------------------------------------------------------------- the measurement


def run(argv: list[str], folder: Path, **environ: str) -> tuple[float, str]:
    """Seconds and stdout of a whole process."""
    env = {**os.environ, "HOME": str(folder), **environ}
    env.pop("SSH_AUTH_SOCK", None)
    began = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=folder, timeout=300)
    took = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{shlex.join(argv)}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return took, done.stdout


def peers_environment(folder: Path) -> Path:
    """The bin folder of the peers' environment; made at the first use."""
    if not (folder / "bin" / "ansible-playbook").exists():
        print(f"making {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        wanted = str(ROOT / "bench" / "requirements-deploy-peers.txt")
        subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", "-r", wanted], check=True)
    return folder / "bin"


class Bench:
    """The lab, its relays, a home for mtpdeploy, and a folder for each peer."""

    def __init__(self, base: Path, lab: Lab, names: list[str], peers: Path | None, wanted: list[str]) -> None:
        self.base, self.lab, self.names, self.wanted = base, lab, names, wanted
        self.relays = {name: Relay((address(name), 22)) for name in names}
        key, book = lab.keys()
        self.key = key
        listed: dict[str, list[str]] = {}
        for words in map(str.split, Path(book).read_text().splitlines()):
            listed.update(dict.fromkeys(words[0].split(","), words[1:3]))
        self.known = base / "known_hosts"
        self.known.write_text("".join(
            f"[127.0.0.1]:{relay.port} {' '.join(listed[address(name)])}\n" for name, relay in self.relays.items()
        ))  # fmt: skip
        self.home = base / "home"
        (self.home / "inventories").mkdir(parents=True)
        hosts: dict[str, Any] = {}
        for name, relay in self.relays.items():
            said = lab.host(name, "root", Simulate(clock=200), supervisor="systemd", groups=["all"])
            ssh = {**said["ssh"], "known_hosts_file": str(self.known), "connect_timeout_s": 10}
            hosts[name] = {**said, "address": "127.0.0.1", "port": relay.port, "ssh": ssh}
        (self.home / "inventories" / "bench.yml").write_text(yaml.safe_dump({"hosts": hosts}))
        (base / "files").mkdir()
        self.files = write_files(base / "files")
        self.peers = peers
        self.version = 0

    def delay(self, rtt_ms: float) -> None:
        for relay in self.relays.values():
            relay.rtt_s = rtt_ms / 1000

    def mtpdeploy(self, *words: str) -> tuple[float, str]:
        return run([sys.executable, "-m", "mtpdeploy", *words], self.base, MTPDEPLOY_HOME=str(self.home))

    def ours(self, names: list[str], state: str) -> float:
        deploy = ["deploy", "--host", ",".join(names), "--profile", "mtp", "--json", "--quiet"]
        if state == "changed":  # a server that is still loading would be stopped differently from one that serves
            self.mtpdeploy(*deploy)
            self.version += 1
            return self.mtpdeploy(*deploy, "--no-wait", "--set", f"env.BENCH_VERSION={self.version}")[0]
        took, said = self.mtpdeploy(*deploy)
        answers = json.loads(said)
        for answer in answers["hosts"].values() if "hosts" in answers else [answers]:
            if answer["outcome"] != "unchanged":
                sys.exit(f"an unchanged deploy changed something: {said}")
        return took

    def theirs(self, tool: str, names: list[str], state: str) -> float:
        folder = self.base / f"{tool.replace(' ', '')}-{len(names)}"
        folder.mkdir(exist_ok=True)
        job = Job([self.relays[name].port for name in names], self.key, str(self.known), self.files, str(folder))
        if state == "changed":
            for name in names:
                self.lab.at(name, FRESH)
        if tool in ELSEWHERE:
            assert self.peers is not None
            words = ELSEWHERE[tool](job)
            return run([str(self.peers / words[0]), *words[1:]], folder, ANSIBLE_CONFIG=str(folder / "ansible.cfg"))[0]
        path = folder / "job.json"
        path.write_text(json.dumps(job.__dict__))
        return run([sys.executable, str(deploypeers.__file__), tool, str(path)], self.base)[0]

    def tools(self, names: list[str]) -> dict[str, Callable[[str], float]]:
        wanted = [tool for tool in (*HERE, *(ELSEWHERE if self.peers is not None else ())) if tool in self.wanted]
        made: dict[str, Callable[[str], float]] = {"mtpdeploy": lambda state: self.ours(names, state)}
        for tool in wanted:
            made[tool] = partial(self.theirs, tool, names)
        return made


def measure(bench: Bench, counts: list[int], runs: int, delay_ms: float, states: list[str]) -> list[dict[str, Any]]:
    """One row for each number of hosts, state and tool."""
    times: dict[tuple[int, str, str, float], list[float]] = {}
    for count in counts:
        names = bench.names[:count]
        tools = bench.tools(names)
        for rtt in (0.0, delay_ms):
            bench.delay(rtt)
            for state in states:
                if state == "unchanged":
                    for _ in range(2):  # back to the profile as it is, and once found so
                        bench.mtpdeploy("deploy", "--host", ",".join(names), "--profile", "mtp", "--json", "--quiet")
                for number in range(runs + 1):
                    for tool, job in tools.items():
                        took = job(state)
                        print(f"{count} hosts, {rtt:g} ms, {state}, {tool}: {took:.2f} s", file=sys.stderr, flush=True)
                        if number:  # the first of each sends the agent, opens Ansible's connections, fills caches
                            times.setdefault((count, state, tool, rtt), []).append(took)
        bench.delay(0)
    rows = []
    for count in counts:
        for state in reversed(states):
            for tool in bench.tools([]):
                near, far = (min(times[count, state, tool, rtt]) for rtt in (0.0, delay_ms))
                bounds = [min(times[count, state, "one exec", rtt]) for rtt in (0.0, delay_ms)]
                rows.append({
                    "hosts": count, "state": state, "tool": tool, "seconds_no_delay": near, "seconds_delayed": far,
                    "round_trips": (far - near) / (delay_ms / 1000),
                    "times_the_bound_no_delay": near / bounds[0], "times_the_bound_delayed": far / bounds[1],
                    "runs": {str(rtt): times[count, state, tool, rtt] for rtt in (0.0, delay_ms)},
                })  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hosts", default="1,8", help="numbers of hosts, 1 to 9")
    parser.add_argument("--delay-ms", type=float, default=50)
    parser.add_argument("--peers", type=Path, help="environment of pyinfra and Ansible; without it they are left out")
    parser.add_argument(
        "--tools", default=",".join((*HERE, *ELSEWHERE)), help="which to compare with; `one exec` always"
    )
    parser.add_argument("--states", default="changed,unchanged")
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no hosts here: {reason}")
    wanted = ["one exec", *(tool for tool in told.tools.split(",") if tool != "one exec")]
    states = told.states.split(",")
    counts = [int(word) for word in told.hosts.split(",")]
    peers = peers_environment(told.peers.absolute()) if told.peers else None
    lab = Lab.up(max(counts))
    try:
        with tempfile.TemporaryDirectory(prefix="mtpdeploy-bench-") as folder:
            rows = measure(
                Bench(Path(folder), lab, list(lab.names), peers, wanted), counts, told.runs, told.delay_ms, states
            )
    finally:
        script("down")
    print(
        f"least of {told.runs} runs in turn; round trip {told.delay_ms:g} ms; the server is simulated, sshd and systemd are real"
    )
    print(f"{'hosts':>5}  {'':10}{'':11}{'no delay':>10}{'x bound':>9}{'delayed':>10}{'x bound':>9}{'round trips':>13}")
    for row in rows:
        print(
            f"{row['hosts']:>5}  {row['state']:10}{row['tool']:11}{row['seconds_no_delay']:>8.2f} s{row['times_the_bound_no_delay']:>9.2f}"
            f"{row['seconds_delayed']:>8.2f} s{row['times_the_bound_delayed']:>9.2f}{row['round_trips']:>13.1f}"
        )
    if told.json:
        told.json.write_text(json.dumps({"runs": told.runs, "delay_ms": told.delay_ms, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
