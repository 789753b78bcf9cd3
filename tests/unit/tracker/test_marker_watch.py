"""What the watch sees of the markers that Spark has not read, on librdkafka's own mock broker."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kmq_spark.core.backoff import Backoff
from kmq_spark.core.decisions import Decisions
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange, Outcome
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.policy import QueueRules
from kmq_spark.core.state import Status
from kmq_spark.tracker.marker_watch import MarkerWatch
from kmq_spark.wire.codec import encode_marker
from tests.limits import COMES_S
from tests.unit.mock_broker import PARTITIONS, mock_broker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOPIC = "watched.markers"
LEASE_MS = 30_000
AT_MS = 1_000_000


class Log:
    """A markers topic on a mock broker, and a watch that has read all that was there before the test."""

    def __init__(self, address: str) -> None:
        self._producer = Producer({"bootstrap.servers": address, "log_level": 0})
        reader = Consumer({"bootstrap.servers": address, "group.id": "ends", "log_level": 0})
        self.ends = {
            partition: reader.get_watermark_offsets(TopicPartition(TOPIC, partition), timeout=COMES_S)[1]
            for partition in range(PARTITIONS)
        }
        reader.close()
        config = {"bootstrap.servers": address, "group.id": "watch", "log_level": 0}
        self.watch = MarkerWatch(config, TOPIC)
        self.watch.observe(read(partition, end) for partition, end in self.ends.items())

    def write(self, partition: int, value: bytes, at_ms: int = AT_MS) -> None:
        """Write a record with a timestamp: the mock broker keeps the one of the producer."""
        self._producer.produce(TOPIC, value, partition=partition, timestamp=at_ms)
        assert self._producer.flush(COMES_S) == 0

    def see(self, record_bytes: int = 0) -> None:
        """Let the watch read until it has seen so many bytes and all partitions."""
        self.read_until(lambda: not self.watch.unread.is_blind and self.watch.unread.bytes >= record_bytes)

    def read_until(self, is_done: Callable[[], object]) -> None:
        """Let the watch read until something is so."""
        until_s = time.monotonic() + COMES_S
        while not is_done() and time.monotonic() < until_s:
            self.watch.read()
            time.sleep(0.01)


def read(partition: int, read_to: int, rules: QueueRules | None = None) -> PartitionOutcome:
    """Return the outcome of a batch that has read a partition up to an offset."""
    return PartitionOutcome(partition, Status(read_to, 1, 0, read_to, None, {}, rules=rules), Decisions.empty())


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the mock broker is."""
    with mock_broker(TOPIC) as address:
        yield address


@pytest.fixture
def log(address: str) -> Iterator[Log]:
    """Return a log with a watch."""
    log = Log(address)
    yield log
    log.watch.close()


def marker(kind: MarkerType, count: int, **fields: object) -> bytes:
    """Return a record of a marker that covers so many messages."""
    return encode_marker(Marker(kind, 0, (OffsetRange(0, count),), **fields))  # type: ignore[arg-type]


def test_watch_knows_the_earliest_deadline_and_the_size_of_what_is_unread(log: Log) -> None:
    late, early = marker(MarkerType.START, 500, redeliver_after_ms=LEASE_MS), marker(MarkerType.START, 1)
    log.write(1, late)
    log.write(2, late)
    log.write(2, early, AT_MS + 10)
    end = marker(MarkerType.END, 200)
    log.write(1, end)
    log.watch.begin()
    log.see(2 * len(late) + len(early) + len(end))
    unread = log.watch.unread
    assert unread.due_at_ms == {1: AT_MS + LEASE_MS, 2: AT_MS + 10}
    assert not unread.is_blind


def test_watch_begins_at_what_spark_has_not_read(log: Log) -> None:
    """What a batch has read is in its status."""
    log.write(3, marker(MarkerType.KEEPALIVE, 1))
    log.watch.observe([read(3, log.ends[3] + 1)])
    log.watch.begin()
    log.see()
    assert not log.watch.unread.is_blind
    assert log.watch.unread.due_at_ms == {}
    # A second pause reads from the same places.
    log.watch.end()
    record = marker(MarkerType.KEEPALIVE, 1)
    log.write(3, record)
    log.watch.begin()
    log.see(len(record))
    assert log.watch.unread.due_at_ms == {3: AT_MS}


@pytest.mark.parametrize("is_dead_lettered", [False, True])
def test_expired_message_is_due_where_the_rules_of_the_newest_batch_dead_letter_it(
    log: Log,
    is_dead_lettered: bool,  # noqa: FBT001  # a parameter of the test
) -> None:
    log.watch.observe([read(0, log.ends[0], QueueRules(1, 3, Backoff(), is_dead_lettered))])
    record = marker(MarkerType.END, 1, outcome=Outcome.EXPIRED)
    log.write(0, record)
    log.watch.begin()
    log.see(len(record))
    assert log.watch.unread.due_at_ms == ({0: -1} if is_dead_lettered else {})


def test_record_that_is_no_marker_only_counts_its_bytes(log: Log) -> None:
    log.write(0, b"\xff\xff")
    log.watch.begin()
    log.see(2)
    assert (log.watch.unread.bytes, log.watch.unread.is_blind) == (2, False)


def test_watch_that_has_not_heard_from_every_partition_is_blind(log: Log) -> None:
    log.watch.begin()
    assert log.watch.unread.is_blind
    log.see()
    assert not log.watch.unread.is_blind
    log.watch.end()
    log.watch.begin()
    assert log.watch.unread.is_blind  # in each pause anew


def test_watch_of_what_retention_removed_is_blind_and_says_so(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    """It never begins elsewhere: it would miss markers."""
    log.watch.observe([read(0, 10**9)])
    log.watch.begin()
    with caplog.at_level(logging.WARNING):
        log.read_until(lambda: caplog.records)
    assert log.watch.unread.is_blind
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"cannot read {TOPIC} ahead of Spark: ")


def test_closed_watch_is_blind(log: Log) -> None:
    """Spark may still run a batch when its query could not be stopped in time."""
    log.watch.begin()
    log.see()
    log.watch.close()
    log.watch.read()
    assert log.watch.unread.is_blind
    log.watch.begin()
    log.watch.end()
    assert log.watch.unread.is_blind


def test_watch_is_blind_for_a_pause_in_which_the_brokers_clock_was_set_back(log: Log) -> None:
    """What is in flight falls due at another append time than the newest batch said."""
    record = marker(MarkerType.START, 1, redeliver_after_ms=LEASE_MS)
    log.write(0, record)
    log.watch.begin()
    log.see(len(record))
    log.write(0, record, AT_MS - 30)  # the clocks of partition leaders differ by that
    log.see(2 * len(record))
    assert not log.watch.unread.is_blind
    log.write(0, record, AT_MS - 3_600_000)
    log.read_until(lambda: log.watch.unread.is_blind)
    assert log.watch.unread.is_blind
