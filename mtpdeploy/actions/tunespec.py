"""What a search is asked to do: the options of `tune`, validated, and as spec.json keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from mtpdeploy.analysis.space import GIVEABLE, parse_factors
from mtpdeploy.analysis.tune import REQUESTS
from mtpdeploy.bench import load
from mtpdeploy.bench.metrics import Limit, parse_slo
from mtpdeploy.errors import ConfigError, UsageError
from mtpdeploy.inventory.values import Workload
from mtpdeploy.store import Run

Objective = Literal["throughput", "latency", "mixed"]
Leave = Literal["chosen", "original"]
LOADS = (1, 4, 8, 16)
LAUNCHES = 12
ROUNDS = 1
PROMPT_TOKENS, ANSWER_TOKENS = 512, 256  # what a request is taken to be where neither workload nor option says


@dataclass(frozen=True, slots=True)
class Spec:
    """What is searched, as spec.json keeps it: enough to go on after a kill with the same next proposal.

    factors: None until the host is known and no --space was given. ground: what candidates are judged by, as it was found
    when the search began. args: the profile's arguments then. learned_from: earlier runs that the model started from.
    """

    host: str
    profile: str
    objective: Objective
    loads: tuple[int, ...]
    slo: str | None
    factors: Mapping[str, tuple[Any, ...]] | None
    give_up: tuple[str, ...]
    launches: int
    minutes: float | None
    confirm: int
    leave: Leave
    name: str
    sets: tuple[str, ...]
    inventory: tuple[str, ...]
    bench: Mapping[str, Any]
    input_tokens: int
    output_tokens: int
    requests: int | None
    gpu_memory_gb: float | None = None
    own_space: bool = False
    ground: Mapping[str, Any] | None = None
    args: Mapping[str, Any] | None = None
    learned_from: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        told = {one.name: getattr(self, one.name) for one in fields(self)}
        factors = self.factors or {}
        return {**told, "factors": {name: list(levels) for name, levels in factors.items()} if self.factors else None}

    @classmethod
    def of(cls, run: Run) -> Spec:
        """ConfigError where the folder does not hold a search of this release."""
        value = run.read_json("spec.json")
        try:
            if not isinstance(value, Mapping) or value["objective"] not in get_args(Objective):
                raise TypeError("objective")
            known = {one.name: value[one.name] for one in fields(cls)}
            for name in ("loads", "give_up", "sets", "inventory", "learned_from"):
                known[name] = tuple(known[name])
            if known["factors"] is not None:
                known["factors"] = {name: tuple(levels) for name, levels in known["factors"].items()}
            return cls(**known)
        except (KeyError, TypeError, AttributeError) as exc:
            raise ConfigError(f"{run.file('spec.json')}: is not the spec of a search ({exc!r})") from exc


def read_spec(home: Path, host: str, profile: str, given: Mapping[str, Any]) -> Spec:
    """The options of `tune`. Raises UsageError or ConfigError before anything is touched."""
    limits(given["slo"])
    for option, value, least in (
        ("--budget-launches", given["budget_launches"], 1), ("--confirm", given["confirm"], 0),
        ("--requests", given["requests"], 1), ("--output-tokens", given["output_tokens"], 2),
    ):  # fmt: skip
        if value is not None and value < least:
            raise UsageError(f"{option} {value}: should be {least} or more")
    for option, value in (("--budget-minutes", given["budget_minutes"]), ("--gpu-memory-gb", given["gpu_memory_gb"])):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{option} {value:g}: should be more than 0")
    objective: Objective = _one_of("--objective", given["objective"] or "throughput", get_args(Objective))
    leave: Leave = _one_of("--leave", given["leave"] or "chosen", get_args(Leave))
    held = _workload(home, given["workload"], open_loop_ok=given["concurrency"] is not None)
    loads: tuple[int, ...] = LOADS
    if held is not None and held.concurrency:
        loads = held.concurrency
    if given["concurrency"]:
        try:
            loads = tuple(int(one) for one in load.numbers(given["concurrency"], int, "--concurrency"))
        except ValueError as exc:
            raise UsageError(str(exc)) from exc
    requests = given["requests"] or (held.requests if held else None)
    for limit in limits(given["slo"]):
        if why := limit.undecidable(requests or REQUESTS, "load"):
            raise UsageError(f"--slo {why}")
    give_up = tuple(part.strip() for part in (given["give_up"] or "").split(",") if part.strip())
    for one in give_up:
        _one_of("--give-up", one, GIVEABLE)
    if give_up and given["space_"]:
        raise UsageError("--space says itself what is searched; leave out --give-up")
    profile, workload = _lasting(profile), _lasting(given["workload"]) if given["workload"] else None
    bench: dict[str, Any] = {"workload": workload, "requests": given["requests"]}
    if given["output_tokens"] is not None:
        bench["output_tokens"] = str(given["output_tokens"])
    answer = given["output_tokens"] or (held.output_tokens if held else ANSWER_TOKENS)
    return Spec(
        host=host, profile=profile, objective=objective, loads=tuple(sorted(set(loads))), slo=given["slo"],
        factors=parse_factors(given["space_"]) if given["space_"] is not None else None, give_up=give_up,
        launches=LAUNCHES if given["budget_launches"] is None else given["budget_launches"],
        minutes=given["budget_minutes"], confirm=ROUNDS if given["confirm"] is None else given["confirm"], leave=leave,
        name=given["name"] or f"{Path(profile).stem}-tuned", sets=tuple(given["set_"]),
        inventory=tuple(str(Path(one).absolute()) for one in given["inventory"]), bench=bench,
        input_tokens=(held.input_tokens if held else None) or PROMPT_TOKENS, output_tokens=answer,
        requests=requests, gpu_memory_gb=given["gpu_memory_gb"],
        own_space=given["space_"] is not None,
    )  # fmt: skip


def _lasting(name: str) -> str:
    """A file by its whole path, so that the search goes on, and its profile deploys, from any folder."""
    return str(Path(name).absolute()) if Path(name).suffix in (".yml", ".yaml") else name


def limits(slo: str | None) -> tuple[Limit, ...]:
    """UsageError for objectives that cannot be meant."""
    try:
        return parse_slo(slo) if slo else ()
    except ValueError as exc:
        raise UsageError(f"--slo: {exc}") from exc


def _one_of(option: str, value: str, choices: Sequence[str]) -> Any:
    if value not in choices:
        raise UsageError(f"{option} {value}: should be one of {', '.join(choices)}")
    return value


def _workload(home: Path, name: str | None, *, open_loop_ok: bool) -> Workload | None:
    if name is None:
        return None
    from mtpdeploy.inventory import workload

    held = workload(home, name)
    if held.rate and not held.concurrency and not open_loop_ok:
        raise UsageError(
            f"--workload {name} is an open loop at {', '.join(f'{rate:g}' for rate in held.rate)} requests/s, which a search "
            "does not send: its settings are judged by closed loops",
            next_commands=["mtpdeploy tune --concurrency 1,4,16 …", f"mtpdeploy recommend --workload {name}"],
        )
    return held
