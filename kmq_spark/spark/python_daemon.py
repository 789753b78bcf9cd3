"""
Run PySpark's daemon of Python workers, without the tracebacks that it prints when a query stops.

When a query stops, the JVM closes the pipes of its workers. For each worker the daemon then prints a `BrokenPipeError`
with a traceback, although nothing is wrong. This module drops these tracebacks and passes on all other output.

Source: `pyspark/daemon.py`, `worker`; Spark's setting `spark.python.daemon.module`.
"""

from __future__ import annotations

import sys
from typing import TextIO

from pyspark import daemon

FIRST_LINES = (
    "Traceback (most recent call last)",
    "PySpark daemon failed to flush the output to the worker process:",
    "Exception ignored in",
)
"""How the first line of such a traceback begins."""

SEPARATOR_LINES = ("", "During handling of the above exception, another exception occurred:")
"""Lines that the daemon prints between two such tracebacks."""


class QuietStderr:
    """A stderr that drops the tracebacks of a `BrokenPipeError`, and tracebacks cut off by the end of the process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""
        self._held: list[str] = []
        self._has_dropped = False

    def write(self, text: str) -> int:
        """Take a text. A line is passed on as soon as it cannot belong to such a traceback."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._handle_line(line)
        return len(text)

    def flush(self) -> None:
        """Flush the stream. Lines that may belong to such a traceback stay buffered."""
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        """Return any other attribute of the stream."""
        return getattr(self._stream, name)

    def _handle_line(self, line: str) -> None:
        if line.startswith(FIRST_LINES) or (self._held and line.startswith(" ")):
            self._held.append(line)
        elif self._held and line.startswith("BrokenPipeError"):
            self._held, self._has_dropped = [], True
        elif self._has_dropped and line in SEPARATOR_LINES:
            pass
        else:
            self._stream.writelines(f"{each}\n" for each in (*self._held, line))
            self._held, self._has_dropped = [], False


if __name__ == "__main__":
    sys.stderr = QuietStderr(sys.stderr)
    daemon.manager()
