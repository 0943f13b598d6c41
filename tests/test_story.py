"""The story that the project begins with, by the commands as they are typed: a log and a few figures, and what they really say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpdeploy.analysis.claims import parse
from mtpdeploy.cli import main
from mtpdeploy.inventory.values import Simulate
from mtpdeploy.sim import startup
from mtpdeploy.sim.launch import Launch

FIGURES = "baseline@1=26.7 mtp@1=62..77 mtp@4=234 mtp.accept_length={length} mtp.accept_rate={rate}"


def log_of(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    slots: int,
    length: float,
    rate: float,
    version: str,
    overlap: bool = True,
) -> Path:
    """What SGLang prints with so many slots on a 96 GB card, and a decode record with that acceptance."""
    if overlap:
        monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", "1")
    strategy = "scheduler" if version in ("0.5.10", "0.5.12") else "radix-cache"
    argv = (
        "--model-path Qwen/Qwen3.6-27B --speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens 4 --mamba-{strategy}-strategy extra_buffer --max-mamba-cache-size {slots} "
        "--mamba-full-memory-ratio 0.4 --mem-fraction-static 0.92"
    )
    launch = Launch.of(folder, argv.split(), Simulate(sglang_version=version, gpu_memory_gb=95.0))
    lines: list[str] = [startup.server_args(launch)]
    for step in (*startup.before_args(launch), *startup.load(launch)):
        if isinstance(step, tuple) and step[1]:
            lines += str(step[1]).splitlines()
    lines.append(
        f"Decode batch, #running-req: 4, #full token: 4096, full token usage: 0.02, mamba num: 20, mamba usage: 0.83, accept len: "
        f"{length:.2f}, accept rate: {rate:.2f}, cuda graph: True, gen throughput (token/s): 234.00, #queue-req: 0, "
    )
    file = folder / "server.log"
    file.write_text("".join(f"[2026-04-20 10:00:00] {line}\n" for line in lines))
    return file


@pytest.fixture
def typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any, str]]:
    """(exit code, the JSON, the text) of a command as a person types it, through the door's own parser."""

    def run(*words: str) -> tuple[int, Any, str]:
        said = []
        for more in (["--json"], []):
            with pytest.raises(SystemExit) as ended:
                main([*words, "--home", str(tmp_path), *more])
            said.append(capsys.readouterr().out)
        assert isinstance(ended.value.code, int)
        return ended.value.code, json.loads(said[0]), " ".join(said[1].split())

    return run


def offers(suggestions: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The first set of flags for each number of running requests."""
    found: dict[int, dict[str, Any]] = {}
    for one in suggestions:
        if (wanted := one["set"].get("max_running_requests")) is not None:
            found.setdefault(wanted, one)
    return found


@pytest.mark.parametrize(
    ("slots", "length", "rate", "version", "mismatch", "goals"),
    [
        # The story itself: 24 slots, accept length 3.2, rate 0.84.
        (24, 3.2, 0.84, "0.5.10", ("0.80", "0.73", "3.36 or 3.52"), (8, 16, 32)),
        # The same arithmetic with other numbers.
        (16, 2.8, 0.95, "0.5.10", ("0.70", "0.60", "3.80 or 3.85"), (8, 16, 32)),
        (40, 2.8, 0.60, "0.5.17", None, (16, 32)),
    ],
)
def test_log_and_figures_say_what_the_story_missed(
    slots: int, length: float, rate: float, version: str, mismatch: tuple[str, ...] | None, goals: tuple[int, ...],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Callable[..., tuple[int, Any, str]],
) -> None:  # fmt: skip
    log = str(log_of(tmp_path, monkeypatch, slots=slots, length=length, rate=rate, version=version))
    monkeypatch.delenv("SGLANG_ENABLE_SPEC_V2")
    arithmetic = f"{slots} state slots // 5 a request"

    _, verified, text = typed("verify", "--file", log, "--sglang-version", version)
    running = verified["capacity"]["max_running_requests"]
    assert (running["effective"], running["bound_by"]) == (slots // 5, "state_slots")
    assert verified["capacity"]["slots_per_request"] == 5
    assert running["says"] == f"{arithmetic} = {slots // 5}: a flag, max_mamba_cache_size, sets that and not the memory"
    assert running["says"] in text
    assert verified["acceptance"]["length"] == length
    unused = [one for one in verified["notes"] if "lie unused" in one]
    assert bool(unused) is (version == "0.5.10")  # the states of 48 requests, of which so few run

    figures = FIGURES.format(length=length, rate=rate)
    code, said, told = typed("recommend", "--file", log, "--sglang-version", version, "--figures", figures)
    assert code == 12
    assert said["verdict"] == "told, not measured"
    assert said["profile"] is None
    assert any(arithmetic in one and "not the memory" in one for one in said["limits"])
    for suggestions in (running["suggestions"], said["suggestions"]):
        found = offers(suggestions)
        for goal in goals:  # which flags give it, together, and what they cost
            assert found[goal]["set"]["max_mamba_cache_size"] == 5 * goal
            assert isinstance(found[goal]["cost_gb"], float)
            assert f"{goal} requests at once (now {slots // 5})" in found[goal]["effect"]
    assert said["not_like_for_like"][0].startswith("the baseline (baseline) is not like for like with mtp")
    assert any("concurrency 4 has no baseline" in one for one in said["not_like_for_like"])
    assert told.startswith("Not like for like:")
    assert said["next_experiments"][0]["command"] == "mtpdeploy campaign --profile mtp --concurrency 1,4"
    notes = " ".join(said["notes"])
    if mismatch is None:
        assert verified["acceptance"]["mismatch"] is None
        assert "fit neither" not in notes
    for one in mismatch or ():
        assert one in verified["acceptance"]["mismatch"]
        assert one in notes
        assert one in text
        assert "read at different times or from different sources" in told


def test_without_overlap_a_request_takes_four_slots_and_the_log_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable that decides it stands in no log of that release; the limit does."""
    from mtpdeploy.actions.verify import of_log
    from mtpdeploy.progress import Silent

    for overlap, each in ((False, 4), (True, 5)):
        log = log_of(tmp_path, monkeypatch, slots=24, length=3.2, rate=0.8, version="0.5.10", overlap=overlap)
        monkeypatch.delenv("SGLANG_ENABLE_SPEC_V2", raising=False)
        _, verified = of_log(tmp_path, Silent(), str(log), sglang_version="0.5.10", gpu_memory_gb=None)
        assert verified.capacity.slots_per_request == each
        assert verified.capacity.effective == 24 // each


def test_told_figures_with_equal_conditions_are_still_no_recommendation(
    typed: Callable[..., tuple[int, Any, str]],
) -> None:
    said = " ".join(
        f"{arm}.{key}={value}"
        for arm in ("baseline", "mtp")
        for key, value in (("day", "2026-11-30"), ("host", "gpu1"), ("gpu", "H200"), ("sglang_version", "0.5.17"),
                           ("workload", "story"), ("output_tokens", "1024"), ("runs", "3"))
    )  # fmt: skip
    code, answer, _ = typed("recommend", "--figures", f"baseline@4=100 mtp@4=200 {said}")
    assert code == 12
    assert answer["not_like_for_like"] == []
    assert answer["profile"] is None


@pytest.mark.parametrize(
    "text",
    ["", "x", "a@1=0", "a@0=5", "a@1=9..3", "a.accept_length=3", "a@1=5 a.nothing=3", "a@1=nan", "a@1=5 a.accept_rate=much", "@1=5"],
)  # fmt: skip
def test_figures_that_cannot_be_meant_are_refused_with_what_would_be_right(text: str) -> None:
    with pytest.raises(ValueError, match=r"should be|write|is no number"):
        parse(text)


def test_ranges_and_decimals_are_read_as_they_are_meant() -> None:
    a, b = parse("baseline@1=26.7; mtp@1=62..77, mtp@4=234.5 mtp@8=300–310 mtp.accept_length=3.2")
    assert (a.arm, dict(a.points)) == ("baseline", {1: (26.7, 26.7)})
    assert dict(b.points) == {1: (62.0, 77.0), 4: (234.5, 234.5), 8: (300.0, 310.0)}
    assert b.number("accept_length") == 3.2
