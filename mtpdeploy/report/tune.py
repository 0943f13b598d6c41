"""A search for the terminal: the verdict, every launch, what was never launched and why."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtpdeploy.actions.tune import Tuned
from mtpdeploy.analysis.space import FACTORS
from mtpdeploy.analysis.tune import Level, Proposal
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
            console.print(f"  costs: {cost}")
    elif answer.run_id:
        console.print(Text.assemble((f"{spec.profile} stays as it is", "bold yellow"), f": {answer.verdict}"))
    if answer.best and answer.best is not answer.chosen:
        console.print(f"best seen: {answer.best.candidate.name}")
    console.print(f"The search ended because {answer.stop}." if answer.run_id else f"{answer.stop}.")
    if answer.outcomes:
        console.print(_launches(answer))
    if not answer.run_id:
        console.print(_space(answer))
    out = sum(one.count for one in answer.ruled_out)
    console.print(
        f"{len(answer.outcomes)} launches of {answer.candidates} settings that would start; {out} were ruled out beforehand."
    )
    for one in answer.ruled_out:
        console.print(f"  {one.count} by {one.rule}, such as {one.example}: {one.why}",
                      style="dim")  # fmt: skip
    for number_, said in enumerate(answer.first, 1):
        _proposal(number_, said, console)
    if answer.predicted:
        console.print(_predicted(answer))
    if answer.misfit:
        console.print(f"{answer.misfit.why[0].upper()}{answer.misfit.why[1:]}.", style="yellow")
    elif answer.model_error:
        error = within(answer.model_error, "output_tok_s_median_error")
        if isinstance(error, float):
            console.print(
                f"The model predicts the output tok/s of a setting that it has not seen within {error:.1%} (median).",
                style="dim",
            )
    for price in answer.prices:
        console.print(
            f"Not searched: --give-up {price.give_up}. The model expects {price.ratio.value:.2f} times the {spec.objective} "
            f"({price.ratio.low:.2f} to {price.ratio.high:.2f}) of {price.candidate.name}."
        )
    if answer.comparison:
        console.print("Confirmation, profile against winner in turns:", style="bold")
        compare.text(answer.comparison, console)
    if answer.profile_file:
        console.print(f"written: {answer.profile_file}", soft_wrap=True)
        console.print(f"next: mtpdeploy deploy --host {spec.host} --profile {spec.name}", style="bold", soft_wrap=True)
    if answer.serving:
        console.print(f"{spec.host} serves {answer.serving}.")


def _proposal(place: int, said: Proposal, console: Console) -> None:
    when = "first launch would be" if place == 1 else f"then, if that comes out as predicted, {place}."
    console.print(f"{when}: {said.candidate.name} ({said.why})")
    if place > 1:
        return
    for name, value in said.candidate.args.items():
        console.print(f"  {name}: {'not given' if value is None else value}", style="dim")
    for cost in said.candidate.costs:
        console.print(f"  costs: {cost}", style="dim")


def _space(answer: Tuned) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("factor", "levels", "another level than the profile's costs"):
        table.add_column(name)
    for name, levels in answer.factors.items():
        factor = FACTORS[name]
        held = len(levels) < 2
        more = f" (--give-up {factor.gives_up})" if held and factor.gives_up and not answer.spec.own_space else ""
        table.add_row(name, _levels(name, levels), f"{factor.costs}{more}", style="dim" if held else "")
    return table


def _levels(name: str, levels: Sequence[Level]) -> str:
    default = "as running needs" if name == "mamba_slots" else "default"
    said = ", ".join(default if level is None else "on" if level is True else "off" if level is False else str(level)
                     for level in levels)  # fmt: skip
    return said if len(levels) > 1 else f"held: {said}"


def _predicted(answer: Tuned) -> Table:
    """Settings not run, by the model that earlier runs of this host fitted."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"predicted from {len(answer.spec.learned_from)} runs")
    table.add_column(f"{answer.spec.objective} (95 %)", justify="right")
    for one in answer.predicted:
        table.add_row(one.candidate.name, f"{number(one.predicted)} ({number(one.low)} to {number(one.high)})")
    return table


def _launches(answer: Tuned) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = [name for name, levels in answer.factors.items() if len(levels) > 1]
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for name in (answer.spec.objective, "min", "run"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for count, one in enumerate(answer.outcomes, 1):
        said = one.status if one.status != "ok" or one.value is not None else "misses the objectives"
        failed = f"{one.status}: {one.cause}" if one.cause else said
        table.add_row(
            str(count),
            *(str(one.candidate.levels.get(name)) for name in names),
            number(one.value) if one.value is not None else Text(failed, style=STATUS[one.status]),
            number(one.minutes),
            one.run_id or "",
        )
    return table
