"""The published configuration of Qwen3.6-27B with MTP, as the tests of several packages ask for it."""

from __future__ import annotations

from typing import Any

DRAFTING: dict[str, Any] = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
SETTINGS: dict[str, Any] = {
    **DRAFTING,
    "mamba_radix_cache_strategy": "extra_buffer",
    "max_mamba_cache_size": 24,
    "mamba_full_memory_ratio": 0.4,
    "mem_fraction_static": 0.92,
}
