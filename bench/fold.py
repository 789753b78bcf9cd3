"""
Measure the fold: `python bench/fold.py`; needs about 2 GB of memory and a minute.

Each line is one case: seconds, best of three. Cases that need a large table build it through the fold itself.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from kmq_spark.core.fold import LoggedMarker, PartitionState, Rules, fold
from kmq_spark.core.markers import Outcome
from kmq_spark.testing import end, keep_alive, log, marker_record, start, tick
from kmq_spark.wire.codec import decode_marker

if TYPE_CHECKING:
    from collections.abc import Callable

MILLION = 1_000_000
HOUR_MS = 3_600_000
BATCH = 500


def measure(name: str, work: Callable[[], object], times: int = 3) -> None:
    """Print how long some work takes."""
    seconds = []
    for _ in range(times):
        began_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began_s)
    print(f"{min(seconds):9.4f} s  {name}", flush=True)


def started(count: int, first: int = 0, batch: int = BATCH) -> list[LoggedMarker]:
    """Return STARTs of *count* messages in a row."""
    return [
        start(message_offset, lease_ms=HOUR_MS, count=batch) for message_offset in range(first, first + count, batch)
    ]


def scattered_starts(count: int, first: int) -> list[LoggedMarker]:
    """Return STARTs of *count* messages of which no two are neighbours; each lies by chance in the four of its own."""
    chance = random.Random(first)  # noqa: S311  # no secret
    return [
        start(begin, lease_ms=HOUR_MS, ranges=[(begin + 4 * i + chance.randrange(3), 1) for i in range(BATCH)])
        for begin in range(first, first + 4 * count, 4 * BATCH)
    ]


def ended(count: int, first: int = 0, batch: int = BATCH, outcome: Outcome = Outcome.ACKED) -> list[LoggedMarker]:
    """Return ENDs of *count* messages."""
    return [end(offset, count=batch, outcome=outcome) for offset in range(first, first + count, batch)]


def interleaved(starts: list[LoggedMarker], ends: list[LoggedMarker]) -> list[LoggedMarker]:
    """Return each START with its END right after it."""
    return [marker for pair in zip(starts, ends, strict=True) for marker in pair]


def measure_batches() -> None:
    """Measure what one batch costs, by what it holds."""
    rules = Rules()
    empty = PartitionState.empty()
    others = fold(empty, log(*started(MILLION, first=10 * MILLION)), rules).state
    both = [*started(MILLION), *ended(MILLION)]
    batch = log(*both, first=others.next_marker_offset)
    measure("1 M started, then 1 M ended, by 500, nothing else in flight", lambda: fold(empty, batch, rules))
    measure("1 M started, then 1 M ended, by 500, 1 M others in flight", lambda: fold(others, batch, rules))
    mixed = log(*interleaved(started(MILLION), ended(MILLION)), first=others.next_marker_offset)
    measure("1 M started and ended in turns, by 500, 1 M others in flight", lambda: fold(others, mixed, rules))
    ones = interleaved(started(50_000, batch=1), ended(50_000, batch=1))
    single = log(*ones, first=others.next_marker_offset)
    measure("100,000 markers of one message each, 1 M others in flight", lambda: fold(others, single, rules))
    ticked = log(*interleaved(ones, [tick()] * len(ones)), first=others.next_marker_offset)
    measure("the same with a TICK after each that decides nothing", lambda: fold(others, ticked, rules))
    storm = log(*[keep_alive(7, lease_ms=HOUR_MS)] * 100_000, first=others.next_marker_offset)
    measure("100,000 KEEPALIVEs of one message", lambda: fold(others, storm, rules))
    small = log(*started(BATCH * 9), *ended(BATCH * 9), tick(), first=empty.next_marker_offset)
    measure("19 markers, nothing else in flight", lambda: fold(empty, small, rules), times=50)
    due = log(tick(2 * HOUR_MS), first=others.next_marker_offset)
    measure("one TICK decides 10,000 of 1 M due", lambda: fold(others, due, rules))
    rejected = log(*ended(MILLION, 10 * MILLION, outcome=Outcome.REJECTED), first=others.next_marker_offset)
    measure("1 M rejected", lambda: fold(others, rejected, rules))


def measure_large_table() -> None:
    """Measure what ten million messages in flight cost."""
    rules = Rules()
    table = fold(PartitionState.empty(), log(*started(10 * MILLION)), rules).state
    at = table.next_marker_offset
    measure("10 M in flight: one TICK that decides nothing", lambda: fold(table, log(tick(), first=at), rules))
    few = log(*started(BATCH, 20 * MILLION), *ended(BATCH, 5 * MILLION), keep_alive(6 * MILLION, count=BATCH), first=at)
    measure("10 M in flight: 500 started, 500 ended, 500 kept alive", lambda: fold(table, few, rules))
    blob = table.to_bytes()
    print(f"           10 M in flight, in runs of 500: {len(blob):,} bytes of state")
    measure("10 M in flight, in runs of 500: to bytes", table.to_bytes)
    measure("10 M in flight, in runs of 500: from bytes", lambda: PartitionState.from_bytes(blob))
    scattered = PartitionState.empty()
    for part in range(10):
        markers = log(*scattered_starts(MILLION, 4 * MILLION * part), first=scattered.next_marker_offset)
        scattered = fold(scattered, markers, rules).state
    blob = scattered.to_bytes()
    print(f"           10 M in flight, no two neighbours: {len(blob):,} bytes of state")
    measure("10 M in flight, no two neighbours: to bytes", scattered.to_bytes)
    measure("10 M in flight, no two neighbours: from bytes", lambda: PartitionState.from_bytes(blob))


def measure_codec() -> None:
    """Measure reading markers."""
    one = [marker_record(marker) for marker in started(100_000, batch=1)]
    measure("100,000 markers of one message decoded", lambda: [decode_marker(value) for value in one])
    many = [marker_record(start(ranges=[(2 * i, 1) for i in range(BATCH)]))] * 2_000
    measure("2,000 markers of 500 single ranges decoded", lambda: [decode_marker(value) for value in many])


if __name__ == "__main__":
    measure_codec()
    measure_batches()
    measure_large_table()
