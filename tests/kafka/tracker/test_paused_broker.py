"""A broker that is suspended (SIGSTOP) during a transaction of the tracker: redelivery resumes."""

from __future__ import annotations

import threading
import time
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
from kmq_spark.tracker.ticker import Ticker
from tests.brokers import quick_broker
from tests.kafka.conftest import read_all
from tests.kafka.stage import Stage, receive_all, wait_until
from tests.kafka.tracker.test_redelivery_sender import Place, due, outcome
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from confluent_kafka import KafkaError, Message
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.kafka

TRANSACTION_TIMEOUT_MS = 3_000
PAUSE_S = 20.0
"""Longer than a lease, than the transaction's time-out, and than an abort that is waited for."""


@pytest.fixture(scope="module")
def own_broker() -> Iterator[EmbeddedBroker]:
    """A broker that these tests may pause."""
    with quick_broker() as broker:
        yield broker


@pytest.fixture
def place(own_broker: EmbeddedBroker, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A queue of one partition."""
    name = f"{request.node.originalname[:60]}-{time.time_ns()}"
    servers = own_broker.bootstrap_servers
    place = Place(servers, create_queue_topics(name, bootstrap_servers=servers, partitions=1))
    yield place
    place.close()


def paused_while(broker: EmbeddedBroker, seconds: float) -> threading.Timer:
    """Pause a broker now, and resume it after *seconds*."""
    broker.pause()
    timer = threading.Timer(seconds, broker.resume)
    timer.start()
    return timer


@pytest.mark.slow  # a transaction has to time out
def test_transaction_of_a_paused_broker_is_given_up_and_sent_again_without_a_restart(
    own_broker: EmbeddedBroker, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch does not fail: the transaction was not committed, and a new term decides on its messages once more."""
    offsets = place.send(*(b"%d" % number for number in range(20)))
    # The new producer waits until the broker is back, and the time of a machine under load is added to that.
    sender = place.sender(timeout=COMES_S, transaction_timeout=TRANSACTION_TIMEOUT_MS / 1000)
    timers: list[threading.Timer] = []

    def pause_in_the_transaction(name: str) -> None:
        if name == "tracker.end-sent" and not timers:
            timers.append(paused_while(own_broker, PAUSE_S))

    monkeypatch.setattr("kmq_spark.tracker.sender.redelivery.failpoint", pause_in_the_transaction)
    assert sender.deliver([outcome(due(*offsets))]).redelivered == 0
    timers[0].join()
    assert sender.deliver([outcome(due(*offsets))]).redelivered == 20
    assert [record.value() for record in place.messages()] == [b"%d" % number for number in range(20)]
    assert [end.ranges for end in place.ends()] == [((0, 20),)]
    assert place.committed().next_offset == 10


def test_transaction_that_timed_out_is_sent_again_by_a_new_producer(own_broker: EmbeddedBroker, place: Place) -> None:
    """
    A client that met a suspended broker may never find the transaction coordinator again. So it is used no more, also
    where it could abort its transaction.
    """
    queue = place.layout.topics.queue_topic
    config = transactional_producer_config(
        place.bootstrap_servers, f"{queue}.test", extra={"delivery.timeout.ms": "1000"}, transaction_timeout_ms=20_000
    )
    reports: list[str] = []

    def resume_after_the_timeout(error: KafkaError | None, _: Message) -> None:
        reports.append("" if error is None else error.name())
        own_broker.resume()

    def work() -> None:
        if not reports:
            own_broker.pause()
        producer.send(OutgoingRecord(queue, 0, None, b"value", []), resume_after_the_timeout)

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
    assert [record.value() for record in read_all(place.bootstrap_servers, queue)] == [b"value"]


def test_older_tracker_that_replaces_its_producer_keeps_off_a_newer_ones_queue(
    own_broker: EmbeddedBroker, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer may have failed because a newer tracker has fenced it: the older one reads on for its TERM."""
    (offset,) = place.send(b"value")
    older = place.sender(timeout=10)
    newer: list[str] = []

    def take_over_in_the_transaction(name: str) -> None:
        if name == "tracker.end-sent" and not newer:
            newer.append("")
            newer.append(place.sender().tracker_id)

    monkeypatch.setattr("kmq_spark.tracker.sender.redelivery.failpoint", take_over_in_the_transaction)
    assert (older.deliver([outcome(due(offset))]).redelivered, older.is_fenced) == (0, True)
    assert place.messages() == []
    assert place.committed().tracker_id == newer[1]


def test_ticker_whose_producer_met_a_fatal_error_takes_a_new_one(own_broker: EmbeddedBroker, place: Place) -> None:
    """After a fatal error the client refuses every record; the ticker makes a new client and writes TICKs again."""
    config = marker_producer_config(place.bootstrap_servers, delivery_timeout_ms=1_000)
    # librdkafka's way to a fatal error: a record that timed out and may have been written.
    ticker = Ticker({**config, "enable.gapless.guarantee": True}, place.layout.topics.markers_topic, 1, 0.05)
    ticker.start()
    try:
        ticker.wait_first_ticks(15)
        ticks = len(read_all(place.bootstrap_servers, place.layout.topics.markers_topic))
        resumed = paused_while(own_broker, 4.0)
        status = Status(10**6, 1, 1, 0, 1, {})
        ticker.observe([PartitionOutcome(0, status, Decisions.empty())])
        resumed.join()
        assert wait_until(lambda: len(read_all(place.bootstrap_servers, place.layout.topics.markers_topic)) > ticks + 5)
        assert ticker.failure is None
    finally:
        ticker.stop()


@pytest.mark.slow  # a transaction has to time out
@pytest.mark.spark
def test_redelivery_goes_on_after_a_pause_longer_than_lease_and_transaction(
    own_broker: EmbeddedBroker, spark: SparkSession, tmp_path: Path
) -> None:
    stage = Stage(spark, own_broker.bootstrap_servers, tmp_path, f"paused-{time.time_ns()}")
    values = {b"m%d" % number for number in range(50)}
    with (
        stage.tracking(),
        stage.consumer(lease=10) as consumer,
    ):
        stage.send(*(value.decode() for value in values))
        held = receive_all(consumer, 50)
        assert {message.value for message in held} == values
        resumed = paused_while(own_broker, PAUSE_S)
        resumed.join()
        again: set[bytes | None] = set()

        def is_redelivered() -> bool:
            for message in consumer.receive(50, timeout=1.0):
                # The commit of a first delivery may be lost in the pause: then it is fetched again, and is not acked.
                if message.delivery_count > 1:
                    message.ack()
                    again.add(message.value)
            return again == values

        assert wait_until(is_redelivered)
