"""A YAML file as data that remembers where each key stands, so that an error can point at it.

Stricter than YAML: UTF-8 only, one document, a mapping at the top, string keys, no key twice, no tags that build objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

import yaml

from mtpdeploy.errors import ConfigError

KeyPath = tuple[str | int, ...]
PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
MAX_NODES = 50_000  # an inventory of a thousand hosts has a tenth of this; a nest of aliases has no end


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where, what, and what would be right."""

    file: str
    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


def refuse(problems: Iterable[Problem]) -> None:
    """Raise one ConfigError that tells all of them; nothing if there are none."""
    told = list(problems)
    if not told:
        return
    lines = "\n".join(str(problem) for problem in told)
    raise ConfigError(
        lines if len(told) == 1 else f"{len(told)} things to correct:\n{lines}",
        details={"errors": [{"file": p.file, "line": p.line, "key": p.key, "message": p.message} for p in told]},
    )


@dataclass(frozen=True, slots=True)
class Document:
    """data: plain dicts, lists and scalars. lines: key path → line, from 1. raw: key path of a scalar → its text as written."""

    path: Path
    data: dict[str, object]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    raw: Mapping[KeyPath, str] = field(default_factory=dict)

    def problem(self, key: KeyPath, message: str) -> Problem:
        """Points at the key, or at the nearest key above it that stands in the file."""
        line = next((self.lines[key[:n]] for n in range(len(key), -1, -1) if key[:n] in self.lines), None)
        return Problem(str(self.path), line, ".".join(map(str, key)), message)


def read(path: Path) -> Document:
    """Raises ConfigError: no such file, not UTF-8, not YAML, not a mapping, a key twice."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        refuse([Problem(str(path), line, "", f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8")])
        raise
    return parse(text, path)


def parse(text: str, path: Path) -> Document:
    """`path` is only named in errors."""
    try:
        # libyaml where PyYAML was built with it: four times faster, and a thousand hosts are two seconds without.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return Document(path, {})
            return _Reader(path, loader).document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        refuse([Problem(str(path), mark.line + 1 if mark else None, "", f"not YAML: {error.problem or error.context}")])
        raise
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except ValueError as error:  # a scalar such as 2024-13-45
        raise ConfigError(f"{path}: not YAML: {error}") from None


class _Reader:
    def __init__(self, path: Path, loader: yaml.SafeLoader) -> None:
        self._path = path
        self._loader = loader
        self._lines: dict[KeyPath, int] = {}
        self._raw: dict[KeyPath, str] = {}
        self._nodes = 0

    def document(self, root: yaml.Node) -> Document:
        if not isinstance(root, yaml.MappingNode):
            self._refuse(root, (), "should be a mapping of keys to values")
        return Document(self._path, self._mapping(root, ()), self._lines, self._raw)

    def _value(self, node: yaml.Node, at: KeyPath) -> object:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._refuse(node, at, f"more than {MAX_NODES} values, counting what aliases repeat")
        self._lines.setdefault(at, node.start_mark.line + 1)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in PLAIN_TAGS:
            self._refuse(node, at, f"the tag {node.tag} builds an object; write plain values")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*at, index)) for index, item in enumerate(node.value)]
        self._raw[at] = node.value
        return self._loader.construct_object(node)

    def _mapping(self, node: yaml.MappingNode, at: KeyPath) -> dict[str, object]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key, at, "a key should be plain text")
            line = key.start_mark.line + 1
            if key.value in first and key.tag != "tag:yaml.org,2002:merge":
                self._refuse(key, (*at, key.value), f"stands here twice, first in line {first[key.value]}; keep one")
            first.setdefault(key.value, line)
        self._loader.flatten_mapping(node)
        result: dict[str, object] = {}
        for key, value in node.value:
            below = (*at, key.value)
            self._lines[below] = key.start_mark.line + 1
            result[key.value] = self._value(value, below)
        return result

    def _refuse(self, node: yaml.Node, at: KeyPath, message: str) -> NoReturn:
        refuse([Problem(str(self._path), node.start_mark.line + 1, ".".join(map(str, at)), message)])
        raise AssertionError("refuse() raises for one problem")


def did_you_mean(word: str, known: Iterable[str], what: str = "keys here") -> str:
    """`; did you mean "address"?`, or the whole list when it is short, or nothing."""
    names = sorted(known)
    if near := get_close_matches(word, names, n=1, cutoff=0.6):
        return f"; did you mean {near[0]}?"
    return f"; the {what} are {', '.join(names)}" if 0 < len(names) <= 24 else ""
