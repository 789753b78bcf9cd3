"""
Read the markers that Spark has not read yet, while the tracker pauses between two batches.

Rule 1: Nothing is decided here. What the watch sees only ends a pause, and Spark reads the same markers again.
Rule 2: The watch counts as blind until it has heard from every partition, and after any failure. The caller must then
not rely on it.
Rule 3: One thread uses the watch: the one that runs Spark's `foreachBatch`. Only `close` may come from another one.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from kmq_spark.core.next_due import next_due_at_ms
from kmq_spark.core.policy import DEFAULT_RULES
from kmq_spark.errors import KafkaClientError, WireError
from kmq_spark.kafka.settings import make_client
from kmq_spark.pauses import RateLimit
from kmq_spark.tracker.ticker import TOLERATED_BEHIND_MS
from kmq_spark.wire.codec import decode_marker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from confluent_kafka import Message

    from kmq_spark.core.outcome import PartitionOutcome

logger = logging.getLogger(__name__)

FETCH_SETTINGS = {
    # The broker collects markers for 50 ms and then answers, whatever there is: 20 requests a second at most.
    "fetch.min.bytes": 1_048_576,
    "fetch.wait.max.ms": 50,
    # Far more than a pause lets wait (`pacing.MOST_UNREAD_BYTES`).
    "queued.max.messages.kbytes": 16_384,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
}
"""librdkafka settings of the watch's consumer."""

READ_AT_ONCE = 10_000

WARN_INTERVAL_S = 60.0


@dataclass(slots=True)
class Unread:
    """
    What the watch has seen since `MarkerWatch.begin`.

    Attributes:
        is_blind: Whether there may be markers that the watch does not see, or the broker's clock was set back.
        bytes: Size of the markers.
        newest_at_s: When the newest one was read, monotonic seconds; the time of `begin` if there is none.
        due_at_ms: Earliest deadline that they may cause, epoch milliseconds, broker clock, by markers partition.
    """

    is_blind: bool = True
    bytes: int = 0
    newest_at_s: float = field(default_factory=time.monotonic)
    due_at_ms: dict[int, int] = field(default_factory=dict)


class MarkerWatch:
    """
    Reads the unread markers of one markers topic.

    Attributes:
        unread: What is seen since `begin`.
    """

    def __init__(self, config: Mapping[str, Any], topic: str) -> None:
        self._config = {**config, **FETCH_SETTINGS}
        self._topic = topic
        self._consumer: Consumer | None = None
        self._read_to: dict[int, int] = {}
        self._dead_letters_expired: dict[int, bool] = {}
        self._unheard: set[int] = set()
        self._newest_append_ms: dict[int, int] = {}
        self._has_failed = False
        self._warning_limit = RateLimit(WARN_INTERVAL_S)
        self.unread = Unread()

    def observe(self, outcomes: Iterable[PartitionOutcome]) -> None:
        """Note up to which marker Spark has read, and the rules there."""
        for outcome in outcomes:
            partition, status = outcome.marker_partition, outcome.status
            self._read_to[partition] = status.next_marker_offset
            if status.rules is not None:
                self._dead_letters_expired[partition] = status.rules.dead_letters_expired

    def begin(self) -> None:
        """Begin to read, at the first markers that Spark has not read."""
        self.unread, self._has_failed = Unread(), False
        self._unheard, self._newest_append_ms = set(self._read_to), {}
        try:
            if self._consumer is None:
                self._consumer = make_client(Consumer, self._config)
            self._consumer.assign([TopicPartition(self._topic, *place) for place in self._read_to.items()])
        except (KafkaException, KafkaClientError, RuntimeError) as error:
            self._fail(error)

    def read(self) -> None:
        """Add to `unread` what has arrived; does not wait."""
        if self._consumer is None:
            return
        try:
            records = self._consumer.consume(READ_AT_ONCE, 0)
        except (KafkaException, RuntimeError) as error:
            self._fail(error)
            return
        for record in records:
            failure, partition = record.error(), record.partition()
            if failure is not None and failure.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001  # librdkafka's public name for it
                self._fail(failure.str())
                continue
            self._unheard.discard(-1 if partition is None else partition)
            if failure is None:
                self._add(record, partition or 0)
        self.unread.is_blind = self._has_failed or bool(self._unheard)

    def end(self) -> None:
        """Stop reading until the next `begin`."""
        if self._consumer is None:
            return
        try:
            self._consumer.unassign()
        except (KafkaException, RuntimeError) as error:
            self._fail(error)

    def close(self) -> None:
        """Close the client; the watch is blind from then on."""
        if self._consumer is not None:
            self._consumer.close()

    def _add(self, record: Message, partition: int) -> None:
        unread, value = self.unread, record.value()
        _, appended_at_ms = record.timestamp()
        if appended_at_ms < self._newest_append_ms.get(partition, 0) - TOLERATED_BEHIND_MS:
            # The broker's clock was set back: what is in flight falls due at another append time. A batch tells when.
            self._has_failed = True
        self._newest_append_ms[partition] = appended_at_ms
        unread.newest_at_s = time.monotonic()
        unread.bytes += len(value or b"")
        try:
            marker = decode_marker(value)
        except WireError:
            return  # Spark reads it too, and the tracker reports it then.
        if not marker.ranges:
            return
        is_dead_letter = self._dead_letters_expired.get(partition, DEFAULT_RULES.dead_letters_expired)
        due_at_ms = next_due_at_ms(marker, appended_at_ms, dead_letters_expired=is_dead_letter)
        if due_at_ms is not None:
            unread.due_at_ms[partition] = min(due_at_ms, unread.due_at_ms.get(partition, due_at_ms))

    def _fail(self, cause: object) -> None:
        """Be blind until the next `begin`; log it at most once a minute."""
        self._has_failed = self.unread.is_blind = True
        if self._warning_limit.allows():
            logger.warning(
                "cannot read %s ahead of Spark: %s; the tracker runs a batch every second or more often, which costs "
                "processor time and nothing else", self._topic, cause, extra={"action": "watch_failed"},
            )  # fmt: skip
