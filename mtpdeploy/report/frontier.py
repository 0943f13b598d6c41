"""The frontier for the terminal: a table of spots, a plot of characters, crossovers and break-even."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtpdeploy.analysis.frontier import Frontier, Spot
from mtpdeploy.report.figures import number, printable, times

WIDTH, HEIGHT = 60, 16
SIGNS = "ox+#*%@&"


def text(answer: Frontier, console: Console) -> None:
    if answer.simulated:
        console.print("simulated: no GPU was measured", style="bold magenta")
    if answer.not_like_for_like:
        console.print("Not like for like:", style="bold red")
        for line in answer.not_like_for_like:
            console.print(f"  - {printable(line)}")
    console.print(_table(answer.spots))
    if len(answer.spots) > 1:
        plot(answer.spots, console)
    for crossing in answer.crossovers:
        console.print(f"{printable(crossing.text)}.")
    for comparison in answer.comparisons:
        for at in comparison.loads:
            if at.acceptance and at.acceptance.break_even is not None:
                console.print(
                    f"{printable(comparison.b)} at {at.load}: accept length {at.acceptance.b:.2f}, breaks even at "
                    f"{times(at.acceptance.break_even.value, at.acceptance.break_even.low, at.acceptance.break_even.high)}.",
                    style="dim",
                )


def _table(spots: tuple[Spot, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("profile")
    for name in ("load", "tok/s for a user (95 %)", "tok/s per GPU (95 %)", "TTFT p90 ms", "TPOT p90 ms"):
        table.add_column(name, justify="right")
    table.add_column("")
    for spot in spots:
        user, gpu = spot.user_tok_s, spot.gpu_tok_s
        table.add_row(
            printable(spot.profile),
            number(spot.load.concurrency) if spot.load.concurrency is not None else str(spot.load),
            _figure(user.value, user.low, user.high),
            _figure(gpu.value, gpu.low, gpu.high),
            number(spot.ttft_p90_ms),
            number(spot.tpot_p90_ms),
            Text("front", style="green") if spot.front else "",
        )
    return table


def _figure(value: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return number(value)
    return f"{number(value)} ({number(low)} to {number(high)})"


def plot(spots: tuple[Spot, ...], console: Console) -> None:
    """Characters only, so that a pipe and a dumb terminal show it as well; wide terminals gain nothing from more."""
    most_x = max(spot.user_tok_s.value for spot in spots)
    most_y = max(spot.gpu_tok_s.value for spot in spots)
    profiles = list(dict.fromkeys(spot.profile for spot in spots))
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for spot in spots:
        column = round(spot.user_tok_s.value / most_x * (WIDTH - 1))
        row = HEIGHT - 1 - round(spot.gpu_tok_s.value / most_y * (HEIGHT - 1))
        grid[row][column] = SIGNS[profiles.index(spot.profile) % len(SIGNS)]
    console.print("tok/s per GPU", style="dim")
    for number_, row_ in enumerate(grid):
        scale = number(most_y) if number_ == 0 else "0" if number_ == HEIGHT - 1 else ""
        console.print(f"{scale:>7} |{''.join(row_)}", soft_wrap=True)
    console.print(f"{'':>7} +{'-' * WIDTH}", soft_wrap=True)
    console.print(f"{'':>9}0{number(most_x):>{WIDTH - 1}}  tok/s for a user", style="dim", soft_wrap=True)
    console.print("  ".join(f"{SIGNS[i % len(SIGNS)]} {name}" for i, name in enumerate(profiles)), style="dim")
