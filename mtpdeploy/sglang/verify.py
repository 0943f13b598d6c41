"""Does what runs match what was asked for? Requested x rendered x live argv x effective, each difference with its reason.

Requested and effective differ normally: SGLang rewrites arguments (overrides.py knows which, per version), and sizes its capacity by
memory whatever max_running_requests says. So capacity comes first, and a difference counts only if nobody asked for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mtpdeploy.errors import CannotTell, Differs, PlanRefused
from mtpdeploy.inventory.values import ArgValue
from mtpdeploy.secret import MASK, Secret
from mtpdeploy.sglang import command, flags, memory, overrides
from mtpdeploy.sglang.api import ServerInfo
from mtpdeploy.sglang.logs.summary import Summary
from mtpdeploy.sglang.masking import is_secret, mask
from mtpdeploy.sglang.model import ModelConfig
from mtpdeploy.sglang.versions import NEWEST, RELEASES, Version

Status = Literal["same", "rewritten", "ignored", "stale", "unknown"]
Verdict = Literal["same", "differs", "cannot_tell"]
SIMULATED_ACCEPTANCE = "SGLANG_SIMULATE_ACC_LEN"

# Accept length at which drafting brings nothing: one token a step is what a server without MTP emits.
_NOT_DRAFTING = 1.05
CUMULATIVE = "/server_info, cumulative"
_EAGLE_KIND = frozenset({"EAGLE", "EAGLE3", "STANDALONE", "NEXTN"})
# "auto" and None ask for nothing in particular.
_OPEN = (None, "auto")
# A model may be named by its id at the hub or by a folder.
_PLACES = frozenset({"model_path", "tokenizer_path", "speculative_draft_model_path"})
_CANNOT_COMPARE = (
    "one is a name at the hub, the other a folder: whether that folder holds this model cannot be told from here"
)
# Numbers that SGLang divides among attention-DP replicas.
_PER_REPLICA = frozenset({"max_mamba_cache_size"})


@dataclass(frozen=True, slots=True)
class Argument:
    """One requested argument. effective None with status unknown: no source shows it. rule: why it is not the requested value."""

    name: str
    requested: object
    effective: object
    status: Status
    rule: str | None = None
    source: str | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "requested": self.requested,
            "effective": self.effective,
            "status": self.status,
            "rule": self.rule,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Flags that only help together. cost_gb: more memory for states than now; None where the budget cannot be computed."""

    set: Mapping[str, object]
    effect: str
    cost_gb: float | None = None

    def as_json(self) -> dict[str, object]:
        cost = None if self.cost_gb is None else round(self.cost_gb, 2)
        return {"set": dict(self.set), "effect": self.effect, "cost_gb": cost}


@dataclass(frozen=True, slots=True)
class Capacity:
    """What can run at once. requested None: nobody asked (SGLang then takes 48 under speculation). bound_by names the limit:
    max_running_requests, state_slots, kv_tokens, sglang_default; None where it cannot be told."""

    requested: int | None
    effective: int | None
    bound_by: str | None
    flag: str | None
    suggestions: tuple[Suggestion, ...]
    slots: int | None
    slots_per_request: int | None
    kv_tokens: int | None
    graph_sizes: tuple[int, ...] = ()
    slots_asked: bool = False

    @property
    def says(self) -> str | None:
        """The arithmetic behind the limit; None where it is not that of the state slots."""
        if self.bound_by != "state_slots" or not self.slots or not self.slots_per_request:
            return None
        whose = (
            "a flag, max_mamba_cache_size, sets that and not the memory"
            if self.slots_asked
            else "sized by the memory there was"
        )
        return f"{self.slots} state slots // {self.slots_per_request} a request = {self.effective}: {whose}"

    def as_json(self) -> dict[str, object]:
        return {
            "max_running_requests": {
                "requested": self.requested,
                "effective": self.effective,
                "bound_by": self.bound_by,
                "flag": self.flag,
                "says": self.says,
                "suggestions": [s.as_json() for s in self.suggestions],
            },
            "slots": self.slots,
            "slots_per_request": self.slots_per_request,
            "kv_tokens": self.kv_tokens,
            "graph_sizes": list(self.graph_sizes) or None,
        }


Gate = Literal["drafting", "not_drafting", "fictitious", "off", "no_data"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """length: tokens per verify step and request, the bonus token in it. rate: as this version defines it (rate_definition)."""

    length: float | None
    rate: float | None
    rate_definition: str | None
    gate: Gate
    says: str
    source: str | None = None
    mismatch: str | None = None  # why the rate cannot belong to the length

    def as_json(self) -> dict[str, object]:
        return {
            "length": self.length,
            "rate": self.rate,
            "rate_definition": self.rate_definition,
            "gate": self.gate,
            "says": self.says,
            "source": self.source,
            "mismatch": self.mismatch,
        }


@dataclass(frozen=True, slots=True)
class Freshness:
    """Whether the sources belong to the process in question. reasons: every proof and every doubt."""

    verdict: Literal["fresh", "stale", "unknown"]
    reasons: tuple[str, ...] = ()
    launch_id: str | None = None
    boot: int | None = None

    def as_json(self) -> dict[str, object]:
        return {"verdict": self.verdict, "reasons": list(self.reasons), "launch_id": self.launch_id, "boot": self.boot}


@dataclass(frozen=True, slots=True)
class Verification:
    """The answer of `verify`. memory: predicted beside actual, where a model shape is known."""

    verdict: Verdict
    why: tuple[str, ...]
    arguments: tuple[Argument, ...]
    capacity: Capacity
    acceptance: Acceptance
    freshness: Freshness
    sglang_version: str | None = None
    memory: tuple[tuple[str, float | None, float | None], ...] = ()
    notes: tuple[str, ...] = field(default=())
    simulated: bool = False

    @property
    def exit_code(self) -> int:
        return {"same": 0, "differs": Differs.exit_code, "cannot_tell": CannotTell.exit_code}[self.verdict]

    def as_json(self) -> dict[str, object]:
        return {
            "verdict": self.verdict,
            "why": list(self.why),
            "arguments": [a.as_json() for a in self.arguments],
            "capacity": self.capacity.as_json(),
            "acceptance": self.acceptance.as_json(),
            "freshness": self.freshness.as_json(),
            "sglang_version": self.sglang_version,
            "memory": [{"name": n, "predicted": p, "actual": a} for n, p, a in self.memory],
            "notes": list(self.notes),
            "simulated": self.simulated,
        }


def verify(
    requested: Mapping[str, object] | None,
    *,
    env: Mapping[str, str | Secret] | None = None,
    rendered: Sequence[str] | None = None,
    live: Sequence[str] | None = None,
    live_env_names: Sequence[str] | None = None,
    server_args: Mapping[str, object] | None = None,
    server_info: ServerInfo | None = None,
    log: Summary | None = None,
    version: Version | None = None,
    freshness: Freshness | None = None,
    model: ModelConfig | None = None,
    gpu_memory_gb: float | None = None,
    wanted_concurrency: int | None = None,
) -> Verification:
    """Compares every layer that is given.

    requested: canonical names, None if nobody said what was wanted; rendered: the argv of launch.sh; live: argv of the running process;
    server_args: of this launch's log (default: the log summary's); version: default from server_info, else judged from server_args' names.
    """
    env = env or {}
    notes: list[str] = []
    args = server_args if server_args is not None else (log.server_args if log else None)
    version, guessed = _version(version, server_info, args, notes)
    freshness = _freshness(freshness, log, server_info)
    resolved = _canonical(server_info.args) if server_info is not None and server_info.args else {}
    printed = _canonical(args) if args else {}
    source = "/server_info" if resolved else "server_args in the log" if printed else None
    effective = {**printed, **resolved}
    env = _by_the_log(env, effective or requested or {}, version, model, gpu_memory_gb, log, notes)
    capacity, table = _capacity(
        requested, effective, env, version, log, server_info, model, gpu_memory_gb, wanted_concurrency, notes
    )
    arguments = _arguments(
        requested or {}, effective, source, env, version, model, gpu_memory_gb, rendered, live, capacity, log, freshness
    )
    simulating = _simulating(env, live_env_names, log)
    acceptance = _acceptance(effective, requested or {}, log, server_info, version, simulating)
    verdict, why = _verdict(requested, arguments, capacity, freshness, source)
    if guessed and version is not None:
        notes.append(
            f"SGLang {version} is judged from the names of its arguments; --sglang-version says it for certain"
        )
    return Verification(
        verdict,
        tuple(why),
        arguments,
        capacity,
        acceptance,
        freshness,
        str(version) if version is not None and (not guessed or args) else None,
        table,
        tuple(notes),
        bool((server_info is not None and server_info.simulated) or (log is not None and log.simulated)),
    )


# -- sources -----------------------------------------------------------------------------------------------------------------


def _version(
    version: Version | None, info: ServerInfo | None, args: Mapping[str, object] | None, notes: list[str]
) -> tuple[Version | None, bool]:
    if info is not None and info.version:
        try:
            live = Version.parse(info.version)
        except ValueError:
            live = None
        if live is not None:
            if version is not None and version != live:
                notes.append(f"the server says SGLang {live}, not {version}: its own word counts")
            return live, False
    if version is not None:
        return version, False
    judged = judge_version(args) if args else None
    return (judged, True) if judged is not None else (None, True)


def judge_version(args: Mapping[str, object]) -> Version | None:
    """The release whose argument names fit a server_args line best; None if the line is cut or fits several or none well."""
    if len(args) < 100:
        return None
    fields = {name: {f.field for f in flags.flags_of(Version.parse(name)).values()} for name in RELEASES}
    every = set().union(*fields.values())
    have = {name for name in args if name in every}
    distance = {name: len(have ^ of) for name, of in fields.items()}
    best = min(distance.values())
    nearest = [name for name, d in distance.items() if d == best]
    return Version.parse(nearest[-1]) if len(nearest) == 1 and best <= 25 else None


def _canonical(args: Mapping[str, object]) -> dict[str, object]:
    return {flags.canonical(name) or name: value for name, value in args.items()}


def _freshness(given: Freshness | None, log: Summary | None, info: ServerInfo | None) -> Freshness:
    if given is None:
        reasons = (
            ["a log alone does not say which process wrote it, nor whether that process still runs"]
            if log is not None
            else []
        )
        return Freshness("unknown", tuple(reasons), log.launch_id if log else None, log.boot if log else None)
    ids = {i for i in (given.launch_id, log.launch_id if log else None, info.launch_id if info else None) if i}
    if len(ids) > 1:
        return Freshness(
            "stale",
            (*given.reasons, f"sources of different launches: {', '.join(sorted(ids))}"),
            given.launch_id,
            given.boot,
        )
    if given.boot is not None and log is not None and log.boot is not None and log.boot != given.boot:
        return Freshness(
            "stale",
            (*given.reasons, f"the log's last boot is {log.boot}, what runs is boot {given.boot}"),
            given.launch_id,
            given.boot,
        )
    return given


def _simulating(env: Mapping[str, str | Secret], names: Sequence[str] | None, log: Summary | None) -> bool:
    value = env.get(SIMULATED_ACCEPTANCE)
    off = isinstance(value, str) and value.strip().startswith("-")
    return (
        (value is not None and not off)
        or SIMULATED_ACCEPTANCE in (names or ())
        or bool(log and log.simulated_acceptance)
    )


# -- arguments ---------------------------------------------------------------------------------------------------------------


def _arguments(
    requested: Mapping[str, object],
    effective: Mapping[str, object],
    source: str | None,
    env: Mapping[str, str | Secret],
    version: Version | None,
    model: ModelConfig | None,
    gpu_memory_gb: float | None,
    rendered: Sequence[str] | None,
    live: Sequence[str] | None,
    capacity: Capacity,
    log: Summary | None,
    freshness: Freshness,
) -> tuple[Argument, ...]:
    at = version or NEWEST
    rules = overrides.effective({n: _arg(v) for n, v in requested.items()}, env, at, model, gpu_memory_gb)
    live_args = _parsed(live, at)
    rendered_args = _parsed(rendered, at)
    rows = []
    for asked_name, asked in requested.items():
        name = flags.canonical(asked_name) or asked_name
        hidden = is_secret(name)
        want: object = MASK if hidden and asked is not None else _shown(asked)
        status, rule = _compare(name, want, effective, rules, capacity, log, at, hidden)
        if freshness.verdict == "stale":
            status, rule = "stale", "the sources belong to another launch"
        elif (
            live_args is not None
            and not hidden
            and asked is not None
            and not _agrees(asked, live_args.get(name), name, live_args)
        ):
            status, rule = (
                "stale",
                f"the running process was started with {_said(live_args, name)}, so by another command than this one",
            )
        elif (
            rendered_args is not None
            and not hidden
            and asked is not None
            and status == "ignored"
            and name not in rendered_args
        ):
            rule = "it is not on the command line that was rendered"
        got = effective.get(name)
        if name == "max_running_requests" and capacity.effective is not None:
            got = capacity.effective
        shown = MASK if hidden and got is not None else _shown(got)
        rows.append(Argument(name, want, shown, status, rule, source))
    order = {"stale": 0, "ignored": 1, "rewritten": 2, "unknown": 3, "same": 4}
    return tuple(sorted(rows, key=lambda r: (order[r.status], r.name)))


def _compare(
    name: str,
    asked: object,
    effective: Mapping[str, object],
    rules: Mapping[str, tuple[object, str]],
    capacity: Capacity,
    log: Summary | None,
    version: Version,
    hidden: bool,
) -> tuple[Status, str | None]:
    if name == "max_running_requests" and asked is not None and capacity.effective is not None:
        if capacity.effective == asked:
            return "same", None
        return "rewritten", _why_capped(capacity)
    if name not in effective:
        if asked in (False, None):
            return "same", "not given, and this version prints no such argument"
        return "unknown", None
    got = effective[name]
    if hidden:
        return (
            ("same", "a secret is set; values are not compared") if got is not None else ("ignored", "no secret is set")
        )
    if _equal(asked, got):
        return "same", None
    if name in _PLACES and isinstance(asked, str) and isinstance(got, str):
        return _same_place(asked, got)
    expected = rules.get(name)
    if expected is not None and _equal(expected[0], got):
        return "rewritten", f"{expected[1]} (SGLang {version})"
    known = _known_rewrite(name, asked, got, effective, log)
    if known is not None:
        return "rewritten", known
    if asked in _OPEN:
        return "rewritten", "left to SGLang, which decided at the start"
    return "ignored", None


def _same_place(asked: str, got: str) -> tuple[Status, str | None]:
    """Two names at the hub, or two folders, are compared as they stand. A name and a folder only where the folder bears the name."""
    folder, name = (asked, got) if _is_folder(asked) else (got, asked)
    if _is_folder(name) or not _is_folder(folder):
        return "ignored", None
    cached = f"models--{name.replace('/', '--')}".lower()
    parts = [part.lower() for part in folder.split("/") if part]
    if cached in parts or (parts and parts[-1] == name.rpartition("/")[2].lower()):
        return "same", "judged by the folder's name"
    return "unknown", _CANNOT_COMPARE


def _is_folder(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1


def _known_rewrite(
    name: str, asked: object, got: object, effective: Mapping[str, object], log: Summary | None
) -> str | None:
    """Rewrites that depend on the model, the GPU or other arguments and are seen from the result."""
    if name in _PER_REPLICA and isinstance(asked, int) and isinstance(got, int):
        replicas = effective.get("attn_dp_size") or (
            effective.get("dp_size") if effective.get("enable_dp_attention") else None
        )
        if isinstance(replicas, int) and replicas > 1 and got == asked // replicas:
            return f"divided among {replicas} data-parallel replicas"
    if name == "speculative_algorithm" and isinstance(asked, str) and isinstance(got, str):
        if asked.upper() == "NEXTN" and got == "EAGLE":
            return "NEXTN is an alias of EAGLE"
        if asked.upper() == got:
            return "names are upper case"
    if name == "max_total_tokens" and isinstance(asked, int) and isinstance(got, int) and got < asked:
        return "larger than what was profiled; the profiled value is used"
    if (
        name == "attention_backend"
        and asked == "fa3"
        and got == "triton"
        and effective.get("kv_cache_dtype") == "fp8_e5m2"
    ):
        return "fa3 does not read an fp8_e5m2 KV cache"
    if name == "page_size" and effective.get("attention_backend") == "trtllm_mha" and got == 64:
        return "trtllm_mha works on pages of 64"
    if name == "page_size" and got == 1 and effective.get("mamba_radix_cache_strategy") == "no_buffer":
        return "no_buffer works with page_size 1 only"
    if (
        name == "disable_overlap_schedule"
        and got is True
        and effective.get("mamba_radix_cache_strategy") == "no_buffer"
    ):
        return "no_buffer runs without the overlap scheduler"
    if (
        name == "chunked_prefill_size"
        and isinstance(asked, int)
        and isinstance(got, int)
        and isinstance(page := effective.get("page_size"), int)
    ):
        if page > 1 and got == asked // page * page:
            return f"rounded to whole pages of {page}"
        replicas = effective.get("dp_size")
        if isinstance(replicas, int) and replicas > 1 and got == asked // replicas:
            return f"divided among {replicas} data-parallel replicas"
    if name == "served_model_name" and got == effective.get("model_path") and asked in _OPEN:
        return "the model path is the name where none is given"
    return None


_CAPS = {
    "state_slots": "capped by the state slots: each running request takes {per}",
    "kv_tokens": "capped by the KV cache's tokens",
    "sglang_default": "capped by SGLang's own estimate from context and KV tokens",
}


def _why_capped(capacity: Capacity) -> str:
    per = (
        f"{capacity.slots_per_request} of {capacity.slots}"
        if capacity.slots_per_request and capacity.slots
        else "several"
    )
    return _CAPS.get(capacity.bound_by or "", "lowered when the pools were sized").format(per=per)


def _arg(value: object) -> ArgValue:
    if isinstance(value, (list, tuple)):
        return tuple(_arg(v) for v in value)
    if isinstance(value, Mapping):
        return {str(k): _arg(v) for k, v in value.items()}
    return value if isinstance(value, (bool, int, float, str)) else None


def _parsed(argv: Sequence[str] | None, version: Version) -> Mapping[str, object] | None:
    """Canonical arguments of an argv; None where there is none or it is not a launch of SGLang (a retitled process)."""
    if not argv:
        return None
    try:
        return command.parse(list(argv), version).args
    except PlanRefused:
        return None


def _agrees(asked: object, live: object, name: str, live_args: Mapping[str, object]) -> bool:
    if name not in live_args:
        return asked is False or asked is None or not live_args
    if name in _PLACES and isinstance(asked, str) and isinstance(live, str) and not _equal(asked, live):
        return _same_place(asked, live)[0] != "ignored"
    return _equal(asked, live)


def _said(args: Mapping[str, object], name: str) -> str:
    return f"{name}={args[name]}" if name in args else f"no {name}"


def _equal(a: object, b: object) -> bool:
    """Whether two values ask for the same: 1 and 1.0, a tuple and a list, a number and its text, a JSON text and its value."""
    if isinstance(a, bool) or isinstance(b, bool):
        return (
            a is b
            or (isinstance(a, str) and a.lower() == str(b).lower())
            or (isinstance(b, str) and b.lower() == str(a).lower())
        )
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-9)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if (isinstance(a, str) and isinstance(b, (int, float))) or (isinstance(b, str) and isinstance(a, (int, float))):
        try:
            return math.isclose(float(a), float(b), rel_tol=1e-9)
        except ValueError:
            return False
    if (isinstance(a, str) and isinstance(b, (Mapping, list))) or (
        isinstance(b, str) and isinstance(a, (Mapping, list))
    ):
        import json

        text, value = (a, b) if isinstance(a, str) else (b, a)
        try:
            return _equal(json.loads(str(text)), value)
        except ValueError:
            return False
    if isinstance(a, str) and isinstance(b, str):
        return a == b or a.rstrip("/") == b.rstrip("/")
    if isinstance(a, (list, tuple)) and len(a) == 1:
        return _equal(a[0], b)
    return a == b


def _shown(value: object) -> object:
    if isinstance(value, Secret):
        return MASK
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, tuple):
        return [_shown(v) for v in value]
    return value


# -- capacity ----------------------------------------------------------------------------------------------------------------


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _capacity(
    requested: Mapping[str, object] | None,
    effective: Mapping[str, object],
    env: Mapping[str, str | Secret],
    version: Version | None,
    log: Summary | None,
    info: ServerInfo | None,
    model: ModelConfig | None,
    gpu_memory_gb: float | None,
    wanted: int | None,
    notes: list[str],
) -> tuple[Capacity, tuple[tuple[str, float | None, float | None], ...]]:
    asked = _whole((requested or {}).get("max_running_requests"))
    if requested is None and asked is None:
        asked = _whole(effective.get("max_running_requests"))
    limit = info.running_limit if info is not None else None
    if limit is None and log is not None:
        limit = log.max_running_requests if log.max_running_requests is not None else log.capped_to
    slots = info.slots if info is not None and info.slots is not None else None
    if slots is None and log is not None and log.mamba_cache:
        slots = _whole(log.mamba_cache.get("slots"))
    per = log.slots_per_request if log is not None else None
    if per is None and slots is not None and version is not None:
        args = {n: _arg(v) for n, v in (effective or requested or {}).items()}
        per = overrides.settle(args, env, version, model, gpu_memory_gb)[0].slots_per_request
    tokens = info.kv_tokens if info is not None and info.kv_tokens is not None else None
    if tokens is None and log is not None:
        tokens = log.max_total_num_tokens
        if tokens is None and log.kv_cache:
            tokens = _whole(log.kv_cache.get("tokens"))
    bound = _bound(limit, _whole(effective.get("max_running_requests")) or asked, slots, per, tokens, log)
    flag = {
        "state_slots": "max_mamba_cache_size with max_running_requests",
        "max_running_requests": "max_running_requests",
        "kv_tokens": "mem_fraction_static",
    }.get(bound or "")
    suggestions, table = _suggestions(
        effective or requested or {},
        env,
        version,
        model,
        log,
        info,
        gpu_memory_gb,
        limit,
        slots,
        per,
        bound,
        wanted,
        notes,
    )
    sizes = info.graph_sizes if info is not None else ()
    if not sizes and log is not None and log.graph and isinstance(captured := log.graph.get("bs"), list):
        sizes = tuple(captured)
    named = (
        _whole({**(requested or {}), **(log.server_args or {} if log else {})}.get("max_mamba_cache_size")) is not None
    )
    return Capacity(asked, limit, bound, flag, suggestions, slots, per, tokens, sizes, named), table


def _bound(
    limit: int | None, asked: int | None, slots: int | None, per: int | None, tokens: int | None, log: Summary | None
) -> str | None:
    if limit is None:
        return None
    warnings = log.warnings if log is not None else ()
    if "running_requests_capped_by_mamba" in warnings and (log is None or log.capped_to in (None, limit)):
        return "state_slots"
    # An explicit request that is met is what binds, even where the slots would allow no more either.
    if asked is not None and limit == asked:
        return "max_running_requests"
    if slots is not None and per and slots // per == limit:
        return "state_slots"
    if "running_requests_capped_by_kv" in warnings or (tokens is not None and tokens // 2 == limit):
        return "kv_tokens"
    return "sglang_default" if asked is None else None


def _suggestions(
    args: Mapping[str, object],
    env: Mapping[str, str | Secret],
    version: Version | None,
    model: ModelConfig | None,
    log: Summary | None,
    info: ServerInfo | None,
    gpu_memory_gb: float | None,
    limit: int | None,
    slots: int | None,
    per: int | None,
    bound: str | None,
    wanted: int | None,
    notes: list[str],
) -> tuple[tuple[Suggestion, ...], tuple[tuple[str, float | None, float | None], ...]]:
    """Sets of flags that only work together, from the budget where the model's shape is known, else from the log's own figures."""
    weights = (log.weights or {}) if log is not None else {}
    draft = (log.draft or {}) if log is not None else {}
    available = weights.get("before_gb")
    table: tuple[tuple[str, float | None, float | None], ...] = ()
    if model is not None and version is not None and (isinstance(available, (int, float)) or gpu_memory_gb is not None):
        # The log's "mem usage" leaves out what loading keeps allocated; it is better than the formulas only for mixed precisions.
        quantized = bool(args.get("quantization") or model.quantization)
        try:
            budget = memory.budget(
                {
                    n: _arg(v)
                    for n, v in args.items()
                    if n not in ("max_running_requests", "max_mamba_cache_size") or not _computed(n, args, version, log)
                },
                env,
                version,
                model,
                gpu_memory_gb=gpu_memory_gb,
                available_gb=float(available) if isinstance(available, (int, float)) else None,
                weights_gb=_gib(weights.get("mem_gb")) if quantized else None,
                draft_weights_gb=_gib(draft.get("mem_gb")) if quantized else None,
            )
        except PlanRefused:
            budget = None
        if budget is not None:
            table = _predicted(budget, log, limit, slots)
            offered = (
                []
                if quantized
                else _for_each_goal(args, env, version, model, gpu_memory_gb, available, limit, wanted, log)
            )
            offered += [Suggestion(dict(s.set), s.effect, s.cost_gb) for s in budget.suggestions]
            idle = (
                budget.pools.reserved_intermediate_gb
                - budget.pools.intermediate_ssm_gb
                - budget.pools.intermediate_conv_gb
            )
            if idle >= 1.0:
                notes.append(
                    f"{budget.pools.reserved_intermediate_gb:.1f} GiB are set aside for the states of "
                    f"{budget.pools.settings.requested_running} requests, and {idle:.1f} GiB of them lie unused: only together "
                    "with max_running_requests do more slots help"
                )
            unique: dict[str, Suggestion] = {}
            for one in offered:
                unique.setdefault(repr(sorted(one.set.items(), key=str)), one)
            return tuple(unique.values()), table
    if bound != "state_slots" or per is None or slots is None or limit is None:
        return (), table
    goal = wanted if wanted and wanted > limit else max(1, 2 * limit)
    cost = _cost(log, goal, limit, per, slots)
    effect = f"{goal} requests at once (now {limit}): {per} slots each; raising one of the two alone does not help"
    if cost is not None:
        effect += f"; takes {cost:.1f} GB from the KV cache"
    return (Suggestion({"max_running_requests": goal, "max_mamba_cache_size": per * goal}, effect, cost),), table


GOALS = (8, 16, 32, 64)  # running requests that one asks for


def _for_each_goal(
    args: Mapping[str, object],
    env: Mapping[str, str | Secret],
    version: Version,
    model: ModelConfig,
    gpu_memory_gb: float | None,
    available: object,
    limit: int | None,
    wanted: int | None,
    log: Summary | None,
) -> list[Suggestion]:
    """The least intrusive set of flags for the next few concurrencies, and for the one that was asked for, with what it costs."""
    if limit is None or not model.hybrid:
        return []
    own = {n: _arg(v) for n, v in args.items() if n != "max_running_requests" or not _computed(n, args, version, log)}
    goals = [goal for goal in GOALS if goal > limit][:3]
    if wanted is not None and wanted > limit and wanted not in goals:
        goals.insert(0, wanted)
    found = []
    for goal in goals:
        made = memory.fit(
            own, env, version, model, requests=goal, tokens_per_request=None, gpu_memory_gb=gpu_memory_gb,
            available_gb=float(available) if isinstance(available, (int, float)) else None,
        )  # fmt: skip
        if made.set:
            found.append(Suggestion(dict(made.set), made.effect, made.cost_gb))
    return found


def _by_the_log(
    env: Mapping[str, str | Secret],
    args: Mapping[str, object],
    version: Version | None,
    model: ModelConfig | None,
    gpu_memory_gb: float | None,
    log: Summary | None,
    notes: list[str],
) -> Mapping[str, str | Secret]:
    """Up to 0.5.10 a variable that no log prints decides whether a request takes 4 or 5 slots; the log's own limit tells which."""
    name = "SGLANG_ENABLE_SPEC_V2"
    slots = _whole((log.mamba_cache or {}).get("slots")) if log is not None else None
    limit = log.max_running_requests if log is not None else None
    if name in env or version is None or not version.before("0.5.11") or not slots or not limit:
        return env
    own = {n: _arg(v) for n, v in args.items()}
    with_it = {**env, name: "1"}
    each = [overrides.settle(own, one, version, model, gpu_memory_gb)[0].slots_per_request for one in (env, with_it)]
    if each[0] == each[1] or not all(each) or slots // each[0] == limit or slots // each[1] != limit:
        return env
    notes.append(
        f"{slots} slots for {limit} requests are {each[1]} a request: the process ran with {name}=1, which no log prints"
    )
    return with_it


def _computed(name: str, args: Mapping[str, object], version: Version, log: Summary | None) -> bool:
    """Whether a resolved value is SGLang's own and not a request: speculation's 48."""
    return (
        name == "max_running_requests"
        and args.get(name) == overrides.SPECULATIVE_RUNNING
        and bool(args.get("speculative_algorithm"))
    )


def _gib(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _cost(log: Summary | None, goal: int, limit: int, per: int, slots: int) -> float | None:
    """GiB that more slots and intermediate states take, by the log's own sizes of one slot and one request."""
    m = log.mamba_cache if log is not None else None
    if not m:
        return None
    ssm, conv, extra = (_gib(m.get(k)) for k in ("ssm_gb", "conv_gb", "intermediate_gb"))
    if ssm is None or conv is None:
        return None
    slot = (ssm + conv) / (slots + 1)
    each = (extra or 0.0) / (limit + 1)
    return (per * goal - slots) * slot + (goal - limit) * each


def _predicted(
    budget: memory.Budget, log: Summary | None, limit: int | None, slots: int | None
) -> tuple[tuple[str, float | None, float | None], ...]:
    p = budget.pools
    m = (log.mamba_cache or {}) if log is not None else {}
    rows: list[tuple[str, float | None, float | None]] = [
        ("max_running_requests", p.max_running, limit),
        ("kv_tokens", p.kv_tokens, log.max_total_num_tokens if log is not None else None),
        ("headroom_gb", round(p.avail_end_gb, 2), log.available_gpu_mem_gb if log is not None else None),
    ]
    if p.slots is not None:
        rows[1:1] = [
            ("slots", p.slots, slots),
            ("ssm_gb", round(p.ssm_gb, 2), _gib(m.get("ssm_gb"))),
            ("intermediate_ssm_gb", round(p.intermediate_ssm_gb, 2), _gib(m.get("intermediate_gb"))),
        ]
    return tuple(rows)


# -- acceptance --------------------------------------------------------------------------------------------------------------


def rate_definition(version: Version) -> str:
    """How this version computes its accept rate; not comparable across 0.5.10 and 0.5.11."""
    return "accept_length / draft_tokens" if version.before("0.5.11") else "(accept_length - 1) / (draft_tokens - 1)"


def _acceptance(
    effective: Mapping[str, object],
    requested: Mapping[str, object],
    log: Summary | None,
    info: ServerInfo | None,
    version: Version | None,
    simulating: bool,
) -> Acceptance:
    algorithm = (
        effective.get("speculative_algorithm")
        if "speculative_algorithm" in effective
        else requested.get("speculative_algorithm")
    )
    last = log.decode.get("last") if log is not None else None
    printed = last if isinstance(last, Mapping) else {}
    length, source = (
        (info.accept_length, CUMULATIVE) if info is not None and info.accept_length is not None else (None, None)
    )
    if length is None:
        length = _gib(printed.get("accept_len"))
        source = "the log's last decode record" if length is not None else None
    rate = _gib(printed.get("accept_rate"))
    definition = rate_definition(version) if version is not None and rate is not None else None
    if not algorithm and length is None:
        return Acceptance(None, None, None, "off", "speculation is off")
    if simulating:
        says = f"numbers are fictitious: {SIMULATED_ACCEPTANCE} forces the acceptance whatever the draft says"
        return Acceptance(length, rate, definition, "fictitious", says, source)
    if length is None:
        return Acceptance(
            None,
            rate,
            definition,
            "no_data",
            "no verify step was reported yet: send a request of some hundred tokens",
            None,
        )
    if length <= _NOT_DRAFTING:
        says = f"MTP is not drafting: {length:.2f} tokens a step is what a server without it emits, at a higher cost a step"
        return Acceptance(length, rate, definition, "not_drafting", says, source)
    drafts = draft_tokens({**requested, **effective})
    # The cumulative length of /server_info is of another span than the log's last record.
    mismatch = (
        acceptance_mismatch(length, rate, drafts) if rate is not None and drafts and source != CUMULATIVE else None
    )
    return Acceptance(length, rate, definition, "drafting", f"{length:.2f} tokens a verify step", source, mismatch)


def draft_tokens(args: Mapping[str, object]) -> int | None:
    """D: tokens that a verify step looks at, by the arguments; None without speculation."""
    given, steps = _whole(args.get("speculative_num_draft_tokens")), _whole(args.get("speculative_num_steps"))
    return given if given is not None else None if steps is None else steps + 1


def acceptance_mismatch(length: float, rate: float, draft_tokens: int) -> str | None:
    """Why an accept rate cannot belong to an accept length; None where one of SGLang's two definitions fits.

    With D draft tokens: releases up to 0.5.10 divide length by D, later ones (length - 1) by (D - 1).
    """
    if draft_tokens < 2:
        return None
    old, new = length / draft_tokens, (length - 1) / (draft_tokens - 1)
    # The last step of an answer is cut at its end, which moves a rate counted over requests by up to some 2 %.
    if min(abs(rate - old), abs(rate - new)) <= 0.03:
        return None
    return (
        f"accept rate {rate:.2f} and accept length {length:.2f} fit neither of SGLang's definitions "
        f"(length / {draft_tokens} = {old:.2f}, (length - 1) / {draft_tokens - 1} = {new:.2f}; {rate:.2f} would need "
        f"{rate * draft_tokens:.2f} or {rate * (draft_tokens - 1) + 1:.2f}): read at different times or from different sources"
    )


# -- verdict -----------------------------------------------------------------------------------------------------------------

# A rewrite that gives what was asked for under another name.
_HARMLESS = ("alias of", "upper case", "data-parallel replicas", "left to SGLang", "is the name where none is given")


def _verdict(
    requested: Mapping[str, object] | None,
    arguments: Sequence[Argument],
    capacity: Capacity,
    freshness: Freshness,
    source: str | None,
) -> tuple[Verdict, list[str]]:
    if freshness.verdict == "stale":
        return "cannot_tell", [f"stale: {r}" for r in freshness.reasons] or ["the sources belong to another launch"]
    if source is None:
        return "cannot_tell", [
            "no source shows the effective arguments: no server_args in the log, no answer of /server_info"
        ]
    if requested is None:
        return "cannot_tell", ["nothing says what was asked for: give --profile or --command"]
    why = []
    for a in arguments:
        counts = a.status in ("ignored", "stale") or (
            a.status == "rewritten"
            and a.requested not in _OPEN
            and not any(word in (a.rule or "") for word in _HARMLESS)
        )
        if counts:
            why.append(
                f"{a.name}: asked for {a.requested}, in force {a.effective} ({a.status}{f': {a.rule}' if a.rule else ''})"
            )
    if why:
        return "differs", why
    unseen = [a.name for a in arguments if a.status == "unknown" and a.rule is None]
    if any(a.status == "unknown" for a in arguments):
        return "cannot_tell", [
            *(
                f"{a.name}: {a.requested} or {a.effective}: {a.rule}"
                for a in arguments
                if a.status == "unknown" and a.rule
            ),
            *([f"not visible in {source}: {', '.join(unseen)}"] if unseen else []),
        ]
    return "same", []
