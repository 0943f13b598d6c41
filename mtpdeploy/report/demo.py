"""The demo's answer for people: what was simulated first, then the comparison and where the page is."""

from __future__ import annotations

from rich.console import Console

from mtpdeploy.actions.demo import Demo
from mtpdeploy.report import compare


def text(answer: Demo, console: Console) -> None:
    """The comparison, framed by what it is and is not."""
    console.print(
        f"Simulated: SGLang, its GPU and the clock ({answer.clock:g} simulated seconds a second) are a rehearsal; "
        "the deploy, the benchmark and the comparison are real.",
        highlight=False,
        style="bold",
    )
    console.print(f"Workload: {answer.workload}.", highlight=False)
    compare.text(answer.comparison, console)
    console.print(f"Report: {answer.report}", highlight=False, soft_wrap=True)
    console.print(f"Again:  mtpdeploy runs show {answer.run_id}", highlight=False)
