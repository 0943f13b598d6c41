"""What SGLang's HTTP answers say, one shape for all versions (0.5.6 … 0.5.23). Each field is None where this version or state lacks it.

/server_info  http_server.py and managers/scheduler_components/internal_state.py; `graph` is one float up to 0.5.10
/metrics      observability/metrics_collector.py, prefix `sglang:`, most series younger than 0.5.6
meta_info     managers/tokenizer_manager.py; the speculation keys were renamed at 0.5.11 and the old names dropped at 0.5.21
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mtpdeploy.sglang.masking import mask_values

LAUNCH_ID_NAME = "MTPDEPLOY_LAUNCH_ID"

# Keys of /server_info that are no arguments.
_NOT_ARGUMENTS = frozenset(
    {"internal_states", "version", "status", "max_total_num_tokens", "max_req_input_len", "kv_events", "startup_time",
     "frontend", "launch_command", "simulated", "startup_timings"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """An answer of /server_info (or /get_server_info), secrets masked. Memory GiB.

    args:           resolved arguments as this version names them; `max_running_requests` there is NOT the effective one
    launch_command: what was asked for (≥0.5.19)
    running_limit:  effective max_running_requests over all data-parallel replicas (≥0.5.8); running_limits: of each
    slots:          state slots per replica; known when the server computed them or they were given
    kv_tokens:      token capacity of one replica
    accept_length:  cumulative mean since start or last flush, lagging up to 40 decode steps, warm-up included
    """

    version: str | None
    status: str | None
    args: Mapping[str, object]
    launch_command: str | None
    running_limit: int | None
    running_limits: tuple[int, ...]
    slots: int | None
    kv_tokens: int | None
    swa_tokens: int | None
    max_total_num_tokens: int | None
    accept_length: float | None
    gen_throughput: float | None
    weight_gb: float | None
    kv_gb: float | None
    graph_gb: float | None
    startup_available_gb: float | None
    graph_sizes: tuple[int, ...]
    startup_s: Mapping[str, float]
    launch_id: str | None
    simulated: bool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """An answer of /model_info."""

    model_path: str | None
    served_model_name: str | None
    model_type: str | None
    architectures: tuple[str, ...]
    image_input: bool | None


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculation of one request, from the last chunk's meta_info.

    verify_steps: verify passes; accept_length: completion tokens per pass, the bonus token in it
    correct_drafts / proposed_drafts: accepted and proposed draft tokens; by_position: how many passes accepted 0, 1, 2 … drafts
    """

    verify_steps: int | None
    accept_length: float | None
    accept_rate: float | None
    correct_drafts: int | None
    proposed_drafts: int | None
    by_position: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class MetaInfo:
    """One request's meta_info. finish: stop, length, abort, or None while it runs."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    finish: str | None
    e2e_latency_s: float | None
    retractions: int | None
    speculation: Speculation | None


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _int(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value)


def _float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def server_info(document: Mapping[str, object]) -> ServerInfo:
    """The answer of /server_info as one value; never raises for a missing or odd key."""
    listed = document.get("internal_states")
    states = (
        [_mapping(s) for s in listed] if isinstance(listed, Sequence) and not isinstance(listed, (str, bytes)) else []
    )
    first: Mapping[str, object] = states[0] if states else {}
    limits = tuple(n for s in states if (n := _int(s.get("effective_max_running_requests_per_dp"))) is not None)
    memory = _mapping(first.get("memory_usage"))
    graph = memory.get("graph")
    graph_gb = _float(graph)
    if isinstance(graph, Mapping):
        parts = [v for value in graph.values() if (v := _float(value)) is not None]
        graph_gb = sum(parts) if parts else None
    lengths = [v for s in states if (v := _float(s.get("avg_spec_accept_length"))) is not None]
    rates = [v for s in states if (v := _float(s.get("last_gen_throughput"))) is not None]
    sizes = first.get("decode_cuda_graph_bs")
    startup = _mapping(document.get("startup_time")) or _mapping(first.get("startup_time"))
    environment = _mapping(first.get("env_vars"))
    masked = mask_values(document)
    return ServerInfo(
        version=_text(document.get("version")),
        status=_text(document.get("status")),
        args={k: v for k, v in masked.items() if k not in _NOT_ARGUMENTS and not k.startswith("_")},
        launch_command=_command(masked.get("launch_command")),
        running_limit=sum(limits) if limits and len(limits) == len(states) else None,
        running_limits=limits,
        slots=_int(first.get("max_mamba_cache_size")),
        kv_tokens=_int(memory.get("token_capacity")),
        swa_tokens=_int(memory.get("token_capacity_swa")),
        max_total_num_tokens=_int(document.get("max_total_num_tokens")),
        accept_length=sum(lengths) / len(lengths) if lengths else None,
        gen_throughput=sum(rates) if rates else None,
        weight_gb=_float(memory.get("weight")),
        kv_gb=_float(memory.get("kvcache")),
        graph_gb=graph_gb,
        startup_available_gb=_float(memory.get("startup_available")),
        graph_sizes=tuple(n for v in sizes if (n := _int(v)) is not None) if isinstance(sizes, (list, tuple)) else (),
        startup_s={k: s for k, v in startup.items() if (s := _float(v)) is not None},
        launch_id=_text(environment.get(LAUNCH_ID_NAME)),
        simulated=document.get("simulated") is True,
    )


def _command(value: object) -> str | None:
    if isinstance(value, (list, tuple)):
        return " ".join(str(v) for v in value)
    return _text(value)


def model_info(document: Mapping[str, object]) -> ModelInfo:
    """The answer of /model_info or /get_model_info."""
    named = document.get("architectures")
    image = document.get("has_image_understanding")
    return ModelInfo(
        _text(document.get("model_path")),
        _text(document.get("served_model_name")),
        _text(document.get("model_type")),
        tuple(str(a) for a in named) if isinstance(named, (list, tuple)) else (),
        image if isinstance(image, bool) else None,
    )


def meta_info(document: Mapping[str, object]) -> MetaInfo:
    """meta_info of /generate, whatever version wrote it."""
    reason = document.get("finish_reason")
    finish = _text(_mapping(reason).get("type")) or _text(reason)
    return MetaInfo(
        _int(document.get("prompt_tokens")),
        _int(document.get("completion_tokens")),
        _int(document.get("cached_tokens")),
        finish,
        _float(document.get("e2e_latency")),
        _int(document.get("num_retractions")),
        speculation(document),
    )


def speculation(document: Mapping[str, object]) -> Speculation | None:
    """The speculation keys of a meta_info, or of `sglext.spec_tokens_details`; None without speculation."""

    def first(*names: str) -> object:
        return next((document[n] for n in names if document.get(n) is not None), None)

    steps = _int(document.get("spec_verify_ct"))
    if steps is None and document.get("spec_accept_length") is None:
        return None
    histogram = first("spec_correct_drafts_histogram", "spec_accept_histogram")
    counted = None
    if isinstance(histogram, (list, tuple)):
        counted = tuple(_int(n) or 0 for n in histogram)
    elif isinstance(histogram, Mapping):
        by = {int(k): _int(v) or 0 for k, v in histogram.items() if str(k).isdigit()}
        counted = tuple(by.get(i, 0) for i in range(max(by, default=-1) + 1))
    return Speculation(
        steps,
        _float(document.get("spec_accept_length")),
        _float(document.get("spec_accept_rate")),
        # ≥0.5.12, 0.5.11, ≤0.5.10
        _int(first("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")),
        _int(first("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")),
        counted,
    )


# -- /metrics -----------------------------------------------------------------------------------------------------------------

_SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? +(\S+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Metrics:
    """Samples of /metrics without the `sglang:` prefix: name → ((labels, value), …). NaN samples are left out."""

    samples: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all label sets that match; for counters, and for gauges that add up over replicas (ranks of one replica do not)."""
        found = [v for have, v in self._of(name) if all(have.get(k) == w for k, w in labels.items())]
        return sum(found) if found else None

    def largest(self, name: str, **labels: str) -> float | None:
        """The largest sample: for usages, which do not add up."""
        return max((v for have, v in self._of(name) if all(have.get(k) == w for k, w in labels.items())), default=None)

    def _of(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Samples of one rank per replica: with metrics of all schedulers each rank repeats what its replica has."""
        for have, value in self.samples.get(name, ()):
            if have.get("tp_rank", "0") == "0" and have.get("pp_rank", "0") == "0":
                yield have, value


def metrics(text: str) -> Metrics:
    """Parses Prometheus text; lines that are none are passed over."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for line in text.splitlines():
        if line.startswith("#") or not (m := _SAMPLE.match(line)):
            continue
        try:
            value = float(m[3])
        except ValueError:
            continue
        if math.isnan(value):
            continue
        labels = {k: v.replace('\\"', '"').replace("\\\\", "\\") for k, v in _LABEL.findall(m[2] or "")}
        samples.setdefault(m[1].removeprefix("sglang:"), []).append((labels, value))
    return Metrics({name: tuple(found) for name, found in samples.items()})


@dataclass(frozen=True, slots=True)
class Counters:
    """What a benchmark compares before and after, from /metrics. Counters since the server's start; None: not exported by this version.

    generation_tokens: tokens generated; verify_calls: verify steps of requests, so generation_tokens / verify_calls is the accept
    length of the interval; running / queued: requests now; kv_usage and state_usage: 0…1, apart (`token_usage` is the larger of both).
    """

    generation_tokens: float | None
    prompt_tokens: float | None
    cached_tokens: float | None
    requests: float | None
    aborted: float | None
    retracted: float | None
    verify_calls: float | None
    running: float | None
    queued: float | None
    kv_usage: float | None
    state_usage: float | None
    accept_length: float | None
    decode_graph_passes: float | None


def counters(found: Metrics) -> Counters:
    """The figures of a Metrics value that a benchmark needs."""
    return Counters(
        found.total("generation_tokens_total"),
        found.total("prompt_tokens_total"),
        found.total("cached_tokens_total"),
        found.total("num_requests_total"),
        found.total("num_aborted_requests_total"),
        found.total("num_retracted_requests_total"),
        found.total("spec_verify_calls_total"),
        found.total("num_running_reqs"),
        found.total("num_queue_reqs"),
        found.largest("full_token_usage") if "full_token_usage" in found.samples else None,
        found.largest("mamba_usage"),
        found.largest("spec_accept_length"),
        found.total("cuda_graph_passes_total", mode="decode_cuda_graph"),
    )
