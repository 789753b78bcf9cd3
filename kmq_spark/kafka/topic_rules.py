"""
The required settings of a queue's topics: those for their creation, and a check of existing ones.

Rule 1: no client in this module: names, counts and settings in, settings and findings out.
Rule 2: each finding names its repair.

Source: Kafka's documentation of `min.insync.replicas` and `unclean.leader.election.enable`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kmq_spark.kafka.queue_topics import QueueTopics

TopicKind = Literal["queue", "markers", "dead letters", "redrive", "producers", "coordination"]

DLQ_ROOM_BYTES = 64 * 1024
"""
How much larger the dead-letter topic's limit is than the queue topic's: a dead letter adds its reason and Kafka's six
headers.
"""

MIN_COORDINATION_RETENTION_MS = 60_000
"""A reader of the coordination topic needs a snapshot and all that lies behind it."""

POSITIONS_SEGMENT_BYTES = 16 * 1024 * 1024
"""Some 80,000 position records; a producer reads them within a second at its start."""


_DELETED = {"cleanup.policy": "delete"}
_KEPT_BY_TIME = {"retention.bytes": "-1"}
"""A cluster's `log.retention.bytes` would delete unread messages, dead letters, STARTs and ENDs before their time."""

_TIMED = {"message.timestamp.type": "LogAppendTime"}

FITS_BATCHES = {"max.message.bytes": "1048588"}
"""Kafka's default. The brokers compare whole batches of markers with it; a cluster's own may be smaller."""


def wanted_settings(
    topics: QueueTopics, replication_factor: int, retention_ms: int, queue_bytes: int
) -> dict[str, dict[str, str]]:
    """Return the settings of a queue's topics, by topic; *queue_bytes* is `max.message.bytes` of the queue topic."""
    # The append time of the markers is the only clock. With append times on the messages, lateness is measured on the
    # same clock.
    common = {**_DELETED, **_KEPT_BY_TIME, **_TIMED, **replication_settings(replication_factor)}
    kept = {"retention.ms": str(retention_ms)}
    wanted = {
        topics.queue_topic: {**common, **kept, "max.message.bytes": str(queue_bytes)},
        topics.markers_topic: {**common, **kept, **FITS_BATCHES},
        # An operator must inspect a dead letter before it may be deleted. If a dead letter did not fit, redelivery
        # would stop.
        topics.dead_letter_topic: {
            **common,
            "retention.ms": "-1",
            "max.message.bytes": str(queue_bytes + DLQ_ROOM_BYTES),
        },
        # The END of a dead letter must be kept longer than the dead letter; otherwise the dead letter would be sent
        # again.
        topics.redrive_topic: {**common, "retention.ms": "-1", **FITS_BATCHES},
    }
    if not topics.subscription:  # the positions of producers belong to the queue
        wanted[topics.producers_topic] = {
            "cleanup.policy": "compact",
            # Compaction does not touch the newest segment, and a producer reads all of it at its start.
            "segment.bytes": str(POSITIONS_SEGMENT_BYTES),
            "min.cleanable.dirty.ratio": "0.1",
            **FITS_BATCHES,
            **replication_settings(replication_factor),
        }
    return wanted


class TopicProblem(NamedTuple):
    """What is wrong with a topic, the command that repairs it, and whether its users must not start."""

    what: str
    repair: str
    is_fatal: bool = True


def partition_problems(topics: QueueTopics, counts: Mapping[str, int]) -> Iterator[TopicProblem]:
    """Yield topics that are missing and partition counts that differ; *counts* has no missing topics."""
    for name in topics.all_topics:
        if name not in counts:
            yield TopicProblem(f"topic {name!r} does not exist", f"kmq queue create {topics}")
    queue_count = counts.get(topics.queue_topic, 0)
    marker_count = counts.get(topics.markers_topic, 0)
    if queue_count and marker_count and queue_count != marker_count:
        smaller = topics.queue_topic if queue_count < marker_count else topics.markers_topic
        yield TopicProblem(
            f"topic {topics.markers_topic!r} has {marker_count} partitions, {topics.queue_topic!r} has {queue_count}, "
            "they must be equal",
            f"kafka-topics.sh --alter --topic {smaller} --partitions {max(queue_count, marker_count)}",
        )


# The append time of the markers is the clock of all leases. That of the messages gives only ages, delays and times to
# live.
REQUIRED: dict[TopicKind, dict[str, str]] = {
    "queue": _DELETED,
    "markers": _DELETED | _KEPT_BY_TIME | _TIMED,
    "dead letters": _DELETED | _KEPT_BY_TIME,
    "redrive": _DELETED | _KEPT_BY_TIME | {"retention.ms": "-1"},
    "producers": {"cleanup.policy": "compact"},
    "coordination": _DELETED | _KEPT_BY_TIME | _TIMED,
}
"""Settings on which a guarantee rests, by kind of topic."""

_WANTED: dict[TopicKind, dict[str, str]] = {"queue": _KEPT_BY_TIME | _TIMED, "dead letters": _TIMED}
"""Settings without which everything works, but not as intended."""

_WHY = {
    "message.timestamp.type": "times follow the clocks of the producers, not the broker's clock",
    "retention.bytes": "messages that nobody has read may be deleted before retention.ms is over",
}


def kinds_of(topics: QueueTopics) -> dict[str, TopicKind]:
    """Return the kind of each topic of a queue, by name."""
    return {
        topics.queue_topic: "queue",
        topics.markers_topic: "markers",
        topics.dead_letter_topic: "dead letters",
        topics.redrive_topic: "redrive",
        topics.producers_topic: "producers",
    }


def topic_problems(kind: TopicKind, name: str, settings: Mapping[str, str], replicas: int) -> Iterator[TopicProblem]:
    """Yield what is wrong with the settings of a topic; a missing setting is not checked."""
    for wanted, is_fatal in ((REQUIRED[kind], True), (_WANTED.get(kind, {}), False)):
        for key, value in wanted.items():
            if (got := settings.get(key, value)) != value:
                what = f"topic {name!r} has {key}={got}, {'must' if is_fatal else 'should'} be {value}"
                why = "" if is_fatal else f": {_WHY[key]}"
                yield TopicProblem(what + why, alter_command(name, key, value), is_fatal)
    kept_ms = int(settings.get("retention.ms", "-1"))
    if kind == "coordination" and 0 <= kept_ms < MIN_COORDINATION_RETENTION_MS:
        what = f"topic {name!r} has retention.ms={kept_ms}, must be at least {MIN_COORDINATION_RETENTION_MS}"
        yield TopicProblem(what, alter_command(name, "retention.ms", str(60 * MIN_COORDINATION_RETENTION_MS)))
    if replicas > 1:
        for key, value in replication_settings(replicas).items():
            if (got := settings.get(key, value)) != value and (key != IN_SYNC or int(got) < QUORUM):
                what = f"topic {name!r} has {key}={got} with {replicas} replicas, must be {_REPLICATION[key]}"
                yield TopicProblem(what, alter_command(name, key, value))


IN_SYNC, UNCLEAN = "min.insync.replicas", "unclean.leader.election.enable"

REPLICAS_OF_A_QUORUM, QUORUM = 3, 2
"""With three replicas or more, two must have a record before it counts as written."""

_REPLICATION = {
    IN_SYNC: f"at least {QUORUM}: a record that only one broker has is acknowledged, and lost with that broker",
    UNCLEAN: "false: a replica that lacks records may become the leader",
}


def replication_settings(replicas: int) -> dict[str, str]:
    """Return the settings on which a topic's durability depends; *replicas* is -1 if not known yet."""
    # With Kafka's default of one, a START that only one broker has may be lost with that broker. With fewer than three
    # replicas, a quorum would stop the queue at the loss of a broker.
    quorum = {IN_SYNC: str(QUORUM)} if replicas >= REPLICAS_OF_A_QUORUM else {}
    return {UNCLEAN: "false", **quorum}


def alter_command(name: str, key: str, value: str) -> str:
    """Return the command that changes a setting of a topic."""
    return f"kafka-configs.sh --alter --entity-type topics --entity-name {name} --add-config {key}={value}"
