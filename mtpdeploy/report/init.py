"""What `init` made, and what to do next."""

from __future__ import annotations

from rich.console import Console

from mtpdeploy.actions.init import Made


def text(answer: Made, console: Console) -> None:
    console.print(f"{answer.folder}", style="bold", soft_wrap=True)
    for name in answer.written:
        console.print(f"  written  {name}", soft_wrap=True)
    for name in answer.kept:
        console.print(f"  kept     {name}", soft_wrap=True)
    console.print("next:", style="bold")
    console.print(f"  cd {answer.folder}", soft_wrap=True)
    console.print(
        "  cp inventories/example.yml inventories/hosts.yml   # and say which hosts there are", soft_wrap=True
    )
    console.print("  mtpdeploy plan --profile mtp --host NAME", soft_wrap=True)
