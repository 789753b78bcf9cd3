"""The checker's own reader of topics, against librdkafka's broker in memory."""

from __future__ import annotations

from confluent_kafka import Producer

from faults.topics import read_topic, record_of, without
from kmq_spark.core.markers import Outcome
from tests.builders import end, start
from tests.unit.faults.story import Story
from tests.unit.mock_broker import PARTITIONS, mock_broker


def test_every_record_is_read_as_it_lies_there() -> None:
    """Absent keys and values, headers that repeat and have no value, all partitions, one of them empty."""
    headers: list[tuple[str, str | bytes | None]] = [("twice", b"1"), ("twice", None), ("empty", b"")]
    with mock_broker("q") as address:
        producer = Producer({"bootstrap.servers": address, "log_level": 0})
        for partition in range(PARTITIONS - 1):
            producer.produce("q", b"value", b"key", partition, headers=headers)
            producer.produce("q", None, None, partition)
        assert producer.flush(10) == 0
        found = sorted(map(record_of, read_topic("q", address)), key=lambda record: record.place)
    assert [record.place for record in found] == [(p, o) for p in range(PARTITIONS - 1) for o in (0, 1)]
    assert {(record.key, record.value, record.headers) for record in found} == {
        (b"key", b"value", tuple(headers)),
        (None, None, ()),
    }
    assert all(record.at_ms > 0 for record in found)


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
    dump = story.evidence().dump
    without(dump, {(0, 13)})
    assert [logged.marker_offset for logged in dump.markers[0] if logged.marker is None] == [13, 14]
