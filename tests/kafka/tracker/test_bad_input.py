"""Bad input of a queue: each kind is logged in one clear line, nothing is lost, and the tracker keeps running."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
)

from kmq_spark.core.markers import MarkerType
from kmq_spark.demo.audit import audit
from kmq_spark.errors import KmqError, TopicError
from kmq_spark.kafka.topics import check_queue
from kmq_spark.tracker.queue_tracker import QueueTracker
from kmq_spark.wire.codec import decode_marker
from tests.brokers import quick_broker
from tests.kafka.conftest import Queue, read_all
from tests.kafka.stage import Stage, receive_all, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from kmq_spark.consumer.message import Message

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def admin_of(stage: Stage) -> AdminClient:
    """Return an admin client."""
    return AdminClient({"bootstrap.servers": stage.bootstrap_servers})


def grow(stage: Stage, count: int, *topics: str) -> None:
    """Give topics more partitions."""
    admin = admin_of(stage)
    for future in admin.create_partitions([NewPartitions(topic, count) for topic in topics]).values():
        future.result(10)


def set_clock(stage: Stage, kind: str) -> None:
    """Set which times the markers topic has, and wait until the broker says so."""
    entry = ConfigEntry("message.timestamp.type", kind, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource("topic", stage.layout.topics.markers_topic, incremental_configs=[entry])
    admin = admin_of(stage)  # the futures of a client that is gone never complete
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(10)
    assert wait_until(lambda: is_refused(stage) is (kind == "CreateTime"))


def is_refused(stage: Stage) -> bool:
    """Return whether the topics of the queue do not fit."""
    try:
        check_queue(stage.queue, bootstrap_servers=stage.bootstrap_servers)
    except TopicError:
        return True
    return False


def test_clock_that_is_changed_under_a_running_tracker_is_trouble_until_it_is_right_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kmq_spark.tracker.queue_tracker.TOPIC_CHECK_S", 0.5)
    with stage.tracking() as tracker:
        set_clock(stage, "CreateTime")
        assert wait_until(lambda: "has message.timestamp.type=CreateTime, must be LogAppendTime" in tracker.trouble())
        set_clock(stage, "LogAppendTime")
        stage.send("a")
        with stage.consumer(lease=1) as consumer:
            receive_all(consumer, 1)
            assert wait_until(lambda: not tracker.trouble())


@pytest.mark.slow
def test_partitions_that_come_under_a_running_tracker_are_served(stage: Stage) -> None:
    """Grown from 2 to 4: messages of the new partitions are redelivered, without a restart of the tracker."""
    topics = stage.layout.topics
    stage.send("before")
    with stage.tracking() as tracker:
        with stage.consumer() as consumer:
            receive_all(consumer, 1)[0].ack()
        grow(stage, 4, topics.queue_topic, topics.markers_topic)
        time.sleep(1.0)  # until every client that starts now knows
        values = [f"m{number}" for number in range(40)]
        stage.send(*values)
        with stage.consumer(lease=4) as consumer:
            first = receive_all(consumer, 40)
            assert {message.id.queue_partition for message in first} == {0, 1, 2, 3}
            again = []
            for _ in values:
                again += receive_all(consumer, 1)
                again[-1].ack()
            consumer.flush()
        assert {message.delivery_count for message in again} == {2}
        assert set(tracker.stats.statuses) == {0, 1, 2, 3}
    assert tracker.restarts == 0
    grown = check_queue(stage.queue, bootstrap_servers=stage.bootstrap_servers)
    story = audit(grown, stage.bootstrap_servers)
    assert (story.redelivered, story.early, story.lost) == (40, 0, set())
    ticked = {
        record.partition() for record in read_all(stage.bootstrap_servers, topics.markers_topic) if is_tick(record)
    }
    assert ticked == {0, 1, 2, 3}


def is_tick(record: object) -> bool:
    """Return whether a record of a markers topic is a TICK."""
    return decode_marker(record.value()).type is MarkerType.TICK  # type: ignore[attr-defined]  # a client's record


@pytest.mark.slow
def test_tracker_outlives_a_restart_of_its_broker(spark: SparkSession, tmp_path: Path) -> None:
    """The broker is killed and started again: the tracker resumes by itself; nothing is lost or sent twice."""
    with quick_broker() as broker:
        stage = Stage(spark, broker.bootstrap_servers, tmp_path, "restarted")
        stage.send(*(f"m{number}" for number in range(10)))
        with stage.tracking() as tracker, stage.consumer() as consumer:
            held = receive_all(consumer, 10)
            # Without their offsets in Kafka they would be fetched again, beside their copies.
            queue = Queue(stage.queue, stage.bootstrap_servers)
            assert wait_until(lambda: sum(queue.committed().values()) == 10)
            broker.kill()
            time.sleep(3.0)  # their leases run out while the broker is away
            broker.start()
            again = receive_all(consumer, 10)
            for message in again:
                message.ack()
            consumer.flush()
            assert wait_until(lambda: not audit(stage.layout, stage.bootstrap_servers).lost)
            assert tracker.stats.redelivered == 10
        story = audit(stage.layout, stage.bootstrap_servers)
    assert sorted(message.value or b"" for message in again) == sorted(message.value or b"" for message in held)
    assert {message.delivery_count for message in again} == {2}
    assert (story.redelivered, story.early, story.lost) == (10, 0, set())


def test_handler_that_raises_loses_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The message is redelivered after its backoff, and dead-lettered after the last delivery."""
    stage.send("good", "bad")
    seen: list[tuple[bytes | None, int]] = []

    def handler(message: Message) -> None:
        seen.append((message.value, message.delivery_count))
        if message.value == b"bad":
            raise ValueError("no such account")
        if len(seen) > 10:  # the test would hang otherwise
            raise SystemExit

    with stage.tracking() as tracker, stage.consumer() as consumer:
        import threading  # noqa: PLC0415  # only here

        def stop_when_dead() -> None:
            wait_until(lambda: tracker.stats.dead_lettered == 1)
            consumer.stop()

        threading.Thread(target=stop_when_dead).start()
        with caplog.at_level(logging.ERROR):
            summary = consumer.run(handler, concurrency=1)
    assert sorted(seen) == [(b"bad", 1), (b"bad", 2), (b"bad", 3), (b"good", 1)]
    assert (summary.acked, summary.failed) == (1, 3)
    assert "ValueError: no such account" in caplog.text
    (letter,) = read_all(stage.bootstrap_servers, stage.layout.topics.dead_letter_topic)
    assert letter.value() == b"bad"
    assert not audit(stage.layout, stage.bootstrap_servers).lost


def test_flood_of_bytes_that_are_no_markers_is_one_line_in_the_log(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Random, empty, absent and large records; the messages between them are redelivered as usual."""
    foreign = Producer({"bootstrap.servers": stage.bootstrap_servers})
    values = [b"", None, b"\xff" * 10, b"\x08\x63", b"x" * 500_000, *(bytes([n, 255 - n]) * n for n in range(1, 60))]
    unreadable = 0
    stage.send("a")
    with stage.tracking() as tracker, stage.consumer() as consumer, caplog.at_level(logging.WARNING):
        for value in values:
            foreign.produce(stage.layout.topics.markers_topic, value, partition=1)
        foreign.flush(10)
        receive_all(consumer, 1)
        receive_all(consumer, 1)[0].ack()
        consumer.flush()
        unreadable = sum(is_unreadable(value) for value in values)
        assert wait_until(lambda: tracker.stats.statuses[1].counters["unreadable"] == unreadable > 50)
    assert tracker.restarts == 0
    assert read_all(stage.bootstrap_servers, stage.layout.topics.dead_letter_topic) == []
    assert sum("are not markers and are ignored" in record.getMessage() for record in caplog.records) == 1


def is_unreadable(value: bytes | None) -> bool:
    """Return whether the codec refuses a value."""
    try:
        decode_marker(value)
    except KmqError:
        return True
    return False


def test_available_now_run_on_an_empty_queue_ends(stage: Stage) -> None:
    tracker = QueueTracker(stage.spark, stage.queue, stage.settings(trigger="available-now"))
    tracker.run()
    assert (tracker.stats.redelivered, tracker.stats.dead_lettered, tracker.restarts) == (0, 0, 0)
