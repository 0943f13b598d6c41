"""The pages say what the code does: generated ones are fresh, every error is explained, links and runbooks exist."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import tooling
import zstandard
from commands import parse

from mtpdeploy import errors
from mtpdeploy.actions.verbs import verbs
from mtpdeploy.cli import main
from mtpdeploy.sglang import failures
from mtpdeploy.sglang.logs.summary import Phase, Summary
from mtpdeploy.sglang.verify import Gate, Status, Verdict

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.MtpError)]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return tooling.tool("docs")


def test_generated_pages_are_fresh(generator: ModuleType) -> None:
    assert generator.outdated() == [], "run `make docs`"


def test_every_verb_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    assert [verb.name for verb in verbs() if f"\n## {verb.name.replace('.', ' ')}\n" not in text] == []


@pytest.mark.parametrize("error", CLASSES, ids=lambda each: each.__name__)
def test_every_error_is_explained_with_its_exit_code(error: type[errors.MtpError]) -> None:
    text = (ROOT / "docs" / "messages.md").read_text()
    section = text.partition(f"\n## {error.__name__}\n")[2].partition("\n## ")[0]
    assert section.startswith(f"Exit code {error.exit_code}."), error.__name__
    assert len(section) > 60


def test_no_error_is_explained_that_does_not_exist() -> None:
    text = (ROOT / "docs" / "messages.md").read_text()
    assert set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == {each.__name__ for each in CLASSES}


def test_exit_codes_are_one_per_kind_of_failure() -> None:
    codes = {each.exit_code: each for each in CLASSES if each.__base__ in (errors.MtpError, Exception)}
    assert sorted(codes) == list(range(1, 15))


def test_every_runbook_that_an_error_names_exists() -> None:
    named: set[str] = set()
    for path in (ROOT / "mtpdeploy").rglob("*.py"):
        named |= set(re.findall(r"""runbook(?:=|": )"([a-z0-9-]+)\"""", path.read_text()))
    missing = {name for name in named if not (ROOT / "docs" / "runbooks" / f"{name}.md").is_file()}
    assert missing == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [
        each
        for each in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
        if "://" not in each and not each.startswith("mailto:")
    ]
    assert [each for each in targets if not (page.parent / each).exists()] == []


def commands(page: Path) -> list[str]:
    """Every command of ours in a page: lines of code blocks, continued ones joined, and code in running text."""
    text = page.read_text()
    blocks = "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    lines = [line.strip() for line in blocks.splitlines()]
    inline = re.findall(r"(?<!`)`((?:mtpdeploy|fab) [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    typed = [line for line in lines if re.match(r"(\$ )?(mtpdeploy|fab) ", line)]
    return [line for line in (*typed, *inline) if "VERB" not in line and "…" not in line]


@pytest.mark.parametrize(
    ("page", "line"), [(str(page.relative_to(ROOT)), line) for page in PAGES for line in dict.fromkeys(commands(page))]
)
def test_a_command_in_the_pages_can_be_typed(page: str, line: str) -> None:
    parse(line)


HOSTS = """
groups: {h200: {gpus: [{count: 1, name: NVIDIA H200, memory_gb: 139.8}]}}
hosts: {gpu1: {groups: [h200]}, gpu2: {groups: [h200], sglang_version: 0.5.18}}
"""
# What needs no host, and how it may end: of a log that was asked for otherwise, `verify` says so.
OFFLINE = {
    "init": {0}, "hosts": {0}, "profiles": {0}, "plan": {0}, "logs --file": {0}, "verify --file": {0, 11, 12}, "deploy --dry-run": {0},
}  # fmt: skip


def offline() -> list[str]:
    """Every command of ours in the pages that touches no host, once. Words in capitals stand for something else, `plan` alone for a verb."""
    found = dict.fromkeys(
        line for page in PAGES for line in commands(page) if not re.search(r"\s[A-Z]{2,}(\s|$)", line)
    )
    return [
        line
        for line in found
        if line != "mtpdeploy plan"
        and any(verb.split()[0] == line.split()[1] and all(w in line for w in verb.split()[1:]) for verb in OFFLINE)
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the hosts and logs that the pages speak of, as the current folder."""
    (tmp_path / "inventories").mkdir()
    (tmp_path / "inventories" / "hosts.yml").write_text(HOSTS)
    log = (ROOT / "tests" / "golden" / "logs" / "mtp24.log").read_bytes()
    (tmp_path / "server.log").write_bytes(log)
    (tmp_path / "old.log.gz").write_bytes(gzip.compress(log))
    (tmp_path / "new.log.zst").write_bytes(zstandard.ZstdCompressor().compress(log))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(line: str) -> int:
    """Runs it as typed, but in this process."""
    words = [os.path.expanduser(word) for word in shlex.split(line.removeprefix("$ "), comments=True)[1:]]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("line", offline())
def test_a_command_in_the_pages_that_needs_no_host_does_what_it_says(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = next(ends for verb, ends in OFFLINE.items() if verb.split()[0] == line.split()[1])
    assert typed(line) in allowed
    assert capsys.readouterr().out.strip()


def test_what_the_readme_shows_first_is_what_comes_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    command, _, shown = next(each for each in block.split("$ ") if each.startswith("mtpdeploy plan")).partition("\n")
    assert typed(command) == 0
    came = " ".join(capsys.readouterr().out.split())
    pieces = [" ".join(piece.split()) for piece in re.split(r"…|\n(?=\S)", shown)]
    assert [piece for piece in pieces if piece and piece not in came] == []
    assert len(pieces) > 3


def _keys(value: object) -> set[str]:
    """Every key of a JSON document, but for those of mappings whose keys are names of something else."""
    if isinstance(value, dict):
        return set(value).union(*(_keys(v) for k, v in value.items() if k not in ("set", "env", "fix")))
    return set().union(*map(_keys, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize(
    ("line", "page"),
    [
        ("mtpdeploy plan --profile mtp --gpu-memory-gb 96 --want-concurrency 16 --json", "memory"),
        ("mtpdeploy plan --profile mtp --gpu-memory-gb 40 --json", "memory"),
        ("mtpdeploy verify --file server.log --json", "verify"),
    ],
)
def test_every_key_of_an_answer_is_explained(
    line: str, page: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(line)
    words = set(re.findall(r"\w+", (ROOT / "docs" / f"{page}.md").read_text()))
    assert _keys(json.loads(capsys.readouterr().out)) - words == set()


def test_every_word_that_an_answer_may_use_is_explained() -> None:
    read = {
        "verify": (*get_args(Status), *get_args(Verdict), *get_args(Gate)),
        "log-summary": (*get_args(Phase), *(field.name for field in dataclasses.fields(Summary))),
        "runbooks/README": tuple(failures.CLASSES),
    }
    for page, words in read.items():
        text = (ROOT / "docs" / f"{page}.md").read_text()
        assert [word for word in words if not re.search(rf"\b{word}\b", text)] == [], page
