"""What a tracker keeps of consumers' positions, in the metadata of its commits."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import TopicPartition

from kmq_spark.kafka.positions import MAX_KEPT_CHARS, ConsumerOffsets, Heartbeat, Position


def committed(consumers: ConsumerOffsets | None) -> TopicPartition:
    """Return a tracker's commit."""
    return Position(90, 80, "t-1").to_topic_partition("orders.markers", 0, Heartbeat(1), consumers)


@pytest.mark.parametrize("is_unauthorized", [False, True])
def test_offsets_come_back_as_they_were_committed(is_unauthorized: bool) -> None:  # noqa: FBT001  # a parameter of the test
    consumers = ConsumerOffsets("id", {"": 7, ".queue-vip": 3}, is_unauthorized)
    place = committed(consumers)
    assert ConsumerOffsets.from_topic_partition(place) == consumers
    assert Position.from_topic_partition(place) == Position(90, 80, "t-1")


@pytest.mark.parametrize(
    "metadata",
    [
        "", "?", "[]", "null", '{"v": 1}', '{"consumers": 3}', '{"consumers": {"": "x"}, "queue_topic": "id"}',
        '{"consumers": {"": 1}}',
    ],
)  # fmt: skip
def test_metadata_of_others_keeps_nothing(metadata: str) -> None:
    assert ConsumerOffsets.from_topic_partition(TopicPartition("t", 0, 5, metadata)) is None


def test_commits_of_a_tracker_that_keeps_no_positions_say_so() -> None:
    assert ConsumerOffsets.from_topic_partition(committed(None)) is None


def test_metadata_stays_within_the_broker_s_limit() -> None:
    """The group of the queue itself goes first; 4,096 bytes are allowed."""
    many = ConsumerOffsets("i" * 22, {"": 7} | {f".queue-{number:0200}": 2**62 for number in range(100)})
    place = committed(many)
    assert len(place.metadata or "") < 4_096 - 1_500  # the rules and the key need as much
    found = json.loads(place.metadata or "")["consumers"]
    assert found[""] == 7
    assert 1 < len(json.dumps(found)) <= MAX_KEPT_CHARS
