"""Many records of one transaction, on librdkafka's mock broker: each is reported once, to its callback."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.settings import transactional_producer_config
from kmq_spark.kafka.transaction import ATTEMPTS, POLL_EACH, TransactionalProducer
from tests.unit.mock_broker import mock_broker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka import KafkaError, Message

    from kmq_spark.kafka.transaction import OnDelivery

TOPIC = "orders"


@pytest.fixture
def producer() -> Iterator[TransactionalProducer]:
    """A producer on a mock broker."""
    with mock_broker(TOPIC) as address:
        config = transactional_producer_config(address, "many", "many", {"log_level": "0"}, max_message_bytes=10_000)
        producer = TransactionalProducer(config, 10)
        yield producer
        producer.close()


def record(number: int, size: int = 10) -> OutgoingRecord:
    """Return a record."""
    return OutgoingRecord(TOPIC, number % 4, b"%d" % number, bytes(size), [("n", b"%d" % number)])


def test_each_record_is_reported_once_to_its_callback_before_the_commit(producer: TransactionalProducer) -> None:
    """Neighbours share a callback."""
    count, shared = 3 * POLL_EACH, 7
    reported: dict[int, list[bytes | None]] = {}
    sent_before: list[int] = []

    def records() -> Iterator[tuple[OutgoingRecord, OnDelivery]]:
        for number in range(count):
            if number % shared == 0:
                callback = partial(on_delivery, number)
            yield record(number), callback
            sent_before.append(number)

    def on_delivery(first: int, error: KafkaError | None, message: Message) -> None:
        assert error is None
        reported.setdefault(first, []).append(message.key())

    producer.run(lambda: producer.send_all(records()), [], None)
    assert {first: sorted(keys, key=lambda key: int(key or b"")) for first, keys in reported.items()} == {
        first: [b"%d" % number for number in range(first, min(first + shared, count))]
        for first in range(0, count, shared)
    }
    assert sent_before == list(range(count))


def test_record_that_the_client_refuses_aborts_all_of_the_attempt(
    producer: TransactionalProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attempt begins from the first record; what was sent before the refusal is not committed."""
    monkeypatch.setattr("kmq_spark.kafka.transaction.FIRST_BACKOFF_S", 0.001)
    attempts: list[int] = []
    delivered: list[bytes | None] = []

    def on_delivery(error: KafkaError | None, message: Message) -> None:
        if error is None:
            delivered.append(message.key())

    def work() -> None:
        attempts.append(1)
        producer.send_all((record(number, 20_000 if number == 5 else 10), on_delivery) for number in range(9))

    with pytest.raises(KafkaClientError, match="MSG_SIZE_TOO_LARGE"):
        producer.run(work, [], None)
    assert len(attempts) == ATTEMPTS
    delivered.clear()
    producer.run(lambda: producer.send_all([(record(1), on_delivery)]), [], None)
    assert delivered == [b"1"]  # it continues with other records


def test_record_without_a_callback_is_sent_and_not_reported(producer: TransactionalProducer) -> None:
    """The report of the next record with a callback says nothing about it."""
    reported: list[bytes | None] = []

    def on_delivery(error: KafkaError | None, message: Message) -> None:
        assert error is None
        reported.append(message.key())

    records = [(record(number), on_delivery if number % 4 == 3 else None) for number in range(8)]
    producer.run(lambda: producer.send_all(records), [], None)
    assert sorted(key or b"" for key in reported) == [b"3", b"7"]
    assert len(producer.client) == 0
