"""The benchmark beside the server: a real agent and a simulated SGLang on this machine, cut lines and interrupts included."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtpdeploy.actions import benchhost
from mtpdeploy.actions.bench import bench
from mtpdeploy.actions.benchservice import nonce
from mtpdeploy.actions.deploy import deploy
from mtpdeploy.actions.launches import stop
from mtpdeploy.actions.report import BenchAnswer, report
from mtpdeploy.errors import LineCut, NotFound, NotOurs, UsageError
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.progress import Silent
from mtpdeploy.resources import bundled
from mtpdeploy.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home whose only host is this machine, with the mtp profile serving."""
    stage = tmp_path_factory.mktemp("bench-host")
    inventory = yaml.safe_load((bundled("inventories") / "local.yml").read_text())
    host = inventory["hosts"]["local"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host["args"]["port"] = probe.getsockname()[1]
    host["workdir"] = str(stage / "work")
    host["simulate"]["clock"] = 10
    (stage / "inventories").mkdir()
    (stage / "inventories" / "rehearsal.yml").write_text(yaml.safe_dump(inventory))
    deploy(home=stage, talk=Silent(), host="local", profile="mtp", inventory=(), set_=())
    yield stage
    stop(home=stage, talk=Silent(), host="local", inventory=())


def measure(home: Path, **options: Any) -> BenchAnswer:
    answer = bench(home=home, talk=Silent(), host="local", **({"requests": 6, "output_tokens": "64"} | options))
    assert isinstance(answer, BenchAnswer)
    return answer


def test_a_plain_bench_measures_the_deployed_launch_at_one_and_at_its_limit(service: Path) -> None:
    answer = bench(home=service, talk=Silent())
    assert [point.concurrency for point in answer.points] == [1, 4]
    assert all(point.completed == 16 for point in answer.points)
    told = answer.as_json()
    assert (told["simulated"], told["host"], told["profile"]) == (True, "local", "mtp")
    provenance = answer.meta["provenance"]
    assert provenance["launch_id"]
    assert provenance["client_place"] == "host"
    assert provenance["args"]["speculative_num_steps"] == 3
    assert provenance["capacity"]["max_running_requests"] == 4
    assert "port owner descends from it" in provenance["proof"]
    assert provenance["effective_args"]["speculative_num_draft_tokens"] == 4
    assert provenance["versions"]["sglang"] == provenance["sglang_version"]
    assert provenance["client"]["mtpdeploy"]
    assert (provenance["gpu"], provenance["driver"] is None) == ("NVIDIA H200", False)
    assert answer.points[0].accept_length == pytest.approx(3.2, abs=0.4)
    assert not list((service / "work" / "bench").iterdir())  # the copy at the host is gone once the records are here


def test_from_here_measures_the_same_service_through_a_tunnel(service: Path) -> None:
    answer = measure(service, concurrency="2", from_="here")
    provenance = answer.meta["provenance"]
    assert provenance["client_place"] == "here"
    assert provenance["versions"]["sglang"] == provenance["sglang_version"]  # read at the server's host
    assert answer.points[0].completed == 6
    (facts,) = Store(service).run(answer.run_id).read_jsonl("measured.jsonl")
    for side in ("server_before", "server_after"):  # proven by the agent, before and after
        assert {"launch_id", "boot", "pid", "started"} <= set(facts[side])  # type: ignore[call-overload]
    assert facts["server_before"]["launch_id"] == provenance["launch_id"]  # type: ignore[index]


def test_two_benchmarks_of_one_launch_never_send_the_same_request(service: Path) -> None:
    runs = [measure(service, concurrency="1", requests=2, output_tokens="8") for _ in range(2)]
    sent = [{line["sent"] for line in Store(service).run(one.run_id).read_jsonl("outputs.jsonl")} for one in runs]
    assert len(sent[0]) == len(sent[1]) == 2
    assert sent[0].isdisjoint(sent[1])


def test_the_first_benchmarks_of_two_launches_send_the_same_requests(tmp_path: Path) -> None:
    launches = ("20261130T101500Z-aaaaaa", "20261130T102500Z-bbbbbb")
    first, other = (nonce(tmp_path, launch, 1, 0) for launch in launches)
    assert first == other is not None
    run = Store(tmp_path).new_run("bench", {"provenance": {"launch_id": launches[0], "boot": 1}})
    run.path.rename(run.path.with_name("20261130-101600-abcd"))
    again = nonce(tmp_path, launches[0], 1, 0)
    assert again != first
    assert (
        nonce(tmp_path, launches[0], 2, 0) == nonce(tmp_path, launches[1], 1, 0) == first
    )  # a restart empties the cache
    assert nonce(tmp_path, launches[1], 1, 7) != first
    assert nonce(tmp_path, None, None, 0) is None


def test_a_cut_line_loses_no_record(service: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = AgentClient.call
    cuts = []

    def call(self: AgentClient, verb: Any, request: Any = None, *, on_event: Any = lambda event: None) -> Any:
        heard = 0

        def hear(event: dict[str, Any]) -> None:
            nonlocal heard
            on_event(event)
            heard += 1
            if verb == "bench" and len(cuts) < 2 and heard == 4:
                cuts.append(1)
                raise LineCut("scripted")

        return whole(self, verb, request, on_event=hear)

    monkeypatch.setattr(AgentClient, "call", call)
    monkeypatch.setattr(benchhost, "REATTACH_EVERY_S", 0.05)
    answer = measure(service, concurrency="1,2", output_tokens="400")
    assert len(cuts) == 2
    assert [point.completed for point in answer.points] == [6, 6]
    assert len((answer.path / "records.jsonl").read_text().splitlines()) == 12


def test_a_client_that_went_away_takes_its_benchmark_up_again(service: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchhost, "REATTACH_TIMES", 0)
    whole = AgentClient.call

    def call(self: AgentClient, verb: Any, request: Any = None, *, on_event: Any = lambda event: None) -> Any:
        def hear(event: dict[str, Any]) -> None:
            on_event(event)
            if verb == "bench" and (event.get("data") or {}).get("what") == "progress":
                raise LineCut("scripted")

        return whole(self, verb, request, on_event=hear)

    with monkeypatch.context() as patch:
        patch.setattr(AgentClient, "call", call)
        with pytest.raises(LineCut) as cut:
            measure(service, concurrency="1", output_tokens="400")
    command = cut.value.next_commands[0]
    assert command.startswith("mtpdeploy bench --attach ")
    answer = bench(home=service, talk=Silent(), attach=command.split()[-1])
    assert answer.points[0].completed == 6
    assert report(home=service, talk=Silent(), run=answer.run_id).as_json() == answer.as_json()
    with pytest.raises(UsageError, match="complete"):
        bench(home=service, talk=Silent(), attach=answer.run_id)


def test_ctrl_c_stops_the_load_at_the_host_and_keeps_complete_points(service: Path) -> None:
    runs = service / "work" / "bench"
    before = set(runs.glob("*/events.jsonl"))  # of other tests: the signal belongs to this one's load

    def press() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            files = set(runs.glob("*/events.jsonl")) - before
            if any('"what":"measured"' in file.read_text() for file in files):
                break
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    answer = measure(service, concurrency="1,2", requests=40, output_tokens="600")
    thread.join()
    assert answer.exit_code == 130
    assert answer.points[0].valid, answer.points[0].invalid_because
    assert answer.points[0].completed == 40
    assert len(answer.points) == 1 or not answer.points[1].complete


def test_a_service_that_is_not_deployed_is_not_measured(service: Path, tmp_path: Path) -> None:
    (tmp_path / "inventories").mkdir()
    text = (service / "inventories" / "rehearsal.yml").read_text().replace(str(service), str(tmp_path))
    (tmp_path / "inventories" / "rehearsal.yml").write_text(text)
    with pytest.raises((NotFound, NotOurs)):
        measure(tmp_path, profile="mtp", concurrency="1")
    assert not (tmp_path / "runs").is_dir() or not list((tmp_path / "runs").glob("2*"))
