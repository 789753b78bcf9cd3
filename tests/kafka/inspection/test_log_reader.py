"""The reader of logs: from offsets to the present end, whatever its caller does between two records."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kmq_spark.kafka.log_reader import LogReader
from kmq_spark.kafka.settings import reader_config

if TYPE_CHECKING:
    from tests.kafka.conftest import Queue

pytestmark = pytest.mark.kafka

TIMEOUT_MS = 2_000


def test_time_out_does_not_count_what_the_caller_does(queue: Queue) -> None:
    """A caller that works on a record for longer than the time-out gets to the end."""
    queue.send("a")
    reader = LogReader(reader_config(queue.bootstrap_servers, "readers"), queue.name, TIMEOUT_MS)
    found = []
    for record in reader.read({0: 0}):
        found.append(record.value())
        time.sleep(TIMEOUT_MS / 1_000 + 0.5)
    assert found == [b"a"]
    reader.close()


def test_reader_goes_on_where_it_stopped(queue: Queue) -> None:
    queue.send(*"abc")
    reader = LogReader(reader_config(queue.bootstrap_servers, "readers"), queue.name, TIMEOUT_MS)
    assert [record.value() for record in reader.read({0: 1})] == [b"b", b"c"]
    queue.send(*"de")
    assert [record.value() for record in reader.read(reader.positions)] == [b"d", b"e"]
    assert [record.value() for record in reader.read(reader.positions)] == []
    reader.close()
