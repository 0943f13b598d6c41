"""Several hosts at once: every answer arrives, in order, and an interrupt does not wait for the slowest."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest

from mtpdeploy.errors import HostUnreachable, LaunchFailed, MtpError
from mtpdeploy.hosts.fanout import Outcomes, on_hosts
from mtpdeploy.inventory.values import Host


@dataclass(frozen=True)
class Said:
    word: str
    exit_code: int = 0

    def as_json(self) -> dict[str, object]:
        return {"word": self.word}


HOSTS = [Host(f"gpu{n}", address=f"10.0.0.{n}") for n in range(1, 5)]


def test_answers_keep_the_inventory_s_order_though_the_first_host_is_the_slowest() -> None:
    def work(host: Host) -> Said:
        time.sleep(0.05 if host.name == "gpu1" else 0)
        return Said(host.name)

    answer = on_hosts(HOSTS, work)
    assert isinstance(answer, Outcomes)
    assert list(answer.by_host) == ["gpu1", "gpu2", "gpu3", "gpu4"]
    assert answer.as_json() == {"hosts": {host.name: {"word": host.name} for host in HOSTS}}


def test_a_host_that_fails_hides_no_other_and_its_exit_code_is_the_answer_s() -> None:
    def work(host: Host) -> Said:
        if host.name == "gpu2":
            raise LaunchFailed("gpu2: out of memory")
        if host.name == "gpu3":
            raise HostUnreachable("gpu3: it does not answer")
        return Said(host.name)

    answer = on_hosts(HOSTS, work)
    assert isinstance(answer, Outcomes)
    assert set(answer.failed) == {"gpu2", "gpu3"}
    assert answer.exit_code == max(LaunchFailed.exit_code, HostUnreachable.exit_code)
    assert answer.by_host["gpu4"] == Said("gpu4")


def test_one_host_answers_plainly_and_its_error_is_raised() -> None:
    def refuse(host: Host) -> Said:
        raise HostUnreachable("gpu1: it does not answer")

    assert on_hosts(HOSTS[:1], lambda host: Said(host.name)) == Said("gpu1")
    with pytest.raises(MtpError):
        on_hosts(HOSTS[:1], refuse)


def test_a_hundred_hosts_are_all_worked_on_at_the_same_time() -> None:
    many = [Host(f"h{n}", address="10.0.0.1") for n in range(100)]
    together = threading.Barrier(100, timeout=10)  # broken, unless all hundred wait at once

    def work(host: Host) -> Said:
        together.wait()
        return Said(host.name)

    answer = on_hosts(many, work)
    assert isinstance(answer, Outcomes)
    assert not answer.failed


def test_an_interrupt_ends_the_program_although_a_host_is_still_at_work() -> None:
    code = (
        "import time\nfrom mtpdeploy.hosts.fanout import on_hosts\nfrom mtpdeploy.inventory.values import Host\n"
        "def work(host):\n    print('at work', flush=True)\n    time.sleep(60)\n"
        "on_hosts([Host('a', address='1'), Host('b', address='2')], work)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(5) != 0
    finally:
        process.kill()
