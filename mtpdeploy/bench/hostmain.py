"""The benchmark's client beside the server: started by the agent with SGLang's own Python, events as JSON lines on stdout.

stdout is a file of the run's folder at the host, so a cut line loses nothing; the agent streams it on. Exit status: 0 when
every point is measured or was given up on request, 1 when the endpoint cannot be measured, 2 when the client itself cannot run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY_VARIABLE = "MTPDEPLOY_API_KEY"  # the same name as in the agent, which sets it


def main(spec: Mapping[str, Any], place: Path) -> int:
    """Runs the specification (wire.dump's form); writes finished.json when it has come to its own end."""

    def write(event: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(event, separators=(",", ":"), default=str) + "\n")
        sys.stdout.flush()

    def emit(event: Mapping[str, Any]) -> None:
        write(event)
        if event["what"] == "server":
            write({"what": "surroundings", **surroundings.look(event["server"])})

    if "look" in spec:  # only what stands beside the server, for a client that runs elsewhere
        from mtpdeploy.bench import surroundings

        write({"what": "surroundings", **surroundings.look(spec["look"])})
        (place / "finished.json").write_text(json.dumps({"interrupted": False, "status": 0}))
        return 0
    try:
        import aiohttp
    except ImportError:
        emit(
            {
                "what": "failed",
                "kind": "no-aiohttp",
                "message": f"{sys.executable} has no aiohttp, so the client cannot run beside the server; "
                "use --from here, or install aiohttp there",
            }
        )
        return 2
    from mtpdeploy.bench import protocol, surroundings, wire
    from mtpdeploy.bench.client import EndpointError

    emit({"what": "client", "aiohttp": aiohttp.__version__, "pid": os.getpid(), **surroundings.client()})
    halt = protocol.Halt()
    status = 0
    try:
        protocol.run(wire.load(spec), emit, key=os.environ.get(KEY_VARIABLE) or None, halt=halt)
    except EndpointError as exc:
        emit({"what": "failed", "kind": exc.kind, "message": str(exc)})
        status = 1
    emit({"what": "end", "interrupted": halt.asked})
    (place / "finished.json").write_text(json.dumps({"interrupted": halt.asked, "status": status}))
    return status
