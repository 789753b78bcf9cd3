"""The checker's reader of topics, beside transactions that end while it reads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from faults.topics import read_topic
from tests.limits import COMES_S

if TYPE_CHECKING:
    from kmq_spark.local.broker import EmbeddedBroker

pytestmark = [pytest.mark.faults, pytest.mark.kafka]


@pytest.fixture
def topic(broker: EmbeddedBroker) -> str:
    """A new topic with two partitions."""
    name = f"reading-{uuid4().hex}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.create_topics([NewTopic(name, 2, 1)])[name].result(30)
    return name


@pytest.fixture
def producer(broker: EmbeddedBroker, topic: str) -> Producer:
    """A producer with an open transaction of one record in partition 1."""
    config = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transactional.id": topic,
        "transaction.timeout.ms": 60_000,
    }
    producer = Producer(config)
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"held", partition=1)
    assert producer.flush(30) == 0
    return producer


def values(topic: str, broker: EmbeddedBroker) -> list[bytes | None]:
    """Return what the reader finds."""
    return [record.value() for record in read_topic(topic, broker.bootstrap_servers)]


def test_reader_waits_for_a_transaction_that_is_being_committed(
    broker: EmbeddedBroker, topic: str, producer: Producer
) -> None:
    """Its records were sent before the reading began, so they are not lost."""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(values, topic, broker)
        producer.commit_transaction(30)
        assert reading.result(60) == [b"held"]


def test_reader_ends_before_a_transaction_that_stays_open(
    broker: EmbeddedBroker, topic: str, producer: Producer
) -> None:
    """A killed process may leave one: its records are no part of the topic."""
    assert values(topic, broker) == []
    producer.abort_transaction(30)


def test_reader_ends_where_the_topic_ended_when_it_began_although_more_is_written(
    broker: EmbeddedBroker, topic: str
) -> None:
    """The client reports no end where the answer to each of its requests has a record."""
    writer = Producer({"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 0})
    writer.produce(topic, b"first", partition=0)
    assert writer.flush(30) == 0
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(values, topic, broker)
        until = time.monotonic() + COMES_S
        while not reading.done() and time.monotonic() < until:
            writer.produce(topic, b"later", partition=0)
            writer.flush(30)
            time.sleep(0.02)
        assert reading.result(COMES_S)[0] == b"first"
