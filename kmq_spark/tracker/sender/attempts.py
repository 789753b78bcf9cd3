"""
One attempt at a transaction of redeliveries: the records that it sends, and their delivery reports.

Rule 1: The result of an aborted attempt is discarded. Only the broker's rejections are kept, in `RejectedRecords`, for
the next attempt.
Rule 2: One step per message, and no objects that are not needed: when very many leases end at once, most of the time is
spent here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import KafkaError

from kmq_spark.core.markers import Outcome
from kmq_spark.failpoints import failpoint
from kmq_spark.tracker.sender.records import final_decision, outgoing_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from confluent_kafka import Message

    from kmq_spark.core.policy import Rules
    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.kafka.records import OutgoingRecord
    from kmq_spark.kafka.rejected_records import RejectedRecords
    from kmq_spark.tracker.sender.due_decisions import DueDecision
    from kmq_spark.tracker.sender.records import DecidedMessage


class Attempt:
    """
    An attempt to send these messages.

    Args:
        messages: Decisions with their payloads.
        rejected_records: Records that the broker rejected in earlier attempts; this attempt adds to them.
        topics: Topics of the queue.
        rules: Rules of the queue.
        dead_letter_partitions: Partitions of the dead-letter topic.

    Attributes:
        decisions: The final decision on each message; each of them gets an END.
        expired: Messages dropped because their TTL had expired.
        nonexistent: Decisions dropped because the queue topic has no message at their offset.
        dead_lettered: Dead letters that the broker has acknowledged.
        lateness_ms: Lateness of each redelivered message that the broker has acknowledged, milliseconds: append time
            minus deadline.
    """

    def __init__(
        self,
        messages: Sequence[DecidedMessage],
        rejected_records: RejectedRecords,
        topics: QueueTopics,
        rules: Rules,
        dead_letter_partitions: int,
    ) -> None:
        """Store the arguments; `records` yields what to send."""
        self._messages = messages
        self._rejected_records = rejected_records
        self._topics = topics
        self._rules = rules
        self._dead_letter_partitions = dead_letter_partitions
        self._rejection_counts: dict[int, int] = {}
        self.decisions: list[DueDecision] = []
        self.expired = 0
        self.nonexistent = 0
        self.dead_lettered = 0
        self.lateness_ms: list[int] = []

    def records(self) -> Iterator[OutgoingRecord | None]:
        """
        Yield one record per message, lazily; None for a message that is dropped.

        Dropped are messages whose TTL has expired, and offsets that the queue topic does not have.
        """
        topics, rules, is_any_rejected = self._topics, self._rules, self._rejected_records.total_count > 0
        for index, decided in enumerate(self._messages):
            rejection_count = 0
            if is_any_rejected and (rejection_count := self._rejected_records.rejection_count(index, decided.size)):
                self._rejection_counts[index] = rejection_count
            final = final_decision(decided, rejection_count, topics, rules)
            outcome = final.decision.outcome
            self.decisions.append(final.decision)
            if outcome is Outcome.EXPIRED:
                if final.message is None:
                    self.nonexistent += 1
                else:
                    self.expired += 1
                yield None
                continue
            yield outgoing_record(final, topics, self._dead_letter_partitions, rules.max_deliveries)
            failpoint("tracker.message-sent" if outcome is Outcome.REDELIVERED else "tracker.dead-letter-sent")

    def on_delivery(self, index: int, error: KafkaError | None, record: Message) -> None:
        """Handle the delivery report of a message's record."""
        if error is not None:
            if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                self._rejected_records.note(index, self._messages[index].size, self._rejection_counts.get(index, 0))
            return
        decision = self.decisions[index]
        if decision.outcome is Outcome.REDELIVERED:
            self.lateness_ms.append(record.timestamp()[1] - decision.deadline_at_ms)
        else:
            self.dead_lettered += 1
