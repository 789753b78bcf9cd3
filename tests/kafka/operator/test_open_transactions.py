"""`kmq doctor` finds the partitions that an open transaction keeps from being read."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Producer

from kmq_spark.cli import doctor
from kmq_spark.config import load_settings
from kmq_spark.inspection import findings
from kmq_spark.inspection.cluster import Cluster
from kmq_spark.kafka.topics import create_queue_topics
from tests.kafka.conftest import wait_until
from tests.limits import COMES_S

pytestmark = pytest.mark.kafka


def test_partition_behind_a_transaction_that_is_open_for_too_long_is_found(
    bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = f"open-{time.time_ns()}"
    create_queue_topics(queue, bootstrap_servers=bootstrap_servers, partitions=2)
    settings: dict[str, str | int | float | bool] = {"bootstrap.servers": bootstrap_servers, "transactional.id": queue}
    producer = Producer(settings)
    producer.init_transactions(COMES_S)
    producer.begin_transaction()
    producer.produce(queue, b"a", partition=1)
    assert producer.flush(COMES_S) == 0
    cluster = Cluster(bootstrap_servers, 20)
    try:
        topic = cluster.topics([queue])[queue]
        now_ms = int(time.time() * 1000)
        assert cluster.blocked(topic, now_ms - 3_600_000) == ()  # it is younger
        assert cluster.blocked(topic, now_ms + 3_600_000) == (1,)
        where = load_settings(None, {"kafka": {"bootstrap_servers": bootstrap_servers}})
        monkeypatch.setattr(findings, "OPEN_TOO_LONG_MS", -3_600_000)
        assert doctor.gather(queue, where).blocked == {queue: (1,), f"{queue}.markers": (), f"{queue}.dlq": ()}
        producer.commit_transaction(COMES_S)
        # Kafka writes the end marker soon after the commit.
        assert wait_until(lambda: cluster.blocked(cluster.topics([queue])[queue], now_ms + 3_600_000) == ())
    finally:
        cluster.close()
