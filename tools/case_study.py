"""Computes the tables of docs/case-studies/h200-qwen3.6-27b.md from what was recorded, and writes them there.

    python tools/case_study.py              writes the tables
    python tools/case_study.py --check      writes nothing and exits 1 if one of them is out of date
    python tools/case_study.py --home DIR   unpacks the study as a home: `mtpdeploy --home DIR runs`, compare, frontier, …

Sources: the runs in docs/case-studies/h200-qwen3.6-27b/runs, the servers' logs and answers in tests/data/h200, and
tests/data/h200_grid.jsonl. Nothing else goes into a number between the markers `<!-- table: NAME -->`.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mtpdeploy.analysis.compare import LoadComparison, compare
from mtpdeploy.analysis.frontier import crossover
from mtpdeploy.analysis.model import fit, observations, setting_of
from mtpdeploy.analysis.samples import Measured
from mtpdeploy.sglang.command import parse
from mtpdeploy.sglang.logs import Summary, summarise
from mtpdeploy.sglang.memory import allocate
from mtpdeploy.sglang.model import shipped
from mtpdeploy.sglang.versions import Version
from mtpdeploy.store import Store
from mtpdeploy.store.measured import measured

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "case-studies" / "h200-qwen3.6-27b.md"
STUDY = PAGE.with_suffix("")
RECORDED = ROOT / "tests" / "data" / "h200"
PROFILES = ("baseline-default", "story-mtp", "baseline-tuned", "mtp-tuned", "mtp-replay", "mtp-radix")
_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.S)


def unpack(folder: Path) -> Path:
    """The study as a home below `folder`."""
    shutil.copytree(STUDY / "inventories", folder / "inventories", dirs_exist_ok=True)
    for part in sorted((STUDY / "runs").glob("part*.tar.xz")):
        with tarfile.open(part) as archive:
            archive.extractall(folder, filter="data")
    return folder


class Study:
    """Everything that was recorded. points: of every benchmark, with the profile and the run's id."""

    def __init__(self, home: Path) -> None:
        self.store = Store(home)
        self.runs = home / "runs"
        self.points: list[dict[str, Any]] = []
        self.read: dict[str, Measured] = {}
        for path in sorted(self.runs.glob("*/points.json")):
            said = json.loads((path.parent / "run.json").read_text())
            for point in json.loads(path.read_text())["points"]:
                capacity = said["meta"]["provenance"]["capacity"]
                self.points.append(
                    {
                        **point,
                        "profile": said["meta"]["profile"],
                        "run": path.parent.name,
                        "at_once": capacity["max_running_requests"],
                    }
                )
        self.manifest = {entry["name"]: entry for entry in json.loads((RECORDED / "manifest.json").read_text())}
        self.logs: dict[str, bytes] = {}
        with tarfile.open(RECORDED / "servers.tar.xz") as archive:
            for member in archive:
                name, _, file = member.name.partition("/")
                stream = archive.extractfile(member)
                if file == "server.log" and stream is not None:
                    self.logs[name] = stream.read()

    @functools.cache  # noqa: B019 - one study lives as long as the program
    def summary(self, name: str) -> Summary:
        return summarise([self.logs[name]])

    def of(self, profile: str, *, story: bool = False) -> list[dict[str, Any]]:
        """The points of a profile, by concurrency; story: those of 1,024 tokens out to short prompts."""
        mine = [p for p in self.points if p["profile"] == profile and (p["input_length"] is None) is story]
        return sorted(mine, key=lambda p: p["concurrency"])

    def at(self, profile: str, concurrency: int) -> dict[str, Any]:
        return next(p for p in self.of(profile) if p["concurrency"] == concurrency)

    def measured(self, point: Mapping[str, Any]) -> Measured:
        if point["run"] not in self.read:
            self.read[point["run"]] = measured(self.store.run(point["run"]))
        return self.read[point["run"]]

    def against(self, a: str, b: str, concurrency: int) -> LoadComparison:
        """b over a at one load."""
        pair = [self.measured(self.at(name, concurrency)) for name in (a, b)]
        return compare(pair[:1], pair[1:]).loads[0]


Table = Callable[[Study], Iterator[str]]


def row(*cells: object) -> str:
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def head(*names: str) -> Iterator[str]:
    yield row(*names)
    yield "|" + "---|" * len(names)


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, whole from 100 on, with commas."""
    if value is None:
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def interval(value: Any) -> str:
    return f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f})"


def every_point(study: Study) -> Iterator[str]:
    yield from head(
        "profile", "at once", "concurrency", "requests", "out tok/s", "tok/s a request (p50)", "ms a token (p50)",
        "TTFT ms (p50)", "queue ms (p50)", "accept length", "J a token",
    )  # fmt: skip
    for profile in PROFILES:
        for story in (False, True):
            for p in study.of(profile, story=story):
                queues = " (queues)" if p["concurrency"] > p["at_once"] else ""
                yield row(
                    profile + (", 1,024 out" if story else ""), p["at_once"], f"{p['concurrency']}{queues}", p["completed"],
                    number(p["output_tok_s"]), number(p["request_tok_s"]["p50"]), number(p["tpot_ms"]["p50"]),
                    number(p["ttft_ms"]["p50"]), number(p["queue_ms"]["p50"]), number(p["accept_length"]) if p["accept_length"] else "",
                    number(p["gpu"]["energy_j_per_token"]),
                )  # fmt: skip


def ratios(a: str, b: str, concurrencies: tuple[int, ...]) -> Table:
    def table(study: Study) -> Iterator[str]:
        yield from head(
            "concurrency", f"{a} tok/s", f"{b} tok/s", "ratio (95 %, prompts)", "a request (95 %, prompts)",
            "time a step", "breaks even at accept length",
        )  # fmt: skip
        for concurrency in concurrencies:
            one = study.against(a, b, concurrency)
            assert one.acceptance is not None
            assert one.acceptance.break_even is not None
            yield row(
                concurrency, number(one.a_tok_s), number(one.b_tok_s), interval(one.batch), interval(one.request),
                f"{one.acceptance.step_time:.2f}×", interval(one.acceptance.break_even),
            )  # fmt: skip

    return table


def crossing(study: Study) -> Iterator[str]:
    yield from head("baseline", "with MTP", "crossover")
    pairs = (
        ("baseline-default", "story-mtp"),
        *(("baseline-tuned", b) for b in ("mtp-tuned", "mtp-replay", "mtp-radix")),
    )
    for a, b in pairs:
        sides = [[study.measured(p) for p in study.of(name)] for name in (a, b)]
        yield row(a, b, crossover(compare(*sides)).text)


def reached(study: Study) -> Iterator[str]:
    """The aim: a multiple of what the story's setting gives at its best concurrency."""
    base, story = study.at("story-mtp", 4)["output_tok_s"], study.of("story-mtp", story=True)[0]["output_tok_s"]
    yield from head(
        "profile", "work", "concurrency", "out tok/s", "times the story's", "while full, by the server's log"
    )
    for profile in ("baseline-tuned", "mtp-radix", "mtp-replay", "mtp-tuned"):
        best = max(study.of(profile), key=lambda p: p["output_tok_s"])
        running, speed = plateau(study, profile)
        yield row(
            profile, "512 in, 384 out", best["concurrency"], number(best["output_tok_s"]), f"{best['output_tok_s'] / base:.1f}",
            f"{number(speed)} tok/s with {running} running ({speed / base:.1f} times)",
        )  # fmt: skip
    long = study.of("mtp-replay", story=True)[0]
    yield row(
        "mtp-replay",
        "short prompts, 1,024 out",
        long["concurrency"],
        number(long["output_tok_s"]),
        f"{long['output_tok_s'] / story:.1f}",
        "",
    )


def plateau(study: Study, profile: str) -> tuple[int, float]:
    """(most requests that ran, median tok/s of the Decode lines with so many) of a recorded log."""
    lines = re.findall(
        rb"Decode batch, #running-req: (\d+),.*?gen throughput \(token/s\): ([\d.]+)", study.logs[profile]
    )
    most = max(int(n) for n, _ in lines)
    return most, statistics.median(float(speed) for n, speed in lines if int(n) == most)


def memory(study: Study) -> Iterator[str]:
    """Of every recorded server of the 27B; predicted from its command and the free memory that its log begins with."""
    version, model = Version.parse("0.5.17"), shipped("qwen3.6-27b")
    yield from head(
        "server", "at once", "slots", "states GiB", "intermediate GiB", "KV tokens", "error", "free after the pools GiB", "free at the end GiB",
    )  # fmt: skip
    for name in study.logs:
        entry, log = study.manifest[name], study.summary(name)
        if "qwen36-27b" not in entry["command"]:
            continue
        assert log.weights is not None
        assert log.mamba_cache is not None
        free = log.weights["before_gb"]
        assert isinstance(free, float)
        p = allocate(parse(entry["command"], version).args, entry["env"], version, model, 140.4, free)
        m: Mapping[str, Any] = log.mamba_cache
        states = m["conv_gb"] + m["ssm_gb"]
        between = (m.get("intermediate_gb") or 0.0) + (m.get("intermediate_conv_gb") or 0.0)
        after = (log.draft or {}).get("pool_end_avail_gb") or log.pool_end_avail_gb
        tokens = log.max_total_num_tokens or 0
        yield row(
            name, f"{p.max_running} / {log.max_running_requests}", f"{p.slots} / {m['slots']}", f"{p.conv_gb + p.ssm_gb:.2f} / {states:.2f}",
            f"{p.intermediate_ssm_gb + p.intermediate_conv_gb:.2f} / {between:.2f}" if between else "",
            f"{p.kv_tokens:,} / {tokens:,}", f"{100 * (p.kv_tokens / tokens - 1):+.2f} %",
            f"{p.avail_after_pools_gb:.2f} / {after:.2f}", f"{p.avail_end_gb:.2f} / {log.available_gpu_mem_gb:.2f}",
        )  # fmt: skip


def whole_card(study: Study) -> Iterator[str]:
    """What the budget says of the same profiles with nothing else on the card. Nothing of it was run."""
    version, model = Version.parse("0.5.17"), shipped("qwen3.6-27b")
    yield from head("profile", "at once: 95 GiB", "whole card", "KV tokens: 95 GiB", "whole card")
    for name in PROFILES:
        entry = study.manifest[name]
        args = parse(entry["command"], version).args
        small = allocate(args, entry["env"], version, model, 140.4, 92.82)
        whole = allocate(args, entry["env"], version, model, 140.4)
        yield row(name, small.max_running, whole.max_running, f"{small.kv_tokens:,}", f"{whole.kv_tokens:,}")


def agreement(study: Study) -> Iterator[str]:
    """Our means beside those of the server's own histograms over the same window."""
    yield from head(
        "profile", "concurrency", "TTFT ms: ours", "server", "ms a token: ours", "server", "tokens: counted", "server",
        "accept length: ours", "from /metrics",
    )  # fmt: skip
    for profile in PROFILES:
        for p in study.of(profile):
            server = p["server"]
            line = json.loads((study.runs / p["run"] / "measured.jsonl").read_text().splitlines()[0])
            calls = line["counters"].get("sglang:spec_verify_calls_total")
            made = line["counters"]["sglang:generation_tokens_total"]
            yield row(
                profile, p["concurrency"], number(p["ttft_ms"]["mean"]), number(server["ttft_ms_mean"]),
                number(p["tpot_ms"]["mean"]), number(server["inter_token_ms_mean"]),
                f"{server['counted_by_client']:,}", f"{server['generated_tokens']:,.0f}",
                number(p["accept_length"]) if p["accept_length"] else "", number(made / calls) if calls else "",
            )  # fmt: skip


def bench_serving(study: Study) -> Iterator[str]:
    """SGLang's own benchmark beside ours, on one server."""
    text = (STUDY / "bench_serving.txt").read_text()

    def said(name: str) -> float:
        found = re.search(rf"^{re.escape(name)}:?\s+([\d.]+)\s*$", text, re.M)
        assert found is not None, name
        return float(found[1])

    ours = study.at("mtp-radix", 16)
    yield from head("mtp-radix, concurrency 16, 32 requests", "mtpdeploy bench", "sglang.bench_serving", "apart by")
    for name, own, theirs in (
        ("accept length", ours["accept_length"], said("Accept length")),
        ("out tok/s", ours["output_tok_s"], said("Output token throughput (tok/s)")),
        ("TTFT ms, mean", ours["ttft_ms"]["mean"], said("Mean TTFT (ms)")),
        ("ms a token, mean", ours["tpot_ms"]["mean"], said("Mean TPOT (ms)")),
        ("E2E ms, median", ours["e2e_ms"]["p50"], said("Median E2E Latency (ms)")),
    ):
        yield row(name, number(own), number(theirs), f"{100 * (theirs / own - 1):+.0f} %")


def start_up(study: Study) -> Iterator[str]:
    """Seconds from `deploy` to the proven server, by phase; the log's times are whole seconds."""
    yield from head(
        "profile", "whole", "before the process", "import to the arguments", "to the weights", "weights", "draft and pools",
        "graphs", "to the open port", "first generation", "rest",
    )  # fmt: skip
    for path in sorted(study.runs.glob("*/watch.json")):
        watch, said = json.loads(path.read_text()), json.loads((path.parent / "run.json").read_text())
        profile, launch = said["meta"]["profile"], watch["launch_id"]
        text = study.logs[profile].decode(errors="replace")
        if launch not in text:
            continue  # an earlier launch of the same profile; its log was not kept whole

        def at(pattern: str, text: str = text) -> datetime:
            found = re.search(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\] " + pattern, text, re.M)
            assert found is not None, pattern
            return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc)

        header = re.search(r" utc (\S+)Z", text)
        assert header is not None
        begun = datetime.strptime(launch[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
        process = datetime.fromisoformat(header[1]).replace(tzinfo=timezone.utc)
        ready = datetime.fromisoformat(watch["ready_utc"].replace("Z", "+00:00"))
        moments = [
            begun, process, at("server_args="), at("Load weight begin"), at("Load weight end"), at("Capture "),
            at("max_total_num_tokens="), at("The server is fired up"), ready,
        ]  # fmt: skip
        spans = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(moments)]
        first = watch["generation"]["latency_ms"] / 1e3
        yield row(
            profile, f"{(ready - begun).total_seconds():.0f}", *(f"{span:.0f}" for span in spans[:-1]), f"{first:.1f}",
            f"{max(0.0, spans[-1] - first):.1f}",
        )  # fmt: skip


def by_hand(study: Study) -> Iterator[str]:
    """tests/data/h200_grid.jsonl: what was measured before, without mtpdeploy."""
    yield from head(
        "server", "concurrency", "requests", "out tok/s", "ms a token (p50)", "TTFT ms (p50)", "accept length"
    )
    for line in (ROOT / "tests" / "data" / "h200_grid.jsonl").read_text().splitlines():
        one = json.loads(line)
        yield row(
            one["setting"], one["concurrency"], one["requests"], number(one["output_tok_s"]), number(one["tpot_p50_ms"]),
            number(one["ttft_p50_ms"]), number(one["accept_length"]) if one["accept_length"] else "",
        )  # fmt: skip


def predicted(study: Study) -> Iterator[str]:
    """What was not run, by the step model fitted to what was."""
    runs = {profile: [study.measured(p) for p in study.of(profile)] for profile in PROFILES}
    model = fit(observations([one for own in runs.values() for one in own]))
    yield from head("profile", "concurrency", "out tok/s (95 %)", "outside what was measured")
    for profile, concurrencies in (
        ("baseline-default", (8, 64)), ("story-mtp", (16, 32, 64)), ("baseline-tuned", (4, 8, 128)), ("mtp-tuned", (8, 128)),
        ("mtp-replay", (4, 8)), ("mtp-radix", (4, 8, 64)),
    ):  # fmt: skip
        for concurrency in concurrencies:
            made: Any = model.predict(
                setting_of(runs[profile][0]), concurrency, input_tokens=512, output_tokens=384
            ).as_json()
            speed = made["output_tok_s"]
            yield row(
                profile, concurrency, f"{number(speed['value'])} ({number(speed['low'])} to {number(speed['high'])})",
                "; ".join(made["extrapolated"]),
            )  # fmt: skip


TABLES: Mapping[str, Table] = {
    "every-point": every_point,
    "story": ratios("baseline-default", "story-mtp", (1, 4)),
    "tuned-pair": ratios("baseline-tuned", "mtp-tuned", (1, 16, 32, 64)),
    "replay-pair": ratios("baseline-tuned", "mtp-replay", (1, 16, 32, 64)),
    "crossing": crossing,
    "reached": reached,
    "memory": memory,
    "whole-card": whole_card,
    "agreement": agreement,
    "bench-serving": bench_serving,
    "start-up": start_up,
    "by-hand": by_hand,
    "predicted": predicted,
}


def filled(page: str, study: Study) -> str:
    """The page with every table computed again. KeyError: a table that does not exist."""
    return _TABLE.sub(lambda m: m[1] + "\n".join(TABLES[m[2]](study)) + "\n" + m[4], page)


def tables_of(page: str) -> dict[str, list[str]]:
    """name → lines of the tables in a page."""
    return {m[2]: m[3].rstrip("\n").split("\n") for m in _TABLE.finditer(page)}


def main(words: list[str]) -> int:
    if words[:1] == ["--home"]:
        unpack(Path(words[1]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        page = PAGE.read_text()
        made = filled(page, Study(unpack(Path(folder))))
    if "--check" in words:
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
