"""Health is progress: when a server that answers is called stalled, and when it is only busy."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from mtpdeploy.agent import oom, status
from mtpdeploy.agent.clock import spell_epoch
from mtpdeploy.agent.release import Release, Service
from mtpdeploy.agent.server import Load, Server


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that answers /v1/loads with so many running requests, or not at all (None)."""
    running = request.param

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if running is None:
                self.close_connection = True
                return
            body = json.dumps({"loads": [{"num_running_reqs": running, "num_waiting_reqs": 2}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield Server(f"http://127.0.0.1:{server.server_address[1]}")
    server.shutdown()
    server.server_close()


def launch(tmp_path: Path, seconds_ago: float | None) -> Release:
    """A release whose last decode line is so old; None: it has none."""
    release = Release(Service(tmp_path, "s"), "20260101T000000Z-abcdef")
    release.path.mkdir(parents=True)
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - (seconds_ago or 0)))
    release.log.write_text("" if seconds_ago is None else f"[{moment}] Decode batch, #running-req: 1\n")
    return release


def verdict(release: Release, server: Server, ready_s_ago: float = 600) -> str | None:
    proven = {"boot": 1, "utc": spell_epoch(time.time() - ready_s_ago)}
    return status._stalled(release, server, proven, {"started_utc": spell_epoch(time.time() - 900)}, {})


@pytest.mark.parametrize(("told", "ago"), [(3, 5), (0, 5), (0, 4000), (None, 5)], indirect=["told"])
def test_a_server_that_works_or_idles_or_is_busy_for_a_moment_is_not_stalled(
    tmp_path: Path, told: Server, ago: float
) -> None:
    assert verdict(launch(tmp_path, ago), told) is None


@pytest.mark.parametrize("told", [3], indirect=True)
@pytest.mark.parametrize("ago", [300, None])
def test_requests_without_a_batch_for_a_minute_are_a_stall(tmp_path: Path, told: Server, ago: float | None) -> None:
    assert "stalled: 3 requests run" in (verdict(launch(tmp_path, ago), told) or "")


@pytest.mark.parametrize("told", [None], indirect=True)
def test_schedulers_that_do_not_answer_and_log_nothing_are_a_stall(tmp_path: Path, told: Server) -> None:
    assert told.load() == Load(None, None, silent=True)
    assert "schedulers do not answer" in (verdict(launch(tmp_path, 300), told) or "")
    assert verdict(launch(tmp_path / "young", None), told, ready_s_ago=20) is None


def test_the_kernels_kills_are_read_where_this_machine_counts_them() -> None:
    counted = oom.kills()
    assert counted is None or counted >= 0
    assert oom.more_than(counted) is False
    assert oom.more_than(None) is False
    if counted is not None:
        assert oom.more_than(counted - 1) is True
