"""
PySpark's daemon of Python workers, without a traceback for each worker whose reader has gone.

When a query stops, the JVM closes the pipes of its workers. The daemon prints a `BrokenPipeError` with its traceback
for each of them, in normal work. Everything else that it prints passes.

Source: `pyspark/daemon.py`, `worker`; Spark's setting `spark.python.daemon.module`.
"""

from __future__ import annotations

import sys
from typing import TextIO

from pyspark import daemon

HEADS = (
    "Traceback (most recent call last)",
    "PySpark daemon failed to flush the output to the worker process:",
    "Exception ignored in",
)
"""How such a text begins."""

LINKS = ("", "During handling of the above exception, another exception occurred:")
"""What stands between two of them."""


class QuietStderr:
    """
    A stderr that drops the tracebacks of a `BrokenPipeError`, and those that are cut short by the end of the process.

    Args:
        stream: Where the rest goes.
    """

    def __init__(self, stream: TextIO) -> None:
        """Begin with nothing held back."""
        self._stream = stream
        self._line = ""
        self._held: list[str] = []
        self._has_dropped = False

    def write(self, text: str) -> int:
        """Take a text; a line passes once it is known that it is of no such traceback."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._take(line)
        return len(text)

    def flush(self) -> None:
        """Write what is not held back."""
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        """Return what a stream has besides."""
        return getattr(self._stream, name)

    def _take(self, line: str) -> None:
        if line.startswith(HEADS) or (self._held and line.startswith(" ")):
            self._held.append(line)
        elif self._held and line.startswith("BrokenPipeError"):
            self._held, self._has_dropped = [], True
        elif self._has_dropped and line in LINKS:
            pass
        else:
            self._stream.writelines(f"{each}\n" for each in (*self._held, line))
            self._held, self._has_dropped = [], False


if __name__ == "__main__":
    sys.stderr = QuietStderr(sys.stderr)
    daemon.manager()
