"""A client that reaches its broker, but no longer the coordinator of its group: the consumer replaces it."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from faults.proxy import Connection, Proxy
from kmq_spark.consumer import membership
from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.settings import reader_config, transactional_producer_config
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.local.probe import free_port
from tests.brokers import quick_java
from tests.kafka.conftest import Queue, consumer_of, receive_all, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.kafka

FIND_COORDINATOR, HEARTBEAT, JOIN_GROUP = 10, 12, 11
"""Request types of Kafka's protocol (`api_key`)."""


class CoordinatorProxy(Proxy):
    """A proxy that can end each connection on which a client asks for, or talks to, the coordinator of its group."""

    hides_coordinator = False

    def _request(self, connection: Connection, request: bytes) -> bytes:
        is_hidden = self.hides_coordinator and int.from_bytes(request[:2]) in {FIND_COORDINATOR, HEARTBEAT, JOIN_GROUP}
        return b"" if is_hidden else super()._request(connection, request)


@pytest.fixture(scope="module")
def proxy() -> Iterator[CoordinatorProxy]:
    """A proxy before a port without a broker yet."""
    with contextlib.closing(CoordinatorProxy(free_port())) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def far_queue(proxy: CoordinatorProxy) -> Iterator[Queue]:
    """A queue whose broker is reached through the proxy."""
    names_itself = {"advertised.listeners": f"PLAINTEXT://{proxy.address}"}
    with EmbeddedBroker(None, proxy.target, names_itself, environment=quick_java()):
        create_queue_topics("far", bootstrap_servers=proxy.address, partitions=1)
        yield Queue("far", proxy.address)


def test_client_without_coordinator_is_replaced(
    far_queue: Queue,
    proxy: CoordinatorProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The broker answers everything else. What is held stays held, and each message is received once."""
    monkeypatch.setattr(membership, "LOST_S", 2.0)
    monkeypatch.setattr(membership, "STATISTICS_MS", 200)

    with consumer_of(far_queue) as consumer:

        def has_replaced() -> bool:
            assert consumer.receive(10, timeout=0.2) == []
            return any(getattr(record, "action", "") == "client_replaced" for record in caplog.records)

        far_queue.send("before")
        received = receive_all(consumer, 1)
        proxy.hides_coordinator = True
        assert wait_until(has_replaced)
        proxy.hides_coordinator = False
        far_queue.send("after")

        def has_received() -> bool:
            received.extend(consumer.receive(10, timeout=0.5))
            return len(received) > 1

        assert wait_until(has_received)
        assert [message.value for message in received] == [b"before", b"after"]
        for message in received:
            message.ack()
        consumer.flush()
        assert far_queue.committed() == {0: 2}
        # The replaced client has left, or its session has timed out.
        admin = AdminClient({"bootstrap.servers": far_queue.bootstrap_servers})
        group = f"kmq.{far_queue.name}"
        assert wait_until(lambda: len(admin.describe_consumer_groups([group])[group].result().members) == 1)
        assert wait_until(lambda: not [each for each in threading.enumerate() if "replaced" in each.name])


def test_transaction_without_a_group_coordinator_is_run_by_a_new_producer(
    far_queue: Queue, proxy: CoordinatorProxy
) -> None:
    """After `OFFSETS_WAIT_S`, not after `timeout`: the call may never return, and redelivery waits for it."""
    group = f"offsets-{far_queue.name}"
    config = transactional_producer_config(far_queue.bootstrap_servers, group, group, None)
    member = Consumer(reader_config(far_queue.bootstrap_servers, group))
    positions = [TopicPartition(far_queue.name, 0, 7)]
    producer = TransactionalProducer(config, 60)
    proxy.hides_coordinator = True
    with pytest.raises(KafkaClientError, match="got no answer within 5 s") as raised:
        producer.run(lambda: None, positions, member.consumer_group_metadata())
    assert (raised.value.retriable, producer.has_ended) == (True, True)
    proxy.hides_coordinator = False
    again = TransactionalProducer(config, 60)
    again.run(lambda: None, positions, member.consumer_group_metadata())
    assert [place.offset for place in member.committed(positions, timeout=10)] == [7]
    again.close()
    member.close()
