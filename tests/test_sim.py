"""The simulator is held to what SGLang shows: its command line, its log, its HTTP interface, its processes, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpdeploy import sim
from mtpdeploy.agent import gpus
from mtpdeploy.inventory.values import Simulate
from mtpdeploy.sglang.logs import Fold, Parser
from mtpdeploy.sim.timing import Acceptance, Text, Timing

MTP = (
    *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4", "--max-mamba-cache-size", "24"),
)
STRATEGY = {
    "0.5.10": "--mamba-scheduler-strategy",
    "0.5.13": "--mamba-scheduler-strategy",
    "0.5.17": "--mamba-radix-cache-strategy",
    "0.5.18": "--mamba-radix-cache-strategy",
    "0.5.23": "--mamba-radix-cache-strategy",
}


class Server:
    """A simulated server as a child process."""

    def __init__(self, folder: Path, simulate: Simulate, words: list[str], **env: str) -> None:
        self.folder = folder
        self.env = {**os.environ, **sim.install(folder / "shim", simulate), "SPT_NOENV": "1", **env}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", "--model-path", "Qwen/Qwen3.6-27B", "--port", str(self.port), *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env, start_new_session=True,
            )  # fmt: skip

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, what: Callable[[], bool], limit_s: float = 40.0) -> None:
        deadline = time.monotonic() + limit_s
        while not what():
            assert time.monotonic() < deadline, self.text()[-2000:]
            time.sleep(0.05)

    def ready(self) -> Server:
        self.until(lambda: "fired up" in self.text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()[-2000:]
        return self

    def ended(self) -> int:
        return self.process.wait(40)

    def ask(self, path: str, body: dict[str, Any] | None = None, key: str | None = None) -> tuple[int, bytes]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def summary(self) -> dict[str, Any]:
        parser, fold = Parser(), Fold()
        for event in (*parser.feed(self.log.read_bytes()), *(parser.close() or ())):
            fold.add(event)
        return fold.summary().as_json()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def begin(version: str = "0.5.17", words: list[str] | None = None, clock: float = 40.0, **more: Any) -> Server:
        fault = more.pop("fault", None)
        # up to 0.5.12 states for the default 48 requests are reserved, so less is left at 0.85
        fraction = ["--mem-fraction-static", "0.92" if version == "0.5.10" else "0.85"]
        given = [*MTP, *fraction, STRATEGY[version], "extra_buffer"] if words is None else words
        folder = tmp_path / f"server{len(servers)}"
        folder.mkdir()
        simulate = Simulate(sglang_version=version, clock=clock, gpu_memory_gb=95.0, fault=fault)
        env = {"SGLANG_ENABLE_SPEC_V2": "1", **more}
        servers.append(Server(folder, simulate, given, **env))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


def shape(line: str) -> str:
    """A log line without its values."""
    line = re.sub(r"^\[\d{4}[^\]]*\] ", "", line)
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    line = re.sub(r"\[[\d, ]+\]", "[N]", line)
    return re.sub(r"-?\d+\.\d+|-?\d+", "N", line)


def test_the_log_of_0_5_17_has_the_shapes_of_a_real_one(start: Callable[..., Server]) -> None:
    server = start(
        words=[*MTP, "--mem-fraction-static", "0.85", STRATEGY["0.5.17"], "extra_buffer", "--enable-metrics"]
    ).ready()
    server.ask("/generate", {"text": "a " * 300, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}})
    real = (Path(__file__).parent / "golden" / "shapes" / "sglang-0.5.17-mtp.txt").read_text().splitlines()
    shown = {shape(line) for line in server.text().splitlines()}
    missing = [line for line in real if line.rstrip() not in {one.rstrip() for one in shown}]
    assert missing == []


@pytest.mark.parametrize("version", sorted(STRATEGY))
def test_every_played_version_is_read_as_ready_with_the_slots_that_bind(
    start: Callable[..., Server], version: str
) -> None:
    server = start(version).ready()
    summary = server.summary()
    assert (summary["ready"], summary["max_running_requests"], summary["mamba_cache"]["slots"]) == (True, 4, 24)
    assert summary["server_args"]["max_mamba_cache_size"] == 24


def test_a_flag_that_the_version_lacks_ends_with_2_as_argparse_does(start: Callable[..., Server]) -> None:
    server = start("0.5.23", [*MTP, "--mamba-scheduler-strategy", "extra_buffer"])
    assert server.ended() == 2
    assert "sglang serve: error: unrecognized arguments: --mamba-scheduler-strategy" in server.text()


def test_abbreviations_work_and_ambiguous_ones_are_refused(start: Callable[..., Server]) -> None:
    server = start("0.5.23", ["--cuda-graph-max-bs", "8"])
    assert server.ended() == 2
    assert "ambiguous option: --cuda-graph-max-bs" in server.text()
    assert start("0.5.23", ["--mem-fraction", "0.8"]).ready().process.poll() is None


def test_the_port_is_closed_while_it_loads(start: Callable[..., Server]) -> None:
    server = start(clock=10)
    server.until(lambda: "Load weight begin" in server.text())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), 1)


def test_no_launch_without_extra_buffer_before_0_5_14(start: Callable[..., Server]) -> None:
    server = start("0.5.10", list(MTP))
    assert server.ended() == 1
    assert "not compatible with radix cache" in server.text()


def test_chunks_carry_several_tokens_and_their_usage_adds_up(start: Callable[..., Server]) -> None:
    server = start().ready()
    body = {
        "prompt": "count", "max_tokens": 60, "stream": True, "temperature": 0, "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    status, data = server.ask("/v1/completions", body)
    events = [json.loads(line[6:]) for line in data.decode().split("\n\n") if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events if event["choices"]]
    gains = [b - a for a, b in zip([0, *counts], counts, strict=False)]
    assert status == 200
    assert (counts[-1], events[-1]["usage"]["completion_tokens"]) == (60, 60)
    assert max(gains) > 1
    assert min(gains) >= 1


@pytest.mark.parametrize(
    ("version", "present", "absent"),
    [
        ("0.5.10", "spec_accept_token_num", "spec_num_correct_drafts"),
        ("0.5.18", "spec_accepted_drafts", "spec_accept_token_num"),
        ("0.5.23", "spec_num_correct_drafts", "spec_accepted_drafts"),
    ],
)
def test_acceptance_of_a_request_has_the_versions_own_names(
    start: Callable[..., Server], version: str, present: str, absent: str
) -> None:
    server = start(version).ready()
    _, data = server.ask("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}})
    meta = json.loads(data)["meta_info"]
    assert present in meta
    assert absent not in meta
    assert meta["spec_accept_length"] == pytest.approx(50 / meta["spec_verify_ct"])


def test_the_same_prompt_gives_the_same_text_with_and_without_drafts(start: Callable[..., Server]) -> None:
    body = {"text": "the same prompt for both", "sampling_params": {"max_new_tokens": 40, "temperature": 0}}
    texts = [json.loads(start(words=words).ready().ask("/generate", body)[1])["text"] for words in (None, [])]
    assert texts[0] == texts[1]


def test_a_key_is_asked_for_everywhere_but_at_health_and_metrics(start: Callable[..., Server]) -> None:
    server = start(words=["--api-key", "sesame", "--enable-metrics"]).ready()
    assert server.ask("/v1/models")[0] == 401
    assert server.ask("/v1/models", key="sesame")[0] == 200
    assert server.ask("/metrics")[0] == 200


def test_a_key_in_the_config_file_is_asked_for_too(start: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "server.yml").write_text("api-key: sesame\n")
    server = start(words=["--config", str(tmp_path / "server.yml")]).ready()
    assert (server.ask("/v1/models")[0], server.ask("/v1/models", key="sesame")[0]) == (401, 200)


def test_errors_are_told_as_sglang_tells_them(start: Callable[..., Server]) -> None:
    server = start().ready()
    status, data = server.ask("/v1/completions", {"prompt": "hi", "max_tokens": 400_000})
    assert (status, json.loads(data)["type"]) == (400, "BadRequestError")
    assert "maximum context length of 262144 tokens" in json.loads(data)["message"]
    assert server.ask("/generate", {"sampling_params": {}})[0] == 400
    assert server.ask("/no/such/path") == (404, b'{"detail": "Not Found"}')


def test_server_info_tells_the_effective_limit_and_that_it_is_simulated(start: Callable[..., Server]) -> None:
    info = json.loads(start().ready().ask("/server_info")[1])
    inner = info["internal_states"][0]
    assert (info["max_running_requests"], inner["effective_max_running_requests_per_dp"]) == (48, 4)
    assert (inner["max_mamba_cache_size"], info["version"], info["simulated"]) == (24, "0.5.17", True)


def test_ready_exists_from_0_5_20_on(start: Callable[..., Server]) -> None:
    assert start("0.5.18").ready().ask("/ready")[0] == 404
    assert start("0.5.23").ready().ask("/ready")[0] == 200


def test_it_drains_on_sigterm_and_kills_itself_at_the_end_as_sglang_does(start: Callable[..., Server]) -> None:
    server = start(clock=5).ready()
    children = _children(server.process.pid)
    answer = server.folder / "answer"
    # longer than the 5 s after which SGLang looks whether it was asked to end
    body = {"text": "long", "stream": True, "sampling_params": {"max_new_tokens": 1200, "ignore_eos": True}}
    url = f"http://127.0.0.1:{server.port}/generate"
    reader = subprocess.Popen(["curl", "-sN", "-o", str(answer), url, "-d", json.dumps(body)])
    server.until(lambda: answer.is_file() and answer.stat().st_size > 0)
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == -signal.SIGKILL
    assert reader.wait(10) == 0
    assert b"[DONE]" in answer.read_bytes()
    assert "Gracefully exiting... Remaining number of requests 1" in server.text()
    assert [pid for pid in children if _alive(pid)] == []


def test_a_killed_scheduler_takes_the_server_down_in_sglangs_words(start: Callable[..., Server]) -> None:
    server = start().ready()
    scheduler = next(
        pid
        for pid in _children(server.process.pid)
        if b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(scheduler, signal.SIGKILL)
    assert server.ended() == -signal.SIGKILL
    assert f"Subprocess scheduler_0 (pid={scheduler}) crashed with exit code -9. Triggering SIGQUIT" in server.text()


def test_its_memory_shows_in_nvidia_smi_and_goes_with_it(start: Callable[..., Server]) -> None:
    server = start().ready()
    held = gpus.read({"PATH": server.env["PATH"], "PYTHONPATH": server.env["PYTHONPATH"]})[0]
    assert held["memory_gb"] == pytest.approx(95.0)
    assert held["processes"][0]["used_gb"] > 70
    server.stop()
    server.until(lambda: (gpus.read({"PATH": server.env["PATH"]})[0]["used_gb"] or 0) == 0)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("oom-load", "oom_weights"),
        ("kv-pool-too-small", "kv_pool_too_small"),
        ("state-slots", "mamba_pool_too_small"),
        ("graph-capture", "oom_graph_capture"),
        ("port-taken", "port_in_use"),
        ("crash-loop", "kernel_crash"),
    ],
)
def test_each_fault_ends_the_server_and_is_read_as_what_it_is(
    start: Callable[..., Server], fault: str, cause: str
) -> None:
    server = start(fault=fault)
    status = server.ended()
    assert status == 3 if fault == "port-taken" else status != 0
    summary = server.summary()
    assert summary["cause"] == cause
    assert summary["ready"] is False


def test_a_hang_says_nothing_more_and_lives(start: Callable[..., Server]) -> None:
    server = start(fault="hang")
    server.until(lambda: "6/12" in server.text())
    size = server.log.stat().st_size
    time.sleep(0.5)
    assert (server.log.stat().st_size, server.process.poll()) == (size, None)


def test_a_dead_draft_shows_as_accept_length_one(start: Callable[..., Server]) -> None:
    server = start(fault="draft-dead").ready()
    _, data = server.ask("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}})
    assert json.loads(data)["meta_info"]["spec_accept_length"] == pytest.approx(50 / 49)


def test_the_second_line_says_that_it_is_simulated(start: Callable[..., Server]) -> None:
    server = start()
    server.until(lambda: "\n" in server.text())
    assert server.text().startswith("# simulated")


def test_an_unknown_fault_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="oom-load"):
        sim.install(tmp_path, Simulate(fault="no-such"))


@pytest.mark.parametrize(
    ("batch", "drafts", "measured_ms"),
    [(1, 0, 14.4), (4, 0, 15.2), (8, 0, 15.9), (16, 0, 16.7), (1, 4, 19.7), (4, 4, 21.0), (8, 4, 24.2), (16, 4, 29.7)],
)
def test_step_times_are_within_five_percent_of_the_measured_ones(batch: int, drafts: int, measured_ms: float) -> None:
    assert Timing(drafts).decode_s(batch) * 1e3 == pytest.approx(measured_ms, rel=0.05)


def test_acceptance_has_the_mean_that_was_asked_for() -> None:
    drawn = Acceptance(3, 3.2)
    assert sum(drawn.tokens(0.0) for _ in range(20_000)) / 20_000 == pytest.approx(3.2, abs=0.03)
    forced = Acceptance(3, 1.0, forced=2.6)
    assert sum(forced.for_batch() or 0 for _ in range(20_000)) / 20_000 == pytest.approx(2.6, abs=0.03)


def test_a_salt_in_front_of_a_prompt_does_not_change_its_text() -> None:
    body = "what follows the salt decides"
    assert Text.of("a" * 64 + body, 0.0, 1) == Text.of("b" * 64 + body, 0.0, 2)
    assert Text.of("a" * 64 + body, 0.7, 1) != Text.of("a" * 64 + body, 0.7, 2)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
