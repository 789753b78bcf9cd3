"""The checker's own reader of topics, against librdkafka's broker in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from faults.evidence import RawRecord
from faults.topics import read_dump, read_topic, without
from kmq_spark.core.markers import Outcome
from kmq_spark.testing import end, start
from tests.unit.fault_story import QUEUE, Story

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTITIONS = 4
"""Of a topic that the broker in memory makes."""


@pytest.fixture
def producer() -> Iterator[Producer]:
    """A producer with a broker in memory, which lives as long."""
    producer = Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1, "log_level": 0})
    yield producer
    producer.flush(10)


def servers_of(producer: Producer) -> str:
    """Return where other clients reach the broker."""
    (broker,) = producer.list_topics(timeout=10).brokers.values()
    return f"{broker.host}:{broker.port}"


def test_every_record_is_read_as_it_lies_there(producer: Producer) -> None:
    """Absent keys and values, headers that repeat and have no value, all partitions, one of them empty."""
    headers: list[tuple[str, str | bytes | None]] = [("twice", b"1"), ("twice", None), ("empty", b"")]
    for partition in range(PARTITIONS - 1):
        producer.produce("q", b"value", b"key", partition, headers=headers)
        producer.produce("q", None, None, partition)
    assert producer.flush(10) == 0
    found = sorted(read_topic("q", servers_of(producer)), key=lambda record: record[:3])
    assert [(record.partition, record.offset) for record in found] == [
        (p, o) for p in range(PARTITIONS - 1) for o in (0, 1)
    ]
    assert {(record.key, record.value, record.headers) for record in found} == {
        (b"key", b"value", tuple(headers)),
        (None, None, ()),
    }
    assert all(record.topic == "q" and record.timestamp_ms > 0 for record in found)


def test_topics_of_a_queue_are_read_and_kept(producer: Producer) -> None:
    """What is kept is every record, and what it says is what the evidence says."""
    story = Story()
    for record in story.records():
        # Two positions are left out in the story's topics: what counts here is the content.
        producer.produce(record.topic, record.value, record.key, record.partition, headers=list(record.headers))
    assert producer.flush(10) == 0
    kept: list[RawRecord] = []
    dump = read_dump(QUEUE, servers_of(producer), kept.append)
    expected = story.dump()
    assert [logged.marker for logged in dump.markers[0]] == [logged.marker for logged in expected.markers[0]]
    assert [record.headers for record in dump.messages] == [record.headers for record in expected.messages]
    assert [record.headers for record in dump.dead_letters] == [record.headers for record in expected.dead_letters]
    assert len(kept) == len(list(story.records()))


def test_hostile_start_is_taken_out_with_what_the_tracker_answers_it() -> None:
    """Its END goes where all its messages lie past the topic's end and a hostile START names them; others stay."""
    story = Story()
    story.append(
        start(50, 12_000, count=10),  # 12, hostile
        end(50, 18_000, count=4, outcome=Outcome.EXPIRED),
        end(11, 18_000, outcome=Outcome.EXPIRED),
        end(59, 18_000, count=2, outcome=Outcome.EXPIRED),
        is_handled=False,
    )
    dump = story.dump()
    without(dump, {(0, 12)})
    gone = [logged.marker_offset for logged in dump.markers[0] if logged.marker is None]
    assert gone == [12, 13]
