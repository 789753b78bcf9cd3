"""A client that reaches its broker, and gets no answer to some of its requests."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from faults.proxy import Connection, Proxy
from kmq_spark.consumer import history, membership
from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka import transaction
from kmq_spark.kafka.settings import reader_config, transactional_producer_config
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.local.probe import free_port
from tests.brokers import quick_java
from tests.kafka.conftest import Queue, consumer_of, covered, receive_all, track, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.kafka

PRODUCE, OFFSET_FETCH, FIND_COORDINATOR, JOIN_GROUP, HEARTBEAT = 0, 9, 10, 11, 12
"""Request types of Kafka's protocol (`api_key`)."""

COORDINATOR = frozenset({FIND_COORDINATOR, HEARTBEAT, JOIN_GROUP})


class SilentProxy(Proxy):
    """A proxy that ends each connection on which a request of a type in `unanswered` is sent, before it or after it."""

    unanswered: frozenset[int] = frozenset()
    done_unanswered: frozenset[int] = frozenset()

    def _request(self, connection: Connection, request: bytes) -> bytes:
        if int.from_bytes(request[:2]) in self.done_unanswered:
            connection.losing = request[4:8]
        return b"" if int.from_bytes(request[:2]) in self.unanswered else super()._request(connection, request)


@pytest.fixture(scope="module")
def proxy() -> Iterator[SilentProxy]:
    """A proxy before a port without a broker yet."""
    with contextlib.closing(SilentProxy(free_port())) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def far_queue(proxy: SilentProxy) -> Iterator[Queue]:
    """A queue whose broker is reached through the proxy."""
    names_itself = {"advertised.listeners": f"PLAINTEXT://{proxy.address}"}
    with EmbeddedBroker(None, proxy.target, names_itself, environment=quick_java()):
        create_queue_topics("far", bootstrap_servers=proxy.address, partitions=1)
        yield Queue("far", proxy.address)


def test_client_without_coordinator_is_replaced(
    far_queue: Queue,
    proxy: SilentProxy,
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
        proxy.unanswered = COORDINATOR
        assert wait_until(has_replaced)
        proxy.unanswered = frozenset()
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


@pytest.mark.parametrize("request_type", [OFFSET_FETCH, PRODUCE])
def test_receive_waits_for_an_answer_that_comes_late(
    far_queue: Queue,
    proxy: SilentProxy,
    request_type: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A loop around `receive` goes on, as one of `run` does. Nothing is lost, and nothing comes twice."""
    monkeypatch.setattr(history, "TIMEOUT_S", 1.0)
    values = [f"{request_type}", f"{request_type} again"]
    far_queue.send(*values)
    with consumer_of(far_queue, lease=2) as consumer:

        def warnings() -> int:
            return sum(getattr(record, "action", "") == "receive_failed" for record in caplog.records)

        def has_warned() -> bool:
            assert consumer.receive(10, timeout=0.2) == []
            return warnings() > 0

        proxy.unanswered = frozenset({request_type})
        assert wait_until(has_warned)
        assert consumer.receive(10, timeout=3.0) == []  # tries more than once, and is silent for a minute
        assert warnings() == 1
        proxy.unanswered = frozenset()
        received = receive_all(consumer, len(values))
        assert [(each.value, each.delivery_count) for each in received] == [(each.encode(), 1) for each in values]
        assert consumer.receive(10, timeout=1.0) == []
        for message in received:
            message.ack()


def test_message_whose_start_had_no_answer_is_left_to_the_tracker(far_queue: Queue, proxy: SilentProxy) -> None:
    """The START stands in the log, and its lease runs out before the consumer can start the message again."""
    with consumer_of(far_queue, lease=2) as consumer:
        far_queue.send("first")
        (message,) = receive_all(consumer, 1)
        message.ack()
        consumer.flush()
        far_queue.send("second")
        proxy.done_unanswered = frozenset({PRODUCE})

        def is_started() -> bool:
            assert consumer.receive(1, timeout=0.2) == []
            started = covered(*(each.marker for each in far_queue.markers(MarkerType.START)))
            return message.id.message_offset + 1 in started

        assert wait_until(is_started)
        time.sleep(2.5)  # the lease
        assert consumer.receive(1) == []
        proxy.done_unanswered = frozenset()
        assert wait_until(lambda: track(far_queue).redelivered == 1)
        (again,) = receive_all(consumer, 1)
        assert (again.value, again.delivery_count) == (b"second", 2)
        again.ack()
        assert consumer.receive(10, timeout=1.0) == []


def test_transaction_without_a_group_coordinator_is_run_by_a_new_producer(
    far_queue: Queue, proxy: SilentProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `OFFSETS_WAIT_S`, not after `timeout`: the call may never return, and redelivery waits for it."""
    group = f"offsets-{far_queue.name}"
    config = transactional_producer_config(far_queue.bootstrap_servers, group, group, None)
    member = Consumer(reader_config(far_queue.bootstrap_servers, group))
    positions = [TopicPartition(far_queue.name, 0, 7)]
    producer = TransactionalProducer(config, 60)
    proxy.unanswered = COORDINATOR
    with monkeypatch.context() as impatient:
        impatient.setattr(transaction, "OFFSETS_WAIT_S", 1.0)
        with pytest.raises(KafkaClientError, match="got no answer within 1 s") as raised:
            producer.run(lambda: None, positions, member.consumer_group_metadata())
    assert (raised.value.retriable, producer.has_ended) == (True, True)
    proxy.unanswered = frozenset()
    again = TransactionalProducer(config, 60)
    again.run(lambda: None, positions, member.consumer_group_metadata())
    assert [place.offset for place in member.committed(positions, timeout=10)] == [7]
    again.close()
    member.close()
