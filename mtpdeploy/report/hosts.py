"""Hosts for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from mtpdeploy.actions.hosts import Hosts, Known


def text(answer: Hosts, console: Console) -> None:
    if not answer.hosts:
        console.print(
            "no hosts: write inventories/NAME.yml (docs/inventory.md), or name one as user@name:port", soft_wrap=True
        )
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("HOST", "ADDRESS", "GROUPS", "GPUS", "SGLANG", "SUPERVISOR", "SERVICE"):
        table.add_column(column, overflow="fold")
    for known in answer.hosts:
        told = known.as_json()
        table.add_row(
            known.host.name,
            _address(known),
            ", ".join(known.host.groups),
            _gpus(known),
            f"{told['sglang_version'] or 'asked at the host'}{' (simulated)' if known.host.simulate else ''}",
            known.deployment.supervisor,
            f"{known.deployment.service} :{known.deployment.args['port']}",
        )
    console.print(table)


def _address(known: Known) -> str:
    host = known.host
    if host.address is None:
        return "this machine"
    return f"{host.user}@{host.address}" if host.user else host.address


def _gpus(known: Known) -> str:
    kinds: dict[str, int] = {}
    for gpu in known.host.gpus:
        kind = (
            " ".join(part for part in (gpu.name, f"{gpu.memory_gb:g} GiB" if gpu.memory_gb else None) if part) or "GPU"
        )
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "asked at the host"
