"""A home of the rehearsal host for the tests of verbs that deploy."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from mtpdeploy.progress import Silent
from mtpdeploy.resources import bundled
from mtpdeploy.store import Store


@contextmanager
def rehearsal(folder: Path, *, clock: float | None = None) -> Iterator[Path]:
    """A home with one simulated host on a port of its own; whatever was launched is stopped at the end."""
    inventory = yaml.safe_load((bundled("inventories") / "local.yml").read_text())
    host = inventory["hosts"]["local"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        host["args"]["port"] = free.getsockname()[1]
    if clock is not None:
        host["simulate"]["clock"] = clock
    host["workdir"] = str(folder / "work")
    home = folder / "home"
    (home / "inventories").mkdir(parents=True)
    (home / "inventories" / "site.yml").write_text(yaml.safe_dump(inventory))
    yield home
    from mtpdeploy.actions.launches import stop

    if Store(home).last_deployed() is not None:
        stop(home=home, talk=Silent(), host="local", inventory=())
