"""`model`: the step model fitted to what was measured, how well it predicts what it has not seen, and what it predicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtpdeploy import inventory as inventories
from mtpdeploy.actions.plan import stored_facts
from mtpdeploy.analysis.model import (
    Coefficient,
    CrossValidation,
    Observation,
    Prediction,
    Setting,
    Shape,
    fit,
    leave_one_out,
    observations,
    positions,
)
from mtpdeploy.analysis.samples import Measured, told_apart
from mtpdeploy.analysis.space import Ground, parse_factors, space
from mtpdeploy.analysis.tune import Candidate, Level
from mtpdeploy.bench import load
from mtpdeploy.errors import ConfigError, NotFound, PlanRefused, UsageError
from mtpdeploy.inventory.values import Deployment
from mtpdeploy.plan import known_of, make_plan
from mtpdeploy.progress import Talk
from mtpdeploy.store import Store
from mtpdeploy.store.choose import HOW, benchmarks, chosen

LOADS = (1, 4, 8, 16, 32)
DRAFTS = (0, 1, 2, 3, 4)
NUMBERS = ("concurrency", "input_tokens", "output_tokens", "tpot_p50_ms")
PLAYED = "; SGLANG_SIMULATE_ACC_LEN was set, so it says nothing of real drafts"
OPTIONAL = ("ttft_p50_ms", "output_tok_s", "accept_length", "max_running")


@dataclass(frozen=True, slots=True)
class Predicted:
    """One setting at one load. measured: whether a run of that setting at that load is among those fitted."""

    candidate: Candidate
    prediction: Prediction
    measured: bool

    def as_json(self) -> dict[str, object]:
        return {"levels": dict(self.candidate.levels), "measured": self.measured, "costs": list(self.candidate.costs),
                "headroom_gb": self.candidate.headroom_gb, **self.prediction.as_json()}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Modelled:
    """The fit and what it says. validation: None with fewer than three settings. simulated: None where nobody said.

    budget: how the feasible concurrency was found; the reason where it is not known, and nothing is predicted then.
    """

    source: str
    simulated: bool | None
    settings: tuple[str, ...]
    points: int
    coefficients: tuple[Coefficient, ...]
    shape: Shape
    acceptance: tuple[float, ...] | None
    acceptance_source: str
    validation: CrossValidation | None
    budget: str
    predictions: tuple[Predicted, ...]

    def as_json(self) -> dict[str, object]:
        return {
            "source": self.source,
            "simulated": self.simulated,
            "settings": list(self.settings),
            "points": self.points,
            "coefficients": [one.as_json() for one in self.coefficients],
            "acceptance_by_position": list(self.acceptance) if self.acceptance else None,
            "acceptance_source": self.acceptance_source,
            "cross_validation": self.validation.as_json() if self.validation else None,
            "budget": self.budget,
            "predictions": [one.as_json() for one in self.predictions],
        }


def model(
    *,
    home: Path,
    talk: Talk,
    run: Sequence[str] = (),
    host: str | None = None,
    workload: str | None = None,
    measurements: str | None = None,
    profile: str | None = None,
    inventory: Sequence[str] = (),
    set_: Sequence[str] = (),
    space_: str | None = None,
    concurrency: str | None = None,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    gpu_memory_gb: float | None = None,
    available_gb: float | None = None,
    sglang_version: str | None = None,
) -> Modelled:
    """Raises NotFound where nothing was measured, UsageError and ConfigError for what cannot be read."""
    if measurements and (run or workload):
        raise UsageError("--measurements is a file of its own: leave out runs and --workload")
    for option, value in (
        ("--input-tokens", input_tokens), ("--output-tokens", output_tokens), ("--gpu-memory-gb", gpu_memory_gb),
        ("--available-gb", available_gb),
    ):  # fmt: skip
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{option} {value:g}: should be more than 0")
    try:
        loads = tuple(int(one) for one in load.numbers(concurrency, int, "--concurrency")) if concurrency else LOADS
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    factors: Mapping[str, Sequence[Level]] = parse_factors(space_) if space_ is not None else {"draft_steps": DRAFTS}
    held: tuple[Measured, ...] = ()
    if measurements:
        seen, source = _read(Path(measurements)), str(measurements)
    else:
        talk.stage("model", "reading the benchmarks")
        held = _runs(Store(home), run, host, workload)
        seen, source = observations(held), f"{len(held)} runs of {held[0].provenance.host or held[0].name}"
    if not seen:
        raise NotFound("no valid closed-loop point with a time per token among them", next_commands=HOW)
    inputs = input_tokens or round(sum(one.input_tokens for one in seen) / len(seen))
    outputs = output_tokens or round(sum(one.output_tokens for one in seen) / len(seen))
    ground: Ground | None = None
    try:
        ground, budget = _ground(
            home, held, host, profile, inventory, set_, inputs + outputs, gpu_memory_gb=gpu_memory_gb,
            available_gb=available_gb, sglang_version=sglang_version,
        )  # fmt: skip
    except PlanRefused as exc:
        if profile is not None or space_ is not None:
            raise
        budget = f"not known, so nothing is predicted: {exc.message}"
    shape = ground.shape() if ground else Shape()
    by_position = positions(held)
    made = fit(seen, shape=shape, acceptance=by_position)
    said: list[Predicted] = []
    if ground is not None:
        talk.stage("model", "judging the settings by the memory budget")
        told = {(one.setting.draft_tokens, one.setting.state_bytes, one.concurrency) for one in seen}
        for candidate in _feasible(ground, factors, loads):
            for at in loads:
                if at > (candidate.setting.running or at):
                    continue  # it waits: no setting is better for it
                prediction = made.predict(candidate.setting, at, input_tokens=inputs, output_tokens=outputs)
                key = (candidate.setting.draft_tokens, candidate.setting.state_bytes, at)
                said.append(Predicted(candidate, prediction, key in told))
    acceptance = made.acceptance
    played = any("SGLANG_SIMULATE_ACC_LEN" in one.provenance.env for one in held)
    how = "measured by position" if by_position else "from the mean accept length, the same chance at each position"
    return Modelled(
        source=source, simulated=held[0].simulated if held else None,
        settings=tuple(dict.fromkeys(one.name for one in seen)), points=len(seen), coefficients=made.coefficients(),
        shape=shape, acceptance=acceptance.by_position if acceptance else None,
        acceptance_source=how + (PLAYED if played else "") if acceptance else "no run with MTP was measured",
        validation=leave_one_out(seen, shape=shape), budget=budget, predictions=tuple(said),
    )  # fmt: skip


def _runs(store: Store, names: Sequence[str], host: str | None, workload: str | None) -> tuple[Measured, ...]:
    """The runs named, else all of the newest one's host, GPU, SGLang and clock. Newest first."""
    if names:
        found = tuple(one for name in names for one in chosen(store, name, host=host, workload=workload))
        grounds = {(one.provenance.gpu, one.simulated, one.provenance.simulated_clock) for one in found}
        if len(grounds) > 1:
            raise UsageError(
                "the runs are of different GPUs, or some are simulated and some are not: one model cannot fit"
            )
        return told_apart(found)
    found = benchmarks(store, host=host, workload=workload)
    if not found:
        raise NotFound(f"no finished benchmark{f' on {host}' if host else ''} in {store.folder}", next_commands=HOW)

    def ground(one: Measured) -> tuple[object, ...]:
        p = one.provenance
        return p.host, p.endpoint, p.gpu, p.sglang_version, one.simulated, p.simulated_clock

    return told_apart([one for one in found if ground(one) == ground(found[0])])


def _read(path: Path) -> tuple[Observation, ...]:
    """A line a measured load, as JSON: setting, draft_tokens, state_dtype, concurrency, input_tokens, output_tokens, tpot_p50_ms,
    and where known max_running, ttft_p50_ms, output_tok_s, accept_length."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"--measurements {path}: cannot be read ({exc})") from exc
    return tuple(_observation(path, number, line) for number, line in enumerate(lines, 1) if line.strip())


def _observation(path: Path, number: int, line: str) -> Observation:
    where = f"{path}:{number}"
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{where}: is not JSON ({exc})") from exc
    if not isinstance(row, dict) or not isinstance(row.get("setting"), str):
        raise ConfigError(f"{where}: setting: should be there, the name of the measured setting")
    for name in NUMBERS + OPTIONAL:
        value = row.get(name)
        missing = value is None and name in OPTIONAL
        if not missing and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9):
            raise ConfigError(f"{where}: {name}: should be a number above 0, not {value!r}")
    drafts, state = row.get("draft_tokens", 1), row.get("state_dtype", "float32")
    if not isinstance(drafts, int) or isinstance(drafts, bool) or drafts < 1:
        raise ConfigError(f"{where}: draft_tokens: should be 1 (no MTP) or more, not {drafts!r}")
    if state not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"{where}: state_dtype: should be float32, bfloat16 or float16, not {state!r}")
    running = row.get("max_running")
    return Observation(
        row["setting"], Setting(drafts, 4 if state == "float32" else 2, int(running) if running else None),
        int(row["concurrency"]), row["input_tokens"], row["output_tokens"], row["tpot_p50_ms"], row.get("ttft_p50_ms"),
        row.get("output_tok_s"), row.get("accept_length") if drafts > 1 else None,
    )  # fmt: skip


def _ground(
    home: Path, held: Sequence[Measured], host: str | None, profile: str | None, inventory: Sequence[str],
    sets: Sequence[str], request_tokens: int, *, gpu_memory_gb: float | None, available_gb: float | None,
    sglang_version: str | None,
) -> tuple[Ground, str]:  # fmt: skip
    """What the memory budget judges by: the profile's arguments, else those of the newest run with MTP, else of the newest."""
    known_hosts = inventories.load(home, inventory)
    facts = None
    where = host or (held[0].provenance.host if held else None)
    deployment: Deployment
    if profile is not None:
        place = known_hosts.choose(host)[0] if host else None
        deployment = inventories.resolve(known_hosts, place, profile, sets, reveal=False)
        facts = stored_facts(home, place) if place else None
        said = f"profile {profile}"
    else:
        if sets:
            raise UsageError("--set changes a profile: give --profile too")
        own = next((one for one in held if one.provenance.args.get("speculative_algorithm")), held[0] if held else None)
        if own is None or not own.provenance.args:
            raise PlanRefused("neither a profile is given nor does a run say its arguments: --profile NAME")
        deployment = inventories.resolve(known_hosts, None, None, (), reveal=False)
        recorded: Any = own.provenance.args  # as a run holds them: JSON
        deployment = replace(deployment, args=dict(recorded))
        gpu_memory_gb = gpu_memory_gb or own.provenance.gpu_memory_gb
        sglang_version = sglang_version or own.provenance.sglang_version
        said = f"the arguments of run {own.run_id}"
    known = known_of(
        deployment, facts, sglang_version=sglang_version, gpu_memory_gb=gpu_memory_gb, available_gb=available_gb
    )
    made = make_plan(deployment, known, home=home, as_written=True)
    total = known.gpu_memory_gb or (available_gb + 3 if available_gb else None)
    if known.model is None or total is None:
        raise PlanRefused(known.no_memory_because or "the GPU's memory is not known: --gpu-memory-gb")
    ground = Ground(
        made.args, made.env, known.version, known.model, total, known.available_gb, known.calibration, known.help_flags,
        request_tokens,
    )  # fmt: skip
    free = f"{known.available_gb:.1f} GiB free before the load" if known.available_gb else f"a card of {total:.1f} GiB"
    return ground, f"{said}, SGLang {known.version}, {free}{f' ({where})' if where else ''}"


def _feasible(ground: Ground, factors: Mapping[str, Sequence[Level]], loads: Sequence[int]) -> tuple[Candidate, ...]:
    """Of each combination the most requests at once, of the loads, that fits; nothing where no request does."""
    if "running" in factors:
        return space(ground, factors).candidates
    try:
        found = space(ground, {**factors, "running": tuple(sorted(set(loads)))}).candidates
    except PlanRefused:
        return ()
    widest: dict[tuple[tuple[str, str], ...], Candidate] = {}
    for one in found:
        rest = tuple(pair for pair in one.key if pair[0] != "running")
        if rest not in widest or int(str(one.levels["running"])) > int(str(widest[rest].levels["running"])):
            widest[rest] = one
    return tuple(widest.values())
