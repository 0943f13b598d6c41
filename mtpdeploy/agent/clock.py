"""UTC as this host's clock tells it, in the one spelling that files and events use."""

from __future__ import annotations

from datetime import datetime, timezone


def utc_now() -> str:
    """Now, as `2026-01-31T12:00:00.123Z`."""
    return spell(datetime.now(timezone.utc))


def spell(moment: datetime) -> str:
    """`moment` in UTC with milliseconds."""
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def spell_epoch(seconds: float) -> str:
    """Seconds since 1970 as UTC."""
    return spell(datetime.fromtimestamp(seconds, timezone.utc))


def seconds_since(utc: str) -> float | None:
    """Seconds from that moment to now by this host's clock (negative if it lies ahead); None if `utc` is no time."""
    try:
        then = datetime.strptime(utc, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return None
    return (datetime.now(timezone.utc) - then).total_seconds()
