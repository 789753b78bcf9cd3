"""
The coordination topic: how it is made, and whether it fits.

Rule 1: making is idempotent and changes nothing that exists; a topic that does not fit is an error that names the
repair.
Rule 2: settings that this user may not read are not checked; records without the broker's append time are refused when
they are read.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from confluent_kafka.admin import AdminClient, NewTopic

from kmq_spark.errors import ConfigError, TopicError
from kmq_spark.kafka.lookups import settings_of
from kmq_spark.kafka.replication import alter_command, replication_findings, replication_settings
from kmq_spark.kafka.settings import admin_config, make_client
from kmq_spark.kafka.topic_creation import create_topics, require_quorum, shape_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

COORDINATION_TOPIC = "kmq.coordination"

DEFAULT_PARTITIONS = 8
DEFAULT_RETENTION_MS = 60 * 60 * 1000
MIN_RETENTION_MS = 60_000
"""Shortest retention: a reader needs a snapshot and all that lies behind it."""

SEGMENT_BYTES = 16 * 1024 * 1024

DEFAULT_TIMEOUT = 15.0

_REQUIRED = {"message.timestamp.type": "LogAppendTime", "cleanup.policy": "delete"}
_POLL_S = 0.05


class _MissingTopicError(TopicError):
    """The topic does not exist, or the broker that was asked does not know it yet."""


def create_coordination_topic(
    bootstrap_servers: str,
    *,
    topic: str = COORDINATION_TOPIC,
    partitions: int = DEFAULT_PARTITIONS,
    replication_factor: int = -1,
    retention_ms: int = DEFAULT_RETENTION_MS,
    timeout: float = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
) -> None:
    """
    Make the coordination topic where it does not exist, and check it.

    Args:
        bootstrap_servers: Comma-separated `host:port`.
        topic: Its name; all members of a group use the same one.
        partitions: Partitions of a new topic. They cannot be changed later: a group's partition depends on them.
        replication_factor: Copies of each partition; -1 leaves it to the broker's default.
        retention_ms: How long records are kept, milliseconds, at least a minute; snapshots replace what is deleted.
        timeout: Bound on each call to the broker.
        extra: librdkafka settings.

    Raises:
        ConfigError: A value is out of bounds.
        TopicError: The topic exists and does not fit.
        KafkaClientError: The broker cannot be reached, or refuses.
    """
    if retention_ms < MIN_RETENTION_MS:
        message = f"retention_ms is too short: got {retention_ms!r}, minimum {MIN_RETENTION_MS}; keep records longer"
        raise ConfigError(message)
    if partitions < 1:
        message = f"partitions is out of bounds: got {partitions!r}, minimum 1; correct the call"
        raise ConfigError(message)
    admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))
    until_s = time.monotonic() + timeout
    if not shape_of(admin, topic, bootstrap_servers, timeout).partitions:
        settings = {
            **_REQUIRED,
            **replication_settings(replication_factor),
            "retention.ms": str(retention_ms),
            # Kafka deletes whole segments: with its defaults, of a week or 1 GiB, retention would have no effect.
            "segment.ms": str(retention_ms // 2),
            "segment.bytes": str(SEGMENT_BYTES),
        }
        create_topics(admin, [NewTopic(topic, partitions, replication_factor, config=settings)], timeout)
        while not (made := shape_of(admin, topic, bootstrap_servers, timeout)).partitions:
            if time.monotonic() > until_s:
                break
            time.sleep(_POLL_S)
        if replication_factor < 0:
            require_quorum(admin, {topic: made}, timeout)
    _check_known(admin, topic, bootstrap_servers, timeout, until_s)


def check_coordination_topic(admin: AdminClient, topic: str, bootstrap_servers: str, timeout: float) -> int:
    """
    Find out whether the coordination topic exists and fits.

    Args:
        admin: Admin client.
        topic: Its name.
        bootstrap_servers: For messages alone.
        timeout: Bound on each call to the broker.

    Returns:
        Its `retention.ms`; 0 where we may not read it.

    Raises:
        TopicError: It does not exist, or a setting is wrong; the message names the repair.
        KafkaClientError: The broker cannot be reached.
    """
    replicas = shape_of(admin, topic, bootstrap_servers, timeout).replicas
    if not replicas:
        message = (
            f"coordination topic {topic!r} does not exist; run `kmq group init`, or call `create_coordination_topic`"
        )
        raise _MissingTopicError(message)
    settings = settings_of(admin, [topic], timeout).get(topic, {})
    findings = [f"topic {topic!r} {what}; run `{repair}`" for what, repair in topic_findings(topic, settings, replicas)]
    if findings:
        message = "coordination topic is not set up correctly: " + "; ".join(findings)
        raise TopicError(message)
    return int(settings.get("retention.ms", "0"))


def _check_known(admin: AdminClient, topic: str, bootstrap_servers: str, timeout: float, until_s: float) -> None:
    """Check a topic that exists. Each request may go to another broker, and one of them may not know the topic yet."""
    while True:
        try:
            check_coordination_topic(admin, topic, bootstrap_servers, timeout)
        except _MissingTopicError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_POLL_S)
        else:
            return


def topic_findings(topic: str, settings: Mapping[str, str], replicas: int) -> Iterator[tuple[str, str]]:
    """
    Yield each setting with which no process may join, with the command that repairs it.

    Args:
        topic: The coordination topic.
        settings: Settings of the topic; missing ones are not checked.
        replicas: Number of replicas of a partition.
    """
    for key, wanted in _REQUIRED.items():
        if (got := settings.get(key, wanted)) != wanted:
            yield f"has {key}={got}, must be {wanted}", alter_command(topic, key, wanted)
    retention_ms = int(settings.get("retention.ms", MIN_RETENTION_MS))
    if 0 <= retention_ms < MIN_RETENTION_MS:
        repair = alter_command(topic, "retention.ms", str(DEFAULT_RETENTION_MS))
        yield f"has retention.ms={retention_ms}, must be at least {MIN_RETENTION_MS}", repair
    yield from replication_findings(topic, settings, replicas)
