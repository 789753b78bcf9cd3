"""
The decisions of one batch, in the order in which their payloads are read.

Rule 1: Decisions stay in runs until their payloads are read: a million decisions must not be a million objects.
Rule 2: If a batch contains two decisions on one message, its payload is read once, and both are carried out, in their
order. The log contains the END of the first decision between them, so the second is about a new lease
(`core/marks.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from confluent_kafka import Message

from kmq_spark.core.in_flight import REJECTED, spread
from kmq_spark.core.markers import Outcome
from kmq_spark.core.policy import DecisionAction
from kmq_spark.kafka.records import sizes_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.kafka.payloads import PayloadSlice
    from kmq_spark.tracker.sender.limits import SenderLimits

_HEADERS = Message.headers

_OUTCOMES = {
    DecisionAction.REDELIVER.value: Outcome.REDELIVERED,
    DecisionAction.DEAD_LETTER.value: Outcome.DEAD_LETTERED,
}

_COLUMNS = (
    "queue_partition", "message_offset", "message_count", "delivery_count", "action", "deadline_at_ms", "tick_at_ms",
    "is_silent",
)  # fmt: skip


class DueRun(NamedTuple):
    """
    Decisions on messages with consecutive offsets, with the payloads: what one transaction carries out.

    Attributes:
        marker_partition: Markers partition of the messages' START; the END is written to the same one.
        outcome: REDELIVERED, DEAD_LETTERED or EXPIRED. For EXPIRED only the END is sent.
        reason: For dead letters, their reason. For redeliveries, the error of the delivery that failed; empty for none.
        deadline_at_ms: Deadline of the lease, epoch milliseconds, broker clock at the deciding TICK; `REJECTED` for
            rejected messages.
        is_silent: Whether the delivery ended silently: its lease ran out without a release, rejection or deferral.
        messages: The messages, in order of their offsets; None for one that the queue topic does not have.
    """

    marker_partition: int
    queue_partition: int
    message_offset: int
    delivery_count: int
    outcome: Outcome
    reason: str
    deadline_at_ms: int
    tick_at_ms: int
    is_silent: bool
    messages: Sequence[Message | None]

    def part(self, first: int, end: int) -> DueRun:
        """Return the run of `messages[first:end]`."""
        if first == 0 and end == len(self.messages):
            return self
        return self._replace(message_offset=self.message_offset + first, messages=self.messages[first:end])

    @property
    def is_dead_letter(self) -> bool:
        """Whether dead letters are to be written."""
        return self.outcome is Outcome.DEAD_LETTERED

    @property
    def is_exhausted(self) -> bool:
        """Whether the fold dead-lettered the messages at the delivery limit, not because of a reject."""
        return self.is_dead_letter and self.deadline_at_ms != REJECTED


class _Partition(NamedTuple):
    """
    The runs of one queue partition, by first offset.

    Attributes:
        rows: Row of each run among all decisions; it is smaller for the earlier of two decisions on one message.
        first: Offset of the first message of each run.
        end: Offset after the last message of each run.
        largest_end: Largest `end` of this run and those before it: runs may overlap.
        wanted: Offsets of all messages, ascending, without repeats.
    """

    rows: NDArray[np.int64]
    first: NDArray[np.int64]
    end: NDArray[np.int64]
    largest_end: NDArray[np.int64]
    wanted: NDArray[np.int64]


class DueDecisions:
    """The decisions of a batch, by queue partition and message offset."""

    def __init__(self, outcomes: Sequence[PartitionOutcome]) -> None:
        decided = [outcome for outcome in outcomes if len(outcome.decisions)]
        self._columns = {
            name: np.concatenate([getattr(each.decisions, name) for each in decided] or [np.empty(0, np.int64)])
            for name in _COLUMNS
        }
        self._marker_partition = np.repeat(
            np.array([each.marker_partition for each in decided], np.int64), [len(each.decisions) for each in decided]
        )
        self._reasons = [reason for each in decided for reason in each.decisions.reasons]
        queue_partition = self._columns["queue_partition"]
        order = np.argsort(queue_partition, kind="stable")
        numbers, begins = np.unique(queue_partition[order], return_index=True)
        rows = np.split(order, begins[1:])
        self._partitions = {number: self._partition(own) for number, own in zip(numbers.tolist(), rows, strict=False)}

    def __len__(self) -> int:
        """Return the number of decisions: of messages, and one that was decided twice counts twice."""
        return int(self._columns["message_count"].sum(dtype=np.int64))

    def _partition(self, rows: NDArray[np.int64]) -> _Partition:
        rows = rows[np.argsort(self._columns["message_offset"][rows], kind="stable")]
        first, count = self._columns["message_offset"][rows], self._columns["message_count"][rows]
        end = first + count
        largest_end = np.maximum.accumulate(end)
        _, wanted = spread(first, count)
        if (first[1:] < largest_end[:-1]).any():
            wanted = np.unique(wanted)
        return _Partition(rows, first, end, largest_end, wanted)

    def message_offsets(self) -> dict[int, list[int]]:
        """Return the message offsets by queue partition, ascending, without repeats."""
        return {number: partition.wanted.tolist() for number, partition in self._partitions.items()}

    def with_payloads(self, payloads: PayloadSlice) -> Iterator[DueRun]:
        """Yield the decisions on consecutive messages of `message_offsets`, each run cut to these messages."""
        mine = self._partitions[payloads.partition]
        offsets = mine.wanted[payloads.first : payloads.first + len(payloads.messages)]
        near = slice(
            int(np.searchsorted(mine.largest_end, offsets[0], "right")),
            int(np.searchsorted(mine.first, offsets[-1], "right")),
        )
        rows, first, end = mine.rows[near], mine.first[near], mine.end[near]
        # All messages of a run are wanted, so those that are here are neighbours among the wanted ones.
        begins, ends = np.searchsorted(offsets, np.maximum(first, offsets[0])), np.searchsorted(offsets, end)
        found = np.flatnonzero(begins < ends)
        found = found[np.argsort(rows[found])]
        rows, begins, ends = rows[found], begins[found], ends[found]
        columns = [self._columns[name][rows].tolist() for name in _COLUMNS[3:]]
        markers, firsts = self._marker_partition[rows].tolist(), offsets[begins].tolist()
        facts = zip(rows.tolist(), markers, firsts, begins.tolist(), ends.tolist(), *columns, strict=True)
        for row, marker_partition, offset, begin, until, count, action, deadline_at_ms, tick_at_ms, is_silent in facts:
            yield DueRun(
                marker_partition, payloads.partition, offset, count,
                Outcome.EXPIRED if payloads.is_past_end else _OUTCOMES[action], self._reasons[row],
                deadline_at_ms, tick_at_ms, is_silent, payloads.messages[begin:until],
            )  # fmt: skip


def in_chunks(runs: Iterable[DueRun], limits: SenderLimits) -> Generator[list[DueRun]]:
    """Yield the runs in chunks of one transaction each, and cut a run where its chunk is full."""
    chunk: list[DueRun] = []
    left_count, left_bytes = limits.max_transaction_messages, limits.max_transaction_bytes
    for whole in runs:
        run: DueRun | None = whole
        while run is not None:
            sizes = list(accumulate(_sizes_of(run.messages[:left_count])))
            # The message that reaches the limit is the last one of its chunk.
            taken = min(bisect_left(sizes, left_bytes) + 1, len(sizes))
            chunk.append(run.part(0, taken))
            run = run.part(taken, len(run.messages)) if taken < len(run.messages) else None
            left_count, left_bytes = left_count - taken, left_bytes - sizes[taken - 1]
            if left_count <= 0 or left_bytes <= 0:
                yield chunk
                chunk, left_count, left_bytes = [], limits.max_transaction_messages, limits.max_transaction_bytes
    if chunk:
        yield chunk


def size_of(message: Message | None) -> int:
    """Return the bytes of key, value and headers of a message; 0 for None."""
    return 0 if message is None else sizes_of([message], [message.headers()])[0]


def _sizes_of(messages: Sequence[Message | None]) -> list[int]:
    found = [message for message in messages if message is not None]
    if len(found) < len(messages):
        return list(map(size_of, messages))
    return sizes_of(found, list(map(_HEADERS, found)))
