"""
A tracker starts although the broker keeps offsets of its group as pending after their transaction has ended.

In our fault campaign a broker did so after it was suspended, and no tracker could start. Here a TxnOffsetCommit outside
of any transaction does the same, on a broker that does not verify transactions.
"""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from kmq_spark.kafka.settings import reader_config
from kmq_spark.kafka.topics import create_queue_topics
from tests.brokers import quick_broker
from tests.kafka.tracker.senders import new_sender
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from kmq_spark.kafka.topics import QueueLayout
    from kmq_spark.local.broker import EmbeddedBroker

pytestmark = [pytest.mark.kafka, pytest.mark.slow]  # it waits for time-outs

INIT_PRODUCER_ID, TXN_OFFSET_COMMIT = 22, 28
UNVERIFIED = {"transaction.partition.verification.enable": "false"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker that does not ask whether a partition belongs to a transaction."""
    folder = Path(tmp_path_factory.mktemp("unverified")) / "broker"
    with quick_broker(folder, extra=UNVERIFIED) as broker:
        yield broker


@pytest.fixture
def layout(broker: EmbeddedBroker) -> QueueLayout:
    """A queue with one partition."""
    return create_queue_topics(f"q{time.time_ns()}", bootstrap_servers=broker.bootstrap_servers, partitions=1)


def test_tracker_starts_although_offsets_of_an_earlier_transaction_stay_pending(
    broker: EmbeddedBroker, layout: QueueLayout, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that restarts, which first looks for a newer tracker. The pending offset is never committed."""
    monkeypatch.setattr("kmq_spark.kafka.positions.STABLE_WAIT_S", 2.0)
    known_ids: set[str] = set()
    for is_restart in (False, True):
        if is_restart:
            known_ids = {open_and_close(broker, layout)}
        leave_pending(broker, layout)
        assert "Timed out" in read_error(broker, layout)
        caplog.clear()
        known_ids = {open_and_close(broker, layout, known_ids)}
        assert "possibly the broker keeps offsets of an aborted transaction as pending" in caplog.text
        assert read_error(broker, layout) == ""


def open_and_close(broker: EmbeddedBroker, layout: QueueLayout, own_ids: Collection[str] = ()) -> str:
    """Open a sender, which must begin at the beginning; return its id."""
    sender = new_sender(layout, broker.bootstrap_servers)
    try:
        assert sender.open(own_ids).positions[0].next_offset == 0
        return sender.tracker_id
    finally:
        sender.close()


def read_error(broker: EmbeddedBroker, layout: QueueLayout) -> str:
    """Return why the group's offsets cannot be read; empty where they can."""
    client = Consumer(reader_config(broker.bootstrap_servers, layout.topics.tracker_group))
    try:
        client.committed([TopicPartition(layout.topics.markers_topic, 0)], timeout=2)
    except KafkaException as error:
        return str(error)
    finally:
        client.close()
    return ""


def leave_pending(broker: EmbeddedBroker, layout: QueueLayout) -> None:
    """Commit offset 77 outside of any transaction, as the tracker's producer."""
    group = text(layout.topics.tracker_group)
    until_s = time.monotonic() + COMES_S
    while True:
        error, producer_id, epoch = struct.unpack(
            ">hqh", ask(broker, INIT_PRODUCER_ID, group + struct.pack(">i", 60_000))[4:16]
        )
        if not error or time.monotonic() > until_s:
            break
        time.sleep(0.1)  # the coordinator loads, or ends an earlier transaction
    assert not error
    partitions = struct.pack(">iiqh", 1, 0, 77, -1)  # one partition: number, offset, no metadata
    topics = struct.pack(">i", 1) + text(layout.topics.markers_topic) + partitions
    answer = ask(broker, TXN_OFFSET_COMMIT, group + group + struct.pack(">qh", producer_id, epoch) + topics)
    assert answer[-2:] == b"\0\0", answer


def ask(broker: EmbeddedBroker, api: int, body: bytes) -> bytes:
    """Send a request of version 0 and return the answer without its header."""
    head = struct.pack(">hhi", api, 0, 1) + text("tests")
    with socket.create_connection(("127.0.0.1", broker.port), COMES_S) as connection, connection.makefile("rb") as file:
        connection.sendall(struct.pack(">i", len(head) + len(body)) + head + body)
        (length,) = struct.unpack(">i", file.read(4))
        return file.read(length)[4:]


def text(value: str) -> bytes:
    """Return a string of Kafka's protocol."""
    return struct.pack(">h", len(value)) + value.encode()
