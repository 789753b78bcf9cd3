"""
Processes whose wall clock is wrong: ahead, behind, drifting, stepping; built from `clock/false_clock.c` at first use.

Rule 1: what is false is the reading of the wall clock alone; waits take as long as they say.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

_MOVED_MS = struct.Struct("=q")

SOURCE = Path(__file__).parent / "clock" / "false_clock.c"


class FalseClock(NamedTuple):
    """
    A wrong wall clock.

    Attributes:
        offset_ms: Ahead by so much.
        rate_ppm: Too fast by so many millionths.
        step_after_ms: After so long from the start of the process it jumps,
        step_ms: by so much.
    """

    offset_ms: int = 0
    rate_ppm: int = 0
    step_after_ms: int = 0
    step_ms: int = 0

    def environment(self) -> dict[str, str]:
        """Return the variables under which a process has this clock."""
        numbers = (self.offset_ms, self.rate_ppm, self.step_after_ms, self.step_ms)
        return {"LD_PRELOAD": str(_library()), "KMQ_FALSE_CLOCK": " ".join(map(str, numbers))}


class Epoch(NamedTuple):
    """A stretch of true time on which a clock was ahead by so much."""

    begins_at_ms: int
    ahead_ms: int


class MovableClock:
    """
    A wall clock that the injector moves while its process runs.

    Attributes:
        epochs: How far it was ahead, and since when, in true time.

    Args:
        folder: Where its file goes.
    """

    def __init__(self, folder: Path) -> None:
        """Make the file: the clock is right."""
        self._path = folder / "moved-clock"
        self._path.write_bytes(_MOVED_MS.pack(0))
        self.epochs = [Epoch(time.time_ns() // 1_000_000, 0)]

    def environment(self) -> dict[str, str]:
        """Return the variables under which a process has this clock."""
        return {"LD_PRELOAD": str(_library()), "KMQ_FALSE_CLOCK_FILE": str(self._path)}

    def move(self, ahead_ms: int) -> None:
        """Put it ahead of the true time by so much; behind where negative."""
        with self._path.open("r+b", buffering=0) as file:
            # One write of eight aligned bytes: the process that maps them sees all or none.
            file.write(_MOVED_MS.pack(ahead_ms))
        self.epochs.append(Epoch(time.time_ns() // 1_000_000, ahead_ms))

    def true_ms(self, read_ms: int) -> int:
        """
        Return the true time at which the clock read so much.

        A reading that two stretches could explain belongs to the one whose bounds it misses by less: the injector
        notes a step some microseconds after it.
        """
        ends = [epoch.begins_at_ms for epoch in self.epochs[1:]] + [2**62]
        missed: list[tuple[int, int]] = []
        for epoch, end in zip(self.epochs, ends, strict=True):
            true_ms = read_ms - epoch.ahead_ms
            missed.append((max(epoch.begins_at_ms - true_ms, true_ms - end, 0), true_ms))
        return min(missed)[1]


def is_available() -> bool:
    """Return whether a C compiler is here, and the machine a Linux."""
    return shutil.which("cc") is not None and os.uname().sysname == "Linux"


@cache
def _library() -> Path:
    target = Path(tempfile.mkdtemp(prefix="kmq-false-clock-")) / "false_clock.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(target), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return target
