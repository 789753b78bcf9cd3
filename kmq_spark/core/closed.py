"""
The completed records of a partitioned log, folded from a redrive topic.

Ranges, not single offsets: a million dead letters that were redriven together take one entry.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.core.markers import OffsetRange


class ClosedRanges:
    """The closed (completed) offsets of each partition."""

    def __init__(self) -> None:
        self._added: dict[int, list[tuple[int, int]]] = {}
        self._merged: dict[int, tuple[list[int], list[int]]] = {}

    def add(self, partition: int, ranges: Iterable[OffsetRange]) -> None:
        """Close ranges of a partition, in any order; they may overlap ranges that are already closed."""
        self._added.setdefault(partition, []).extend((first, first + count) for first, count in ranges)

    def is_closed(self, partition: int, offset: int) -> bool:
        """Return whether a record is closed."""
        firsts, ends = self._ranges(partition)
        place = bisect_right(firsts, offset) - 1
        return place >= 0 and offset < ends[place]

    def end(self, partition: int) -> int:
        """Return the first offset above all closed offsets; 0 if there are none."""
        _, ends = self._ranges(partition)
        return ends[-1] if ends else 0

    def count(self, partition: int, first: int) -> int:
        """Return the number of closed records of a partition from offset *first* on."""
        firsts, ends = self._ranges(partition)
        return sum(max(0, end - max(start, first)) for start, end in zip(firsts, ends, strict=True))

    def _ranges(self, partition: int) -> tuple[list[int], list[int]]:
        """Return first offsets and ends, ascending, without overlap; merges newly added ranges first."""
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
