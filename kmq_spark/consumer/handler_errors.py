"""
What a handler's exception says of itself, as a marker can carry it.

Rule 1: whatever the exception is, there is a text: one line, printable, bounded.
"""

from __future__ import annotations

from kmq_spark.core.markers import MAX_ERROR_CHARS


def error_text(error: BaseException) -> str:
    """Return type and message of an exception, `ValueError: no such order`, cut to `MAX_ERROR_CHARS`."""
    name = type(error).__name__
    try:
        message = str(error)[:MAX_ERROR_CHARS]
    except Exception:  # noqa: BLE001  # a handler's exception may do anything when it is asked for its message
        message = "(its message cannot be read)"
    text = f"{name}: {message}" if message else name
    return "".join(char if char.isprintable() else " " for char in text)[:MAX_ERROR_CHARS]
