"""What the verbs of a launch say to people."""

from __future__ import annotations

import io
from typing import Any

import pytest

from mtpdeploy.actions.launches import HostAnswer
from mtpdeploy.report.console import AnswerConsole
from mtpdeploy.report.launches import text

LAUNCH = "20261130T074746Z-ad8e80"
STOPPED = {
    "stopped": True, "already": False, "drained": True, "killed": [], "seconds": 1.5, "left": [], "port_free": True, "gpu_freed_gb": 87.4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "result"),
    [
        ("stop", STOPPED),
        ("stop", {**STOPPED, "already": True}),
        ("start", {"outcome": "ready", "boot": 2}),
        ("rollback", {"outcome": "ready", "boot": 2}),
    ],
)
@pytest.mark.parametrize("simulated", [True, False])
def test_what_a_simulated_host_did_is_labelled_and_what_a_real_one_did_is_not(
    verb: str, result: dict[str, Any], simulated: bool
) -> None:
    out = io.StringIO()
    text(HostAnswer("gpu1", verb, {"launch_id": LAUNCH, "simulated": simulated, **result}), AnswerConsole(file=out))
    first = out.getvalue().splitlines()[0]
    assert LAUNCH in first
    assert first.endswith("(simulated)") == simulated
