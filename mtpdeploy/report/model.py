"""The step model for the terminal: how well it predicts what it has not seen, then what it predicts."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from mtpdeploy.actions.model import Modelled
from mtpdeploy.analysis.model import CrossValidation, Estimate
from mtpdeploy.report.figures import number, printable

FIGURES = {"step": "step time", "tpot": "time a token", "ttft": "time to first token", "output_tok_s": "output tok/s"}


def text(answer: Modelled, console: Console) -> None:
    if answer.simulated:
        console.print("simulated: no GPU was measured", style="bold magenta")
    console.print(f"Fitted to {answer.points} points of {len(answer.settings)} settings: {printable(answer.source)}.")
    if answer.validation is None:
        console.print("Fewer than three settings: how well it predicts others cannot be told yet.", style="yellow")
    else:
        _validation(answer.validation, console)
    kinds = Table(box=None, pad_edge=False, header_style="bold")
    kinds.add_column("what a step does")
    kinds.add_column("ms a GiB (95 %)", justify="right")
    for one in answer.coefficients:
        low = max(0.0, one.ms_per_gb - 1.96 * one.deviation)
        kinds.add_row(one.name, f"{one.ms_per_gb:.3f} ({low:.3f} to {one.ms_per_gb + 1.96 * one.deviation:.3f})")
    console.print(kinds)
    if answer.acceptance:
        shares = ", ".join(f"{share:.2f}" for share in answer.acceptance)
        console.print(f"Accepted drafts by position: {shares} ({answer.acceptance_source}).")
    console.print(f"Memory budget: {printable(answer.budget)}.")
    if answer.predictions:
        console.print(_predictions(answer))
        for told in dict.fromkeys(told for one in answer.predictions for told in one.prediction.extrapolated):
            console.print(f"  extrapolated: {told}", style="dim")


def _validation(said: CrossValidation, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("error on a setting left out")
    for name in ("median", "90 % within"):
        table.add_column(name, justify="right")
    told = said.as_json()
    for key, name in FIGURES.items():
        values = [told[f"{key}_median_error"], told[f"{key}_p90_error"]]
        table.add_row(name, *(f"{value:.1%}" if isinstance(value, float) else "–" for value in values))
    console.print(table)
    if said.covered is not None:
        console.print(f"{said.covered:.0%} of the measured output tok/s lie inside their 95 % interval.")
    if said.by_setting:
        worst = max(said.by_setting, key=lambda name: said.by_setting[name])
        console.print(f"Worst: {printable(worst)}, {said.by_setting[worst]:.1%}.", style="dim")


def _predictions(answer: Modelled) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting")
    for name in ("load", "output tok/s (95 %)", "ms a token (95 %)", "TTFT ms (95 %)"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in answer.predictions:
        said = one.prediction
        table.add_row(
            one.candidate.name,
            number(said.concurrency),
            _figure(said.output_tok_s),
            _figure(said.tpot_ms),
            _figure(said.ttft_ms),
            "measured" if one.measured else "",
        )
    return table


def _figure(value: Estimate | None) -> str:
    return "–" if value is None else f"{number(value.value)} ({number(value.low)} to {number(value.high)})"
