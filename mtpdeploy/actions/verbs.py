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

    @property
    def flag(self) -> str:
        """As it is typed: `--dry-run`."""
        return "--" + self.name.rstrip("_").replace("_", "-")

    @property
    def placeholder(self) -> str:
        """What stands for its value in help and reference: its unit where it has one."""
        if self.metavar or self.type is bool:
            return self.metavar
        for ending, unit in (("_gb", "GB"), ("timeout", "SECONDS")):
            if self.name.endswith(ending):
                return unit
        return {int: "N", float: "NUMBER"}.get(self.type, self.flag[2:].upper())

    @property
    def completes(self) -> str:
        """What a shell completes its value from: `file`, or the noun that it names."""
        return "file" if self.placeholder in ("FILE", "INVENTORY", "DATASET", "TRACE") else self.name.rstrip("_")

    @property
    def told(self) -> str:
        """The help line with what it accepts beyond its type; both doors and the reference print this one."""
        extras = [
            *([f"one of {', '.join(self.choices)}"] if self.choices else []),
            *(["repeatable"] if self.multiple and "repeatable" not in self.help else []),
            *([f"default {self.default}"] if self.default not in (None, False, ()) else []),
        ]
        return f"{self.help} ({'; '.join(extras)})" if extras else self.help


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
    text(answer, console) prints it for people. The console takes strings literally (no markup): use `style=` or rich's Text.
    streams: the action also gets `out`, which writes a line to stdout at once, and `json`, whether such a line should be JSON;
    it may return None, and then nothing more is printed.
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


HOST = Option(
    "host", "Host, group, comma list or ssh alias (user@name:port). Default: the last deployed, else the only one."
)
PROFILE = Option("profile", "Profile by name, or a YAML file.")
INVENTORY = Option("inventory", "Inventory file, repeatable. Default: the home's inventories/*.yml.", multiple=True)
SET = Option(
    "set_",
    "Override one setting, such as args.mem_fraction_static=0.9 or env.NAME=1; repeatable, wins over all.",
    multiple=True,
)

# Handled by the doors, the same for each verb.
COMMON = (
    Option("json", "Print the answer, or the error, as one JSON document on stdout.", type=bool, default=False),
    Option(
        "home",
        "Folder of inventories/, templates/ and runs/. Default: $MTPDEPLOY_HOME, else the nearest that has inventories/.",
    ),
    Option("quiet", "No progress on stderr.", type=bool, default=False),
    Option("no_color", "No colour; NO_COLOR in the environment does the same.", type=bool, default=False),
)


def verbs() -> Iterator[Verb]:
    """All verbs in the order in which help shows them."""
    from mtpdeploy.actions.catalogue import CATALOGUE

    yield from CATALOGUE
