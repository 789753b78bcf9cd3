"""
One attempt at one transaction of redeliveries: what is sent, and what the broker says of it.

Rule 1: an attempt that is aborted is thrown away whole; what it has learnt is in the refusals, which outlive it.
Rule 2: one step a message and no object more than it needs: this is where a mass expiry spends its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import KafkaError

from kmq_spark.core.markers import Outcome
from kmq_spark.failpoints import failpoint
from kmq_spark.tracker.sender.records import outgoing_record, settle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from confluent_kafka import Message

    from kmq_spark.core.policy import Rules
    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.kafka.records import OutgoingRecord
    from kmq_spark.kafka.rejected_records import Refusals
    from kmq_spark.tracker.sender.due_decisions import Due
    from kmq_spark.tracker.sender.records import Item


class Attempt:
    """
    An attempt at sending these items.

    Args:
        items: Decisions with their payloads.
        refusals: What the broker has refused in earlier attempts; added to.
        topics: Of the queue.
        rules: Of the queue.
        dead_letter_partitions: Partitions of the dead-letter topic.

    Attributes:
        dues: What was done after all, by item; each of them gets an END.
        expired: Messages that were dropped, since their time to live was over.
        nonexistent: Decisions that were dropped, since the queue topic does not have their offset.
        dead_lettered: Dead letters that the broker has.
        lateness_ms: Of each redelivered message that the broker has: its append time less the deadline.
    """

    def __init__(
        self,
        items: Sequence[Item],
        refusals: Refusals,
        topics: QueueTopics,
        rules: Rules,
        dead_letter_partitions: int,
    ) -> None:
        """Begin with nothing sent."""
        self._items = items
        self._refusals = refusals
        self._topics = topics
        self._rules = rules
        self._dead_letter_partitions = dead_letter_partitions
        self._refused: dict[int, int] = {}
        self.dues: list[Due] = []
        self.expired = 0
        self.nonexistent = 0
        self.dead_lettered = 0
        self.lateness_ms: list[int] = []

    def records(self) -> Iterator[OutgoingRecord | None]:
        """Yield a record for each item, None for one whose time to live is over; the next when the last was taken."""
        topics, rules, is_any_refused = self._topics, self._rules, self._refusals.count > 0
        for index, item in enumerate(self._items):
            refused = 0
            if is_any_refused and (refused := self._refusals.of(index, item.size)):
                self._refused[index] = refused
            settled = settle(item, refused, topics, rules)
            outcome = settled.due.outcome
            self.dues.append(settled.due)
            if outcome is Outcome.EXPIRED:
                if settled.message is None:
                    self.nonexistent += 1
                else:
                    self.expired += 1
                yield None
                continue
            yield outgoing_record(settled, topics, self._dead_letter_partitions, rules.max_deliveries)
            failpoint("tracker.message-sent" if outcome is Outcome.REDELIVERED else "tracker.dead-letter-sent")

    def on_delivery(self, index: int, error: KafkaError | None, record: Message) -> None:
        """Take in what became of the record of an item."""
        if error is not None:
            if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                self._refusals.note(index, self._items[index].size, self._refused.get(index, 0))
            return
        due = self.dues[index]
        if due.outcome is Outcome.REDELIVERED:
            self.lateness_ms.append(record.timestamp()[1] - due.deadline_at_ms)
        else:
            self.dead_lettered += 1
