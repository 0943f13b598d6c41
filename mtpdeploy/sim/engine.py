"""The scheduler: a queue, running requests, prefill batches and decode steps on an absolute schedule.

One simulated second lasts 1 / clock real seconds. A step that the event loop can't keep up with is late, as a real one
would be: whoever measures sees the truth of this server.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mtpdeploy.sim.launch import Launch
from mtpdeploy.sim.metrics import FIRST_TOKEN_S, LATENCY_S, Histogram, Totals, count
from mtpdeploy.sim.timing import Acceptance, Text, Timing

_PAGE = 64  # tokens a remembered prefix grows by
# How much of what a request may still generate is kept free for it when it is admitted: SGLang starts at 0.7, comes down
# to 0.14 of that over 600 steps, and learns from a retraction (managers/scheduler_components/new_token_ratio_tracker.py).
_RATIO_START, _RATIO_LEAST, _RATIO_STEPS, _RETRACT_STEPS = 0.7, 0.098, 600, 20


@dataclass(slots=True)
class Job:
    """One request. `chunks`: token counts as they were emitted; the reader waits on `changed`."""

    rid: str
    prompt: str
    prompt_tokens: int
    limit: int
    ignore_eos: bool
    text: Text
    arrived: float
    streaming: bool = False
    cached_tokens: int = 0
    retractions: int = 0
    last_given: float = 0.0
    emitted: int = 0
    verify_steps: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    started: float | None = None
    finished: str | None = None  # stop, length, abort
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    first_token: float | None = None

    @property
    def goal(self) -> int:
        return self.limit if self.ignore_eos else min(self.limit, self.text.natural_tokens)


class Engine:
    """Runs in the server's event loop; `say` writes a log line."""

    def __init__(self, launch: Launch, say: Callable[[str], None]) -> None:
        self.launch, self._say = launch, say
        self._clock = launch.simulate.clock
        self._timing = Timing(
            launch.draft_tokens, launch.settings.ssm_dtype == "float32" and not launch.settings.replayssm
        )
        dead = launch.fault == "draft-dead"
        self._acceptance = Acceptance(
            launch.settings.steps if launch.draft_tokens else 0,
            1.0 if dead else launch.simulate.accept_length,
            launch.forced_accept_length,
        )
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.totals = Totals()
        self.throughput = 0.0
        self.accept_length: float | None = None
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._work = asyncio.Event()
        self._serial = itertools.count()
        self._steps_since_report = 0
        self._since = (time.perf_counter(), 0)
        self._line_spec = (0, 0)  # tokens and verify steps since the last Decode line
        self.stuck = False
        self.ratio = _RATIO_START

    # ------------------------------------------------------------ the outside

    def submit(
        self,
        rid: str,
        prompt: str,
        prompt_tokens: int,
        limit: int,
        ignore_eos: bool,
        temperature: float,
        streaming: bool = False,
    ) -> Job:
        serial = next(self._serial)
        text = Text.of(prompt, temperature, serial ^ os.getpid())
        job = Job(rid, prompt, prompt_tokens, limit, ignore_eos, text, time.perf_counter(), streaming)
        job.histogram = [0] * (self.launch.settings.steps + 1 if self.launch.draft_tokens else 1)
        self.waiting.append(job)
        self._work.set()
        if self.launch.fault == "hang-serving" and serial >= 5:
            self.stuck = True
        return job

    def abort(self, rid: str | None) -> int:
        """Ends one request, or all with None; how many."""
        ended = [job for job in (*self.running, *self.waiting) if rid is None or job.rid == rid]
        for job in ended:
            self._end(job, "abort")
            self.totals.aborted += 1
        self.running = [job for job in self.running if job.finished is None]
        self.waiting = deque(job for job in self.waiting if job.finished is None)
        return len(ended)

    def flush(self) -> bool:
        """Empties the prefix cache and the acceptance statistics; False if there is work."""
        if self.running or self.waiting:
            return False
        self._prefixes.clear()
        self.totals.spec_tokens = self.totals.spec_steps = 0
        self.accept_length = None
        self.ratio = _RATIO_START
        return True

    @property
    def used_tokens(self) -> int:
        return sum(job.prompt_tokens + job.emitted for job in self.running)

    @property
    def used_slots(self) -> int:
        per = self.launch.pools.slots_per_request or 1
        return len(self.running) * max(1, per - 1 if per > 1 else 1)

    @property
    def kv_usage(self) -> float:
        return self.used_tokens / max(1, self.launch.pools.kv_tokens)

    @property
    def state_usage(self) -> float:
        return self.used_slots / self.launch.pools.slots if self.launch.pools.slots else 0.0

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        due = time.perf_counter()
        while True:
            if self.stuck or not (self.running or self.waiting):
                self._work.clear()
                await self._work.wait()
                due = time.perf_counter()
                if self.stuck:
                    await asyncio.sleep(3600)
                self._since = (due, 0)
            fresh = self._admit()
            seconds = self._prefill(fresh) if fresh else self._timing.decode_s(len(self.running), self.used_tokens)
            due = max(due + seconds / self._clock, time.perf_counter() - 0.05)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self._emit_first(fresh) if fresh else self._decode()

    def _admit(self) -> list[Job]:
        fresh: list[Job] = []
        tokens = 0
        room = self.launch.pools.kv_tokens - sum(
            job.prompt_tokens + job.emitted + round(self.ratio * (job.limit - job.emitted)) for job in self.running
        )
        while self.waiting and len(self.running) + len(fresh) < self.launch.pools.max_running:
            job = self.waiting[0]
            need = job.prompt_tokens + job.emitted + round(self.ratio * (job.limit - job.emitted))
            if fresh and tokens + job.prompt_tokens > max(2048, self.launch.settings.chunk):
                break
            if need > room and (self.running or fresh):
                break
            room -= need
            job.cached_tokens = self._cached(job)
            tokens += job.prompt_tokens - job.cached_tokens
            fresh.append(self.waiting.popleft())
        return fresh

    def _prefill(self, fresh: list[Job]) -> float:
        new = sum(job.prompt_tokens + job.emitted - job.cached_tokens for job in fresh)
        cached = sum(job.cached_tokens for job in fresh)
        self.totals.cached_tokens += cached
        self.totals.computed_tokens += new
        self.totals.prefill_passes += 1
        seconds = self._timing.prefill_s(new)
        version = self.launch.version
        pending = (
            f"#pending-token: {sum(job.prompt_tokens for job in self.waiting)}, " if version.at_least("0.5.11") else ""
        )
        end = "" if version.at_least("0.5.9") else ", "
        usage = (
            f"full token usage: {self.kv_usage:.2f}, mamba usage: {self.state_usage:.2f}"
            if self.launch.model.hybrid
            else f"token usage: {self.kv_usage:.2f}"
        )
        graph = str(self.launch.settings.prefill_graphs)
        self._say(
            f"Prefill batch, #new-seq: {len(fresh)}, #new-token: {new}, #cached-token: {cached}, {usage}, "
            f"#running-req: {len(self.running)}, #queue-req: {len(self.waiting)}, {pending}cuda graph: {graph}, "
            f"input throughput (token/s): {new / (seconds / self._clock):.2f}{end}"
        )
        now = time.perf_counter()
        for job in fresh:
            if job.started is None:
                job.started = now
                self.totals.queue_s.observe(now - job.arrived)
        return seconds

    def _emit_first(self, fresh: list[Job]) -> None:
        now = time.perf_counter()
        for job in fresh:
            if job.finished is None:
                if job.first_token is None:  # one that was retracted had its first token before
                    job.first_token = now
                    _observe(self.totals.ttft_s, FIRST_TOKEN_S, job.streaming, now - job.arrived)
                self._give(job, 1)
                if job.finished is None:
                    self.running.append(job)

    def _retract(self) -> None:
        """Sends requests back to the queue until the next step's tokens fit; the last one left is ended if it cannot grow."""
        step = self.launch.draft_tokens or 1
        gone: list[Job] = []
        before, ratio = self.used_tokens, self.ratio
        while len(self.running) > 1 and self.used_tokens + step * len(self.running) > self.launch.pools.kv_tokens:
            job = min(self.running, key=lambda one: (one.emitted, -one.prompt_tokens))
            self.running.remove(job)
            job.retractions += 1
            gone.append(job)
        if self.running and self.used_tokens + step * len(self.running) > self.launch.pools.kv_tokens:
            self._say(f"retract_decode: aborted last request {self.running[0].rid} due to OOM")
            self._end(self.running.pop(), "abort")
            self.totals.aborted += 1
        if not gone:
            self.ratio = max(_RATIO_LEAST, self.ratio - (_RATIO_START - _RATIO_LEAST) / _RATIO_STEPS)
            return
        self.ratio = min(
            1.0,
            (sum(job.emitted for job in self.running) + _RETRACT_STEPS * len(self.running))
            / (sum(job.limit for job in self.running) + 1),
        )
        self.totals.retracted += len(gone)
        slots = f", #mamba_num_gained: {len(gone)}" if self.launch.model.hybrid else ""
        self._say(
            f"KV cache pool is full. Retract requests. #retracted_reqs: {len(gone)}, #new_tokens_gained: "
            f"{before - self.used_tokens}{slots}, #new_token_ratio: {ratio:.4f} -> {self.ratio:.4f}"
        )
        self.waiting.extendleft(reversed(gone))

    def _decode(self) -> None:
        self._retract()
        together = self._acceptance.for_batch()
        emitted = 0
        for job in self.running:
            if self.launch.draft_tokens:
                tokens = together or self._acceptance.tokens(job.text.ease)
                job.verify_steps += 1
                job.accepted += tokens - 1
                job.histogram[min(tokens - 1, len(job.histogram) - 1)] += 1
                self.totals.spec_steps += 1
                self.totals.spec_tokens += tokens
                self._line_spec = (self._line_spec[0] + tokens, self._line_spec[1] + 1)
            else:
                tokens = 1
            emitted += self._give(job, tokens)
        self.totals.decode_passes += 1
        self.totals.decoded_tokens += emitted
        batch = len(self.running)
        started, tokens_before = self._since
        self._since = (started, tokens_before + emitted)
        self._steps_since_report += 1
        if self._steps_since_report >= self.launch.number("decode_log_interval", 40):
            self._report(batch)
        self.running = [job for job in self.running if job.finished is None]

    def _give(self, job: Job, tokens: int) -> int:
        given = min(tokens, job.goal - job.emitted)
        now = time.perf_counter()
        if job.emitted and given:
            # SGLang observes a chunk's gap divided by its tokens, once for each of them
            gap = now - job.last_given
            self.totals.token_s.observe(gap / given, given, gap)
        job.last_given = now
        job.emitted += given
        if job.emitted >= job.goal:
            self._end(job, "length" if job.emitted >= job.limit else "stop")
        else:
            job.changed.set()
        return given

    def _end(self, job: Job, why: str) -> None:
        job.finished = why
        if why != "abort":
            totals = self.totals
            _observe(totals.e2e_s, LATENCY_S, job.streaming, time.perf_counter() - job.arrived)
            totals.verify_calls += job.verify_steps
            count(totals.requests, job.streaming)
            count(totals.prompt_tokens, job.streaming, job.prompt_tokens)
            count(totals.generation_tokens, job.streaming, job.emitted)
            totals.prompts.observe(job.prompt_tokens)
            totals.generations.observe(job.emitted)
            self._remember(job)
        job.changed.set()

    def _report(self, batch: int) -> None:
        """One "Decode batch" line, in the version's own words."""
        now = time.perf_counter()
        started, tokens = self._since
        self.throughput = tokens / max(1e-9, now - started)
        self._since = (now, 0)
        self._steps_since_report = 0
        line_tokens, line_steps = self._line_spec
        self._line_spec = (0, 0)
        launch, version = self.launch, self.launch.version
        accept = ""
        if launch.draft_tokens and line_steps:
            length = line_tokens / line_steps
            # /server_info has the mean since the start or the last flush, the line the mean since the last line
            self.accept_length = self.totals.spec_tokens / max(1, self.totals.spec_steps)
            rate = (
                length / launch.draft_tokens
                if version.before("0.5.11")
                else (length - 1) / max(1, launch.draft_tokens - 1)
            )
            accept = f"accept len: {length:.2f}, accept rate: {rate:.2f}, "
        usage = (
            f"#full token: {self.used_tokens}, full token usage: {self.kv_usage:.2f}, mamba num: {self.used_slots}, "
            f"mamba usage: {self.state_usage:.2f}"
            if launch.model.hybrid
            else f"#token: {self.used_tokens}, token usage: {self.kv_usage:.2f}"
        )
        end = "" if version.at_least("0.5.9") else ", "
        self._say(
            f"Decode batch, #running-req: {batch}, {usage}, {accept}cuda graph: {launch.settings.decode_graphs}, "
            f"gen throughput (token/s): {self.throughput:.2f}, #queue-req: {len(self.waiting)}{end}"
        )

    # ------------------------------------------------------------ prefix cache

    def _pages(self, job: Job) -> list[int]:
        """A rolling hash of the prompt after each page; a token is taken as four characters."""
        width = _PAGE * 4
        return [hash(job.prompt[:end]) for end in range(width, len(job.prompt) + 1, width)]

    def _cached(self, job: Job) -> int:
        if not self.launch.settings.radix:
            return 0
        known = 0
        for page in self._pages(job):
            if page not in self._prefixes:
                break
            known += 1
        return min(known * _PAGE, max(0, job.prompt_tokens - 1))

    def _remember(self, job: Job) -> None:
        for page in self._pages(job):
            self._prefixes[page] = None
            self._prefixes.move_to_end(page)
        while len(self._prefixes) > self.launch.pools.kv_tokens // _PAGE:
            self._prefixes.popitem(last=False)
            self.totals.evicted_tokens += _PAGE


def _observe(into: dict[str, Histogram], bounds: tuple[float, ...], streaming: bool, seconds: float) -> None:
    into.setdefault(str(streaming).lower(), Histogram(bounds)).observe(seconds)
