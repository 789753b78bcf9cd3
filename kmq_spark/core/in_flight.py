"""
The packed table of messages in flight: runs of messages, as numpy columns sorted by message key.

Rule 1: a table is immutable. Every change returns a new table; unchanged columns are shared.
Rule 2: each message has one int64 key, `queue_partition << 48 | message_offset`. Sorting, searching and merging use
this column alone.
Rule 3: a row is a run: messages with adjacent offsets of one queue partition and the same values in every column. So a
table costs as much as it has runs, however many messages they hold.
Rule 4: a table between two batches is coalesced: no two adjacent runs could be one. Equal tables then have equal rows.
Rule 5: a rejected message stays in the table with the deadline `REJECTED`, so it is due whatever its lease.

Source: kafka-mq-go keeps a map and two heaps (`queue/redelivery/markersqueue.go`). Here a batch is merged at once.
Run-length tables, as roaring bitmaps and interval maps use them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kmq_spark.core.delays import added_by_jitter_ms
from kmq_spark.core.markers import MAX_MESSAGE_OFFSET, OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

KEY_BITS = 48
"""Number of bits of the message offset in a key; see `MAX_MESSAGE_OFFSET`."""

REJECTED = -1
"""Deadline of a rejected message. It is below every clock value, so the next TICK decides the message."""


MOST_SPREAD = 200_000
"""Number of messages with jitter of which at most deadlines are computed at once; each takes about 100 bytes."""


def message_keys(queue_partition: int, message_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the table keys of messages of one queue partition."""
    return message_offsets + (queue_partition << KEY_BITS)


def run_ends(key: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.uint64]:
    """
    Return the key after each run.

    Unsigned: after the largest message of the largest queue partition comes 2**63, which is no int64.
    """
    return key.astype(np.uint64) + count.astype(np.uint64)


def ranges_of(message_offsets: NDArray[np.int64]) -> tuple[OffsetRange, ...]:
    """Return the ranges that cover exactly these offsets."""
    if not len(message_offsets):
        return ()
    starts = np.flatnonzero(np.diff(message_offsets, prepend=message_offsets[0] - 2) != 1)
    counts = np.diff(starts, append=len(message_offsets))
    return tuple(map(OffsetRange, message_offsets[starts].tolist(), counts.tolist()))


def spread(first: NDArray[np.int64], count: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Expand ranges of integers."""
    of_range = np.repeat(np.arange(len(count)), count)
    before = np.cumsum(count, dtype=np.int64) - count
    return of_range, (first - before)[of_range] + np.arange(len(of_range))


def _no_rows() -> NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


def _no_delays() -> NDArray[np.float64]:
    return np.empty(0, dtype=np.float64)


def _no_flags() -> NDArray[np.bool_]:
    return np.empty(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """
    Runs of messages, one row each: columns of equal length, sorted by key; no two runs have a message in common.

    Attributes:
        key: Key of the first message of the run.
        count: Number of messages, at least 1.
        deadline_at_ms: Deadline, epoch milliseconds on the clock of the partition; `REJECTED` for rejected messages.
            With jitter, the earliest that a message of the run may have.
        delivery_count: Deliveries so far.
        start_marker_offset: Marker offset of the last START.
        given_back: Whether a release or deferral ended the delivery; bool.
        text: Number of the run's text in `InFlight.texts`; 0 for none.
        jitter_ms: The most that jitter adds to the deadline of a message; float64.
    """

    key: NDArray[np.int64] = field(default_factory=_no_rows)
    count: NDArray[np.int64] = field(default_factory=_no_rows)
    deadline_at_ms: NDArray[np.int64] = field(default_factory=_no_rows)
    delivery_count: NDArray[np.int64] = field(default_factory=_no_rows)
    start_marker_offset: NDArray[np.int64] = field(default_factory=_no_rows)
    given_back: NDArray[np.bool_] = field(default_factory=_no_flags)
    text: NDArray[np.int64] = field(default_factory=_no_rows)
    jitter_ms: NDArray[np.float64] = field(default_factory=_no_delays)

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.key)

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return the columns in field order."""
        return tuple(getattr(self, name) for name in _NAMES)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Columns:
        """Return the rows with these row numbers, or the rows that a mask selects."""
        return Columns(*(column[rows] for column in self.arrays()))

    def ends(self) -> NDArray[np.uint64]:
        """Return the key after each run; see `run_ends`."""
        return run_ends(self.key, self.count)

    def messages(self) -> Columns:
        """Return one row a message, with its own deadline."""
        rows, key = spread(self.key, self.count)
        each = _with_extent(self.take(rows), key, np.ones(len(key), dtype=np.int64))
        if not self.jitter_ms.any():
            return each
        deadline_at_ms = each.deadline_at_ms + added_by_jitter_ms(key, each.delivery_count, each.jitter_ms)
        return replace(each, deadline_at_ms=deadline_at_ms, jitter_ms=np.zeros(len(key)))

    def latest_deadline_at_ms(self) -> NDArray[np.int64]:
        """Return the latest deadline that a message of each run may have."""
        return self.deadline_at_ms + self.jitter_ms.astype(np.int64)

    def earliest_deadline_at_ms(self) -> int | None:
        """Return the earliest deadline, or a lower bound where more than `MOST_SPREAD` messages may have it."""
        if not len(self):
            return None
        earliest = int(self.latest_deadline_at_ms().min())
        may_be_earlier = self.take(self.deadline_at_ms < earliest)
        if may_be_earlier.count.sum() > MOST_SPREAD:
            return int(self.deadline_at_ms.min())
        return int(may_be_earlier.messages().deadline_at_ms.min(initial=earliest))

    def merged(self, other: Columns) -> Columns:
        """Return the rows of both; the two must have no message in common."""
        if not len(other):
            return self
        if not len(self):
            return other
        pairs = tuple(zip(self.arrays(), other.arrays(), strict=True))
        if other.key[0] > self.key[-1]:
            # The usual case: new messages have larger offsets than all others of their queue partition.
            return Columns(*(np.concatenate(pair) for pair in pairs))
        is_other = np.zeros(len(self) + len(other), dtype=np.bool_)
        is_other[np.searchsorted(self.key, other.key) + np.arange(len(other))] = True
        is_own = ~is_other
        merged: list[NDArray[Any]] = []
        for own, others in pairs:
            column = np.empty(len(is_other), dtype=own.dtype)
            column[is_own] = own
            column[is_other] = others
            merged.append(column)
        return Columns(*merged)

    def split_at(self, cuts: NDArray[np.uint64]) -> Columns:
        """Split each run at the cuts within it."""
        if not len(self) or not len(cuts):
            return self
        row = np.searchsorted(self.key.astype(np.uint64), cuts, side="right") - 1
        ends = self.ends()
        is_within = (row >= 0) & (cuts < ends[row]) & (cuts > self.key.astype(np.uint64)[row])
        if not is_within.any():
            return self
        cuts, row = cuts[is_within].astype(np.int64), row[is_within]
        source = np.insert(np.arange(len(self)), row + 1, row)
        key = np.insert(self.key, row + 1, cuts)
        count = (ends[source] - key.astype(np.uint64)).astype(np.int64)
        goes_on = np.flatnonzero(source[1:] == source[:-1])
        count[goes_on] = key[goes_on + 1] - key[goes_on]
        return _with_extent(self.take(source), key, count)

    def coalesced(self) -> Columns:
        """Return the rows with adjacent runs of equal values made one."""
        if not len(self):
            return self
        row = np.flatnonzero(self.key[1:] - self.key[:-1] == self.count[:-1])
        # The last offset of a queue partition is adjacent to the first one of the next only as a key.
        row = row[self.key[row + 1] & MAX_MESSAGE_OFFSET != 0]
        for column in self.arrays()[2:]:
            row = row[column[row + 1] == column[row]]
        if not len(row):
            return self
        is_first = np.ones(len(self), dtype=np.bool_)
        is_first[row + 1] = False
        first = np.flatnonzero(is_first)
        return _with_extent(self.take(first), self.key[first], np.add.reduceat(self.count, first))

    def rows_within(self, first: NDArray[np.uint64], end: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Find the runs that have a message in one of some areas."""
        if not len(self):
            return np.empty(0, dtype=np.int64)
        begin = np.searchsorted(self.ends(), first, side="right")
        stop = np.searchsorted(self.key.astype(np.uint64), end, side="left")
        begin[1:] = np.maximum(begin[1:], stop[:-1])  # a run that reaches into two areas
        _, rows = spread(begin, np.maximum(stop - begin, 0))
        return rows


_NAMES = tuple(column.name for column in fields(Columns))


def _with_extent(columns: Columns, key: NDArray[np.int64], count: NDArray[np.int64]) -> Columns:
    return replace(columns, key=key, count=count)


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """
    The messages in flight (started and not ended) of one markers partition.

    Attributes:
        columns: One row a run.
        texts: Reasons of rejected messages and exception texts of failed deliveries, each once; the first is empty.
    """

    columns: Columns = field(default_factory=Columns)
    texts: tuple[str, ...] = ("",)

    @property
    def message_count(self) -> int:
        """Number of messages, including rejected ones."""
        return int(self.columns.count.sum())

    @property
    def run_count(self) -> int:
        """Number of rows."""
        return len(self.columns)

    def rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find runs by their first message."""
        own = self.columns.key
        if not len(own) or not len(keys) or keys[0] > own[-1]:
            return np.full(len(keys), -1, dtype=np.int64)
        rows = np.searchsorted(own, keys)
        found = own[np.minimum(rows, len(own) - 1)] == keys
        return np.where(found, rows, -1)

    def split_at(self, cuts: NDArray[np.uint64]) -> InFlight:
        """Return the table with each run split at the cuts within it; see `Columns.split_at`."""
        columns = self.columns.split_at(cuts)
        return self if columns is self.columns else InFlight(columns, self.texts)

    def coalesced(self) -> InFlight:
        """Return the table with adjacent runs of equal values made one."""
        columns = self.columns.coalesced()
        return self if columns is self.columns else InFlight(columns, self.texts)

    def reasons(self) -> dict[int, str]:
        """Return the text of each message that has one, by key."""
        with_text = self.columns.take(self.columns.text > 0).messages()
        return {
            key: self.texts[text] for key, text in zip(with_text.key.tolist(), with_text.text.tolist(), strict=True)
        }

    def smallest_start_marker_offset(self) -> int | None:
        """Return the offset of the oldest marker that a rebuild of this table needs; None if the table is empty."""
        return int(self.columns.start_marker_offset.min()) if len(self.columns) else None


def with_texts(texts: tuple[str, ...], added: Iterable[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Add texts to a table's texts."""
    number_of = {text: number for number, text in enumerate(texts)}
    numbers = [number_of.setdefault(text, len(number_of)) for text in added]
    return tuple(number_of), np.array(numbers, dtype=np.int64)
