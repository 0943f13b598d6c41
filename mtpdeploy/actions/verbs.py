"""Every verb of both doors, as data. Nothing heavy is imported here: `--help` and `fab --list` read only this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """`--name`. A trailing underscore is dropped (`from_` → `--from`), others become dashes.

    type: str, int, float, or bool for a flag. multiple: may be repeated, arrives as a tuple.
    """

    name: str
    help: str
    type: type = str
    default: object = None
    multiple: bool = False
    choices: tuple[str, ...] = ()
    metavar: str = ""


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument; optional ones arrive as None, several as a tuple."""

    name: str
    help: str
    required: bool = True
    multiple: bool = False


@dataclass(frozen=True, slots=True)
class Verb:
    """One use case. `action` and `text` are `module:function`, imported only when the verb runs.

    action(*, home, talk, **options) → an answer with `as_json()` (and `exit_code`, 0 if absent);
    text(answer, console) prints it for people. streams: the action also gets `out`, which writes a line to stdout at once.
    """

    name: str
    summary: str
    action: str
    text: str
    options: tuple[Option, ...] = ()
    arguments: tuple[Argument, ...] = ()
    examples: tuple[str, ...] = ()
    details: str = ""
    streams: bool = False


HOST = Option("host", "Host, group, comma list or ssh alias (user@name:port). Default: the last deployed, else the only one.")
PROFILE = Option("profile", "Profile by name, or a YAML file.")
INVENTORY = Option("inventory", "Inventory file, repeatable. Default: the home's inventories/*.yml.", multiple=True)
SET = Option("set_", "Override one setting, such as args.mem_fraction_static=0.9 or env.NAME=1; repeatable, wins over all.", multiple=True)


def verbs() -> Iterator[Verb]:
    """All verbs in the order in which help shows them."""
    from mtpdeploy.actions.catalogue import CATALOGUE

    yield from CATALOGUE
