"""A secret is a type: it never shows in a repr, a string, a JSON document or a comparison's failure message."""

from __future__ import annotations

from dataclasses import dataclass, field

MASK = "***"


@dataclass(frozen=True, slots=True)
class Secret:
    """A value that reaches the host in a 0600 file and nothing else."""

    _value: str = field(repr=False)

    def __str__(self) -> str:
        return MASK

    def reveal(self) -> str:
        """The value itself, for the one place that writes it to its file or header."""
        return self._value
