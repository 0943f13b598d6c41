"""What one launch's log says about the constants of the memory budget, kept for the next plan on that host.

A formula gives slots and tokens; no formula gives what a driver, a loader or a set of CUDA graphs takes. One real launch does:
the difference between predicted and actual is stored per host and model, and the next budget names it among its assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mtpdeploy.sglang.memory import GIB, Calibration, allocate
from mtpdeploy.sglang.model import ModelConfig

if TYPE_CHECKING:
    from mtpdeploy.plan.plan import Plan

_LIMIT_GB = 8.0  # a difference beyond this is no constant but another configuration: it is not kept


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of the budget beside the log's; GiB, tokens or requests. difference: actual less predicted."""

    name: str
    predicted: float | None
    actual: float | None

    @property
    def difference(self) -> float | None:
        return None if self.predicted is None or self.actual is None else self.actual - self.predicted


def signature(model: ModelConfig) -> str:
    """What must be equal for one launch to speak for another: class, depth, width, quantization."""
    return f"{model.architecture} {model.layers}x{model.hidden} {model.quantization or model.dtype}"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _inside(summary: Mapping[str, Any], group: str, key: str) -> float | None:
    part = summary.get(group)
    return _number(part.get(key)) if isinstance(part, Mapping) else None


def beside(plan: Plan, summary: Mapping[str, Any]) -> tuple[Compared, ...]:
    """The budget of the plan beside a log summary of its launch (`logs --json`); () without a budget."""
    if plan.budget is None:
        return ()
    p = plan.budget.pools
    rows = (
        ("free before the load (GB)", p.pre_load_gb, _inside(summary, "weights", "before_gb")),
        ("weights (GB)", p.weights_gb, _inside(summary, "weights", "mem_gb")),
        (
            "draft weights (GB)",
            p.draft_weights_gb if p.settings.algorithm else None,
            _inside(summary, "draft", "mem_gb"),
        ),
        ("state slots", p.slots, _inside(summary, "mamba_cache", "slots")),
        ("states (GB)", p.ssm_gb if p.slots is not None else None, _inside(summary, "mamba_cache", "ssm_gb")),
        (
            "intermediate states (GB)",
            p.intermediate_ssm_gb if p.slots is not None and p.settings.algorithm else None,
            _inside(summary, "mamba_cache", "intermediate_gb"),
        ),
        ("KV tokens", p.kv_tokens, _number(summary.get("max_total_num_tokens"))),
        ("requests at once", p.max_running, _number(summary.get("max_running_requests"))),
        ("free at the end (GB)", p.avail_end_gb, _number(summary.get("available_gpu_mem_gb"))),
    )
    return tuple(
        Compared(name, predicted, actual) for name, predicted, actual in rows if (predicted, actual) != (None, None)
    )


def calibrate(plan: Plan, summary: Mapping[str, Any], *, launch_id: str) -> Calibration | None:
    """The constants that this launch measured; None where the log or the budget does not decide them.

    The weights' offset is taken from the KV tokens, the finest figure that the log prints: with the same slots, what is
    missing from them is what loading took beyond the parameters.
    """
    known = plan.known
    before = _inside(summary, "weights", "before_gb")
    tokens = _number(summary.get("max_total_num_tokens"))
    if plan.budget is None or known.model is None or known.gpu_memory_gb is None or before is None or tokens is None:
        return None
    again = allocate(plan.args, plan.env, known.version, known.model, known.gpu_memory_gb, before)
    slots = _inside(summary, "mamba_cache", "slots")
    comparable = (
        again.failure is None and again.settings.max_total_tokens is None and (slots is None or slots == again.slots)
    )
    if not comparable:
        return None
    offset = (again.kv_tokens - tokens) * again.kv_bytes_per_token / GIB
    end = _number(summary.get("available_gpu_mem_gb"))
    # Memory that is not loaded any more is there at the end, and the other way round.
    end_offset = 0.0 if end is None else end - again.avail_end_gb
    # What others held during that launch is none of the server's: the next plan subtracts what they hold then.
    process = known.gpu_memory_gb - known.taken_gb - before
    if max(abs(offset), abs(end_offset), abs(process)) > _LIMIT_GB:
        return None
    return Calibration(
        process_gb=round(process, 3),
        weights_offset_gb=round(offset, 4),
        end_offset_gb=round(end_offset, 3),
        source=f"launch {launch_id} with SGLang {known.version}",
    )


def as_stored(calibration: Calibration) -> dict[str, object]:
    return asdict(calibration)


def from_stored(data: object) -> Calibration | None:
    """Reads `as_stored` back; None for anything else, and for figures that would not be kept."""
    if not isinstance(data, Mapping):
        return None
    numbers = [_number(data.get(n)) for n in ("process_gb", "weights_offset_gb", "end_offset_gb")]
    source = data.get("source")
    if any(n is None for n in numbers) or not isinstance(source, str):
        return None
    process, weights, end = (float(n) for n in numbers if n is not None)
    if max(abs(process), abs(weights), abs(end)) > _LIMIT_GB:
        return None
    return Calibration(process, weights, end, source)
