"""One launch of the simulator: what was asked for, what is in force, and the pools that follow."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtpdeploy.inventory.values import ArgValue, Simulate
from mtpdeploy.sglang.memory import Pools, allocate
from mtpdeploy.sglang.model import ModelConfig, recognise, shipped
from mtpdeploy.sglang.overrides import Settings, effective, settle
from mtpdeploy.sglang.rules import Finding, check
from mtpdeploy.sglang.versions import Version
from mtpdeploy.sim import arguments, card


@dataclass(frozen=True, slots=True)
class Launch:
    """in_force: canonical name → value after SGLang's own rewrites. refused: what would kill this launch, or None."""

    folder: Path
    simulate: Simulate
    version: Version
    given: Mapping[str, ArgValue]
    in_force: Mapping[str, object]
    rewrites: Mapping[str, tuple[object, str]]
    deprecated: tuple[tuple[str, str], ...]
    argv: tuple[str, ...]
    settings: Settings
    model: ModelConfig
    pools: Pools
    refused: Finding | None
    fault: str | None

    @property
    def host(self) -> str:
        return str(self.in_force.get("host") or "127.0.0.1")

    @property
    def port(self) -> int:
        value = self.in_force.get("port")
        return value if isinstance(value, int) else 30000

    @property
    def served_name(self) -> str:
        return str(self.given.get("served_model_name") or self.given["model_path"])

    @property
    def context(self) -> int:
        value = self.given.get("context_length")
        return value if isinstance(value, int) else self.model.context

    @property
    def draft_tokens(self) -> int:
        return self.settings.draft_tokens if self.settings.algorithm else 0

    @property
    def forced_accept_length(self) -> float | None:
        try:
            forced = float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", "-1"))
        except ValueError:
            return None
        return forced if forced > 0 else None

    def number(self, name: str, default: int) -> int:
        value = self.in_force.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    @classmethod
    def of(cls, folder: Path, argv: Sequence[str], simulate: Simulate) -> Launch:
        """Reads the command line; a mistake in it ends the process as argparse does."""
        version = Version.parse(simulate.sglang_version)
        read = arguments.parse(argv, version)
        env = {name: value for name, value in os.environ.items() if name.startswith("SGLANG_")}
        model = _model(str(read.given["model_path"]))
        settings, _ = settle(read.given, env, version, model, simulate.gpu_memory_gb)
        rewrites = effective(read.given, env, version, model, simulate.gpu_memory_gb)
        values: dict[str, object] = dict(read.given)
        values.update({name: value for name, (value, _) in rewrites.items()})
        for name, value in (
            ("tokenizer_path", read.given["model_path"]),
            ("served_model_name", read.given["model_path"]),
        ):
            values.setdefault(name, value)
        free = card.free_gb(folder, simulate.gpu_memory_gb)
        taken = simulate.gpu_memory_gb - free
        pools = allocate(read.given, env, version, model, simulate.gpu_memory_gb, free - 1.77 if taken > 0.5 else None)
        refused = next(
            (
                found
                for found in check(read.given, env, version, model, simulate.gpu_memory_gb)
                if found.severity == "refuse"
            ),
            None,
        )
        fault = os.environ.get("MTPDEPLOY_SIM_FAULT") or simulate.fault
        return cls(
            folder, simulate, version, read.given, values, rewrites, read.deprecated, tuple(argv),
            settings, model, pools, refused, fault,
        )  # fmt: skip


def _model(path: str) -> ModelConfig:
    config = Path(path) / "config.json"
    if config.is_file():
        return ModelConfig.from_json(json.loads(config.read_text()), str(config))
    known = recognise(path)
    return known[0] if known else shipped("qwen3.6-27b")
