"""What a shell may complete: hosts, profiles, workloads and runs of the home, and the names that --set takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from mtpdeploy.errors import MtpError
from mtpdeploy.resources import find_home


def candidates(what: str, incomplete: str, home: str | None = None) -> Iterator[tuple[str, str]]:
    """Words for `what` that begin with `incomplete`, each with its kind: `plain`, or `file` and `dir`, which the shell completes.

    what: an option's `completes`, or the name of a positional argument. Nothing is completed where the home cannot be read.
    """
    if what in ("file", "folder", "home"):
        yield incomplete, "file" if what == "file" else "dir"
        return
    before, comma, word = incomplete.rpartition(",")  # --host gpu1,gp
    try:
        for name in _names(what, find_home(home)):
            if name.startswith(word):
                yield f"{before}{comma}{name}", "plain"
    except (MtpError, OSError):
        return


def _names(what: str, home: Path) -> Iterable[str]:
    match what:
        case "host":
            from mtpdeploy.inventory import load

            inventory = load(home)
            return [*inventory.hosts, *inventory.groups]
        case "profile" | "name" | "arms" | "baseline":
            return _profiles(home)
        case "workload" | "measured_under":
            from mtpdeploy.inventory.profiles import workload_names

            return workload_names(home)
        case "run" | "resume" | "attach":
            return _runs(home)
        case "a" | "b":
            return [*_profiles(home), *_runs(home)]
        case "set":
            from mtpdeploy.sglang.flags import canonical_names

            return [f"args.{name}=" for name in canonical_names()]
    return ()


def _profiles(home: Path) -> Iterable[str]:
    from mtpdeploy.inventory import profile_names

    return profile_names(home)


def _runs(home: Path) -> Iterable[str]:
    from mtpdeploy.store.store import Store

    return ["last", *(run.id for run in Store(home).runs(limit=50))]
