"""
Describe a handler's exception as text for a marker.

Rule 1: every exception gives a text: one line, printable, of bounded length.
"""

from __future__ import annotations

from kmq_spark.core.markers import MAX_ERROR_CHARS


def error_text(error: BaseException) -> str:
    """Return type and message of an exception, such as `ValueError: no such order`, cut to `MAX_ERROR_CHARS`."""
    name = type(error).__name__
    try:
        message = str(error)[:MAX_ERROR_CHARS]
    except Exception:  # noqa: BLE001  # `__str__` of a handler's exception may raise anything
        message = "(its message cannot be read)"
    return one_line(f"{name}: {message}" if message else name)


def one_line(text: str) -> str:
    """Return text as one printable line, cut to `MAX_ERROR_CHARS`."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_ERROR_CHARS])
