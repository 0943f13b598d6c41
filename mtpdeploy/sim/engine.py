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
from mtpdeploy.sim.timing import Acceptance, Text, Timing

_PAGE = 64  # tokens a remembered prefix grows by


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
    cached_tokens: int = 0
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


@dataclass(slots=True)
class Totals:
    """Counters since the start or the last flush where SGLang resets them."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    aborted: int = 0
    verify_calls: int = 0
    spec_tokens: int = 0
    spec_steps: int = 0
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)


class Engine:
    """Runs in the server's event loop; `say` writes a log line."""

    def __init__(self, launch: Launch, say: Callable[[str], None]) -> None:
        self.launch, self._say = launch, say
        self._clock = launch.simulate.clock
        self._timing = Timing(launch.draft_tokens, launch.settings.ssm_dtype == "float32")
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

    # ------------------------------------------------------------ the outside

    def submit(
        self, rid: str, prompt: str, prompt_tokens: int, limit: int, ignore_eos: bool, temperature: float
    ) -> Job:
        serial = next(self._serial)
        text = Text.of(prompt, temperature, serial ^ os.getpid())
        job = Job(rid, prompt, prompt_tokens, limit, ignore_eos, text, time.perf_counter())
        job.histogram = [0] * (self.launch.settings.steps + 1 if self.launch.draft_tokens else 1)
        self.totals.requests += 1
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
        room = self.launch.pools.kv_tokens - sum(job.prompt_tokens + job.goal for job in self.running)
        while self.waiting and len(self.running) + len(fresh) < self.launch.pools.max_running:
            job = self.waiting[0]
            need = job.prompt_tokens + job.goal
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
        new = sum(job.prompt_tokens - job.cached_tokens for job in fresh)
        cached = sum(job.cached_tokens for job in fresh)
        self.totals.prompt_tokens += new + cached
        self.totals.cached_tokens += cached
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
            job.started = now
        return seconds

    def _emit_first(self, fresh: list[Job]) -> None:
        now = time.perf_counter()
        for job in fresh:
            if job.finished is None:
                job.first_token = now
                self.totals.ttft_s.append(now - job.arrived)
                self._give(job, 1)
                if job.finished is None:
                    self.running.append(job)

    def _decode(self) -> None:
        together = self._acceptance.for_batch()
        emitted = 0
        for job in self.running:
            if self.launch.draft_tokens:
                tokens = together or self._acceptance.tokens(job.text.ease)
                job.verify_steps += 1
                job.accepted += tokens - 1
                job.histogram[min(tokens - 1, len(job.histogram) - 1)] += 1
                self.totals.verify_calls += 1
                self.totals.spec_steps += 1
                self.totals.spec_tokens += tokens
                self._line_spec = (self._line_spec[0] + tokens, self._line_spec[1] + 1)
            else:
                tokens = 1
            emitted += self._give(job, tokens)
        batch = len(self.running)
        started, tokens_before = self._since
        self._since = (started, tokens_before + emitted)
        self._steps_since_report += 1
        if self._steps_since_report >= self.launch.number("decode_log_interval", 40):
            self._report(batch)
        self.running = [job for job in self.running if job.finished is None]

    def _give(self, job: Job, tokens: int) -> int:
        given = min(tokens, job.goal - job.emitted)
        job.emitted += given
        self.totals.generation_tokens += given
        if job.emitted >= job.goal:
            self._end(job, "length" if job.emitted >= job.limit else "stop")
        else:
            job.changed.set()
        return given

    def _end(self, job: Job, why: str) -> None:
        job.finished = why
        if why != "abort":
            self.totals.e2e_s.append(time.perf_counter() - job.arrived)
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
