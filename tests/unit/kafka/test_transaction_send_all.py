"""Many records of one transaction, on librdkafka's mock broker: each is reported once, by its number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Message, Producer

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.settings import transactional_producer_config
from kmq_spark.kafka.transaction import ATTEMPTS, POLL_EACH, TransactionalProducer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka import KafkaError

TOPIC = "orders"


@pytest.fixture
def producer() -> Iterator[TransactionalProducer]:
    """A producer on a mock broker, which lives as long as the client that made it."""
    owner = Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = owner.list_topics(timeout=5).brokers.values()
    owner.list_topics(TOPIC, timeout=5)
    config = transactional_producer_config(
        f"{broker.host}:{broker.port}", "many", "many", {"log_level": "0"}, max_message_bytes=10_000
    )
    producer = TransactionalProducer(config, 10_000)
    yield producer
    producer.close()
    owner.flush(0)


def record(number: int, size: int = 10) -> OutgoingRecord:
    """Return a record."""
    return OutgoingRecord(TOPIC, number % 4, b"%d" % number, bytes(size), [("n", b"%d" % number)])


def test_each_record_is_reported_once_by_its_number_before_the_commit(producer: TransactionalProducer) -> None:
    """And one that is not to be sent keeps its number: what comes after it is not taken for it."""
    count = 3 * POLL_EACH
    reported: dict[int, bytes | None] = {}
    sent_before: list[int] = []

    def records() -> Iterator[OutgoingRecord | None]:
        for number in range(count):
            yield None if number % 7 == 3 else record(number)
            sent_before.append(number)

    def on_delivery(number: int, error: KafkaError | None, message: Message) -> None:
        assert error is None
        assert number not in reported
        reported[number] = message.key()

    producer.run(lambda: producer.send_all(records(), on_delivery), [], None)
    assert reported == {number: b"%d" % number for number in range(count) if number % 7 != 3}
    assert sent_before == list(range(count))


def test_record_that_the_client_refuses_aborts_all_of_the_attempt(
    producer: TransactionalProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attempt begins from the first record; what was sent before the refusal is not committed."""
    monkeypatch.setattr("kmq_spark.kafka.transaction.FIRST_BACKOFF_S", 0.001)
    attempts: list[int] = []
    delivered: list[int] = []

    def on_delivery(number: int, error: KafkaError | None, _: Message) -> None:
        if error is None:
            delivered.append(number)

    def work() -> None:
        attempts.append(1)
        producer.send_all((record(number, 20_000 if number == 5 else 10) for number in range(9)), on_delivery)

    with pytest.raises(KafkaClientError, match="MSG_SIZE_TOO_LARGE"):
        producer.run(work, [], None)
    assert len(attempts) == ATTEMPTS
    delivered.clear()
    producer.run(lambda: producer.send_all([record(1)], on_delivery), [], None)
    assert delivered == [0]  # it continues with other records
