"""Create and check the coordination topic, and find the partition of a group."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from confluent_kafka.admin import AdminClient, NewTopic

from kmq_spark.core.durations import milliseconds
from kmq_spark.core.markers import MAX_DUE_AT_MS
from kmq_spark.errors import ConfigError, TopicError
from kmq_spark.kafka.lookups import settings_of
from kmq_spark.kafka.settings import admin_config, make_client
from kmq_spark.kafka.topic_rules import (
    FITS_BATCHES,
    MIN_COORDINATION_RETENTION_MS,
    REQUIRED,
    replication_settings,
    topic_problems,
)
from kmq_spark.kafka.topics import create_topics, replicas_of_new, shape_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

COORDINATION_TOPIC = "kmq.coordination"

DEFAULT_PARTITIONS = 8
DEFAULT_RETENTION_MS = 60 * 60 * 1000

SEGMENT_BYTES = 16 * 1024 * 1024

_POLL_S = 0.05


class _MissingTopicError(TopicError):
    """The topic does not exist, or the broker that was asked does not know it yet."""


def create_coordination_topic(
    bootstrap_servers: str,
    *,
    topic: str = COORDINATION_TOPIC,
    partitions: int = DEFAULT_PARTITIONS,
    replication_factor: int = -1,
    retention: float | timedelta = DEFAULT_RETENTION_MS / 1000,
    timeout: float | timedelta = 15.0,
    extra: Mapping[str, str] | None = None,
) -> None:
    """
    Create the coordination topic if it does not exist, and check it. An existing topic is not changed.

    Args:
        bootstrap_servers: Comma-separated `host:port`.
        topic: Its name; all members of a group use the same one.
        partitions: Partitions of a new topic. They cannot be changed later: a group's partition depends on them.
        replication_factor: Copies of each partition; -1 leaves it to the broker's default.
        retention: How long records are kept, at least a minute, seconds or a timedelta; snapshots replace what is
            deleted.
        timeout: Bound on each call to the broker, seconds or a timedelta.
        extra: librdkafka settings.

    Raises:
        ConfigError: A value is out of bounds.
        TopicError: The topic exists and does not fit.
        KafkaClientError: The broker cannot be reached, or refuses.
    """
    retention_ms = milliseconds("retention", retention, MIN_COORDINATION_RETENTION_MS, MAX_DUE_AT_MS)
    timeout_s = milliseconds("timeout", timeout) / 1000
    if partitions < 1:
        message = f"partitions is out of bounds: got {partitions!r}; expected at least 1; correct the call"
        raise ConfigError(message)
    admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))
    until_s = time.monotonic() + timeout_s
    if not shape_of(admin, topic, bootstrap_servers, timeout_s).partitions:
        settings = {
            **REQUIRED["coordination"],
            **FITS_BATCHES,
            **replication_settings(replicas_of_new(admin, replication_factor, timeout_s)),
            "retention.ms": str(retention_ms),
            # Kafka deletes whole segments: with its defaults, of a week or 1 GiB, retention would have no effect.
            "segment.ms": str(retention_ms // 2),
            "segment.bytes": str(SEGMENT_BYTES),
        }
        create_topics(admin, [NewTopic(topic, partitions, replication_factor, config=settings)], timeout_s)
    while True:
        try:
            check_coordination_topic(admin, topic, bootstrap_servers, timeout_s)
        except _MissingTopicError:
            # Each request may go to another broker, and one of them may not know the topic yet.
            if time.monotonic() > until_s:
                raise
            time.sleep(_POLL_S)
        else:
            return


def check_coordination_topic(admin: AdminClient, topic: str, bootstrap_servers: str, timeout_s: float) -> int:
    """
    Return `retention.ms` of the coordination topic; 0 if this user may not read its settings.

    Raises TopicError, with the repair, for a missing topic or a wrong setting.
    """
    replicas = shape_of(admin, topic, bootstrap_servers, timeout_s).replicas
    if not replicas:
        raise _MissingTopicError(missing_topic(topic))
    settings = settings_of(admin, [topic], timeout_s).get(topic, {})
    problems = topic_problems("coordination", topic, settings, replicas)
    findings = [f"{problem.what}; run `{problem.repair}`" for problem in problems]
    if findings:
        message = "coordination topic is not set up correctly: " + "; ".join(findings)
        raise TopicError(message)
    return int(settings.get("retention.ms", "0"))


def missing_topic(topic: str) -> str:
    """Return the text of the error that there is no such topic."""
    return f"coordination topic {topic!r} does not exist; run `kmq group init`, or call `create_coordination_topic`"


def partition_of(group: str, partition_count: int) -> int:
    """Return the partition of a group: the one that Kafka's own clients choose for its name as a key."""
    return (murmur2(group.encode()) & 0x7FFFFFFF) % partition_count


def murmur2(data: bytes) -> int:
    """Return the 32-bit hash of Kafka's `Utils.murmur2`, public domain hash of Austin Appleby; unsigned."""
    seed, factor, word, bits_32 = 0x9747B28C, 0x5BD1E995, 4, 0xFFFFFFFF
    value = seed ^ len(data)
    whole = len(data) - len(data) % word
    for start in range(0, whole, word):
        part = int.from_bytes(data[start : start + word], "little") * factor & bits_32
        part = (part ^ part >> 24) * factor & bits_32
        value = value * factor & bits_32 ^ part
    if whole < len(data):
        value = (value ^ int.from_bytes(data[whole:], "little")) * factor & bits_32
    value = (value ^ value >> 13) * factor & bits_32
    return value ^ value >> 15
