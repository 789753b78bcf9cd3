"""
Send dead letters back or end them, exactly once: the messages and their ENDs in one Kafka transaction.

Rule 1: a letter and its END commit together or not at all, so the log itself says what is done.
Rule 2: opening fences every older redrive of the queue; the ENDs are read after that. So a crash anywhere and a second
run send nothing twice, and of two that run at once the older ends.
Rule 3: what cannot be sent is told and stays where it is.

Source: KIP-98; the tracker does the same with redeliveries (redelivery.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError

from kmq_spark.core.markers import Outcome
from kmq_spark.dlq.redrive_records import closing_records, redriven_record
from kmq_spark.errors import FencedError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.rejected_records import Refusals
from kmq_spark.kafka.settings import new_client_id, transactional_producer_config
from kmq_spark.kafka.transaction import TransactionalProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from confluent_kafka import Message

    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.kafka.topics import QueueLayout
    from kmq_spark.wire.dead_letter import DeadLetter

MAX_TRANSACTION_MESSAGES = 1_000
MAX_TRANSACTION_BYTES = 8 * 1024 * 1024
TRANSACTION_TIMEOUT_MS = 60_000

LARGEST_RECORD = 1_000_000_000
"""The broker decides what is too large, not our client: librdkafka's upper bound."""

MOST_NAMED = 100
"""Letters that a summary names one by one; the others are counted."""


@dataclass(slots=True)
class RedriveSummary:
    """
    What a redrive or a purge did, or, of a dry run, would do.

    Attributes:
        done: Letters redriven or purged.
        by_reason: How many of them, by reason.
        done_before: Letters asked for by id that an earlier run has redriven or purged.
        left: Letters that cannot be redriven and stay where they are.
        left_because: Why, by id, of the first 100 of them.
        missing: Ids that are not in the dead-letter topic.
        transactions: Transactions committed; 0 of a dry run.
        is_dry_run: Whether nothing was written.
    """

    done: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    done_before: int = 0
    left: int = 0
    left_because: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    transactions: int = 0
    is_dry_run: bool = False

    def count(self, letters: Iterable[DeadLetter]) -> None:
        """Count letters that are done."""
        for letter in letters:
            self.done += 1
            known = letter.reason in self.by_reason or len(self.by_reason) < MOST_NAMED
            reason = letter.reason if known else "…"
            self.by_reason[reason] = self.by_reason.get(reason, 0) + 1

    def leave(self, letter: DeadLetter, why: str) -> None:
        """Count a letter that stays."""
        self.left += 1
        if len(self.left_because) < MOST_NAMED:
            self.left_because[letter.id] = why


class Redriver:
    """
    Ends dead letters of one queue, under its one transactional id.

    Args:
        layout: The queue's topics, checked.
        redrive_partition_count: Partitions of the redrive topic.
        to: Where redriven messages go, None for a purge.
        to_partition_count: Partitions of that queue topic.
        bootstrap_servers: Comma-separated `host:port`.
        timeout_ms: Bound on each call to the broker.
        extra: librdkafka settings.

    Raises:
        KafkaClientError: The broker cannot be reached, or refuses the transactional id.
    """

    def __init__(
        self,
        layout: QueueLayout,
        redrive_partition_count: int,
        *,
        to: QueueTopics | None,
        to_partition_count: int,
        bootstrap_servers: str,
        timeout_ms: int,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """Connect, and fence every older redrive and purge of this queue."""
        self._topics = layout.topics
        self._redrive_partition_count = redrive_partition_count
        self._to = to
        self._to_partition_count = to_partition_count
        self._writer_id = new_client_id("redrive")
        config = transactional_producer_config(
            bootstrap_servers,
            self._topics.redrive_id,
            self._writer_id,
            extra,
            max_message_bytes=LARGEST_RECORD,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
        )
        # A transaction is flushed as a whole: waiting for a fuller batch would only be waiting.
        config["linger.ms"] = 0
        # The broker judges a whole batch by the topic's limit, and refuses it whole.
        config["batch.size"] = min(1_000_000, layout.max_message_bytes or 1_000_000)
        self._producer = TransactionalProducer(config, timeout_ms, role="redrive")

    def close(self) -> None:
        """Give up what is open; a transaction that is not committed by now never will be."""
        self._producer.close()

    def end(self, letters: Iterable[DeadLetter], summary: RedriveSummary) -> None:
        """
        Send these letters back, or end them without: as many transactions as they need.

        Args:
            letters: Open ones; with `to`, such as can be redriven. Read as they are needed.
            summary: Counts what is committed.

        Raises:
            FencedError: Another redrive or purge of the queue has begun; what is committed so far stands.
            KafkaClientError: It did not succeed; run it again.
        """
        try:
            for chunk in _chunks(letters):
                self._transact(chunk, summary)
        except FencedError as error:
            what = "purge" if self._to is None else "redrive"
            message = (
                f"{what} of {self._topics} was fenced after {summary.done} dead letters: another redrive or purge of "
                "it has begun, or the broker gave up a transaction that stood still; run it again when the other "
                "has ended, nothing is sent twice"
            )
            raise FencedError(message) from error

    def _transact(self, chunk: list[DeadLetter], summary: RedriveSummary) -> None:
        refusals = Refusals()
        sent: list[DeadLetter] = []
        refused: list[DeadLetter] = []

        def work() -> None:
            sent.clear()
            refused.clear()
            for index, letter in enumerate(chunk):
                if self._to is not None and not self._send_back(self._to, index, letter, refusals):
                    refused.append(letter)
                    continue
                sent.append(letter)
            outcome = Outcome.EXPIRED if self._to is None else Outcome.ACKED
            for record in closing_records(sent, self._topics, outcome, self._redrive_partition_count, self._writer_id):
                self._producer.send(record)
                failpoint("redrive.end-sent")

        def check() -> None:
            failpoint("redrive.before-commit")

        self._producer.run(work, [], None, lambda: refusals.count, check=check)
        failpoint("redrive.committed")
        summary.transactions += 1
        summary.count(sent)
        for letter in refused:
            summary.leave(letter, "too large: the broker refuses it; raise max.message.bytes of the queue topic")

    def _send_back(self, to: QueueTopics, index: int, letter: DeadLetter, refusals: Refusals) -> bool:
        """Send a letter, unless the broker has refused it or a smaller one."""
        record = redriven_record(letter, self._topics, to, self._to_partition_count)
        header_bytes = sum(len(name) + len(value or b"") for name, value in record.headers)
        size = len(record.key or b"") + len(record.value or b"") + header_bytes
        if refusals.of(index, size):
            return False
        self._producer.send(record, partial(_on_delivered, partial(refusals.note, index, size, 0)))
        failpoint("redrive.message-sent")
        return True


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
