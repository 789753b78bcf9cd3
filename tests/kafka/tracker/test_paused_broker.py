"""A broker that is suspended (SIGSTOP) while a tracker writes: its clients are replaced, and write again."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from kmq_spark.core.decisions import Decisions
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.state import Status
from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.settings import marker_producer_config, transactional_producer_config
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.tracker.queue_tracker import QueueTracker
from kmq_spark.tracker.ticker import Ticker
from tests.brokers import quick_broker
from tests.kafka.conftest import Queue, read_all, settings_of, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from confluent_kafka import KafkaError, Message
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def own_broker() -> Iterator[EmbeddedBroker]:
    """A broker that these tests may pause."""
    with quick_broker() as broker:
        yield broker


@pytest.fixture
def queue(own_broker: EmbeddedBroker) -> Queue:
    """A queue of one partition."""
    name, servers = f"paused-{time.time_ns()}", own_broker.bootstrap_servers
    create_queue_topics(name, bootstrap_servers=servers, partitions=1)
    return Queue(name, servers)


def test_transaction_that_timed_out_is_sent_again_by_a_new_producer(own_broker: EmbeddedBroker, queue: Queue) -> None:
    """
    A client that met a suspended broker may never find the transaction coordinator again. So it is used no more, also
    where it could abort its transaction.
    """
    config = transactional_producer_config(
        queue.bootstrap_servers,
        f"{queue.name}.test",
        extra={"delivery.timeout.ms": "1000"},
        transaction_timeout_ms=20_000,
    )
    reports: list[str] = []

    def resume_after_the_timeout(error: KafkaError | None, _: Message) -> None:
        reports.append("" if error is None else error.name())
        own_broker.resume()

    def work() -> None:
        if not reports:
            own_broker.pause()
        producer.send(OutgoingRecord(queue.name, 0, None, b"value", []), resume_after_the_timeout)

    producer = TransactionalProducer(config, 30, role="test")
    with pytest.raises(KafkaClientError, match=r"nothing was written.*run it again with a new producer") as failure:
        producer.run(work, [], None)
    assert failure.value.retriable
    assert producer.has_ended
    producer.close()
    producer = TransactionalProducer(config, 30, role="test")
    producer.run(work, [], None)
    producer.close()
    assert reports == ["_MSG_TIMED_OUT", ""]
    assert [record.value() for record in read_all(queue.bootstrap_servers, queue.name)] == [b"value"]


@pytest.mark.spark
def test_tracker_whose_broker_is_suspended_while_it_starts_starts_again(
    own_broker: EmbeddedBroker, queue: Queue, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader of one of its topics may be away for a moment just then."""
    monkeypatch.setenv("KMQ_KAFKA__TIMEOUT", "2")
    settings = settings_of(queue, checkpoint_dir=str(tmp_path), state_partitions=1)
    tracker = QueueTracker(spark, queue.name, settings)

    def suspend(point: str) -> None:
        if point == "tracker.positions-read" and not tracker.restarts:
            own_broker.pause()

    monkeypatch.setattr("kmq_spark.tracker.sender.redelivery.failpoint", suspend)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(tracker.run)
        try:
            assert wait_until(lambda: tracker.restarts > 0 or running.done())
            own_broker.resume()
            assert wait_until(lambda: tracker.wait_ready(0) or running.done())
        finally:
            own_broker.resume()
            tracker.stop()
        running.result()


def test_ticker_whose_producer_met_a_fatal_error_takes_a_new_one(own_broker: EmbeddedBroker, queue: Queue) -> None:
    """After a fatal error the client refuses every record; the ticker makes a new client and writes TICKs again."""
    topic, config = f"{queue.name}.markers", marker_producer_config(queue.bootstrap_servers, delivery_timeout_ms=1_000)
    # librdkafka's way to a fatal error: a record that timed out and may have been written.
    ticker = Ticker({**config, "enable.gapless.guarantee": True}, topic, 1, 0.05)
    ticker.start()
    try:
        ticker.wait_first_ticks(15)
        ticks = len(read_all(queue.bootstrap_servers, topic))
        own_broker.pause()
        resumed = threading.Timer(4.0, own_broker.resume)
        resumed.start()
        status = Status(10**6, 1, 1, 0, 1, {})
        ticker.observe([PartitionOutcome(0, status, Decisions.empty())])
        resumed.join()
        assert wait_until(lambda: len(read_all(queue.bootstrap_servers, topic)) > ticks + 5)
        assert ticker.failure is None
    finally:
        ticker.stop()
