"""
The marks of decided messages: a TICK of the newest term has decided them, and no END of a tracker has been read since.

Rule 1: no TICK of the same term decides a marked message again. A TERM clears all marks: the transactions of older
terms are over, and what they committed lies below it.
Rule 2: marks are apart from the table, because a consumer may end a marked message and start its old copy again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kmq_spark.core.in_flight import InFlight, run_ends
from kmq_spark.core.segments import areas_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _no_keys() -> NDArray[np.uint64]:
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """
    Marked messages, as ascending ranges of message keys that neither overlap nor touch.

    Attributes:
        first: First key of each range.
        end: Key after each range.
    """

    first: NDArray[np.uint64] = field(default_factory=_no_keys)
    end: NDArray[np.uint64] = field(default_factory=_no_keys)

    @property
    def message_count(self) -> int:
        """Number of marked messages."""
        return int((self.end - self.first).sum())

    def with_runs(self, key: NDArray[np.int64], count: NDArray[np.int64]) -> Marks:
        """Return the marks with some runs of messages added."""
        first, end = np.append(self.first, key.astype(np.uint64)), np.append(self.end, run_ends(key, count))
        return Marks(*areas_of(first, end)) if len(first) else self

    def without_runs(self, key: NDArray[np.int64], count: NDArray[np.int64]) -> Marks:
        """Return the marks with some runs of messages taken away, which may overlap."""
        if not len(self.first) or not len(key):
            return self
        gone = Marks().with_runs(key, count)
        edges = np.unique(np.concatenate([self.first, self.end, gone.first, gone.end]))
        begin = edges[:-1]
        is_left = self.covers_keys(begin) & ~gone.covers_keys(begin)
        return Marks(*areas_of(begin[is_left], edges[1:][is_left])) if is_left.any() else Marks()

    def split(self, table: InFlight) -> InFlight:
        """Return the table with its runs split where a range of marks begins or ends."""
        return table.split_at(np.sort(np.append(self.first, self.end))) if len(self.first) else table

    def cover(self, table: InFlight) -> NDArray[np.bool_]:
        """Return whether each row of a table that `split` returned is marked."""
        return self.covers_keys(table.columns.key.astype(np.uint64))

    def covers_keys(self, key: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return whether each of these keys is marked."""
        if not len(self.first):
            return np.zeros(len(key), dtype=np.bool_)
        place = np.searchsorted(self.first, key, side="right") - 1
        covers: NDArray[np.bool_] = (place >= 0) & (key < self.end[place])
        return covers
