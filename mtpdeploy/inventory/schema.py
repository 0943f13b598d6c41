"""What may stand in an inventory, a profile and a workload. The descriptions are the reference in docs/ and the hints in errors.

Values are strict: "3" is not 3 and 1 is not true, because a YAML slip should be told and not guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from mtpdeploy.inventory.documents import Document, KeyPath, Problem, did_you_mean

# Lengths are bounded where a name becomes a file or a word of a command line.
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z"  # of hosts and groups
SERVICE = r"^[a-z0-9][a-z0-9-]{0,40}$"
NEIGHBOURS = ("agent", "bench")  # folders of the work folder beside those of the services
PLAIN = r"^[^-\s\x00-\x1f][^\x00-\x1f]{0,1023}$"  # no control characters, and never mistaken for an option
WORD = r"^[^-\s\x00-\x1f@][^\s\x00-\x1f@]{0,252}$"
REMOTE_PATH = r"^(~/|/)[^\x00-\x1f]{0,1023}$"


_PATTERNS = {
    PLAIN: "one line of text that does not begin with - or a space",
    WORD: "one word, without @, that does not begin with -",
    REMOTE_PATH: "an absolute path or one below ~/",
    SERVICE: "a short name",
}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_not_said(cls, data: object) -> object:
        """`gpu1:` and `args:` with nothing behind them say nothing, as in a file whose lines are commented out."""
        if data is None:
            return {}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {k: v for k, v in data.items() if v is not None or k not in known} if isinstance(data, dict) else data


class Ssh(Strict):
    identity_file: str | None = Field(
        None, pattern=PLAIN, description="private key; else ~/.ssh/config and the agent decide"
    )
    proxy_jump: str | None = Field(None, pattern=PLAIN, description="host to go through, as in ssh -J")
    config_file: str | None = Field(None, pattern=PLAIN, description="instead of ~/.ssh/config")
    known_hosts_file: str | None = Field(None, pattern=PLAIN, description="read besides the usual known_hosts files")
    connect_timeout_s: float = Field(10.0, gt=0, le=600, description="seconds")
    forward_agent: bool = Field(False, description="true or false")


class GpuEntry(Strict):
    index: int | None = Field(None, ge=0, description="as nvidia-smi counts; default: the next one")
    count: int = Field(1, ge=1, le=64, description="so many alike")
    name: str | None = Field(None, description="such as NVIDIA H200")
    memory_gb: float | None = Field(None, gt=0, description="GiB")


class SimulateEntry(Strict):
    sglang_version: str = Field("0.5.18", description="the version that is played")
    clock: float = Field(1.0, gt=0, le=10_000, description="simulated seconds per real second")
    gpu_name: str = Field("NVIDIA H200", description="as nvidia-smi shows it")
    gpu_memory_gb: float = Field(95.0, gt=0, description="GiB")
    accept_length: float = Field(3.2, ge=1, description="mean accept length at 4 draft tokens")
    fault: str | None = Field(None, description="a fault to play")


class Settings(Strict):
    """May stand in `defaults:`, in a group, in a host and in a profile; the later wins."""

    python: str | None = Field(None, pattern=PLAIN, description="SGLang's interpreter at the host; default python3")
    venv: str | None = Field(
        None, pattern=REMOTE_PATH, description="SGLang's virtual environment at the host; instead of python"
    )
    workdir: str | None = Field(
        None, pattern=REMOTE_PATH, description="releases are kept here, an absolute path or ~/…; default ~/.mtpdeploy"
    )
    service: str | None = Field(
        None, pattern=SERVICE, description="lower case letters, digits and dashes; default sglang"
    )

    @field_validator("service")
    @classmethod
    def _has_a_folder_of_its_own(cls, name: str | None) -> str | None:
        if name in NEIGHBOURS:
            raise PydanticCustomError(
                "taken",
                "should be another name: the work folder keeps something else of ours under "
                + " and ".join(NEIGHBOURS),
            )
        return name

    supervisor: Literal["auto", "systemd", "systemd-user", "tmux", "detached"] | None = Field(
        None, description="default auto: the best that the host has"
    )
    ready_timeout_s: float | None = Field(
        None, gt=0, description="seconds without progress of the log before a launch is given up; default 600"
    )
    drain_timeout_s: float | None = Field(
        None,
        ge=0,
        description="seconds that running requests get when the server is stopped; default 60. SGLang looks every 5 s whether "
        "it was asked to stop: with less than 10 an idle server may be killed too",
    )
    slots_for: int | None = Field(None, ge=1, description="size the state slots for so many concurrent requests")
    api_key: Any = Field(None, description="{from_env: NAME} or {from_file: PATH}; requests then need this key")
    sglang_version: str | None = Field(None, description="pins the version; default: the host is asked")
    model: str | None = Field(
        None, pattern=PLAIN, description="Hugging Face id, or a name that the host's models: maps to a path"
    )
    model_config_file: str | None = Field(
        None, alias="model_config", pattern=PLAIN, description="config.json at this machine, for plans without the host"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="SGLang arguments by canonical name")
    env: dict[str, Any] = Field(default_factory=dict, description="environment of the server")


class Placed(Settings):
    """What a host, a group and `defaults:` may say beyond settings."""

    user: str | None = Field(None, pattern=WORD, description="login name; else ssh's own rules decide")
    port: int | None = Field(None, ge=1, le=65535, description="SSH port")
    ssh: Ssh | None = Field(None, description="additions to ~/.ssh/config")
    gpus: list[GpuEntry] | None = Field(None, description="list of GPUs; the host's own facts replace it once known")
    models: dict[str, str] = Field(default_factory=dict, description="model name or id → path at the host")
    simulate: SimulateEntry | None = Field(None, description="this host plays a simulated SGLang")


class HostEntry(Placed):
    address: str | None = Field(
        None, pattern=WORD, description="name or IP address; default: the host's name here, as an ssh alias"
    )
    local: bool = Field(False, description="true: this machine, without SSH")
    groups: list[str] = Field(default_factory=list, description="groups that this host belongs to; the later wins")


class InventoryFile(Strict):
    defaults: Placed = Field(Placed(), description="for all hosts of this file")
    groups: dict[str, Placed] = Field(default_factory=dict, description="group name → what its hosts share")
    hosts: dict[str, HostEntry] = Field(default_factory=dict, description="host name → the host")


class ProfileFile(Settings):
    description: str = Field("", description="one line for `profiles`")
    extends: str | None = Field(None, pattern=PLAIN, description="a profile that this one builds on")


class WorkloadFile(Strict):
    description: str = Field("", description="one line")
    concurrency: int | list[int] = Field(
        default_factory=list, description="requests in flight, one point each; empty: 1 and the effective maximum"
    )
    rate: float | list[float] = Field(
        default_factory=list, description="requests per second, open loop, one point each"
    )
    requests: int = Field(16, ge=1, description="measured requests a point")
    repeat: int = Field(1, ge=1, description="repeats of each point")
    input_tokens: int | None = Field(None, ge=1, description="tokens; default: the prompts' own length")
    output_tokens: int = Field(256, ge=1, description="tokens")
    ignore_eos: bool = Field(False, description="true: always the full output length")
    prompts: str = Field("mixed", pattern=PLAIN, description="a shipped class of prompts, mixed, random, or a file")
    seed: int = Field(0, ge=0, description="of prompts and arrivals")
    temperature: float = Field(0.0, ge=0, le=2, description="0 is greedy")


Model = TypeVar("Model", bound=Strict)


def validated(
    model: type[Model], document: Document, data: Mapping[str, object] | None = None
) -> tuple[Model | None, list[Problem]]:
    """The document as `model`, or None and everything that is wrong with it."""
    try:
        return model.model_validate(document.data if data is None else data), []
    except ValidationError as error:
        seen: dict[tuple[str, str], Problem] = {}
        for detail in error.errors(include_url=False):
            at = _without_branch(tuple(detail["loc"]), model)
            problem = document.problem(at, _told(detail, model, at))
            seen.setdefault((problem.key, ""), problem)
        return None, list(seen.values())


def _without_branch(at: KeyPath, model: type[Strict]) -> KeyPath:
    """Pydantic appends the tried branch of a union (`concurrency.int`); that is no key of the file."""
    return at[:1] if model is WorkloadFile and at[:1] in (("concurrency",), ("rate",)) else at


def _told(detail: ErrorDetails, model: type[Strict], at: KeyPath) -> str:
    given, kind, ctx = detail["input"], detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key" + did_you_mean(str(at[-1]), keys(_model_at(model, at[:-1])))
    hint = _description(model, at)
    hint = f" ({hint})" if hint else ""
    shown = "nothing" if given is None else repr(given) if len(repr(given)) < 60 else repr(given)[:57] + "…"
    right = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "string_type": "text; put it in quotes if it is meant so",
        "bool_type": "true or false",
        "dict_type": "a mapping",
        "model_type": "a mapping",
        "list_type": "a list",
        "greater_than": f"greater than {ctx.get('gt')}",
        "greater_than_equal": f"at least {ctx.get('ge')}",
        "less_than_equal": f"at most {ctx.get('le')}",
        "literal_error": str(ctx.get("expected", "")).replace("'", "").replace(" or ", ", ").join(("one of ", "")),
        "string_pattern_mismatch": _PATTERNS.get(str(ctx.get("pattern"))),
    }.get(kind)
    return f"should be {right}, not {shown}{hint}" if right else f"{detail['msg']}, not {shown}{hint}"


def keys(model: type[Strict] | None) -> dict[str, str]:
    """The keys as they are written in the file, each with its description."""
    return {f.alias or name: f.description or "" for name, f in model.model_fields.items()} if model else {}


_BELOW: dict[str, type[Strict]] = {"ssh": Ssh, "simulate": SimulateEntry, "defaults": Placed, "gpus": GpuEntry}


def _model_at(model: type[Strict], at: KeyPath) -> type[Strict] | None:
    here: type[Strict] | None = model
    for index, key in enumerate(at):
        if isinstance(key, int):
            continue
        if index == 0 and model is InventoryFile and key in ("groups", "hosts"):
            entry: type[Strict] = HostEntry if key == "hosts" else Placed
            here = entry if len(at) > 1 else None
        elif index == 1 and model is InventoryFile and at[0] in ("groups", "hosts"):
            continue
        else:
            here = _BELOW.get(key)
    return here


def _description(model: type[Strict], at: KeyPath) -> str:
    named = [key for key in at if isinstance(key, str)]
    return keys(_model_at(model, at[: at.index(named[-1])])).get(named[-1], "") if named else ""
