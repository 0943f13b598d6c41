"""The report page: needs nothing but itself, believes no text that it shows, and tells the same numbers as the JSON."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from runs import bench_run

from mtpdeploy.actions.compare import compare
from mtpdeploy.actions.runs import report
from mtpdeploy.errors import UsageError
from mtpdeploy.progress import Silent
from mtpdeploy.report.figures import number, times
from mtpdeploy.report.html import page
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


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_shows_the_page_without_complaint_and_without_sideways_scrolling(tmp_path: Path) -> None:
    """A probe that is added for this test writes what the layout became into the title."""
    html = page(gathered(Store(tmp_path), two_runs(tmp_path)))
    probe = (
        "<script>addEventListener('load', () => { const wide = document.documentElement.scrollWidth - innerWidth;"
        "document.title = `wide=${wide} plots=${document.querySelectorAll('figure svg').length}`; });</script>"
    )
    file = tmp_path / "report.html"
    file.write_text(
        re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html).replace("</body>", probe + "</body>")
    )
    assert BROWSER
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,800", "--dump-dom",
            f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--enable-logging=stderr", file.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    told = re.search(r"<title>wide=(-?\d+) plots=(\d+)</title>", done.stdout)
    assert told, done.stdout[:300]
    assert int(told[1]) <= 0
    assert int(told[2]) >= 6
