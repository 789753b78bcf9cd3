"""Transactions that are refused: the call raises at once, nothing is written, and the block can be tried again."""

# ruff: noqa: PT012, SIM117  # the error comes at the end of a block, which holds what the block is for

from __future__ import annotations

import pytest

from kmq_spark.errors import (
    KafkaClientError,
    TopicError,
    TransactionError,
    UsageError,
)
from tests.kafka.conftest import Queue, consumer_of, ended, receive_all, seen

pytestmark = pytest.mark.kafka


def test_refused_result_is_reported_and_the_block_can_be_tried_again(queue: Queue, results: Queue) -> None:
    """Of an unknown topic or partition at once, else by the broker and without retries; the message stays held."""
    queue.send("a")
    with consumer_of(queue) as consumer:
        (message,) = receive_all(consumer, 1)
        with (
            pytest.raises(TopicError, match="topic 'not-there' does not exist; create it"),
            consumer.transaction() as tx,
        ):
            tx.ack(message)
            tx.send("not-there", "r")
        with pytest.raises(TopicError, match=r"got partition 7 of .*, 0 to 0"), consumer.transaction() as tx:
            tx.send(results.name, "r", partition=7)
        with pytest.raises(TransactionError, match="the broker rejected a result of") as raised:
            with consumer.transaction() as tx:  # the error comes at its end
                tx.send(results.name, bytes(1_200_000))
                tx.ack(message)
        assert (raised.value.code, raised.value.nothing_written) == ("MSG_SIZE_TOO_LARGE", True)
        assert not message.is_settled
        with consumer.transaction() as tx:
            tx.send(results.name, "r")
            tx.ack(message)
    assert (seen(results), ended(queue)) == ([b"r"], [0])


def test_transaction_that_is_too_large_is_refused_while_it_is_recorded(queue: Queue, results: Queue) -> None:
    with consumer_of(queue) as consumer, consumer.transaction() as tx:
        for _ in range(32):
            tx.send(results.name, bytes(1_000_000))
        with pytest.raises(KafkaClientError, match=r"transaction is too large: got .* in 34 results"):
            for _ in range(2):
                tx.send(results.name, bytes(1_000_000))
        tx.results.clear()


def test_misuse_of_a_block_is_reported(queue: Queue, results: Queue) -> None:
    """A block within a block, a call after the end of the block, a message that was settled in another way."""
    queue.send("a", "b")
    with consumer_of(queue) as consumer:
        first, second = receive_all(consumer, 2)
        with consumer.transaction() as tx:
            with (
                pytest.raises(UsageError, match="a transaction is already open in this thread"),
                consumer.transaction(),
            ):
                pass
            tx.ack(first)
            tx.ack(first)
        with pytest.raises(UsageError, match="transaction has ended"):
            tx.send(results.name, "r")
        with pytest.raises(UsageError, match="already settled: got ack in a transaction after ack"):
            with consumer.transaction() as tx:  # clear as it stands
                tx.ack(first)
        with pytest.raises(UsageError, match="already settled: got ack after release"):
            with consumer.transaction() as tx:  # as above
                tx.ack(second)
                tx.send(results.name, "r")
                second.release()
    with pytest.raises(UsageError, match="consumer is closed"), consumer.transaction():
        pass
    assert (seen(results), ended(queue)) == ([], [0])
