"""How a figure is written for people: significant digits, a dash where it is unknown, intervals as low to high."""

from __future__ import annotations

from collections.abc import Mapping

UNKNOWN = "\N{EN DASH}"


def number(value: object) -> str:
    """Three significant digits, but never fewer than the integer part has: 0.0123, 1.78, 26.7, 234, 1404."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return UNKNOWN if value is None else printable(value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:.0f}"
    if value == 0:
        return "0"
    for limit, digits in ((10, 1), (1, 2), (0.1, 3)):
        if abs(value) >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.3g}"


def within(document: Mapping[str, object] | None, *path: str) -> object:
    """A value inside nested mappings; None where any step is missing."""
    value: object = document
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def times(value: float | None, low: float | None, high: float | None) -> str:
    """A ratio with its interval: `2.25 (2.18 to 2.33)`."""
    if value is None:
        return UNKNOWN
    if low is None or high is None:
        return f"{value:.2f} (no interval)"
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def load(point: Mapping[str, object]) -> str:
    """`4` for concurrency 4, `2/s` for an open loop."""
    rate = point.get("rate")
    if rate is not None:
        return f"{number(rate)}/s"
    return number(point.get("concurrency"))


def printable(value: object) -> str:
    """Text of a run as a terminal may safely show it: what could move its cursor or change its title becomes a space."""
    return "".join(char if char.isprintable() else " " for char in str(value))
