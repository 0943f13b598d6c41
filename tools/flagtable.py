"""Reads every server flag of the published SGLang wheels from their syntax trees and writes mtpdeploy/sglang/flags.json.

Nothing of SGLang is imported or run. For each release and each option string it records how argparse treats it: kind, value type, choices,
nargs, default, the field it fills, whether it is deprecated and for what. A default or a list of choices that is computed at run time
(from a registry, from the GPU) is kept as null and the flag is marked, never guessed.

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_34_x86_64 --platform any -d WHEELS sglang==0.5.17
    python tools/flagtable.py WHEELS            # all sglang-*.whl there → mtpdeploy/sglang/flags.json
    python tools/flagtable.py WHEELS --check    # exit 1 if the table on disk differs
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "mtpdeploy" / "sglang" / "flags.json"
SERVER_ARGS = "sglang.srt.server_args"


class Unknown(Exception):
    """The expression's value is only known at run time."""


class Wheel:
    """The modules of one wheel, parsed on demand."""

    def __init__(self, path: Path) -> None:
        self.zip = zipfile.ZipFile(path)
        self.names = set(self.zip.namelist())
        self.version = path.name.split("-")[1]
        self._trees: dict[str, ast.Module] = {}

    def tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            base = module.replace(".", "/")
            for name in (f"{base}.py", f"{base}/__init__.py"):
                if name in self.names:
                    self._trees[module] = ast.parse(self.zip.read(name))
                    break
            else:
                raise Unknown(module)
        return self._trees[module]

    def lookup(self, module: str, name: str, depth: int = 0) -> tuple[str, ast.AST]:
        """Where `name`, as seen in `module`, is defined: the module and the value's or definition's node."""
        if depth > 8:
            raise Unknown(name)
        for node in ast.walk(self.tree(module)):
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if (
                    any(isinstance(t, ast.Name) and t.id == name for t in targets)
                    and node.value is not None
                    and node.col_offset == 0
                ):
                    return module, node.value
            elif isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name and node.col_offset == 0:
                return module, node
        for node in ast.walk(self.tree(module)):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and any((a.asname or a.name) == name for a in node.names)
            ):
                original = next(a.name for a in node.names if (a.asname or a.name) == name)
                try:
                    return self.lookup(node.module, original, depth + 1)
                except Unknown:
                    continue
        raise Unknown(name)

    def constant(self, node: ast.AST | None, module: str) -> Any:
        """The value, or None where it is only known at run time."""
        if node is None:
            return None
        try:
            return self.value(node, module, {})
        except Unknown:
            return None

    def value(self, node: ast.AST, module: str, names: dict[str, ast.AST]) -> Any:
        """Evaluates constants, displays, concatenations and the few calls that SGLang uses for choices."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand, module, names)
            case ast.List(elts=elts) | ast.Tuple(elts=elts) | ast.Set(elts=elts):
                found: list[Any] = []
                for item in elts:
                    if isinstance(item, ast.Starred):
                        found += self.value(item.value, module, names)
                    else:
                        found.append(self.value(item, module, names))
                return sorted(found) if isinstance(node, ast.Set) else found
            case ast.Dict(keys=keys, values=values):
                got: dict[Any, Any] = {}
                for key, value in zip(keys, values, strict=True):
                    if key is None:
                        got.update(self.value(value, module, names))
                    else:
                        got[self.value(key, module, names)] = None
                return got
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.value(left, module, names), self.value(right, module, names)
                if isinstance(op, ast.Add):
                    return a + b
                if isinstance(op, ast.Mult):
                    return a * b
                if isinstance(op, ast.BitOr):
                    return sorted({*a, *b})
                raise Unknown(ast.dump(node))
            case ast.Name(id=name):
                if name in names:
                    return self.value(names[name], module, {k: v for k, v in names.items() if k != name})
                where, found_node = self.lookup(module, name)
                return self.value(found_node, where, {})
            case ast.Attribute(value=ast.Name(id=owner), attr=attr):
                where, cls = self.lookup(module, owner)
                if isinstance(cls, ast.ClassDef):
                    for item in cls.body:
                        target = (
                            item.target
                            if isinstance(item, ast.AnnAssign)
                            else item.targets[0]
                            if isinstance(item, ast.Assign)
                            else None
                        )
                        if isinstance(target, ast.Name) and target.id == attr and item.value is not None:  # type: ignore[union-attr]
                            siblings = {
                                t.id: i.value
                                for i in cls.body
                                if isinstance(i, ast.Assign)
                                for t in i.targets
                                if isinstance(t, ast.Name)
                            }
                            return self.value(item.value, where, siblings)  # type: ignore[union-attr]
                raise Unknown(f"{owner}.{attr}")
            case ast.Call(func=ast.Name(id="list" | "sorted" | "set" | "tuple"), args=[argument]):
                return list(self.value(argument, module, names))
            case ast.Call(func=ast.Attribute(value=owner_node, attr="keys" | "copy"), args=[]):
                return list(self.value(owner_node, module, names))
            case ast.Call(func=ast.Name(id=name), args=[]):
                where, function = self.lookup(module, name)
                if isinstance(function, ast.FunctionDef):
                    for returned in ast.walk(function):
                        # A return that only a running process takes is passed over.
                        found = self.constant(returned.value, where) if isinstance(returned, ast.Return) else None
                        if found is not None:
                            return found
                raise Unknown(name)
            case ast.Call(func=ast.Name(id="get_args")) | ast.Subscript():
                raise Unknown(ast.dump(node))
        raise Unknown(ast.dump(node))


def text_of(node: ast.AST) -> str:
    return ast.unparse(node)


def value_type(node: ast.AST | None) -> str:
    """argparse's `type=` as a word: str, int, float, json, or the name of SGLang's own parser."""
    if node is None:
        return "str"
    text = text_of(node)
    known = {"json.loads": "json", "orjson.loads": "json", "human_readable_int": "human_int"}
    return known.get(
        text, "json" if text.startswith("json_") else text if re.fullmatch(r"[A-Za-z_][\w.]*", text) else "expression"
    )


class Declarations:
    """The flags of one wheel: option string → what argparse does with it."""

    def __init__(self, wheel: Wheel) -> None:
        self.wheel = wheel
        self.flags: dict[str, dict[str, Any]] = {}
        self.fields: dict[str, ast.AST] = {}  # field → default
        module, server_args = wheel.lookup(SERVER_ARGS, "ServerArgs")
        assert isinstance(server_args, ast.ClassDef)
        self.read_classes(module, server_args, set())
        self.read_parser(server_args)

    def read_classes(self, module: str, cls: ast.ClassDef, seen: set[str]) -> None:
        if cls.name in seen:
            return
        seen.add(cls.name)
        for base in cls.bases:
            if isinstance(base, ast.Name):
                try:
                    where, found = self.wheel.lookup(module, base.id)
                except Unknown:
                    continue
                if isinstance(found, ast.ClassDef):
                    self.read_classes(where, found, seen)
        for item in cls.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                if item.value is not None:
                    self.fields[item.target.id] = item.value
                self.read_field(module, item)
        # From 0.5.20 on the fields live in one class per namespace that ServerArgs collects by name.
        if cls.name == "ServerArgs" and not any(f.startswith("--") for f in self.flags):
            for name in sorted(
                n for n in self.wheel.names if n.startswith("sglang/srt/arg_groups/fields/") and n.endswith(".py")
            ):
                fields_module = name[:-3].replace("/", ".")
                for node in self.wheel.tree(fields_module).body:
                    if isinstance(node, ast.ClassDef):
                        self.read_classes(fields_module, node, seen)

    def read_field(self, module: str, item: ast.AnnAssign) -> None:
        """`name: A[T, "help"] = default` or `A[T, Arg(...)]` (0.5.14 on)."""
        annotation = item.annotation
        if not (
            isinstance(annotation, ast.Subscript)
            and isinstance(annotation.value, ast.Name)
            and annotation.value.id in ("A", "Annotated")
        ):
            return
        assert isinstance(annotation.slice, ast.Tuple)
        assert isinstance(item.target, ast.Name)
        inner, *metadata = annotation.slice.elts
        arg = next((m for m in metadata if isinstance(m, ast.Call) and text_of(m.func) == "Arg"), None)
        if arg is None and not any(isinstance(m, (ast.Constant, ast.JoinedStr, ast.BinOp)) for m in metadata):
            return
        given = {k.arg: k.value for k in arg.keywords if k.arg} if arg else {}
        if arg and arg.args:
            given.setdefault("help", arg.args[0])
        if isinstance(no_cli := given.get("no_cli"), ast.Constant) and no_cli.value:
            return
        field = item.target.id
        main = self.wheel.constant(given.get("cli_name"), module) or "--" + field.replace("_", "-")
        names = [main, *(self.wheel.constant(given.get("aliases"), module) or [])]
        kind = text_of(inner).replace("typing.", "").replace('"', "'")
        optional = re.fullmatch(r"Optional\[(.*)\]", kind) or re.fullmatch(r"(.*?) \| None", kind)
        bare = optional[1] if optional else kind
        record: dict[str, Any] = {"dest": field}
        parser = given.get("type_parser")
        if "action" in given:
            extra = given.get("action_kwargs")
            kwargs = {}
            if isinstance(extra, ast.Dict):
                kwargs = {
                    k.value: v for k, v in zip(extra.keys, extra.values, strict=True) if isinstance(k, ast.Constant)
                }
            self.action(record, given["action"], kwargs, module)
        elif literal := re.fullmatch(r"(?:Literal)\[(.*)\]", bare):
            values = list(ast.literal_eval(f"({literal[1]},)"))
            kinds = {int: "int", float: "float"}
            inferred = kinds.get(type(values[0]), "str")  # as add_cli_args_from_dataclass infers it
            record |= {"kind": "value", "type": value_type(parser) if parser else inferred, "choices": values}
            if "choices" in given:
                self.choices(record, given["choices"], module, {})
        elif (listed := re.fullmatch(r"(?:List|list)(?:\[(.*)\])?", bare)) and parser is None:
            element = listed[1] if listed[1] in ("int", "float") else "str"
            record |= {
                "kind": "value",
                "type": element,
                "nargs": self.wheel.constant(given.get("nargs"), module) or "+",
            }
            self.choices(record, given.get("choices"), module, {})
        elif bare == "bool" and parser is None:
            record |= {"kind": "flag"}
        else:
            record |= {
                "kind": "value",
                "type": value_type(parser) if parser is not None else bare if bare in ("int", "float") else "str",
            }
            self.choices(record, given.get("choices"), module, {})
            if nargs := self.wheel.constant(given.get("nargs"), module):
                record["nargs"] = nargs
            if item.value is None or self.wheel.constant(given.get("required"), module):
                record["required"] = True
        self.default(record, item.value, module)
        if given.get("help") or metadata:
            self.help(record, given.get("help") or metadata[0])
        self.register(names, record)

    def read_parser(self, server_args: ast.ClassDef) -> None:
        """`parser.add_argument(...)` in ServerArgs.add_cli_args."""
        method = next(n for n in server_args.body if isinstance(n, ast.FunctionDef) and n.name == "add_cli_args")
        local: dict[str, ast.AST] = {}
        for node in ast.walk(method):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                local.setdefault(node.targets[0].id, node.value)
        for node in ast.walk(method):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
            ):
                continue
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")]
            if not names:
                continue
            given = {k.arg: k.value for k in node.keywords if k.arg}
            longest = names[0]
            record: dict[str, Any] = {
                "dest": self.wheel.constant(given.get("dest"), SERVER_ARGS) or longest[2:].replace("-", "_")
            }
            if "action" in given:
                self.action(record, given["action"], given, SERVER_ARGS, local)
            else:
                record |= {"kind": "value", "type": value_type(given.get("type"))}
                self.choices(record, given.get("choices"), SERVER_ARGS, local)
                if nargs := self.wheel.constant(given.get("nargs"), SERVER_ARGS):
                    record["nargs"] = nargs
                if self.wheel.constant(given.get("required"), SERVER_ARGS):
                    record["required"] = True
            self.default(record, given.get("default"), SERVER_ARGS)
            self.help(record, given.get("help"))
            self.register(names, record)

    def action(
        self,
        record: dict[str, Any],
        node: ast.AST,
        given: dict[Any, ast.AST],
        module: str,
        local: dict[str, ast.AST] | None = None,
    ) -> None:
        name = self.wheel.constant(node, module) if isinstance(node, ast.Constant) else text_of(node).rsplit(".", 1)[-1]
        if name in ("store_true", "store_false"):
            record["kind"] = "flag"
        elif name == "BooleanOptionalAction":
            record["kind"] = "switch"  # --x and --no-x
        elif name in (
            "DeprecatedStoreTrueAction",
            "DeprecatedStoreConstAction",
            "DeprecatedAction",
            "PrintDeprecatedWarning",
        ):
            record |= {"kind": "flag", "deprecated": True}
            if name == "DeprecatedAction" and "error_message" in given:
                record["dead"] = True  # accepted by the parser, then refused by name
            if "const_value" in given:
                record["const"] = self.wheel.constant(given["const_value"], module)
                if record["const"] is None:
                    record["const"] = text_of(given["const_value"]).rsplit(".", 1)[-1].lower()
            if "choices" in given:
                record |= {"kind": "value", "type": "str"}
                self.choices(record, given["choices"], module, local or {})
        else:
            record |= {"kind": "value", "type": value_type(given.get("type")), "action": name}
            self.choices(record, given.get("choices"), module, local or {})
            if nargs := self.wheel.constant(given.get("nargs"), module):
                record["nargs"] = nargs
            if name == "DeprecatedAliasStoreAction":
                record["deprecated"] = True
        if new := self.wheel.constant(given.get("new_flag"), module):
            record["use"] = new

    def choices(self, record: dict[str, Any], node: ast.AST | None, module: str, local: dict[str, ast.AST]) -> None:
        if node is None or (isinstance(node, ast.Constant) and node.value is None):
            return
        try:
            record["choices"] = list(self.wheel.value(node, module, local))
        except Unknown:
            record["choices_computed"] = True

    def default(self, record: dict[str, Any], node: ast.AST | None, module: str) -> None:
        if node is None:
            record["default"] = False if record["kind"] == "flag" else None
            return
        text = text_of(node)
        field = re.fullmatch(r"ServerArgs\.(\w+)|_declared_default\('(\w+)'\)", text)
        if field:
            source = self.fields.get(field[1] or field[2])
            if source is None:
                record["default"] = None
                return
            node, text = source, text_of(source)
        try:
            record["default"] = self.wheel.value(node, module, {})
            json.dumps(record["default"])
        except (Unknown, TypeError):
            if text.endswith("field(default_factory=list)"):
                record["default"] = []
            else:
                record["default"] = None
                record["default_computed"] = text
        if record["default"] is None and record["kind"] == "flag" and "default_computed" not in record:
            record["default"] = False

    def help(self, record: dict[str, Any], node: ast.AST | None) -> None:
        """Only what the help says of deprecation is kept."""
        if node is None:
            return
        words = "".join(
            str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
        )
        if re.match(r"\W*(note:.*)?deprecated\b", words, re.IGNORECASE):
            record["deprecated"] = True
            if (use := re.search(r"use (--[\w-]+)", words, re.IGNORECASE)) and "use" not in record:
                record["use"] = use[1]

    def register(self, names: list[str], record: dict[str, Any]) -> None:
        for name in names:
            self.flags[name] = {**record, **({"primary": names[0]} if name != names[0] else {})}


def version_key(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def table(wheels: list[Wheel]) -> dict[str, Any]:
    """{"versions": […], "flags": {option: [{"first", "last", …record}]}}; a new entry begins where anything changes or after a gap."""
    flags: dict[str, list[dict[str, Any]]] = {}
    previous: dict[str, int] = {}
    for column, wheel in enumerate(wheels):
        for name, record in Declarations(wheel).flags.items():
            runs = flags.setdefault(name, [])
            body = {k: v for k, v in runs[-1].items() if k not in ("first", "last")} if runs else None
            if body == record and previous[name] == column - 1:
                runs[-1]["last"] = wheel.version
            else:
                runs.append({"first": wheel.version, "last": wheel.version, **record})
            previous[name] = column
    return {"versions": [w.version for w in wheels], "flags": dict(sorted(flags.items()))}


def lines(made: dict[str, Any]) -> Iterator[str]:
    """One line per entry, so that a new release shows as a small difference."""
    yield '{"versions": ' + json.dumps(made["versions"]) + ', "flags": {'
    for n, (name, runs) in enumerate(made["flags"].items()):
        inside = ",\n  ".join(json.dumps(r, separators=(",", ":")) for r in runs)
        yield f" {json.dumps(name)}: [\n  {inside}]" + ("," if n < len(made["flags"]) - 1 else "")
    yield "}}"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("wheels", type=Path, help="folder with sglang-*.whl")
    arguments.add_argument("--check", action="store_true", help="write nothing; exit 1 if the table differs")
    options = arguments.parse_args()
    found = sorted(options.wheels.glob("sglang-*.whl"), key=lambda p: version_key(p.name.split("-")[1]))
    if not found:
        arguments.error(f"no sglang-*.whl in {options.wheels}")
    made = "\n".join(lines(table([Wheel(p) for p in found]))) + "\n"
    if options.check:
        return int(made != TABLE.read_text())
    TABLE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
