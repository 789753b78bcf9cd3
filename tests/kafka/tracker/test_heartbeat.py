"""The state that a tracker's offset commits carry: a heartbeat while it is idle, a stop mark when it was stopped."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, TopicPartition

from kmq_spark.kafka.positions import Heartbeat
from kmq_spark.kafka.settings import reader_config
from kmq_spark.kafka.topics import create_queue_topics
from tests.kafka.tracker.test_redelivery_sender import Place, outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.kafka


@pytest.fixture
def place(bootstrap_servers: str) -> Iterator[Place]:
    """A queue of one partition."""
    name = f"heartbeat-{time.time_ns()}"
    place = Place(bootstrap_servers, create_queue_topics(name, bootstrap_servers=bootstrap_servers, partitions=1))
    yield place
    place.close()


def heartbeat(place: Place) -> Heartbeat:
    """Return what the tracker's group has committed."""
    client = Consumer(reader_config(place.bootstrap_servers, place.layout.topics.tracker_group))
    (found,) = client.committed([TopicPartition(place.layout.topics.markers_topic, 0)], timeout=10)
    client.close()
    status = Heartbeat.from_topic_partition(found)
    assert status is not None
    return status


def test_idle_tracker_leaves_a_heartbeat_where_nothing_moves(place: Place) -> None:
    sender = place.sender(commit_interval=0)
    sender.deliver([outcome(next_offset=7, needed_offset=7)])
    first = heartbeat(place)
    time.sleep(0.01)
    sender.tend({0: 7})
    second = heartbeat(place)
    assert second.at_ms > first.at_ms
    assert (second.in_flight, second.is_stopped) == (0, False)


def test_last_commit_is_marked_as_a_stop_only_after_a_clean_stop(place: Place) -> None:
    failed = place.sender()
    failed.close()
    assert not heartbeat(place).is_stopped
    stopped = place.sender()
    stopped.close(is_stopped=True)
    assert heartbeat(place).is_stopped
    place.sender()
    assert not heartbeat(place).is_stopped
