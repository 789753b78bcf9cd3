"""The position of a consumer: what is committed, and what is dropped when a partition goes."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, Producer, TopicPartition

from kmq_spark.consumer import fetcher as fetcher_module
from kmq_spark.consumer.fetcher import POLL_S
from kmq_spark.consumer.offsets import GATHER_FROM
from kmq_spark.core.markers import MarkerType
from tests.kafka.conftest import Queue, consumer_of, receive_all, wait_until
from tests.limits import COMES_S

if TYPE_CHECKING:
    from kmq_spark import QueueConsumer
    from kmq_spark.consumer.fetcher import Fetcher

pytestmark = pytest.mark.kafka


def test_failed_commit_is_sent_again_on_a_partition_that_stays_quiet(queue: Queue) -> None:
    queue.send("a")
    with consumer_of(queue) as consumer:
        receive_all(consumer, 1)[0].ack()
        assert wait_until(lambda: queue.committed() == {0: 1})
        # As where the broker had refused it: the group keeps the position before.
        fetcher = consumer._pipeline._fetcher
        fetcher.client.commit(offsets=[TopicPartition(queue.name, 0, 0)], asynchronous=False)
        refused = KafkaError(KafkaError.REBALANCE_IN_PROGRESS)
        fetcher.offsets.on_commit(refused, [TopicPartition(queue.name, 0, 1)])
        assert wait_until(lambda: not consumer.receive(1) and queue.committed() == {0: 1})


class RefusesCommits:
    """The client of a fetcher; the group refuses so many commits."""

    def __init__(self, fetcher: Fetcher, refused_count: int) -> None:
        self._client, self._fetcher, self.left = fetcher.client, fetcher, refused_count

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # of the client
        """Return what the client has."""
        return getattr(self._client, name)

    def commit(self, *, offsets: list[TopicPartition], **options: Any) -> None:
        """Commit, or answer as a group that refuses."""
        if not self.left:
            self._client.commit(offsets=offsets, **options)
            return
        self.left -= 1
        self._fetcher.offsets.on_commit(KafkaError(KafkaError.REBALANCE_IN_PROGRESS), offsets)


def test_message_that_follows_a_failed_commit_is_handed_out_after_its_own(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that such a message kills would be given it again as a first delivery."""
    monkeypatch.setattr(fetcher_module, "CONFIRM_S", COMES_S)
    with consumer_of(queue) as consumer:
        queue.send("a")
        receive_all(consumer, 1)
        fetcher: Any = consumer._pipeline._fetcher
        client = fetcher.client
        fetcher.client = refusing = RefusesCommits(fetcher, 1_000)
        queue.send("b")
        receive_all(consumer, 1)
        assert wait_until(lambda: not consumer.receive(1) and fetcher.offsets.is_failing)
        refusing.left = 2  # one may be of "b", the other is of "c", which has to be sent again
        queue.send("c")
        receive_all(consumer, 1)
        assert fetcher.offsets.are_confirmed({0: 3})
        assert refusing.left == 0
        fetcher.client = client


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
            self._fetcher.on_revoke(self._client, [TopicPartition(self._topic, 0)])
            return []
        if not timeout:
            return []
        records = self._client.consume(count, timeout)
        self._found += sum(record.error() is None for record in records)
        return records


def test_record_whose_partition_is_revoked_while_more_are_read_is_not_handed_out(queue: Queue) -> None:
    with consumer_of(queue) as consumer:
        assert wait_until(lambda: not consumer.receive(1) and bool(consumer._pipeline.owned))
        fetcher: Any = consumer._pipeline._fetcher
        client = fetcher.client
        fetcher.client = between = RevokesInBetween(fetcher, queue.name)
        queue.send(*"ab")
        assert consumer.receive(10, timeout=5) == []
        assert between._found == 1
        assert queue.markers(MarkerType.START) == []
        fetcher.client = client


def test_lag_is_zero_when_the_messages_of_a_transaction_are_done(queue: Queue) -> None:
    """Kafka ends a transaction with a record of its own: without a commit past it, the lag would stay at 1."""
    producer = Producer({"bootstrap.servers": queue.bootstrap_servers, "transactional.id": queue.name})
    producer.init_transactions(COMES_S)
    with consumer_of(queue) as consumer:
        for end in (2, 4):
            producer.begin_transaction()
            producer.produce(queue.name, b"a", partition=0)
            producer.commit_transaction(COMES_S)
            receive_all(consumer, 1)[0].ack()
            assert wait_until(partial(is_read_to, consumer, queue, end))


def test_end_of_a_partition_is_not_committed_past_what_is_fetched_and_not_started(queue: Queue) -> None:
    queue.send(*"abc")
    with consumer_of(queue) as consumer:
        receive_all(consumer, 1, max_messages=1)
        assert wait_until(partial(is_committed, queue, 1))
        fetcher = consumer._pipeline._fetcher
        until = time.monotonic() + COMES_S
        while 0 not in fetcher._ends and time.monotonic() < until:
            fetcher._poll(POLL_S)
        assert [record.offset() for record in fetcher._buffer] == [1, 2]
        fetcher._commit_ends()
        assert (fetcher._ends, fetcher.offsets.positions) == ({0: 3}, {0: 1})


def is_read_to(consumer: QueueConsumer, queue: Queue, end: int) -> bool:
    return not consumer.receive(1) and queue.committed() == {0: end}


def is_committed(queue: Queue, next_offset: int) -> bool:
    """Return whether this is the committed offset of partition 0."""
    return queue.committed() == {0: next_offset}


def never_due(consumer: QueueConsumer) -> Any:  # noqa: ANN401  # tests look into it
    """Return the fetcher of a consumer. It gathers offsets for an hour."""
    fetcher: Any = consumer._pipeline._fetcher
    fetcher.offsets._committed_at = time.monotonic() + 3_600
    return fetcher


def test_offset_of_a_large_batch_waits_and_a_later_fetch_commits_it(queue: Queue) -> None:
    queue.send(*map(str, range(3 * GATHER_FROM)))
    with consumer_of(queue) as consumer:
        receive_all(consumer, 1)
        fetcher = never_due(consumer)
        receive_all(consumer, 3 * GATHER_FROM - 1)
        assert queue.committed() == {0: 1}
        assert fetcher.offsets._uncommitted == {0: 3 * GATHER_FROM}
        fetcher.offsets._commit_at = 0.0
        assert not consumer.receive(1, timeout=0.01)
        assert wait_until(lambda: queue.committed() == {0: 3 * GATHER_FROM})


def test_revoked_partition_has_its_gathered_offset_committed_and_no_older_one_follows(queue: Queue) -> None:
    queue.send(*"abc")
    with consumer_of(queue) as consumer:
        receive_all(consumer, 1)
        fetcher = never_due(consumer)
        receive_all(consumer, 2)
        assert fetcher.offsets._uncommitted == {0: 3}
        fetcher.on_revoke(fetcher.client, [TopicPartition(queue.name, 0)])
        assert queue.committed() == {0: 3}
        assert fetcher.offsets._uncommitted == {}
