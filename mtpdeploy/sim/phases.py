"""How long the phases of a start take and which sizes its CUDA graphs have. Pure; seconds of a real server.

Measured with SGLang 0.5.17 and Qwen3.6-27B's shape on an H200, kernels compiled before (tests/data/h200): 19 s of imports
before the arguments, 19 s until the scheduler joins its group, 13 s before the draft loads, 0.25 to 0.5 s a captured size.
What was not measured: the reading of real weights, taken as 2 GiB/s; the recordings had none to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtpdeploy.sglang.overrides import prefill_graph_sizes
from mtpdeploy.sim.launch import Launch

PACE = 8.0  # a start is played so much faster than serving is: nobody rehearses to watch imports
GRAPHS = ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend")
_READ_GB_S = 2.0
_SHARES = {"target_verify": 0.5, "draft_decode": 0.22, "draft_extend": 0.28}  # of the decode graphs' memory


def listed_sizes(speculative: bool, most: int) -> tuple[int, ...]:
    """SGLang's list of batch sizes to capture, up to `most`."""
    plain = (1, 2, 4, 8, 12, *range(16, 513, 8))
    fine = (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 513, 8))
    return tuple(size for size in (fine if speculative else plain) if size <= most)


def decode_sizes(launch: Launch) -> tuple[int, ...]:
    """The batch sizes that are captured: those of the list that can run, and as many as can run itself."""
    most = max(1, min(launch.settings.decode_max_bs, launch.pools.max_running))
    return tuple(sorted({*listed_sizes(bool(launch.draft_tokens), most), most}))


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds. graphs_s and graphs_gb: by the names of /server_info, every one of GRAPHS."""

    imports_s: float
    scheduler_s: float
    weights_s: float
    before_draft_s: float
    draft_weights_s: float
    pools_s: float
    graphs_s: Mapping[str, float]
    graphs_gb: Mapping[str, float]

    @classmethod
    def of(cls, launch: Launch) -> Phases:
        pools, settings = launch.pools, launch.settings
        dummy = launch.in_force.get("load_format") == "dummy"
        speculative = bool(launch.draft_tokens)
        sizes = len(decode_sizes(launch))
        seconds, memory = dict.fromkeys(GRAPHS, 0.0), dict.fromkeys(GRAPHS, 0.0)
        if settings.prefill_graphs and pools.prefill_graph_gb > 0:
            seconds["prefill"] = 0.5 * len(prefill_graph_sizes(settings.chunk))
            memory["prefill"] = pools.prefill_graph_gb
        if settings.decode_graphs and speculative:
            seconds |= {"target_verify": 0.8 + 0.25 * sizes, "draft_extend": 0.8 + 0.02 * sizes}
            memory |= {name: share * pools.decode_graph_gb for name, share in _SHARES.items()}
            seconds["draft_decode"] = 0.8 + 0.03 * sizes
            if settings.steps <= 1:  # one step drafts while it extends: there is nothing to capture apart
                memory["target_verify"] += memory["draft_decode"]
                seconds["draft_decode"] = memory["draft_decode"] = 0.0
        elif settings.decode_graphs:
            seconds["decode"], memory["decode"] = 1.0 + 0.4 * sizes, pools.decode_graph_gb
        return cls(
            imports_s=19.0,
            scheduler_s=19.0,
            weights_s=0.65 if dummy else pools.weights_gb / _READ_GB_S,
            before_draft_s=13.0 if speculative else 0.0,
            draft_weights_s=0.0 if dummy or not speculative else pools.draft_weights_gb / _READ_GB_S,
            pools_s=0.8 if speculative else 0.01,
            graphs_s=seconds,
            graphs_gb=memory,
        )

    @property
    def scheduler_e2e_s(self) -> float:
        """From the scheduler's own start to its last graph."""
        return (
            8.0
            + self.weights_s
            + self.before_draft_s
            + self.draft_weights_s
            + self.pools_s
            + sum(self.graphs_s.values())
        )

    @property
    def tokenizer_e2e_s(self) -> float:
        """From the arguments to the open port."""
        return self.scheduler_s - 8.0 + self.scheduler_e2e_s

    def startup_time(self) -> dict[str, object]:
        """`startup_time` of /server_info (0.5.17 and later)."""
        return {
            "load_weight": self.weights_s + self.draft_weights_s,
            "kv_cache_allocation": self.pools_s,
            "scheduler_e2e": self.scheduler_e2e_s,
            "cuda_graph": dict(self.graphs_s),
            "tokenizer_e2e": self.tokenizer_e2e_s,
        }
