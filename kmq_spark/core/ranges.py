"""
Split offsets into the ranges of as few markers as possible, nearly always one.

Rule 1: a marker stays below 100 KiB and within the limits of a reader, for any number of offsets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kmq_spark.core.in_flight import ranges_of
from kmq_spark.core.markers import MAX_MESSAGES_PER_MARKER, OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

MAX_RANGES_PER_MARKER = 5_000
"""A range takes at most 18 bytes on the wire, so 5,000 ranges take at most 90,000 bytes."""


def ranges_of_fetched(offsets: Sequence[int]) -> Iterable[tuple[OffsetRange, ...]]:
    """Return the ranges of each marker that covers offsets that were just fetched: ascending, not empty."""
    first, count = offsets[0], len(offsets)
    # The common case has no gap: one range, and no search.
    if offsets[-1] - first + 1 == count <= MAX_MESSAGES_PER_MARKER:
        return ((OffsetRange(first, count),),)
    return cut_ranges(offsets)


def join_ranges(ranges: Iterable[OffsetRange]) -> Iterator[tuple[OffsetRange, ...]]:
    """Yield what `cut_ranges` yields, for ranges in any order that may overlap, without a step for each offset."""
    joined: list[list[int]] = []  # first offset, and the one after the last
    for first, count in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], first + count)
        else:
            joined.append([first, first + count])
    part: list[OffsetRange] = []
    left = MAX_MESSAGES_PER_MARKER
    for begin, end in joined:
        first = begin
        while first < end:
            count = min(end - first, left)
            part.append(OffsetRange(first, count))
            first += count
            left -= count
            if not left or len(part) == MAX_RANGES_PER_MARKER:
                yield tuple(part)
                part, left = [], MAX_MESSAGES_PER_MARKER
    if part:
        yield tuple(part)


def cut_ranges(offsets: Sequence[int] | npt.NDArray[np.int64]) -> Iterator[tuple[OffsetRange, ...]]:
    """
    Yield the ranges of each marker that covers the offsets, which may be in any order and repeated.

    The ranges ascend and do not overlap: at most `MAX_RANGES_PER_MARKER` ranges and `MAX_MESSAGES_PER_MARKER` messages
    per marker.
    """
    column = np.asarray(offsets, dtype=np.int64)
    # Fetched offsets are ascending; acknowledged offsets are in the order in which the handlers finished. `np.unique`
    # would hash them all.
    if len(column) > 1 and not (column[1:] > column[:-1]).all():
        column = np.sort(column)
        column = column[np.concatenate(([True], column[1:] != column[:-1]))]
    while len(column):
        part = column[:MAX_MESSAGES_PER_MARKER]
        ranges = ranges_of(part)[:MAX_RANGES_PER_MARKER]
        yield ranges
        column = column[sum(each.count for each in ranges) :]
