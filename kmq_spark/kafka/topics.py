"""
Create and check the topics of a queue.

Rule 1: creation is idempotent and never changes an existing topic. The check reports every finding, each with its
repair.
Rule 2: a client without the right DescribeConfigs gets the part of the check that needs only the existence of topics.
"""

from __future__ import annotations

import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from kmq_spark.core.durations import seconds
from kmq_spark.errors import ConfigError, TopicError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.client_errors import answer_of, client_error, unreachable
from kmq_spark.kafka.lookups import broker_settings, settings_of
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import MAX_MESSAGE_BYTES, admin_config, make_client
from kmq_spark.kafka.topic_rules import kinds_of, partition_problems, topic_problems, wanted_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

_RESERVED = re.compile(
    r"\.(?:(?:tracker|redrive|outcomes|consumer|producer|producers|sink|markers|dlq)(?:\.|$)|(?:subscription|queue|ledger)-)"
)
"""
Parts of a name that could collide with the names of another queue's topics, groups or transactional ids.

Example: the consumers of a queue `orders.tracker` would be in the consumer group of the tracker of `orders`.
"""

logger = logging.getLogger(__name__)

SEVEN_DAYS_S = 7 * 24 * 60 * 60

DEFAULT_TIMEOUT = 15.0

HEADER_ROOM_BYTES = 16 * 1024
"""How much larger the queue topic's limit is than a producer's largest message: a redelivery adds `kmq-*` headers."""

NEW_SETTINGS_S = 5.0
"""How long the brokers of a cluster may take to learn of new topics and settings."""


@dataclass(frozen=True, slots=True)
class QueueLayout:
    """
    The result of a successful check.

    Attributes:
        max_message_bytes: The queue topic's `max.message.bytes`; 0 if this client may not read it.
        retention_ms: The markers topic's `retention.ms`, -1 for no limit; 0 if this client may not read it.
        redrive_partition_count: Partitions of the redrive topic; 0 if it does not exist.
    """

    topics: QueueTopics
    partition_count: int
    dead_letter_partition_count: int
    max_message_bytes: int = 0
    retention_ms: int = 0
    redrive_partition_count: int = 0


def create_queue_topics(
    queue: str,
    *,
    bootstrap_servers: str,
    partitions: int = 4,
    replication_factor: int = -1,
    retention: float | timedelta = SEVEN_DAYS_S,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
    is_exact: bool = False,
) -> QueueLayout:
    """Create the topics of a queue that do not exist, and check all of them; see `create_queue`."""
    topics = QueueTopics.parse(queue)
    timeout = seconds("timeout", timeout)
    if not 1 <= partitions <= 32_768:  # noqa: PLR2004  # MAX_QUEUE_PARTITION + 1, said in the message
        raise ConfigError(f"partitions is out of bounds: got {partitions!r}; expected 1 to 32768; correct --partitions")
    admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))
    known = _shapes(admin, topics, bootstrap_servers, timeout)
    _check_new_names(topics, known)
    if topics.queue_topic in known:
        wanted, partitions = partitions, known[topics.queue_topic].partitions
        if is_exact:
            _check_partitions(topics, partitions, wanted)
        shared = settings_of(admin, [topics.queue_topic], timeout).get(topics.queue_topic, {})
        queue_bytes = int(shared.get("max.message.bytes", max_message_bytes))
    else:
        queue_bytes = max_message_bytes + HEADER_ROOM_BYTES
    replicas = replicas_of_new(admin, replication_factor, timeout)
    configs = wanted_settings(topics, replicas, round(seconds("retention", retention) * 1000), queue_bytes)
    counts = dict.fromkeys(configs, partitions) | {topics.producers_topic: 1}
    if topics.dead_letter_topic in known:
        counts[topics.redrive_topic] = known[topics.dead_letter_topic].partitions
    missing = [
        NewTopic(name, counts[name], replication_factor, config=configs[name]) for name in configs if name not in known
    ]
    until = time.monotonic()
    if missing:
        create_topics(admin, missing, timeout)
        until = time.monotonic() + NEW_SETTINGS_S
    while True:
        try:
            return check_queue(queue, bootstrap_servers=bootstrap_servers, timeout=timeout, extra=extra)
        except TopicError:
            # Each broker learns of new topics and settings at a different time, and any broker may respond.
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def check_queue(
    queue: str,
    *,
    bootstrap_servers: str,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
) -> QueueLayout:
    """
    Check that a queue's topics exist and have the settings that the queue needs.

    Args:
        queue: Name of the queue, or `queue@subscription`.
        bootstrap_servers: Comma-separated `host:port`.
        timeout: Timeout of each request to the broker, seconds or a timedelta.
        extra: librdkafka settings.

    Returns:
        The layout of the queue.

    Raises:
        ConfigError: The name of the queue is not allowed.
        TopicError: Something is not correct; the message contains every finding and the command that repairs it.
        KafkaClientError: The broker cannot be reached.
    """
    topics = QueueTopics.parse(queue)
    timeout = seconds("timeout", timeout)
    admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))
    shapes = _shapes(admin, topics, bootstrap_servers, timeout)
    counts = {name: shape.partitions for name, shape in shapes.items()}
    replicas = {name: shape.replicas for name, shape in shapes.items()}
    configs = settings_of(admin, counts, timeout)
    problems = [*partition_problems(topics, counts)]
    for name, kind in kinds_of(topics).items():
        problems += topic_problems(kind, name, configs.get(name, {}), replicas.get(name, 0))
    findings = [f"{problem.what}; run `{problem.repair}`" for problem in problems if problem.is_fatal]
    if findings:
        raise TopicError(f"queue {queue!r} is not set up correctly: " + "; ".join(findings))
    for problem in problems:
        logger.warning("%s; run `%s`", problem.what, problem.repair, extra={"action": "topic_warning", "queue": queue})
    return QueueLayout(
        topics=topics,
        partition_count=counts[topics.queue_topic],
        dead_letter_partition_count=counts[topics.dead_letter_topic],
        max_message_bytes=int(configs.get(topics.queue_topic, {}).get("max.message.bytes", "0")),
        retention_ms=int(configs.get(topics.markers_topic, {}).get("retention.ms", "0")),
        redrive_partition_count=counts.get(topics.redrive_topic, 0),
    )


class TopicShape(NamedTuple):
    """Size of a topic: its partitions, and the replicas of its first partition; both 0 if it does not exist."""

    partitions: int
    replicas: int


def shape_of(client: Any, topic: str, bootstrap_servers: str, timeout: float) -> TopicShape:  # noqa: ANN401  # below
    """Return the size of a topic, asked with any client that has `list_topics`: they have no common type."""
    try:
        metadata = client.list_topics(topic, timeout=timeout).topics.get(topic)
    except KafkaException as error:
        raise unreachable(error, client, bootstrap_servers) from error
    if metadata is None or metadata.error is not None or not metadata.partitions:
        return TopicShape(0, 0)
    return TopicShape(len(metadata.partitions), len(metadata.partitions[min(metadata.partitions)].replicas))


def create_topics(admin: AdminClient, missing: Sequence[NewTopic], timeout: float) -> None:
    """Create topics. One that another process creates at the same time is no error: the caller checks it afterwards."""
    futures = admin.create_topics(list(missing), operation_timeout=timeout, request_timeout=timeout)
    for name, future in futures.items():
        try:
            answer_of(future, timeout)
        except KafkaException as error:
            if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                raise client_error(error, f"cannot create topic {name}") from error
        failpoint("queue.topic-created")


def replicas_of_new(admin: AdminClient, replication_factor: int, timeout: float) -> int:
    """Return how many replicas a new topic gets; -1 if it is the brokers' default and this client may not read it."""
    if replication_factor > 0:
        return replication_factor
    try:
        brokers = [node.id for node in answer_of(admin.describe_cluster(request_timeout=timeout), timeout).nodes]
    except KafkaException:
        return -1
    return int(broker_settings(admin, brokers, timeout).get("default.replication.factor", -1))


def ensure_compacted_topic(
    name: str, replication_factor: int, admin: AdminClient, bootstrap_servers: str, timeout: float
) -> None:
    """Create a compacted topic with one partition if it does not exist."""
    if partition_count(admin, name, bootstrap_servers, timeout):
        return
    create_topics(admin, [NewTopic(name, 1, replication_factor, config={"cleanup.policy": "compact"})], timeout)
    until = time.monotonic() + timeout
    while not partition_count(admin, name, bootstrap_servers, timeout) and time.monotonic() < until:
        time.sleep(0.05)


def partition_count(client: Any, topic: str, bootstrap_servers: str, timeout: float) -> int:  # noqa: ANN401  # below
    """Return the number of partitions of a topic; 0 if it does not exist."""
    return shape_of(client, topic, bootstrap_servers, timeout).partitions


def _check_new_names(topics: QueueTopics, known: Mapping[str, object]) -> None:
    """Reject a new name that could collide with another queue's names; an existing queue stays usable."""
    is_new = {"subscription": topics.markers_topic not in known, "queue": topics.queue_topic not in known}
    for what, name in (("queue", topics.queue), ("subscription", topics.subscription)):
        if is_new[what] and (found := _RESERVED.search(name)) is not None:
            message = (
                f"{what} name is reserved: got {name!r}, a name without {found[0]!r}, which kmq-spark puts into the "
                "names of topics and groups; choose another name"
            )
            raise ConfigError(message)


def _check_partitions(topics: QueueTopics, has: int, wanted: int) -> None:
    if has == wanted:
        return
    hint = f"leave out --partitions: Kafka cannot remove partitions from {topics.queue!r}"
    if wanted > has:
        grow = " and then ".join(
            f"`kafka-topics.sh --alter --topic {topic} --partitions {wanted}`"
            for topic in (topics.markers_topic, topics.queue_topic)
        )
        hint = f"leave out --partitions, or add them with {grow}"
    raise TopicError(
        f"queue {topics.queue!r} exists with another number of partitions: got {wanted}; expected {has}; {hint}"
    )


def _shapes(admin: AdminClient, topics: QueueTopics, bootstrap_servers: str, timeout: float) -> dict[str, TopicShape]:
    """Return the topics of a queue that exist."""
    names = (*topics.all_topics, topics.redrive_topic, topics.producers_topic)
    # The first one alone, because it also shows whether the broker can be reached. The others all at once: in a slow
    # network the round trips add up, and a tracker asks before each start.
    first, *others = names
    shapes = {first: shape_of(admin, first, bootstrap_servers, timeout)}
    with ThreadPoolExecutor(len(others), "kmq-topics") as pool:
        found = pool.map(lambda name: shape_of(admin, name, bootstrap_servers, timeout), others)
        shapes |= dict(zip(others, found, strict=True))
    return {name: shape for name, shape in shapes.items() if shape.partitions}
