"""What became of a command line, for people."""

from __future__ import annotations

from rich.console import Console

from mtpdeploy.actions.adopt_command import Imported


def text(answer: Imported, console: Console) -> None:
    console.print(f"{answer.file}", soft_wrap=True, highlight=False)
    console.print(answer.text, soft_wrap=True, highlight=False, end="")
    for note in answer.notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False)
    console.print(f"next: mtpdeploy plan --profile {answer.name}", soft_wrap=True, highlight=False)
