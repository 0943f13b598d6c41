"""`recommend`: the profile for a workload, from what was measured."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mtpdeploy.actions.frontier import alike
from mtpdeploy.analysis.frontier import UnknownBaseline
from mtpdeploy.analysis.likeness import MTP_ARGS
from mtpdeploy.analysis.recommend import Kind, Recommendation
from mtpdeploy.analysis.recommend import recommend as recommended
from mtpdeploy.analysis.samples import Measured, told_apart
from mtpdeploy.bench.metrics import Limit, parse_slo
from mtpdeploy.errors import MtpError, NotFound, UsageError
from mtpdeploy.inventory.values import Workload
from mtpdeploy.progress import Talk
from mtpdeploy.store import Store
from mtpdeploy.store.choose import HOW, benchmarks, chosen, together
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
    figures: str | None = None,
    file: str | None = None,
    sglang_version: str | None = None,
    gpu_memory_gb: float | None = None,
) -> Recommendation:
    """Raises NotFound where nothing was measured on that host, UsageError for objectives that cannot be meant.

    Simulated runs speak for simulated hosts only: for a real host they are left out. `run`: from these alone.
    `figures`, with the log `file` of the launch: what somebody tells, in place of runs; it decides nothing, and says why.
    """
    try:
        limits = parse_slo(slo) if slo else ()
    except ValueError as exc:
        raise UsageError(f"--slo: {exc}") from exc
    if rate is not None and rate <= 0:
        raise UsageError(f"--rate {rate:g}: should be more than 0 requests a second")
    kind, own_rate, under = meant(home, workload)
    if figures is not None:
        return _told(home, talk, figures, file, sglang_version, gpu_memory_gb, kind, limits, rate or own_rate, baseline)
    for option, value in (("--file", file), ("--sglang-version", sglang_version), ("--gpu-memory-gb", gpu_memory_gb)):
        if value is not None:
            raise UsageError(
                f"{option} goes with --figures; a log alone is read by verify",
                next_commands=["mtpdeploy verify --file LOG"],
            )
    store = Store(home)
    talk.stage("recommend", "reading the benchmarks")
    passed_over: tuple[str, ...] = ()
    if run:
        found = told_apart(_named(home, store, run, host))
    else:
        try:
            simulated = _simulated(home, store, host)
            found = told_apart(alike(store, host, measured_under or under, simulated=simulated))
        except NotFound as exc:
            at = f" --host {host}" if host else ""
            exc.next_commands = (f"mtpdeploy campaign{at} --workload {shlex.quote(workload)}", *HOW[:1])
            raise
        passed_over = _passed_over(store, found)
        found = _of_one_session(found)
    budgets: dict[str, Mapping[str, object]] = {}
    for one in found:
        if one.label not in budgets and (held := one.memory or memory_of(store, one.provenance.launch_id)):
            budgets[one.label] = held
    try:
        answer = recommended(
            found, kind, slo=limits, rate=rate if rate is not None else own_rate, baseline=baseline,
            memory=budgets,
        )  # fmt: skip
        return replace(answer, notes=(*answer.notes, *passed_over))
    except UnknownBaseline as exc:
        raise NotFound(str(exc), next_commands=HOW) from exc
    except ValueError as exc:
        raise NotFound(f"{exc} on {host or 'this host'}", next_commands=["mtpdeploy bench"]) from exc


def _told(
    home: Path,
    talk: Talk,
    figures: str,
    file: str | None,
    sglang_version: str | None,
    gpu_memory_gb: float | None,
    kind: Kind,
    slo: Sequence[Limit],
    rate: float | None,
    baseline: str | None,
) -> Recommendation:
    """The log is of the arm that runs as it says: with speculation the last one that is not the baseline, else the baseline."""
    from mtpdeploy.analysis.claims import Known, advise, parse

    try:
        claims = parse(figures)
    except ValueError as exc:
        raise UsageError(f"--figures: {exc}") from exc
    arms = [one.arm for one in claims]
    if baseline is not None and baseline not in arms:
        raise UsageError(f"--baseline {baseline}: --figures tells of {', '.join(arms)}")
    known: dict[str, Known] = {}
    if file is not None:
        from mtpdeploy.actions.verify import of_log

        log, verified = of_log(home, talk, file, sglang_version=sglang_version, gpu_memory_gb=gpu_memory_gb)
        args = _telling(log.server_args or {})
        base = baseline or ("baseline" if "baseline" in arms else arms[0])
        others = [arm for arm in arms if arm != base]
        arm = others[-1] if others and args.get("speculative_algorithm") else base
        capacity = verified.capacity
        memory = {
            "max_running_requests": capacity.effective, "slots": capacity.slots,
            "slots_per_request": capacity.slots_per_request, "bound_by": capacity.bound_by,
            "suggestions": [one.as_json() for one in capacity.suggestions],
        }  # fmt: skip
        known[arm] = Known(args, memory, verified.sglang_version)
    try:
        return advise(claims, kind, baseline=baseline, slo=slo, rate=rate, known=known)
    except ValueError as exc:
        raise UsageError(f"--figures: {exc}") from exc


def _telling(printed: Mapping[str, object]) -> dict[str, object]:
    """Of the hundreds of printed arguments those that decide speed and capacity, by canonical name, where they are set."""
    from mtpdeploy.sglang.flags import canonical

    named = {canonical(name) or name: value for name, value in printed.items()}
    own = ("mem_fraction_static", "model_path", "context_length", "chunked_prefill_size", "kv_cache_dtype", "quantization",
           "disable_radix_cache", "disable_overlap_schedule", "tp_size", "dp_size")  # fmt: skip
    return {
        name: value
        for name, value in named.items()
        if (name in own or name.startswith(MTP_ARGS)) and value not in (None, False, "")
    }


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
    """Of each profile its newest run, and those measured together with it: older ones speak of other days."""
    newest: dict[str, Measured] = {}
    for one in found:
        newest.setdefault(one.label, one)
    return tuple(one for one in found if together(one, newest[one.label]))


def _passed_over(store: Store, used: Sequence[Measured]) -> tuple[str, ...]:
    """Profiles measured at the same host under another load than the newest one's only: they decide nothing here, but are there."""
    there = used[0].provenance
    names = {one.name for one in used}
    others = [
        one
        for one in benchmarks(store, host=there.host)
        if one.name not in names and one.simulated == used[0].simulated and one.provenance.endpoint == there.endpoint
    ]
    if not others:
        return ()
    newest = others[0].run_id
    return (
        f"not used: {', '.join(sorted({one.name for one in others}))}, measured under another load than the newest benchmark's; "
        f"--run {newest} decides from that one",
    )
