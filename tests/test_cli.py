"""The parts that both doors share: typing of options, JSON, errors, progress."""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from mtpdeploy import door
from mtpdeploy.actions.verbs import Argument, Option, Verb
from mtpdeploy.errors import HostLocked, LaunchFailed, UsageError
from mtpdeploy.report.console import AnswerConsole
from mtpdeploy.report.errors import text
from mtpdeploy.report.live import Bars, Lines, live
from mtpdeploy.secret import Secret


@dataclass(frozen=True)
class Answer:
    value: object
    exit_code: int = 0

    def as_json(self) -> dict[str, object]:
        return {"value": self.value}


class Played(types.ModuleType):
    """A module with one action, which does what the test says, and a renderer."""

    behaviour = staticmethod(lambda **_: Answer(1))

    def action(self, **options: object) -> Answer:
        return self.behaviour(**options)

    def text(self, answer: Answer, console: Console) -> None:
        console.print(f"value [bold]{answer.value}[/bold]")


@pytest.fixture
def played() -> Iterator[Played]:
    module = Played("played")
    sys.modules["played"] = module
    yield module
    del sys.modules["played"]


VERB = Verb(
    "try",
    "Try.",
    "played:action",
    "played:text",
    options=(
        Option("count", "How many.", type=int, default=3),
        Option("share", "How much.", type=float),
        Option("kind", "Which.", choices=("a", "b")),
        Option("set_", "Settings.", multiple=True),
        Option("dry_run", "Only look.", type=bool, default=False),
    ),
    arguments=(Argument("name", "A name."), Argument("more", "More names.", required=False, multiple=True)),
)


def given(**options: object) -> dict[str, object]:
    return {"name": "x", **options}


def test_strings_from_fabric_s_door_arrive_typed_and_absent_ones_as_defaults() -> None:
    options = door.checked(VERB, given(count="7", set_=["a", "b"]))
    assert (options["count"], options["set_"], options["kind"], options["dry_run"], options["more"]) == (
        7,
        ("a", "b"),
        None,
        False,
        (),
    )
    assert door.checked(VERB, given())["count"] == 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"count": "many"}, "--count: should be a whole number, not 'many'"),
        ({"share": "nan"}, "--share: should be a number, not 'nan'"),
        ({"share": float("inf")}, "--share: should be a number, not inf"),
        ({"kind": "c"}, "--kind: should be one of a, b, not 'c'"),
        ({"name": ""}, "NAME is missing"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=None) as refused:
        door.checked(VERB, given(**options))
    assert told in str(refused.value)


def test_json_has_null_for_what_is_no_number_and_a_mask_for_a_secret() -> None:
    document = door.as_document(
        {"nan": float("nan"), "inf": float("inf"), "key": Secret("s3cret"), "path": Path("/x"), "pair": (1, 2)}
    )
    assert json.loads(document) == {"nan": None, "inf": None, "key": "***", "path": "/x", "pair": [1, 2]}


def test_an_answer_s_exit_code_is_the_command_s(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    played.behaviour = lambda **_: Answer(5, exit_code=11)  # type: ignore[assignment]
    assert door.perform(VERB, given()) == 11
    assert capsys.readouterr().out == "value [bold]5[/bold]\n"


def test_an_interrupt_ends_with_130_and_one_line(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(**_: object) -> Answer:
        raise KeyboardInterrupt

    played.behaviour = interrupted  # type: ignore[assignment]
    assert door.perform(VERB, given()) == 130
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.strip().splitlines()) == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_a_fault_of_ours_is_told_in_two_lines_and_kept_in_a_file(
    played: Played, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    def broken(**_: object) -> Answer:
        raise KeyError("lost")

    played.behaviour = broken  # type: ignore[assignment]
    assert door.perform(VERB, given(json=as_json)) == 1
    told = capsys.readouterr()
    message = json.loads(told.out)["message"] if as_json else told.err
    assert "Traceback" not in message
    file = Path(message.partition("traceback is in ")[2].partition(";")[0])
    assert "KeyError: 'lost'" in file.read_text()
    file.unlink()


def test_a_failure_shows_cause_evidence_next_command_and_page_unwrapped() -> None:
    error = LaunchFailed(
        "out of memory while loading\nthe draft head did not fit",
        evidence=["torch.OutOfMemoryError: CUDA out of memory. " + "x" * 200],
        next_commands=["mtpdeploy deploy --set args.mem_fraction_static=0.85"],
        runbook="out-of-memory",
    )
    out = io.StringIO()
    text(error, Console(file=out, width=40, markup=False))
    lines = out.getvalue().splitlines()
    assert lines[0] == "error: out of memory while loading"
    assert lines[2].endswith("x" * 200)
    assert "  mtpdeploy deploy --set args.mem_fraction_static=0.85" in lines
    assert lines[-1] == "see docs/runbooks/out-of-memory.md"


def test_an_error_as_json_goes_to_stdout(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    def locked(**_: object) -> Answer:
        raise HostLocked("held by ann", details={"by": "ann"})

    played.behaviour = locked  # type: ignore[assignment]
    assert door.perform(VERB, given(json=True)) == 7
    assert json.loads(capsys.readouterr().out)["details"] == {"by": "ann"}


def test_a_new_phase_is_told_at_once() -> None:
    out = io.StringIO()
    lines = Lines(out, clock=lambda: 0.0)
    for phase in ("weights 1/17", "weights 2/17", "graphs 1/8", "warming up"):
        lines.stage("gpu1", phase)
    assert out.getvalue().splitlines() == ["gpu1: weights 1/17", "gpu1: graphs 1/8", "gpu1: warming up"]


def test_a_stage_that_only_counts_is_told_no_more_than_once_in_two_seconds() -> None:
    now = [0.0]
    out = io.StringIO()
    lines = Lines(out, clock=lambda: now[0])
    for step in range(100):
        now[0] = step * 0.1
        lines.stage("gpu1", f"weights {step}%", step / 100)
    lines.done("gpu1", "ready in 10 s")
    told = out.getvalue().splitlines()
    assert told[0] == "gpu1: weights 0% (0%)"
    assert told[-1] == "gpu1: ready in 10 s"
    assert len(told) == 6


def test_a_pipe_and_a_dumb_terminal_get_plain_lines_and_quiet_gets_none() -> None:
    out = io.StringIO()
    with live(stream=out) as talk:
        talk.stage("gpu1", "loading")
    assert out.getvalue() == "gpu1: loading\n"
    silent = io.StringIO()
    with live(quiet=True, stream=silent) as talk:
        talk.note("x")
        talk.done("gpu1", "x")
    assert silent.getvalue() == ""


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_bars_that_vanish_and_results_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with live(stream=out, no_color=True) as talk:
        assert isinstance(talk, Bars)
        talk.stage("gpu1", "weights [17/40]", 0.4)
        talk.stage("gpu1", "graphs")
        talk.done("gpu1", "ready")
        talk.note("a note [with brackets]")
    shown = out.getvalue()
    assert "gpu1: ready" in shown
    assert "a note [with brackets]" in shown


def test_the_display_ends_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()

    def fail() -> None:
        with live(stream=out) as talk:
            talk.stage("gpu1", "locking")
            raise HostLocked("held")

    with pytest.raises(HostLocked):
        fail()
    assert "\x1b[?25h" in out.getvalue(), "the cursor is shown again"


def _wide(rows: int = 2) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("HOST", "ADDRESS", "SGLANG"):
        table.add_column(header)
    for row in range(rows):
        table.add_row(f"host{row}", "deploy@10.79.80.11", "asked at the host")
    return table


def _shown(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    AnswerConsole(file=out, width=width).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_table_in_a_narrow_terminal_breaks_between_words_only() -> None:
    assert _shown(_wide(1), 80)[1] == "host0  deploy@10.79.80.11  asked at the host"
    assert _shown(_wide(1), 36)[1:] == ["host0  deploy@10.79.80.11  asked at", "                           the host"]


def test_a_table_that_cannot_fit_is_listed_row_by_row() -> None:
    assert _shown(_wide(2), 28) == [
        *("HOST     host0", "ADDRESS  deploy@10.79.80.11", "SGLANG   asked at the host", ""),
        *("HOST     host1", "ADDRESS  deploy@10.79.80.11", "SGLANG   asked at the host"),
    ]
