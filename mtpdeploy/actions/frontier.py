"""`frontier`: what each measured profile trades, and where MTP stops paying."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtpdeploy.analysis.frontier import Frontier, UnknownBaseline
from mtpdeploy.analysis.frontier import frontier as traded
from mtpdeploy.analysis.samples import Measured, told_apart
from mtpdeploy.errors import NotFound
from mtpdeploy.progress import Talk
from mtpdeploy.store import Store
from mtpdeploy.store.choose import HOW, benchmarks, chosen


def frontier(
    *,
    home: Path,
    talk: Talk,
    run: Sequence[str] = (),
    host: str | None = None,
    workload: str | None = None,
    baseline: str | None = None,
) -> Frontier:
    """Of the given runs or profiles, else of every finished benchmark on one host under one workload, the newest's."""
    store = Store(home)
    talk.stage("frontier", "reading the benchmarks")
    named = tuple(one for name in run for one in chosen(store, name, host=host, workload=workload))
    try:
        return traded(told_apart(named or alike(store, host, workload)), baseline=baseline)
    except UnknownBaseline as exc:
        raise NotFound(str(exc), next_commands=HOW) from exc


def alike(
    store: Store, host: str | None, workload: str | None, *, simulated: bool | None = None
) -> tuple[Measured, ...]:
    """Every readable benchmark with the newest one's host, endpoint and workload (or the given ones), newest first.

    simulated: keep only those that are (True) or are not (False) simulated. NotFound if nothing is left.
    """
    found = [
        one
        for one in benchmarks(store, host=host, workload=workload)
        if simulated is None or one.simulated is simulated
    ]
    if not found:
        what = {True: "simulated ", False: "real "}.get(simulated, "") if simulated is not None else ""
        where = (f" on {host}" if host else "") + (f" under workload {workload}" if workload else "")
        raise NotFound(
            f"no finished {what}benchmark{where} in {store.folder}",
            next_commands=HOW,
        )
    return tuple(one for one in found if _work(one) == _work(found[0]))


def _work(one: Measured) -> tuple[object, ...]:
    """Where and what was measured; a load without a name is told by its lengths and prompts."""
    said = one.provenance
    unnamed = (said.input_tokens, said.output_tokens, said.prompts) if said.workload is None else None
    return said.host, said.endpoint, said.workload, said.simulated, unnamed
