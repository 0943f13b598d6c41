"""A recommendation for the terminal: the answer, what it rests on, what it gives up, what would change it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtpdeploy.analysis.recommend import Judged, Recommendation
from mtpdeploy.report.figures import number, printable


def text(answer: Recommendation, console: Console) -> None:
    if answer.frontier.simulated:
        console.print("simulated: no GPU was measured; this speaks for the simulated host only", style="bold magenta")
    _list("Not like for like:", answer.frontier.not_like_for_like, console, "bold red")
    asked = ", ".join([answer.kind, *answer.slo, *([f"{answer.rate:g} requests/s"] if answer.rate else [])])
    word, style = (answer.chosen.spot.profile, "bold green") if answer.chosen else (answer.verdict, "bold yellow")
    console.print(Text.assemble((word, style), f"  for {asked} on {answer.host or 'this endpoint'}"))
    console.print(printable(answer.why) + ".")
    console.print(f"Evidence: {', '.join(answer.evidence)}.")
    if answer.args:
        console.print("Settings:")
        for name, value in answer.args.items():
            if name in ("host", "port"):
                continue
            console.print(f"  {printable(name)}: {printable(value)}", style="dim")
    _list("Gives up:", answer.gives_up, console)
    _list("Would change the answer:", answer.would_change, console)
    _list("What limits it:", answer.limits, console)
    for one in answer.suggestions:
        given = one.get("set")
        sets = ", ".join(f"{name}={value}" for name, value in given.items()) if isinstance(given, Mapping) else ""
        cost = one.get("cost_gb")
        paid = ""
        if isinstance(cost, (int, float)):
            paid = f", {'costs' if cost >= 0 else 'gives back'} {number(abs(cost))} GiB"
        console.print(f"  - {sets}: {one.get('effect')}{paid}")
    for experiment in answer.experiments:
        console.print(f"next: {experiment.command}", style="bold", soft_wrap=True)
        console.print(f"      {experiment.why}", style="dim")
    console.print(_table(answer.judged, answer.chosen))
    for note in answer.notes:
        console.print(f"note: {printable(note)}", style="yellow")


def _list(title: str, lines: Iterable[str], console: Console, style: str = "bold") -> None:
    lines = tuple(lines)
    if lines:
        console.print(title, style=style)
        for line in lines:
            console.print(f"  - {printable(line)}")


def _table(judged: tuple[Judged, ...], chosen: Judged | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("profile")
    for name in ("load", "tok/s for a user", "tok/s per GPU", "requests/s"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in judged:
        reasons = [f"{name}: {number(value)}" for name, value in one.broken.items()]
        reasons += [f"{name}: too few samples" for name in one.unknown]
        said = Text("; ".join(reasons), style="yellow") if reasons else Text("chosen" if one is chosen else "", "green")
        table.add_row(
            printable(one.spot.profile),
            number(one.spot.load.concurrency) if one.spot.load.concurrency is not None else str(one.spot.load),
            number(one.spot.user_tok_s.value),
            number(one.spot.gpu_tok_s.value),
            number(one.requests_s),
            said,
        )
    return table
