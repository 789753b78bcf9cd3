"""What the tests of the client side share: queues of their own, and a look into a topic."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions

from kmq_spark.config import Settings, load_settings
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.consumer.message import Message
from kmq_spark.coordination import create_coordination_topic
from kmq_spark.core.markers import Marker, MarkerType, Outcome
from kmq_spark.errors import KmqError
from kmq_spark.kafka.log_reader import read_committed
from kmq_spark.kafka.settings import reader_config
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.producer.producer import QueueProducer
from kmq_spark.tracker.once import track_once
from kmq_spark.wire.codec import decode_marker
from tests.limits import COMES_S

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from kmq_spark.tracker.stats import TrackerStats
    from tests.kafka.stage import Stage

_numbers = itertools.count()


class MarkerRecord(NamedTuple):
    """A record of a markers topic."""

    marker_partition: int
    appended_at_ms: int
    marker: Marker


class Queue:
    """A queue of one test, with what was written to its topics."""

    def __init__(self, name: str, bootstrap_servers: str) -> None:
        self.name = name
        self.bootstrap_servers = bootstrap_servers

    def send(self, *values: str, **options: Any) -> None:
        """Send messages and wait for them."""
        with QueueProducer(self.name, bootstrap_servers=self.bootstrap_servers) as producer:
            for value in values:
                producer.send(value, **options)

    def markers(self, *types: MarkerType) -> list[MarkerRecord]:
        """Return the markers written so far, of some types or of all, a partition after the other."""
        found = [
            MarkerRecord(record.partition(), record.timestamp()[1], decode_marker(record.value()))
            for record in read_all(self.bootstrap_servers, f"{self.name}.markers")
        ]
        return [each for each in found if not types or each.marker.type in types]

    def committed(self, group: str = "") -> dict[int, int]:
        """Return the positions that the consumers have committed, by partition."""
        client = Consumer(reader_config(self.bootstrap_servers, group or f"kmq.{self.name}"))
        partitions = client.list_topics(self.name, timeout=10).topics[self.name].partitions
        positions = client.committed([TopicPartition(self.name, number) for number in partitions], timeout=10)
        client.close()
        return {each.partition: each.offset for each in positions if each.offset >= 0}


def read_all(bootstrap_servers: str, topic: str) -> list[Any]:
    """Return every record of a topic, a partition after the other."""
    config = reader_config(bootstrap_servers, "kmq-tests-reader")
    client = Consumer(config)
    partition_count = len(client.list_topics(topic, timeout=10).topics[topic].partitions)
    client.close()
    # A commit returns before its readers see it; a transaction that a test leaves open is not waited for, for long.
    records = list(read_committed(config, topic, range(partition_count), patience_s=3))
    return sorted(records, key=lambda record: (record.partition(), record.offset()))


def sender_of(record: Any) -> str:  # noqa: ANN401  # as the client gives it
    """Return id, generation and sequence that a message has from its resuming producer; empty where it has none."""
    headers = dict(record.headers() or ())
    names = ("kmq-producer", "kmq-generation", "kmq-sequence")
    return " ".join(headers[name].decode() for name in names if name in headers)


def consumer_of(queue: Queue, /, **options: Any) -> QueueConsumer:
    """Return a consumer of a queue."""
    return QueueConsumer(queue.name, bootstrap_servers=queue.bootstrap_servers, **options)


def receive_all(consumer: QueueConsumer, count: int, max_messages: int = 100) -> list[Message]:
    """Receive until there are as many as asked for."""
    found: list[Message] = []
    until = time.monotonic() + COMES_S
    while len(found) < count and time.monotonic() < until:
        found += consumer.receive(min(max_messages, count - len(found)), timeout=0.5)
    assert len(found) == count
    return found


def covered(*markers: Marker) -> list[int]:
    """Return the message offsets that markers cover, sorted."""
    return sorted(first + step for marker in markers for first, count in marker.ranges for step in range(count))


def wait_until(condition: Callable[[], bool], timeout: float = COMES_S) -> bool:
    """Wait for a condition. Its first yes counts: asked again, another broker may not have the answer yet."""
    until = time.monotonic() + timeout
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return holds


def write_markers(queue: Queue, *values: bytes) -> None:
    """Append records to partition 0 of the markers topic, as another program would."""
    producer = Producer({"bootstrap.servers": queue.bootstrap_servers})
    for value in values:
        producer.produce(f"{queue.name}.markers", value, partition=0)
        producer.poll(0)
    assert producer.flush(10) == 0


def settings_of(queue: Queue, **tracker: object) -> Settings:
    """Return the settings of a tracker."""
    return load_settings(None, {"kafka": {"bootstrap_servers": queue.bootstrap_servers}, "tracker": tracker})


def track(queue: Queue, **tracker: object) -> TrackerStats:
    """Redeliver or dead-letter what is due, once."""
    return track_once(queue.name, settings_of(queue, **tracker))


@contextmanager
def tracked(queue: Queue) -> Iterator[None]:
    """Redeliver what is due, until the block ends."""
    is_over = threading.Event()

    def keep_tracking() -> None:
        while not is_over.wait(0.2):
            try:
                track(queue)
            except KmqError as error:  # a loaded broker answers too late; the next run goes on
                if not error.retriable:
                    raise

    tracker = threading.Thread(target=keep_tracking)
    tracker.start()
    try:
        yield
    finally:
        is_over.set()
        tracker.join()


def ack(messages: list[Message]) -> list[int]:
    """Acknowledge messages; return their offsets."""
    for message in messages:
        message.ack()
    return [message.id.message_offset for message in messages]


def given_back(queue: Queue) -> list[int]:
    """Return the message offsets that were released without counting the delivery."""
    releases = [each.marker for each in queue.markers(MarkerType.KEEPALIVE)]
    return [offset for each in releases if each.never_handed_out for offset in covered(each)]


def drop(queue: Queue, count: int) -> None:
    """Take messages and let their leases run out."""
    with consumer_of(queue, lease=1, max_lease=1) as consumer:
        receive_all(consumer, count)
        time.sleep(1.5)


def remove_markers(queue: Queue) -> None:
    """Remove every marker, as retention does."""
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(f"{queue.name}.markers", 0, -1)]).values():
        future.result(10)


@contextmanager
def open_transaction(queue: Queue, topic: str) -> Iterator[None]:
    """Keep a transaction of somebody else open in partition 0 of a topic until the block ends."""
    producer = Producer(
        {"bootstrap.servers": queue.bootstrap_servers, "transactional.id": f"{topic}.{queue.name}.open"}
    )
    producer.init_transactions(COMES_S)
    producer.begin_transaction()
    producer.produce(topic, b"", b"foreign", partition=0)
    assert producer.flush(COMES_S) == 0
    try:
        yield
    finally:
        producer.abort_transaction(COMES_S)


@contextmanager
def stopped_if_it_hangs(consumer: QueueConsumer) -> Iterator[None]:
    """Stop the run of a consumer in a block where it does not end by itself."""
    timer = threading.Timer(COMES_S, consumer.stop)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def seen(topic: Queue) -> list[bytes]:
    """Return what a reader of committed records sees."""
    return [record.value() for record in read_all(topic.bootstrap_servers, topic.name)]


def ended(queue: Queue, outcome: Outcome | None = None) -> list[int]:
    """Return the offsets of the messages that have an END a tracker sees, of one outcome or of any."""
    found = [each.marker for each in queue.markers(MarkerType.END)]
    return covered(*(marker for marker in found if outcome in {None, marker.outcome}))


def set_topic(bootstrap_servers: str, topic: str, key: str, value: object) -> None:
    """Set a setting of a topic, and wait until the broker shows it."""
    entry = ConfigEntry(key, str(value), incremental_operation=AlterConfigOpType.SET)
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    resource = ConfigResource("topic", topic, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(20)

    def is_shown() -> bool:
        (found,) = admin.describe_configs([ConfigResource("topic", topic)]).values()
        return bool(found.result(20)[key].value == str(value))

    assert wait_until(is_shown)


def delete_topics(bootstrap_servers: str, *topics: str) -> None:
    """Delete topics, and wait until they are gone."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for future in admin.delete_topics(list(topics)).values():
        future.result(10)
    assert wait_until(lambda: admin.list_topics(timeout=10).topics.keys().isdisjoint(topics))


def add_partitions(bootstrap_servers: str, count: int, *topics: str) -> None:
    """Let topics have so many partitions."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for future in admin.create_partitions([NewPartitions(topic, count) for topic in topics]).values():
        future.result(10)


@pytest.fixture
def make_queue(bootstrap_servers: str) -> Callable[..., Queue]:
    """Make queues with names of their own."""

    def make(partitions: int = 1) -> Queue:
        name = f"client-{os.getpid()}-{next(_numbers)}"
        create_queue_topics(name, bootstrap_servers=bootstrap_servers, partitions=partitions)
        return Queue(name, bootstrap_servers)

    return make


@pytest.fixture(scope="module")
def topic(bootstrap_servers: str) -> str:
    """A coordination topic of this module."""
    name = f"coordination-{os.getpid()}-{time.time_ns()}"
    create_coordination_topic(bootstrap_servers, topic=name, partitions=2, replication_factor=1)
    return name


@pytest.fixture
def queue(make_queue: Callable[..., Queue]) -> Queue:
    """A queue of one partition."""
    return make_queue()


@pytest.fixture
def results(make_queue: Callable[..., Queue]) -> Queue:
    """A queue that takes the results of another."""
    return make_queue()


@pytest.fixture
def stage(spark: SparkSession, bootstrap_servers: str, tmp_path: Path, request: pytest.FixtureRequest) -> Stage:
    """A fresh queue named after the test, with a place for trackers."""
    from tests.kafka.stage import Stage as NewStage  # noqa: PLC0415  # the clients' tests run without Spark

    return NewStage(spark, bootstrap_servers, tmp_path, f"{request.node.originalname[:60]}.{time.time_ns()}")
