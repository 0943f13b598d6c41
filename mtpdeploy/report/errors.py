"""An error for a person: what happened, the lines that show it, what to type next, which page explains it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from mtpdeploy.errors import MtpError


def text(error: MtpError, console: Console) -> None:
    """Lines are never wrapped: evidence and commands stay as they are, to be searched and pasted."""

    def line(*parts: tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), soft_wrap=True)

    first, *rest = error.message.splitlines() or [""]
    line(("error", "bold red"), (f": {first}", ""))
    for more in rest:
        line((more, ""))
    for evidence in error.evidence:
        line(("  | ", "dim"), (evidence, ""))
    if error.next_commands:
        line(("next:", "bold"))
        for command in error.next_commands:
            line((f"  {command}", ""))
    if error.runbook:
        line((f"see docs/runbooks/{error.runbook}.md", "dim"))
