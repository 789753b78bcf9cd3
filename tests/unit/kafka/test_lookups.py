"""
Bounds of a partition: a partition without a leader is not a partition that does not exist, and a client that knows a
former leader looks for the new one.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.errors import TopicError
from kmq_spark.kafka.lookups import LATEST, Bounds, bounds_now, bounds_of, offsets_of
from tests.unit.mock_broker import mock_broker

if TYPE_CHECKING:
    from collections.abc import Iterator

TOPIC = "orders"
_UNKNOWN_PARTITION = KafkaError._UNKNOWN_PARTITION  # librdkafka's public name for it


class LeaderlessConsumer(Consumer):
    """
    A real client that gives librdkafka's answer for a partition without a leader, a number of times.

    No mock broker of librdkafka takes a leader away; a broker that returns does it, for some hundred milliseconds.
    """

    times = 0

    def get_watermark_offsets(self, *args: Any, **options: Any) -> tuple[int, int]:
        """Answer as librdkafka does."""
        if self.times:
            self.times -= 1
            raise KafkaException(KafkaError(_UNKNOWN_PARTITION))
        return super().get_watermark_offsets(*args, **options)


class OutdatedAdmin(AdminClient):
    """
    A real client that fails as with old metadata, until it has read them again.

    No mock broker of librdkafka changes its epoch, or adds partitions.
    """

    is_outdated, code = True, KafkaError.FENCED_LEADER_EPOCH

    def list_offsets(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # as the client
        """Answer as the broker does."""
        if not self.is_outdated:
            return super().list_offsets(*args, **options)
        refused: Future[Any] = Future()
        refused.set_exception(KafkaException(KafkaError(self.code)))
        return dict.fromkeys(args[0], refused)

    def list_topics(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # as the client
        """Read the metadata."""
        self.is_outdated = False
        return super().list_topics(*args, **options)


@pytest.fixture
def address() -> Iterator[str]:
    """Address of a mock broker with one record in partition 0 of four."""
    with mock_broker(TOPIC) as address:
        producer = Producer({"bootstrap.servers": address, "log_level": 0})
        producer.produce(TOPIC, b"value", partition=0)
        assert producer.flush(5) == 0
        yield address


@pytest.fixture
def client(address: str) -> Iterator[LeaderlessConsumer]:
    """A client of the mock broker."""
    client = LeaderlessConsumer({"bootstrap.servers": address, "group.id": "g", "log_level": 0})
    yield client
    client.close()


def test_partition_without_a_leader_is_waited_for(client: LeaderlessConsumer) -> None:
    client.times = 5
    assert bounds_of(client, TopicPartition(TOPIC, 0), 30.0) == Bounds(0, 1)
    assert client.times == 0


def test_partition_without_a_leader_is_a_temporary_error(client: LeaderlessConsumer) -> None:
    client.times = 2
    with pytest.raises(KafkaException) as failure:
        bounds_now(client, TopicPartition(TOPIC, 0), 30.0)
    assert failure.value.args[0].code() == KafkaError.LEADER_NOT_AVAILABLE


def test_partition_that_does_not_exist_is_a_topic_error(client: LeaderlessConsumer) -> None:
    with pytest.raises(TopicError, match="create the queue"):
        bounds_of(client, TopicPartition(TOPIC, 99), 30.0)


@pytest.mark.parametrize("code", [KafkaError.FENCED_LEADER_EPOCH, KafkaError._NOENT])
def test_client_whose_metadata_are_old_reads_them_anew(address: str, code: int) -> None:
    """A partition has another leader, or is new."""
    admin = OutdatedAdmin({"bootstrap.servers": address, "log_level": 0})
    admin.code = code
    assert offsets_of(admin, TOPIC, [0, 1], LATEST, 30.0) == {0: 1, 1: 0}
    assert not admin.is_outdated
