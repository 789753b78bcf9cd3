"""Payloads read back from partitions that the reader has not seen before, or that nobody has."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions

from kmq_spark.kafka.payloads import PayloadReader
from kmq_spark.kafka.settings import admin_config, producer_config, reader_config
from kmq_spark.kafka.topics import create_queue

pytestmark = pytest.mark.kafka


def test_partition_added_after_the_first_read_is_read_and_one_that_is_not_there_is_told(bootstrap_servers: str) -> None:
    """A queue may grow under a running tracker, and a marker may name any partition: neither stops it."""
    queue = f"grown.{time.time_ns()}"
    create_queue(queue, bootstrap_servers=bootstrap_servers, partitions=1)
    producer = Producer(producer_config(bootstrap_servers))
    producer.produce(queue, b"old", partition=0)
    producer.flush()
    reader = PayloadReader(reader_config(bootstrap_servers, "payloads"), queue, timeout_ms=10_000)
    try:
        assert [payload.message.value() for payload in reader.read({0: [0]}) if payload.message] == [b"old"]
        admin = AdminClient(admin_config(bootstrap_servers))
        for future in admin.create_partitions([NewPartitions(queue, 3)]).values():
            future.result()
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
