"""Forged markers in a topic that several clients may write to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from kmq_spark.config import Settings, load_settings
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange, Outcome
from kmq_spark.core.policy import QueueRules
from kmq_spark.kafka.topics import check_queue
from kmq_spark.tracker.once import track_once
from kmq_spark.tracker.parts import sender_of
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
    with consumer_of(queue, lease_ms=LEASE_MS, keep_alive=False) as consumer:
        receive_all(consumer, count)
        time.sleep(1.5 * LEASE_MS / 1000)


def key_of(queue: Queue) -> bytes:
    """Return the key by which trackers of a queue sign, as the next one finds it."""
    sender = sender_of(settings_of(queue), queue.name, check_queue(queue.name, **settings_of(queue).kafka.reach()))
    try:
        return sender.open().key
    finally:
        sender.close()


@pytest.mark.parametrize("outcome", [Outcome.REDELIVERED, Outcome.DEAD_LETTERED])
def test_forged_end_of_a_tracker_takes_no_message_away(queue: Queue, outcome: Outcome) -> None:
    """The forged END says that the message was redelivered; such a message used to be lost."""
    queue.send("a")
    track_once(queue.name, settings_of(queue))
    with consumer_of(queue, lease_ms=LEASE_MS, keep_alive=False) as consumer:
        receive_all(consumer, 1)
        write(queue, Marker(MarkerType.END, 0, (OffsetRange(0, 1),), outcome=outcome))
        time.sleep(1.5 * LEASE_MS / 1000)
    assert track_once(queue.name, settings_of(queue)).redelivered == 1
    assert seen(queue) == [b"a", b"a"]


def test_forged_rules_change_nothing(queue: Queue) -> None:
    queue.send("a")
    track_once(queue.name, settings_of(queue))
    write(queue, Marker(MarkerType.RULES, rules=QueueRules(99, max_deliveries=1)))
    drop(queue, 1)
    ended = track_once(queue.name, settings_of(queue))
    assert (ended.redelivered, ended.dead_lettered) == (1, 0)


def test_trackers_of_a_queue_sign_with_one_key_and_begin_anew_when_it_is_lost(queue: Queue) -> None:
    """The key is lost with the group's offsets; ENDs that older trackers have signed still count."""
    first = key_of(queue)
    assert len(first) == 32
    assert key_of(queue) == first
    queue.send("a")
    drop(queue, 1)
    assert track_once(queue.name, settings_of(queue)).redelivered == 1
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    group = f"kmq.{queue.name}.tracker"
    admin.delete_consumer_groups([group])[group].result(10)
    assert key_of(queue) != first
    assert track_once(queue.name, settings_of(queue)).redelivered == 0
    drop(queue, 1)
    assert track_once(queue.name, settings_of(queue)).redelivered == 1
    assert seen(queue) == [b"a"] * 3


def test_messages_that_do_not_exist_make_no_dead_letters(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """A START of 30 bytes may name 100,000 messages; those in the topic are redelivered as usual."""
    queue.send("a")
    write(queue, Marker(MarkerType.START, 0, (OffsetRange(0, 5_000),), redeliver_after_ms=1))
    time.sleep(0.1)
    assert [track_once(queue.name, settings_of(queue)).redelivered for _ in range(2)] == [1, 0]
    assert read_all(queue.bootstrap_servers, f"{queue.name}.dlq") == []
    assert "were dropped without a dead letter" in caplog.text
    assert seen(queue) == [b"a", b"a"]
