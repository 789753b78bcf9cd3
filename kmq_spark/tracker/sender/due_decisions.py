"""
The decisions of one batch, in the order in which their payloads are read.

Rule 1: Decisions stay in columns until their payloads are read: a million decisions must not be a million objects at
the same time.
Rule 2: If a batch contains two decisions on one message, its payload is read once, and both are carried out. The log
contains the END of the first decision between them, so the second is about a new lease (`core/unconfirmed.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kmq_spark.core.in_flight import REJECTED
from kmq_spark.core.markers import Outcome
from kmq_spark.core.policy import DecisionAction

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kmq_spark.core.outcome import PartitionOutcome

_OUTCOMES = {
    DecisionAction.REDELIVER.value: Outcome.REDELIVERED,
    DecisionAction.DEAD_LETTER.value: Outcome.DEAD_LETTERED,
}

_COLUMNS = ("queue_partition", "message_offset", "delivery_count", "deadline_at_ms", "tick_at_ms", "is_silent")


class DueDecision(NamedTuple):
    """
    One decision, ready to be carried out.

    Attributes:
        marker_partition: Markers partition of the message's START; the END is written to the same one.
        queue_partition: Queue partition of the message.
        message_offset: Offset of the message in that partition.
        delivery_count: Deliveries so far.
        outcome: REDELIVERED, DEAD_LETTERED or EXPIRED. For EXPIRED only the END is sent.
        reason: For a dead letter, its reason. For a redelivery, the error of the delivery that failed; empty for none.
        deadline_at_ms: Deadline of the lease, epoch milliseconds, broker clock at the deciding TICK; `REJECTED` for a
            rejected message.
        tick_at_ms: Append time of the deciding TICK, epoch milliseconds, broker clock.
        is_silent: Whether the delivery ended silently: its lease ran out without a release, rejection or deferral.
    """

    marker_partition: int
    queue_partition: int
    message_offset: int
    delivery_count: int
    outcome: Outcome
    reason: str
    deadline_at_ms: int
    tick_at_ms: int = 0
    is_silent: bool = False

    @property
    def is_dead_letter(self) -> bool:
        """Whether a dead letter is to be written."""
        return self.outcome is Outcome.DEAD_LETTERED

    @property
    def is_exhausted(self) -> bool:
        """Whether the fold dead-lettered the message because it reached the delivery limit, not because of a reject."""
        return self.is_dead_letter and self.deadline_at_ms != REJECTED


class DueDecisions:
    """
    The decisions of a batch, sorted by queue partition and message offset.

    Args:
        outcomes: One per markers partition.
    """

    def __init__(self, outcomes: Sequence[PartitionOutcome]) -> None:
        """Sort the columns. `on_messages` creates the objects."""
        decided = [outcome for outcome in outcomes if len(outcome.decisions)]
        columns = {
            name: np.concatenate([getattr(each.decisions, name) for each in decided] or [np.empty(0, np.int64)])
            for name in (*_COLUMNS, "action")
        }
        marker_partition = np.repeat(
            np.array([each.marker_partition for each in decided], np.int64), [len(each.decisions) for each in decided]
        )
        reasons = [reason for each in decided for reason in each.decisions.reasons]
        message_count = np.concatenate([each.decisions.message_count for each in decided] or [np.empty(0, np.int32)])
        run = np.repeat(np.arange(len(reasons)), message_count)
        first_of_run = np.cumsum(message_count, dtype=np.int64) - message_count
        columns = {name: column[run] for name, column in columns.items()}
        columns["message_offset"] += np.arange(len(run)) - first_of_run[run]
        marker_partition, reasons = marker_partition[run], [reasons[each] for each in run.tolist()]
        order = np.lexsort((columns["message_offset"], columns["queue_partition"]))
        self._columns = {name: column[order] for name, column in columns.items()}
        self._marker_partition = marker_partition[order]
        self._reasons = [reasons[row] for row in order.tolist()] if any(reasons) else [""] * len(reasons)
        queue_partition, message_offset = self._columns["queue_partition"], self._columns["message_offset"]
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = (np.diff(queue_partition) != 0) | (np.diff(message_offset) != 0)
        # The row of the first decision on each message; then the number of rows.
        self._rows = np.append(np.flatnonzero(is_first), len(order))
        partitions, first = np.unique(queue_partition[self._rows[:-1]], return_index=True)
        self._first_message = dict(zip(partitions.tolist(), first.tolist(), strict=True))

    def __len__(self) -> int:
        """Return the number of decisions."""
        return len(self._reasons)

    def message_offsets(self) -> dict[int, list[int]]:
        """Return the message offsets by queue partition, ascending, without duplicates."""
        offsets = self._columns["message_offset"][self._rows[:-1]]
        ends = [*self._first_message.values(), len(offsets)][1:]
        return {
            partition: offsets[first:end].tolist()
            for (partition, first), end in zip(self._first_message.items(), ends, strict=True)
        }

    def on_messages(self, queue_partition: int, first: int, count: int) -> Iterator[tuple[int, DueDecision]]:
        """
        Yield the decisions on consecutive messages of `message_offsets`.

        Args:
            queue_partition: Queue partition of the messages.
            first: Index of the first message in `message_offsets()[queue_partition]`.
            count: Number of messages.

        Yields:
            Index of the message among these *count*, from 0 on, and a decision on it.
        """
        begin = self._first_message[queue_partition] + first
        rows = self._rows[begin : begin + count + 1]
        which = np.repeat(np.arange(count), np.diff(rows)).tolist()
        part = slice(int(rows[0]), int(rows[-1]))
        partitions, offsets, counts, *rest = (self._columns[name][part].tolist() for name in _COLUMNS)
        outcomes = map(_OUTCOMES.__getitem__, self._columns["action"][part].tolist())
        markers, reasons = self._marker_partition[part].tolist(), self._reasons[part]
        decisions = map(
            DueDecision._make, zip(markers, partitions, offsets, counts, outcomes, reasons, *rest, strict=True)
        )
        return zip(which, decisions, strict=True)
