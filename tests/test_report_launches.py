"""What `doctor` prints: a person sees at once what stops a launch and what only costs something."""

from __future__ import annotations

import io

from rich.console import Console

from mtpdeploy.actions.doctor import Examined
from mtpdeploy.report.launches import doctor

HELD = {
    "check": "gpu memory",
    "ok": False,
    "what": "GPU 0 (NVIDIA H200): pid 457 of root holds 44.793 GiB: python3 -c import torch",
    "why": "memory that others hold is missing from SGLang's pools",
    "type": "nvidia-smi",
    "severity": "warn",
}


def shown(*findings: dict[str, object]) -> str:
    out = io.StringIO()
    doctor(Examined("h200", None, {"os": "Ubuntu", "user": "root"}, findings), Console(file=out, width=160))  # type: ignore[arg-type]
    return out.getvalue()


def test_what_only_costs_memory_is_a_warning_and_not_a_no() -> None:
    text = shown(HELD)
    assert "  warn gpu memory: GPU 0" in text
    assert "NO" not in text


def test_what_stops_a_launch_is_a_no() -> None:
    assert "  NO   gpu memory: GPU 0" in shown({**HELD, "severity": "refuse"})
