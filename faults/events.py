"""
Event files: what an actor is about to do, and what came of it, a JSON object a line.

Rule 1: append-only, one write a line: a kill never leaves half of one that is read.
Rule 2: *intent* before, *outcome* after; an intent without outcome is unknown, which is an outcome too.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUFFIX = ".events.jsonl"


class EventFile:
    """
    The file of one actor; safe for threads, since a line is one write.

    Args:
        folder: Where the files of one queue lie.
        actor: Name of the actor, and of the file.
    """

    def __init__(self, folder: Path, actor: str) -> None:
        """Open the file."""
        self._actor = actor
        self._file = os.open(folder / f"{actor}{SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, **fields: Any) -> None:
        """Append an event."""
        line = {"event": event, "actor": self._actor, "wall": time.time(), "monotonic": time.monotonic(), **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_events(folder: Path, actor: str = "*") -> Iterator[dict[str, Any]]:
    """Return the events of all actors of a folder, or of one; a line cut off by a kill is left out."""
    for path in sorted(folder.glob(f"{actor}{SUFFIX}")):
        for line in path.read_bytes().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue
