"""
Describe errors of PySpark and py4j in one line of a log.

Rule 1: The text names what failed in the JVM, not the call of py4j that reported it (`o110.stop`).
Rule 2: An exception of the JVM asks the JVM for its text. Where the JVM has ended, there is none, and that is no error.
"""

from __future__ import annotations

from py4j.protocol import Py4JError

_CALL_FAILED = "An error occurred while calling "
"""How py4j begins the text of an exception of the JVM. The next line is `: ` and the Java exception."""

_STOP_TIMED_OUT = "failed to stop within"
"""Part of the text of Spark's exception when a query is still in a batch after `spark.sql.streaming.stopTimeout`."""


def text_of(error: BaseException) -> str:
    """Return the text of an error; its class and a remark for an exception of a JVM that has ended."""
    try:
        return str(error)
    except (Py4JError, ConnectionError):
        return f"{type(error).__name__} of a JVM that has ended"


def one_line(error: Exception) -> str:
    """Return the first line of an error's text; for an exception of the JVM, the line that names it."""
    text = text_of(error).strip()
    if not text:
        return type(error).__name__
    first, *rest = text.splitlines()
    if first.startswith(_CALL_FAILED) and rest:
        return rest[0].removeprefix(": ")
    return first


def is_stop_timeout(error: Exception) -> bool:
    """Return whether a query was stopped but its running batch did not end in time."""
    return _STOP_TIMED_OUT in text_of(error)
