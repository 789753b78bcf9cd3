"""Forged markers in a topic that several clients may write to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from kmq_spark.config import Settings, load_settings
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.tracker.once import track_once
from kmq_spark.wire.codec import encode_marker
from tests.kafka.conftest import consumer_of, read_all, receive_all, seen

if TYPE_CHECKING:
    from tests.kafka.conftest import Queue

pytestmark = pytest.mark.kafka

LEASE_MS = 1_000


def settings_of(queue: Queue) -> Settings:
    """Return the settings of a tracker."""
    return load_settings(None, {"kafka": {"bootstrap_servers": queue.bootstrap_servers}})


def write(queue: Queue, *markers: Marker) -> None:
    """Write markers as any client with Write on the topic can."""
    producer = Producer({"bootstrap.servers": queue.bootstrap_servers})
    for marker in markers:
        producer.produce(f"{queue.name}.markers", encode_marker(marker), partition=0)
    assert producer.flush(10) == 0


def drop(queue: Queue, count: int) -> None:
    """Take messages and let their leases run out."""
    with consumer_of(queue, lease=LEASE_MS / 1000, max_lease=LEASE_MS / 1000) as consumer:
        receive_all(consumer, count)
        time.sleep(1.5 * LEASE_MS / 1000)


def test_messages_that_do_not_exist_make_no_dead_letters(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """A START of 30 bytes may name 100,000 messages; those in the topic are redelivered as usual."""
    queue.send("a")
    write(queue, Marker(MarkerType.START, 0, (OffsetRange(0, 5_000),), redeliver_after_ms=1))
    time.sleep(0.1)
    assert [track_once(queue.name, settings_of(queue)).redelivered for _ in range(2)] == [1, 0]
    assert read_all(queue.bootstrap_servers, f"{queue.name}.dlq") == []
    assert seen(queue) == [b"a", b"a"]
    assert "name offsets that the queue topic does not have" in caplog.text
