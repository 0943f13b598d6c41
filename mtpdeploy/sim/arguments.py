"""The command line of the version that is played: argparse over its own flags, so that it refuses what SGLang refuses."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from mtpdeploy.inventory.values import ArgValue
from mtpdeploy.sglang.flags import Flag, flags_of, human_int
from mtpdeploy.sglang.versions import Version


@dataclass(frozen=True, slots=True)
class Arguments:
    """given: canonical name → value, only what the command line said. deprecated: spellings with a successor, as typed."""

    given: Mapping[str, ArgValue]
    deprecated: tuple[tuple[str, str], ...]


def _type(flag: Flag) -> Callable[[str], Any]:
    return cast(
        "Callable[[str], Any]",
        {"int": int, "float": float, "json": json.loads, "human_int": human_int}.get(flag.type, str),
    )


def parser(version: Version) -> argparse.ArgumentParser:
    """argparse's behaviour with prefixes and ambiguity is SGLang's own: both use the same library."""
    made = argparse.ArgumentParser(prog="sglang serve" if version.at_least("0.5.10") else "launch_server.py")
    for flag in flags_of(version).values():
        if flag.option in ("-h", "--help"):
            continue
        dest = f"{flag.field}\0{flag.option}"
        if flag.kind == "switch":
            made.add_argument(flag.option, dest=dest, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
            continue
        if flag.kind == "flag" or flag.const is not None:
            made.add_argument(flag.option, dest=dest, action="store_true", default=argparse.SUPPRESS)
            continue
        made.add_argument(
            flag.option,
            dest=dest,
            type=_type(flag),
            nargs=flag.nargs,
            choices=flag.choices or None if not flag.choices_computed else None,
            default=argparse.SUPPRESS,
            metavar=flag.option[2:].upper().replace("-", "_") if not flag.choices else None,
        )
    return made


def expand(argv: Sequence[str]) -> list[str]:
    """`--config FILE` (two words only) put in front, as utils/server_args_config_parser.py does: true is a bare flag,
    false and an empty list are left out, a list is several words, a mapping JSON, null the word None.
    """
    words = list(argv)
    if "--config" not in words:
        return words
    at = words.index("--config")
    said = yaml.safe_load(Path(words[at + 1]).read_text()) or {}
    front: list[str] = []
    for key, value in said.items():
        if value is False or value == []:
            continue
        front.append(f"--{key}")
        if isinstance(value, list):
            front += map(str, value)
        elif isinstance(value, dict):
            front.append(json.dumps(value))
        elif value is not True:
            front.append(str(value))
    return [*front, *words[:at], *words[at + 2 :]]


def parse(argv: Sequence[str], version: Version) -> Arguments:
    """Reads the command line as SGLang of that version would; a mistake ends the process with status 2."""
    made = parser(version)
    flags = flags_of(version)
    given: dict[str, ArgValue] = {}
    deprecated: list[tuple[str, str]] = []
    for dest, value in vars(made.parse_args(expand(argv))).items():
        field, _, option = dest.partition("\0")
        flag = flags[option]
        if flag.deprecated:
            deprecated.append((option, flag.use or ""))
        if flag.const is not None and value is True:
            value = flag.const
        given[field] = tuple(value) if isinstance(value, list) else value
    if not given.get("model_path"):
        made.error("the following arguments are required: --model-path")
    return Arguments(given, tuple(deprecated))


# Fields of ServerArgs that are not called like their flag.
_FIELDS = {
    "fp4_gemm_backend": "fp4_gemm_runner_backend",
    "fp8_gemm_backend": "fp8_gemm_runner_backend",
    "elastic_ep_join_mode": "ep_join_mode",
    "elastic_ep_join_rank_offset": "ep_join_rank_offset",
}


def shown(given: Mapping[str, object], version: Version) -> dict[str, object]:
    """All server arguments of the version by its own field names, `given` (canonical names) over the defaults."""
    values: dict[str, object] = {}
    for flag in flags_of(version).values():
        name = flag.group.lstrip("-").replace("-", "_")
        name = _FIELDS.get(name, name)
        if flag.deprecated or flag.dead or name in values or flag.const is not None:
            continue
        default = False if flag.kind == "flag" and flag.default is None else flag.default
        values[name] = given.get(flag.field, default)
    values.pop("help", None)
    values.pop("config", None)
    return values
