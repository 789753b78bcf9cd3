"""
The producers of a queue that have an id: list them, forget one, verify what one has sent.

Rule 1: listing and verifying write nothing; forgetting writes one tombstone, and fences the producer first.
Rule 2: an id is never forgotten by itself: its next life would send everything again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kmq_spark.core.producing import ProducerState, check_producer_id, slot_of
from kmq_spark.core.sequences import SequenceAudit, SequenceReport
from kmq_spark.errors import KafkaClientError, KmqError, TopicError
from kmq_spark.inspection.facts import ProducersFacts
from kmq_spark.kafka.client_errors import DENIED
from kmq_spark.kafka.log_reader import all_bounds_of, read_committed
from kmq_spark.kafka.lookups import LATEST, offsets_of
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import new_client_id, reader_config, transactional_producer_config
from kmq_spark.kafka.topics import DEFAULT_TIMEOUT, partition_count
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.producer.position_log import PARTITION, Found, PositionLog
from kmq_spark.wire.headers import by_name, is_first_copy, sender_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kmq_spark.config import Reach
    from kmq_spark.inspection.cluster import Cluster

PROGRESS_EACH = 10_000

PATIENCE_S = 2.0
"""How long a read-only caller waits for an open transaction; that of a running producer takes well below a second."""


@dataclass(frozen=True, slots=True)
class Verification:
    """
    What `verify_producer` found.

    Attributes:
        state: The position record; None where the id has none.
        report: Report of the messages up to the sequence of the record; of all messages where there is no record.
        beyond: Messages with a sequence beyond the position record: another program used the id.
    """

    state: ProducerState | None
    report: SequenceReport
    beyond: int

    @property
    def is_exact(self) -> bool:
        """Whether nothing is missing, repeated, out of order or unknown to the position record."""
        return self.report.is_exact and not self.beyond


def list_producers(
    queue: str,
    *,
    bootstrap_servers: str,
    timeout: float = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
) -> list[Found]:
    """
    Return the newest record of every producer id of a queue, by id.

    Args:
        queue: Name of the queue.
        bootstrap_servers: Comma-separated `host:port`.
        timeout: Bound on each call to the broker.
        extra: librdkafka settings.

    Raises:
        ConfigError: The name is not allowed.
        TopicError: The queue does not exist.
        KafkaClientError: The broker cannot be reached in time.
    """
    return _log_of(queue, bootstrap_servers, timeout, extra).all(PATIENCE_S)


def look_at_producers(
    cluster: Cluster, topics: QueueTopics, *, retention_ms: int, now_ms: int, reach: Reach
) -> ProducersFacts | None:
    """
    Return what `kmq doctor` looks at; None where we may not read the topic of the positions.

    Args:
        cluster: Asks the brokers.
        topics: Names of the queue.
        retention_ms: After which an id counts as unused, milliseconds.
        now_ms: Epoch milliseconds.
        reach: The broker.

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
    states = [(each.key, each.state) for each in found]
    return ProducersFacts(
        topic,
        len(found),
        tuple(key for key, state in states if state is not None and now_ms - state.at_ms > retention_ms),
        tuple(key for key, state in states if state is None),
        open_ms,
    )


def forget_producer(
    queue: str,
    producer_id: str,
    *,
    dry_run: bool = True,
    bootstrap_servers: str,
    timeout: float = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
) -> Found:
    """
    Remove the position of a producer id: its next life is a first life, with no position and sequence 1.

    A running producer with this id is fenced.

    Args:
        queue: Name of the queue.
        producer_id: The id.
        dry_run: Whether nothing is written.
        bootstrap_servers: Comma-separated `host:port`.
        timeout: Bound on each call to the broker.
        extra: librdkafka settings.

    Returns:
        What was, or would be, forgotten.

    Raises:
        ConfigError: A name is not allowed.
        TopicError: The queue does not exist.
        KmqError: The queue has no such producer id.
        FencedError: A producer with this id started at the same time; nothing is forgotten.
        KafkaClientError: The broker cannot be reached in time, or refuses.
    """
    check_producer_id(producer_id)
    log = _log_of(queue, bootstrap_servers, timeout, extra)
    found = _found(log, queue, producer_id)
    if dry_run:
        return found
    config = transactional_producer_config(
        bootstrap_servers,
        _transactional_id(QueueTopics.parse(queue), producer_id),
        new_client_id("forget"),
        extra,
        transaction_timeout_ms=10_000,
    )
    transactions = TransactionalProducer(config, timeout, role="producer")
    try:
        # Read behind the fencing: what the producer has committed by now is what is forgotten.
        found = _found(log, queue, producer_id)
        transactions.run(partial(transactions.send, log.record_of(producer_id, None)), [], None)
    finally:
        transactions.close()
    return found


def verify_producer(
    queue: str,
    producer_id: str,
    *,
    bootstrap_servers: str,
    timeout: float = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
    on_progress: Callable[[int], None] = lambda _count: None,
) -> Verification:
    """
    Read the queue topic and check the sequence of a producer: holes, repeats, order.

    Redeliveries and redriven messages are other copies of a message and do not count.

    Args:
        queue: Name of the queue.
        producer_id: The id.
        bootstrap_servers: Comma-separated `host:port`.
        timeout: Bound on each call to the broker, and on how long nothing may arrive.
        extra: librdkafka settings.
        on_progress: Called with the number of records read so far, now and then.

    Raises:
        ConfigError: A name is not allowed.
        TopicError: The queue does not exist.
        WireError: The position record of the id cannot be read.
        KafkaClientError: The broker cannot be reached in time.
    """
    check_producer_id(producer_id)
    log = _log_of(queue, bootstrap_servers, timeout, extra)
    topics = QueueTopics.parse(queue)
    # In this order: every message up to the record's sequence was committed before the topic's end is looked up.
    state = log.newest(producer_id) if log.exists() else None
    topic = topics.queue_topic
    partitions = range(partition_count(log.admin, topic, bootstrap_servers, timeout))
    config = reader_config(bootstrap_servers, f"{topics.consumer_group}.producers", new_client_id("verify"), extra)
    bounds = all_bounds_of(config, topic, partitions, timeout)
    audit = SequenceAudit(frozenset(number for number, each in bounds.items() if each.first > 0))
    later: list[int] = []
    for count, record in enumerate(read_committed(config, topic, partitions, timeout), 1):
        if count % PROGRESS_EACH == 0:
            on_progress(count)
        headers = by_name(record.headers())  # type: ignore[arg-type]  # the stub allows what may be sent; this was read
        sender = sender_of(headers)
        if sender is None or sender.producer_id != producer_id or not is_first_copy(headers):
            continue
        if state is not None and sender.sequence > state.sequence:
            later.append(sender.sequence)
        else:
            audit.add(record.partition() or 0, sender.generation, sender.sequence)
    newest = log.newest(producer_id) if later else None
    beyond = sum(newest is None or sequence > newest.sequence for sequence in later)
    return Verification(state, audit.report(0 if state is None else state.sequence), beyond)


def _log_of(queue: str, bootstrap_servers: str, timeout: float, extra: Mapping[str, str] | None) -> PositionLog:
    topics = QueueTopics.parse(queue)
    log = PositionLog(topics, bootstrap_servers, timeout, extra)
    if not partition_count(log.admin, topics.queue_topic, bootstrap_servers, timeout):
        message = f"queue {queue!r} has no topic {topics.queue_topic!r}; see `kmq queue list`"
        raise TopicError(message)
    return log


def _transactional_id(topics: QueueTopics, producer_id: str) -> str:
    slot = slot_of(producer_id)
    return topics.producer_transactional_id(producer_id) if slot is None else topics.sink_transactional_id(*slot)


def _found(log: PositionLog, queue: str, producer_id: str) -> Found:
    found = next((each for each in log.all() if each.key == producer_id), None)
    if found is None:
        message = f"queue {queue!r} has no producer {producer_id!r}: `kmq producer list {queue}` shows what there is"
        raise KmqError(message)
    return found
