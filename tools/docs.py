"""Writes the generated pages: docs/cli.md, docs/inventory.md, docs/profile.md, and the table of verbs in README.md.

`python tools/docs.py --check` writes nothing and exits 1 if one of them is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from mtpdeploy.actions.verbs import COMMON, Option, Verb, verbs
from mtpdeploy.inventory.schema import (
    GpuEntry,
    HostEntry,
    InventoryFile,
    Placed,
    ProfileFile,
    Settings,
    SimulateEntry,
    Ssh,
    Strict,
    WorkloadFile,
)

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- verbs: made by tools/docs.py -->", "<!-- /verbs -->"
MADE = "<!-- Made by tools/docs.py; change {source} and run `make docs`. -->\n"


def cli() -> str:
    """Every verb with its options, as `--help` prints them."""
    table = list(verbs())
    parts = [
        "# Verbs and their options",
        MADE.format(source="mtpdeploy/actions/catalogue/"),
        "`mtpdeploy VERB` and `fab VERB` are made from one table and take the same words. A verb below another is `mtpdeploy runs show ID`",
        "at one door and `fab runs.show ID` at the other. `-h` is help at both. Exit codes: [messages.md](messages.md).",
        "",
        "## For every verb",
        "",
        _options(COMMON),
        "",
        "`--home`, `--quiet` and `--no-color` are also taken before the verb. Answers go to stdout, progress to stderr.",
    ]
    for verb in table:
        parts += ["", f"## {verb.name.replace('.', ' ')}", "", *_verb(verb)]
    return "\n".join(parts) + "\n"


def _verb(verb: Verb) -> Iterable[str]:
    words = "".join(
        f" {word}" if argument.required else f" [{word}]"
        for argument in verb.arguments
        for word in [argument.name.upper() + ("…" if argument.multiple else "")]
    )
    yield verb.summary
    yield ""
    yield f"    mtpdeploy {verb.name.replace('.', ' ')}{words} [options]"
    yield f"    fab {verb.name}{words} [options]"
    if verb.details:
        yield from ("", verb.details)
    if verb.arguments:
        yield ""
        yield from (f"- `{argument.name.upper()}` {argument.help}" for argument in verb.arguments)
    if verb.options:
        yield from ("", _options(verb.options))
    if verb.examples:
        yield from ("", "```sh", *verb.examples, "```")


def _options(options: Iterable[Option]) -> str:
    return "\n".join(f"- `{option.flag}{_value(option)}` {option.told}" for option in options)


def _value(option: Option) -> str:
    return "" if option.type is bool else f" {option.placeholder}"


def inventory() -> str:
    """The commented example, then every key with its meaning."""
    return _reference(
        "# The inventory",
        "inventories/example.yml or mtpdeploy/inventory/schema.py",
        "The home's `inventories/*.yml` (all but example.yml) say which hosts there are. Secrets are never written in them: they are named "
        "by `from_env` or `from_file` and read when needed. An error names file, line, key, what is wrong and what would be right.",
        "inventories/example.yml",
        (
            ("At the top", InventoryFile, None),
            ("A host", HostEntry, Placed),
            ("A host, a group, and `defaults:`", Placed, Settings),
            ("Settings: a host, a group, `defaults:`, and a profile", Settings, None),
            ("`ssh:`", Ssh, None),
            ("An entry of `gpus:`", GpuEntry, None),
            ("`simulate:`", SimulateEntry, None),
        ),
    )


def profile() -> str:
    """The shipped mtp profile, then every key with its meaning; workloads below."""
    told = _reference(
        "# Profiles and workloads",
        "inventories/profiles/, inventories/workloads/ or mtpdeploy/inventory/schema.py",
        "A profile says what to run, in one vocabulary: the newest SGLang release's argument names, with underscores. The version that the host "
        "has decides how each is spelled on its command line; older names are understood; one that the version lacks is refused before "
        "anything is touched. Profiles are found by name in the home's `inventories/profiles/`, then among the shipped ones.",
        "inventories/profiles/mtp.yml",
        (("A profile, beside the settings below", ProfileFile, Settings), ("Settings", Settings, None)),
    )
    return told + _reference(
        "\n## Workloads",
        None,
        "A workload says what the benchmark sends. `mtpdeploy bench --workload NAME` takes one by name; the options of `bench` override it.",
        "inventories/workloads/story.yml",
        (("A workload", WorkloadFile, None),),
    )


def _reference(
    title: str,
    source: str | None,
    intro: str,
    example: str,
    sections: Iterable[tuple[str, type[Strict], type[Strict] | None]],
) -> str:
    parts = [
        title,
        *([MADE.format(source=source)] if source else [""]),
        intro,
        "",
        "```yaml",
        (ROOT / example).read_text().rstrip(),
        "```",
    ]
    for heading, model, without in sections:
        parts += ["", f"### {heading}", "", *_keys(model, without)]
    return "\n".join(parts) + "\n"


def _keys(model: type[Strict], without: type[Strict] | None) -> Iterable[str]:
    for name, field in model.model_fields.items():
        if without is None or name not in without.model_fields:
            default = field.get_default(call_default_factory=True)
            plain = default is not None and default != "" and isinstance(default, (bool, int, float, str))
            shown = f" (default {str(default).lower() if isinstance(default, bool) else default})" if plain else ""
            yield f"- `{field.alias or name}` {field.description}{shown}"


def readme() -> str:
    """README.md with its table of verbs renewed."""
    text = (ROOT / "README.md").read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = "\n".join(f"| `{verb.name.replace('.', ' ')}` | {verb.summary} |" for verb in verbs())
    return f"{before}{BEGIN}\n\n| verb | |\n|---|---|\n{rows}\n\n{END}{after}"


PAGES: dict[str, Callable[[], str]] = {
    "docs/cli.md": cli,
    "docs/inventory.md": inventory,
    "docs/profile.md": profile,
    "README.md": readme,
}


def outdated() -> list[str]:
    """The generated pages whose file is not what would be written now."""
    return [name for name, make in PAGES.items() if not (ROOT / name).is_file() or (ROOT / name).read_text() != make()]


def main(argv: list[str]) -> int:
    stale = outdated()
    if "--check" in argv:
        print("\n".join(f"{name} is out of date: run `make docs`" for name in stale), end="\n" if stale else "")
        return int(bool(stale))
    for name in stale:
        (ROOT / name).write_text(PAGES[name]())
        print(f"written: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
