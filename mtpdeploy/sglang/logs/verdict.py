"""Decides how a boot ended and why, from all of its trouble at once.

Rules (they come from what operators got wrong): the cause is an exception or a telling line, never SIGQUIT, EOFError, "Killed" or a
peer's reset connection; a traceback after which the server went on was harmless; where several ranks failed, the rank whose
message says most decides, and ranks that only lost a peer or timed out on it are its victims; nothing printed at all is a kill from outside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mtpdeploy.sglang.logs import events as ev
from mtpdeploy.sglang.logs.parser import trace_cause
from mtpdeploy.sglang.logs.records import wrapper_says
from mtpdeploy.sglang.logs.signs import ALLOCATED, CAPACITY, OTHER_PROCESS, RUNTIME_OOM, THIS_PROCESS
from mtpdeploy.sglang.logs.summary import LAUNCH, Phase

if TYPE_CHECKING:
    from mtpdeploy.sglang.logs.fold import Boot

_KEEP = 24
_HUNG = 3  # health checks in a row, 20 s each, between which nothing else was printed: no long prefill
_EVIDENCE = 1200
# How much a cause explains: of several in one boot the lowest number wins, then the earliest.
_VICTIM = {
    "watchdog_hang": 1,
    "nccl_timeout": 1,
    "dist_init_hang": 1,
    "backend_code_error": 1,
    "warmup_failed": 2,
    "peer_rank_load_failed": 2,
    "peer_lost": 3,
}
# Lines that end a launch by themselves.
_ENDS = frozenset({"bad_arguments", "not_installed", "port_in_use", "killed_sigkill"})
_HARMLESS = ("torchcodec", "torch._dynamo", "libavutil", "Ignore import error")
# Where a cause strikes whatever was printed last.
_STRIKES: dict[str, Phase] = {
    "kv_pool_too_small": "pools",
    "mamba_pool_too_small": "pools",
    "warmup_failed": "warmup",
    "peer_rank_load_failed": "weights",
    "oom_weights": "weights",
    "not_installed": "before_args",
}
_OWN_FRAME = re.compile(r"(?:^|/)sglang/(?:srt|cli|lang|launch_server\.py|utils\.py|jit_kernel)|sgl_kernel")
# SGLang prints the same advice behind every error of a graph capture.
_ADVICE = re.compile(r"Possible solutions:|\d\. (?:set|disable) |Open an issue on GitHub")
_NATIVE = {-4, -6, -7, -8, -11, 132, 134, 135, 136, 139}


@dataclass(frozen=True, slots=True)
class _Trace:
    trace: ev.Traceback
    phase: Phase | None
    capturing: str | None
    order: int
    fatal: bool  # SGLang's own process said that it ends with this


@dataclass(frozen=True, slots=True)
class _Telling:
    sign: ev.Sign
    phase: Phase | None
    order: int


@dataclass(slots=True)
class Trouble:
    """All that went wrong in one boot, bounded. Written by the fold."""

    traces: list[_Trace] = field(default_factory=list)
    signs: list[_Telling] = field(default_factory=list)
    dismissed: list[_Trace] = field(default_factory=list)
    consequences: dict[str, None] = field(default_factory=dict)
    failed_ranks: dict[str, None] = field(default_factory=dict)
    dead: bool = False
    tree_killed: bool = False
    stop_asked: bool = False
    http_stopped: bool = False
    wrapper_ended: bool = False
    wrapper_line: str | None = None
    timeout_line: str | None = None
    leaked: str | None = None
    exit_code: int | None = None
    unhealthy: int = 0  # failed health checks since the last progress
    unhealthy_line: str = ""
    went_on: bool = False  # progress after the last trouble that decides nothing by itself
    _count: int = 0

    def add(self, e: ev.Event, phase: Phase | None, capturing: str | None) -> None:
        self._count += 1
        if isinstance(e, ev.StopAsked):
            if not self.dead:
                self.stop_asked = True
            return
        self.went_on = False
        if isinstance(e, ev.Traceback):
            self._trace(e, phase, capturing)
        elif isinstance(e, ev.Sign):
            if len(self.signs) < _KEEP:
                self.signs.append(_Telling(e, phase, self._count))
            if e.rank and e.cause in ("watchdog_hang", "nccl_timeout"):
                self.failed_ranks[e.rank] = None
        elif isinstance(e, ev.Consequence):
            self._consequence(e, phase)
        elif isinstance(e, ev.WrapperSays):
            self._wrapper(e)
        elif isinstance(e, ev.HealthCheckFailed):
            self.unhealthy += 1
            self.unhealthy_line = e.text

    def _wrapper(self, e: ev.WrapperSays) -> None:
        if e.what == "timeout":
            self.timeout_line = self.timeout_line or e.text
            return
        self.wrapper_ended, self.wrapper_line = True, e.text
        if e.exit_code is not None:
            self.exit_code = e.exit_code

    def _trace(self, e: ev.Traceback, phase: Phase | None, capturing: str | None) -> None:
        root = e.messages[0] if e.messages else ""
        if e.owner is None and any(word in message for message in e.messages for word in _HARMLESS):
            return
        if root.startswith("KeyboardInterrupt") and not self.dead:
            self.stop_asked = True
            return
        if root.startswith("EOFError") and e.owner is None:
            # The parent waited at a pipe for a child that had died.
            self.dead = self.dead or not self.stop_asked
            self.consequences[root[:_EVIDENCE]] = None
            return
        said = next((w for m in e.messages if (w := wrapper_says(m)) is not None), None)
        if said is not None and e.owner is None:
            self._wrapper(said)
            return
        fatal = e.owner is not None and (" hit an exception" in e.text or e.owner == "warmup")
        if fatal and not self.stop_asked:
            self.dead = True
            if e.rank:
                self.failed_ranks[e.rank] = None
        if len(self.traces) < _KEEP and not self.stop_asked:
            self.traces.append(_Trace(e, phase, capturing, self._count, fatal))

    def _consequence(self, e: ev.Consequence, phase: Phase | None) -> None:
        if e.exit_code is not None and (self.exit_code is None or not self.stop_asked):
            self.exit_code = e.exit_code
        if e.dead and not self.stop_asked:
            self.dead = True
        if self.dead and e.text.startswith(("Received sigquit", "SIGQUIT received", "kill_process_tree", "Killed")):
            self.tree_killed = True
        if "leaked" in e.text:
            self.leaked = e.text
        if len(self.consequences) < _KEEP:
            self.consequences[e.text[:_EVIDENCE]] = None

    def progress(self) -> None:
        """The launch went on: unclaimed tracebacks and lines that could also be harmless are set aside."""
        if self.went_on:
            return
        self.went_on, self.unhealthy = True, 0
        if self.dead or self.stop_asked:
            return
        if self.traces:
            self.dismissed.extend(self.traces)
            del self.dismissed[:-_KEEP]
            self.traces.clear()
        self.signs = [s for s in self.signs if s.sign.cause == "watchdog_hang"]
        self.leaked = None
        self.wrapper_ended, self.wrapper_line, self.exit_code = False, None, None


@dataclass(frozen=True, slots=True)
class Verdict:
    phase: Phase
    cause: str | None
    failed_in: Phase | None
    evidence: tuple[str, ...]
    consequences: tuple[str, ...]
    failed_ranks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    cause: str
    weight: int
    order: int
    evidence: tuple[str, ...]
    phase: Phase | None
    trace: ev.Traceback | None


def is_own_frame(frame: str) -> bool:
    """Whether a traceback's frame lies in SGLang's own files, whatever folders are above them."""
    return _OWN_FRAME.search(frame) is not None


def decide(boot: Boot) -> Verdict:
    """Phase, cause and evidence of a boot as far as its text goes."""
    t = boot.trouble
    found = _candidates(boot)
    best = min(found, key=lambda f: (f.weight, f.order), default=None)
    crashed = _crashed(boot, best)
    ranks = tuple(t.failed_ranks)
    if best is not None and best.trace is not None and best.trace.rank and best.trace.rank not in ranks:
        ranks = (*ranks, best.trace.rank)
    consequences = tuple(t.consequences)

    if crashed:
        if best is None:
            best = _from_outside(boot)
        if best is None:
            # It died of something that has no class: the exception is shown all the same.
            lines = _evidence(t.traces[0].trace) if t.traces else ()
            return Verdict("crashed", None, _struck(boot, None), lines, consequences, ranks)
        return Verdict("crashed", best.cause, _struck(boot, best), best.evidence, _without(consequences, best), ranks)
    if t.stop_asked:
        return Verdict("stopped", None, None, (), consequences, ())
    if best is not None and best.cause in ("watchdog_hang", "dist_init_hang"):
        return Verdict("hung", best.cause, _struck(boot, best), best.evidence, consequences, ranks)
    if best is not None and best.cause in ("peer_lost", "nccl_timeout"):
        return Verdict("unknown", best.cause, _struck(boot, best), best.evidence, consequences, ranks)
    if t.unhealthy >= _HUNG:
        return Verdict("hung", "watchdog_hang", boot.current, (t.unhealthy_line,), consequences, ranks)
    if t.timeout_line is not None and not boot.ready_lines and not boot.served and not boot.batches:
        return Verdict(
            boot.phase or "unknown", "launch_timeout", boot.current or boot.phase, (t.timeout_line,), consequences, ()
        )
    if t.http_stopped:
        return Verdict("stopped", None, None, (), consequences, ())
    if t.wrapper_ended:
        if t.exit_code == 0:
            return Verdict("exited", None, None, (), consequences, ())
        if t.exit_code in (143, -15, -2, 130):
            return Verdict("stopped", None, None, (), consequences, ())
        return Verdict("unknown", None, None, (), consequences, ())
    if t.leaked is not None:
        return Verdict("unknown", None, None, (), consequences, ())
    return Verdict(boot.phase or "unknown", None, None, (), consequences, ())


def _candidates(boot: Boot) -> list[_Found]:
    t = boot.trouble
    found = []
    for item in t.traces:
        cause = _cause_of(boot, item)
        if cause is not None:
            weight = 4 if cause == "backend_code_error" and not item.fatal else _VICTIM.get(cause, 0)
            found.append(_Found(cause, weight, item.order, _evidence(item.trace), item.phase, item.trace))
    for telling in t.signs:
        sign = telling.sign
        cause = _oom_class(boot, telling.phase, None, (), sign.text) if sign.cause == "oom" else sign.cause
        if cause is None:
            continue
        found.append(_Found(cause, _VICTIM.get(cause, 0), telling.order, (sign.text[:_EVIDENCE],), telling.phase, None))
    if not found and t.dead and not t.stop_asked:
        # Ranks print past each other: a traceback may have been set aside because another rank went on.
        for item in t.dismissed[-3:]:
            cause = _cause_of(boot, item)
            if cause is not None and cause != "backend_code_error" and not boot.ready_lines:
                found.append(
                    _Found(cause, _VICTIM.get(cause, 0), item.order, _evidence(item.trace), item.phase, item.trace)
                )
    return found


def _cause_of(boot: Boot, item: _Trace) -> str | None:
    trace = item.trace
    sign = trace_cause(trace)
    if sign == "oom":
        return _oom_class(boot, item.phase, item.capturing, trace.frames, "\n".join(trace.messages))
    if sign is not None:
        return (
            sign
            if not (trace.owner == "warmup" and sign in ("model_not_found", "port_in_use", "bad_arguments"))
            else "warmup_failed"
        )
    if trace.owner == "warmup":
        return "warmup_failed"
    if not trace.messages:
        return None
    if not item.fatal and (not trace.frames or trace.owner is not None):
        return None  # a lone message, or an exception somebody handled: nothing to decide by
    last = trace.messages[0]
    if last.startswith(
        (
            "KeyboardInterrupt",
            "SystemExit",
            "asyncio.exceptions.CancelledError",
            "EOFError",
            "BrokenPipeError",
            "ConnectionResetError",
        )
    ):
        return None
    if last.startswith(("ModuleNotFoundError", "ImportError")):
        return "not_installed" if last.startswith("ModuleNotFoundError") else "package_version_mismatch"
    if (
        any(
            f.split(":")[0].endswith(("server_args.py", "mamba_hook.py", "speculative_hook.py"))
            for f in trace.frames[-2:]
        )
        and boot.args is None
    ):
        return "bad_arguments"
    if "NCCL error" in last or "DistBackendError" in last:
        return None
    return "backend_code_error"


def _oom_class(
    boot: Boot, phase: Phase | None, capturing: str | None, frames: tuple[str, ...], text: str
) -> str | None:
    """Out of memory has a class by where it struck; the remedies point in opposite directions. None: nothing tells where."""
    where = "\n".join(frames)
    serving = bool(boot.ready_lines or boot.served) or phase in ("ready", "serving")
    if not serving and _others_hold(text):
        return "gpu_occupied"
    if RUNTIME_OOM.search(text):
        return "oom_runtime"
    if (
        any(
            word in where
            for word in ("capture", "graph_runner", "init_cuda_graph", "init_device_graph", "cuda_graph_setup")
        )
        or "Capture cuda graph failed" in text
    ):
        return "oom_runtime" if serving else "oom_graph_capture"
    if serving or "event_loop" in where:
        return "oom_runtime"
    if any(
        word in where
        for word in ("load_model", "create_weights", "weight_loader", "weight_utils", "make_layers", "load_weights")
    ):
        return "oom_weights"
    if phase in ("http_up", "warmup"):
        return "oom_runtime"
    if not frames and phase == "graphs" and capturing is not None:
        return "oom_graph_capture"
    if phase in ("pools", "graphs") or any(
        word in where for word in ("memory_pool", "attention_backend", "attn_backend", "kv_cache")
    ):
        return "oom_after_pool"
    if phase in ("args", "dist_init", "weights"):
        return "oom_after_pool" if _weights_done(boot) else "oom_weights"
    return "oom_runtime" if "forward" in where else None


def _weights_done(boot: Boot) -> bool:
    return any(r.loads and all(load.ended for load in r.loads) for r in boot.ranks.values())


def _others_hold(text: str) -> bool:
    """Whether torch's message says that other processes hold a good part of the GPU (SGLang's helpers hold about 1.5 GiB).

    In a container torch cannot tell its own process from others: then the one that holds what PyTorch allocated here is itself.
    """
    held = sorted(float(size) / (1 if unit == "GiB" else 1024) for _, size, unit in OTHER_PROCESS.findall(text))
    allocated = ALLOCATED.search(text)
    if not THIS_PROCESS.search(text) and held:
        own = float(allocated[1]) / (1 if allocated[2] == "GiB" else 1024) if allocated else held[-1]
        held.remove(next((h for h in held if h >= 0.98 * own), held[-1]))
    capacity = CAPACITY.search(text)
    return sum(held) > max(3.0, 0.05 * float(capacity[1]) if capacity else 3.0)


def _crashed(boot: Boot, best: _Found | None) -> bool:
    t = boot.trouble
    if t.dead:
        return True
    if t.stop_asked:
        return False
    if best is not None and best.cause in _ENDS and best.trace is None:
        return True
    if best is not None and best.trace is not None:
        # Nothing claimed the traceback and nothing came after it: the process ended with it.
        own = any(map(is_own_frame, best.trace.frames))
        return best.trace.owner is None and (
            own or not best.trace.frames or best.cause not in ("backend_code_error", "peer_lost")
        )
    if t.wrapper_ended and t.exit_code is not None and t.exit_code not in (0, 143, -15, -2, 130):
        return True
    return (
        t.leaked is not None
        and not boot.ready_lines
        and not boot.served
        and not boot.batches
        and boot.furthest >= 0
        and not t.http_stopped
    )


def _from_outside(boot: Boot) -> _Found | None:
    """No line says why: the kernel's or somebody's kill, or a native crash, by exit code."""
    t = boot.trouble
    aftermath = ("kill_process_tree", "Sleeping", "No live", "SIGQUIT received", "Received sigquit")
    lines = [c for c in t.consequences if not c.startswith(aftermath)]
    # SIGQUIT is a consequence, and yet all that there is when somebody ended the child from outside.
    lines = lines or [c for c in t.consequences if c.startswith(aftermath[3:])]
    evidence = tuple(lines[:2]) or ((t.wrapper_line,) if t.wrapper_line else ())
    if t.exit_code in (-9, 137):
        killed = tuple(c for c in t.consequences if "-9" in c or "137" in c or "Killed" in c)[:2] or (
            (t.wrapper_line,) if t.wrapper_line else evidence
        )
        return _Found("killed_sigkill", 0, 0, killed, boot.current, None)
    if t.exit_code in _NATIVE:
        return _Found("kernel_crash", 0, 0, evidence, boot.current, None)
    if t.exit_code == 2 and boot.args is None and boot.furthest <= 0:
        return _Found("bad_arguments", 0, 0, evidence, "before_args", None)
    if t.leaked is not None and not t.dead:
        return _Found("killed_silently", 0, 0, (t.leaked,), boot.current, None)
    if t.dead and not t.traces and boot.furthest >= LAUNCH.index("args") and t.exit_code in (None, -15, 143, -3, 131):
        return _Found("killed_silently", 0, 0, evidence, boot.current, None)
    return None


def _struck(boot: Boot, best: _Found | None) -> Phase | None:
    if best is None:
        return boot.current or boot.phase
    if best.cause in _STRIKES:
        return _STRIKES[best.cause]
    if best.cause == "gpu_occupied" and any("unbalanced" in line for line in best.evidence):
        return "dist_init"
    if best.cause == "oom_graph_capture":
        return "graphs"
    if best.cause == "port_in_use" and any("bind on address" in line for line in best.evidence):
        return "http_up"
    frames = best.trace.frames if best.trace is not None else ()
    launching = any("launch_server.py" in f or "/cli/serve.py" in f for f in frames) and not any(
        "run_scheduler_process" in f for f in frames
    )
    if boot.args is None and boot.furthest <= 0 and (launching or best.cause == "bad_arguments"):
        return "before_args"
    return best.phase or boot.current or boot.phase


def _evidence(trace: ev.Traceback) -> tuple[str, ...]:
    """The headline, the root exception's first line, and the last lines of the message: a compiler's reason stands there."""
    lines = [trace.text] if trace.owner is not None and trace.text else []
    messages = [m.strip() for m in trace.messages if m.strip() and not _ADVICE.match(m.strip())]
    chosen = messages if len(messages) <= 4 else [messages[0], *messages[-3:]]
    for line in chosen:
        if line not in lines:
            lines.append(line)
    return tuple(line[:_EVIDENCE] for line in lines)


def _without(consequences: tuple[str, ...], best: _Found | None) -> tuple[str, ...]:
    return tuple(c for c in consequences if best is None or c not in best.evidence)
