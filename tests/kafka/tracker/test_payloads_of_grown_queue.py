"""Payloads read from partitions that are new to the reader, or that lie behind an open transaction."""

from __future__ import annotations

import threading
import time

import pytest
from confluent_kafka import Producer

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.payloads import PayloadReader
from kmq_spark.kafka.settings import producer_config, reader_config, transactional_producer_config
from kmq_spark.kafka.topics import create_queue_topics
from tests.kafka.conftest import add_partitions

pytestmark = pytest.mark.kafka


def test_partition_added_after_the_first_read_is_read_and_one_that_is_not_there_is_reported(
    bootstrap_servers: str,
) -> None:
    """A queue may grow under a running tracker, and a marker may name any partition: neither stops the tracker."""
    queue = f"grown.{time.time_ns()}"
    create_queue_topics(queue, bootstrap_servers=bootstrap_servers, partitions=1)
    producer = Producer(producer_config(bootstrap_servers))
    producer.produce(queue, b"old", partition=0)
    producer.flush()
    reader = PayloadReader(reader_config(bootstrap_servers, "payloads"), queue, timeout=10)
    try:
        assert [payload.message.value() for payload in reader.read({0: [0]}) if payload.message] == [b"old"]
        add_partitions(bootstrap_servers, 3, queue)
        producer.list_topics(queue)
        producer.produce(queue, b"new", partition=2)
        producer.flush()
        found = {payload.partition: payload.message for payload in reader.read({2: [0], 9: [5]})}
        new = found[2]
        assert new is not None
        assert new.value() == b"new"
        assert found[9] is None
    finally:
        reader.close()


class Hidden:
    """A topic whose end is hidden: offset 0 is plain, 1 is in an open transaction, 2 is plain again."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.topic = f"hidden.{time.time_ns()}"
        create_queue_topics(self.topic, bootstrap_servers=bootstrap_servers, partitions=1)
        plain = Producer(producer_config(bootstrap_servers))
        self.transaction = Producer(transactional_producer_config(bootstrap_servers, f"{self.topic}.open"))
        self.transaction.init_transactions(10)
        self.transaction.begin_transaction()
        for client, value in ((plain, b"before"), (self.transaction, b"within"), (plain, b"behind")):
            client.produce(self.topic, value, partition=0)
            client.flush(10)
        self._config = reader_config(bootstrap_servers, "payloads")

    def read(self, *offsets: int, timeout: float) -> dict[int, bytes | None]:
        """Return the values of some offsets, None for those that are gone."""
        reader = PayloadReader(self._config, self.topic, timeout)
        try:
            payloads = list(reader.read({0: offsets}))
            return {each.offset: each.message.value() if each.message else None for each in payloads}
        finally:
            reader.close()


@pytest.mark.parametrize("is_committed", [True, False])
def test_payload_behind_an_open_transaction_is_waited_for(bootstrap_servers: str, *, is_committed: bool) -> None:
    """The record exists but is not visible yet: it is never reported as gone. The transaction's end decides."""
    hidden = Hidden(bootstrap_servers)
    ends = hidden.transaction.commit_transaction if is_committed else hidden.transaction.abort_transaction
    timer = threading.Timer(1.5, ends)
    timer.start()
    began_at = time.monotonic()
    found = hidden.read(0, 1, 2, 3, 4, 2**40, timeout=10)
    timer.join()
    assert time.monotonic() - began_at > 1.0
    # 3 is where the transaction's end is written while we wait; nothing was there when we looked.
    assert found == {0: b"before", 1: b"within" if is_committed else None, 2: b"behind", 3: None, 4: None, 2**40: None}


def test_payload_that_stays_hidden_is_an_error_that_may_pass(bootstrap_servers: str) -> None:
    """The tracker starts again and reads again; a dead letter would have said that the payload is gone."""
    hidden = Hidden(bootstrap_servers)
    with pytest.raises(KafkaClientError, match=r"got none of 1 within 1 s; .* transaction hangs") as raised:
        hidden.read(0, 2, timeout=1)
    assert raised.value.retriable
    hidden.transaction.abort_transaction(10)
