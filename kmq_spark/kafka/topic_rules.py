"""
The required settings of a queue's topics: those for their creation, and a check of existing ones.

Rule 1: no client in this module: names, counts and settings in, settings and findings out.
Rule 2: each finding names its repair.

Source: Kafka's documentation of `min.insync.replicas` and `unclean.leader.election.enable`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kmq_spark.kafka.queue_topics import QueueTopics

HEADER_ROOM_BYTES = 16 * 1024
"""How much larger the queue topic's limit is than a producer's largest message: a redelivery adds `kmq-*` headers."""

DLQ_ROOM_BYTES = 64 * 1024
"""
How much larger the dead-letter topic's limit is than the queue topic's: a dead letter adds its reason and Kafka's six
headers.
"""

POSITIONS_SEGMENT_BYTES = 16 * 1024 * 1024
"""Some 80,000 position records; a producer reads them within a second at its start."""


def wanted_settings(
    topics: QueueTopics, replication_factor: int, retention_ms: int, queue_bytes: int
) -> dict[str, dict[str, str]]:
    """Return the settings of a queue's topics, by topic; *queue_bytes* is `max.message.bytes` of the queue topic."""
    # The append time of the markers is the only clock. With append times on the messages, lateness is measured on the
    # same clock.
    common = {
        "cleanup.policy": "delete",
        "message.timestamp.type": "LogAppendTime",
        **replication_settings(replication_factor),
    }
    # The positions of producers belong to the queue; its subscriptions have no such topic.
    positions = {} if topics.subscription else {topics.producers_topic: producers_settings(replication_factor)}
    return {
        topics.queue_topic: {
            **common,
            "retention.ms": str(retention_ms),
            "max.message.bytes": str(queue_bytes),
        },
        topics.markers_topic: {**common, "retention.ms": str(retention_ms)},
        # An operator must inspect a dead letter before it may be deleted. If a dead letter did not fit, redelivery
        # would stop.
        topics.dead_letter_topic: {
            **common,
            "retention.ms": "-1",
            "max.message.bytes": str(queue_bytes + DLQ_ROOM_BYTES),
        },
        # The END of a dead letter must be kept longer than the dead letter; otherwise the dead letter would be sent
        # again.
        topics.redrive_topic: {**common, "retention.ms": "-1"},
        **positions,
    }


def producers_settings(replication_factor: int) -> dict[str, str]:
    """Return the settings of the topic of the producers' positions."""
    return {
        "cleanup.policy": "compact",
        # Compaction does not touch the newest segment, and a producer reads all of it at its start.
        "segment.bytes": str(POSITIONS_SEGMENT_BYTES),
        "min.cleanable.dirty.ratio": "0.1",
        **replication_settings(replication_factor),
    }


def partition_findings(topics: QueueTopics, counts: Mapping[str, int]) -> Iterator[str]:
    """Yield topics that are missing and partition counts that differ; *counts* has no missing topics."""
    for name in topics.all_topics:
        if name not in counts:
            yield f"topic {name!r} does not exist; run `kmq queue create {topics}`"
    queue_count = counts.get(topics.queue_topic, 0)
    marker_count = counts.get(topics.markers_topic, 0)
    if queue_count and marker_count and queue_count != marker_count:
        smaller = topics.queue_topic if queue_count < marker_count else topics.markers_topic
        yield (
            f"topic {topics.markers_topic!r} has {marker_count} partitions, {topics.queue_topic!r} has {queue_count}, "
            f"they must be equal; run `kafka-topics.sh --alter --topic {smaller} "
            f"--partitions {max(queue_count, marker_count)}`"
        )


def config_warnings(topics: QueueTopics, configs: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield settings with which a queue works, but not as intended; *configs* as in `config_findings`."""
    key, wanted, name = "message.timestamp.type", "LogAppendTime", topics.queue_topic
    if (got := configs.get(name, {}).get(key, wanted)) != wanted:
        yield (
            f"topic {name!r} has {key}={got}: delays and times to live of its messages follow the clocks of the "
            f"producers, not the broker's clock; run `{alter_command(name, key, wanted)}`"
        )


def config_findings(
    topics: QueueTopics, configs: Mapping[str, Mapping[str, str]], replicas: Mapping[str, int]
) -> Iterator[str]:
    """Yield the settings that are wrong. A topic without an entry in *configs* is not checked."""
    required = {
        topics.queue_topic: {"cleanup.policy": "delete"},
        topics.markers_topic: {"message.timestamp.type": "LogAppendTime", "cleanup.policy": "delete"},
        topics.dead_letter_topic: {"cleanup.policy": "delete"},
        topics.redrive_topic: {"cleanup.policy": "delete", "retention.ms": "-1"},
        topics.producers_topic: {"cleanup.policy": "compact"},
    }
    for name, settings in required.items():
        for key, value in settings.items():
            if (got := configs.get(name, {}).get(key, value)) != value:
                yield f"topic {name!r} has {key}={got}, must be {value}; run `{alter_command(name, key, value)}`"
        for what, repair in replication_findings(name, configs.get(name, {}), replicas.get(name, 0)):
            yield f"topic {name!r} {what}; run `{repair}`"


REPLICAS_OF_A_QUORUM, QUORUM = 3, 2
"""With three replicas or more, two must have a record before it counts as written."""


def replication_settings(replicas: int) -> dict[str, str]:
    """Return the settings on which a topic's durability depends; *replicas* is -1 if not known yet."""
    # With three replicas, two must have a record before it counts as written: with Kafka's default of one, a START that
    # only one broker has may be lost with that broker. With fewer replicas, the loss of a broker would stop the queue.
    quorum = {"min.insync.replicas": str(QUORUM)} if replicas >= REPLICAS_OF_A_QUORUM else {}
    # An out-of-sync replica must not become the leader: it lacks acknowledged records.
    return {"unclean.leader.election.enable": "false", **quorum}


def replication_findings(name: str, settings: Mapping[str, str], replicas: int) -> Iterator[tuple[str, str]]:
    """
    Yield each setting with which the loss of a broker may lose acknowledged records, with the command that repairs it.

    Missing settings are not checked, nor is a single replica, because no setting helps.
    """
    in_sync = int(settings.get("min.insync.replicas", QUORUM))
    if replicas >= REPLICAS_OF_A_QUORUM and in_sync < QUORUM:
        what = (
            f"has min.insync.replicas={in_sync} with {replicas} replicas, must be at least {QUORUM}: a record that "
            "only one broker has is acknowledged, and lost with that broker"
        )
        yield what, alter_command(name, "min.insync.replicas", str(QUORUM))
    if replicas > 1 and settings.get("unclean.leader.election.enable", "false") != "false":
        what = (
            "has unclean.leader.election.enable=true, must be false: a replica that lacks records may become the leader"
        )
        yield what, alter_command(name, "unclean.leader.election.enable", "false")


def alter_command(name: str, key: str, value: str) -> str:
    """Return the command that changes a setting of a topic."""
    return f"kafka-configs.sh --alter --entity-type topics --entity-name {name} --add-config {key}={value}"
