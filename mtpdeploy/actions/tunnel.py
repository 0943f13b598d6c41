"""`tunnel`: the server's port of a host on this machine, for as long as the command runs."""

from __future__ import annotations

import json as json_module
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from mtpdeploy.actions.reach import targets
from mtpdeploy.errors import UsageError
from mtpdeploy.hosts.transport import connect
from mtpdeploy.progress import Talk

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def tunnel(
    *,
    home: Path,
    talk: Talk,
    host: str | None,
    inventory: Sequence[str],
    out: Callable[[str], None],
    json: bool = False,
    port: int | None = None,
) -> None:
    """Prints the local URL and holds the tunnel until interrupted. Raises UsageError, HostUnreachable."""
    chosen = targets(home, host, inventory)
    if len(chosen) != 1:
        raise UsageError("a tunnel goes to one host: choose it with --host")
    target = chosen[0]
    args = target.deployment.args
    there = args.get("port")
    wanted = port if port is not None else there if isinstance(there, int) else 30000
    address = str(args.get("host") or "127.0.0.1")
    with connect(target.host) as transport:
        forward = transport.forward(wanted, _LOOPBACK.get(address, address))
        try:
            url = f"http://127.0.0.1:{forward.port}"
            out(json_module.dumps({"host": target.name, "url": url, "remote_port": wanted}) if json else url)
            talk.note(f"{target.name}: port {wanted} is at {url} until Ctrl-C")
            threading.Event().wait()
        finally:
            forward.close()
