"""
One attempt at a transaction of redeliveries: the records that it sends, and their delivery reports.

Rule 1: The result of an aborted attempt is discarded. Only the broker's rejections are kept, in `RejectedRecords`, for
the next attempt.
Rule 2: What the messages of a run have in common is made once a run, their callback included. When very many leases end
at once, most of the time is spent here, one step a message.
Rule 3: The first attempt has one delivery report for a block of small messages. Any failure aborts the transaction, and
in the next attempt each message has a report of its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from confluent_kafka import KafkaError, Message

from kmq_spark.core.markers import Outcome
from kmq_spark.failpoints import failpoint
from kmq_spark.tracker.sender.due_decisions import size_of
from kmq_spark.tracker.sender.records import Ends, common_headers, final_decision, outgoing_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kmq_spark.core.policy import QueueRules
    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.kafka.records import RejectedRecords
    from kmq_spark.kafka.transaction import OnDelivery, Record
    from kmq_spark.tracker.sender.due_decisions import DueRun
    from kmq_spark.wire.headers import CommonHeaders

BLOCK = 100
"""
Messages that have one delivery report, which is that of the last. A report costs more than half as much as the message.
A partition gets its messages in order, so the others of the block were appended no later.
"""

SMALL_BYTES = 10_000
"""
A block with a larger value has a report for each message, because the broker may reject it as too large. Smaller ones
are rejected only where `max.message.bytes` is that small. Then librdkafka sends nothing more until the delivery
time-out, 10 s, and only the next attempt finds the message.
"""


class Attempt:
    """
    An attempt to carry out these decisions.

    Attributes:
        ends: The ENDs of the final decisions, complete after `records`.
        nonexistent: Decisions dropped because the queue topic has no message at their offset.
        lateness_ms: Lateness of each redelivered message that the broker has acknowledged, milliseconds: append time
            minus deadline. In a block that of its last message.
    """

    def __init__(
        self,
        runs: Sequence[DueRun],
        rejected_records: RejectedRecords,
        topics: QueueTopics,
        rules: QueueRules,
        dead_letter_partitions: int,
        *,
        is_first: bool = True,
    ) -> None:
        self._runs = runs
        self._rejected_records = rejected_records
        self._topics = topics
        self._rules = rules
        self._dead_letter_partitions = dead_letter_partitions
        self._is_first = is_first
        self._rejection_counts: dict[int, int] = {}
        self._headers: dict[tuple[int, int, Outcome, str, bool], CommonHeaders | None] = {}
        self.ends = Ends()
        self.redelivered = 0
        self.expired = 0
        self.nonexistent = 0
        self.dead_lettered = 0
        self.lateness_ms: list[int] = []

    def records(self) -> Iterator[tuple[Record, OnDelivery | None]]:
        """
        Yield the records to send, lazily, each with the callback for its delivery report, or None for no report.

        There is no record for a message whose TTL has expired, or for an offset that the queue topic does not have.
        """
        index = 0
        for run in self._runs:
            yield from self._records_of(run, index)
            index += len(run.messages)

    def _records_of(self, run: DueRun, index: int) -> Iterator[tuple[Record, OnDelivery | None]]:
        """Yield the records of a run; *index* is that of its first message in the transaction."""
        # After a failure each message has a callback of its own, which finds the rejected one.
        headers = self._common_headers(run) if self._is_first else None
        for begin in range(0, len(run.messages), BLOCK):
            block = run.part(begin, min(begin + BLOCK, len(run.messages)))
            copies = self._copies_of(block, headers) if headers is not None else None
            if copies is not None:
                yield from self._block(block, copies)
                continue
            for place in range(len(block.messages)):
                yield from self._records_of_one(block.part(place, place + 1), index + begin + place)

    def _copies_of(self, block: DueRun, common: CommonHeaders) -> list[Record] | None:
        """Return the copies of a block; None if a message is gone, or has a header that may change its decision."""
        # The same queue partition as before: the partition count may have changed, and the key may map elsewhere now.
        topic, partition = self._topics.queue_topic, block.queue_partition
        copies: list[Record] = []
        for offset, message in enumerate(block.messages, block.message_offset):
            if message is None:
                return None
            headers = common.of_copy(message.headers(), offset, message.timestamp()[1])  # type: ignore[arg-type]  # as in `headers_of`
            if headers is None:
                return None
            copies.append((topic, partition, message.key(), message.value(), headers))
        return copies

    def _block(self, block: DueRun, copies: list[Record]) -> Iterator[tuple[Record, OnDelivery | None]]:
        """Yield the copies of a block with their callbacks."""
        is_small = max(map(len, cast("Sequence[Message]", block.messages))) <= SMALL_BYTES
        each = None if is_small else partial(self._on_copies, block.deadline_at_ms, 1)
        for copy in copies[:-1]:
            yield copy, each
            failpoint("tracker.message-sent")
        yield copies[-1], each or partial(self._on_copies, block.deadline_at_ms, len(copies))
        failpoint("tracker.message-sent")
        self._note_redelivered(block)

    def _common_headers(self, run: DueRun) -> CommonHeaders | None:
        """Return what `common_headers` returns; runs often differ only in offset and deadline."""
        facts = run.queue_partition, run.delivery_count, run.outcome, run.reason, run.is_silent
        if facts not in self._headers:
            self._headers[facts] = common_headers(run, self._topics, self._rules)
        return self._headers[facts]

    def _note_redelivered(self, run: DueRun) -> None:
        self.redelivered += len(run.messages)
        self.ends.add(run)

    def _records_of_one(self, run: DueRun, index: int) -> Iterator[tuple[Record, OnDelivery]]:
        """Yield the record of a message whose headers, or whose absence, may change the decision."""
        rejection_count = 0
        if self._rejected_records.total_count and (
            rejection_count := self._rejected_records.rejection_count(index, size_of(run.messages[0]))
        ):
            self._rejection_counts[index] = rejection_count
        final = final_decision(run, rejection_count, self._topics, self._rules)
        if final.outcome is Outcome.REDELIVERED:
            self._note_redelivered(final)
        else:
            self.ends.add(final)
        if final.outcome is Outcome.EXPIRED:
            if final.messages[0] is None:
                self.nonexistent += 1
            else:
                self.expired += 1
            return
        self.dead_lettered += final.is_dead_letter
        record = outgoing_record(final, self._topics, self._dead_letter_partitions, self._rules.max_deliveries)
        yield record, partial(self._on_one, run, index, is_copy=not final.is_dead_letter)
        failpoint("tracker.dead-letter-sent" if final.is_dead_letter else "tracker.message-sent")

    def _on_copies(self, deadline_at_ms: int, count: int, error: KafkaError | None, last: Message) -> None:
        """Handle the delivery report of the last of *count* copies; a report does not say of which message."""
        if error is None:
            self.lateness_ms += [last.timestamp()[1] - deadline_at_ms] * count
        elif error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            self._rejected_records.note_unknown()

    def _on_one(self, run: DueRun, index: int, error: KafkaError | None, record: Message, *, is_copy: bool) -> None:
        """Handle the delivery report of the record of one message."""
        if error is None:
            if is_copy:
                self.lateness_ms.append(record.timestamp()[1] - run.deadline_at_ms)
        elif error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            self._rejected_records.note(index, size_of(run.messages[0]), self._rejection_counts.get(index, 0))
