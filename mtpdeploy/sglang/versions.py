"""SGLang versions: tolerant of post releases, nightlies and git builds, and honest about which of them the flag table knows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache, total_ordering

# Every release whose wheel the flag table was read from.
RELEASES = (
    "0.5.6", "0.5.7", "0.5.8", "0.5.9", "0.5.10", "0.5.11", "0.5.12", "0.5.13", "0.5.14",
    "0.5.15", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23",
)  # fmt: skip
_TAIL = {"dev": -4, "a": -3, "b": -2, "rc": -1, "": 0, "post": 1}
_PATTERN = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[._-]?(?P<pre>a|alpha|b|beta|c|rc|pre|preview)[._-]?(?P<pre_n>\d*))?"
    r"(?:[._-]?(?P<post>post|rev|r)[._-]?(?P<post_n>\d*))?"
    r"(?:[._-]?(?P<dev>dev)[._-]?(?P<dev_n>\d*))?"
    r"(?:[+-](?P<local>[0-9A-Za-z._-]+))?"
)


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """A version as `importlib.metadata` names it: `0.5.17`, `0.5.10.post1`, `0.5.6.post2.dev8155+gabc`, `0.0.0.dev0+gabc`.

    release: numbers without trailing zeros. Order is PEP 440's; a local part does not order.
    git: a build whose release says nothing of its content (0.0.0.dev…): only its own `--help` knows its flags.
    """

    text: str
    release: tuple[int, ...]
    tail: tuple[tuple[int, int], ...] = ()
    local: str | None = field(default=None)

    @classmethod
    def parse(cls, text: str) -> Version:
        """Raises ValueError with the text when it is no version at all."""
        found = _PATTERN.fullmatch(text.strip())
        if not found:
            raise ValueError(f"{text!r} is not a version such as 0.5.17 or 0.5.10.post1")
        numbers = [int(n) for n in found["release"].split(".")]
        while len(numbers) > 1 and numbers[-1] == 0:
            numbers.pop()
        pre = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc"}.get(
            found["pre"] or "", found["pre"] or ""
        )
        tail: list[tuple[int, int]] = []
        if pre:
            tail.append((_TAIL[pre], int(found["pre_n"] or 0)))
        if found["post"]:
            tail.append((_TAIL["post"], int(found["post_n"] or 0)))
        if found["dev"]:
            tail.append((_TAIL["dev"], int(found["dev_n"] or 0)))
        return cls(text.strip(), tuple(numbers), tuple(tail), found["local"])

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        return self.release, (*self.tail, (0, 0))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self.key == other.key

    def __lt__(self, other: Version) -> bool:
        return self.key < other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return self.text

    @property
    def git(self) -> bool:
        return self.release == (0,)

    @property
    def known(self) -> bool:
        """The flag table holds this release; a post release has its release's flags."""
        return self.table is not None and not any(kind != _TAIL["post"] for kind, _ in self.tail)

    @property
    def table(self) -> str | None:
        """The column of the flag table that fits best: the release itself, else None.

        Of `0.5.13.dev7` it is 0.5.13 (closest, though not `known`); of 0.5.24 and git builds None.
        """
        name = ".".join(map(str, self.release))
        return name if name in RELEASES else None

    @property
    def nearest_table(self) -> Version:
        """The release whose rules and formulas apply: itself, the newest for a git build or anything newer, the oldest for anything older."""
        if self.table:
            return _release(self.table)
        if self.git or self > NEWEST:
            return NEWEST
        return max((v for v in _PARSED if v <= self), default=_PARSED[0])

    def at_least(self, text: str) -> bool:
        """Is this release, judged by its rules, `text` or newer? Git builds count as the newest release."""
        return self.nearest_table >= _release(text)

    def before(self, text: str) -> bool:
        return not self.at_least(text)

    @property
    def caveat(self) -> str | None:
        """What to say when the table does not hold exactly this version."""
        if self.known:
            return None
        if self.git:
            return f"SGLang {self} is a git build: judged by the rules of {NEWEST}; its own --help decides the flags"
        if self > NEWEST:
            return f"SGLang {self} is newer than the flag table ({NEWEST}): judged by that release's rules; its own --help decides the flags"
        if self.table:
            return f"SGLang {self} is a build on the way to {self.table}: judged by that release's rules; its own --help decides the flags"
        return f"SGLang {self} is not in the flag table: judged by the rules of {self.nearest_table}; its own --help decides the flags"


@cache
def _release(text: str) -> Version:
    """One parse a release: the rules ask thousands of times."""
    return Version.parse(text)


_PARSED = tuple(Version.parse(v) for v in RELEASES)
NEWEST = _PARSED[-1]
