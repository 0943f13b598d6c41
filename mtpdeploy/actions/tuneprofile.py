"""The profile that a search writes: the changed arguments over the profile that was searched, with where they came from."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import yaml

from mtpdeploy import __version__
from mtpdeploy.actions.reach import Target, targets
from mtpdeploy.actions.tunespec import Spec
from mtpdeploy.analysis.compare import Comparison
from mtpdeploy.analysis.tune import Outcome
from mtpdeploy.errors import UsageError
from mtpdeploy.inventory.values import ArgValue
from mtpdeploy.secret import Secret
from mtpdeploy.store.files import write_atomically

MADE_BY = "Written by mtpdeploy tune"


def profile_path(home: Path, spec: Spec) -> Path:
    name = Path(spec.name)
    return name if name.suffix in (".yml", ".yaml") else home / "inventories" / "profiles" / f"{spec.name}.yml"


def refuse_foreign(home: Path, spec: Spec) -> None:
    """A profile that somebody wrote by hand is never overwritten. UsageError, also for a name that is no file's."""
    path = profile_path(home, spec)
    if Path(spec.name).suffix == "" and (Path(spec.name).name != spec.name or spec.name.startswith(".")):
        raise UsageError(f"--name {spec.name}: should be a plain name such as mtp-tuned, or a .yml file")
    try:
        head = path.read_text(encoding="utf-8", errors="replace")[: len(MADE_BY) + 2]
    except FileNotFoundError:
        return
    except OSError as exc:
        raise UsageError(f"--name {spec.name}: {path} cannot be read ({exc.strerror})") from exc
    if not head.startswith(f"# {MADE_BY}"):
        raise UsageError(
            f"--name {spec.name}: {path} was not written by tune and is not overwritten; take another name"
        )


def write_profile(
    home: Path, target: Target, spec: Spec, run_id: str, chosen: Outcome, comparison: Comparison | None
) -> Path:
    """A file that deploys by itself: what `--set` said of arguments and environment during the search is in it."""
    refuse_foreign(home, spec)
    path = profile_path(home, spec)
    document: dict[str, object] = {
        "description": f"{spec.profile}, tuned for {spec.objective} on {target.name}",
        "extends": spec.profile,
    }
    args, env = _said(home, target, spec)
    args |= dict(chosen.candidate.args)
    if "max_running_requests" in chosen.candidate.args and target.deployment.slots_for is not None:
        document["slots_for"] = None
    document["args"] = args
    if env:
        document["env"] = env
    header = "".join(f"# {' '.join(line.split())}\n" for line in _provenance(target, spec, run_id, chosen, comparison))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (header + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)).encode())
    return path


def _said(home: Path, target: Target, spec: Spec) -> tuple[dict[str, object], dict[str, str]]:
    """(arguments, environment) that the search's own `--set` changed over the profile; secrets stay where they are."""
    if not spec.sets:
        return {}, {}
    (bare,) = targets(home, target.name, spec.inventory, profile=spec.profile)
    named = [one.partition("=")[0] for one in spec.sets]
    before: dict[str, ArgValue] = dict(bare.deployment.args)
    now = target.deployment
    args: dict[str, object] = {
        name: now.args.get(name) for name in {*before, *now.args} if before.get(name) != now.args.get(name)
    }
    env = {
        name: value
        for name, value in now.env.items()
        if f"env.{name}" in named and not isinstance(value, Secret) and bare.deployment.env.get(name) != value
    }
    return {name: args[name] for name in sorted(args)}, env


def _provenance(target: Target, spec: Spec, run_id: str, chosen: Outcome, comparison: Comparison | None) -> list[str]:
    simulated = " (simulated)" if target.host.simulate else ""
    limits = f", {spec.slo}" if spec.slo else ""
    loads = ", ".join(map(str, spec.loads))
    workload = spec.bench.get("workload")
    lines = [
        f"{MADE_BY} {__version__} in run {run_id} on {datetime.now(timezone.utc):%Y-%m-%d}.",
        f"Host {target.name}{simulated}, SGLang {(spec.ground or {}).get('sglang_version')}, profile {spec.profile}, "
        f"objective {spec.objective} at concurrency {loads}{limits}"
        + (f", workload {workload}." if workload else f", {spec.output_tokens} tokens an answer at most."),
        f"Chosen: {chosen.candidate.name}; {chosen.value or 0:.0f} tok/s by the objective, measured in run {chosen.run_id}.",
    ]
    if comparison:
        lines.append(f"Confirmed in turns: {comparison.verdict_text} (runs {', '.join(comparison.b_runs)}).")
        lines += [f"Not like for like: {one.text}." for one in comparison.likeness.differences]
    else:
        lines.append("Not confirmed against the profile as it was.")
    return lines + [f"Costs: {cost}." for cost in chosen.candidate.costs]
