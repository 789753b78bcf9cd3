"""
The packed table of messages in flight: numpy columns sorted by message key.

Rule 1: a table is immutable. Every change returns a new table; unchanged columns are shared.
Rule 2: each message has one int64 key, `queue_partition << 48 | message_offset`. Sorting, searching and merging use
this column alone.
Rule 3: a rejected message stays in the table with the deadline `REJECTED`, so it is due whatever its lease. Its reason
is kept in a separate dict.

Source: kafka-mq-go keeps a map and two heaps (`queue/redelivery/markersqueue.go`). Here a batch is merged at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kmq_spark.core.markers import OffsetRange

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY_BITS = 48
"""Number of bits of the message offset in a key; see `MAX_MESSAGE_OFFSET`."""

REJECTED = -1
"""Deadline of a rejected message. It is below every clock value, so the next TICK decides the message."""


def message_keys(queue_partition: int, message_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the table keys of messages of one queue partition."""
    return message_offsets + (queue_partition << KEY_BITS)


def ranges_of(message_offsets: NDArray[np.int64]) -> tuple[OffsetRange, ...]:
    """
    Return the ranges that cover exactly these offsets.

    Args:
        message_offsets: Message offsets, strictly ascending.

    Returns:
        Ascending ranges, as few as possible; empty if there are no offsets.
    """
    if not len(message_offsets):
        return ()
    starts = np.flatnonzero(np.diff(message_offsets, prepend=message_offsets[0] - 2) != 1)
    counts = np.diff(starts, append=len(message_offsets))
    return tuple(map(OffsetRange, message_offsets[starts].tolist(), counts.tolist()))


def _no_rows() -> NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


def _no_flags() -> NDArray[np.bool_]:
    return np.empty(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """
    Messages as columns of equal length, sorted by key, with unique keys.

    Attributes:
        key: Message key, see `message_keys`.
        deadline_at_ms: End of the lease, epoch milliseconds on the partition's clock; `REJECTED` for a rejected
            message.
        delivery_count: Number of deliveries so far; 0 if the only delivery was released before a handler saw it.
        start_marker_offset: Marker offset of the last START.
        given_back: Whether a release or deferral ended the delivery; bool.
    """

    key: NDArray[np.int64] = field(default_factory=_no_rows)
    deadline_at_ms: NDArray[np.int64] = field(default_factory=_no_rows)
    delivery_count: NDArray[np.int64] = field(default_factory=_no_rows)
    start_marker_offset: NDArray[np.int64] = field(default_factory=_no_rows)
    given_back: NDArray[np.bool_] = field(default_factory=_no_flags)

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self.key)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Columns:
        """Return the rows with these row numbers, or the rows that a mask selects."""
        return Columns(
            self.key[rows],
            self.deadline_at_ms[rows],
            self.delivery_count[rows],
            self.start_marker_offset[rows],
            self.given_back[rows],
        )

    def merged(self, other: Columns) -> Columns:
        """Return the rows of both; the two must have no key in common."""
        if not len(other):
            return self
        if not len(self):
            return other
        pairs: tuple[tuple[NDArray[Any], NDArray[Any]], ...] = (
            (self.key, other.key),
            (self.deadline_at_ms, other.deadline_at_ms),
            (self.delivery_count, other.delivery_count),
            (self.start_marker_offset, other.start_marker_offset),
            (self.given_back, other.given_back),
        )
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


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """
    The messages in flight (started and not ended) of one markers partition.

    Attributes:
        columns: One row a message.
        reasons: By key: the reason of a rejected message, or the exception text of a failed delivery.
    """

    columns: Columns = field(default_factory=Columns)
    reasons: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of messages, including rejected ones."""
        return len(self.columns)

    def rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """
        Find messages.

        Args:
            keys: Message keys, ascending.

        Returns:
            Row number of each key; -1 if the key is not in the table.
        """
        own = self.columns.key
        if not len(own) or not len(keys) or keys[0] > own[-1]:
            return np.full(len(keys), -1, dtype=np.int64)
        rows = np.searchsorted(own, keys)
        found = own[np.minimum(rows, len(own) - 1)] == keys
        return np.where(found, rows, -1)

    def without(self, rows: NDArray[np.int64]) -> InFlight:
        """Return the table without these rows."""
        if not len(rows):
            return self
        is_kept = np.ones(len(self), dtype=np.bool_)
        is_kept[rows] = False
        return self.take(is_kept)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> InFlight:
        """Return the rows with these ascending row numbers, or the rows that a mask selects."""
        columns, reasons = self.columns.take(rows), self.reasons
        if reasons:
            kept = set(columns.key.tolist())
            reasons = {key: reason for key, reason in reasons.items() if key in kept}
        return InFlight(columns, reasons)

    def merged(self, other: InFlight) -> InFlight:
        """Return the messages of both; the two must have no message in common."""
        return InFlight(self.columns.merged(other.columns), self.reasons | other.reasons)

    def smallest_deadline_at_ms(self) -> int | None:
        """Return the earliest deadline; `REJECTED` if a message is rejected, None if no message is in flight."""
        return int(self.columns.deadline_at_ms.min()) if len(self) else None

    def smallest_start_marker_offset(self) -> int | None:
        """Return the offset of the oldest marker that a rebuild of this table needs; None if the table is empty."""
        return int(self.columns.start_marker_offset.min()) if len(self) else None
