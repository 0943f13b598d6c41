"""The simulator held against recordings of the server that it plays: its lines, its answers, its memory, its times."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import recorded
from aiohttp.test_utils import TestClient, TestServer
from recorded import Recorded

from mtpdeploy.inventory.values import Simulate
from mtpdeploy.sglang import api as sglang_api
from mtpdeploy.sglang.logs import summarise
from mtpdeploy.sim import startup
from mtpdeploy.sim.api import Api
from mtpdeploy.sim.engine import Engine
from mtpdeploy.sim.launch import Launch
from mtpdeploy.sim.timing import Timing

SERVERS = [one for one in recorded.servers() if "qwen36-27b" in one.said["command"]]
ANSWERING = recorded.answering()
PAGE = Path(__file__).parent.parent / "docs" / "simulator.md"
# so that 92.82 GiB are free before the load, as at every recording
CARD = Simulate(sglang_version="0.5.17", clock=2000, gpu_memory_gb=95.59, accept_length=3.2)


def launch(one: Recorded, folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: str) -> Launch:
    """The same command in the same environment."""
    for name in [name for name in os.environ if name.startswith("SGLANG_")]:
        monkeypatch.delenv(name)
    for name, value in one.said["env"].items():
        monkeypatch.setenv(name, value)
    (folder / "card").mkdir(exist_ok=True)
    words = shlex.split(one.said["command"])
    words = words[words.index("sglang.launch_server") + 1 :]
    for name, value in changed.items():
        words += [f"--{name.replace('_', '-')}", value]
    return Launch.of(folder, words, CARD)


def start(played: Launch) -> list[str]:
    """What a start writes, up to the open port."""
    lines: list[str] = []
    for steps in (startup.before_args(played), startup.load(played), startup.caches(played)):
        lines += [step[1] for step in steps if isinstance(step, tuple) and step[1]]
    lines.append(startup.timings(played) or "")
    return [line.lstrip("\0").rstrip("\r") for line in lines]


def shape(line: str) -> str:
    """A line without its values, its time and the picture in a progress bar."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    line = re.sub(r"^\[\d{4}[^\]]*\] ", "", line)
    line = re.sub(r"\|[ █▏▎▍▌▋▊▉]*\|.*", "|BAR", line)
    line = re.sub(r"^/?[\w/.]*sglang/launch_server\.py", "launch_server.py", line)
    line = re.sub(r"\[[\d, ]+\]", "[N]", line)
    return re.sub(r"-?\d+\.\d+|-?\d+", "N", re.sub(r" +", " ", line)).strip()


def shapes(one: Recorded) -> set[str]:
    """Of a real start: what stands before the HTTP server's own start, without header lines and the arguments."""
    text = one.log.decode(errors="replace")
    begun = re.split(r"INFO:     Started server|Prefill batch", text)[0]
    lines = [part for line in begun.split("\n") for part in line.split("\r")]
    return {shape(line) for line in lines if line.strip() and not line.startswith("#") and "server_args=" not in line}


def listed(heading: str) -> list[str]:
    """The lines of the block below a heading of docs/simulator.md."""
    block = PAGE.read_text().split(f"## {heading}\n", 1)[1].split("```", 2)[1]
    return [line for line in block.splitlines()[1:] if line]


# ------------------------------------------------------------ the log


@pytest.mark.parametrize("one", SERVERS, ids=repr)
def test_a_played_start_has_no_line_that_the_real_start_of_that_command_has_not(
    one: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shapes(one)
    invented = {shape(line) for line in start(launch(one, tmp_path, monkeypatch))} - real - {""}
    # recordings that were stopped at the pools have no later lines
    if "Engine startup timings" not in one.log.decode(errors="replace"):
        invented = {line for line in invented if not line.startswith(("Engine startup", "Init Unified", "Tree cache"))}
    assert invented == set()


def test_every_line_of_a_real_start_is_played_or_named_as_not_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing: set[str] = set()
    for one in SERVERS:
        missing |= shapes(one) - {shape(line) for line in start(launch(one, tmp_path, monkeypatch))}
    assert sorted(missing - {""}) == sorted(map(shape, listed("Lines that it does not play")))


@pytest.mark.parametrize("one", SERVERS, ids=repr)
def test_a_played_start_tells_the_pools_of_the_real_one(
    one: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"[2026-11-30 06:00:00] {line}\n" for line in start(launch(one, tmp_path, monkeypatch)))
    played, real = summarise([text.encode()]), summarise([one.log])
    assert played.mamba_cache is not None
    assert real.mamba_cache is not None
    assert played.max_running_requests == real.max_running_requests
    assert played.mamba_cache["slots"] == real.mamba_cache["slots"]
    assert played.max_total_num_tokens == pytest.approx(real.max_total_num_tokens, rel=0.005)
    assert played.available_gpu_mem_gb == pytest.approx(real.available_gpu_mem_gb, abs=0.2)
    assert [(g["kind"], g.get("bs")) for g in played.graphs] == [(g["kind"], g.get("bs")) for g in real.graphs]


# ------------------------------------------------------------ HTTP answers


def ask(played: Launch, *paths: str) -> list[Any]:
    """Answers of the interface to GET, after one request of 300 tokens."""

    async def run() -> list[Any]:
        engine = Engine(played, lambda line: None)
        api = Api(played, engine, lambda line: None)
        api.status = "Up"
        work = asyncio.create_task(engine.run())
        async with TestClient(TestServer(api.app())) as client:
            await client.post(
                "/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
            )
            answers = []
            for path in paths:
                answer = await client.get(path)
                answers.append(await (answer.text() if path == "/metrics" else answer.json()))
        work.cancel()
        return answers

    return asyncio.run(run())


def keys(value: object, path: str = "") -> set[str]:
    """Paths of all keys of nested mappings; of a list the first element."""
    if isinstance(value, list) and value:
        return keys(value[0], f"{path}[]")
    if not isinstance(value, Mapping):
        return {path}
    return {path} | {found for name, inner in value.items() for found in keys(inner, f"{path}.{name}")}


def samples(text: str) -> set[tuple[str, tuple[str, ...]]]:
    """(family, names of its labels) of each sample of /metrics."""
    found = set()
    for line in text.splitlines():
        if not line.startswith("#") and not re.match(r"\S*_(?:bucket|created)\b", line):
            name, _, rest = line.partition("{")
            found.add((name.split()[0], tuple(sorted(re.findall(r'(\w+)="', rest)))))
    return found


@pytest.mark.parametrize("name", ["story-mtp", "baseline-default"])
def test_its_answers_have_no_key_and_no_metric_that_the_real_ones_have_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = recorded.server(name)
    info, model, metrics = ask(launch(one, tmp_path, monkeypatch), "/server_info", "/model_info", "/metrics")
    skip = {".simulated", ".internal_states[].simulated"}
    assert keys(info) - keys(one.body("server_info.json")) <= skip
    assert keys(model) - keys(one.body("model_info.json")) <= skip
    assert samples(metrics) - samples(one.files["metrics.txt"].decode()) == set()


def test_what_it_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = recorded.server("story-mtp")
    info, model, metrics = ask(launch(one, tmp_path, monkeypatch), "/server_info", "/model_info", "/metrics")
    missing = {f"/server_info {key}" for key in keys(one.body("server_info.json")) - keys(info)}
    missing |= {f"/model_info {key}" for key in keys(one.body("model_info.json")) - keys(model)}
    families = {name for name, _ in samples(one.files["metrics.txt"].decode())} - {name for name, _ in samples(metrics)}
    missing |= {f"/metrics {name}" for name in families}
    named = listed("Keys and metrics that it does not answer")
    assert sorted({line for line in missing if not any(line.startswith(name) for name in named)}) == []
    assert [name for name in named if not any(line.startswith(name) for line in missing)] == []


@pytest.mark.parametrize("one", ANSWERING, ids=repr)
def test_its_answers_are_read_as_the_real_ones_are(
    one: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, metrics = ask(launch(one, tmp_path, monkeypatch), "/server_info", "/metrics")
    played, real = sglang_api.server_info(info), sglang_api.server_info(one.body("server_info.json"))
    assert (played.running_limit, played.slots) == (real.running_limit, real.slots)
    assert played.kv_tokens == pytest.approx(real.kv_tokens, rel=0.005)
    assert played.weight_gb == pytest.approx(real.weight_gb, rel=0.02)
    assert played.kv_gb == pytest.approx(real.kv_gb, rel=0.02)
    assert played.graph_gb == pytest.approx(real.graph_gb, abs=0.2)
    assert played.startup_available_gb == pytest.approx(real.startup_available_gb, abs=0.2)
    assert played.startup_s.keys() == real.startup_s.keys()
    theirs = sglang_api.counters(sglang_api.metrics(one.files["metrics.txt"].decode()))
    ours = sglang_api.counters(sglang_api.metrics(metrics))
    known = {field.name for field in dataclasses.fields(theirs) if getattr(theirs, field.name) is not None}
    assert {name for name in known if getattr(ours, name) is None} <= {"cached_tokens", "aborted"}


def test_the_admin_key_alone_opens_what_is_the_administrators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = launch(recorded.server("story-mtp"), tmp_path, monkeypatch, api_key="user", admin_api_key="admin")

    async def run(call: Callable[[TestClient[Any, Any], str], Awaitable[Any]]) -> list[int]:
        api = Api(played, Engine(played, lambda line: None), lambda line: None)
        async with TestClient(TestServer(api.app())) as client:
            return [(await call(client, key)).status for key in ("", "user", "admin")]

    def get(path: str) -> list[int]:
        return asyncio.run(run(lambda client, key: client.get(path, headers={"Authorization": f"Bearer {key}"})))

    assert get("/server_info") == [401, 200, 401]
    assert get("/flush_cache") == [401, 401, 200]
    assert get("/metrics") == [200, 200, 200]


# ------------------------------------------------------------ the scheduler


def test_requests_go_back_to_the_queue_when_the_kv_cache_is_full_and_all_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = launch(recorded.server("story-mtp"), tmp_path, monkeypatch, max_total_tokens="4000")
    said: list[str] = []

    async def run() -> list[Any]:
        engine = Engine(played, said.append)
        engine.ratio = 0.1
        jobs = [engine.submit(str(n), "prompt" * 20, 500, 1400, True, 0.0) for n in range(4)]
        work = asyncio.create_task(engine.run())
        for job in jobs:
            while job.finished is None:
                await job.changed.wait()
                job.changed.clear()
        work.cancel()
        return [*jobs, engine.totals]

    *jobs, totals = asyncio.run(run())
    assert [(job.finished, job.emitted) for job in jobs] == [("length", 1400)] * 4
    assert totals.retracted == sum(job.retractions for job in jobs) > 0
    text = "".join(f"[2026-11-30 06:00:00] {line}\n" for line in said)
    assert summarise([text.encode()]).retractions == text.count("KV cache pool is full. Retract requests.")
    assert re.search(
        r"#retracted_reqs: \d+, #new_tokens_gained: \d+, #mamba_num_gained: \d+, #new_token_ratio: 0\.\d{4} -> ", text
    )


# ------------------------------------------------------------ times

# Decode steps of real servers, ms: the median gap between two chunks of a request, by requests at once.
# (draft tokens, state) → batch → ms. Those of "float32" with drafts come from tests/data/h200_grid.jsonl (time per token times
# accept length), all others from the runs of docs/case-studies/h200-qwen3.6-27b
STEPS: Mapping[tuple[int, str], Mapping[int, float]] = {
    (0, "float32"): {1: 14.7, 4: 15.6, 16: 17.1},
    (0, "bfloat16"): {1: 14.7, 16: 16.4, 32: 17.6, 64: 20.1},
    (4, "float32"): {1: 19.7, 4: 21.0, 8: 24.2, 16: 29.7},
    (4, "bfloat16"): {1: 19.7, 4: 20.8, 16: 26.8, 32: 35.7, 64: 56.8},
    (4, "replayed float32"): {1: 19.9, 16: 27.3, 32: 36.9, 64: 59.6},
}


def step_table() -> list[str]:
    """Rows of docs/simulator.md: drafts, state, batch, real ms, played ms, error."""
    rows = []
    for (drafts, state), measured in STEPS.items():
        timing = Timing(drafts, state == "float32")
        for batch, real_ms in measured.items():
            played_ms = timing.decode_s(batch, batch * 700) * 1e3
            error = 100 * (played_ms / real_ms - 1)
            rows.append(f"| {drafts} | {state} | {batch} | {real_ms} | {played_ms:.1f} | {error:+.1f} % |")
    return rows


def test_the_error_of_each_step_time_is_the_one_that_the_page_says() -> None:
    page = PAGE.read_text().split("## Step times\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in page.splitlines() if re.match(r"\| \d", line)]
    assert rows == step_table()
    errors = [float(row.split("|")[6].split()[0]) for row in rows]
    print(*rows, sep="\n")
    assert max(map(abs, errors)) < 7
