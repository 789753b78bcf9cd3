"""Format durations, instants and counts for people."""

from __future__ import annotations

from datetime import UTC, datetime

_STEPS = ((86_400_000, "d", 3_600_000, "h"), (3_600_000, "h", 60_000, "min"), (60_000, "min", 1_000, "s"))

_TENTHS_BELOW_MS = 10_000

_LAST_MS = 253_402_300_799_999
"""Last millisecond of the year 9999: Python has no later date."""


def span(duration_ms: int) -> str:
    """Return a duration in milliseconds as text, in its two largest units; a negative one counts as zero."""
    duration_ms = max(0, duration_ms)
    for size, name, smaller, smaller_name in _STEPS:
        if duration_ms >= size:
            rest = duration_ms % size // smaller
            return f"{duration_ms // size} {name}" + (f" {rest} {smaller_name}" if rest else "")
    return f"{duration_ms / 1000:.1f} s" if duration_ms < _TENTHS_BELOW_MS else f"{duration_ms // 1000} s"


def instant(at_ms: int | None) -> str:
    """Return epoch milliseconds as a UTC date; `-` if there is none."""
    if at_ms is None or not 0 <= at_ms <= _LAST_MS:
        return "-"
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 message` or `2 messages`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
