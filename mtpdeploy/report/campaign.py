"""A campaign for the terminal: the verdict, what failed and why, the comparison, the recommendation, where everything lies."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtpdeploy.actions.campaign import Campaign
from mtpdeploy.report import compare, recommend
from mtpdeploy.report.compare import COLOUR
from mtpdeploy.report.figures import number, printable

STATUS = {"done": "green", "failed": "red", "skipped": "yellow", "to do": "dim"}


def text(answer: Campaign, console: Console) -> None:
    if answer.run_id is None or not answer.arms or all(arm.status == "not reached" for arm in answer.arms):
        _steps(answer, console)
        return
    word, sentence = answer.verdict
    console.print(Text.assemble((word, COLOUR[word]), f": {printable(sentence)}"), soft_wrap=True)
    for arm in answer.arms:
        if arm.failure is not None:
            _failed(arm.name, answer, console)
    for one in answer.comparisons:
        console.rule(f"{printable(one.b)} against {printable(one.a)}", align="left", characters="-")
        compare.text(one, console)
    if answer.recommendation is not None:
        console.rule("recommendation", align="left", characters="-")
        recommend.text(answer.recommendation, console)
    console.rule("campaign", align="left", characters="-")
    for note in answer.notes:
        console.print(f"note: {printable(note)}", style="yellow", soft_wrap=True)
    console.print(
        f"{answer.spec.host} serves {printable(answer.serving or 'what the last step left')}.", soft_wrap=True
    )
    for path in answer.report.values():
        console.print(f"Report: {path}", soft_wrap=True)
    console.print(f"Again:  mtpdeploy runs show {answer.run_id}")


def _failed(name: str, answer: Campaign, console: Console) -> None:
    failure = next(arm.failure for arm in answer.arms if arm.name == name)
    assert failure is not None
    what = failure.step.partition(":")[0]
    console.print(
        Text.assemble((f"{printable(name)} failed", "bold red"), f" at {what}: {failure.cause}"), soft_wrap=True
    )
    console.print(f"  {printable(failure.message or '')}", soft_wrap=True)
    for line in failure.evidence[-6:]:
        console.print(f"  | {printable(line)}", style="dim", soft_wrap=True)
    for line in failure.next_commands[:3]:
        console.print(f"  next: {line}", soft_wrap=True)


def _steps(answer: Campaign, console: Console) -> None:
    """What would be done, or what is left to do."""
    if answer.simulated:
        console.print("simulated: no GPU would be measured", style="bold magenta")
    ended = {one.step: one for one in answer.told}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "step", "why", "status"):
        table.add_column(name, justify="right" if not name else "left")
    for place, step in enumerate(answer.steps, 1):
        status = ended[step.key].status if step.key in ended else "to do"
        table.add_row(number(place), printable(step.do), printable(step.why), Text(status, style=STATUS[status]))
    console.print(table)
