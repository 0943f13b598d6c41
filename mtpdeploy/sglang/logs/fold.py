"""Events → summary. One pass, memory independent of the log's length.

Each boot keeps what every rank said; the summary takes a value from the lowest rank that printed it. Causes are decided at the
end (verdict.py), because only what follows tells whether a traceback was harmless.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from mtpdeploy.sglang.logs import events as ev
from mtpdeploy.sglang.logs.parser import Parser, trace_cause
from mtpdeploy.sglang.logs.summary import LAUNCH, Phase, Progress, Summary, Values
from mtpdeploy.sglang.logs.verdict import Trouble, decide, is_own_frame

# Draft runners by class name: Qwen3_5ForCausalLMMTP, DeepseekV3ForCausalLMNextN, LlamaForCausalLMEagle3, DFlashLagunaForCausalLM …
_DRAFT_TYPE = re.compile(r"MTP|NextN|Eagle|EAGLE|DFlash|DSpark|Draft|Medusa|Assistant")
# A command line that a script echoes before the launch: `# env A=1 python3 -m sglang.launch_server …`, `+ sglang serve …`.
_COMMAND = re.compile(
    r"^(?:[#+$>]+ |[Cc]ommand ?[=:] ?)(?:\S+Z )?(?:go )?(?P<command>(?:env +)?(?:[A-Z_][A-Z0-9_]*=\S* +)*"
    r"(?:\S*python[\d.]* +-m +sglang\.launch_server|(?:\S*/)?sglang +serve)\b.*)"
)
_FORCED = re.compile(r"\bSGLANG_SIMULATE_ACC_LEN=(?!-)\S")
_RANK_NUMBERS = re.compile(r"\d+")
_GENERATION = (
    "/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/generate",
    "/api/chat",
)
# Paths that no other server has; `sglang::scheduler` answers behind them.
_OWN = ("/get_model_info", "/get_server_info", "/model_info", "/server_info", "/flush_cache", "/health_generate")
# Causes whose messages nothing but SGLang prints.
_ONLY_SGLANG = ("kv_pool_too_small", "mamba_pool_too_small", "peer_rank_load_failed")
_INDEX = {phase: i for i, phase in enumerate(LAUNCH)}
_MAX_LISTED = 20


@dataclass(slots=True)
class _Load:
    type: str | None = None
    quant: str | None = None
    mem_gb: float | None = None
    avail_gb: float | None = None
    before_gb: float | None = None
    elapsed_s: float | None = None
    ended: bool = False

    @property
    def is_draft(self) -> bool:
        return self.type is not None and _DRAFT_TYPE.search(self.type) is not None

    def values(self) -> dict[str, object]:
        return {n: getattr(self, n) for n in ("type", "quant", "mem_gb", "avail_gb", "before_gb", "elapsed_s")}


@dataclass(slots=True)
class _Pool:
    kv: list[ev.KvCache] = field(default_factory=list)
    swa: ev.SlidingWindow | None = None
    end_avail_gb: float | None = None
    of_target: bool = False  # state slots or caps were printed with it


@dataclass(slots=True)
class _Rank:
    loads: list[_Load] = field(default_factory=list)
    pools: list[_Pool] = field(default_factory=list)
    pool_open: bool = False
    mamba: ev.MambaCache | None = None
    graphs: list[ev.GraphEnd] = field(default_factory=list)
    capturing: str | None = None
    bs: tuple[int, ...] = ()  # of the capture that is going on
    sizes: dict[str, int | float] | None = None

    def pool(self) -> _Pool:
        if not self.pool_open:
            self.pools.append(_Pool())
            self.pool_open = True
        return self.pools[-1]


@dataclass(slots=True)
class Boot:
    """All that one boot has printed so far. Mutable; only the fold writes it."""

    launch_id: str | None = None
    number: int | None = None
    simulated: bool | None = None
    simulated_acceptance: bool | None = None  # the variable stands in a command line that the log echoes
    command: str | None = None
    args: dict[str, object] | None = None
    furthest: int = -1  # index into LAUNCH
    current: Phase | None = (
        None  # what was going on last; a draft's weights come after the target's graphs up to 0.5.13
    )
    ready_lines: int = 0
    served: bool = False  # traffic that only a ready server has
    posts: int = 0
    batches: int = 0
    ranks: dict[str | None, _Rank] = field(default_factory=dict)
    ranks_seen: set[str] = field(default_factory=set)
    decodes: int = 0
    first: ev.Decode | None = None
    last: ev.Decode | None = None
    accept_len_min: float | None = None
    accept_len_max: float | None = None
    warnings: dict[str, None] = field(default_factory=dict)
    retractions: int = 0
    capped_to: int | None = None
    slots_per_request: int | None = None
    bar: ev.Bar | None = None
    trouble: Trouble = field(default_factory=Trouble)
    mixed: bool = False  # another server's records stand between its own
    sglang: bool = False
    foreign: str | None = None

    @property
    def ended(self) -> bool:
        return self.trouble.dead or self.trouble.stop_asked or self.trouble.wrapper_ended

    @property
    def phase(self) -> Phase | None:
        return LAUNCH[self.furthest] if self.furthest >= 0 else None

    def rank(self, name: str | None) -> _Rank:
        return self.ranks.setdefault(name, _Rank())

    def advance(self, phase: Phase) -> None:
        """A record of that phase: the launch goes on, so what looked like trouble before did not end it."""
        self.furthest = max(self.furthest, _INDEX[phase])
        self.current = phase
        self.sglang = True
        self.trouble.progress()


class Fold:
    """Add events in order; ask for `summary()` or `progress()` at any time."""

    def __init__(self) -> None:
        self._boots: list[Boot] = [Boot()]
        self._count = 0  # boots that really began
        self._alive_before: Boot | None = None  # had shown no end when the next one began
        self._route: Boot | None = None
        self._lines = 0

    @property
    def boot(self) -> Boot:
        """The last boot."""
        return self._boots[-1]

    def add(self, event: ev.Event) -> None:
        self._lines += 1
        boot = self._target(event)
        if event.rank:
            boot.ranks_seen.add(event.rank)
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(boot, event)

    def extend(self, events: Iterable[ev.Event]) -> None:
        for event in events:
            self.add(event)

    # -- boots ---------------------------------------------------------------------------------------------------------

    def _target(self, event: ev.Event) -> Boot:
        boot = self.boot
        if isinstance(event, ev.LaunchHeader):
            return self._begin(boot) if self._used(boot) else self._named(boot)
        if isinstance(event, ev.ServerArgsLine):
            if boot.args is not None and not _other_node(boot.args, event.values):
                return self._begin(boot)
            return self._named(boot)
        if isinstance(event, ev.Preamble):
            if boot.args is not None and (event.certain or boot.ended):
                return self._begin(boot)
            return self._route or boot
        if isinstance(event, ev.DistInit) and not event.done and boot.trouble.tree_killed:
            if self._alive_before is not None and self._alive_before is not boot:
                # The boot that died was not alone: the earlier server in the same file goes on.
                boot.mixed = True
                self._route = self._alive_before
            elif self._route is None:
                return self._begin(boot)
        return self._route or boot

    @staticmethod
    def _used(boot: Boot) -> bool:
        return boot.launch_id is not None or boot.args is not None or boot.furthest > 0 or boot.ended

    def _named(self, boot: Boot) -> Boot:
        self._count = max(self._count, 1)
        return boot

    def _begin(self, previous: Boot) -> Boot:
        self._alive_before = None if previous.ended or previous.furthest >= _INDEX["ready"] else previous
        self._route = None
        self._count = max(self._count, 1) + 1
        fresh = Boot()
        fresh.sglang = True
        self._boots = [previous, fresh]
        return fresh

    # -- results -------------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """For a display while the launch runs; a failure shows as phase crashed as soon as its lines are there."""
        boot = self.boot
        verdict = decide(boot)
        if verdict.phase in ("crashed", "hung", "stopped", "exited"):
            return Progress(verdict.phase, verdict.cause or verdict.phase)
        phase: Phase = boot.current or boot.phase or "before_args"
        bar = boot.bar
        if phase == "weights":
            if bar is not None and bar.what in ("weights", "download"):
                return Progress(
                    phase,
                    f"{'downloading' if bar.what == 'download' else 'loading'} weights {bar.done}/{bar.total}",
                    _part(bar),
                )
            return Progress(phase, "loading weights")
        if phase == "graphs":
            kind = next((r.capturing for r in boot.ranks.values() if r.capturing is not None), None)
            what = f"capturing {kind or 'CUDA'} graphs"
            if bar is not None and bar.what in ("graphs", "compile"):
                return Progress(phase, f"{what} {bar.done}/{bar.total}", _part(bar))
            return Progress(phase, what)
        return Progress(phase, _SAID[phase])

    def summary(self) -> Summary:
        """The last boot's values; `boots` counts them all. Asking does not disturb the fold."""
        boot = self.boot
        verdict = decide(boot)
        values: dict[str, Any] = {} if boot.mixed else _memory(boot)
        ready: bool | None
        if boot.ready_lines or boot.served:
            ready = True
        elif verdict.phase == "crashed" or boot.trouble.wrapper_ended or verdict.cause == "launch_timeout":
            ready = None if boot.batches else False
        else:
            ready = None
        sglang: bool | None = boot.sglang or any(b.sglang for b in self._boots)
        if not sglang and self._lines == 0:
            sglang = None
        return Summary(
            is_sglang=sglang,
            phase=verdict.phase if sglang else "unknown",
            ready=ready if sglang else None,
            cause=verdict.cause if sglang else None,
            failed_in=verdict.failed_in if sglang else None,
            evidence=verdict.evidence if sglang else (),
            consequences=verdict.consequences if sglang else (),
            warnings=tuple(boot.warnings) + (("interleaved_servers",) if boot.mixed else ()),
            launch_id=boot.launch_id,
            boot=boot.number,
            simulated=boot.simulated,
            simulated_acceptance=boot.simulated_acceptance,
            command=boot.command,
            server_args=boot.args,
            decode=_decode(boot),
            ranks_seen=len(boot.ranks_seen) or None,
            failed_ranks=verdict.failed_ranks,
            boots=max(self._count, 1) if sglang else 0,
            ready_lines=boot.ready_lines,
            retractions=boot.retractions,
            capped_to=boot.capped_to,
            slots_per_request=boot.slots_per_request,
            exit_code=boot.trouble.exit_code,
            **values,
        )


def summarise(chunks: Iterable[bytes]) -> Summary:
    """The summary of a whole log given as chunks of bytes."""
    parser, fold = Parser(totals_only=True), Fold()
    for chunk in chunks:
        fold.extend(parser.feed(chunk))
    fold.extend(parser.close())
    return fold.summary()


_SAID: dict[Phase, str] = {
    "before_args": "SGLang is starting",
    "args": "arguments resolved",
    "dist_init": "joining the process group",
    "weights": "loading weights",
    "pools": "allocating state and KV pools",
    "graphs": "capturing CUDA graphs",
    "http_up": "HTTP server is up",
    "warmup": "warming up",
    "ready": "ready",
    "serving": "serving",
}


def _part(bar: ev.Bar) -> float | None:
    return min(1.0, bar.done / bar.total) if bar.total > 0 else None


def _other_node(first: dict[str, object], second: Values) -> bool:
    """Whether two server_args lines belong to two nodes of one launch."""
    return (
        first.get("node_rank") != second.get("node_rank")
        and second.get("nnodes") not in (None, 1)
        and first.get("dist_init_addr") == second.get("dist_init_addr")
    )


# -- what each event does to its boot ------------------------------------------------------------------------------------


def _header(boot: Boot, e: ev.LaunchHeader) -> None:
    boot.launch_id, boot.number, boot.sglang = e.launch_id, e.boot, True


def _preamble(boot: Boot, e: ev.Preamble) -> None:
    boot.sglang = True
    if boot.furthest < 0:
        boot.advance("before_args")


def _args(boot: Boot, e: ev.ServerArgsLine) -> None:
    if boot.args is None:
        boot.args = dict(e.values)
    boot.advance("args")


def _dist(boot: Boot, e: ev.DistInit) -> None:
    if boot.furthest <= _INDEX["dist_init"]:
        boot.advance("dist_init")


def _weights_begin(boot: Boot, e: ev.WeightsBegin) -> None:
    boot.rank(e.rank).loads.append(_Load(before_gb=e.avail_gb))
    boot.bar = None
    boot.advance("weights")


def _weights_end(boot: Boot, e: ev.WeightsEnd) -> None:
    loads = boot.rank(e.rank).loads
    if not loads or loads[-1].ended:
        loads.append(_Load())
    load = loads[-1]
    load.type, load.quant, load.mem_gb, load.avail_gb, load.elapsed_s, load.ended = (
        e.type,
        e.quant,
        e.mem_gb,
        e.avail_gb,
        e.elapsed_s,
        True,
    )
    boot.advance("weights")


def _mamba(boot: Boot, e: ev.MambaCache) -> None:
    rank = boot.rank(e.rank)
    rank.pool().of_target = True
    if rank.mamba is None:
        rank.mamba = e
    boot.advance("pools")


def _kv(boot: Boot, e: ev.KvCache) -> None:
    boot.advance("pools")
    if not e.provisional:
        boot.rank(e.rank).pool().kv.append(e)


def _swa(boot: Boot, e: ev.SlidingWindow) -> None:
    pool = boot.rank(e.rank).pool()
    if pool.swa is None or e.total_gb is not None:
        pool.swa = e
    boot.advance("pools")


def _pool_end(boot: Boot, e: ev.PoolEnd) -> None:
    rank = boot.rank(e.rank)
    rank.pool().end_avail_gb = e.avail_gb
    rank.pool_open = False
    boot.advance("pools")


def _graph_begin(boot: Boot, e: ev.GraphBegin) -> None:
    rank = boot.rank(e.rank)
    rank.capturing = e.graph
    if e.bs:
        rank.bs = e.bs
    boot.bar = None
    boot.advance("graphs")


def _graph_end(boot: Boot, e: ev.GraphEnd) -> None:
    rank = boot.rank(e.rank)
    rank.capturing = None
    if len(rank.graphs) < _MAX_LISTED:
        rank.graphs.append(e if e.bs or not rank.bs else replace(e, bs=rank.bs))
    rank.bs = ()
    boot.advance("graphs")


def _sizes(boot: Boot, e: ev.Sizes) -> None:
    rank = boot.rank(e.rank)
    if rank.sizes is None:
        rank.sizes = dict(e.values)
    boot.advance("graphs")


def _capped(boot: Boot, e: ev.Capped) -> None:
    boot.sglang = True
    if e.by == "mamba":
        boot.warnings["running_requests_capped_by_mamba"] = None
        boot.capped_to, boot.slots_per_request = e.limit, e.slots_per_request
        boot.rank(e.rank).pool().of_target = True
    else:
        boot.warnings["running_requests_capped_by_kv"] = None
        boot.capped_to = e.limit if boot.capped_to is None else min(boot.capped_to, e.limit)


def _http(boot: Boot, e: ev.Http) -> None:
    if e.state == "stopping":
        boot.trouble.http_stopped = True
    elif boot.furthest < _INDEX["http_up"]:
        boot.advance("http_up")


def _access(boot: Boot, e: ev.Access) -> None:
    path = e.path.split("?", 1)[0]
    if path in _OWN:
        boot.sglang = True
    if path in _GENERATION:
        boot.sglang = True
        if e.status == 200 and e.method == "POST":
            _posted(boot, 1, local=e.client.startswith(("127.", "localhost", "[::1]")))


def _posted(boot: Boot, count: int, *, local: bool) -> None:
    boot.posts += count
    # The warm-up is one request from the server's own host: more, or from elsewhere, is somebody's traffic.
    if boot.posts > 2 or not local:
        boot.served = True
    if boot.ready_lines or boot.served:
        boot.advance("serving")


def _ready(boot: Boot, e: ev.Ready) -> None:
    boot.ready_lines += 1
    boot.advance("ready")


def _batch(boot: Boot) -> None:
    boot.batches += 1
    if boot.ready_lines or boot.served or boot.furthest not in (_INDEX["http_up"], _INDEX["warmup"]):
        boot.advance("serving")
    else:
        boot.advance("warmup")


def _prefill(boot: Boot, e: ev.Prefill) -> None:
    _batch(boot)


def _decode_record(boot: Boot, e: ev.Decode) -> None:
    _batch(boot)
    boot.decodes += 1
    boot.first = boot.first or e
    boot.last = e
    _accepted(boot, e.values.get("accept_len"), e.values.get("accept_len"))


def _accepted(boot: Boot, low: object, high: object) -> None:
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        boot.accept_len_min = low if boot.accept_len_min is None else min(boot.accept_len_min, low)
        boot.accept_len_max = high if boot.accept_len_max is None else max(boot.accept_len_max, high)


def _steady(boot: Boot, e: ev.SteadyRun) -> None:
    if e.posts:
        _posted(boot, e.posts, local=e.local)
    _batch(boot)
    boot.decodes += e.decodes
    if e.first is not None:
        boot.first = boot.first or e.first
        boot.last = e.last
    _accepted(boot, e.accept_len_min, e.accept_len_max)


def _retraction(boot: Boot, e: ev.Retraction) -> None:
    boot.sglang = True
    boot.retractions += 1
    boot.warnings["retracted"] = None


def _health(boot: Boot, e: ev.HealthCheckFailed) -> None:
    boot.sglang = True
    boot.warnings["health_check_failed"] = None
    boot.trouble.add(e, boot.current, None)


def _bar(boot: Boot, e: ev.Bar) -> None:
    boot.bar = e
    if e.what == "weights" and boot.furthest <= _INDEX["weights"]:
        boot.advance("weights")
    elif e.what == "graphs" and boot.furthest <= _INDEX["graphs"]:
        boot.advance("graphs")


def _note(boot: Boot, e: ev.Note) -> None:
    # Without a request log's quoting nobody but SGLang prints this prefix; a few words are only its own.
    if "simulated" in e.text and boot.simulated is None and "SGLang" in e.text:
        boot.simulated = True
    if e.text.startswith(
        ("Registering ", "Capture cuda graph bs", "Using KV cache dtype", "Automatically reduce --mem-fraction-static")
    ):
        boot.sglang = True
    if "is larger than the profiled value" in e.text:
        boot.sglang = True


def _raw(boot: Boot, e: ev.Raw) -> None:
    if e.text.startswith("# simulated: "):
        boot.simulated = True
    if boot.args is None and (m := _COMMAND.search(e.text)):
        boot.command = m["command"].strip()
        if _FORCED.search(boot.command):
            boot.simulated_acceptance = True


def _foreign(boot: Boot, e: ev.Foreign) -> None:
    boot.foreign = e.program


def _trouble(boot: Boot, e: ev.Event) -> None:
    boot.trouble.add(e, boot.current or boot.phase, _during(boot, e.rank))
    if isinstance(e, (ev.StopAsked, ev.HealthCheckFailed)) or (
        isinstance(e, ev.Consequence) and e.dead and e.text not in ("Killed", "Aborted")
    ):
        boot.sglang = True
    if isinstance(e, ev.Traceback) and (
        e.owner in ("Scheduler", "warmup", "DetokenizerManager", "TokenizerManager", "DataParallelController")
        or any(map(is_own_frame, e.frames))
        or trace_cause(e) in _ONLY_SGLANG
    ):
        boot.sglang = True
    if isinstance(e, ev.Sign) and (
        e.cause == "watchdog_hang"
        or (
            e.cause in ("bad_arguments", "not_installed")
            and ("sglang" in e.text or e.text.startswith("launch_server.py"))
        )
    ):
        boot.sglang = True


def _during(boot: Boot, name: str | None) -> str | None:
    rank = boot.ranks.get(name)
    return rank.capturing if rank is not None else None


_HANDLERS: dict[type[ev.Event], Callable[[Boot, Any], None]] = {
    ev.LaunchHeader: _header,
    ev.Preamble: _preamble,
    ev.ServerArgsLine: _args,
    ev.DistInit: _dist,
    ev.WeightsBegin: _weights_begin,
    ev.WeightsEnd: _weights_end,
    ev.MambaCache: _mamba,
    ev.KvCache: _kv,
    ev.SlidingWindow: _swa,
    ev.PoolEnd: _pool_end,
    ev.GraphBegin: _graph_begin,
    ev.GraphEnd: _graph_end,
    ev.Sizes: _sizes,
    ev.Capped: _capped,
    ev.Http: _http,
    ev.Access: _access,
    ev.Ready: _ready,
    ev.Prefill: _prefill,
    ev.Decode: _decode_record,
    ev.SteadyRun: _steady,
    ev.Retraction: _retraction,
    ev.HealthCheckFailed: _health,
    ev.Bar: _bar,
    ev.Note: _note,
    ev.Raw: _raw,
    ev.Foreign: _foreign,
    ev.StopAsked: _trouble,
    ev.Consequence: _trouble,
    ev.WrapperSays: _trouble,
    ev.Traceback: _trouble,
    ev.Sign: _trouble,
}


# -- values of the summary -----------------------------------------------------------------------------------------------


def _rank_order(name: str | None) -> tuple[int, ...]:
    return tuple(int(n) for n in _RANK_NUMBERS.findall(name or ""))


def _memory(boot: Boot) -> dict[str, Any]:
    ordered = sorted(boot.ranks.items(), key=lambda item: _rank_order(item[0]))
    ordered = [(n, r) for n, r in ordered if r.loads or r.pools or r.graphs or r.sizes]
    out: dict[str, Any] = {}  # by the summary's own names
    if ordered:
        out["rank"] = ordered[0][0]
    elif boot.first is not None:
        out["rank"] = boot.first.rank
    speculative = bool(boot.args and boot.args.get("speculative_algorithm"))
    for _, rank in ordered:
        target, draft = _loads(rank, speculative)
        if target is not None and "weights" not in out:
            out["weights"] = target.values()
        if draft is not None and "draft" not in out:
            out["draft"] = draft.values()
    _elapsed(out, ordered, speculative)
    for _, rank in ordered:
        target_pool, draft_pool = _pools(rank)
        if target_pool is not None:
            for key, value in _pool_values(target_pool, rank).items():
                if value is not None:
                    out.setdefault(key, value)
        if draft_pool is not None and "kv_tokens" not in (draft_values := out.get("draft") or {}):
            out["draft"] = {**draft_values, **_draft_pool(draft_pool)}
        if rank.mamba is not None and "mamba_cache" not in out:
            m = rank.mamba
            out["mamba_cache"] = {
                "slots": m.slots,
                "conv_gb": m.conv_gb,
                "ssm_gb": m.ssm_gb,
                "intermediate_gb": m.intermediate_gb,
                "intermediate_conv_gb": m.intermediate_conv_gb,
            }
        if rank.graphs and "graphs" not in out:
            out.update(_graphs(rank.graphs))
        if rank.sizes is not None:
            for key, value in rank.sizes.items():
                out.setdefault(key, value)
    return out


def _loads(rank: _Rank, speculative: bool) -> tuple[_Load | None, _Load | None]:
    target = next((load for load in rank.loads if not load.is_draft), None)
    draft = next((load for load in rank.loads if load.is_draft), None)
    if draft is None and target is not None:
        later = rank.loads[rank.loads.index(target) + 1 :]
        draft = next(
            (load for load in later if speculative or (load.type is not None and load.type != target.type)), None
        )
    if draft is not None and target is not None and rank.loads.index(draft) < rank.loads.index(target):
        target = next((load for load in rank.loads if load is not draft and not load.is_draft and load.ended), None)
    return target, draft


def _elapsed(out: dict[str, object], ordered: list[tuple[str | None, _Rank]], speculative: bool) -> None:
    """The slowest rank's load time, where ranks differ."""
    for key, index in (("weights", 0), ("draft", 1)):
        times = [
            load.elapsed_s
            for _, r in ordered
            if (load := _loads(r, speculative)[index]) is not None and load.elapsed_s is not None
        ]
        values = out.get(key)
        if isinstance(values, dict) and len(set(times)) > 1:
            values["elapsed_max_s"] = max(times)


def _pools(rank: _Rank) -> tuple[_Pool | None, _Pool | None]:
    """(target's, draft's). The first pool is the target's, unless only a draft's load is visible and nothing tells whose it is."""
    pools = rank.pools
    if not pools:
        return None, None
    only_draft_load = bool(rank.loads) and all(load.is_draft for load in rank.loads)
    if len(pools) == 1 and only_draft_load and not pools[0].of_target and rank.sizes is None:
        return None, None
    return pools[0], pools[1] if len(pools) > 1 else None


def _split(pool: _Pool) -> tuple[ev.KvCache | None, ev.KvCache | None, ev.KvCache | None]:
    """(full attention, sliding window, a draft's whose own pool end was not printed). None where it cannot be told."""
    kv, swa = pool.kv, pool.swa
    if swa is not None and kv:
        if swa.full_tokens != swa.swa_tokens:
            full = next((k for k in kv if k.tokens == swa.full_tokens), None)
            return full, next((k for k in kv if k.tokens == swa.swa_tokens), None), None
        if len(kv) >= 2:
            return kv[1], kv[0], None
        return None, None, None
    if len(kv) <= 1:
        return (kv[0] if kv else None), None, None
    if len(kv) == 2:
        if kv[0].tokens == kv[1].tokens:
            return kv[0], None, kv[1]
        if kv[0].tokens is not None and kv[1].tokens is not None and kv[0].tokens < kv[1].tokens:
            return kv[1], kv[0], None  # the window's pool is allocated first, and it is the smaller one
    return None, None, None


def _kv_values(kv: ev.KvCache) -> dict[str, object]:
    out: dict[str, object] = {"tokens": kv.tokens, "k_gb": kv.k_gb, "v_gb": kv.v_gb}
    if kv.size_gb is not None:
        out["size_gb"] = kv.size_gb
    out["dtype"] = kv.dtype
    return out


def _pool_values(pool: _Pool, rank: _Rank) -> dict[str, object]:
    full, window, _ = _split(pool)
    swa: dict[str, object] | None = None
    if window is not None or pool.swa is not None:
        swa = (
            _kv_values(window)
            if window is not None
            else {"tokens": pool.swa.swa_tokens if pool.swa else None, "k_gb": None, "v_gb": None}
        )
        if pool.swa is not None and pool.swa.total_gb is not None:
            swa["total_gb"] = pool.swa.total_gb
    return {
        "kv_cache": _kv_values(full) if full is not None else None,
        "swa_cache": swa,
        "pool_end_avail_gb": pool.end_avail_gb,
    }


def _draft_pool(pool: _Pool) -> dict[str, object]:
    full, _, _ = _split(pool)
    if full is None:
        return {"kv_tokens": None, "pool_end_avail_gb": pool.end_avail_gb}
    return {
        "kv_tokens": full.tokens,
        "kv_k_gb": full.k_gb,
        "kv_v_gb": full.v_gb,
        "kv_size_gb": full.size_gb,
        "pool_end_avail_gb": pool.end_avail_gb,
    }


def _graphs(ended: list[ev.GraphEnd]) -> dict[str, object]:
    listed = [
        {"kind": g.graph or "target", "elapsed_s": g.elapsed_s, "mem_gb": g.mem_gb, "avail_gb": g.avail_gb}
        | ({"bs": list(g.bs)} if g.bs else {})
        for g in ended
    ]
    drafts = tuple(g for g in listed if str(g["kind"]).startswith("draft"))
    targets = [g for g in listed if not str(g["kind"]).startswith("draft")]
    decoding = [g for g in targets if g["kind"] in ("target", "target verify", "target decode", "decode", "verify")]
    graph = decoding[0] if decoding else targets[0] if len(targets) == 1 else None
    return {"graphs": tuple(listed), "draft_graphs": drafts, "graph": graph}


def _decode(boot: Boot) -> dict[str, object]:
    def record(e: ev.Decode | None) -> dict[str, object] | None:
        return None if e is None else {"time": e.time, "rank": e.rank, **e.values}

    return {
        "count": boot.decodes,
        "first": record(boot.first),
        "last": record(boot.last),
        "accept_len_min": boot.accept_len_min,
        "accept_len_max": boot.accept_len_max,
    }
