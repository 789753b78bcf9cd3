"""Commits of a consumer that are fenced or get no answer: nothing is lost, and nothing is written twice."""

# ruff: noqa: PT012, SIM117  # the error comes at the end of a block, which holds what the block is for

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from kmq_spark.consumer.transaction import ResultTransactions
from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import (
    FencedError,
    KafkaClientError,
    LeaseLostError,
    TransactionError,
)
from kmq_spark.kafka.log_reader import LogReader
from tests.kafka.conftest import Queue, consumer_of, ended, receive_all, seen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka import Message, Producer

    from kmq_spark.consumer.consumer import QueueConsumer

pytestmark = pytest.mark.kafka


def test_second_consumer_of_the_same_id_fences_the_first(queue: Queue, results: Queue) -> None:
    queue.send("a")
    with consumer_of(queue, extra={"client.id": "twin"}) as older:
        (message,) = receive_all(older, 1)
        with older.transaction() as tx:
            tx.send(results.name, "older")
        with consumer_of(queue, extra={"client.id": "twin", "group.id": "another"}) as newer:
            with newer.transaction() as tx:
                tx.send(results.name, "newer")
            for _ in range(2):
                with pytest.raises(FencedError, match=r"another consumer with this client\.id has fenced it"):
                    with older.transaction() as tx:  # the error comes at its end
                        tx.send(results.name, "zombie")
                        tx.ack(message)
            assert not message.is_settled
            with newer.transaction() as tx:
                tx.send(results.name, "newer again")
    assert seen(results) == [b"older", b"newer", b"newer again"]
    assert ended(queue) == []


@pytest.mark.parametrize("is_written", [True, False])
def test_commit_without_an_answer_is_looked_up_in_the_log(
    queue: Queue, results: Queue, monkeypatch: pytest.MonkeyPatch, *, is_written: bool
) -> None:
    """The connection breaks during the commit: the call returns or raises according to what the log shows."""
    queue.send("a")
    with consumer_of(queue) as consumer:
        (message,) = receive_all(consumer, 1)
        break_commit(consumer, monkeypatch, is_written=is_written)
        if is_written:
            commit(consumer, message, results)
        else:
            with pytest.raises(TransactionError, match="nothing was written, the messages are still held") as raised:
                commit(consumer, message, results)
            assert (raised.value.nothing_written, raised.value.retriable) == (True, True)
            assert not message.is_settled
            commit(consumer, message, results)
        assert message.settled_by == "ack"
    assert (seen(results), ended(queue)) == ([b"r"], [0])


def test_commit_with_an_unknown_outcome_lets_the_messages_go(
    queue: Queue, results: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages are neither renewed nor released: the log decides what the tracker redelivers."""
    queue.send("a")
    with consumer_of(queue, lease=1) as consumer:
        (message,) = receive_all(consumer, 1)
        break_commit(consumer, monkeypatch, is_written=True)
        monkeypatch.setattr(ResultTransactions, "_is_committed", fail)
        with pytest.raises(TransactionError, match="the outcome of its transaction is unknown") as raised:
            commit(consumer, message, results)
        assert not raised.value.nothing_written
        assert consumer.in_flight_count == 0
        with pytest.raises(LeaseLostError, match="outcome of its transaction is unknown"):
            message.ack()
        written = queue.markers(MarkerType.KEEPALIVE)
        time.sleep(0.6)
    assert queue.markers(MarkerType.KEEPALIVE) == written


def test_outcome_is_not_taken_from_a_replica_that_is_behind(
    queue: Queue, results: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that was suspended and deposed answers with a log that ends before the transaction."""
    queue.send("a")
    read, looks = LogReader.read, []

    def read_old_log_first(reader: LogReader, starts: dict[int, int]) -> Iterator[Message]:
        looks.append(starts)
        if len(looks) == 1:
            reader.positions |= starts
            return iter(())
        return read(reader, starts)

    with consumer_of(queue) as consumer:
        (message,) = receive_all(consumer, 1)
        break_commit(consumer, monkeypatch, is_written=True)
        monkeypatch.setattr(LogReader, "read", read_old_log_first)
        commit(consumer, message, results)
        assert (message.settled_by, len(looks)) == ("ack", 2)


def commit(consumer: QueueConsumer, message: Any, results: Queue) -> None:  # noqa: ANN401  # a message
    """Acknowledge a message with a result."""
    with consumer.transaction() as tx:
        tx.send(results.name, "r")
        tx.ack(message)


def fail(*_arguments: object) -> bool:
    """Be a broker that does not answer."""
    raise KafkaClientError("the broker is away", code="_TIMED_OUT", retriable=True)


def break_commit(consumer: QueueConsumer, monkeypatch: pytest.MonkeyPatch, *, is_written: bool) -> None:
    """Let the next commit end without an answer, after or before it reached the broker."""
    with consumer.transaction() as tx:
        tx.send(consumer._topics.dead_letter_topic, "warm")
    assert consumer._transactions is not None
    producer = consumer._transactions._producer
    assert producer is not None
    monkeypatch.setattr(producer, "_producer", Unanswered(producer.client, is_written=is_written))


class Unanswered:
    """Kafka's client, whose commit reaches the broker or not, and gets no answer either way."""

    def __init__(self, client: Producer, *, is_written: bool) -> None:
        self._client, self._is_written = client, is_written

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the client has
        """Return what the client has."""
        return getattr(self._client, name)

    def __len__(self) -> int:
        """Return the number of messages that wait."""
        return len(self._client)

    def commit_transaction(self, timeout_s: float) -> None:
        """Commit, or do nothing; raise as for a broker that does not answer."""
        if self._is_written:
            self._client.commit_transaction(timeout_s)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the broker is away"))
