"""A search for the terminal: the verdict, every launch, what was never launched."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtpdeploy.actions.tune import Tuned
from mtpdeploy.report import compare
from mtpdeploy.report.figures import number, within

STATUS = {"ok": "green", "oom": "yellow", "hang": "red", "crash": "red", "refused": "yellow"}


def text(answer: Tuned, console: Console) -> None:
    if answer.simulated:
        console.print("simulated: no GPU was measured", style="bold magenta")
    spec = answer.spec
    if answer.chosen:
        console.print(Text.assemble(("chosen", "bold green"), f": {answer.chosen.candidate.name}"))
        for cost in answer.chosen.candidate.costs:
            console.print(f"  gives up: {cost}")
    elif answer.run_id:
        console.print(Text.assemble((f"{spec.profile} stays as it is", "bold yellow"), f": {answer.verdict}"))
    if answer.best and answer.best is not answer.chosen:
        console.print(f"best seen: {answer.best.candidate.name}")
    console.print(f"The search ended because {answer.stop}." if answer.run_id else f"{answer.stop}.")
    console.print(
        f"{len(answer.outcomes)} launches of {answer.candidates} settings that would start; "
        f"{sum(answer.refused.values())} were ruled out beforehand."
    )
    for why, count in answer.refused.items():
        console.print(f"  {count} by {why}", style="dim")
    if answer.outcomes:
        console.print(_table(answer))
    if answer.proposal:
        said = answer.proposal
        console.print(f"first launch would be: {said.candidate.name} ({said.why})")
        for name, value in said.candidate.args.items():
            console.print(f"  {name}: {value}", style="dim")
    if answer.predicted:
        console.print(_predicted(answer))
    if answer.model_error:
        error = within(answer.model_error, "output_tok_s_median_error")
        if isinstance(error, float):
            console.print(
                f"The model predicts a setting that it has not seen within {error:.1%} (median).", style="dim"
            )
    if answer.comparison:
        console.print("Confirmation, profile against winner in turns:", style="bold")
        compare.text(answer.comparison, console)
    if answer.profile_file:
        console.print(f"written: {answer.profile_file}", soft_wrap=True)
        console.print(f"next: mtpdeploy deploy --host {spec.host} --profile {spec.name}", style="bold", soft_wrap=True)
    if answer.serving:
        console.print(f"{spec.host} serves {answer.serving}.")


def _predicted(answer: Tuned) -> Table:
    """Settings not run, by the model that earlier runs of this host fitted."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"predicted from {len(answer.spec.learned_from)} runs")
    table.add_column(f"{answer.spec.objective} (95 %)", justify="right")
    for one in answer.predicted:
        table.add_row(one.candidate.name, f"{number(one.predicted)} ({number(one.low)} to {number(one.high)})")
    return table


def _table(answer: Tuned) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = list(answer.outcomes[0].candidate.levels)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for name in (answer.spec.objective, "min", "run"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for count, one in enumerate(answer.outcomes, 1):
        said = one.status if one.status != "ok" or one.value is not None else "misses the objectives"
        table.add_row(
            str(count),
            *(str(one.candidate.levels.get(name)) for name in names),
            number(one.value) if one.value is not None else Text(one.cause or said, style=STATUS[one.status]),
            number(one.minutes),
            one.run_id or "",
        )
    return table
