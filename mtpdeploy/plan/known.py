"""What a plan may take as known: SGLang's version, the GPUs' memory, the model's shape; each with where it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtpdeploy.errors import ConfigError
from mtpdeploy.inventory.values import Deployment
from mtpdeploy.plan.calibration import from_stored, signature
from mtpdeploy.secret import Secret
from mtpdeploy.sglang.flags import HelpFlags
from mtpdeploy.sglang.memory import Calibration, free_before_load
from mtpdeploy.sglang.model import ModelConfig, recognise
from mtpdeploy.sglang.versions import NEWEST, Version

_IDLE_GB = 1.0  # an idle card reports up to this much as used: the driver's own


@dataclass(frozen=True, slots=True)
class Known:
    """The ground of a plan. Sizes in GiB of the smallest GPU that the service uses; None = not known.

    available_gb: free just before the weights load. taken_gb: what others than this service hold now; 0.0 where unknown.
    version_is_fact: read from the host or pinned, not assumed.
    model_is_fact: the host's own config.json, or a file that was named; a shape judged by its name is not.
    """

    version: Version
    version_source: str
    version_is_fact: bool
    gpu_memory_gb: float | None = None
    available_gb: float | None = None
    taken_gb: float = 0.0
    model: ModelConfig | None = None
    model_is_fact: bool = False
    help_flags: HelpFlags | None = None
    gpus: tuple[int, ...] = ()
    simulated: bool = False
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    no_memory_because: str | None = None
    calibration: Calibration | None = None


def known_of(
    deployment: Deployment,
    facts: Mapping[str, Any] | None = None,
    *,
    sglang_version: str | None = None,
    gpu_memory_gb: float | None = None,
    available_gb: float | None = None,
    model: ModelConfig | None = None,
    facts_source: str = "read from the host",
) -> Known:
    """Options first, then the host's facts (the agent's probe), then what the deployment pins, then assumptions that are said.

    facts["calibrations"], where it is there, holds what earlier launches on this host measured, by model.

    Raises ConfigError for a version that is none.
    """
    facts = facts or {}
    notes: list[str] = []
    assumptions: list[str] = []
    version, source, certain = _version(deployment, facts, sglang_version, facts_source)
    if not certain:
        notes.append(
            f"SGLang's version is not known and taken as {version}, the newest in the table; --sglang-version pins it"
        )
    if caveat := version.caveat:
        notes.append(caveat)
    names = facts.get("help_flags")
    help_flags = None
    if isinstance(names, Sequence) and not isinstance(names, str) and not version.known:
        try:
            help_flags = HelpFlags.named(str(n) for n in names)
            notes.append(f"the flags are those of the host's own --help ({len(help_flags.options)} options)")
        except ValueError as wrong:
            notes.append(f"the host's --help could not be used: {wrong}")
    shape, why, certain_shape = _model(deployment, facts, model, assumptions)
    stored = facts.get("calibrations")
    calibration = from_stored(stored.get(signature(shape))) if shape and isinstance(stored, Mapping) else None
    indices = gpu_indices(deployment)
    total, free, gpu_notes = _gpu_memory(deployment, facts, indices)
    if gpu_memory_gb is not None:
        total = gpu_memory_gb
        if available_gb is None:
            free = None
    taken = max(0.0, total - free - _IDLE_GB) if total is not None and free is not None else 0.0
    python = facts.get("python")
    simulated = deployment.host.simulate is not None or bool(isinstance(python, Mapping) and python.get("simulated"))
    if simulated:
        assumptions.append("the host plays a simulated SGLang: its GPU and its memory are simulated too")
    if available_gb is None and free is not None and shape is not None and total is not None:
        # What the server itself took on this card, less what is taken now.
        measured = total - calibration.process_gb - taken if calibration else None
        available_gb = free_before_load(total, shape, free) if measured is None else measured
        assumptions.append(
            f"{available_gb:.2f} GB are taken as free before the load: {free:.2f} GB free now, less the server's own context"
        )
    reason = why
    if reason is None and total is None and available_gb is None:
        reason = "the GPU's memory is not known: --gpu-memory-gb, `gpus:` in the inventory, or a host that was probed"
    return Known(
        version=version,
        version_source=source,
        version_is_fact=certain,
        gpu_memory_gb=total,
        available_gb=available_gb,
        taken_gb=taken,
        model=shape,
        model_is_fact=certain_shape,
        help_flags=help_flags,
        gpus=indices,
        simulated=simulated,
        assumptions=(*assumptions, *gpu_notes),
        notes=tuple(notes),
        no_memory_because=reason,
        calibration=calibration,
    )


def _version(
    deployment: Deployment, facts: Mapping[str, Any], option: str | None, facts_source: str
) -> tuple[Version, str, bool]:
    python = facts.get("python")
    found = python.get("sglang_version") if isinstance(python, Mapping) else None
    candidates = (
        (option, "--sglang-version"),
        (found, facts_source),
        (deployment.sglang_version, deployment.origin.get("sglang_version", "pinned")),
        (deployment.host.simulate.sglang_version if deployment.host.simulate else None, "the host's `simulate:`"),
    )
    for text, source in candidates:
        if text:
            try:
                return Version.parse(str(text)), source, True
            except ValueError as wrong:
                raise ConfigError(f"{source}: {wrong}") from None
    return NEWEST, "assumed", False


def _model(
    deployment: Deployment, facts: Mapping[str, Any], given: ModelConfig | None, assumptions: list[str]
) -> tuple[ModelConfig | None, str | None, bool]:
    """(shape, why there is none, whether it was read rather than judged by a name)."""
    if given is not None:
        return given, None, True
    if deployment.model_config:
        return ModelConfig.read(deployment.model_config), None, True
    read = facts.get("model")
    if isinstance(read, Mapping) and isinstance(read.get("config"), Mapping):
        try:
            shape = ModelConfig.from_json(read["config"], f"{read.get('path')}/config.json")
        except ConfigError as unknown:
            return None, unknown.message, False
        weights = read.get("weights_bytes")
        return (shape.with_checkpoint_bytes(weights) if isinstance(weights, int) and weights > 0 else shape), None, True
    path = deployment.args.get("model_path")
    if isinstance(path, str) and (named := recognise(path)):
        assumptions.append(named[1])
        return named[0], None, False
    return None, f"the shape of {path or 'the model'} is not known: --model-config takes its config.json", False


def gpu_indices(deployment: Deployment) -> tuple[int, ...]:
    """The GPUs that this service uses on one node, by index as nvidia-smi counts; () where they are named by UUID."""
    args = deployment.args

    def whole(name: str, default: int) -> int:
        value = args.get(name, default)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    replicas = 1 if args.get("enable_dp_attention") else whole("dp_size", 1)
    count = max(1, whole("tp_size", 1) * whole("pp_size", 1) * replicas // max(1, whole("nnodes", 1)))
    first, step = whole("base_gpu_id", 0), max(1, whole("gpu_id_step", 1))
    wanted = [first + step * n for n in range(count)]
    visible = deployment.env.get("CUDA_VISIBLE_DEVICES")
    if visible is None or isinstance(visible, Secret):
        return tuple(wanted)
    listed = [part.strip() for part in visible.split(",") if part.strip()]
    if not all(part.isdigit() for part in listed):
        return ()
    return tuple(int(listed[n]) for n in wanted if n < len(listed))


def _gpu_memory(
    deployment: Deployment, facts: Mapping[str, Any], indices: Sequence[int]
) -> tuple[float | None, float | None, tuple[str, ...]]:
    """(total, free) of the smallest GPU in use, and what to say of them.

    What this service's own launches hold counts as free: a deploy replaces them.
    """
    read = facts.get("gpus")
    launches = facts.get("living_launches")
    mine = launches.get(deployment.service) or () if isinstance(launches, Mapping) else None
    rows: list[tuple[int, float, float | None]] = []
    notes: list[str] = []
    if isinstance(read, Sequence) and not isinstance(read, str):
        for gpu in read:
            if not isinstance(gpu, Mapping) or not isinstance(total := gpu.get("memory_gb"), (int, float)):
                continue
            index = int(gpu.get("index", 0))
            if indices and index not in indices:
                continue
            free = gpu.get("free_gb")
            users = [p for p in gpu.get("processes") or () if isinstance(p, Mapping)]
            own = [p for p in users if p.get("launch_id") and (mine is None or p["launch_id"] in mine)]
            sizes = [float(p["used_gb"]) for p in own if isinstance(p.get("used_gb"), (int, float))]
            if sizes:
                notes.append(
                    f"GPU {index}: the {sum(sizes):.2f} GB that the running launch holds come free before the load"
                )
            if len(sizes) < len(own) or (mine and not own):
                notes.append(
                    f"GPU {index}: how much the running launch holds is not known (nvidia-smi does not tell, as in many "
                    "containers); it is not counted as coming free, so more may be free before the load"
                )
            others = [p for p in users if p not in own]
            if foreign := sum(1 for p in others if not p.get("launch_id")):
                notes.append(
                    f"GPU {index} is also used by {foreign} process{'' if foreign == 1 else 'es'} that mtpdeploy did not start"
                )
            if len(others) > foreign:
                notes.append(f"GPU {index} is also used by another service of mtpdeploy, which stays")
            rows.append((index, float(total), float(free) + sum(sizes) if isinstance(free, (int, float)) else None))
    if rows:
        frees = [free for _, _, free in rows if free is not None]
        return min(total for _, total, _ in rows), min(frees) if len(frees) == len(rows) else None, tuple(notes)
    if simulate := deployment.host.simulate:
        return simulate.gpu_memory_gb, simulate.gpu_memory_gb, ()
    stated = [
        g.memory_gb for g in deployment.host.gpus if g.memory_gb is not None and (not indices or g.index in indices)
    ]
    if stated:
        return min(stated), None, ("the GPU's memory is what the inventory says",)
    return None, None, ()
