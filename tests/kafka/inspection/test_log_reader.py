"""The reader of logs: from offsets to the present end, whatever its caller does between two records."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.log_reader import LogReader, read_committed
from kmq_spark.kafka.settings import reader_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.kafka.conftest import Queue

pytestmark = pytest.mark.kafka

TIMEOUT_S = 2.0


def test_time_out_does_not_count_what_the_caller_does(queue: Queue) -> None:
    """A caller that works on a record for longer than the time-out gets to the end."""
    queue.send("a")
    reader = LogReader(reader_config(queue.bootstrap_servers, "readers"), queue.name, TIMEOUT_S)
    found = []
    for record in reader.read({0: 0}):
        found.append(record.value())
        time.sleep(TIMEOUT_S + 0.5)
    assert found == [b"a"]
    reader.close()


def test_reader_goes_on_where_it_stopped(queue: Queue) -> None:
    queue.send(*"abc")
    reader = LogReader(reader_config(queue.bootstrap_servers, "readers"), queue.name, TIMEOUT_S)
    assert [record.value() for record in reader.read({0: 1})] == [b"b", b"c"]
    queue.send(*"de")
    assert [record.value() for record in reader.read(reader.positions)] == [b"d", b"e"]
    assert [record.value() for record in reader.read(reader.positions)] == []
    reader.close()


def committed_values(
    queue: Queue, starts: Mapping[int, int] | None = None, patience_s: float | None = None
) -> list[bytes | None]:
    """Return what `read_committed` finds in the only partition of a queue."""
    config = reader_config(queue.bootstrap_servers, "readers")
    found = read_committed(config, queue.name, [0], TIMEOUT_S, starts=starts, patience_s=patience_s)
    return [record.value() for record in found]


def test_committed_records_are_read_from_the_offset_that_is_asked_for(queue: Queue) -> None:
    """An offset past the end belongs to a topic that was deleted and created again: reading starts at the beginning."""
    queue.send(*"abc")
    assert committed_values(queue) == [b"a", b"b", b"c"]
    assert committed_values(queue, {0: 2}) == [b"c"]
    assert committed_values(queue, {0: 3}) == []
    assert committed_values(queue, {0: 4}) == [b"a", b"b", b"c"]


def test_what_lies_behind_an_open_transaction_is_left_out_or_waited_for(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send("a")
    producer = Producer({"bootstrap.servers": queue.bootstrap_servers, "transactional.id": f"{queue.name}-open"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(queue.name, b"open", partition=0)
    producer.flush(30)
    queue.send("b")
    assert committed_values(queue, patience_s=0) == [b"a"]
    monkeypatch.setattr("kmq_spark.kafka.log_reader.LSO_WAIT_S", 0.0)
    with pytest.raises(KafkaClientError, match=r"got offset 1 of 3 in partition 0, a transaction is open"):
        committed_values(queue)
    producer.commit_transaction(30)
    assert committed_values(queue, patience_s=0) == [b"a", b"open", b"b"]
