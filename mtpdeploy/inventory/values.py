"""What an inventory and a profile say, validated and frozen; and the deployment that the layers resolve to.

Layers, weakest first: defaults < group < host < profile < --set.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mtpdeploy.secret import Secret

# A value under `args:`; None means "leave SGLang's default", a list is an nargs option, a mapping a JSON option.
ArgValue = bool | int | float | str | None | tuple["ArgValue", ...] | Mapping[str, "ArgValue"]
SupervisorChoice = Literal["auto", "systemd", "systemd-user", "tmux", "detached"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the inventory states it; memory in GiB. Facts from the host replace it where they are known."""

    index: int
    name: str | None = None
    memory_gb: float | None = None


@dataclass(frozen=True, slots=True)
class SshOptions:
    """What the inventory adds to ~/.ssh/config; None leaves the decision there."""

    identity_file: str | None = None
    proxy_jump: str | None = None
    config_file: str | None = None  # instead of ~/.ssh/config
    known_hosts_file: str | None = None  # besides the usual ones
    connect_timeout_s: float = 10.0
    forward_agent: bool = False


@dataclass(frozen=True, slots=True)
class Simulate:
    """This host runs the simulated SGLang: everything is real but the engine and its GPU."""

    sglang_version: str = "0.5.18"
    clock: float = 1.0  # simulated seconds per real second; more is faster
    gpu_name: str = "NVIDIA H200"
    gpu_memory_gb: float = 95.0
    accept_length: float = 3.2  # mean of the acceptance the simulator draws at 4 draft tokens
    fault: str | None = None  # one of sim's documented faults


@dataclass(frozen=True, slots=True)
class Host:
    """A machine. `address` None means `local`: this machine, no SSH (only if `local: true`)."""

    name: str
    address: str | None = None
    user: str | None = None  # None: ssh's own rules decide
    port: int | None = None  # SSH port
    local: bool = False
    ssh: SshOptions = field(default_factory=SshOptions)
    groups: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    simulate: Simulate | None = None
    source: Path | None = None  # the inventory file; None for an ssh alias


@dataclass(frozen=True, slots=True)
class VersionedEnv:
    """An environment variable that only some SGLang versions need, such as SGLANG_ENABLE_SPEC_V2 for `<=0.5.10`."""

    name: str
    value: str
    versions: str  # `<=0.5.10`, or several joined by commas: `>=0.5.7,<0.5.14`


@dataclass(frozen=True, slots=True)
class Deployment:
    """One service on one host with every layer applied: what `plan` works from.

    args:  SGLang arguments by canonical name (newest release's, underscores); always has host and port; has model_path.
    env:   environment of the server; Secret where the layer said `secret:`/`from_env:`/`from_file:`.
    origin: dotted key (`args.mem_fraction_static`, `python`) → the layer it came from, such as `profile mtp (inventories/profiles/mtp.yml)`.
    """

    host: Host
    profile: str
    service: str  # folder below workdir and stem of unit/session names; [a-z0-9][a-z0-9-]{0,40}
    args: Mapping[str, ArgValue]
    env: Mapping[str, str | Secret]
    python: str  # SGLang's interpreter at the host (a venv's bin/python resolves to this)
    workdir: str  # may begin with ~/ ; default ~/.mtpdeploy
    supervisor: SupervisorChoice
    ready_timeout_s: float  # limit without progress of the log, not in all
    drain_timeout_s: float
    slots_for: int | None  # mtp-throughput: size slots for this many concurrent requests
    api_key: Secret | None
    sglang_version: str | None  # pinned by inventory/profile/option; None: ask the host
    model_config: str | None  # a config.json at this machine, for planning without the host
    origin: Mapping[str, str]
    notes: tuple[str, ...] = ()
    # Applied once the version is known: `inventory.env_for(deployment, version)` is the environment to use.
    versioned_env: tuple[VersionedEnv, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """What the benchmark sends. Lengths in tokens."""

    name: str
    concurrency: tuple[int, ...] = ()  # () = 1 and the effective maximum
    rate: tuple[float, ...] = ()  # open loop, requests/s
    requests: int = 16  # measured requests a point
    repeat: int = 1
    input_tokens: int | None = None  # None: the prompts' own length
    output_tokens: int = 256
    ignore_eos: bool = False
    prompts: str = "mixed"  # a shipped prompt class, `mixed`, `random`, or a file
    seed: int = 0
    temperature: float = 0.0
    description: str = ""
    source: Path | None = None  # None: not from a file


def as_sets(args: Mapping[str, object]) -> str:
    """The options that give these arguments, as they are typed: `--set args.disable_radix_cache=true`. Values are YAML (JSON is)."""
    words = (value if isinstance(value, str) else json.dumps(value) for value in args.values())
    return " ".join(f"--set {shlex.quote(f'args.{name}={word}')}" for name, word in zip(args, words, strict=True))
