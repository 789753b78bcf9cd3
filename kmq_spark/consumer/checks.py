"""What a consumer checks before it joins its group: bounds and topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.core.durations import MIN_LEASE_MS, milliseconds
from kmq_spark.core.markers import MAX_REDELIVER_AFTER_MS
from kmq_spark.errors import ConfigError, TopicError
from kmq_spark.kafka.topics import partition_count

if TYPE_CHECKING:
    from datetime import timedelta

    from confluent_kafka import Producer

    from kmq_spark.kafka.queue_topics import QueueTopics

MAX_START_TIMEOUT_S = 10.0
"""Longest time for a START: enough for a broker restart, and a caller does not block longer."""


class Limits(NamedTuple):
    """Limits of one consumer: of a lease, of all its renewals, of the time for a START, and of the messages held."""

    lease_s: float
    max_lease_s: float
    start_timeout_s: float
    max_in_flight: int


def check_bounds(name: str, value: int, least: int, most: int) -> None:
    """Raise ConfigError for a number that is out of its bounds."""
    if not least <= value <= most:
        message = f"{name} is out of bounds: got {value!r}; expected an integer from {least} to {most}"
        raise ConfigError(message)


def limits_of(lease: float | timedelta, max_lease: float | timedelta | None, max_in_flight: int) -> Limits:
    """Return the limits of a consumer. Raises ConfigError for a value that is out of bounds."""
    lease_ms = milliseconds("lease", lease, MIN_LEASE_MS)
    max_lease_ms = MAX_REDELIVER_AFTER_MS
    if max_lease is not None:
        max_lease_ms = milliseconds("max_lease", max_lease, lease_ms)
    start_timeout_s = min(MAX_START_TIMEOUT_S, lease_ms / 2_000)
    return Limits(lease_ms / 1000, max_lease_ms / 1000, start_timeout_s, max_in_flight)


def check_topics(client: Producer, topics: QueueTopics, bootstrap_servers: str, timeout: float) -> None:
    """Raise TopicError if a topic of the queue is missing, or the markers topic has too few partitions."""
    counts = {
        topic: partition_count(client, topic, bootstrap_servers, timeout)
        for topic in (topics.queue_topic, topics.markers_topic)
    }
    queue = str(topics)
    missing = [topic for topic, count in counts.items() if not count]
    if missing:
        message = f"queue {queue!r} has no topic {missing[0]!r}; run `kmq queue create {queue}`"
        raise TopicError(message)
    queue_count, marker_count = counts.values()
    if marker_count < queue_count:
        message = (
            f"topic {topics.markers_topic!r} has too few partitions: got {marker_count}; expected {queue_count}, as "
            f"{queue!r} has; add partitions"
        )
        raise TopicError(message)
