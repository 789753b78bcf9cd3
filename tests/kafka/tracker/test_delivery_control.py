"""The tracker's part of delivery control on a real broker: backoff, deferrals, times to live, silent deliveries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from kmq_spark.core.markers import Marker, MarkerType, OffsetRange, Outcome, Release
from kmq_spark.wire.codec import decode_marker, encode_marker
from kmq_spark.wire.headers import DELAY_MS, DELIVERY_COUNT, DLQ_MESSAGE, ORIGIN, SILENT_COUNT, TTL_MS
from tests.kafka.conftest import read_all, wait_until

if TYPE_CHECKING:
    from confluent_kafka import Message

    from tests.kafka.stage import Stage

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

PARTITION = 0
LEASE_MS = 400


class Log:
    """The topics of a queue, written and read as a test needs them."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._producer = Producer({"bootstrap.servers": stage.bootstrap_servers, "linger.ms": 0})

    def send(self, *headers: tuple[str, bytes], count: int = 1) -> list[int]:
        """Write messages with headers; return their offsets."""
        offsets: list[int] = []
        for number in range(count):
            self._producer.produce(
                self.stage.queue, b"m%d" % number, partition=PARTITION, headers=list(headers),
                on_delivery=lambda _, record: offsets.append(record.offset() or 0),
            )  # fmt: skip
        self._producer.flush(10)
        assert len(offsets) == count
        return offsets

    def mark(self, marker: Marker) -> int:
        """Write a marker; return its append time."""
        times: list[int] = []
        self._producer.produce(
            self.stage.layout.topics.markers_topic, encode_marker(marker), partition=PARTITION,
            on_delivery=lambda _, record: times.append(record.timestamp()[1]),
        )  # fmt: skip
        self._producer.flush(10)
        return times[0]

    def copies(self) -> list[Message]:
        """Return what the tracker has sent to the queue topic."""
        found = read_all(self.stage.bootstrap_servers, self.stage.queue)
        return [record for record in found if ORIGIN in dict(record.headers() or [])]

    def dead_letters(self) -> list[Message]:
        """Return the dead letters."""
        return read_all(self.stage.bootstrap_servers, self.stage.layout.topics.dead_letter_topic)

    def ended(self, outcome: Outcome) -> list[int]:
        """Return the messages that have an END with an outcome, as often as they have one."""
        found = read_all(self.stage.bootstrap_servers, self.stage.layout.topics.markers_topic)
        markers = [decode_marker(record.value()) for record in found]
        return [
            first + step
            for marker in markers
            if marker.type is MarkerType.END and marker.outcome is outcome
            for first, count in marker.ranges
            for step in range(count)
        ]


def start(first: int, count: int = 1, *, lease_ms: int = LEASE_MS, delivery_count: int = 1) -> Marker:
    """Return a START."""
    return Marker(MarkerType.START, PARTITION, (OffsetRange(first, count),), lease_ms, delivery_count)


def release(message_offset: int, kind: Release) -> Marker:
    """Return a release that is due at once."""
    return Marker(MarkerType.KEEPALIVE, PARTITION, (OffsetRange(message_offset, 1),), 0, release=kind)


def header(message: Message, name: str) -> bytes | str | None:
    """Return a header of a record."""
    return dict(message.headers() or []).get(name)


@pytest.fixture
def log(stage: Stage) -> Log:
    """Return the log of a fresh queue."""
    return Log(stage)


def test_failed_message_rests_and_one_that_was_given_back_does_not(stage: Stage, log: Log) -> None:
    """By append times: lease plus backoff, backoff after a failure, no backoff. Silent deliveries are counted."""
    stage.put_rules(backoff="exponential", backoff_initial=0.6, backoff_max=0.9)
    silent, failed, given_back, second = log.send(count=4)
    with stage.tracking():
        since = {silent: log.mark(start(silent)) + LEASE_MS + 600}
        log.mark(start(failed, 2, lease_ms=60_000))
        since[failed] = log.mark(release(failed, Release.FAILED)) + 600
        since[given_back] = log.mark(release(given_back, Release.GIVEN_BACK))
        since[second] = log.mark(start(second, delivery_count=2)) + LEASE_MS + 900
        assert wait_until(lambda: len(log.copies()) == 4)
    lateness = {}
    for copy in log.copies():
        origin = int(str((header(copy, ORIGIN) or b"0:-1").decode()).partition(":")[2])  # type: ignore[union-attr]
        lateness[origin] = copy.timestamp()[1] - since[origin]
        assert header(copy, SILENT_COUNT) == (b"1" if origin in {silent, second} else None)
    assert min(lateness.values()) >= 0
    # A wait for backoff would put the one that was given back behind the one that failed before it.
    assert list(lateness) == sorted(since, key=since.__getitem__)


def test_deferred_message_comes_at_its_instant_and_its_delivery_does_not_count(stage: Stage, log: Log) -> None:
    """A delayed message: its copy is ready to be handed out, and its next delivery is number 1."""
    (offset,) = log.send((DELAY_MS, b"1500"))
    (sent,) = read_all(stage.bootstrap_servers, stage.queue)
    due_at_ms = sent.timestamp()[1] + 1_500
    with stage.tracking():
        covered = (OffsetRange(offset, 1),)
        log.mark(Marker(MarkerType.START, PARTITION, covered, never_handed_out=True, due_at_ms=due_at_ms))
        assert wait_until(lambda: len(log.copies()) == 1)
    (copy,) = log.copies()
    assert copy.timestamp()[1] >= due_at_ms
    assert (header(copy, DELIVERY_COUNT), header(copy, DELAY_MS), header(copy, SILENT_COUNT)) == (b"0", None, None)


def test_message_whose_time_is_over_is_not_sent_again(stage: Stage, log: Log) -> None:
    """Expired in the tracker (the lease ends later) or in a consumer at its START: dead-lettered once."""
    stage.put_rules(max_deliveries=3, expired="dead-letter")
    over, at_start = log.send((TTL_MS, b"300"), count=2)
    (living,) = log.send((TTL_MS, b"3600000"))
    with stage.tracking() as tracker:
        log.mark(start(over, 3))
        log.mark(Marker(MarkerType.END, PARTITION, (OffsetRange(at_start, 1),), outcome=Outcome.EXPIRED))
        assert wait_until(lambda: len(log.copies()) == 1)
        assert wait_until(lambda: tracker.stats.dead_lettered == 2)
        assert tracker.stats.expired == 0
    assert [header(copy, ORIGIN) for copy in log.copies()] == [b"0:%d" % living]
    reasons = {header(letter, DLQ_MESSAGE) for letter in log.dead_letters()}
    assert reasons == {b"expired: ttl of 300 ms was over", b"expired"}
    assert log.ended(Outcome.EXPIRED) == [at_start]
    assert sorted(log.ended(Outcome.DEAD_LETTERED)) == [over, at_start]
