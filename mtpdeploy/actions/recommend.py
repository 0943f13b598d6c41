"""`recommend`: the profile for a workload, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mtpdeploy.actions.frontier import alike
from mtpdeploy.analysis.recommend import Kind, Recommendation
from mtpdeploy.analysis.recommend import recommend as recommended
from mtpdeploy.analysis.samples import Measured, told_apart
from mtpdeploy.bench.metrics import parse_slo
from mtpdeploy.errors import MtpError, NotFound, UsageError
from mtpdeploy.inventory.values import Workload
from mtpdeploy.progress import Talk
from mtpdeploy.store import Store
from mtpdeploy.store.choose import HOW, chosen
from mtpdeploy.store.launches import memory_of

KINDS: tuple[Kind, ...] = ("interactive", "batch", "mixed")


def recommend(
    *,
    home: Path,
    talk: Talk,
    host: str | None = None,
    workload: str = "mixed",
    slo: str | None = None,
    rate: float | None = None,
    baseline: str | None = None,
    measured_under: str | None = None,
    run: Sequence[str] = (),
) -> Recommendation:
    """Raises NotFound where nothing was measured on that host, UsageError for objectives that cannot be meant.

    Simulated runs speak for simulated hosts only: for a real host they are left out. `run`: from these alone.
    """
    try:
        limits = parse_slo(slo) if slo else ()
    except ValueError as exc:
        raise UsageError(f"--slo: {exc}") from exc
    if rate is not None and rate <= 0:
        raise UsageError(f"--rate {rate:g}: should be more than 0 requests a second")
    kind, own_rate, under = meant(home, workload)
    store = Store(home)
    talk.stage("recommend", "reading the benchmarks")
    if run:
        found = told_apart(_named(home, store, run, host))
    else:
        found = _of_one_session(
            told_apart(alike(store, host, measured_under or under, simulated=_simulated(home, store, host)))
        )
    budgets: dict[str, Mapping[str, object]] = {}
    for one in found:
        if one.label not in budgets and (held := one.memory or memory_of(store, one.provenance.launch_id)):
            budgets[one.label] = held
    try:
        return recommended(
            found, kind, slo=limits, rate=rate if rate is not None else own_rate, baseline=baseline,
            memory=budgets,
        )  # fmt: skip
    except ValueError as exc:
        raise NotFound(f"{exc} on {host or 'this host'}", next_commands=["mtpdeploy bench"]) from exc


def _named(home: Path, store: Store, names: Sequence[str], host: str | None) -> tuple[Measured, ...]:
    """The runs that were named, a campaign standing for its own; no simulated one where the host is a real one."""
    found = tuple(one for name in names for one in chosen(store, name))
    where = host or found[-1].provenance.host
    if _simulated(home, store, where) is False:
        found = tuple(one for one in found if not one.simulated)
        if not found:
            raise NotFound(f"only simulated runs were named, and {where} is a real host", next_commands=HOW)
    return found


def meant(home: Path, name: str) -> tuple[Kind, float | None, str | None]:
    """(kind, rate, name of the workload to look for): one of the three kinds, or a workload's own file."""
    for kind in KINDS:
        if name == kind:
            return kind, None, None
    from mtpdeploy.inventory import workload

    held: Workload = workload(home, name)
    if held.rate:
        return "interactive", max(held.rate), held.name
    return ("batch" if min(held.concurrency, default=1) > 4 else "mixed"), None, held.name


def _simulated(home: Path, store: Store, host: str | None) -> bool | None:
    """Whether the host asked about is a simulated one; None where no inventory knows it: then the newest run decides."""
    from mtpdeploy.inventory import load

    last = store.last_deployed()
    name = host or (last.host if last else None)
    if name is None:
        return None
    try:
        hosts = load(home, None).choose(name, None)
    except MtpError:
        return None
    return any(one.simulate is not None for one in hosts)


def _of_one_session(found: tuple[Measured, ...]) -> tuple[Measured, ...]:
    """Of each profile its newest run, and those of the same session as that: older ones speak of other days."""
    newest: dict[str, Measured] = {}
    for one in found:
        newest.setdefault(one.label, one)
    return tuple(
        one
        for one in found
        if one is newest[one.label]
        or (one.provenance.session is not None and one.provenance.session == newest[one.label].provenance.session)
    )
