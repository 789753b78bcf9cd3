"""
Event files: what a process is about to do, and what came of it, a JSON object a line.

Rule 1: append-only, one write a line: a kill never leaves half of one that is read.
Rule 2: *intent* before, *outcome* after; an intent without outcome is unknown, which is an outcome too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUFFIX = ".events.jsonl"


def steady_s() -> float:
    """Return seconds of the one clock that no fault of the campaign touches, the same in all processes."""
    return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)


class EventFile:
    """The file of one actor; safe for threads, since a line is one write."""

    def __init__(self, file: int) -> None:
        self._file = file

    @classmethod
    def of(cls, folder: Path, actor: str) -> EventFile:
        """Open the file of an actor of this process."""
        return cls(os.open(folder / f"{actor}{SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))

    @classmethod
    def of_this_process(cls) -> EventFile:
        """Return the standard output, which the campaign has made the event file of a process that it starts."""
        return cls(sys.stdout.fileno())

    def write(self, event: str, **fields: Any) -> None:
        """Append an event, with both clocks."""
        line = {"event": event, "wall": time.time(), "monotonic": steady_s(), **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line; None where a kill has cut it off, or another program wrote it."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "event" in found else None


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """Return the events of all actors of a folder; those of programs that give no time are left out."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        actor = path.name.removesuffix(SUFFIX)
        for line in path.read_bytes().splitlines():
            event = parsed(line)
            if event is not None and "monotonic" in event:
                yield {"actor": actor, **event}
