"""Which runs a name on the command line means: run ids, `last`, RUN:ARM, several with commas, or a profile's latest."""

from __future__ import annotations

import re

from mtpdeploy.analysis.provenance import Provenance
from mtpdeploy.analysis.samples import Measured
from mtpdeploy.errors import ConfigError, NotFound, UsageError
from mtpdeploy.store.measured import arms_of, measured
from mtpdeploy.store.store import Run, Store

RUNLIKE = re.compile(r"last|\d{4,8}(-[0-9a-f-]*)?")
HOW = ["mtpdeploy runs --kind bench", "mtpdeploy bench --profile NAME"]


def chosen(
    store: Store, name: str, *, host: str | None = None, workload: str | None = None, beside: Measured | None = None
) -> tuple[Measured, ...]:
    """The runs that `name` stands for, oldest first.

    A profile means its newest finished benchmark (with `beside`: on the same host under the same workload as that run),
    together with its other runs of the same session, which are its repeats, or of the same launch, which are its other loads. Beside a
    run of a session, its own session counts first.
    """
    made = []
    for part in filter(None, (piece.strip() for piece in name.split(","))):
        ident, _, arm = part.partition(":")
        if RUNLIKE.fullmatch(ident) and not store.runs(profile=part, limit=1):
            run = store.run(ident, kind="bench" if ident == "last" else None)
            made += _of_campaign(store, run, arm) if run.kind == "campaign" else [measured(run, arm or None)]
        else:
            made += _of_profile(store, part, host, workload, beside)
    if not made:
        raise UsageError(f"{name!r} names no run")
    return tuple(sorted(made, key=lambda one: one.run_id))


def pair(
    store: Store, a: str | None, b: str | None, *, host: str | None = None, workload: str | None = None
) -> tuple[tuple[Measured, ...], tuple[Measured, ...]]:
    """The two sides of a comparison. One name: the two arms of that run. None: the newest two profiles on one host.

    Where a profile is looked for, the other side is fixed first, so that the same host and workload are compared.
    """
    if a is None:
        return _newest_two(store, host, workload)
    if b is None:
        run = store.run(a, kind="bench" if a == "last" else None)
        if run.kind == "campaign":
            return _sides(store, run)
        arms = arms_of(run)
        if len(arms) != 2:
            raise UsageError(
                f"run {run.id} holds {len(arms) or 'no'} named arms; compare needs two sides",
                next_commands=[f"mtpdeploy compare OTHER {run.id}"],
            )
        return (measured(run, arms[0]),), (measured(run, arms[1]),)
    if _is_run(store, a) and not _is_run(store, b):
        first = chosen(store, a, host=host, workload=workload)
        return first, chosen(store, b, host=host, workload=workload, beside=first[-1])
    second = chosen(store, b, host=host, workload=workload)
    try:
        return chosen(store, a, host=host, workload=workload, beside=second[-1]), second
    except NotFound:
        # b's newest is under a workload that a was never measured under: what a has may have its like among b's others.
        first = chosen(store, a, host=host, workload=workload)
        return first, chosen(store, b, host=host, workload=workload, beside=first[-1])


def benchmarks(
    store: Store, *, host: str | None = None, workload: str | None = None, profile: str | None = None
) -> tuple[Measured, ...]:
    """Every finished benchmark that can be read, each arm by itself, newest first."""
    found: list[Measured] = []
    for row in store.runs(kind="bench", host=host, profile=profile, workload=workload, status="done"):
        found += _readable(store, row.id)
    return tuple(found)


def _of_campaign(store: Store, run: Run, arm: str = "") -> list[Measured]:
    """What a campaign measured, or one arm of it; what was deleted or damaged since is passed over."""
    named = run.meta.get("runs")
    found = [one for name in (named if isinstance(named, list) else ()) for one in _readable(store, str(name))]
    held = [one for one in found if not arm or one.name == arm]
    if not held:
        what = f"measured nothing of {arm!r}" if arm and found else "has no measurement that can be read"
        raise NotFound(f"campaign {run.id} {what}", next_commands=[f"mtpdeploy campaign --resume {run.id}"])
    return held


def _sides(store: Store, run: Run) -> tuple[tuple[Measured, ...], tuple[Measured, ...]]:
    """The first two arms of a campaign."""
    held = _of_campaign(store, run)
    names = list(dict.fromkeys(one.name for one in held))
    if len(names) < 2:
        raise NotFound(f"campaign {run.id} measured {names[0]} only", next_commands=[f"mtpdeploy runs show {run.id}"])
    a, b = (tuple(one for one in held if one.name == name) for name in names[:2])
    return a, b


def _is_run(store: Store, name: str) -> bool:
    first = name.split(",")[0].partition(":")[0].strip()
    return bool(RUNLIKE.fullmatch(first)) and not store.runs(profile=first, limit=1)


def _of_profile(
    store: Store, profile: str, host: str | None, workload: str | None, beside: Measured | None
) -> list[Measured]:
    if beside is not None:
        host, workload = host or beside.provenance.host, workload or beside.provenance.workload
    # A run of several arms is filed under its first profile: look through the arms of all runs, not through the list.
    for own_arms in (False, True):
        found: list[Measured] = []
        listed = None if own_arms else profile
        made = benchmarks(store, host=host, workload=workload, profile=listed)
        if beside is not None:
            # Of the other side's session or at least of its workload, if there is such a one: a newer run is of other conditions.
            made = tuple(sorted(made, key=lambda one: _unlike(one.provenance, beside.provenance)))
        for one in made:
            if one.provenance.profile == profile or one.provenance.arm == profile:
                if found and not together(one, found[0]):
                    break
                found.append(one)
        if found:
            return found
    where = f" on {host}" if host else ""
    under = f" under workload {workload}" if workload else ""
    known = sorted({row.profile for row in store.runs(kind="bench", status="done") if row.profile})
    raise NotFound(
        f"no finished benchmark of profile {profile!r}{where}{under}"
        + (f"; measured profiles: {', '.join(known)}" if known else ""),
        next_commands=HOW,
    )


def _newest_two(
    store: Store, host: str | None, workload: str | None
) -> tuple[tuple[Measured, ...], tuple[Measured, ...]]:
    measurements = benchmarks(store, host=host, workload=workload)
    if not measurements:
        raise NotFound("no finished benchmark to compare yet", next_commands=HOW)
    newest = measurements[0]
    for other in measurements[1:]:
        alike = (other.provenance.host, other.provenance.workload) == (
            newest.provenance.host,
            newest.provenance.workload,
        )
        if alike and other.label != newest.label:
            b = tuple(one for one in measurements if one.label == newest.label and together(one, newest))
            a = tuple(one for one in measurements if one.label == other.label and together(one, other))
            return tuple(reversed(a)), tuple(reversed(b))
    raise NotFound(
        f"only {newest.label} has been measured on {newest.provenance.host or 'that endpoint'} under that workload",
        next_commands=HOW,
    )


def _unlike(own: Provenance, other: Provenance) -> tuple[bool, bool, bool]:
    """Sorts first what shares the session, then the workload, then the lengths and prompts that tell unnamed loads apart."""
    return (
        other.session is not None and own.session != other.session,
        own.workload != other.workload,
        _load(own) != _load(other),
    )


def together(one: Measured, first: Measured) -> bool:
    """Whether two runs of a profile speak of one measurement: of one run or session, or, outside of sessions, the same
    kind of load on the same boot of the same launch (a sweep that was typed load by load).
    """
    if one.run_id == first.run_id:
        return True
    own, other = one.provenance, first.provenance
    if own.args != other.args:
        return False
    if own.session is not None or other.session is not None:
        return own.session == other.session
    return other.launch_id is not None and _on(own) == _on(other)


def _on(said: Provenance) -> tuple[object, ...]:
    return said.launch_id, said.boot, *_load(said)


def _load(said: Provenance) -> tuple[object, ...]:
    return said.workload, said.input_tokens, said.output_tokens, said.prompts


def _readable(store: Store, name: str) -> list[Measured]:
    try:
        run: Run = store.run(name)
        arms = arms_of(run)
        return [measured(run, arm) for arm in arms] if len(arms) > 1 else [measured(run)]
    except (ConfigError, UsageError, NotFound, OSError):
        return []  # damaged, or deleted meanwhile: the list shows it as such, and no conclusion rests on it
