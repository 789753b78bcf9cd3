"""The position of a consumer: what is committed, and what is dropped when a partition goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from tests.kafka.conftest import Queue, consumer_of, receive_all, wait_until

if TYPE_CHECKING:
    from kmq_spark.consumer.fetcher import Fetcher

pytestmark = pytest.mark.kafka


def test_failed_commit_is_sent_again_on_a_partition_that_stays_quiet(queue: Queue) -> None:
    queue.send("a")
    with consumer_of(queue) as consumer:
        receive_all(consumer, 1)[0].ack()
        assert wait_until(lambda: queue.committed() == {0: 1})
        # As where the broker had refused it: the group keeps the position before.
        fetcher = consumer._intake._fetcher
        fetcher.client.commit(offsets=[TopicPartition(queue.name, 0, 0)], asynchronous=False)
        fetcher._on_commit(KafkaError(KafkaError.REBALANCE_IN_PROGRESS), [TopicPartition(queue.name, 0, 1)])
        assert wait_until(lambda: not consumer.receive(1) and queue.committed() == {0: 1})


class RevokesInBetween:
    """The client of a fetcher; a partition goes away while more is read after the first record."""

    def __init__(self, fetcher: Fetcher, topic: str) -> None:
        self._client, self._fetcher, self._topic = fetcher.client, fetcher, topic
        self._found = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # of the client
        """Return what the client has."""
        return getattr(self._client, name)

    def consume(self, count: int, timeout: float) -> list[Any]:
        """Read; before the read that follows the first record the group takes the partition away."""
        if self._found:
            self._fetcher._on_revoke(self._client, [TopicPartition(self._topic, 0)])
            return []
        if not timeout:
            return []
        records = self._client.consume(count, timeout)
        self._found += len(records)
        return records


def test_record_whose_partition_is_revoked_while_more_are_read_is_not_handed_out(queue: Queue) -> None:
    with consumer_of(queue) as consumer:
        assert wait_until(lambda: not consumer.receive(1) and bool(consumer._intake.owned))
        fetcher: Any = consumer._intake._fetcher
        client = fetcher.client
        fetcher.client = between = RevokesInBetween(fetcher, queue.name)
        queue.send(*"ab")
        assert consumer.receive(10, timeout=5) == []
        assert between._found == 1
        assert queue.markers() == []
        fetcher.client = client
