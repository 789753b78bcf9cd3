"""
Split offsets into the ranges of as few markers as possible, nearly always one.

Rule 1: a marker stays below 100 KiB and within the limits of a reader, for any number of offsets.
"""

from __future__ import annotations

from itertools import compress, count, islice, pairwise
from operator import lt, ne, sub
from typing import TYPE_CHECKING

from kmq_spark.core.markers import MAX_MESSAGES_PER_MARKER, OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAX_RANGES_PER_MARKER = 5_000
"""A range takes at most 18 bytes on the wire, so 5,000 ranges take at most 90,000 bytes."""


def ranges_of_fetched(offsets: Sequence[int]) -> Iterable[tuple[OffsetRange, ...]]:
    """Return the ranges of each marker that covers offsets that were just fetched: ascending, not empty."""
    first, length = offsets[0], len(offsets)
    # The common case has no gap: one range, and no search.
    if offsets[-1] - first + 1 == length <= MAX_MESSAGES_PER_MARKER:
        return ((OffsetRange(first, length),),)
    return cut_ranges(offsets)


def join_ranges(ranges: Iterable[OffsetRange]) -> Iterator[tuple[OffsetRange, ...]]:
    """Yield what `cut_ranges` yields, for ranges in any order that may overlap, without a step for each offset."""
    joined: list[list[int]] = []  # first offset, and the one after the last
    for first, length in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], first + length)
        else:
            joined.append([first, first + length])
    part: list[OffsetRange] = []
    left = MAX_MESSAGES_PER_MARKER
    for begin, end in joined:
        first = begin
        while first < end:
            length = min(end - first, left)
            part.append(OffsetRange(first, length))
            first += length
            left -= length
            if not left or len(part) == MAX_RANGES_PER_MARKER:
                yield tuple(part)
                part, left = [], MAX_MESSAGES_PER_MARKER
    if part:
        yield tuple(part)


def cut_ranges(offsets: Sequence[int]) -> Iterator[tuple[OffsetRange, ...]]:
    """
    Yield the ranges of each marker that covers the offsets, which may be in any order and repeated.

    The ranges ascend and do not overlap: at most `MAX_RANGES_PER_MARKER` ranges and `MAX_MESSAGES_PER_MARKER` messages
    per marker.
    """
    # Fetched offsets are ascending; acknowledged offsets are in the order in which the handlers finished.
    left = offsets if all(map(lt, offsets, islice(offsets, 1, None))) else sorted(set(offsets))
    while left:
        part = left[:MAX_MESSAGES_PER_MARKER]
        begins = _begins(part)[: MAX_RANGES_PER_MARKER + 1]
        yield tuple([OffsetRange(part[begin], end - begin) for begin, end in pairwise(begins)])
        left = left[begins[-1] :]


def _begins(offsets: Sequence[int]) -> list[int]:
    """Return where the ranges of ascending offsets begin, and the end of the last one."""
    if offsets[-1] - offsets[0] + 1 == len(offsets):
        return [0, len(offsets)]
    steps = list(map(sub, offsets, count()))
    return [0, *compress(count(1), map(ne, steps, islice(steps, 1, None))), len(offsets)]
