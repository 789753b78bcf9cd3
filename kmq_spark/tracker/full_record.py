"""
Back-pressure, the tracker's side: publish that too many messages of a queue are in flight.

Rule 1: When more messages than the queue's `max_in_flight` are in flight in a markers partition, the tracker writes the
record `<queue>#full` to the topic `kmq.queues`, and again every `RENEW_INTERVAL_S`. It removes the record when every
full partition is below `CLEAR_SHARE` of the limit.
Rule 2: Best effort: without the topic, or the right to write to it, there is no back-pressure. Nothing else changes.

The consumers' side is `consumer/full_watch.py`.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient

from kmq_spark.errors import KmqError
from kmq_spark.kafka.queue_rules import RULES_TOPIC, full_key
from kmq_spark.kafka.settings import admin_config, make_client, marker_producer_config, new_client_id
from kmq_spark.kafka.topics import ensure_compacted_topic
from kmq_spark.rate_limit import RateLimit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from confluent_kafka import KafkaError, Message

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.kafka.queue_rules import RulesReader
    from kmq_spark.kafka.queue_topics import QueueTopics

logger = logging.getLogger(__name__)

CLEAR_SHARE = 0.9
"""Share of `max_in_flight` below which a full partition is no longer full."""

RENEW_INTERVAL_S = 20.0
"""A third of the time for which a record counts, see `consumer/full_watch.py`."""

CREATE_TOPIC_TIMEOUT_S = 3.0

WARN_INTERVAL_S = CREATION_INTERVAL_S = 60.0


class FullRecordWriter:
    """
    Publishes whether a queue is full.

    One thread calls `refresh`; another may call `observe`.

    Args:
        topics: Topic names of the queue.
        reader: Reads the rules of the queue. The owner of the reader calls its `refresh`; this class does not.
        local_max_in_flight: Limit of a queue that has no rules, messages per markers partition.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.

    Attributes:
        is_ready: Whether the tracker has read the log to its end, so that the counts are current. Before that `refresh`
            does nothing.
    """

    def __init__(
        self,
        topics: QueueTopics,
        reader: RulesReader,
        local_max_in_flight: int,
        bootstrap_servers: str,
        extra: Mapping[str, str],
    ) -> None:
        """Store the settings. Create no client: most queues are never full."""
        self._topics = topics
        self._reader = reader
        self._local_max_in_flight = local_max_in_flight
        self._bootstrap_servers = bootstrap_servers
        self._extra = extra
        self._in_flight: dict[int, int] = {}
        self._full: dict[int, int] = {}
        self._producer: Producer | None = None
        self._has_failed = False
        self._written: set[int] = set()
        self._written_at_s = float("-inf")
        self._warning_limit = RateLimit(WARN_INTERVAL_S)
        self._creation_limit = RateLimit(CREATION_INTERVAL_S)
        self.is_ready = False

    @property
    def is_full(self) -> bool:
        """Whether a markers partition is full."""
        return bool(self._full)

    @property
    def limit(self) -> int:
        """The `max_in_flight` in force."""
        newest = self._reader.newest
        return self._local_max_in_flight if newest is None else newest.settings.max_in_flight

    def is_near_full(self, growth: Mapping[int, int]) -> bool:
        """
        Return whether a markers partition is full, or would be full after *growth*.

        Args:
            growth: Messages started less messages ended since the newest batch, by markers partition.
        """
        if self._full:
            return True
        in_flight, limit = self._in_flight, self.limit
        return any(in_flight.get(partition, 0) + count > limit for partition, count in growth.items())

    def observe(self, outcomes: Sequence[PartitionOutcome]) -> None:
        """Update the numbers of messages in flight from the outcomes of a batch."""
        # Replace the dict: another thread may be iterating over the old one.
        self._in_flight = self._in_flight | {outcome.marker_partition: outcome.status.in_flight for outcome in outcomes}

    def refresh(self) -> None:
        """Write, renew or remove the record if that is due; call it about once a second."""
        if not self.is_ready:
            return
        if self._has_failed:
            self._producer, self._has_failed = None, False
        limit = self.limit
        self._full = {
            partition: count
            for partition, count in self._in_flight.items()
            if count > limit or (partition in self._full and count >= CLEAR_SHARE * limit)
        }
        is_due = time.monotonic() - self._written_at_s > RENEW_INTERVAL_S
        if self._full.keys() != self._written or (is_due and (self._full or self._reader.full is not None)):
            self._write(limit)
        if self._producer is not None:
            self._producer.poll(0)

    def _write(self, limit: int) -> None:
        if not self._reader.has_topic and not self._create_topic():
            return
        if self._producer is None:
            config = marker_producer_config(self._bootstrap_servers, new_client_id("full"), self._extra)
            self._producer = make_client(Producer, config)
        value = None
        if self._full:
            payload = {"max_in_flight": limit, "in_flight": self._full, "at_ms": time.time_ns() // 1_000_000}
            value = json.dumps(payload).encode()
        if self._full.keys() != self._written:
            logger.log(
                logging.WARNING if self._full else logging.INFO,
                "queue %s is %s: in flight by markers partition %s, max_in_flight %d; its consumers %s fetching",
                self._topics, "full" if self._full else "no longer full", self._full or self._in_flight, limit,
                "stop" if self._full else "resume", extra={"action": "queue_full", "queue": str(self._topics)},
            )  # fmt: skip
        self._written, self._written_at_s = set(self._full), time.monotonic()
        try:
            self._producer.produce(
                RULES_TOPIC, key=full_key(self._topics), value=value, partition=0, on_delivery=self._report
            )
        except (KafkaException, BufferError) as error:
            self._fail(error)

    def _create_topic(self) -> bool:
        """Create the missing topic if the queue is full; return whether the topic may exist now."""
        if not self._full or not self._creation_limit.allows():
            return False
        try:
            admin = make_client(AdminClient, admin_config(self._bootstrap_servers, extra=self._extra))
            ensure_compacted_topic(RULES_TOPIC, -1, admin, self._bootstrap_servers, CREATE_TOPIC_TIMEOUT_S)
        except KmqError as error:
            self._fail(error)
            return False
        return True

    def _report(self, error: KafkaError | None, _record: Message) -> None:
        if error is not None:
            self._fail(error.str())

    def _fail(self, cause: object) -> None:
        """Log a failure, at most once a minute. The next write, `RENEW_INTERVAL_S` from now, uses a new producer."""
        self._has_failed = True
        if not self._warning_limit.allows():
            return
        logger.warning(
            "cannot write to %s whether queue %s is full: %s; its consumers do not slow down; grant the tracker Write, "
            "see `kmq acls`, and create the topic with `kmq queue alter`",
            RULES_TOPIC, self._topics, cause, extra={"action": "queue_full_failed", "queue": str(self._topics)},
        )  # fmt: skip
