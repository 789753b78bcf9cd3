"""Payloads: each wanted offset is reported once, for any gaps in the log, and whatever a replica that lags answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import ClusterMetadata, PartitionMetadata, TopicMetadata
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.payloads import PayloadReader, WantedOffsets

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.kafka.payloads import PayloadSlice

EOF = KafkaError(KafkaError._PARTITION_EOF)  # librdkafka's public name for it


class ScriptedClient:
    """A client of confluent-kafka that answers from a list; the leader's log goes from 0 to 10."""

    def __init__(self, answers: list[list[Message]]) -> None:
        self._answers = answers
        self.asked = 0
        self.looked = 0
        self.refusal: KafkaError | None = None

    def list_topics(self, topic: str, **_: object) -> ClusterMetadata:
        """Return a topic with one partition."""
        self.looked += 1
        found, answer = TopicMetadata(), ClusterMetadata()
        found.partitions, answer.topics = {0: PartitionMetadata()}, {topic: found}
        return answer

    def get_watermark_offsets(self, *_: object, **__: object) -> tuple[int, int]:
        """Return the leader's first offset and end."""
        return 0, 10

    def offsets_for_times(self, places: list[TopicPartition], **_: object) -> list[TopicPartition]:
        """Return the leader's end of each partition."""
        self.asked += 1
        if self.refusal is not None:
            raise KafkaException(self.refusal)
        return [TopicPartition(place.topic, place.partition, 10) for place in places]

    def consume(self, *_: object) -> list[Message]:
        """Return the next answer."""
        return self._answers.pop(0) if self._answers else []

    def assign(self, _: list[TopicPartition]) -> None:
        """Accept any assignment."""

    def unassign(self) -> None:
        """Accept it."""

    def close(self) -> None:
        """Accept it: the same client then stands for a new one."""


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ScriptedClient:
    """A replica that has 5 records at first and then catches up."""
    end = Message(topic="orders", partition=0, offset=5, error=EOF)
    record = Message(topic="orders", partition=0, offset=7, value=b"alive")
    client = ScriptedClient([[end], [], [record], []])

    def make(*_: Any) -> ScriptedClient:
        return client

    monkeypatch.setattr("kmq_spark.kafka.payloads.make_client", make)
    return client


@pytest.mark.usefixtures("client")
def test_message_past_the_end_of_a_replica_that_lags_is_not_gone() -> None:
    """It met its own end at 5, below the end of the log; the message at 7 is alive."""
    reader = PayloadReader({}, "orders", 1)
    (found,) = reader.read({0: [7]})
    assert found.message is not None
    assert found.message.value() == b"alive"


def test_message_that_a_replica_never_shows_is_an_error_and_not_gone(client: ScriptedClient) -> None:
    reader = PayloadReader({}, "orders", 0.3)
    found = reader.read({0: [4, 9]})
    assert next(found).message is None  # passed over: the end at 5 lies behind it
    with pytest.raises(KafkaClientError, match=r"got none of 1 within 0\.3 s; .* transaction hangs") as raised:
        next(found)
    assert raised.value.retriable  # the tracker starts again and reads again
    assert client.asked == 2  # the second attempt trusts no end from before: a log may have been cut off


def test_ends_are_asked_for_only_where_a_wanted_message_is_past_the_last_known_one(client: ScriptedClient) -> None:
    reader = PayloadReader({}, "orders", 1)
    assert [each.message for each in reader.read({0: [4]})] == [None]
    (found,) = reader.read({0: [7]})
    assert found.message is not None
    assert client.asked == 1
    assert [each.message for each in reader.read({0: [12]})] == [None]
    assert client.asked == 2


def test_end_that_the_broker_refuses_to_tell_is_asked_for_in_another_way(client: ScriptedClient) -> None:
    """After it was suspended, a broker has a newer leader epoch than the client names. That is not an error."""
    client.refusal = KafkaError(KafkaError.FENCED_LEADER_EPOCH)
    assert [each.message for each in PayloadReader({}, "orders", 1).read({0: [4]})] == [None]


def test_partitions_that_do_not_exist_cost_one_pause_and_two_requests_however_many(
    client: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker of seven bytes may name one of 32,767 partitions, and the sender holds its lock while it reads."""
    pauses: list[float] = []
    monkeypatch.setattr("kmq_spark.kafka.payloads.time.sleep", pauses.append)
    reader = PayloadReader({}, "orders", 1)
    found = list(reader.read({0: [4], **{partition: [5, 6] for partition in range(1, 10_000)}}))
    assert len(found) == 1 + 2 * 9_999
    assert not any(each.message for each in found)
    assert (len(pauses), client.looked, client.asked) == (1, 2, 1)


SMALL = st.integers(0, 60)


def record(offset: int) -> Message:
    """Return a record as the client gives it."""
    return Message(topic="orders", partition=0, offset=offset, value=b"%d" % offset)


def reported(wanted: list[int], slices: Iterable[PayloadSlice]) -> list[tuple[int, int | None]]:
    """Return the reports: each wanted offset, and the offset of its record or None if it is gone."""
    return [
        (wanted[index], None if message is None else message.offset())
        for found in slices
        for index, message in enumerate(found.messages, found.first)
    ]


@given(st.sets(SMALL, min_size=1), st.sets(SMALL), st.lists(SMALL), st.integers(0, 61))
def test_every_wanted_offset_is_reported_once_and_with_its_own_record(
    wanted_set: set[int], log_set: set[int], cuts: list[int], end: int
) -> None:
    """In whatever pieces the log comes, read again from anywhere in between, as after a seek."""
    wanted, log = sorted(wanted_set), sorted(each for each in log_set if each < end)
    offsets = WantedOffsets("orders", 0, wanted)
    slices = list(offsets.drop_from(end))
    begin = 0
    for cut in cuts:
        piece = [each for each in log if begin <= each < cut]
        if piece:
            slices += offsets.add([record(each) for each in piece])
            begin = max(0, cut - 3)
    rest = [each for each in log if each >= begin]
    if rest:
        slices += offsets.add([record(each) for each in rest])
    slices += offsets.drop_below(end)
    assert sorted(reported(wanted, slices)) == [(each, each if each in log else None) for each in wanted]
    assert offsets.is_done
    assert offsets.left == 0


def test_log_without_gaps_gives_one_slice() -> None:
    offsets = WantedOffsets("orders", 0, list(range(10, 1_000)))
    (found,) = offsets.add([record(each) for each in range(10, 900)])
    assert (found.first, len(found.messages), offsets.read_to, offsets.position().offset) == (0, 890, 900, 900)
