"""A comparison for the terminal: what was not alike first, then the verdict, then the numbers."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtpdeploy.analysis.compare import Comparison
from mtpdeploy.report.figures import number, printable, times

COLOUR = {"faster": "bold green", "slower": "bold red", "can't tell": "bold yellow", "depends on the load": "bold cyan"}


def text(answer: Comparison, console: Console) -> None:
    if answer.simulated:
        console.print("simulated: no GPU was measured", style="bold magenta")
    if answer.likeness.differences:
        console.print("Not like for like:", style="bold red")
        for difference in answer.likeness.differences:
            console.print(f"  - {printable(difference.text)}")
    console.print(Text.assemble((answer.verdict, COLOUR[answer.verdict]), f": {printable(answer.verdict_text)}"))
    console.print(f"A = {printable(answer.a)} ({', '.join(answer.a_runs)})", style="dim")
    console.print(f"B = {printable(answer.b)} ({', '.join(answer.b_runs)})", style="dim")
    if answer.loads:
        console.print(_table(answer))
    for one in answer.loads:
        if one.verdict == "can't tell":
            console.print(f"{one.load}: can't tell, {printable(one.why)}", style="yellow")
    _acceptance(answer, console)
    console.print(f"Settings: {printable(answer.likeness.settings_text)}.")
    for changed in answer.likeness.settings:
        console.print(f"  {printable(changed.text)}", style="dim")
    if answer.agreement:
        agree = answer.agreement
        others = (
            f"; the others agree in the first {number(agree.median_first_tokens)} {agree.unit} "
            f"(median; least {agree.least_first_tokens})"
        )
        console.print(
            f"Greedy answers: {agree.identical} of {agree.prompts} identical"
            f"{others if agree.identical < agree.prompts else ''}."
        )
    for side, loads in (("A", answer.only_a), ("B", answer.only_b)):
        if loads:
            console.print(f"Measured only for {side}: {', '.join(map(str, loads))}.", style="dim")
    for note in answer.notes:
        console.print(f"note: {printable(note)}", style="dim")


def _table(answer: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("load")
    for name in ("tok/s A", "tok/s B", "B / A (95 %)", "a request: B / A (95 %)", "TTFT ms A → B", "TPOT ms A → B"):
        table.add_column(name, justify="right")
    table.add_column("rests on")
    for one in answer.loads:
        batch, request = one.batch, one.request
        table.add_row(
            number(one.load.concurrency) if one.load.concurrency is not None else str(one.load),
            number(one.a_tok_s),
            number(one.b_tok_s),
            Text(
                times(batch.value, batch.low, batch.high) if batch else number(None),
                style=COLOUR[one.verdict].removeprefix("bold "),
            ),
            times(request.value, request.low, request.high) if request else number(None),
            f"{number(one.a_ttft_ms)} → {number(one.b_ttft_ms)}",
            f"{number(one.a_tpot_ms)} → {number(one.b_tpot_ms)}",
            one.basis,
        )
    return table


def _acceptance(answer: Comparison, console: Console) -> None:
    for one in answer.loads:
        said = one.acceptance
        if said is None:
            continue
        line = (
            f"{one.load}: {said.tokens_a_step:.2f} times the tokens a step "
            f"(accept length {said.a:.2f} → {said.b:.2f}), {said.step_time:.2f} times the time a step"
        )
        if said.at_equal_acceptance is not None:
            line += f"; at equal acceptance a request would be {said.at_equal_acceptance:.2f} times as fast"
        if said.break_even is not None:
            line += f"; MTP breaks even at accept length {times(said.break_even.value, said.break_even.low, said.break_even.high)}"
        console.print(line + ".")
