"""Too many messages in flight: the tracker signals it, and consumers fetch nothing until there are fewer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from kmq_spark.config import checked_queue_settings
from kmq_spark.consumer import full_watch
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.consumer.full_watch import RecordFreshness
from kmq_spark.core.decisions import Decisions
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.state import Status
from kmq_spark.kafka.queue_rules import RULES_TOPIC, FullRecord, RulesReader, full_key, write_rules
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import new_client_id, reader_config
from kmq_spark.tracker.full_record import FullRecordWriter
from tests.kafka.conftest import Queue, wait_until
from tests.kafka.stage import receive_all
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kafka.stage import Stage

pytestmark = pytest.mark.kafka

LIMIT = 10


def reader_of(queue: Queue) -> RulesReader:
    """Return a reader of the rules of a queue."""
    topics = QueueTopics(queue.name)
    config = reader_config(queue.bootstrap_servers, topics.consumer_group, new_client_id("test"))
    return RulesReader(topics, config, 10)


def outcome(in_flight: int) -> list[PartitionOutcome]:
    """Return what a batch reports on a partition with *in_flight* messages in flight."""
    return [PartitionOutcome(0, Status(1, 0, in_flight, 0, None, {}), Decisions.empty())]


def test_record_is_there_above_the_limit_and_until_there_is_less_than_nine_tenths(queue: Queue) -> None:
    reader = reader_of(queue)
    writer = FullRecordWriter(QueueTopics(queue.name), reader, LIMIT, queue.bootstrap_servers, {})

    def is_signalled(in_flight: int, *, full: bool) -> bool:
        writer.observe(outcome(in_flight))

        def is_read() -> bool:
            reader.refresh()
            writer.refresh()
            return (reader.full is not None) == full

        return wait_until(is_read) and writer.is_full == full

    writer.is_ready = True
    assert is_signalled(LIMIT, full=False)
    assert is_signalled(LIMIT + 1, full=True)
    assert is_signalled(LIMIT - 1, full=True)
    assert is_signalled(LIMIT - 2, full=False)
    assert is_signalled(LIMIT, full=False)
    reader.close()


def test_record_of_a_dead_tracker_is_removed_by_the_next_one_once_it_has_read_the_log(queue: Queue) -> None:
    topics = QueueTopics(queue.name)
    write_rules(
        queue.name, checked_queue_settings({"max_in_flight": LIMIT}, "the test"), expected_version=0,
        bootstrap_servers=queue.bootstrap_servers,
    )  # fmt: skip
    write_full(queue)
    reader = reader_of(queue)

    def is_read() -> bool:
        reader.refresh()
        return reader.full is not None

    # The rules' transaction is committed a moment before a reader of committed records may pass it.
    assert wait_until(is_read)
    writer = FullRecordWriter(topics, reader, 1, queue.bootstrap_servers, {})
    writer.observe(outcome(LIMIT))
    writer.refresh()
    assert writer._producer is None  # nothing was written yet
    writer.is_ready = True

    def is_removed() -> bool:
        writer.refresh()
        reader.refresh()
        return reader.full is None

    assert wait_until(is_removed)
    reader.close()


def write_full(queue: Queue, value: bytes | None = b"{}") -> None:
    """Write or remove the record that says that a queue is full."""
    producer = Producer({"bootstrap.servers": queue.bootstrap_servers})
    producer.produce(RULES_TOPIC, value, full_key(QueueTopics(queue.name)), 0)
    assert producer.flush(10) == 0


def test_consumer_has_a_second_client_only_while_the_topic_changes(
    make_queue: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_watch, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(full_watch, "FRESH_S", 3.0)
    queue, other = make_queue(), make_queue()
    write_rules(
        other.name, checked_queue_settings({"max_in_flight": 1}, "the test"), expected_version=0,
        bootstrap_servers=queue.bootstrap_servers,
    )  # fmt: skip
    queue.send("message")
    with QueueConsumer(queue.name, bootstrap_servers=queue.bootstrap_servers) as consumer:
        watch = consumer._full_watch
        assert wait_until(lambda: watch._end is not None and watch.client is None)
        write_full(other)
        assert wait_until(lambda: watch.client is not None)
        assert not watch.is_full
        assert wait_until(lambda: watch.client is None)
        # Not JSON: that the record is there is all that counts.
        write_full(queue, b"\xff")
        assert wait_until(lambda: watch.is_full)
        assert consumer.receive(1, timeout=0) == []
        # Its tracker is gone: the record is not renewed.
        assert wait_until(lambda: not watch.is_full and watch.client is None)
        assert [message.value for message in receive_all(consumer, 1)] == [b"message"]
        write_full(queue)
        assert wait_until(lambda: watch.is_full)
        write_full(queue, None)
        # Removed long before it is too old.
        monkeypatch.setattr(full_watch, "FRESH_S", 600.0)
        assert wait_until(lambda: not watch.is_full)
    assert not watch.is_alive()
    assert watch.client is None


def test_consumer_of_a_broker_without_the_topic_goes_on_without_it(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = f"{queue.name}.missing"
    monkeypatch.setattr(full_watch, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(full_watch, "RULES_TOPIC", missing)
    looked = threading.Semaphore(0)
    queue.send("message")
    with QueueConsumer(queue.name, bootstrap_servers=queue.bootstrap_servers) as consumer:
        end_of = consumer._intake._fetcher.end_of

        def counting(topic: str, timeout: float) -> int:
            try:
                return end_of(topic, timeout)
            finally:
                looked.release()

        monkeypatch.setattr(consumer._intake._fetcher, "end_of", counting)
        for _ in range(3):
            assert looked.acquire(timeout=COMES_S)
        assert [message.value for message in receive_all(consumer, 1)] == [b"message"]
        assert consumer._full_watch.is_alive()
        assert consumer._full_watch.client is None
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    assert missing not in admin.list_topics(timeout=10).topics


def test_record_that_is_not_renewed_stops_no_consumer_for_longer_than_a_minute() -> None:
    freshness, record = RecordFreshness(), FullRecord(7, 1_000_000)
    assert not freshness.is_fresh(None, 0, 1_000)
    assert freshness.is_fresh(record, 10, 5_000)  # this host's clock is ahead of the broker's
    assert freshness.is_fresh(record, 70, 5_060)
    assert not freshness.is_fresh(record, 71, 5_061)
    assert freshness.is_fresh(FullRecord(8, 1_000_000), 80, 5_070)
    assert not freshness.is_fresh(None, 90, 5_080)


def test_record_that_was_old_when_the_consumer_started_does_not_count_until_it_is_renewed() -> None:
    freshness = RecordFreshness()
    assert not freshness.is_fresh(FullRecord(7, 1_000_000), 10, 1_061)
    assert not freshness.is_fresh(FullRecord(7, 1_000_000), 20, 1_071)
    assert freshness.is_fresh(FullRecord(9, 1_072_000), 30, 1_081)


@pytest.mark.spark
def test_consumers_of_a_full_queue_fetch_nothing_and_serve_the_group_and_go_on_after_acks(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_watch, "CHECK_INTERVAL_S", 0.2)
    sent = [f"message-{number}" for number in range(60)]
    stage.send(*sent)
    lease = {"lease_ms": 600_000}
    with stage.tracking() as tracker, stage.consumer(**lease) as first:
        held = receive_all(first, 40)
        # Later than the tracker and the consumer began.
        write_rules(
            stage.queue, checked_queue_settings({"max_in_flight": LIMIT}, "the test"), expected_version=0,
            bootstrap_servers=stage.bootstrap_servers,
        )  # fmt: skip
        assert wait_until(lambda: tracker.is_full is True and first._full_watch.is_full)
        assert first.receive(20, timeout=0.1) == []
        with stage.consumer(**lease) as second:
            assert wait_until(lambda: second._full_watch.is_full)

            def share_partitions() -> bool:
                # Who is full serves the group all the same.
                assert first.receive(20, timeout=0.1) == second.receive(20, timeout=0.1) == []
                return len(first._intake.owned) == 1 == len(second._intake.owned)

            assert wait_until(share_partitions)
            for message in held:
                message.ack()
            assert wait_until(lambda: not (first._full_watch.is_full or second._full_watch.is_full))
            assert tracker.is_full is False
            rest = []

            def is_all() -> bool:
                for consumer in (first, second):
                    for message in consumer.receive(5, timeout=0.1):
                        message.ack()
                        rest.append(message)
                return len(rest) >= len(sent) - len(held)

            assert wait_until(is_all)
    assert sorted(message.value or b"" for message in [*held, *rest]) == sorted(value.encode() for value in sent)
