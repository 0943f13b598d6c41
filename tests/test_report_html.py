"""The report page: needs nothing but itself, believes no text that it shows, and tells the same numbers as the JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from runs import bench_run

from mtpdeploy.actions.compare import compare
from mtpdeploy.actions.runs import report
from mtpdeploy.errors import UsageError
from mtpdeploy.progress import Silent
from mtpdeploy.report.export import cell
from mtpdeploy.report.figures import number, times
from mtpdeploy.report.html import page
from mtpdeploy.report.sections import sections
from mtpdeploy.report.story import gathered
from mtpdeploy.store import Run, Store

TALK = Silent()
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = """</script><script>alert('x')</script>"'><img src=http://evil/x onerror=alert(1)>{{ 7*7 }}$\\frac"""


class Seen(HTMLParser):
    """Elements and their attributes, and the text that a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def two_runs(home: Path, **more: object) -> list[Run]:
    a = bench_run(home, "baseline", speeds={1: 70, 4: 65}, noise=0.01, args={"tp_size": 1})
    figures = {"acceptance_by_position": [0.9, 0.7, 0.6], "acceptance_by_class": {"code": 3.4, "chat": 2.7}}
    b = bench_run(
        home, "mtp", speeds={1: 150, 4: 140}, noise=0.01, accept=3.2, args={"speculative_num_steps": 3},
        **{"figures": figures, **more},
    )  # type: ignore[arg-type]  # fmt: skip
    return [a, b]


def seen(html: str) -> Seen:
    parser = Seen()
    parser.feed(html)
    return parser


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    html = page(gathered(Store(tmp_path), two_runs(tmp_path)))
    found = seen(html)
    assert not {"script", "link-stylesheet", "iframe", "object", "embed", "img"} & {tag for tag, _ in found.tags}
    for tag, attributes in found.tags:
        for name in ("src", "href", "xlink:href", "action", "data"):
            target = attributes.get(name)
            link = tag == "a" and name == "href" and not re.match(r"[a-z]+:|//", target or "")  # followed, not fetched
            assert target is None or link or target.startswith(("#", "data:")), (tag, target)
    assert not re.search(r"url\((?!#)|@import", html)
    assert len(html) < 3_000_000


def test_hostile_text_of_a_run_stays_text(tmp_path: Path) -> None:
    runs = two_runs(tmp_path, figures={"valid": False, "invalid_because": [HOSTILE], "marks": [HOSTILE]})
    evil = bench_run(tmp_path, HOSTILE, speeds={1: 100, 4: 90}, host=HOSTILE, args={HOSTILE: HOSTILE}, model=HOSTILE)
    evil.write_json("verify.json", {"verdict": HOSTILE, "arguments": [{"name": HOSTILE, "requested": HOSTILE}]})
    memory = {"weights_gb": 3, "bound_by": HOSTILE, "slots": HOSTILE}
    evil.write_json("plan.json", {"memory": memory})
    graphs = [{"kind": HOSTILE, "elapsed_s": 3, "mem_gb": HOSTILE}, 7, {}]
    evil.write_json("log_summary.json", {"graphs": graphs, "server_args": {HOSTILE: 1}, "weights": [HOSTILE]})
    evil.append_jsonl("measured.jsonl", [{"samples": [{"at_s": 0, "running": 1, "queued": 0}, 3, {"at_s": HOSTILE}]}])
    found = seen(page(gathered(Store(tmp_path), [*runs, evil])))
    assert not {"script", "img"} & {tag for tag, _ in found.tags}
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    assert "49" not in "".join(found.words).split("{{ 7*7 }}")[0][-20:]
    assert any("<script>" in word for word in found.words)


def test_numbers_on_the_page_are_those_of_the_json(tmp_path: Path) -> None:
    runs = two_runs(tmp_path)
    words = " ".join(seen(page(gathered(Store(tmp_path), runs))).words)
    said = compare(home=tmp_path, talk=TALK, a=runs[0].id, b=runs[1].id).as_json()
    speedup = said["speedup"]
    assert isinstance(speedup, list)
    assert len(speedup) == 2
    for one in speedup:
        assert times(one["ratio"], one["low"], one["high"]) in words
        assert number(one["output_tok_s"]["b"]) in words
    assert str(said["verdict_text"]) in words


def test_what_is_not_alike_stands_above_the_verdict(tmp_path: Path) -> None:
    runs = two_runs(tmp_path, sglang_version="0.5.10")
    html = page(gathered(Store(tmp_path), runs))
    assert 0 < html.index("SGLang version: 0.5.17 against 0.5.10") < html.index('class="verdict')


def test_simulated_numbers_say_so_in_the_title_and_first(tmp_path: Path) -> None:
    run = bench_run(tmp_path, "mtp", speeds={1: 150}, simulated=True)
    html = page(gathered(Store(tmp_path), [run]))
    assert "(simulated)</title>" in html
    assert html.index("No GPU was measured") < html.index("<nav")


def test_ids_are_unique_and_each_link_has_its_target(tmp_path: Path) -> None:
    tags = seen(page(gathered(Store(tmp_path), two_runs(tmp_path)))).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes.get("href") or attributes.get("xlink:href") for _, attributes in tags]
    assert {link[1:] for link in links if link and link.startswith("#")} <= set(ids)


def test_the_same_runs_give_the_same_page(tmp_path: Path) -> None:
    runs = two_runs(tmp_path)
    assert page(gathered(Store(tmp_path), runs)) == page(gathered(Store(tmp_path), runs))


def test_a_campaign_stands_for_its_benchmarks(tmp_path: Path) -> None:
    runs = two_runs(tmp_path)
    campaign = Store(tmp_path).new_run("campaign")
    campaign.finish({"runs": [run.id for run in runs]})
    made = report(home=tmp_path, talk=TALK, run=[campaign.id])
    assert made.path == campaign.path / "report.html"
    assert "baseline and mtp" in made.path.read_text()


def test_damaged_run_folders_are_named_and_left_out(tmp_path: Path) -> None:
    good, bad = two_runs(tmp_path)
    bad.file("points.json").write_text('{"points": [')
    html = page(gathered(Store(tmp_path), [good, bad]))
    assert "Left out" in html
    assert "points.json" in html
    with pytest.raises(UsageError, match="nothing to report"):
        gathered(Store(tmp_path), [bad])


@pytest.mark.parametrize(
    "point",
    [
        {},
        {"concurrency": "4", "output_tok_s": "many"},
        {"concurrency": -1, "output_tok_s": -5},
        {"concurrency": 4, "output_tok_s": 0.0, "valid": True},
        {"rate": 2.0, "ttft_ms": [], "tpot_ms": {"p50": 0}},
        {"concurrency": 10**30, "output_tok_s": 1e308},
        {"concurrency": 4, "output_tok_s": 5, "acceptance_by_position": ["x", None], "acceptance_by_class": {"a": "b"}},
    ],
)
def test_odd_points_make_a_page_all_the_same(point: dict[str, object], tmp_path: Path) -> None:
    good, odd = two_runs(tmp_path)
    odd.write_json("points.json", [point])
    assert "</html>" in page(gathered(Store(tmp_path), [good, odd]))


def test_an_output_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    two_runs(tmp_path)
    with pytest.raises(UsageError, match="is a folder"):
        report(home=tmp_path, talk=TALK, output=str(tmp_path))
    with pytest.raises(UsageError, match="cannot be written"):
        report(home=tmp_path, talk=TALK, output="/proc/nothing/report.html")


# -- in a browser


class Tab:
    """A page in a real Chromium, driven over its DevTools protocol. `complaints` is what it put on its console."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[object] = []

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            said = await self._socket.receive_json(timeout=60)
            if said.get("id") == self._number:
                assert "error" not in said, said
                result: dict[str, Any] = said["result"]
                return result
            if said["method"] in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.complaints.append(said["params"])

    async def ask(self, script: str) -> Any:
        return (await self.call("Runtime.evaluate", expression=script, returnByValue=True))["result"].get("value")

    async def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                **({"text": text} if text and kind == "keyDown" else {}),
            )  # fmt: skip


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    assert BROWSER
    process = await asyncio.create_subprocess_exec(
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={folder}",
        "about:blank", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr
    try:
        async for line in process.stderr:
            if found := re.search(rb"DevTools listening on ws://([^/]+)/", line):
                break
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{found[1].decode()}/json/list") as answer:  # type: ignore[index]
                (page_,) = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(page_["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.kill()
        await process.wait()


async def loaded(tab: Tab, file: Path) -> None:
    for domain in ("Log", "Runtime", "Page"):
        await tab.call(f"{domain}.enable")
    await tab.call("Page.navigate", url=file.as_uri())
    while await tab.ask(f"document.readyState === 'complete' && location.href === {file.as_uri()!r}") is not True:
        await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_shows_the_jsons_numbers_on_every_screen_and_by_keyboard_without_complaint(tmp_path: Path) -> None:
    runs = two_runs(tmp_path)
    made = {
        kind: report(home=tmp_path, talk=TALK, run=[run.id for run in runs], format=kind).path
        for kind in ("html", "json")
    }
    assert made["html"]
    assert made["json"]
    told = json.loads(made["json"].read_text())

    async def look(file: Path) -> None:
        async with browser(tmp_path / "profile") as tab:
            await loaded(tab, file)
            words = await tab.ask("document.body.textContent")
            for one in told["comparisons"][0]["speedup"]:
                assert times(one["ratio"], one["low"], one["high"]) in words
                assert number(one["output_tok_s"]["b"]) in words
            for spot in told["frontier"]["spots"]:
                assert number(spot["user_tok_s"]["value"]) in words
            cells = await tab.ask(
                "[...document.querySelectorAll('table')].map(t => [...t.rows].map(r => [...r.cells].map(c => c.textContent.trim())))"
            )
            shown = [row[1:] for row in cells]
            assert shown == [[[cell.strip() for cell in row] for row in table["rows"]]
                             for section in told["sections"] for table in section["tables"]]  # fmt: skip

            folded = await tab.ask("document.querySelectorAll('details[open]').length")
            assert folded == 0
            for _ in range(200):  # by Tab alone to the first folded section, and Enter opens it
                await tab.press("Tab", 9)
                if await tab.ask("document.activeElement.tagName") == "SUMMARY":
                    break
            await tab.press("Enter", 13, "\r")
            assert await tab.ask("document.querySelectorAll('details[open]').length") == 1
            assert await tab.ask("document.querySelectorAll('.scroll:not([tabindex=\"0\"])').length") == 0

            for width in (320, 390, 1200):
                await tab.call(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=800,
                    deviceScaleFactor=1,
                    mobile=width < 1000,
                )
                assert await tab.ask("document.documentElement.scrollWidth - innerWidth") <= 0, width
            assert await tab.ask("document.querySelectorAll('figure svg').length") >= 6
            page_colours = []
            for scheme in ("light", "dark"):
                await tab.call(
                    "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
                )
                page_colours.append(await tab.ask("getComputedStyle(document.body).backgroundColor"))
            assert page_colours == ["rgb(255, 255, 255)", "rgb(13, 17, 23)"]
            assert len((await tab.call("Page.printToPDF"))["data"]) > 10_000
            assert tab.complaints == []

    asyncio.run(look(made["html"]))


def test_markdown_and_json_hold_every_row_of_the_page(tmp_path: Path) -> None:
    runs = [run.id for run in two_runs(tmp_path, sglang_version="0.5.10")]
    made = {kind: report(home=tmp_path, talk=TALK, run=runs, format=kind).path for kind in ("md", "json")}
    text, told = (path.read_text() for path in made.values() if path)
    document = json.loads(told)
    assert text.index("SGLang version") < text.index("**faster**")
    for section in document["sections"]:
        assert f"## {section['heading']}" in text
        for table in section["tables"]:
            for row in table["rows"]:
                assert f"| {' | '.join(cell(one) for one in row)} |" in text
    with pytest.raises(UsageError, match="--format"):
        report(home=tmp_path, talk=TALK, run=runs, format="pdf")


def test_raw_data_are_linked_from_where_the_page_lies(tmp_path: Path) -> None:
    runs = two_runs(tmp_path)
    made = report(
        home=tmp_path, talk=TALK, run=[run.id for run in runs], output=str(tmp_path / "else" / "where.html")
    ).path
    assert made
    links = [attributes["href"] for tag, attributes in seen(made.read_text()).tags if tag == "a"]
    files = {(made.parent / link).resolve() for link in links if link and not link.startswith("#")}
    assert {path for run in runs for path in run.files()} == files


def test_what_went_on_over_time_is_drawn_from_records_and_log(tmp_path: Path) -> None:
    runs = two_runs(tmp_path)
    lines = [
        {"at": f"2026-11-30 10:00:{second:02d}", "rank": None, "gen_throughput": 100 + second, "accept_len": 3.1}
        for second in range(9)
    ]
    runs[1].append_jsonl("decode.jsonl", lines)
    phases = [("before_args", 0), ("weights", 4), ("pools", 30), ("graphs", 31), ("ready", 45), ("serving", 50)]
    runs[1].append_jsonl(
        "startup.jsonl", [{"phase": phase, "at": f"2026-11-30 09:00:{at:02d}"} for phase, at in phases]
    )
    story = gathered(Store(tmp_path), runs)
    side = story.sides[1]
    assert side.phases == (("before_args", 4.0), ("weights", 26.0), ("pools", 1.0), ("graphs", 14.0))
    assert side.decoded("gen_throughput")[-1] == (8.0, 108.0)
    total = sum(rate for _, rate in side.arrived) * (side.arrived[1][0] - side.arrived[0][0])
    assert total == pytest.approx(8 * 128, rel=1e-6)  # every token once
    assert {plot.caption for section in sections(story) if section.id == "decode" for plot in section.plots} == {
        "Tokens that arrived at the client, last point", "Throughput by the server's log", "Accept length by the server's log",
    }  # fmt: skip
