"""Where answers and errors are printed: strings are literal, and a table fits the terminal without cutting its words."""

from __future__ import annotations

import os
from typing import Any, TextIO

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

PIPE_WIDTH = 160  # a pipe gets long lines instead of a terminal's 80 columns

UNBOUNDED = 100_000  # a measure is cut to the console's width


class AnswerConsole(Console):
    """Rich's console, but for two things: tables fit, and a reader that left is told to the door (rich exits with 1)."""

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(fitted(each, self) if isinstance(each, Table) else each for each in objects), **how)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stream: TextIO, no_color: bool = False) -> AnswerConsole:
    """The console on `stream`. COLUMNS in the environment decides the width before the terminal does."""
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return AnswerConsole(
        file=stream, no_color=no_color or None, width=width, markup=False, highlight=False, emoji=False
    )


def fitted(table: Table, on: Console) -> Table:
    """`table` as `on` can show it: as it is, with columns that break between words only, or row by row.

    Rich takes width from the widest columns first, whether that cuts words or not.
    """
    whole = Measurement.get(on, on.options.update_width(UNBOUNDED), table).maximum
    if whole <= on.width or not table.show_header:
        return table
    natural = [_measured(column, on) for column in table.columns]
    room = on.width - (whole - sum(each.maximum for each in natural))
    widths = [each.maximum for each in natural]
    while sum(widths) > room:
        spare = [width - each.minimum for width, each in zip(widths, natural, strict=True)]
        if max(spare) <= 0:
            return _listed(table)
        widest = max((width, at) for at, width in enumerate(widths) if spare[at] > 0)[1]
        widths[widest] -= 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    return table


def _measured(column: Column, on: Console) -> Measurement:
    """Widths of a column's widest word and widest cell, its header among them."""
    cells = [Measurement.get(on, on.options.update_width(UNBOUNDED), each) for each in (column.header, *column.cells)]
    widest = max(each.maximum for each in cells)
    return Measurement(widest if column.no_wrap else max(each.minimum for each in cells), widest)


def _listed(table: Table) -> Table:
    """Each row as lines of header and value; a cell that says nothing is left out."""
    lines = Table.grid(padding=(0, 2, 0, 0))
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    for at, row in enumerate(rows):
        if at:
            lines.add_row()
        for column, cell in zip(table.columns, row, strict=True):
            if str(cell).strip():
                lines.add_row(Text(str(column.header), style=table.header_style), cell)
    return lines
