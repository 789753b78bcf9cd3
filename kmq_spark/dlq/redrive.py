"""
Redrive or purge dead letters exactly once: the messages and their ENDs are in one Kafka transaction.

Rule 1: a redriven message and its END commit together or not at all. So the redrive topic states which letters are
closed.
Rule 2: a `Redriver` fences every older redrive and purge of the queue, and writes an own record, up to which the ENDs
are read. So a run after a crash sends no message twice, and of two at once the older one fails with `FencedError`.
Rule 3: a letter that cannot be sent stays open, and the summary names it.

Source: KIP-98. The tracker does the same with redeliveries (`tracker/sender/redelivery.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError

from kmq_spark.core.markers import Marker, MarkerType, Outcome
from kmq_spark.core.ranges import cut_ranges
from kmq_spark.dlq.ends import own_record
from kmq_spark.errors import FencedError, KafkaClientError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.own_record import write_own
from kmq_spark.kafka.records import OutgoingRecord, RejectedRecords
from kmq_spark.kafka.settings import BULK_TRANSACTION_TIMEOUT_MS, new_client_id, transactional_producer_config
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.wire.codec import encode_marker
from kmq_spark.wire.headers import FIRST_SENT_MS, GENERATION, ORIGIN, PRODUCER, SEQUENCE, redrive_headers, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from confluent_kafka import Message

    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.kafka.topics import QueueLayout
    from kmq_spark.wire.dead_letter import DeadLetter

MAX_TRANSACTION_MESSAGES = 1_000
MAX_TRANSACTION_BYTES = 8 * 1024 * 1024

LARGEST_RECORD = 1_000_000_000
"""The broker limits the size of a record, not the client: this is librdkafka's upper bound of `message.max.bytes`."""

MAX_NAMED = 100
"""Most letters, and most reasons, that a summary names; the others are only counted."""

BY_KEY = -1
"""Partition number that lets the client's partitioner choose by the key."""

_OF_ANOTHER_QUEUE = frozenset({ORIGIN, FIRST_SENT_MS, PRODUCER, GENERATION, SEQUENCE})


@dataclass(slots=True)
class RedriveSummary:
    """
    The result of a redrive or a purge.

    Attributes:
        done: Letters redriven or purged.
        by_reason: Number of these letters by reason: the first 100 reasons, the others together under `…`.
        done_before: Letters selected by id that an earlier run redrove or purged.
        left: Letters that cannot be redriven and stay open.
        left_because: Why, by id, for the first 100 of them.
        missing: Selected ids that are not in the dead-letter topic.
    """

    done: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    done_before: int = 0
    left: int = 0
    left_because: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def count(self, letter: DeadLetter) -> None:
        """Count a letter as redriven or purged."""
        self.done += 1
        known = letter.reason in self.by_reason or len(self.by_reason) < MAX_NAMED
        reason = letter.reason if known else "…"
        self.by_reason[reason] = self.by_reason.get(reason, 0) + 1

    def leave(self, letter: DeadLetter, why: str) -> None:
        """Count a letter that stays open."""
        self.left += 1
        if len(self.left_because) < MAX_NAMED:
            self.left_because[letter.id] = why


class Redriver:
    """
    Redrives dead letters of one queue to *to*, or purges them (*to* is None). *topic_id* is that of their topic.

    Attributes:
        ends: Offset behind the own record in each partition of the redrive topic.

    Raises:
        FencedError: Another redrive or purge of the queue has started at the same time.
        KafkaClientError: The broker cannot be reached, or refuses the transactional id.
    """

    def __init__(
        self,
        layout: QueueLayout,
        *,
        to: QueueTopics | None,
        to_partition_count: int,
        topic_id: str,
        bootstrap_servers: str,
        timeout: float,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self._topics = layout.topics
        self._redrive_partition_count = layout.redrive_partition_count
        self._to = to
        self._to_partition_count = to_partition_count
        self._writer_id = new_client_id("redrive")
        config = transactional_producer_config(
            bootstrap_servers,
            self._topics.redrive_id,
            self._writer_id,
            extra,
            max_message_bytes=LARGEST_RECORD,
            transaction_timeout_ms=BULK_TRANSACTION_TIMEOUT_MS,
        )
        # Each transaction is flushed as a whole, so lingering only adds latency.
        config["linger.ms"] = 0
        # The broker compares a whole batch with the topic's `max.message.bytes`, and rejects the whole batch.
        config["batch.size"] = min(1_000_000, layout.max_message_bytes or 1_000_000)
        self._producer = TransactionalProducer(config, timeout, role="redrive")
        topic, partitions = self._topics.redrive_topic, range(layout.redrive_partition_count)
        self.ends = write_own(self._producer, [own_record(topic, each, topic_id) for each in partitions])

    def close(self) -> None:
        """Drop unsent records. An open transaction is never committed: the next producer, or the broker, aborts it."""
        self._producer.close()

    def run(self, letters: Iterable[DeadLetter], summary: RedriveSummary) -> None:
        """
        Redrive or purge open letters, which are read lazily, in as many transactions as they need.

        Raises:
            FencedError: Another redrive or purge of the queue has started. Committed letters stay closed.
            KafkaClientError: A transaction failed; run it again.
        """
        try:
            for chunk in _chunks(letters):
                self._transact(chunk, summary)
        except FencedError as error:
            what = "purge" if self._to is None else "redrive"
            message = (
                f"{what} of {self._topics} was fenced after {summary.done} dead letters: another redrive or purge of "
                "this queue has started, or the broker aborted an idle transaction; run it again after the other has "
                "ended; no message is sent twice"
            )
            raise FencedError(message) from error
        except KafkaClientError as error:
            message = f"{error}; {summary.done} dead letters are done, run it again for the others: none is sent twice"
            raise KafkaClientError(message, code=error.code, retriable=error.retriable) from error

    def _transact(self, chunk: list[DeadLetter], summary: RedriveSummary) -> None:
        rejected_records = RejectedRecords()
        sent: list[DeadLetter] = []
        rejected: list[DeadLetter] = []

        def work() -> None:
            sent.clear()
            rejected.clear()
            for index, letter in enumerate(chunk):
                is_sent = self._to is None or self._send_unless_rejected(self._to, index, letter, rejected_records)
                (sent if is_sent else rejected).append(letter)
            for record in self._ends(sent):
                self._producer.send(record)
                failpoint("redrive.end-sent")

        def check() -> None:
            failpoint("redrive.before-commit")

        self._producer.run(work, progress=lambda: rejected_records.total_count, check=check)
        failpoint("redrive.committed")
        for letter in sent:
            summary.count(letter)
        for letter in rejected:
            summary.leave(letter, "too large: the broker refuses it; raise max.message.bytes of the queue topic")

    def _send_unless_rejected(
        self, to: QueueTopics, index: int, letter: DeadLetter, rejected_records: RejectedRecords
    ) -> bool:
        """Send a letter unless the broker has rejected it, or one at most as large; return whether it was sent."""
        record = redriven_record(letter, self._topics, to, self._to_partition_count)
        size = size_of(record.key, record.value, record.headers)
        if rejected_records.rejection_count(index, size):
            return False
        self._producer.send(record, partial(_on_delivered, partial(rejected_records.note, index, size, 0)))
        failpoint("redrive.message-sent")
        return True

    def _ends(self, letters: Iterable[DeadLetter]) -> Iterator[OutgoingRecord]:
        """Yield the ENDs that close the letters of one transaction, exactly one for each."""
        outcome = Outcome.EXPIRED if self._to is None else Outcome.ACKED
        offsets: dict[int, list[int]] = {}
        for letter in letters:
            offsets.setdefault(letter.partition, []).append(letter.offset)
        for partition, of_partition in offsets.items():
            for ranges in cut_ranges(of_partition):
                marker = Marker(MarkerType.END, partition, ranges, outcome=outcome, consumer_id=self._writer_id)
                # The dead-letter topic may have more partitions than the redrive topic. The marker itself contains the
                # partition of the letter.
                place = partition % self._redrive_partition_count
                yield OutgoingRecord(self._topics.redrive_topic, place, None, encode_marker(marker), [])


def redriven_record(letter: DeadLetter, topics: QueueTopics, to: QueueTopics, partition_count: int) -> OutgoingRecord:
    """Return the message that a redrive sends to *to* for a dead letter of *topics*; key and value byte for byte."""
    headers = redrive_headers(letter.headers, subscription=to.subscription)
    if to.queue_topic != topics.queue_topic:
        # These headers name a place and a producer of another topic. In this topic the new record is the first copy.
        headers = [(name, value) for name, value in headers if name not in _OF_ANOTHER_QUEUE]
        return OutgoingRecord(to.queue_topic, BY_KEY, letter.key, letter.value, headers)
    home = letter.origin.queue_partition if letter.origin is not None else BY_KEY
    # Use the partition of the first copy, since the partition count may have changed and the key may map elsewhere.
    return OutgoingRecord(to.queue_topic, home if home < partition_count else BY_KEY, letter.key, letter.value, headers)


def _chunks(letters: Iterable[DeadLetter]) -> Iterator[list[DeadLetter]]:
    chunk: list[DeadLetter] = []
    size = 0
    for letter in letters:
        chunk.append(letter)
        size += letter.size
        if len(chunk) >= MAX_TRANSACTION_MESSAGES or size >= MAX_TRANSACTION_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _on_delivered(note: Callable[[], None], error: KafkaError | None, _: Message) -> None:
    if error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        note()
