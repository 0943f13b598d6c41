"""`plan`: what a deploy would do, and what it would cost, without touching anything. Opens no connection."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtpdeploy import inventory as inventories
from mtpdeploy.errors import MtpError, PlanRefused, UsageError
from mtpdeploy.inventory.values import Deployment, Host
from mtpdeploy.plan import Known, Plan, calibrate, known_of, make_plan
from mtpdeploy.plan.calibration import as_stored, signature
from mtpdeploy.progress import Talk
from mtpdeploy.secret import Secret
from mtpdeploy.sglang import command as commands
from mtpdeploy.sglang import memory
from mtpdeploy.sglang.masking import is_secret
from mtpdeploy.sglang.model import ModelConfig
from mtpdeploy.store import Store
from mtpdeploy.store.files import write_json


@dataclass(frozen=True, slots=True)
class Planned:
    """One plan, and what `--want-concurrency` came to."""

    plan: Plan
    fit: memory.Fit | None = None

    @property
    def exit_code(self) -> int:
        """4 where the budget says that this would not start, or that what is wanted does not fit; deploy leaves that to the host's own figures."""
        if self.fit is not None:
            return 0 if self.fit.set is not None else PlanRefused.exit_code
        return PlanRefused.exit_code if self.plan.budget and self.plan.budget.pools.failure else 0

    def as_json(self) -> dict[str, object]:
        shown = self.plan.as_json()
        return {**shown, "fit": self.fit.as_json()} if self.fit else shown


@dataclass(frozen=True, slots=True)
class Plans:
    """Plans for several hosts; a host that has none has its error."""

    hosts: Mapping[str, Planned | MtpError]

    @property
    def exit_code(self) -> int:
        return max((each.exit_code for each in self.hosts.values()), default=0)

    def as_json(self) -> dict[str, object]:
        return {"hosts": {name: each.as_json() for name, each in self.hosts.items()}}


def plan(
    *,
    home: Path,
    talk: Talk,
    host: str | None,
    profile: str | None,
    inventory: Sequence[str],
    set_: Sequence[str],
    command: str | None,
    gpu_memory_gb: float | None,
    available_gb: float | None,
    model_config: str | None,
    sglang_version: str | None,
    want_concurrency: int | None,
    tokens_per_request: int | None,
) -> Planned | Plans:
    """Raises UsageError, ConfigError, NotFound, PlanRefused."""
    if command is not None and profile is not None:
        raise UsageError("--command and --profile exclude each other: a command line is planned as it stands")
    if tokens_per_request is not None and want_concurrency is None:
        raise UsageError("--tokens-per-request says how long each of --want-concurrency requests is; give both")
    for option, value in (
        ("--gpu-memory-gb", gpu_memory_gb),
        ("--available-gb", available_gb),
        ("--want-concurrency", want_concurrency),
        ("--tokens-per-request", tokens_per_request),
    ):
        if value is not None and value <= 0:
            raise UsageError(f"{option}: {value:g} is not more than 0")
    model = ModelConfig.read(model_config) if model_config else None
    known_hosts = inventories.load(home, inventory)
    store = Store(home)
    hosts: tuple[Host, ...] = ()
    if host is not None:
        hosts = known_hosts.choose(host)
    elif command is None and gpu_memory_gb is None and available_gb is None and model is None:
        last = store.last_deployed()
        try:
            hosts = known_hosts.choose(None, last.host if last else None)
        except MtpError:
            talk.note("no host is named: planned without one")
    if command is None and profile is None:
        profile = _last_profile(store, home, hosts)

    def one(target: Host | None) -> Planned:
        facts = stored_facts(home, target) if target else None
        given: dict[str, Any] = {
            "sglang_version": sglang_version,
            "gpu_memory_gb": gpu_memory_gb,
            "available_gb": available_gb,
            "model": model,
            "facts_source": "read from the host at the last contact",
        }
        if command is None:
            deployment = inventories.resolve(known_hosts, target, profile, set_, reveal=True)
        else:
            deployment = _from_command(command, known_hosts, target, set_, facts, given)
        known = known_of(deployment, facts, **given)
        made = make_plan(deployment, known, home=home, as_written=command is not None)
        fit = None
        if want_concurrency is not None:
            fit = _fit(made, known, want_concurrency, tokens_per_request)
        return Planned(made, fit)

    if len(hosts) <= 1:
        return one(hosts[0] if hosts else None)

    def tried(target: Host) -> Planned | MtpError:
        try:
            return one(target)
        except MtpError as error:
            return error

    return Plans({target.name: tried(target) for target in hosts})


def stored_facts(home: Path, host: Host) -> dict[str, Any] | None:
    """What was read from this host at the last contact from this home, calibrations included; None: never."""
    data = _stored(home, f"{host.name}.json")
    facts = data.get("facts", data) if data else None
    return with_calibrations(home, host, facts) if isinstance(facts, dict) else None


def with_calibrations(home: Path, host: Host, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts with what earlier launches on this host measured of the memory budget's constants."""
    return {**facts, "calibrations": _stored(home, _calibrations(host)) or {}}


def keep_calibration(home: Path, host: Host, made: Plan, summary: Mapping[str, Any], launch_id: str) -> bool:
    """Remembers what this launch's log (its summary as JSON) measured; False where it decides nothing.

    A failure to write does not matter.
    """
    measured = calibrate(made, summary, launch_id=launch_id)
    if measured is None or made.known.model is None:
        return False
    known = _stored(home, _calibrations(host)) or {}
    known[signature(made.known.model)] = as_stored(measured)
    folder = home / "runs" / "hosts"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / _calibrations(host), known)
    except OSError:
        return False
    return True


def _calibrations(host: Host) -> str:
    return f"{host.name}.calibration.json"


def _stored(home: Path, name: str) -> dict[str, Any] | None:
    try:
        data = json.loads((home / "runs" / "hosts" / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _last_profile(store: Store, home: Path, hosts: Sequence[Host]) -> str:
    last = store.last_deployed(hosts[0].name if hosts else None)
    if last:
        return last.profile
    names = ", ".join(inventories.profile_names(home))
    raise UsageError(
        f"which profile? --profile NAME (here: {names}), or --command 'CMD' for a command line of your own",
        next_commands=["mtpdeploy plan --profile mtp", "mtpdeploy profiles"],
    )


def _from_command(
    text: str,
    known_hosts: inventories.Inventory,
    host: Host | None,
    sets: Sequence[str],
    facts: Mapping[str, Any] | None,
    given: Mapping[str, Any],
) -> Deployment:
    """A command line as a deployment: its own arguments and environment, nothing of the inventory's but where it would run."""
    base = inventories.resolve(known_hosts, host, None, sets)
    known: Known = known_of(base, facts, **{**given, "model": given["model"]})
    parsed = commands.parse(text, known.version, known.help_flags)
    said = {k for k, origin in base.origin.items() if origin.startswith("--set")}
    args = {"host": "127.0.0.1", "port": 30000, **parsed.args}
    args |= {name: value for name, value in base.args.items() if f"args.{name}" in said}
    env: dict[str, str | Secret] = {n: Secret(v) if is_secret(n) else v for n, v in parsed.env.items()}
    env |= {name: value for name, value in base.env.items() if f"env.{name}" in said}
    return replace(
        base,
        profile="",
        args=args,
        env=env,
        versioned_env=(),
        slots_for=base.slots_for if "slots_for" in said else None,
        python=parsed.python or base.python,
        api_key=parsed.secrets.get("api_key", base.api_key if "api_key" in said else None),
        notes=(*base.notes, *parsed.notes),
    )


def _fit(made: Plan, known: Known, requests: int, tokens: int | None) -> memory.Fit:
    if known.model is None or made.budget is None:
        reason = made.known.no_memory_because or "the memory is not known"
        raise UsageError(f"--want-concurrency: {reason}")
    return memory.fit(
        made.args,
        made.env,
        known.version,
        known.model,
        requests=requests,
        tokens_per_request=tokens,
        gpu_memory_gb=known.gpu_memory_gb,
        available_gb=known.available_gb,
        calibration=known.calibration,
    )
