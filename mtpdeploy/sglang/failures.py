"""Why a launch died and what to try next: from a log's summary and from facts that no log holds.

Memory advice has a direction. A KV or state pool that does not fit wants a HIGHER mem_fraction_static (or smaller pools); running
out after the pools, at graph capture or in service, wants a LOWER one; a GPU held by another process wants neither.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mtpdeploy.inventory.values import as_sets
from mtpdeploy.sglang.logs.summary import Phase, Summary

Direction = Literal["raise", "lower", "neither"]
FRACTION = "mem_fraction_static"
# Above this a bf16 27B has nothing left for graphs and activations on any card that was measured.
_HIGHEST, _LOWEST = 0.95, 0.30
_ROOM = 0.08  # more than this between the weights' share and the fraction, and it is not the fraction that is too small

_MINIMUM = re.compile(r"[Rr]aise --mem-fraction-static (?:above|to at least|to) (\d?\.\d+)")
_CURRENT = re.compile(r"mem[_-]fraction[_-]static ?= ?(\d?\.\d+)")
_TRIED = re.compile(r"Tried to allocate ([\d.]+) (GiB|MiB)")
_FREE = re.compile(r"of which ([\d.]+) (GiB|MiB) is free")
_RATIO = re.compile(r"mamba_ratio=(\d{1,6})\b")
_REST = re.compile(r"total_rest_memory=(-?[\d.]+) GB")
_ADDRESS = re.compile(r"address \('([^']*)', (\d+)\)")


@dataclass(frozen=True, slots=True)
class Remedy:
    """direction: where mem_fraction_static has to go. set: canonical arguments that only work together; empty: no number to give."""

    direction: Direction
    set: Mapping[str, object]
    why: str

    def as_json(self) -> dict[str, object]:
        return {"direction": self.direction, "set": dict(self.set), "why": self.why}


@dataclass(frozen=True, slots=True)
class Attempt:
    """Another run at neighbouring settings and how it ended; cause None: it started."""

    args: Mapping[str, object]
    cause: str | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a person needs at 3 a.m.: the cause in words, the lines that prove it, one remedy, the page, the next commands."""

    cause: str | None
    failed_in: Phase | None
    meaning: str
    evidence: tuple[str, ...]
    consequences: tuple[str, ...]
    remedy: Remedy
    runbook: str
    next_commands: tuple[str, ...]
    facts: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, object]:
        return {
            "cause": self.cause,
            "failed_in": self.failed_in,
            "meaning": self.meaning,
            "evidence": list(self.evidence),
            "consequences": list(self.consequences),
            "remedy": self.remedy.as_json(),
            "runbook": f"docs/runbooks/{self.runbook}.md",
            "next_commands": list(self.next_commands),
            "facts": list(self.facts),
        }


@dataclass(frozen=True, slots=True)
class _Class:
    meaning: str
    direction: Direction
    advice: str


CLASSES: Mapping[str, _Class] = {
    "killed_silently": _Class(
        "a process was ended from outside and nothing could be logged",
        "neither",
        "find who killed it: the kernel's OOM killer, earlyoom, a container limit or a person; "
        "then give the host more memory, or load with less host memory",
    ),
    "killed_sigkill": _Class(
        "SIGKILL (exit 137 or -9): the kernel's OOM killer, a container limit, or kill -9",
        "neither",
        "look into dmesg and the cgroup's memory.events; use less host memory (no CPU offload, a smaller hierarchical cache) "
        "or raise the limit",
    ),
    "kv_pool_too_small": _Class(
        "after the weights and the state pools nothing is left for the KV cache",
        "raise",
        "raise mem_fraction_static, or take less for state slots and draft; if the GPU was not empty, free it first",
    ),
    "mamba_pool_too_small": _Class(
        "the linear-attention state pool does not hold the slots of even one request",
        "raise",
        "give slots_per_request x concurrency slots and cap max_running_requests at that concurrency; "
        "if there is no memory at all, raise mem_fraction_static",
    ),
    "oom_weights": _Class(
        "the GPU ran out of memory while the weights were loading",
        "neither",
        "no fraction helps before the pools: a larger tp_size, a smaller dtype or quantized weights",
    ),
    "oom_after_pool": _Class(
        "the pools took what the rest of the start needs (attention workspace, draft weights, buffers)",
        "lower",
        "lower mem_fraction_static: the pools are sized by it, and what follows has to fit into the remainder",
    ),
    "oom_graph_capture": _Class(
        "the GPU ran out of memory while CUDA graphs were captured",
        "lower",
        "lower mem_fraction_static, or capture less: a smaller cuda_graph_max_bs_decode, disable_prefill_cuda_graph",
    ),
    "oom_runtime": _Class(
        "the GPU ran out of memory in service",
        "lower",
        "lower mem_fraction_static, chunked_prefill_size or max_running_requests",
    ),
    "gpu_occupied": _Class(
        "another process holds memory of this GPU",
        "neither",
        "free it or choose other GPUs: no fraction helps, it only shrinks the pools",
    ),
    "dist_init_hang": _Class(
        "the ranks never found each other",
        "neither",
        "same arguments on all nodes, the right network interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), an open port for dist_init_addr",
    ),
    "peer_lost": _Class(
        "this rank lost a peer: it is the victim, the cause is in another rank's or node's log",
        "neither",
        "read the log of the rank or node that went first",
    ),
    "peer_rank_load_failed": _Class(
        "this rank had loaded, another one did not finish",
        "neither",
        "read the other ranks' logs: usually host memory, a slow disk, or a checkpoint that is not complete there",
    ),
    "nccl_timeout": _Class(
        "a collective operation timed out: one rank did not arrive",
        "neither",
        "find the rank that is behind; check NVLink and network errors",
    ),
    "watchdog_hang": _Class(
        "a forward pass did not come back within watchdog_timeout",
        "neither",
        "see which rank is behind in the stack dump; if a very long prefill was the reason, a longer watchdog_timeout or smaller chunks",
    ),
    "kernel_crash": _Class(
        "a GPU kernel or native code crashed",
        "neither",
        "start once with disable_cuda_graph and CUDA_LAUNCH_BLOCKING=1 to find the kernel; another attention backend or another release",
    ),
    "kernel_unsupported_arch": _Class(
        "a kernel is not built for this GPU",
        "neither",
        "another attention or MoE backend, another KV dtype, or wheels built for this architecture",
    ),
    "op_unsupported_on_device": _Class(
        "an operator does not exist on this device",
        "neither",
        "another backend or dtype for the part that the traceback names",
    ),
    "kernel_compile_error": _Class(
        "a kernel did not compile (triton, ptxas)",
        "neither",
        "another backend for that part, the triton release that this SGLang pins, or another dtype",
    ),
    "jit_build_failed": _Class(
        "a kernel that is built at first use did not build",
        "neither",
        "install what the line names (nvcc, ninja, headers), set CUDA_HOME, or install the precompiled packages",
    ),
    "backend_code_error": _Class(
        "Python code of the model or a backend raised an error",
        "neither",
        "not a matter of memory: another release of SGLang, another attention or MoE backend, CUDA graphs off",
    ),
    "tp_shape_mismatch": _Class(
        "the model's sizes do not divide by the parallel sizes",
        "neither",
        "another tp_size or ep_size: it must divide what the line names",
    ),
    "quant_dtype_unsupported": _Class(
        "this quantization or dtype is not supported here",
        "neither",
        "the dtype or quantization that the line asks for, or another checkpoint",
    ),
    "transformers_version": _Class(
        "the installed transformers does not fit this SGLang or this model",
        "neither",
        "install the transformers release that this SGLang pins",
    ),
    "package_version_mismatch": _Class(
        "an installed package does not fit this SGLang",
        "neither",
        "reinstall SGLang with the releases it pins (sglang-kernel, flashinfer, torch); for an unknown architecture a newer SGLang",
    ),
    "bad_arguments": _Class(
        "SGLang refused the arguments",
        "neither",
        "flag names and rules differ between releases: `plan` shows the right spelling and refuses bad sets before anything is touched",
    ),
    "no_accelerator": _Class(
        "SGLang sees no GPU",
        "neither",
        "check nvidia-smi, the driver's age, CUDA_VISIBLE_DEVICES and the container's GPU flags",
    ),
    "not_installed": _Class(
        "SGLang, or a package that it needs, is not in this Python",
        "neither",
        "point `python` of the inventory at the environment that has it",
    ),
    "warmup_failed": _Class(
        "the server was up, and its own first request failed",
        "neither",
        "read the error that came before; an http_proxy that catches 127.0.0.1 gives 502; multimodal models warm up with an image",
    ),
    "custom_allreduce_no_p2p": _Class(
        "these GPUs cannot reach each other's memory",
        "neither",
        "disable_custom_all_reduce",
    ),
    "launch_timeout": _Class(
        "whoever waited gave up while the server was still loading",
        "neither",
        "wait by progress, not by a fixed time: large weights from a slow disk take long",
    ),
    "port_in_use": _Class(
        "the port is taken, which SGLang tells only after the whole load",
        "neither",
        "stop what holds it or take another port",
    ),
    "model_not_found": _Class(
        "the model is not where the arguments say",
        "neither",
        "check the path at the host (an unreadable path is answered as a bad repo id), whether the download is whole, the token for a gated model, "
        "the network",
    ),
}  # fmt: skip


def runbook_of(cause: str | None) -> str:
    """The page of a cause, without its suffix."""
    return cause.replace("_", "-") if cause else "server-never-ready"


def diagnose(
    summary: Summary,
    *,
    exit_status: int | None = None,
    oom_killed: bool | None = None,
    child_dead: str | None = None,
    host: str | None = None,
    profile: str | None = None,
    wanted_concurrency: int | None = None,
    attempts: Sequence[Attempt] = (),
) -> Diagnosis:
    """The diagnosis of a boot.

    exit_status: of the main process (-9 or 137 for SIGKILL); oom_killed: the kernel or the cgroup recorded an OOM kill;
    child_dead: title of a child that is gone while the parent answers; attempts: earlier runs of the same service.
    Facts replace a cause only where the log shows none: an exception in the log came first.
    """
    cause, facts = summary.cause, _facts(exit_status, oom_killed, child_dead)
    if cause in (None, "killed_silently") and summary.phase not in ("stopped", "exited"):
        cause = _from_facts(exit_status, oom_killed, child_dead) or cause
    known = CLASSES.get(cause or "")
    if known is None:
        remedy = Remedy("neither", {}, "the log does not show why: read its end, then start once in the foreground")
        meaning = _plain_meaning(summary)
    else:
        remedy = _remedy(cause or "", known, summary, wanted_concurrency)
        meaning = known.meaning
        if oom_killed and cause in ("killed_sigkill", "killed_silently"):
            meaning = "the kernel's OOM killer ended it: the host's or the container's memory was full"
    if known is not None and (both := _no_value_fits(cause or "", summary, attempts)) is not None:
        remedy = both
    return Diagnosis(
        cause,
        summary.failed_in,
        meaning,
        summary.evidence,
        summary.consequences,
        remedy,
        runbook_of(cause),
        _commands(cause, remedy, summary, host, profile),
        facts,
    )


def _plain_meaning(summary: Summary) -> str:
    if summary.phase == "stopped":
        return "it was asked to stop"
    if summary.phase in ("ready", "serving"):
        return "no failure is visible"
    return f"no failure is visible in the log; the last that it proves is {summary.phase.replace('_', ' ')}"


def _facts(exit_status: int | None, oom_killed: bool | None, child_dead: str | None) -> tuple[str, ...]:
    said = []
    if exit_status is not None:
        said.append(f"exit status {exit_status}{_EXITS.get(exit_status, '')}")
    if oom_killed:
        said.append("the kernel recorded an OOM kill")
    if child_dead:
        said.append(f"{child_dead} is gone while the main process still lives")
    return tuple(said)


_EXITS = {
    -9: " (SIGKILL: from outside)",
    137: " (SIGKILL: from outside)",
    -15: " (SIGTERM: asked to stop, or earlyoom)",
    143: " (SIGTERM: asked to stop, or earlyoom)",
    -3: " (SIGQUIT: a child died first)",
    131: " (SIGQUIT: a child died first)",
    -6: " (abort in native code)",
    134: " (abort in native code)",
    -11: " (segmentation fault)",
    139: " (segmentation fault)",
    2: " (argparse refused the arguments)",
    1: " (a Python error)",
}


def _from_facts(exit_status: int | None, oom_killed: bool | None, child_dead: str | None) -> str | None:
    if oom_killed or exit_status in (-9, 137):
        return "killed_sigkill"
    if exit_status in (-6, -11, 134, 139, -4, -7, -8, 132, 135, 136):
        return "kernel_crash"
    if exit_status == 2:
        return "bad_arguments"
    if child_dead:
        return "killed_silently"
    return None


# -- remedies with numbers -------------------------------------------------------------------------------------------------


def _number(values: Mapping[str, object] | None, name: str) -> float | None:
    value = (values or {}).get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _fraction(summary: Summary) -> float | None:
    """mem_fraction_static in force: the resolved argument, else what the message prints."""
    known = _number(summary.server_args, FRACTION)
    if known is not None:
        return known
    found = _CURRENT.search("\n".join(summary.evidence))
    return float(found[1]) if found else None


def _least_fraction(summary: Summary) -> float | None:
    """The fraction at which the weights alone use up the static budget: 1 - free after the load / free before it."""
    before = _number(summary.weights, "before_gb")
    after = _number(summary.draft, "avail_gb") if summary.draft else None
    after = after if after is not None else _number(summary.weights, "avail_gb")
    return 1 - after / before if before and after is not None else None


def _upward(value: float) -> float:
    return math.ceil(round(value * 100, 6)) / 100


def _remedy(cause: str, known: _Class, summary: Summary, wanted: int | None) -> Remedy:
    special = _NUMBERS.get(cause)
    found = special(summary, wanted) if special is not None else None
    return found or Remedy(known.direction, {}, known.advice)


def _slots_per_request(summary: Summary) -> int | None:
    """As the message or the log prints it, else by the arguments in force where slots were asked for (so the model has state)."""
    found = _RATIO.search("\n".join(summary.evidence))
    if found:
        return int(found[1])
    if summary.slots_per_request is not None:
        return summary.slots_per_request
    args = summary.server_args or {}
    if args.get("max_mamba_cache_size") is None:
        return None
    if args.get("disable_radix_cache"):
        return 1
    strategy = args.get("mamba_radix_cache_strategy") or args.get("mamba_scheduler_strategy")
    if strategy == "extra_buffer":
        return 4 if args.get("disable_overlap_schedule") else 5
    return 4 if strategy == "extra_buffer_lazy" else 3


def _wanted(summary: Summary, wanted: int | None) -> int:
    """Concurrency to size for: what the caller wants, else what was asked for (not speculation's silent 48), else 4."""
    asked = _number(summary.server_args, "max_running_requests")
    return wanted or (int(asked) if asked and asked < 48 else 4)


def _state_pools(summary: Summary, wanted: int | None) -> dict[str, object] | None:
    per_request = _slots_per_request(summary)
    if per_request is None:
        return None
    concurrency = _wanted(summary, wanted)
    return {"max_running_requests": concurrency, "max_mamba_cache_size": per_request * concurrency}


def _kv(summary: Summary, wanted: int | None) -> Remedy | None:
    text = "\n".join(summary.evidence)
    now, printed, least = _fraction(summary), _MINIMUM.search(text), _least_fraction(summary)
    minimum = float(printed[1]) if printed else None
    pools = _state_pools(summary, wanted)
    if minimum is None and pools and least is not None and now is not None and least + _ROOM < now:
        # Up to 0.5.12 state for all requested requests (48 under speculation) is set aside, whether they can run or not.
        return Remedy(
            "neither",
            pools,
            f"the weights need {least:.3f} of the memory and {now:g} is given: state set aside for requests takes the rest. Ask for fewer: "
            f"{pools['max_running_requests']} at once with {pools['max_mamba_cache_size']} slots",
        )
    if minimum is not None and now is not None and minimum <= now:
        why = f"SGLang asks for more than {minimum:g}, which {now:g} already is: state pools and not weights take the memory"
        if pools:
            return Remedy(
                "neither",
                pools,
                f"{why}. Size them: {pools['max_mamba_cache_size']} slots for {pools['max_running_requests']} requests at once",
            )
        return Remedy(
            "neither", {}, f"{why}. Size them: max_running_requests and slots_per_request x that many slots together"
        )
    least = minimum if minimum is not None else least
    if least is None:
        return None
    target = _upward(least + 0.03)
    if now is not None and target <= now:
        target = _upward(now + 0.03)
    if target > _HIGHEST:
        return Remedy(
            "raise",
            {},
            f"even {_HIGHEST} leaves no room beside the weights: a larger tp_size, smaller weights, or a larger GPU",
        )
    told = f"the printed minimum is {minimum:g}" if minimum is not None else f"the weights alone need {least:.3f}"
    more = f"; or fewer slots: {_words(pools)}" if pools else ""
    return Remedy("raise", {FRACTION: target}, f"{told}{f', in force is {now:g}' if now is not None else ''}{more}")


def _mamba(summary: Summary, wanted: int | None) -> Remedy | None:
    text = "\n".join(summary.evidence)
    pools, rest = _state_pools(summary, wanted), _REST.search(text)
    if "too small to serve" in text and pools:
        per_request = _slots_per_request(summary)
        return Remedy(
            "neither",
            pools,
            f"each running request takes {per_request} slots: {pools['max_mamba_cache_size']} slots for "
            f"{pools['max_running_requests']} requests; one of the two alone does not help",
        )
    if rest is not None and float(rest[1]) <= 0:
        least, now = _least_fraction(summary), _fraction(summary)
        if least is not None and (now is None or least > now):
            target = _upward(least + 0.05)
            if target > _HIGHEST:
                return Remedy(
                    "raise",
                    {},
                    "the weights leave no room for state: a larger tp_size, smaller weights, or a larger GPU",
                )
            return Remedy(
                "raise",
                {FRACTION: target},
                f"the weights alone need {least:.3f}{f', in force is {now:g}' if now is not None else ''}",
            )
    concurrency = _wanted(summary, wanted)
    return Remedy(
        "raise",
        {"max_running_requests": concurrency},
        "state for every request that may run is set aside first; ask for fewer, or raise mem_fraction_static",
    )


def _shortfall_gb(summary: Summary) -> float | None:
    text = "\n".join(summary.evidence)
    tried, free = _TRIED.search(text), _FREE.search(text)
    if tried is None:
        return None

    def gib(found: re.Match[str] | None) -> float:
        return 0.0 if found is None else float(found[1]) / (1 if found[2] == "GiB" else 1024)

    return max(0.0, gib(tried) - gib(free))


def _lower(summary: Summary, extra_gb: float) -> tuple[dict[str, object], str] | None:
    now, before = _fraction(summary), _number(summary.weights, "before_gb")
    if now is None:
        return None
    missing = _shortfall_gb(summary)
    step = 0.03 if missing is None or before is None else max(0.02, (missing + extra_gb) / before)
    target = math.floor(round((now - step) * 100, 6)) / 100
    if target < _LOWEST:
        return None
    least = _least_fraction(summary)
    if least is not None and target <= least:
        return {}, f"below {least:.3f} the weights leave no pool: shrink what is captured or allocated instead"
    told = f"{missing:.2f} GB were missing; " if missing is not None else ""
    return {FRACTION: target}, f"{told}in force is {now:g}"


def _capture(summary: Summary, wanted: int | None) -> Remedy | None:
    found = _lower(summary, 1.0)
    if found is None:
        return None
    settings, why = found
    running = summary.max_running_requests or summary.capped_to
    if not settings and running:
        settings = {"cuda_graph_max_bs_decode": max(1, running)}
    return Remedy(
        "lower",
        settings,
        f"{why}. Capturing less helps too: cuda_graph_max_bs_decode no larger than what can run, disable_prefill_cuda_graph",
    )


def _after_pool(summary: Summary, wanted: int | None) -> Remedy | None:
    found = _lower(summary, 1.5)
    return None if found is None else Remedy("lower", found[0], found[1])


def _runtime(summary: Summary, wanted: int | None) -> Remedy | None:
    settings: dict[str, object] = {}
    chunk = summary.chunked_prefill_size or _number(summary.server_args, "chunked_prefill_size")
    if chunk and chunk >= 4096:
        settings["chunked_prefill_size"] = int(chunk) // 2
    found = _lower(summary, 1.0)
    if found is not None:
        settings.update(found[0])
    return Remedy(
        "lower",
        settings,
        "what a request needs beside the pools has to fit: smaller chunks and smaller pools"
        + (f" ({found[1]})" if found else ""),
    )


def _weights(summary: Summary, wanted: int | None) -> Remedy | None:
    tp = _number(summary.server_args, "tp_size")
    return Remedy("neither", {"tp_size": int(tp) * 2} if tp else {}, CLASSES["oom_weights"].advice)


def _port(summary: Summary, wanted: int | None) -> Remedy | None:
    found = _ADDRESS.search("\n".join(summary.evidence))
    return (
        Remedy("neither", {}, f"port {found[2]} on {found[1]} is taken: stop what holds it, or take another port")
        if found
        else None
    )


def _p2p(summary: Summary, wanted: int | None) -> Remedy | None:
    return Remedy("neither", {"disable_custom_all_reduce": True}, CLASSES["custom_allreduce_no_p2p"].advice)


_NUMBERS = {
    "kv_pool_too_small": _kv,
    "mamba_pool_too_small": _mamba,
    "oom_graph_capture": _capture,
    "oom_after_pool": _after_pool,
    "oom_runtime": _runtime,
    "oom_weights": _weights,
    "port_in_use": _port,
    "custom_allreduce_no_p2p": _p2p,
}
_WANTS_MORE = frozenset({"kv_pool_too_small", "mamba_pool_too_small"})
_WANTS_LESS = frozenset({"oom_graph_capture", "oom_after_pool", "oom_runtime"})
_SAME_BUT = frozenset({FRACTION, "port", "nccl_port", "random_seed", "host", "dist_init_addr"})


def _no_value_fits(cause: str, summary: Summary, attempts: Sequence[Attempt]) -> Remedy | None:
    """Two runs that differ in the fraction alone and failed in opposite ways leave no fraction between them to try."""
    now = _fraction(summary)
    if now is None or cause not in _WANTS_MORE | _WANTS_LESS:
        return None
    for attempt in attempts:
        other = _number(attempt.args, FRACTION)
        if (
            other is None
            or attempt.cause is None
            or abs(other - now) > 0.061
            or not _alike(attempt.args, summary.server_args or {})
        ):
            continue
        low, high = (now, other) if cause in _WANTS_MORE else (other, now)
        opposite = (cause in _WANTS_MORE and attempt.cause in _WANTS_LESS) or (
            cause in _WANTS_LESS and attempt.cause in _WANTS_MORE
        )
        if not opposite or low > high:
            continue
        states = _state_pools(summary, None) or {}
        shrink = (
            "max_running_requests with max_mamba_cache_size"
            if summary.mamba_cache or states
            else "cuda_graph_max_bs_decode or context"
        )
        return Remedy(
            "neither",
            {},
            f"no value fits: at {low:g} the pools get too little and at {high:g} what follows them does. "
            f"Free memory on the GPU, or shrink {shrink}, cuda_graph_max_bs_decode, disable_prefill_cuda_graph, the weights' dtype, or raise tp_size",
        )
    return None


def _alike(first: Mapping[str, object], second: Mapping[str, object]) -> bool:
    """Whether the arguments that both name are equal, those that do not size memory aside."""
    return all(first[n] == second[n] for n in first.keys() & second.keys() if n not in _SAME_BUT)


def _words(settings: Mapping[str, object] | None) -> str:
    return ", ".join(f"{name}={value}" for name, value in (settings or {}).items())


def _commands(
    cause: str | None, remedy: Remedy, summary: Summary, host: str | None, profile: str | None
) -> tuple[str, ...]:
    at = f" --host {shlex.quote(host)}" if host else ""
    of = f" --profile {shlex.quote(profile)}" if profile else ""
    sets = f" {as_sets(remedy.set)}" if remedy.set else ""
    if sets and of:
        return (f"mtpdeploy plan{at}{of}{sets}", f"mtpdeploy deploy{at}{of}{sets}")
    if not of and host is None and summary.command and (sets or cause == "bad_arguments"):
        return (f"mtpdeploy plan --command {shlex.quote(summary.command)}{sets}",)  # a stranger's log
    if cause in (
        "gpu_occupied",
        "port_in_use",
        "no_accelerator",
        "not_installed",
        "model_not_found",
        "killed_sigkill",
        "killed_silently",
    ):
        return (f"mtpdeploy doctor{at}", f"mtpdeploy status{at}")
    if cause == "bad_arguments":
        return (f"mtpdeploy plan{at}{of}",)
    return (f"mtpdeploy logs{at} --lines 200",)
