"""Both doors are the same door: verbs, options, help, answers, errors and exit codes."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete
from commands import parse
from invoke.collection import Collection
from invoke.tasks import Task

import fabfile
from mtpdeploy.actions.verbs import COMMON, Verb, verbs
from mtpdeploy.cli import DEFAULT_NAME, main
from mtpdeploy.inventory import profile_names
from mtpdeploy.resources import bundled

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
TABLE = {verb.name: verb for verb in verbs()}


def click_parameters(group: click.Group, prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    for name, command in group.commands.items():
        if prefix and name == DEFAULT_NAME:
            continue
        yield f"{prefix}{name}", {str(parameter.name) for parameter in command.params}
        if isinstance(command, click.Group):
            yield from click_parameters(command, f"{name}.")


def fab_tasks(collection: Collection, prefix: str = "") -> Iterator[tuple[str, Task]]:  # type: ignore[type-arg]
    for name, task in collection.tasks.items():
        yield (prefix.rstrip(".") if prefix and name == DEFAULT_NAME else f"{prefix}{name}"), task
    for name, below in collection.collections.items():
        yield from fab_tasks(below, f"{prefix}{name}.")


def run(door: str, *words: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / door), *words], capture_output=True, text=True, cwd=cwd, env={**os.environ, **environ}, timeout=60
    )


def both(
    verb: str, *words: str, **environ: str
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    return run("mtpdeploy", *verb.split("."), *words, **environ), run("fab", verb, *words, **environ)


def test_both_doors_offer_the_same_verbs_and_parameters() -> None:
    ours = dict(click_parameters(main))
    theirs = {
        name: {*inspect.signature(task.body).parameters} - {"context"} for name, task in fab_tasks(fabfile.namespace)
    }
    assert ours == theirs
    assert set(ours) == set(TABLE)


@pytest.mark.parametrize("verb", TABLE.values(), ids=TABLE)
def test_verb_s_action_and_renderer_exist_and_take_what_the_table_says(verb: Verb) -> None:
    module, _, function = verb.action.partition(":")
    action = getattr(importlib.import_module(module), function)
    parameters = inspect.signature(action).parameters
    given = {"home", "talk", *(o.name for o in verb.options), *(a.name for a in verb.arguments)}
    given |= {"out"} if verb.streams else set()
    needed = {p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    assert needed <= given, "the door would not pass it"
    assert takes_any or given <= set(parameters), "the door would pass more than it takes"
    module, _, function = verb.text.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("verb", TABLE.values(), ids=TABLE)
def test_verb_explains_itself(verb: Verb) -> None:
    assert verb.examples, "an example shows how it is meant"
    assert verb.summary.endswith(".")
    for option in verb.options:
        assert option.help, option.name
        assert option.name not in {common.name for common in COMMON}, "the doors handle that one"
    for example in verb.examples:
        assert example.startswith(("mtpdeploy ", "ssh ", "cat ", "curl ")), example


@pytest.mark.parametrize("verb", TABLE.values(), ids=TABLE)
def test_examples_parse_as_they_are_printed(verb: Verb) -> None:
    for example in verb.examples:
        if example.startswith("mtpdeploy "):
            parse(example)


@pytest.mark.parametrize("words", [("deploy",), ("runs.show",), ("profiles.show",), ("profiles",)])
def test_dash_h_is_help_at_fabric_s_door(words: tuple[str, ...]) -> None:
    if words[0] not in TABLE:
        pytest.skip(f"no verb {words[0]}")
    answer = run("fab", *words, "-h")
    assert answer.returncode == 0
    assert "--json" in answer.stdout
    assert TABLE[words[0]].summary.split()[0] in answer.stdout


def test_dash_h_is_help_at_click_s_door() -> None:
    for words in ((), ("profiles",), ("profiles", "show")):
        answer = run("mtpdeploy", *words, "-h")
        assert answer.returncode == 0
        assert "Usage" in answer.stdout


def test_answers_are_the_same_at_both_doors() -> None:
    one, other = both("profiles.show", "mtp", "--json")
    assert json.loads(one.stdout) == json.loads(other.stdout)
    one, other = both("profiles")
    assert one.stdout == other.stdout
    assert one.stderr == other.stderr == ""


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("nonesuch",), 14, "not-found"),
        ((), 2, "usage-error"),
        (("mtp", "--set", "args.mem_fraction=1"), 3, "config-error"),
        (("mtp", "--set", "x"), 2, "usage-error"),
        (("mtp", "--host", "a b"), 2, "usage-error"),
    ],
)
def test_errors_have_the_same_exit_code_and_json_at_both_doors(words: tuple[str, ...], code: int, error: str) -> None:
    for answer in both("profiles.show", *words, "--json"):
        assert answer.returncode == code
        told = json.loads(answer.stdout)
        assert (told["error"], told["exit_code"]) == (error, code)
        assert "Traceback" not in answer.stderr


def test_fabric_s_own_host_selection_is_refused_with_the_reason() -> None:
    answer = run("fab", "-H", "gpu1,gpu2", "profiles")
    assert answer.returncode == 2
    assert "choose hosts with --host" in answer.stderr


def test_errors_go_to_stderr_and_answers_to_stdout() -> None:
    wrong = run("mtpdeploy", "profiles", "show", "nonesuch")
    assert wrong.stdout == ""
    assert wrong.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("mtpdeploy --help | true", 141),
        ("mtpdeploy profiles | true", 141),
        ("fab --list | true", 141),
        ("fab profiles --json | true", 141),
        ("mtpdeploy nonesuch | true", 2),
        ("mtpdeploy profiles >&-", 0),
    ],
)
def test_a_reader_that_leaves_and_a_closed_stream_are_nothing_to_talk_about(command: str, code: int) -> None:
    # Not `head`: whether a pipe is closed before or after the last byte would be up to the clock.
    line = f"(sleep 0.01; {command}) ; exit ${{PIPESTATUS[0]}}".replace("| true)", ") | true")
    answer = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, timeout=60,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert answer.returncode == code, answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stderr == "" or code == 2


@pytest.mark.parametrize("command", ["mtpdeploy --help", "mtpdeploy profiles", "fab profiles --json"])
def test_a_full_disk_under_the_answer_is_told(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(
            [str(BIN / command.split()[0]), *command.split()[1:]],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
    assert answer.returncode == 1
    assert answer.stderr == "error: standard output: No space left on device\n"


def test_a_folder_that_was_deleted_under_the_shell_is_told(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    answer = subprocess.run(
        ["sh", "-c", 'cd "$1" && rmdir "$1" && exec "$2" profiles', "sh", gone, BIN / "mtpdeploy"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 2
    assert "does not exist any more" in answer.stderr


def test_an_interrupt_while_the_doors_are_still_imported_ends_quietly(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    for start in ([str(BIN / "mtpdeploy")], [sys.executable, "-m", "mtpdeploy"]):
        answer = subprocess.run(
            [*start, "profiles"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        assert (answer.returncode, answer.stderr) == (130, "")


def test_an_ascii_terminal_gets_escapes_and_no_crash(tmp_path: Path) -> None:
    profile = tmp_path / "naïve.yml"
    profile.write_text("description: größer ✓\nmodel: Qwen/Qwen3.6-27B\n", encoding="utf-8")
    answer = run("mtpdeploy", "profiles", "show", str(profile), PYTHONIOENCODING="ascii", LC_ALL="C")
    assert answer.returncode == 0
    assert "\\u2713" in answer.stdout


def test_hostile_text_in_a_setting_is_shown_and_not_interpreted() -> None:
    answer = run("mtpdeploy", "profiles", "show", "mtp", "--set", "args.served_model_name=[red]$(touch x)[/red]")
    assert "[red]$(touch x)[/red]" in answer.stdout


def test_an_early_home_counts_like_a_late_one(tmp_path: Path) -> None:
    folder = tmp_path / "inventories" / "profiles"
    folder.mkdir(parents=True)
    (folder / "mine.yml").write_text("description: mine\nmodel: Qwen/Qwen3.6-27B\n")
    early = run("mtpdeploy", "--home", str(tmp_path), "profiles", "--json")
    late = run("fab", "profiles", "--home", str(tmp_path), "--json")
    by_environment = run("mtpdeploy", "profiles", "--json", MTPDEPLOY_HOME=str(tmp_path))
    assert early.stdout == late.stdout == by_environment.stdout
    assert "mine" in early.stdout


def test_an_empty_folder_is_a_fine_home(home: Path) -> None:
    assert set(profile_names(home)) >= {"baseline", "mtp", "mtp-throughput", "mtp-lowmem"}
    assert run("mtpdeploy", "profiles", cwd=home, MTPDEPLOY_HOME=str(home)).returncode == 0


def test_a_home_made_by_init_has_fabric_s_door(tmp_path: Path) -> None:
    made = run("mtpdeploy", "init", str(tmp_path / "gpu"))
    assert made.returncode == 0
    listed = run("fab", "--list", cwd=tmp_path / "gpu")
    assert "profiles.show" in listed.stdout
    assert (tmp_path / "gpu" / "fabfile.py").read_text() == (ROOT / "fabfile.py").read_text()


def test_init_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "fabfile.py").write_text("# mine\n")
    made = json.loads(run("mtpdeploy", "init", str(tmp_path), "--all", "--json").stdout)
    assert made["kept"] == ["fabfile.py"]
    assert (tmp_path / "fabfile.py").read_text() == "# mine\n"
    shipped = {f"templates/{p.relative_to(bundled('templates'))}" for p in bundled("templates").rglob("*.j2")}
    assert shipped <= set(made["written"])


def test_help_and_list_import_nothing_that_only_a_verb_needs() -> None:
    heavy = "{'aiohttp', 'pydantic', 'yaml', 'jinja2', 'numpy', 'scipy', 'matplotlib', 'rich', 'fabric', 'paramiko'}"
    code = f"import sys, mtpdeploy.cli; print(sorted({heavy} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip() == "[]"
    )


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        ((), "pl", "plan"),
        (("deploy", "--profile"), "mtp-l", "mtp-lowmem"),
        (("deploy", "--host"), "gpu1,reh", "gpu1,rehearsal"),
        (("bench", "--workload"), "sto", "story"),
        (("deploy", "--set"), "args.max_mamba_c", "args.max_mamba_cache_size="),
        (("profiles", "show"), "mtp-t", "mtp-throughput"),
        (("runs", "show"), "la", "last"),
    ],
)
def test_a_shell_completes_the_names_of_the_home(
    words: tuple[str, ...], incomplete: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "inventories"
    folder.mkdir()
    (folder / "lab.yml").write_text("hosts: {gpu1: {}, rehearsal: {local: true}}\n")
    monkeypatch.setenv("MTPDEPLOY_HOME", str(tmp_path))
    shell = BashComplete(main, {}, "mtpdeploy", "_MTPDEPLOY_COMPLETE")
    assert [found.value for found in shell.get_completions([*words], incomplete)] == [expected]


def test_help_lists_the_verbs_in_the_table_s_order() -> None:
    listed = [
        line.split()[0] for line in run("mtpdeploy").stderr.partition("Commands:")[2].splitlines() if line[2:3] > " "
    ]
    assert listed == [name for name in TABLE if "." not in name]
