"""
Read the dead letters of a queue, and the ENDs in its redrive topic that close them.

Rule 1: a read ends where the topic ended when the read began. Letters that are appended later, such as redriven
messages that fail again, do not extend it.
Rule 2: a redrive or purge fences older ones, writes an own record, and reads the ENDs up to it. Below that record the
topic does not change any more.
"""

from __future__ import annotations

import logging
from contextlib import closing
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.core.closed import ClosedRanges
from kmq_spark.dlq.ends import LetterEnds
from kmq_spark.errors import TopicError
from kmq_spark.kafka.log_reader import LogReader, read_committed
from kmq_spark.kafka.lookups import bounds_of, topic_id_of
from kmq_spark.kafka.payloads import PayloadReader
from kmq_spark.kafka.settings import admin_config, make_client, new_client_id, reader_config
from kmq_spark.wire.dead_letter import DeadLetter, dead_letter_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from confluent_kafka import Message

    from kmq_spark.kafka.topics import QueueLayout
    from kmq_spark.wire.headers import Headers

logger = logging.getLogger(__name__)


class LetterState(NamedTuple):
    """Which letters are closed, and first offset and end of each partition, read after the ENDs."""

    closed: ClosedRanges
    bounds: Mapping[int, tuple[int, int]]


class DeadLetterLog:
    """The dead letters of one queue. Nothing is asked before the first call."""

    def __init__(
        self, layout: QueueLayout, *, bootstrap_servers: str, timeout: float, extra: Mapping[str, str] | None = None
    ) -> None:
        """
        Keep the settings.

        Raises:
            TopicError: The redrive topic does not exist: it is not known which letters are closed.
        """
        self._topics = layout.topics
        if not layout.redrive_partition_count:
            message = f"topic {self._topics.redrive_topic!r} does not exist; run `kmq queue create {self._topics}`"
            raise TopicError(message)
        self._layout = layout
        self._timeout = timeout
        self._admin_config = admin_config(bootstrap_servers, extra=extra)
        # The consumer joins no group and commits nothing, but librdkafka requires a `group.id`, and ACLs may name it.
        self._config = reader_config(bootstrap_servers, self._topics.redrive_id, new_client_id("redrive"), extra)

    def state(self, ends: Mapping[int, int] | None = None) -> LetterState:
        """
        Read the redrive topic, up to these offsets of its partitions or to its present end.

        Raises:
            KafkaClientError: The broker cannot be reached, or no record arrived in time.
            TopicError: The topic has ENDs of another dead-letter topic, and does not say so.
        """
        found = LetterEnds(self.topic_id())
        topic, partitions = self._topics.redrive_topic, range(self._layout.redrive_partition_count)
        patience_s = 0 if ends is None else None  # who only looks does not wait for an open transaction
        for record in read_committed(self._config, topic, partitions, self._timeout, ends=ends, patience_s=patience_s):
            found.add(record)
        bounds = self._bounds()
        for partition, (_, end) in bounds.items():
            if found.closed.end(partition) > end:
                message = (
                    f"topic {topic!r} does not match {self._topics.dead_letter_topic!r}: got ENDs up to offset "
                    f"{found.closed.end(partition)} of partition {partition}, which ends at {end}; if the dead-letter "
                    f"topic was deleted and created again, delete {topic!r} too"
                )
                raise TopicError(message)
        return LetterState(found.closed, bounds)

    def topic_id(self) -> str:
        """Return the id of the dead-letter topic; empty where the broker does not say one."""
        admin = make_client(AdminClient, self._admin_config)
        return topic_id_of(admin, self._topics.dead_letter_topic, self._timeout)

    def _bounds(self) -> dict[int, tuple[int, int]]:
        consumer = make_client(Consumer, self._config)
        try:
            return {
                number: bounds_of(consumer, TopicPartition(self._topics.dead_letter_topic, number), self._timeout)
                for number in range(self._layout.dead_letter_partition_count)
            }
        finally:
            consumer.close()

    def letters(self, bounds: Mapping[int, tuple[int, int]]) -> Generator[DeadLetter]:
        """
        Yield the letters between these bounds, open and closed, partition by partition, oldest first in each.

        Raises:
            KafkaClientError: The broker cannot be reached, or no record arrived in time.
        """
        reader = LogReader(self._config, self._topics.dead_letter_topic, self._timeout)
        try:
            for partition, (first, end) in bounds.items():
                if first < end:
                    with closing(reader.read({partition: first})) as records:
                        yield from map(self._letter, takewhile(partial(_is_before, end), records))
        finally:
            reader.close()

    def by_ids(self, ids: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], DeadLetter | None]]:
        """
        Yield each id and its letter, ascending within a partition; None where the topic has no such letter.

        Raises:
            KafkaClientError: The broker cannot be reached, or no record arrived in time.
        """
        wanted: dict[int, list[int]] = {}
        for partition, offset in sorted(set(ids)):
            wanted.setdefault(partition, []).append(offset)
        reader = PayloadReader(self._config, self._topics.dead_letter_topic, self._timeout)
        try:
            for payload in reader.read(wanted):
                found = self._letter(payload.message) if payload.message is not None else None
                yield (payload.partition, payload.offset), found
        finally:
            reader.close()

    def _letter(self, record: Message) -> DeadLetter:
        headers = cast("Headers", record.headers() or [])
        key, value = cast("tuple[Any, Any]", (record.key(), record.value()))
        return dead_letter_of(
            record.partition() or 0,
            record.offset() or 0,
            dead_at_ms=record.timestamp()[1],
            key=key,
            value=value,
            headers=list(headers),
            queue_topic=self._topics.queue_topic,
        )


def _is_before(end: int, record: Message) -> bool:
    return (record.offset() or 0) < end
