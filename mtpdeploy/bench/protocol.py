"""How a benchmark is run against one server: probe, then for each point warm-up, counters, load, counters, verdict.

The same code runs beside the server (in SGLang's own Python) and here; it hands out events as it goes, so that an interrupt or a
cut line leaves every point that was complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from mtpdeploy.bench import metrics, outputs
from mtpdeploy.bench.client import Client, Endpoint, EndpointError, Outcome, Ready
from mtpdeploy.bench.counters import Scrape, difference, was_reset
from mtpdeploy.bench.crew import Clients
from mtpdeploy.bench.sampler import GpuSamples
from mtpdeploy.bench.spool import Spool
from mtpdeploy.bench.target import Target, process_identity
from mtpdeploy.bench.template import ChatTemplate
from mtpdeploy.bench.template import find as find_template
from mtpdeploy.bench.values import Api, Measured, Message, Point, PointSpec, Prompt, Record, Request, RunSpec, Sample

PROBE_TOKENS = 4  # probe and warm-up together stay within 16 tokens a lane
WARMUP_TOKENS = 12
SEARCH_POINTS = 16
SEARCH_STEP = 0.05  # of the rate
POLL_S = 1.0  # the server's load while a point runs
PROGRESS_S = 0.25
SETTLE_S = 2.0  # the server's counters may come a moment after the last token
WINDOW_TRIES = 3  # a window that held others' work is measured again, so often in all
CALM_S = 1.0  # before it is
CROWDED_SAMPLES = 2  # a second apart: a health probe is gone by then

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """How requests are put for this server. The fields that a server refused in the probe are off."""

    api: Api
    model: str | None
    template: ChatTemplate | None = None
    kind: str = "openai"
    usage: bool = True
    per_chunk: bool = True
    spec_details: bool = True

    def body(self, request: Request, spec: RunSpec, salt: str) -> dict[str, Any]:
        """The JSON of one request. The salt comes first, so no two requests share a prefix beyond the template's own."""
        messages = _salted(request.prompt.messages, salt)
        if self.api == "sglang":
            text = self.template.render(messages) if self.template else Prompt("", "", messages).text
            sampling: dict[str, Any] = {"max_new_tokens": request.output_tokens, "temperature": spec.temperature}
            if spec.ignore_eos:
                sampling["ignore_eos"] = True
            return {"text": text, "sampling_params": sampling, "stream": True, **spec.extra_body}
        body: dict[str, Any] = {} if self.model is None else {"model": self.model}
        if self.api == "openai-chat":
            body["messages"] = [{"role": one.role, "content": one.content} for one in messages]
        else:
            body["prompt"] = Prompt("", "", messages).text
        body |= {"max_tokens": request.output_tokens, "temperature": spec.temperature, "stream": True}
        if self.usage:
            body["stream_options"] = {"include_usage": True}
            if self.per_chunk:
                body["stream_options"]["continuous_usage_stats"] = True
        if spec.ignore_eos:
            body["ignore_eos"] = True
        if self.spec_details and self.kind == "sglang":
            body["return_spec_tokens_details"] = True
        return {**body, **spec.extra_body}

    def simpler(self) -> Iterator[tuple[Shape, str]]:
        """What to ask next of a server that refuses a field, and what is lost by it."""
        if self.api == "sglang":
            return
        if self.spec_details and self.kind == "sglang":
            yield replace(self, spec_details=False), "no acceptance per request (return_spec_tokens_details refused)"
        if self.per_chunk:
            yield (
                replace(self, per_chunk=False, spec_details=False),
                "no token count per chunk (continuous_usage_stats refused): the size of the first chunk is unknown",
            )
        if self.usage:
            yield (
                replace(self, usage=False, per_chunk=False, spec_details=False),
                "no token counts at all (stream_options refused): per-token figures cannot be known",
            )


def _salted(messages: Sequence[Message], salt: str) -> tuple[Message, ...]:
    if not salt or not messages:
        return tuple(messages)
    first, *rest = messages
    return (Message(first.role, f"[{salt}] {first.content}"), *rest)


@dataclass
class Halt:
    """Asked for by Ctrl-C or a stop request: the point in progress is given up, what is complete stays."""

    asked: bool = False
    _told: list[Callable[[], None]] = field(default_factory=list)

    def ask(self) -> None:
        self.asked = True
        for tell in self._told:
            tell()

    @contextlib.contextmanager
    def telling(self, tell: Callable[[], None]) -> Iterator[None]:
        self._told.append(tell)
        try:
            yield
        finally:
            self._told.remove(tell)


async def measure(spec: RunSpec, emit: Emit, *, key: str | None = None, halt: Halt | None = None) -> None:
    """Runs every point of `spec`, in order, and emits what comes of it.

    Events: server {server, api, notes}; progress {point, of, done, requests, tok_s, left_s}; records {records};
    outputs {outputs}; measured {measured}; dropped {point, why, records, measured}; note {text}; skip {point, why}.
    EndpointError: the server cannot be measured at all.
    """
    halt = halt or Halt()
    nonce = (spec.nonce or secrets.token_hex(3)) if spec.salt else ""
    async with Target(spec.url, key) as target:
        server = await target.identity() | _process(spec)
        shape, notes = await _shape(spec, server, key, nonce)
        emit({"what": "server", "server": server, "api": shape.api, "notes": notes, "template": _source(shape)})
        clients = Clients(_endpoint(spec, shape.api, key), timeout_s=spec.timeout_s, processes=spec.client_processes)
        try:
            run = Run(spec, shape, clients, target, emit, halt, nonce, bool(server.get("incremental_streaming_output")))
            await (search(run) if spec.stop.search else sweep(run))
        finally:
            clients.close()


@dataclass(frozen=True)
class Run:
    """One benchmark in progress: what every point needs."""

    spec: RunSpec
    shape: Shape
    clients: Clients
    target: Target
    emit: Emit
    halt: Halt
    nonce: str
    incremental: bool  # /generate sends only what is new with every event
    windows: Counter[str] = field(default_factory=Counter)  # how often each load was measured

    async def measure(self, point: PointSpec) -> Point:
        """One window, or, if others' work was seen in it, another; the last one counts, and says which went before it."""
        dropped: list[str] = []
        while True:
            self.emit({"what": "progress", "point": point.index, "label": point.label, "stage": "warm-up"})
            window = await _window(self, point)
            facts = window.facts
            if not facts.foreign or self.halt.asked or len(dropped) + 1 >= WINDOW_TRIES:
                break
            dropped += facts.foreign
            self.emit({"what": "dropped", "point": point.index, "why": list(facts.foreign), **window.as_json()})
            self.emit(
                {
                    "what": "note",
                    "text": f"{point.label}: a window with other work in it ({'; '.join(facts.foreign)}) is dropped and measured again",
                }
            )
            await asyncio.sleep(CALM_S)
        window = replace(window, facts=replace(facts, windows_dropped=tuple(dropped)))
        told = window.as_json()
        self.emit({"what": "records", "records": told["records"]})
        if window.outputs:
            self.emit({"what": "outputs", "outputs": list(window.outputs)})
        self.emit({"what": "measured", "measured": told["measured"]})
        return metrics.point(window.records, window.facts, index=point.index)

    def mark(self, point: PointSpec) -> str:
        """Starts the salts of one window: the same for the same load in another run, never twice in this one."""
        load = [point.process, point.concurrency, point.rate, point.input_tokens, point.output_tokens, point.repeat]
        name = hashlib.sha256(repr(load).encode()).hexdigest()[:4]
        self.windows[name] += 1
        return f"{self.nonce}{name}" + (f".{self.windows[name]}" if self.windows[name] > 1 else "")

    def skip(self, point: PointSpec, why: str) -> None:
        self.emit({"what": "skip", "point": point.index, "why": why})


async def sweep(run: Run) -> None:
    """Every point in order; where a sweep is to stop at saturation, the rest of its values is left out, in all repeats."""
    done: list[Point] = []
    left_out: dict[tuple[object, ...], str] = {}
    for point in run.spec.points:
        if run.halt.asked:
            return
        load = (point.arm, point.process, point.concurrency, point.rate, point.input_tokens, point.output_tokens)
        why = left_out.get(load)
        if why is None and run.spec.stop.at_saturation and point.repeat == 0:
            why = _enough([one for one in done if _same_sweep(one, point)], run.spec.stop.gain)
        if why is not None:
            left_out[load] = why
            run.skip(point, why)
            continue
        done.append(await run.measure(point))


def _same_sweep(done: Point, upcoming: PointSpec) -> bool:
    return (done.arm, done.input_length, done.output_length, done.repeat) == (
        upcoming.arm,
        upcoming.input_tokens,
        upcoming.output_tokens,
        upcoming.repeat,
    )


def _enough(same: Sequence[Point], gain: float) -> str | None:
    """Why a sweep ends here, if it does."""
    if not same:
        return None
    if any(reason.startswith("unstable") for reason in same[-1].invalid_because):
        return "the point before was unstable: more load has no steady state either"
    if len(same) >= 2 and metrics.saturated(same[-2], same[-1], gain):
        by_client = any(reason.startswith("the client") for one in same[-2:] for reason in one.invalid_because)
        return f"saturated: the last value brought under {gain:.0%} more output tok/s" + (
            "; the client was the bottleneck there, so this is not the server's limit" if by_client else ""
        )
    return None


async def search(run: Run) -> None:
    """The highest load that keeps the limits: doubles from the first point until they break, then halves the step.

    Concurrency to the request, rate to SEARCH_STEP of itself. A point that cannot decide (invalid for another reason than
    being unstable, or too few samples) ends the search, and says so.
    """
    base = run.spec.points[0]
    limits = metrics.parse_slo(",".join(run.spec.stop.slo))
    good, bad = 0.0, None
    load = float(base.rate or base.concurrency or 1)
    for number in range(SEARCH_POINTS):
        if run.halt.asked:
            return
        point = loaded(base, load, number, requests_fixed=run.spec.stop.requests_fixed)
        if not base.open_loop and load > len(point.requests):
            run.skip(
                point, f"the search ends: {len(point.requests)} requests cannot fill {load:.0f} lanes; raise --requests"
            )
            return
        made = await run.measure(point)
        unstable = any(reason.startswith("unstable") for reason in made.invalid_because)
        values = [(limit, limit.of(made)) for limit in limits]
        if not unstable and (not made.valid or any(value is None for _, value in values)):
            unknown = ", ".join(str(limit) for limit, value in values if value is None)
            why = (
                made.invalid_because[0] if made.invalid_because else f"{unknown} cannot be decided with so few requests"
            )
            run.skip(replace(point, index=number + 1), f"the search ends: {why}")
            return
        keeps = not unstable and all(limit.holds(value) for limit, value in values if value is not None)
        good, bad = (load, bad) if keeps else (good, load)
        if bad is None:
            load *= 2
        elif base.open_loop:
            if bad - good <= SEARCH_STEP * bad:
                return
            load = (good + bad) / 2
        else:
            load = float((good + bad) // 2)
            if load in (good, bad, 0.0):
                return


def loaded(base: PointSpec, load: float, index: int, *, requests_fixed: bool) -> PointSpec:
    """The point under another load: more lanes with as many more requests (unless their number is fixed), or the same
    arrivals drawn closer together."""
    if base.open_loop:
        factor = (base.rate or load) / load
        requests = tuple(replace(one, at_s=None if one.at_s is None else one.at_s * factor) for one in base.requests)
        return replace(base, index=index, rate=load, requests=requests)
    lanes = int(load)
    count = len(base.requests) if requests_fixed else max(len(base.requests), 2 * lanes)
    requests = tuple(replace(base.requests[place % len(base.requests)], index=place) for place in range(count))
    warmup = base.warmup and tuple(
        replace(base.warmup[place % len(base.warmup)], index=place) for place in range(lanes)
    )
    return replace(base, index=index, concurrency=lanes, requests=requests, warmup=warmup)


def _endpoint(spec: RunSpec, api: Api, key: str | None) -> Endpoint:
    return Endpoint(spec.url, api, {"Authorization": f"Bearer {key}"} if key else {})


def _process(spec: RunSpec) -> dict[str, Any]:
    """The launch's process, where the benchmark runs beside it and was told which it is."""
    pid = spec.expect.get("pid")
    told = process_identity(pid) if isinstance(pid, int) else {}
    return told | {name: spec.expect[name] for name in ("launch_id", "boot") if name in spec.expect}


def _source(shape: Shape) -> str:
    if shape.api == "openai-chat":
        return "the server's own"
    return shape.template.source if shape.template else "none"


async def _shape(spec: RunSpec, server: Mapping[str, Any], key: str | None, nonce: str) -> tuple[Shape, list[str]]:
    """Route and fields that this server takes, found with requests of a few tokens. Raises what a user must know."""
    models = server.get("models") or [None]
    model = spec.model or models[0]
    notes: list[str] = []
    kind = str(server.get("kind", "openai"))
    template = find_template(server) if kind == "sglang" else None
    if spec.api:
        apis: list[Api] = [spec.api]
    elif kind == "sglang" and template:
        apis = ["sglang", "openai-chat", "openai"]
    else:
        apis = ["openai-chat", "openai"]
    if spec.model and models != [None] and spec.model not in models and kind != "openai":
        notes.append(f"the server calls its model {models[0]!r}, not {spec.model!r}; SGLang answers to any name")
    first: Record | None = None
    for api in apis:
        shape = Shape(api, model, template if api == "sglang" else None, kind)
        record: Record | None = None
        for attempt, loss in ((shape, ""), *shape.simpler()):
            record = await _probe(spec, attempt, key, nonce)
            if record.ok or record.error_kind == "empty":
                return attempt, notes + ([loss] if loss else [])
            first = first or record
            if record.http_status not in (400, 422):
                break
        if record is None or record.http_status not in (404, 405, 501):
            break  # the route is there; another one would fail in the same way
    assert first is not None
    raise EndpointError(first.error_kind or "error", f"{spec.url}: {first.error}")


async def _probe(spec: RunSpec, shape: Shape, key: str | None, nonce: str) -> Record:
    prompt = Prompt("probe", "warm-up", (Message("user", "Say hello in one short sentence."),))
    request = Request(0, prompt, PROBE_TOKENS)
    endpoint = _endpoint(spec, shape.api, key)
    client = Client(endpoint, timeout_s=min(spec.timeout_s, 120.0))
    try:
        ready = Ready(request, endpoint.encode(shape.body(request, spec, f"{nonce}-probe" if nonce else "")))
        records: list[Record] = []
        await client.closed_loop([ready], 1, -1, records.append)
        return records[0]
    finally:
        client.close()


@dataclass(frozen=True, slots=True)
class Window:
    """One measurement of a point."""

    records: Sequence[Record]
    facts: Measured
    outputs: Sequence[Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return {"records": [record.as_json() for record in self.records], "measured": self.facts.as_json()}


async def _window(run: Run, point: PointSpec) -> Window:
    """Warm-up, counters, load, counters. What an interrupt leaves is kept and marked."""
    spec, shape, target, emit, halt = run.spec, run.shape, run.target, run.emit, run.halt
    client = run.clients.of(point)
    endpoint = client.endpoint
    mark = run.mark(point) if run.nonce else ""
    wanted = _to_keep(run, point)

    def salt(one: Request, kind: str = "") -> str:
        return f"{mark}-{kind}{one.index}" if mark else ""

    def ready(requests: Sequence[Request], kind: str = "") -> list[Ready]:
        """Everything is encoded before the clock runs. Salts differ by load, window and request."""
        return [
            Ready(one, endpoint.encode(shape.body(one, spec, salt(one, kind))), None if kind else wanted.get(one.index))
            for one in requests
        ]

    if spec.flush_cache and (refused := await target.flush_cache()):
        emit({"what": "note", "text": f"the prefix cache was not flushed: {refused}"})
    before_warmup = await target.scrape()
    with halt.telling(client.stop):
        if point.warmup and not halt.asked:
            await client.closed_loop(ready(point.warmup, "w"), len(point.warmup), -1, lambda record: None)
    if before_warmup is not None:
        await _settled(target, before_warmup, len(point.warmup))
    work = ready(point.requests)
    server_before = await _identity(target, spec)
    counters_before = await target.scrape()
    spool = Spool()
    gpu = GpuSamples()
    samples: list[Sample] = []
    started = time.monotonic_ns()
    started_utc = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%S.%f}Z"
    side = [asyncio.ensure_future(_progress(point, spool, emit, started))]
    if counters_before is not None:
        side.append(asyncio.ensure_future(_poll(target, samples, started)))
    if spec.gpu_samples and gpu.source:
        side.append(asyncio.ensure_future(gpu.run(started)))
    with halt.telling(client.stop):
        try:
            if halt.asked:
                outcome = Outcome(dropped=True)
            elif point.open_loop:
                outcome = await client.open_loop(work, point.index, spool.append, cap=point.concurrency)
            else:
                outcome = await client.closed_loop(work, point.concurrency or 1, point.index, spool.append)
        finally:
            for task in side:
                task.cancel()
            await asyncio.gather(*side, return_exceptions=True)
    records = list(spool)
    spool.close()
    counters_after = None
    if counters_before is not None:
        done = sum(record.ok for record in records)
        counters_after = await _settled(target, counters_before, done, _tokens(records))
    facts = Measured(
        point=point.index,
        started_utc=started_utc,
        duration_s=outcome.wall_s,
        spec={
            "concurrency": point.concurrency,
            "rate": point.rate,
            "process": point.process,
            "repeat": point.repeat,
            "arm": point.arm,
            "requests": len(point.requests),
            "input_tokens": point.input_tokens,
            "output_tokens": point.output_tokens,
        },
        samples=tuple(samples),
        client=_self_check(outcome),
        gpu=tuple(gpu.samples),
        server_before=server_before,
        server_after=await _identity(target, spec),
        complete=not outcome.dropped,
    )
    if counters_before is not None and counters_after is not None:
        gained, histograms = difference(counters_before, counters_after)
        facts = replace(facts, counters=gained, histograms=histograms, gauges=dict(counters_after.gauges))
        if was_reset(counters_before, counters_after):
            facts = replace(facts, server_after={**facts.server_after, "reset": "its counters fell"})
        else:
            facts = replace(facts, foreign=_foreign(gained, records, samples, point.concurrency))
    said = [_output(run, point, one, salt(one), outcome.kept.get(one.index)) for one in point.requests if wanted]
    return Window(records, facts, [one for one in said if one])


def _to_keep(run: Run, point: PointSpec) -> dict[int, int]:
    """Bytes of events to keep by a request's index: each prompt's first answer, where another run can have the same one."""
    if run.spec.temperature != 0:
        return {}
    size = outputs.EVENT_BYTES if run.incremental or run.shape.api != "sglang" else 0
    first: dict[str, int] = {}
    for one in point.requests:
        first.setdefault(one.prompt.id, one.index)
    return dict.fromkeys(list(first.values())[: outputs.ANSWERS], size)


def _output(
    run: Run, point: PointSpec, one: Request, salt: str, events: Sequence[bytes] | None
) -> Mapping[str, Any] | None:
    api = run.shape.api
    told = outputs.read(api, events, incremental=run.incremental or api != "sglang") if events else None
    if told is None:
        return None
    sent = outputs.sent(_salted(one.prompt.messages, salt), one.output_tokens)
    return {"point": point.index, "index": one.index, "prompt_id": one.prompt.id, "sent": sent, **told}


async def _identity(target: Target, spec: RunSpec) -> dict[str, Any]:
    try:
        return await target.identity() | _process(spec)
    except EndpointError as exc:
        return {"gone": str(exc)} | _process(spec)


async def _settled(target: Target, before: Scrape, requests: int, tokens: int | None = None) -> Scrape | None:
    """The counters once they have taken in what was sent, or after a moment anyway."""
    until = time.monotonic() + SETTLE_S
    while True:
        now = await target.scrape()
        if now is None or time.monotonic() > until:
            return now
        finished = None if now.finished is None else now.finished - (before.finished or 0.0)
        generated = None if now.generated is None else now.generated - (before.generated or 0.0)
        if (finished is None or finished >= requests) and (tokens is None or generated is None or generated >= tokens):
            return now
        await asyncio.sleep(0.1)


def _tokens(records: Sequence[Record]) -> int:
    return sum(record.output_tokens or 0 for record in records)


def _foreign(
    gained: Mapping[str, float], records: Sequence[Record], samples: Sequence[Sample], lanes: int | None
) -> tuple[str, ...] | None:
    """Work of others in the window, by the server's counters. Health probes of one token each are below the limit."""
    finished = gained.get("sglang:num_requests_total", gained.get("vllm:request_success_total"))
    generated = gained.get("sglang:generation_tokens_total", gained.get("vllm:generation_tokens_total"))
    # The counters move when a request ends: one that runs through the whole window is only seen among those running.
    levels = [(sample.running or 0) + (sample.queued or 0) for sample in samples if sample.running is not None]
    crowded = [level for level in levels if lanes is not None and level > lanes]
    found = []
    if len(crowded) >= CROWDED_SAMPLES:
        found.append(f"{max(crowded):.0f} requests at the server, of which this client had at most {lanes}")
    if generated is None:
        return tuple(found) if found or levels else None
    own = _tokens(records)
    unknown = any(record.output_tokens is None for record in records)  # failed requests made tokens that nobody counted
    more = generated - own
    if not unknown and more > max(metrics.FOREIGN_TOKENS_LIMIT * own, 16):
        others = f"{finished - len(records):.0f} requests and " if finished and finished > len(records) else ""
        found.append(f"{others}{more:.0f} output tokens that this client did not ask for")
    return tuple(found)


def _self_check(outcome: Outcome) -> dict[str, object]:
    """Of several client processes the one that was late most often, and the busiest one's share of its core."""
    parts = outcome.parts or (outcome,)
    lags = max(
        (sorted(part.loop_lags_ms) for part in parts), key=lambda one: metrics.quantile(one, 0.9) if one else 0.0
    )
    return {
        "processes": len(parts),
        "uvloop": "uvloop" in type(asyncio.get_running_loop()).__module__,
        "cpu_share": outcome.cpu_share,
        "cpu_s": outcome.cpu_s,
        "loop_lag_p50_ms": metrics.quantile(lags, 0.5) if lags else None,
        "loop_lag_p90_ms": metrics.quantile(lags, 0.9) if len(lags) >= metrics.NEEDED["p90"] else None,
        "loop_lag_p99_ms": metrics.quantile(lags, 0.99) if lags else None,
        "reconnects": outcome.reconnects,
        "host_load": _host_load(),
    }


def _host_load() -> float | None:
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return None


async def _poll(target: Target, samples: list[Sample], started: int) -> None:
    while True:
        await asyncio.sleep(POLL_S)
        read = await target.scrape()
        if read is not None:
            samples.append(Sample((time.monotonic_ns() - started) / 1e9, read.running, read.queued))


async def _progress(point: PointSpec, records: Spool, emit: Emit, started: int) -> None:
    total = len(point.requests)
    while True:
        await asyncio.sleep(PROGRESS_S)
        passed = (time.monotonic_ns() - started) / 1e9
        done, tokens = records.count, records.output_tokens
        emit(
            {
                "what": "progress",
                "point": point.index,
                "stage": "load",
                "done": done,
                "requests": total,
                "failed": records.failed,
                "tok_s": tokens / passed if tokens else None,
                "left_s": passed / done * (total - done) if done else None,
            }
        )


def run(spec: RunSpec, emit: Emit, *, key: str | None = None, halt: Halt | None = None) -> None:
    """`measure` on an event loop of its own: uvloop's where it is installed. Ctrl-C stops the point, twice stops at once."""
    import signal
    import threading

    try:
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
        emit(
            {
                "what": "note",
                "text": "uvloop is not installed here: the client is slower, its own check says if too slow",
            }
        )
    halt = halt or Halt()
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers} if main else {}
    try:
        asyncio.set_event_loop(loop)
        task = loop.create_task(measure(spec, emit, key=key, halt=halt))

        def interrupted() -> None:
            if halt.asked:
                task.cancel()
            halt.ask()

        if main:
            with contextlib.suppress(NotImplementedError, RuntimeError):
                for number in numbers:
                    loop.add_signal_handler(number, interrupted)
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
    finally:
        if main:
            with contextlib.suppress(NotImplementedError, RuntimeError):
                for number in numbers:
                    loop.remove_signal_handler(number)
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()
        for number, handler in before.items():  # a loop leaves its own defaults behind
            if handler is not None:
                signal.signal(number, handler)
