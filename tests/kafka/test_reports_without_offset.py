"""
Delivery reports of durable records whose place the broker did not say, as after an election.

Of a batch whose first offset the broker does not say, librdkafka gives the others small, wrong ones.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from faults.proxy import TRANSACTIONAL, Connection, Proxy
from kmq_spark import MessageId, QueueProducer, ResumingProducer, TransactionError
from kmq_spark.kafka.own_record import own_tombstone, write_own
from kmq_spark.kafka.settings import transactional_producer_config
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.local.probe import free_port
from tests.brokers import quick_java
from tests.kafka.conftest import Queue, consumer_of, ended, read_all, receive_all, seen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark import KmqError, Message, QueueConsumer

pytestmark = pytest.mark.kafka

DUPLICATE_SEQUENCE_NUMBER = 46


class VagueProxy(Proxy):
    """A proxy that turns answers to Produce into those of a leader that has the batch and does not know its place."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.topic, self.left = "", 0
        self._produced: set[bytes] = set()

    def be_vague(self, topic: str, times: int = 1) -> None:
        """Be so for the next answers about a topic."""
        self.topic, self.left = topic, times

    def _request(self, connection: Connection, request: bytes) -> bytes:
        if int.from_bytes(request[:2]) == TRANSACTIONAL["Produce"]:
            self._produced.add(request[4:8])
        return super()._request(connection, request)

    def _answer(self, connection: Connection, answer: bytes) -> bytes:
        name = self.topic.encode()
        # Number of the request, tags, topics, name, partitions, partition, error, first offset, append time.
        begins = 7 + len(name)
        if self.left and answer[:4] in self._produced and answer[6:begins] == bytes([len(name) + 1]) + name:
            self.left -= 1
            at = begins + 5
            answer = answer[:at] + DUPLICATE_SEQUENCE_NUMBER.to_bytes(2) + b"\xff" * 16 + answer[at + 18 :]
        return super()._answer(connection, answer)


@pytest.fixture(scope="module")
def proxy() -> Iterator[VagueProxy]:
    """A proxy before a broker that names it as its address."""
    with contextlib.closing(VagueProxy(free_port())) as proxy:
        names_it = {"advertised.listeners": f"PLAINTEXT://{proxy.address}"}
        with EmbeddedBroker(None, proxy.target, names_it, environment=quick_java()):
            yield proxy


@pytest.fixture
def far(proxy: VagueProxy, request: pytest.FixtureRequest) -> Queue:
    """A queue whose broker is reached through the proxy."""
    name = f"far-{abs(hash(request.node.name)) % 10**6}"
    create_queue_topics(name, bootstrap_servers=proxy.address, partitions=1)
    return Queue(name, proxy.address)


def test_message_has_no_wrong_id(far: Queue, proxy: VagueProxy) -> None:
    ids: list[MessageId | KmqError | None] = []
    with QueueProducer(far.name, bootstrap_servers=far.bootstrap_servers) as producer:
        for is_vague in (False, True, False):
            if is_vague:
                proxy.be_vague(far.name)
            for each in range(3):
                producer.send(str(each), on_delivery=lambda found, error: ids.append(error or found))
            producer.flush()
    assert proxy.left == 0
    assert ids == [MessageId(0, offset) for offset in (0, 1, 2, -1, -1, -1, 6, 7, 8)]


def test_own_record_is_written_again(far: Queue, proxy: VagueProxy) -> None:
    """What is read up to it includes everything that was committed before."""
    with ResumingProducer(far.name, "copier", bootstrap_servers=far.bootstrap_servers) as first:
        first.send("a")
        first.commit(1)
    topic = f"{far.name}.producers"
    config = transactional_producer_config(far.bootstrap_servers, "another", "another", None)
    producer = TransactionalProducer(config, 10)
    proxy.be_vague(topic)
    ends = write_own(producer, [own_tombstone(topic)])
    producer.close()
    assert proxy.left == 0
    assert ends == {0: read_all(far.bootstrap_servers, topic)[-1].offset() + 1}


def test_consumer_goes_on(far: Queue, proxy: VagueProxy) -> None:
    """STARTs and ENDs are durable, also where the client knows no place, or a wrong one."""
    far.send(*map(str, range(40)))
    with consumer_of(far) as consumer:
        for round_number in range(4):
            proxy.be_vague(f"{far.name}.markers", 2 * (round_number % 2))
            for message in receive_all(consumer, 10):
                message.ack()
            consumer.flush()
    assert proxy.left == 0
    assert ended(far) == [*range(40)]


def test_transaction_whose_ends_have_no_place_is_refused(far: Queue, proxy: VagueProxy) -> None:
    """Nothing is written, the messages are still held, and the next attempt is carried out once."""
    results = f"{far.name}.results"
    create_queue_topics(results, bootstrap_servers=far.bootstrap_servers, partitions=1)
    far.send("a")
    with consumer_of(far) as consumer:
        (message,) = receive_all(consumer, 1)
        proxy.be_vague(f"{far.name}.markers")
        with pytest.raises(TransactionError, match="did not say the place of a marker") as raised:
            acknowledge(consumer, message, results)
        assert (proxy.left, raised.value.nothing_written, raised.value.retriable) == (0, True, True)
        acknowledge(consumer, message, results)
    assert seen(Queue(results, far.bootstrap_servers)) == [b"r"]


def acknowledge(consumer: QueueConsumer, message: Message, results: str) -> None:
    """Acknowledge a message with a result."""
    with consumer.transaction() as tx:
        tx.send(results, "r")
        tx.ack(message)
