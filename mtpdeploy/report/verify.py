"""A verification for people: the verdict, capacity, acceptance, then only the arguments that are not simply the same."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtpdeploy.errors import MtpError
from mtpdeploy.inventory.values import as_sets
from mtpdeploy.sglang.verify import Verification

_VERDICT = {
    "same": ("what runs is what was asked for", "bold green"),
    "differs": ("what runs is NOT what was asked for", "bold red"),
    "cannot_tell": ("cannot tell", "bold yellow"),
}
_SHOWN = 4  # suggestions
_STATUS = {"stale": "bold red", "ignored": "bold red", "rewritten": "yellow", "unknown": "dim"}


def text(answer: Any, console: Console) -> None:
    if isinstance(answer, Verification):
        _one(answer, console)
        return
    for name, said in answer.by_host.items():
        console.print(Text(name, style="bold"))
        if isinstance(said, MtpError):
            console.print(Text(said.message, style="red"), soft_wrap=True)
        else:
            _one(said, console)


def _one(v: Verification, console: Console) -> None:
    words, style = _VERDICT[v.verdict]
    version = f" (SGLang {v.sglang_version})" if v.sglang_version else ""
    console.print(Text(words + version, style=style))
    if v.simulated:
        console.print(Text("This server is SIMULATED.", style="bold yellow"))
    for line in v.why:
        console.print(f"  {line}", soft_wrap=True)
    _capacity(v, console)
    gate = "bold red" if v.acceptance.gate in ("not_drafting", "fictitious") else ""
    console.print(Text.assemble(("  acceptance        ", "dim"), (v.acceptance.says, gate)), soft_wrap=True)
    if v.acceptance.rate is not None:
        console.print(
            f"                    rate {v.acceptance.rate:g} = {v.acceptance.rate_definition or 'by an unknown definition'}"
        )
    if v.acceptance.mismatch is not None:
        console.print(Text(f"                    {v.acceptance.mismatch}", style="bold red"), soft_wrap=True)
    console.print(Text.assemble(("  freshness         ", "dim"), v.freshness.verdict))
    for reason in v.freshness.reasons:
        console.print(f"                    {reason}", soft_wrap=True)
    _arguments(v, console)
    if v.memory:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("MEMORY", "PREDICTED", "ACTUAL"):
            table.add_column(column, justify="left" if column == "MEMORY" else "right")
        for name, predicted, actual in v.memory:
            table.add_row(name, _number(predicted), _number(actual))
        console.print(table)
    for note in v.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _capacity(v: Verification, console: Console) -> None:
    c = v.capacity
    asked = "not asked for" if c.requested is None else f"asked for {c.requested}"
    told = f"{_number(c.effective)} running requests ({asked}"
    told += f"; bound by {c.bound_by.replace('_', ' ')})" if c.bound_by else ")"
    console.print(Text.assemble(("  capacity          ", "dim"), (told, "bold")), soft_wrap=True)
    if c.says:
        console.print(f"                    {c.says}", soft_wrap=True)
    elif c.slots is not None:
        console.print(f"                    {c.slots} state slots, {_number(c.slots_per_request)} a request")
    if c.kv_tokens is not None:
        console.print(f"                    {c.kv_tokens:,} KV tokens")
    for s in c.suggestions[:_SHOWN]:
        console.print(f"                    to change it: {as_sets(s.set)}", soft_wrap=True)
        cost = "" if s.cost_gb is None else f"; {'costs' if s.cost_gb >= 0 else 'gives back'} {abs(s.cost_gb):.1f} GiB"
        console.print(f"                      {s.effect}{cost}", soft_wrap=True)
    if len(c.suggestions) > _SHOWN:
        console.print(f"                    {len(c.suggestions) - _SHOWN} more ways in --json", soft_wrap=True)


def _arguments(v: Verification, console: Console) -> None:
    shown = [a for a in v.arguments if a.status != "same"]
    same = len(v.arguments) - len(shown)
    if shown:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("ARGUMENT", "ASKED FOR", "IN FORCE", "STATUS", "WHY"):
            table.add_column(column, overflow="fold")
        for a in shown:
            table.add_row(
                a.name,
                str(a.requested),
                "?" if a.effective is None and a.status == "unknown" else str(a.effective),
                Text(a.status, style=_STATUS[a.status]),
                a.rule or "",
            )
        console.print(table)
    if same:
        console.print(f"  {same} argument{'s are' if same > 1 else ' is'} in force as asked for")


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:g}"
