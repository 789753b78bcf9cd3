"""
Which records of a partitioned log are done with, as ranges: what the log of redriven dead letters folds to.

Rule 1: ranges, not single offsets: a million dead letters that were redriven together cost one entry.
Rule 2: no clock, no Kafka; the order in which ranges are added does not matter, nor does adding one twice.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.core.markers import OffsetRange


class ClosedRanges:
    """The closed offsets of each partition; none at first."""

    def __init__(self) -> None:
        """Start with nothing closed."""
        self._added: dict[int, list[tuple[int, int]]] = {}
        self._merged: dict[int, tuple[list[int], list[int]]] = {}

    def add(self, partition: int, ranges: Iterable[OffsetRange]) -> None:
        """
        Close ranges of a partition.

        Args:
            partition: Of the log whose records are closed.
            ranges: In any order; they may overlap what is closed already.
        """
        self._added.setdefault(partition, []).extend((first, first + count) for first, count in ranges)

    def is_closed(self, partition: int, offset: int) -> bool:
        """Return whether a record is done with."""
        firsts, ends = self._ranges(partition)
        place = bisect_right(firsts, offset) - 1
        return place >= 0 and offset < ends[place]

    def end(self, partition: int) -> int:
        """Return the first offset above everything closed; 0 where nothing is."""
        _, ends = self._ranges(partition)
        return ends[-1] if ends else 0

    def count(self, partition: int, first: int) -> int:
        """Return how many records of a partition are done with, from an offset on."""
        firsts, ends = self._ranges(partition)
        return sum(max(0, end - max(start, first)) for start, end in zip(firsts, ends, strict=True))

    def _ranges(self, partition: int) -> tuple[list[int], list[int]]:
        """Return first offsets and ends, ascending, without overlap; merged when they are asked for."""
        added = self._added.pop(partition, None)
        firsts, ends = self._merged.get(partition, ([], []))
        if added is None:
            return firsts, ends
        merged: list[tuple[int, int]] = []
        for first, end in sorted([*zip(firsts, ends, strict=True), *added]):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((first, end))
        self._merged[partition] = ([first for first, _ in merged], [end for _, end in merged])
        return self._merged[partition]
