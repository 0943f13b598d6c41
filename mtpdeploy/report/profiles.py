"""Profiles for people."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtpdeploy.actions.profiles import Profiles, Shown


def profiles_text(answer: Profiles, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("PROFILE", "WHAT IT IS", "BUILDS ON", "FILE"):
        table.add_column(column, overflow="fold")
    for profile in answer.profiles:
        table.add_row(profile.name, profile.description, profile.extends or "", str(profile.source))
    console.print(table)


def show_text(answer: Shown, console: Console) -> None:
    told = f"{answer.name}: {answer.description}" if answer.description else answer.name
    on = f" on {answer.host}" if answer.host else ""
    console.print(Text(told + (f" (resolved{on})" if answer.resolved else ""), style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("SETTING", "VALUE", "FROM"):
        table.add_column(column, overflow="fold")
    for setting in answer.settings:
        table.add_row(setting.key, _shown(setting.value), setting.origin)
    console.print(table)
    for note in answer.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
