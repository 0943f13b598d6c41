"""Runs for the terminal: the list, one run, files written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtpdeploy.actions.runs import Deleted, Imported, RunList, RunShown, Written
from mtpdeploy.report.figures import load, number, printable, within

STATUS = {"done": "green", "failed": "red", "interrupted": "yellow", "running": "cyan", "unreadable": "red"}


def listed(answer: RunList, console: Console) -> None:
    if not answer.rows:
        console.print("No run fits." if answer.filtered else f"No runs in {answer.folder} yet.")
        if not answer.filtered:
            console.print("next:\n  mtpdeploy bench\n  mtpdeploy demo")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "kind", "status", "host", "profile", "workload", "tok/s"):
        table.add_column(name, justify="right" if name == "tok/s" else "left", no_wrap=name == "run")
    for row in answer.rows:
        table.add_row(
            row.id,
            row.kind + (" (simulated)" if row.simulated else ""),
            Text(row.status, style=STATUS[row.status]),
            number(row.host),
            number(row.profile),
            number(row.workload),
            number(row.summary.get("output_tok_s")),
        )
    console.print(table)


def shown(answer: RunShown, console: Console) -> None:
    run = answer.run
    if answer.simulated:
        console.print("simulated: no GPU was measured", style="bold magenta")
    for unlike in answer.not_like_for_like:
        console.print(f"not like for like: {printable(unlike)}", style="bold red")
    console.print(
        Text.assemble((run.id, "bold"), f"  {run.kind}, ", (answer.status, STATUS[answer.status])), soft_wrap=True
    )
    console.print(f"{run.created_utc} to {run.finished_utc or 'now'}", style="dim")
    failure = run.summary.get("failure")
    if isinstance(failure, Mapping):
        console.print(f"ended with: {printable(failure.get('message'))}", style="red")
    if run.kind == "tune":
        _search(answer, console)
    facts(run.provenance.as_json() | {"host": run.meta.get("host") or run.provenance.host}, console)
    if answer.points:
        console.print(points_table(answer.points))
    for name, why in answer.damaged.items():
        console.print(f"damaged: {name}: {why}", style="red")
    console.print(f"{run.path}:", soft_wrap=True)
    for path in run.files():
        console.print(f"  {path.relative_to(run.path)}  {path.stat().st_size} bytes", style="dim", soft_wrap=True)


def _search(answer: RunShown, console: Console) -> None:
    """What a search came to, and how it goes on."""
    said, run = answer.run.summary, answer.run
    if verdict := said.get("verdict"):
        chosen = said.get("chosen")
        console.print(Text.assemble("verdict: ", (printable(verdict), "bold green" if chosen else "bold yellow")))
        console.print(f"chosen: {printable(chosen)}" if chosen else "chosen: none, the profile stays as it is")
        if why := said.get("stopped_because"):
            console.print(f"ended after {number(said.get('launches'))} launches because {printable(why)}")
        if file := said.get("profile_file"):
            console.print(f"written: {printable(file)}", soft_wrap=True)
    elif answer.status not in ("done", "running"):
        console.print(f"no verdict yet; go on with: mtpdeploy tune --resume {run.id}", style="yellow", soft_wrap=True)


def facts(values: Mapping[str, object], console: Console) -> None:
    """Key and value of what is known; nested mappings are left to --json."""
    known = {name: value for name, value in values.items() if value not in (None, [], (), {}, "")}
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in known.items():
        if isinstance(value, Mapping):
            value = " ".join(f"{key}={each}" for key, each in value.items())
        elif isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value))
        table.add_row(printable(name.replace("_", " ")), printable(value))
    console.print(table)


def points_table(points: Sequence[Mapping[str, object]]) -> Table:
    """A line a point: load, speed, latencies, acceptance."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    arms = any(point.get("arm") for point in points)
    heads = (
        "load", "done", "tok/s", "tok/s a request", "TTFT p50 ms", "TTFT p90", "TPOT p50 ms", "TPOT p90", "accept", ""
    )  # fmt: skip
    for name in (*(("arm",) if arms else ()), *heads):
        table.add_column(name, justify="left" if name in ("arm", "") else "right")
    for point in points:
        because = point.get("invalid_because")
        reasons = "; ".join(map(printable, because)) if isinstance(because, (list, tuple)) else ""
        table.add_row(
            *((number(point.get("arm")),) if arms else ()),
            load(point),
            f"{number(point.get('completed'))}/{number(point.get('requests'))}",
            number(point.get("output_tok_s")),
            number(within(point, "request_tok_s", "p50")),
            number(within(point, "ttft_ms", "p50")),
            number(within(point, "ttft_ms", "p90")),
            number(within(point, "tpot_ms", "p50")),
            number(within(point, "tpot_ms", "p90")),
            number(point.get("accept_length")),
            Text(f"invalid: {reasons}" if point.get("valid") is False else "", style="red"),
        )
    return table


def written(answer: Written, console: Console) -> None:
    console.print(str(answer.path), soft_wrap=True)


def exported(answer: Written, console: Console) -> None:
    if answer.content is not None:
        console.file.write(answer.content)
    else:
        written(answer, console)


def imported(answer: Imported, console: Console) -> None:
    for name in answer.runs:
        console.print(f"imported {name}")
    for name in answer.known:
        console.print(f"{name} was here already")
    if answer.runs:
        console.print(f"next:\n  mtpdeploy runs show {answer.runs[-1]}")


def deleted(answer: Deleted, console: Console) -> None:
    for name in answer.runs:
        console.print(f"deleted {name}")
