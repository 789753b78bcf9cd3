"""Bad input of a queue: each kind is logged in one clear line, nothing is lost, and the tracker keeps running."""

from __future__ import annotations

import logging

import pytest
from confluent_kafka import Producer

from kmq_spark.errors import KmqError, TopicError
from kmq_spark.kafka.topics import check_queue
from kmq_spark.wire.codec import decode_marker
from tests.kafka.conftest import read_all, set_topic, wait_until
from tests.kafka.stage import Stage, receive_all

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def set_clock(stage: Stage, kind: str) -> None:
    """Set which times the markers topic has, and wait until the broker says so."""
    set_topic(stage.bootstrap_servers, stage.layout.topics.markers_topic, "message.timestamp.type", kind)
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
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [each for each in lines if "are not markers and are ignored" in each]
    assert "; it begins with '" in line


def is_unreadable(value: bytes | None) -> bool:
    """Return whether the codec refuses a value."""
    try:
        decode_marker(value)
    except KmqError:
        return True
    return False
