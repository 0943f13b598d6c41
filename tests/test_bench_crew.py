"""Several client processes as one client: nothing lost, nothing sent twice, one schedule, and a death that is told."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from itertools import pairwise

import pytest
from bench_server import Mock, Script

from mtpdeploy.bench import protocol
from mtpdeploy.bench.client import Client, Endpoint, EndpointError, Ready
from mtpdeploy.bench.crew import Clients, Crew, wanted
from mtpdeploy.bench.spool import Spool
from mtpdeploy.bench.values import Message, PointSpec, Prompt, Record, Request

PROMPT = Prompt("p", "chat", (Message("user", "hello"),))


def point(count: int, concurrency: int | None = None, rate: float | None = None) -> PointSpec:
    process = "closed" if rate is None else "constant"
    requests = tuple(Request(i, PROMPT, 24, None if rate is None else i / rate) for i in range(count))
    return PointSpec(0, requests, process=process, concurrency=concurrency, rate=rate)


def work(endpoint: Endpoint, spec: PointSpec) -> list[Ready]:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 24}, "stream": True}
    return [Ready(one, endpoint.encode(body)) for one in spec.requests]


def test_a_load_over_processes_has_every_record_once_and_keeps_the_concurrency() -> None:
    spec = point(20, concurrency=5)
    with Mock(Script(first_s=0.02, step_s=0.002)) as server:
        endpoint, records = Endpoint(server.url, "sglang"), []

        async def measure() -> int:
            crew = Crew(endpoint, 2, 30.0)
            try:
                outcome = await crew.closed_loop(work(endpoint, spec), 5, 0, records.append)
                again: list[Record] = []
                await crew.closed_loop(work(endpoint, spec), 5, 1, again.append)  # the same processes
                assert len(again) == 20
                return len(outcome.parts)
            finally:
                crew.close()

        assert asyncio.run(measure()) == 2
        assert server.script.most_active == 5
    assert sorted(record.index for record in records) == list(range(20))
    assert all(record.ok for record in records)
    assert {record.lane for record in records} == set(range(5))


def test_an_open_loop_over_processes_keeps_one_schedule() -> None:
    spec = point(30, rate=100.0)
    with Mock(Script(first_s=0.02, step_s=0.002)) as server:
        endpoint, records = Endpoint(server.url, "sglang"), []

        async def measure() -> None:
            crew = Crew(endpoint, 3, 30.0)
            try:
                await crew.open_loop(work(endpoint, spec), 0, records.append)
            finally:
                crew.close()

        asyncio.run(measure())
    assert sorted(record.index for record in records) == list(range(30))
    for record in records:
        assert record.scheduled_us is not None
        assert record.start_us >= record.scheduled_us  # never early
    in_order = [record.start_us for record in sorted(records, key=lambda one: one.index)]
    assert all(later > earlier for earlier, later in pairwise(in_order[::3]))


def test_a_client_process_that_dies_leaves_failed_requests_and_an_unfinished_load() -> None:
    spec = point(8, concurrency=4)
    with Mock(Script(fault=lambda number: "hang")) as server:
        endpoint, records = Endpoint(server.url, "sglang"), []

        async def measure() -> bool:
            crew = Crew(endpoint, 2, 30.0)
            try:
                load = asyncio.ensure_future(crew.closed_loop(work(endpoint, spec), 4, 0, records.append))
                while len(server.script.seen) < 4:
                    await asyncio.sleep(0.01)
                os.kill(crew._hands[0].process.pid, signal.SIGKILL)
                while len(records) < 4:
                    await asyncio.sleep(0.01)
                crew.stop()
                return (await load).dropped
            finally:
                crew.close()

        assert asyncio.run(measure())
    dead = [record for record in records if record.error_kind == "client"]
    assert [record.index for record in dead] == [0, 2, 4, 6]
    assert "ended" in str(dead[0].error)


def test_client_processes_end_with_the_one_that_started_them() -> None:
    with Mock(Script(first_s=0.02, step_s=0.002)) as server:
        endpoint = Endpoint(server.url, "sglang")

        async def measure() -> list[subprocess.Popen[bytes]]:
            crew = Crew(endpoint, 2, 30.0)
            await crew.closed_loop(work(endpoint, point(4, concurrency=2)), 2, 0, lambda record: None)
            processes = [hand.process for hand in crew._hands]
            crew.close()
            return processes

        assert [process.returncode for process in asyncio.run(measure())] == [0, 0]  # by themselves, not killed


def test_an_endpoint_that_refuses_is_told_by_the_processes_too() -> None:
    endpoint = Endpoint("http://127.0.0.1:9", "sglang")

    async def measure() -> None:
        crew = Crew(endpoint, 2, 30.0)
        try:
            await crew.closed_loop(work(endpoint, point(4, concurrency=2)), 2, 0, lambda record: None)
        finally:
            crew.close()

    with pytest.raises(EndpointError, match="refused"):
        asyncio.run(measure())


@pytest.mark.parametrize(
    ("spec", "asked", "cores", "count"),
    [
        (point(8, concurrency=4), None, 16, 1),
        (point(2000, concurrency=1024), None, 16, 2),
        (point(2000, concurrency=1024), None, 2, 1),  # half of the cores are others'
        (point(2000, concurrency=1024), 2, 2, 2),
        (point(900, rate=1200.0), None, 16, 3),
        (point(8, concurrency=2), 4, 16, 2),  # a process without a lane has nothing to do
    ],
)
def test_processes_follow_the_load_and_the_cores(spec: PointSpec, asked: int | None, cores: int, count: int) -> None:
    assert wanted(spec, asked, cores) == count


def test_one_process_needs_no_other() -> None:
    clients = Clients(Endpoint("http://127.0.0.1:9", "sglang"), timeout_s=1.0, processes=None)
    assert isinstance(clients.of(point(8, concurrency=4)), Client)
    assert clients.of(point(8, concurrency=4)) is clients.of(point(8, concurrency=2))
    clients.close()


def test_of_several_processes_the_worst_one_judges_the_client() -> None:
    from array import array

    from mtpdeploy.bench.client import Outcome

    async def check() -> dict[str, object]:
        fine = Outcome(loop_lags_ms=array("f", [0.1] * 20), cpu_s=0.1, wall_s=1.0)
        late = Outcome(loop_lags_ms=array("f", [50.0] * 20), cpu_s=0.97, wall_s=1.0)
        return protocol._self_check(Outcome(parts=(fine, late), cpu_s=1.07, wall_s=1.0))

    told = asyncio.run(check())
    assert (told["processes"], told["cpu_share"]) == (2, 0.97)
    assert told["loop_lag_p90_ms"] == 50.0


def test_spooled_records_come_back_as_they_were_in_memory_and_from_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpdeploy.bench.spool.IN_MEMORY", 2000)
    spool = Spool()
    records = [
        Record(
            0,
            i,
            "p",
            "chat",
            9,
            i,
            times_us=tuple(range(i)),
            tokens=tuple(range(i)),
            output_tokens=i,
            error="x" if i == 3 else None,
        )
        for i in range(40)
    ]
    for record in records:
        spool.append(record)
    assert (len(spool), spool.failed, spool.output_tokens) == (40, 1, sum(range(40)))
    assert list(spool) == records
    spool.close()


def test_more_connections_than_the_machine_allows_are_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda what: (100, 200))
    client = Client(Endpoint("http://127.0.0.1:9", "sglang"))
    with pytest.raises(EndpointError, match="ulimit -Hn 10128"):
        asyncio.run(client.connect(10_000))
