"""The reader of payloads on a real broker: each wanted message is reported once, whatever became of the log."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.kafka.payloads import PayloadReader
from kmq_spark.kafka.settings import reader_config, transactional_producer_config
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.producer.producer import QueueProducer
from tests.kafka.conftest import delete_topics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.kafka


@pytest.fixture
def topic(bootstrap_servers: str) -> str:
    """A queue topic with one partition."""
    return create_queue_topics(
        f"q{time.time_ns()}", bootstrap_servers=bootstrap_servers, partitions=1
    ).topics.queue_topic


@pytest.fixture
def open_reader(bootstrap_servers: str, topic: str) -> Iterator[Callable[[float], PayloadReader]]:
    """Make readers with a time-out, seconds."""
    readers: list[PayloadReader] = []

    def open_one(timeout: float) -> PayloadReader:
        readers.append(PayloadReader(reader_config(bootstrap_servers, "payload-reader-test"), topic, timeout))
        return readers[-1]

    yield open_one
    for reader in readers:
        reader.close()


def send(bootstrap_servers: str, topic: str, *values: bytes) -> None:
    """Send messages and wait for them."""
    with QueueProducer(topic, bootstrap_servers=bootstrap_servers) as producer:
        for value in values:
            producer.send(value)


def delete_below(bootstrap_servers: str, topic: str, offset: int) -> None:
    """Delete the messages below an offset, as retention does."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for future in admin.delete_records([TopicPartition(topic, 0, offset)]).values():
        future.result(10)


def test_payload_reader_reports_every_offset_once_over_gaps_and_ends(
    bootstrap_servers: str, topic: str, open_reader: Callable[[float], PayloadReader]
) -> None:
    """Aborted transactions, deleted records, offsets past the end, far jumps: each wanted offset is reported once."""
    send(bootstrap_servers, topic, *(b"%d" % number for number in range(4)))  # 0 to 3
    client = Producer(transactional_producer_config(bootstrap_servers, "payload-reader-test"))
    client.init_transactions(10)
    for is_kept in (False, True):
        client.begin_transaction()
        client.produce(topic, b"kept" if is_kept else b"aborted", partition=0)
        client.flush(10)
        if is_kept:
            client.commit_transaction(10)
        else:
            client.abort_transaction(10)
    # 4 aborted, 5 control, 6 kept, 7 control
    send(bootstrap_servers, topic, *(b"%d" % number for number in range(5_000)))
    delete_below(bootstrap_servers, topic, 2)
    reader = open_reader(10)
    wanted = [0, 1, 2, 3, 4, 5, 6, 7, 8, 4_900, 5_007, 5_008, 2**40]
    found = {each.offset: each.message and each.message.value() for each in reader.read({0: wanted})}
    assert found == {
        0: None, 1: None, 2: b"2", 3: b"3", 4: None, 5: None, 6: b"kept", 7: None, 8: b"0",
        4_900: b"4892", 5_007: b"4999", 5_008: None, 2**40: None,
    }  # fmt: skip
    assert list(reader.read({})) == []
    assert [each.message for each in reader.read({0: [7]})] == [None]


def test_payload_reader_notices_that_the_log_has_changed_since_it_asked_for_its_end(
    bootstrap_servers: str, topic: str, open_reader: Callable[[float], PayloadReader]
) -> None:
    """Retention has removed messages below the known end, and then the topic is deleted and created again."""
    send(bootstrap_servers, topic, *(b"%d" % number for number in range(10)))
    reader = open_reader(10)
    assert [each.message and each.message.value() for each in reader.read({0: [9]})] == [b"9"]
    delete_below(bootstrap_servers, topic, 5)
    found = {each.offset: each.message and each.message.value() for each in reader.read({0: [2, 4, 5, 8]})}
    assert found == {2: None, 4: None, 5: b"5", 8: b"8"}
    delete_topics(bootstrap_servers, topic)
    create_queue_topics(topic, bootstrap_servers=bootstrap_servers, partitions=1)
    send(bootstrap_servers, topic, b"new")
    assert [each.message for each in reader.read({0: [7]})] == [None]


def hide(bootstrap_servers: str, topic: str) -> Producer:
    """Send a message in a transaction that stays open; return its producer."""
    producer = Producer(transactional_producer_config(bootstrap_servers, "payload-reader-test"))
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce(topic, b"hidden", partition=0)
    producer.flush(10)
    return producer


@pytest.mark.parametrize("is_committed", [True, False])
def test_payload_behind_an_open_transaction_is_waited_for(
    bootstrap_servers: str, topic: str, open_reader: Callable[[float], PayloadReader], *, is_committed: bool
) -> None:
    """The record exists but is not visible yet: it is never reported as gone. The transaction's end decides."""
    send(bootstrap_servers, topic, b"before")
    producer = hide(bootstrap_servers, topic)
    send(bootstrap_servers, topic, b"behind")
    timer = threading.Timer(1.5, producer.commit_transaction if is_committed else producer.abort_transaction)
    timer.start()
    began_at = time.monotonic()
    wanted = [0, 1, 2, 3, 4, 2**40]
    found = {each.offset: each.message and each.message.value() for each in open_reader(10).read({0: wanted})}
    timer.join()
    assert time.monotonic() - began_at > 1.0
    # 3 is where the transaction's end is written while we wait; nothing was there when we looked.
    assert found == {0: b"before", 1: b"hidden" if is_committed else None, 2: b"behind", 3: None, 4: None, 2**40: None}


def test_payload_reader_reads_once_more_with_a_new_client(
    bootstrap_servers: str, topic: str, open_reader: Callable[[float], PayloadReader], caplog: pytest.LogCaptureFixture
) -> None:
    """The first read times out: an open transaction hides the message until the reader has given up once."""
    send(bootstrap_servers, topic, b"0")
    producer = hide(bootstrap_servers, topic)

    class Committing(logging.Handler):
        """Commits when the reader says that it reads again."""

        def emit(self, record: logging.LogRecord) -> None:
            if "once more" in record.getMessage():
                producer.commit_transaction(10)

    reader = open_reader(1)
    handler = Committing()
    logging.getLogger("kmq_spark.kafka.payloads").addHandler(handler)
    try:
        found = [(each.offset, each.message and each.message.value()) for each in reader.read({0: [0, 1]})]
    finally:
        logging.getLogger("kmq_spark.kafka.payloads").removeHandler(handler)
    assert found == [(0, b"0"), (1, b"hidden")]
    assert "got none of 1 within 1 s" in caplog.text
