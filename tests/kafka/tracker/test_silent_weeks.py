"""A group whose offsets have expired, as after a week of silence, and topics that were created again meanwhile."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.errors import KmqError
from kmq_spark.kafka.settings import admin_config
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.tracker.once import track_once
from tests.brokers import quick_broker
from tests.kafka.conftest import Queue
from tests.kafka.stage import Stage, receive_all, wait_until
from tests.kafka.tracker.senders import new_sender
from tests.kafka.tracker.test_redelivery_sender import Place, outcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.kafka

FORGETFUL = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "1000"}
EXPIRED_S = 150.0


@pytest.fixture(scope="module")
def forgetful_broker() -> Iterator[EmbeddedBroker]:
    """A broker that forgets a group's offsets after a minute."""
    with quick_broker(extra=FORGETFUL) as broker:
        yield broker


def new_queue(broker: EmbeddedBroker, what: str) -> tuple[str, Place]:
    """Return a queue of one partition."""
    name = f"{what}-{time.time_ns()}"
    servers = broker.bootstrap_servers
    return name, Place(servers, create_queue_topics(name, bootstrap_servers=servers, partitions=1))


def tracker_positions(place: Place) -> dict[int, int]:
    """Return what the tracker's group has committed."""
    topics = place.layout.topics
    queue = Queue(topics.markers_topic, place.bootstrap_servers)
    return queue.committed(topics.tracker_group)


def remove_markers(place: Place) -> None:
    """Remove every marker, as retention does."""
    admin = AdminClient(admin_config(place.bootstrap_servers))
    topic = place.layout.topics.markers_topic
    for future in admin.delete_records([TopicPartition(topic, 0, -1)]).values():
        future.result()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_silent_weeks(forgetful_broker: EmbeddedBroker, spark: SparkSession, tmp_path: Path) -> None:
    """
    Offsets of an idle tracker that runs do not expire, those of a dead one do; then no marker is skipped silently.

    One test, since each part waits for the same minute.
    """
    _, living = new_queue(forgetful_broker, "living")
    sender = living.sender(commit_interval=1)
    sender.deliver([outcome(next_offset=7, needed_offset=7)])
    ending = threading.Event()

    def stay_idle() -> None:
        while not ending.wait(1.0):
            sender.tend({0: 7})

    idle = threading.Thread(target=stay_idle)
    idle.start()
    gone_name, gone = new_queue(forgetful_broker, "gone")
    gone.sender().close()
    stage = Stage(spark, forgetful_broker.bootstrap_servers, tmp_path, f"resumed-{time.time_ns()}")
    resumed = Place(stage.bootstrap_servers, stage.layout)
    try:
        with stage.consumer(lease=10) as consumer, stage.tracking() as tracker:
            stage.send("held")
            receive_all(consumer, 1)
            assert wait_until(lambda: sum(s.in_flight for s in tracker.stats.statuses.values()) == 1)
        assert wait_until(lambda: not tracker_positions(gone) and not tracker_positions(resumed), EXPIRED_S)
        assert tracker_positions(living) == {0: 7}
    finally:
        ending.set()
        idle.join()
    # The checkpoint is of the same topic: what it holds is still in flight, and is redelivered.
    # The offsets of the consumers have expired as well: a new one reads the first copy, too, and would renew its lease.
    with stage.tracking() as tracker:
        assert wait_until(lambda: tracker.stats.redelivered == 1)
    with stage.consumer() as consumer:
        counts: set[int] = set()

        def has_the_copy() -> bool:
            counts.update(message.delivery_count for message in consumer.receive(10, 0.5))
            return 2 in counts

        assert wait_until(has_the_copy), counts
    assert not list((tmp_path / "checkpoint").glob("*.damaged-*"))
    # Markers were removed and nothing says that a tracker had read them: refused, at the second start too.
    gone.send(b"lost")
    with QueueConsumer(gone_name, bootstrap_servers=gone.bootstrap_servers, lease=10) as consumer:
        receive_all(consumer, 1)
    remove_markers(gone)
    for _ in range(2):
        with pytest.raises(KmqError, match=r"no committed offset.*FAIL_ON_REMOVED_MARKERS=false"):
            track_once(gone_name, stage.settings())
    track_once(gone_name, stage.settings(fail_on_removed_markers=False))
    track_once(gone_name, stage.settings())


def test_topic_made_anew_under_a_living_tracker_is_reported_by_its_id(bootstrap_servers: str) -> None:
    """The old tracker commits its offset for the new topic, which is longer: only the topic id shows the difference."""
    name = f"anew-{time.time_ns()}"
    place = Place(bootstrap_servers, create_queue_topics(name, bootstrap_servers=bootstrap_servers, partitions=1))
    topics = place.layout.topics
    write(place, 5)
    old = place.sender(commit_interval=0)
    old.deliver([outcome(next_offset=5, needed_offset=5)])
    admin = AdminClient(admin_config(bootstrap_servers))
    for future in admin.delete_topics(list(topics.all_topics)).values():
        future.result()
    assert wait_until(lambda: topics.queue_topic not in admin.list_topics(timeout=10).topics)
    create_queue_topics(name, bootstrap_servers=bootstrap_servers, partitions=1)
    write(place, 20)
    old.tend({0: 5})
    sender = new_sender(place.layout, bootstrap_servers)
    try:
        resume = sender.open()
    finally:
        sender.close()
        place.close()
    assert resume.is_other_topic
    assert dict(resume.starting_offsets) == {0: 0}


def write(place: Place, count: int) -> None:
    """Write records to the markers topic."""
    client = Producer({"bootstrap.servers": place.bootstrap_servers})
    for _ in range(count):
        client.produce(place.layout.topics.markers_topic, b"?")
    client.flush(10)
