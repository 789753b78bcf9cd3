"""What can be wrong with the resuming producers of a queue."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.errors import KafkaClientError
from kmq_spark.inspection.facts import ProducersFacts
from kmq_spark.inspection.spans import counted, span
from kmq_spark.kafka.client_errors import DENIED
from kmq_spark.kafka.lookups import LATEST, offsets_of
from kmq_spark.kafka.settings import BULK_TRANSACTION_TIMEOUT_MS
from kmq_spark.kafka.topic_rules import alter_command, replication_findings
from kmq_spark.producer.position_log import PARTITION, PositionLog
from kmq_spark.producer.registry import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark.config import Reach
    from kmq_spark.inspection.cluster import Cluster
    from kmq_spark.kafka.queue_topics import QueueTopics

MAX_LISTED = 3
"""Maximum number of ids listed in a finding."""


class Problem(NamedTuple):
    """What is wrong, whether it is bad now, and its repair."""

    what: str
    is_bad: bool
    repair: str


def look_at_producers(cluster: Cluster, topics: QueueTopics, reach: Reach) -> ProducersFacts | None:
    """
    Return what `kmq doctor` looks at; None where we may not read the topic of the positions.

    Raises:
        KafkaClientError: The broker cannot be reached in time.
    """
    (topic,) = cluster.topics([topics.producers_topic]).values()
    if not topic.partition_count:
        return ProducersFacts(topic)
    began_s = time.monotonic()
    (end,) = offsets_of(
        cluster.admin, topic.name, [PARTITION], LATEST, reach["timeout"], with_open_transactions=True
    ).values()
    try:
        found = PositionLog(topics, **reach).all(PATIENCE_S)
    except KafkaClientError as error:
        if error.code in DENIED:
            return None
        raise
    (stable,) = cluster.offsets(topic.name, [PARTITION], LATEST).values()
    open_ms = round(1000 * (time.monotonic() - began_s)) if stable < end else 0
    return ProducersFacts(topic, len(found), tuple(each.key for each in found if each.state is None), open_ms)


def producers_problems(facts: ProducersFacts, queue: str, longest_transaction_ms: int = 0) -> Iterator[Problem]:
    """
    Yield what is wrong.

    Args:
        facts: As the inspector found them.
        queue: Name of the queue, for the commands.
        longest_transaction_ms: The brokers' `transaction.max.timeout.ms`; 0 if unknown.
    """
    if 0 < longest_transaction_ms < BULK_TRANSACTION_TIMEOUT_MS:
        yield Problem(
            f"the brokers have transaction.max.timeout.ms={longest_transaction_ms}: sinks and "
            f"`kmq dlq redrive` request {BULK_TRANSACTION_TIMEOUT_MS} and cannot start",
            is_bad=False,
            repair=f"set transaction.max.timeout.ms={BULK_TRANSACTION_TIMEOUT_MS} or more on the brokers",
        )
    name = facts.topic.name
    if not facts.topic.partition_count:
        return
    if (policy := facts.topic.settings.get("cleanup.policy", "compact")) != "compact":
        yield Problem(
            f"{name} has cleanup.policy={policy}, must be compact: a producer whose position is removed sends "
            "everything again",
            is_bad=True,
            repair=alter_command(name, "cleanup.policy", "compact"),
        )
    for what, repair in replication_findings(name, facts.topic.settings, facts.topic.replicas):
        yield Problem(f"{name} {what}", is_bad=True, repair=repair)
    if facts.unreadable:
        yield Problem(
            f"the position of {_some(facts.unreadable)} cannot be read: no producer with this id can start",
            is_bad=True,
            repair=f"upgrade its program, or remove the position: kmq producer forget {queue} {facts.unreadable[0]}",
        )
    if facts.open_for_ms:
        yield Problem(
            f"a transaction has been open in {name} for at least {span(facts.open_for_ms)}: a producer that starts "
            "waits for it, and so do the consumers of the partitions that it wrote to",
            is_bad=False,
            repair="start its producer again, or wait for its transaction.timeout.ms; "
            "kafka-transactions.sh find-hanging",
        )


def producers_summary(facts: ProducersFacts) -> str:
    """Return what is said where there are some and nothing is wrong."""
    return f"{counted(facts.ids, 'producer id')}, positions in a compacted topic"


def _some(ids: tuple[str, ...]) -> str:
    return ", ".join(ids[:MAX_LISTED]) + (f" and {len(ids) - MAX_LISTED} more" if len(ids) > MAX_LISTED else "")
