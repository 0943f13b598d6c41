"""Every server flag of SGLang 0.5.6 … 0.5.23: what each release calls it, how argparse reads it, what became of it.

A canonical name is the field that the newest release fills (`tp_size`, `mamba_radix_cache_strategy`): the key in its server_args
line and /server_info. Every option string that ever filled that field is another name for it. The table, flags.json, is read from the
published wheels by tools/flagtable.py; what a syntax tree cannot say (a rename without an alias) stands in `_SAME` and `_NEEDLESS`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from mtpdeploy.inventory.values import ArgValue
from mtpdeploy.sglang.versions import NEWEST, RELEASES, Version

Kind = Literal["value", "flag", "switch"]  # takes a value; store-true; --x and --no-x

# Options that mean the same as a field of the newest release although no alias ever joined them.
_SAME = {"--disable-piecewise-cuda-graph": "disable_prefill_cuda_graph"}

# (field, value) that an older release cannot spell because it always behaves so: dropped with this reason rather than refused.
_NEEDLESS: Mapping[tuple[str, object], str] = {
    ("disable_prefill_cuda_graph", True): "captures no prefill graphs unless asked to",
    ("mamba_radix_cache_strategy", "auto"): "has one strategy only, which later releases call no_buffer",
    ("mamba_radix_cache_strategy", "no_buffer"): "has one strategy only, which later releases call no_buffer",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """One option string in one release, as argparse treats it.

    option:     `--tp-size`                       field: canonical name
    type:       str, int, float, json, human_int (1k, 2M, 1Ki), or the name of SGLang's own parser (then the text is passed on)
    nargs:      None (one value), `+`, `*`, `?` or a number
    default:    None where it is None or computed at run time
    choices:    () = free, or known at run time only (`choices_computed`)
    const:      what a deprecated flag without a value stores into the field
    use:        what the deprecation names instead
    group:      the first option string of the same declaration
    """

    option: str
    field: str
    kind: Kind
    type: str = "str"
    nargs: str | int | None = None
    choices: tuple[object, ...] = ()
    choices_computed: bool = False
    default: object = None
    required: bool = False
    deprecated: bool = False
    dead: bool = False
    const: ArgValue = None
    use: str | None = None
    group: str = ""


@lru_cache(maxsize=1)
def _table() -> Mapping[str, list[dict[str, Any]]]:
    data = json.loads(Path(__file__).with_name("flags.json").read_text())
    if tuple(data["versions"]) != RELEASES:
        raise RuntimeError("flags.json and versions.RELEASES name different releases")
    flags: Mapping[str, list[dict[str, Any]]] = data["flags"]
    return flags


def _field_of(option: str, run: Mapping[str, object], last: Mapping[str, object]) -> str:
    """The canonical name: the field that this option filled when it was last there."""
    return _SAME.get(option) or str((run if "const" in run else last)["dest"])


@lru_cache(maxsize=64)
def flags_of(version: Version) -> Mapping[str, Flag]:
    """Option string → Flag for the release whose table fits `version` best (`versions.Version.nearest_table`)."""
    column = RELEASES.index(str(version.nearest_table))
    found: dict[str, Flag] = {}
    for option, runs in _table().items():
        for run in runs:
            if not RELEASES.index(str(run["first"])) <= column <= RELEASES.index(str(run["last"])):
                continue
            choices = run.get("choices") or ()
            found[option] = Flag(
                option=option,
                field=_field_of(option, run, runs[-1]),
                kind=run["kind"],
                type=str(run.get("type", "str")),
                nargs=run.get("nargs"),
                choices=tuple(choices),
                choices_computed=bool(run.get("choices_computed")),
                default=_frozen(run.get("default")),
                required=bool(run.get("required")),
                deprecated=bool(run.get("deprecated")),
                dead=bool(run.get("dead")),
                const=run.get("const") if option not in _SAME else None,
                use=run.get("use"),
                group=str(run.get("primary", option)),
            )
    return found


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=1)
def _names() -> Mapping[str, str]:
    """Every name with underscores, field or option, of any release → canonical name."""
    names: dict[str, str] = {}
    for option, runs in _table().items():
        last = runs[-1]
        target = _SAME.get(option) or (option[2:].replace("-", "_") if "const" in last else str(last["dest"]))
        names[option[2:].replace("-", "_")] = target
    for flag in flags_of(NEWEST).values():
        names.setdefault(flag.field, flag.field)
    # A field that was itself renamed later (dsa_prefill_cp_mode ← nsa_prefill_cp_mode) is followed to its last name.
    return {name: names.get(target, target) for name, target in names.items()}


def canonical(name: str) -> str | None:
    """`--mamba-scheduler-strategy`, `mamba_scheduler_strategy` → `mamba_radix_cache_strategy`; None: no release has it."""
    return _names().get(name.removeprefix("--").replace("-", "_"))


def canonical_names() -> tuple[str, ...]:
    """Every canonical name, sorted: the keys that `args:` of a profile may have."""
    return tuple(sorted(set(_names().values())))


@lru_cache(maxsize=1)
def _options() -> Mapping[str, tuple[str, ...]]:
    """Canonical name → every option string that ever meant it."""
    found: dict[str, list[str]] = {}
    for option in _table():
        if name := canonical(option):
            found.setdefault(name, []).append(option)
    return {name: tuple(options) for name, options in found.items()}


def latest(option: str) -> Flag | None:
    """The option as the last release that has it declares it; not marked deprecated, as another version decides that."""
    if (span := lifetime(option)) is None:
        return None
    return replace(flags_of(Version.parse(span[1]))[option], deprecated=False, dead=False)


def lifetime(option: str) -> tuple[str, str] | None:
    """First and last release that have this option string."""
    runs = _table().get(option)
    return (str(runs[0]["first"]), str(runs[-1]["last"])) if runs else None


@dataclass(frozen=True, slots=True)
class HelpFlags:
    """What one host's own `--help` lists: it overrides the table for versions that the table does not hold.

    options: option string → Flag as far as a help text tells: names, choices, whether a value follows.
    """

    options: Mapping[str, Flag] = field(default_factory=dict)

    @classmethod
    def named(cls, options: Iterable[str]) -> HelpFlags:
        """From the bare names that a help text holds: what each takes is known only as far as some release has it."""
        found: dict[str, Flag] = {}
        for option in options:
            known = latest(option)
            field_name = canonical(option) or option[2:].replace("-", "_")
            if not option.startswith("--no-") and option != "--help":
                found[option] = known or Flag(option, field_name, "value", type="unknown", group=option)
        if "--model-path" not in found:
            raise ValueError("these are not the options of an SGLang server: --model-path is missing")
        return cls(found)

    @classmethod
    def parse(cls, text: str) -> HelpFlags:
        """From argparse's help (any width). An option is read from its own entry; the usage block only tells flag from value."""
        options: dict[str, Flag] = {}
        known = flags_of(NEWEST)
        for entry in re.finditer(r"^ {1,4}(-\S[^\n]*)", _after_usage(text), re.MULTILINE):
            head = re.split(r" {2,}", entry[1].strip())[0]
            found = re.search(r"\{([^}]*)\}", head)
            shown = head.replace(found[0], "CHOICE") if found else head
            names = re.findall(r"(?<![\w-])--[A-Za-z0-9][\w-]*", shown)
            value = re.sub(r"(?<![\w-])--?[A-Za-z0-9][\w-]*|,", " ", shown).split()
            switch = any(n.startswith("--no-") and f"--{n[5:]}" in names for n in names)
            for name in names:
                if name == "--help" or (switch and name.startswith("--no-")):
                    continue
                base = known.get(name)
                options[name] = Flag(
                    option=name,
                    field=canonical(name) or name[2:].replace("-", "_"),
                    kind="switch" if switch else "value" if value else "flag",
                    type=base.type if base else "str",
                    nargs=_nargs(value),
                    choices=tuple(c for c in found[1].split(",") if c) if found else (),
                    default=base.default if base else None,
                    group=names[0],
                )
        if "--model-path" not in options:
            raise ValueError("this is not the help text of an SGLang server: it lists no --model-path")
        return cls(options)


def _nargs(value: list[str]) -> str | None:
    """argparse writes `X`, `[X]`, `X [X ...]` and `[X ...]` for one, `?`, `+` and `*`."""
    first = " ".join(value)
    if "...]" in first:
        return "*" if first.startswith("[") else "+"
    return "?" if first.startswith("[") else None


def _after_usage(text: str) -> str:
    """The help text from its option list on (titles vary with Python: `options:`, `optional arguments:`)."""
    found = re.search(r"^(?:options|optional arguments):\s*$", text, re.MULTILINE)
    return text[found.end() :] if found else text


def known_options(version: Version, help_flags: HelpFlags | None = None) -> Mapping[str, Flag]:
    """The options of this very installation: its help text where one is given, else the table."""
    return help_flags.options if help_flags else flags_of(version)


def spelling(name: str, version: Version, help_flags: HelpFlags | None = None) -> Flag | None:
    """The option to emit for a canonical name: not a deprecated one if there is another, the field's own name before an alias.

    None: this version has none.
    """
    options = known_options(version, help_flags)
    found = [options[o] for o in _options().get(name, ()) if o in options]
    if not found and help_flags:
        found = [f for f in options.values() if f.field == name]
    own = "--" + name.replace("_", "-")
    return min(
        found, key=lambda f: (f.deprecated, f.const is not None, f.option != own, f.option != f.group), default=None
    )


def needless(name: str, value: object, version: Version) -> str | None:
    """Why a setting that this version cannot spell may be left out: it behaves so anyway. None: it may not."""
    reason = _NEEDLESS.get((name, value)) if isinstance(value, (str, bool)) else None
    return f"SGLang {version} {reason}" if reason and spelling(name, version) is None and version < NEWEST else None


@dataclass(frozen=True, slots=True)
class Match:
    """How argparse reads a written option. Exactly one of flag, ambiguous, unknown holds.

    negated: the `--no-` form of a switch.
    """

    written: str
    flag: Flag | None = None
    negated: bool = False
    ambiguous: tuple[str, ...] = ()

    @property
    def unknown(self) -> bool:
        return self.flag is None and not self.ambiguous

    @property
    def abbreviated(self) -> bool:
        return self.flag is not None and self.written not in (self.flag.option, "--no-" + self.flag.option[2:])


def match(written: str, version: Version, help_flags: HelpFlags | None = None) -> Match:
    """Exact names first, then unique prefixes, as argparse does (SGLang leaves allow_abbrev on)."""
    options = known_options(version, help_flags)
    if written in options:
        return Match(written, options[written])
    candidates: dict[str, tuple[Flag, bool]] = {}
    for option, flag in options.items():
        if option.startswith(written):
            candidates[option] = flag, False
        if flag.kind == "switch" and ("--no-" + option[2:]).startswith(written):
            candidates["--no-" + option[2:]] = flag, True
    if len(written) > 2 and "--help".startswith(written):
        candidates["--help"] = Flag("--help", "help", "flag", group="--help"), False
    if written in candidates:
        return Match(written, *candidates[written])
    if not candidates or not written.startswith("--") or written == "--":
        return Match(written)
    groups = {(flag.group, negated) for flag, negated in candidates.values()}
    if len(groups) == 1:
        flag, negated = min(candidates.values(), key=lambda c: c[0].option != c[0].group)
        return Match(written, flag, negated)
    return Match(written, ambiguous=tuple(sorted(candidates)))


def nearest(name: str, version: Version, help_flags: HelpFlags | None = None) -> str | None:
    """The option of this version that a wrong or removed name most likely meant, as it is spelled there."""
    options = known_options(version, help_flags)
    if (known := canonical(name)) and (flag := spelling(known, version, help_flags)):
        return flag.option
    wanted = name.removeprefix("--").replace("_", "-").lower()
    use = str(runs[-1].get("use", "")) if (runs := _table().get("--" + wanted)) else ""
    if (named := re.match(r"--[\w-]+", use)) and named[0] in options:
        return use
    plain = {option[2:]: option for option, flag in options.items() if not flag.deprecated}
    close = difflib.get_close_matches(wanted, plain, n=1, cutoff=0.75)
    if not close:  # the same words in another order, or one word more: --max-concurrent-requests
        words = set(wanted.split("-"))
        score, best = max((len(words & set(o.split("-"))) / len(words | set(o.split("-"))), o) for o in plain)
        close = [best] if score > 0.5 else []
    return plain[close[0]] if close else None


def explain_absent(name: str, version: Version, help_flags: HelpFlags | None = None) -> str:
    """One sentence for a refused name: which releases have it, and what this version has instead."""
    option = "--" + name.removeprefix("--").replace("_", "-")
    known = canonical(name)
    spans = [
        (o, span)
        for o in dict.fromkeys((option, *(_options().get(known, ()) if known else ())))
        if (span := lifetime(o))
    ]
    near = nearest(name, version, help_flags)
    instead = f"; nearest there: {near}" if near else ""
    if not spans:
        return f"no SGLang release from {RELEASES[0]} to {RELEASES[-1]} has {option}{instead}"
    told = ", ".join(f"{o} is in {a} to {b}" if a != b else f"{o} is in {a} only" for o, (a, b) in spans)
    return f"SGLang {version} has no {option} ({told}){instead}"


def human_int(text: str) -> int:
    """SGLang's human_readable_int (utils/common.py): `4096`, `1k` = 1000, `1M` = 1000000, `25.6k` = 25600, `1Ki` = 1024; case matters."""
    if not (found := re.fullmatch(r"([+-]?\d+)|(\d+(?:\.\d+)?)([kMGT])|(\d+)([KMGT])i", text.strip())):
        raise ValueError(f"{text!r} is not a whole number such as 4096, 25.6k or 1Ki")
    if found[1]:
        return int(found[1])
    if found[3]:
        return int(Decimal(found[2]) * Decimal(1000) ** ("kMGT".index(found[3]) + 1))
    return int(found[4]) << 10 * ("KMGT".index(found[5]) + 1)


def coerce(flag: Flag, text: str) -> ArgValue:
    """One value of `flag` as argparse would store it. ValueError says what is wrong and what would be right."""
    try:
        value: ArgValue
        match flag.type:
            case "int":
                value = int(text)
            case "float":
                value = float(text)
            case "json":
                value = json.loads(text)
            case "human_int":
                value = human_int(text)
            case "nullable_str":
                value = None if text in ("", "None") else text
            case _:
                value = text
    except ValueError:
        wanted = {"int": "a whole number", "float": "a number", "json": "JSON"}.get(
            flag.type, "a whole number such as 4096, 25.6k or 1Ki"
        )
        raise ValueError(f"{flag.option}: {text!r} is not {wanted}") from None
    if flag.choices and not flag.choices_computed and value not in flag.choices:
        close = difflib.get_close_matches(str(value), [str(c) for c in flag.choices], n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"{flag.option}: {text!r} is not one of {', '.join(map(str, flag.choices))}{hint}")
    return value


def defaults(version: Version) -> Mapping[str, object]:
    """Field → default of that release, for every field that has an option there."""
    return {flag.field: flag.default for flag in flags_of(version).values() if flag.const is None}


def secret_fields() -> Iterable[str]:
    """Fields whose value is a secret: they never belong in argv."""
    return ("api_key", "admin_api_key", "ssl_keyfile_password", "watermark_key", "watermark_key_b")
