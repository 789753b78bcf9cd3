"""
Processes whose wall clock is wrong: ahead, behind, drifting, stepping; hosts that are suspended, and their clocks with
them. Built from `clock/false_clock.c` at first use.

Rule 1: what is false is the reading of a clock alone; waits take as long as they say.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections import defaultdict
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from faults.processes import now_ms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from faults.processes import Child
    from faults.topics import Dump
    from faults.waits import Bounds
    from kmq_spark.core.markers import MessageId

HOUR_MS = 3_600_000
EDGE_MS = 20
"""How exactly the instant of a step is known."""

_MOVED_MS = struct.Struct("=2q")
"""How far the wall clock is ahead, and how long the host was suspended."""

_SOURCE = Path(__file__).parent / "clock" / "false_clock.c"


class FalseClock(NamedTuple):
    """A wrong wall clock: how far ahead, how much too fast (millionths), when it jumps after a start, and by what."""

    offset_ms: int = 0
    rate_ppm: int = 0
    step_after_ms: int = 0
    step_ms: int = 0

    def environment(self) -> dict[str, str]:
        """Return the variables under which a process has this clock."""
        return {"LD_PRELOAD": str(_library()), "KMQ_FALSE_CLOCK": " ".join(map(str, self))}


class Epoch(NamedTuple):
    """A span of true time in which a clock was ahead by so much."""

    begins_at_ms: int
    ahead_ms: int


class MovableClock:
    """A wall clock that the injector moves while its process runs; *epochs* is how far it was ahead until now."""

    edge_ms = EDGE_MS

    def __init__(self, folder: Path, epochs: Sequence[Epoch] = ()) -> None:
        self._path = folder / "moved-clock"
        self._path.write_bytes(_MOVED_MS.pack(0, 0))
        self.epochs = list(epochs) or [Epoch(now_ms(), 0)]

    def environment(self) -> dict[str, str]:
        """Return the variables under which a process has this clock."""
        return {"LD_PRELOAD": str(_library()), "KMQ_FALSE_CLOCK_FILE": str(self._path)}

    def move(self, ahead_ms: int) -> None:
        """Put it ahead of the true time by so much; behind where negative."""
        with self._path.open("r+b", buffering=0) as file:
            # One write of aligned numbers: the process that maps them sees all of each or none.
            file.write(_MOVED_MS.pack(ahead_ms, 0))
        self.epochs.append(Epoch(now_ms(), ahead_ms))

    def true_times_ms(self, readings_ms: Sequence[int]) -> list[int]:
        """
        Return the true times of readings that follow each other, as the records of a partition do.

        After a step back the clock shows again what it has shown before: of the spans that explain a reading, it is the
        first that does not lie before the reading that precedes it.
        """
        found: list[int] = []
        at_ms = 0
        for read_ms in readings_ms:
            candidates = [true_ms for true_ms in self._explained(read_ms) if true_ms >= at_ms - self.edge_ms]
            # None: within a step; the time then has not moved.
            at_ms = max(at_ms, min(candidates, default=at_ms))
            found.append(at_ms)
        return found

    def of(self, _topic: str, _partition: int) -> MovableClock:
        """Return the clock that stamps a partition."""
        return self

    def corrected(self, bounds: Bounds, dump: Dump) -> Bounds:
        """Return the bounds of a fault with the true times of what a broker with this clock appended."""
        markers: dict[tuple[int, int], int] = {}
        for partition, log in dump.markers.items():
            times_ms = self.of(f"{dump.queue}.markers", partition).true_times_ms(
                [logged.appended_at_ms for logged in log]
            )
            markers |= {(partition, logged.marker_offset): at for logged, at in zip(log, times_ms, strict=True)}
        messages: dict[MessageId, int] = {}
        records = sorted(dump.messages, key=lambda record: record.place)
        for partition, group in groupby(records, key=lambda record: record.place.queue_partition):
            part = list(group)
            times_ms = self.of(dump.queue, partition).true_times_ms([record.at_ms for record in part])
            messages |= {record.place: at for record, at in zip(part, times_ms, strict=True)}
        # Back from behind is a step ahead, too, and none for the log's clock, which had not gone back.
        set_ahead = [epoch.begins_at_ms for epoch in self.epochs if epoch.ahead_ms > 0]
        return replace(bounds, true_markers=markers, true_messages=messages, slack_ms=self.edge_ms, set_ahead=set_ahead)

    def _explained(self, read_ms: int) -> Iterator[int]:
        ends = [epoch.begins_at_ms for epoch in self.epochs[1:]] + [2**62]
        for epoch, end in zip(self.epochs, ends, strict=True):
            true_ms = read_ms - epoch.ahead_ms
            # The injector notes a step a moment after the clock has made it.
            if epoch.begins_at_ms - self.edge_ms <= true_ms <= end + self.edge_ms:
                yield true_ms


class LeadersClock(MovableClock):
    """The clocks of brokers that differ: that of a partition moves with its leader, which is seen a moment later."""

    edge_ms = 2_000

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._of: defaultdict[tuple[str, int], list[Epoch]] = defaultdict(list)

    def leads(self, topic: str, partition: int, ahead_ms: int) -> None:
        """Note how far the clock of the broker that leads a partition is ahead."""
        epochs = self._of[topic, partition]
        if not epochs or epochs[-1].ahead_ms != ahead_ms:
            epochs.append(Epoch(now_ms() if epochs else 0, ahead_ms))
            self.epochs.append(epochs[-1])

    def of(self, topic: str, partition: int) -> MovableClock:
        """Return the clock that stamps a partition."""
        clock = copy(self)
        clock.epochs = self._of[topic, partition]
        return clock


class SleepingHost:
    """
    A host that is suspended with all its processes. Its wall clock is right again when it wakes up.

    The clocks that count from the boot stand still meanwhile, all of them, as where a hypervisor stops the machine.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._slept_ms = folder / "sleeping-host", 0
        self._path.write_bytes(_MOVED_MS.pack(0, 0))

    def environment(self) -> dict[str, str]:
        """Return the variables under which a process is on this host."""
        return {"LD_PRELOAD": str(_library()), "KMQ_FALSE_CLOCK_FILE": str(self._path)}

    def sleep(self, children: Sequence[Child], seconds: float) -> None:
        """Suspend the host, and wake it up again after some seconds."""
        for child in children:
            child.pause()
        began_s = time.monotonic()
        time.sleep(seconds)
        self._slept_ms += round(1000 * (time.monotonic() - began_s))
        with self._path.open("r+b", buffering=0) as file:
            file.write(_MOVED_MS.pack(0, self._slept_ms))
        for child in children:
            child.resume()


def is_available() -> bool:
    """Return whether a C compiler is here, and the machine a Linux."""
    return shutil.which("cc") is not None and os.uname().sysname == "Linux"


@cache
def _library() -> Path:
    target = Path(tempfile.mkdtemp(prefix="kmq-false-clock-")) / "false_clock.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(target), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return target
