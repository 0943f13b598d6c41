"""The pages say what the code does: generated ones are fresh, every error is explained, links and runbooks exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from commands import parse

from mtpdeploy import errors
from mtpdeploy.actions.verbs import verbs

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.MtpError)]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generator", ROOT / "tools" / "docs.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
