"""
How long messages waited, apart from the time in which something was away on purpose.

Rule 1: a wait is judged by its longest *quiet interval*: time in which no fault was active and the tracker was there. A
broker that is suspended for 15 s excuses those 15 s, and not what comes after.
Rule 2: instants are epoch milliseconds of one clock: the broker's, turned into true time where that clock was moved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from faults.oracle import covered
from kmq_spark.core.markers import MarkerType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from faults.topics import Dump, Record
    from kmq_spark.core.markers import MessageId

LATE_BOUND_MS = 15_000
"""I8: a redelivery waits no longer than this while nothing is away."""

QUIET_P99_MS = 5_000
"""I8: where nothing had been away for `LATE_BOUND_MS`, 99 of 100 redeliveries are not later than this."""

QUIET_COUNT = 100
"""Redeliveries from which on a percentile is meaningful."""


class Interval(NamedTuple):
    """`[begin, end)`, milliseconds."""

    begin_ms: int
    end_ms: int


class Wait(NamedTuple):
    """A redelivery: when it was due, and when it came."""

    message: MessageId
    due_ms: int
    came_ms: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a fault allows."""

    away: Sequence[Interval] = ()
    """When something was away on purpose."""
    held_up: Sequence[Interval] = ()
    """When redeliveries waited for the transaction of a process that had died."""
    late_ms: int = LATE_BOUND_MS
    quiet_p99_ms: int = QUIET_P99_MS
    stall_ms: int = 0
    """Longest quiet interval in which no message of a partition was taken although some waited; 0: not judged."""
    true_markers: Mapping[tuple[int, int], int] = field(default_factory=dict)
    true_messages: Mapping[MessageId, int] = field(default_factory=dict)
    """True append times where the broker's clock was moved."""
    slack_ms: int = 0
    set_ahead: Sequence[int] = ()
    """Instants at which the broker's clock was set ahead: what was held then falls due."""
    letters_need_a_cause: bool = False
    """Whether a message may be a dead letter only where a handler failed on it or rejected it."""
    patience: float = 1.0

    def stretched(self, factor: float) -> Bounds:
        """Return the same with *factor* times as long for every wait that is judged, and for a group to settle."""
        late_ms, p99_ms, stall_ms = (round(factor * ms) for ms in (self.late_ms, self.quiet_p99_ms, self.stall_ms))
        return replace(self, late_ms=late_ms, quiet_p99_ms=p99_ms, stall_ms=stall_ms, patience=factor)

    def marker_ms(self, partition: int, offset: int, read_ms: int) -> int:
        """Return when a marker was appended, in true time."""
        return self.true_markers.get((partition, offset), read_ms)

    def message_ms(self, record: Record) -> int:
        """Return when a message was appended, in true time."""
        return self.true_messages.get(record.place, record.at_ms)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals in order, those that touch as one."""
    found: list[Interval] = []
    for interval in sorted(intervals):
        if found and interval.begin_ms <= found[-1].end_ms:
            found[-1] = Interval(found[-1].begin_ms, max(found[-1].end_ms, interval.end_ms))
        else:
            found.append(interval)
    return found


def gaps(present: Iterable[Interval], whole: Interval) -> list[Interval]:
    """Return the intervals of *whole* that none of *present* covers."""
    edges = [Interval(0, whole.begin_ms), *merged(present), Interval(whole.end_ms, whole.end_ms)]
    return [Interval(one.end_ms, other.begin_ms) for one, other in pairwise(edges) if one.end_ms < other.begin_ms]


class Quiet:
    """Answers how much of a wait was quiet: when nothing was away."""

    def __init__(self, away: Iterable[Interval]) -> None:
        self._away = merged(away)
        self._begins = [interval.begin_ms for interval in self._away]

    def longest_ms(self, begin_ms: int, end_ms: int) -> int:
        """Return the longest interval of a wait in which nothing was away."""
        at, longest_ms = begin_ms, 0
        for interval in self._away[max(0, bisect_right(self._begins, begin_ms) - 1) :]:
            if interval.begin_ms >= end_ms:
                break
            if interval.end_ms > at:
                longest_ms = max(longest_ms, interval.begin_ms - at)
                at = interval.end_ms
        return max(longest_ms, end_ms - at)


def too_late(waits: Sequence[Wait], bounds: Bounds) -> Iterator[str]:
    """Yield redeliveries that waited too long."""
    quiet = Quiet([*bounds.away, *bounds.held_up])
    calm: list[int] = []
    for message, due_ms, came_ms in waits:
        came_ms = max(came_ms, due_ms)  # noqa: PLW2901  # an early one is judged elsewhere
        if (waited_ms := quiet.longest_ms(due_ms, came_ms)) > bounds.late_ms:
            yield f"{message} came {came_ms - due_ms} ms late, {waited_ms} ms of it while nothing was away"
        if quiet.longest_ms(due_ms - LATE_BOUND_MS, came_ms) == came_ms - due_ms + LATE_BOUND_MS:
            calm.append(came_ms - due_ms)
    if len(calm) >= QUIET_COUNT and (p99 := float(np.percentile(calm, 99))) > bounds.quiet_p99_ms:
        yield f"p99 of {len(calm)} redeliveries long after any fault is {p99:.0f} ms, bound {bounds.quiet_p99_ms} ms"


def stalls(dump: Dump, bounds: Bounds) -> Iterator[str]:
    """Yield intervals in which messages of a queue partition waited and none was taken."""
    if not bounds.stall_ms:
        return
    quiet = Quiet(bounds.away)
    for partition, changes in sorted(_changes(dump, bounds).items()):
        waiting = since_ms = 0
        for at_ms, change in sorted(changes):
            if waiting and change < 0 and (stood_ms := quiet.longest_ms(since_ms, at_ms)) > bounds.stall_ms:
                yield f"queue partition {partition}: {waiting} messages waited and none was taken in {stood_ms} ms"
            if change < 0 or not waiting:
                since_ms = at_ms
            waiting += change


def _changes(dump: Dump, bounds: Bounds) -> dict[int, list[tuple[int, int]]]:
    """Return when a message of each queue partition came (1) and when it was taken for the first time (-1)."""
    first_start: dict[MessageId, int] = {}
    for partition, log in dump.markers.items():
        for offset, read_ms, marker in log:
            if marker is not None and marker.type is MarkerType.START:
                for message in covered(marker):
                    first_start.setdefault(message, bounds.marker_ms(partition, offset, read_ms))
    changes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for record in dump.messages:
        came_ms = bounds.message_ms(record)
        if (taken_ms := first_start.get(record.place)) is not None:
            changes[record.place.queue_partition] += [(came_ms, 1), (max(taken_ms, came_ms), -1)]
    return changes
