"""The tracker of a busy queue pauses between two batches while nothing is due."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.tracker import pacing
from kmq_spark.wire.codec import encode_marker
from tests.kafka.conftest import wait_until
from tests.kafka.stage import receive_all
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.tracker.sender.sent import Sent
    from tests.kafka.stage import Stage

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

REST_S = 2.0
HOUR_S = 3_600.0


class Batches:
    """Counts the batches of a tracker."""

    number = 0

    def count(self, _outcomes: Sequence[PartitionOutcome], _sent: Sent) -> None:
        """Count one."""
        self.number += 1


@contextmanager
def busy_markers(stage: Stage) -> Iterator[None]:
    """Write markers to every partition, fifty times a second, for the time of a block; they have no effect."""
    over = threading.Event()
    renewals = [
        (partition, encode_marker(Marker(MarkerType.KEEPALIVE, partition, (OffsetRange(10**6, 1),), 3_600_000)))
        for partition in range(stage.layout.partition_count)
    ]

    def write() -> None:
        producer = Producer({"bootstrap.servers": stage.bootstrap_servers, "linger.ms": 0})
        while not over.wait(0.02):
            for partition, value in renewals:
                producer.produce(stage.layout.topics.markers_topic, value, partition=partition)
            producer.poll(0)
        producer.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


def test_release_rejection_and_short_lease_end_a_pause_in_which_they_are_written(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else ends these pauses: neither their length nor silence."""
    monkeypatch.setattr(pacing, "LONGEST_WATCHED_S", HOUR_S)
    monkeypatch.setattr(pacing, "QUIET_S", HOUR_S)
    stage.send("released", "rejected")
    with busy_markers(stage), stage.tracking() as tracker, stage.consumer(lease=3600) as consumer:
        messages = {message.value: message for message in receive_all(consumer, 2)}
        messages[b"released"].release()
        (again,) = receive_all(consumer, 1)
        assert (again.value, again.delivery_count) == (b"released", 2)
        messages[b"rejected"].reject("bad")
        assert wait_until(lambda: tracker.stats.dead_lettered == 1)
        stage.send("short")
        with stage.consumer(lease=1) as other:
            again.ack()
            consumer.close()
            assert [message.value for message in receive_all(other, 1)] == [b"short"]
            (late,) = receive_all(other, 1)
            assert (late.value, late.delivery_count) == (b"short", 2)
            late.ack()


@pytest.mark.slow
def test_tracker_of_a_busy_queue_with_long_leases_pauses_between_batches(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Markers arrive ten times a second; the tracker's batch durations do not contain the pauses."""
    monkeypatch.setattr(pacing, "LONGEST_WATCHED_S", 2 * REST_S)
    monkeypatch.setattr(pacing, "REST_S", REST_S)
    stage.send(*map(str, range(round(COMES_S * 10))))
    with stage.tracking() as tracker, stage.consumer(lease=3600) as consumer:
        (query,) = (each for each in stage.spark.streams.active if (each.name or "").endswith(stage.queue))
        until, settled, pause_s = time.monotonic() + COMES_S, 0, 0.0
        # A TICK that is due ends some pauses early.
        while time.monotonic() < until and pause_s < REST_S * 0.9:
            for message in consumer.receive(1, timeout=0.1):
                message.ack()
                settled += 1
            time.sleep(0.1)
            # The progress may be of another batch by the time that it is asked for again.
            progress, worked_s, newer = query.lastProgress, tracker.batch_s, query.lastProgress
            if progress and newer and worked_s is not None and newer.batchId == progress.batchId:
                pause_s = progress.durationMs["triggerExecution"] / 1000 - worked_s
        assert wait_until(lambda: sum(at.counters["acked"] for at in tracker.stats.statuses.values()) == settled > 0)
        assert pause_s >= REST_S * 0.9


@pytest.mark.slow
def test_tracker_that_gives_way_pauses_after_its_batch_until_it_need_not(stage: Stage) -> None:
    batches = Batches()
    with busy_markers(stage), stage.tracking() as tracker:
        tracker.gives_way_s = HOUR_S
        tracker.on_batch = batches.count
        assert wait_until(lambda: batches.number == 1)
        time.sleep(3.0)
        assert batches.number <= 2  # the one that gives way, and one that was under way before
        tracker.gives_way_s, at_first = 0.0, batches.number
        assert wait_until(lambda: batches.number > at_first + 1)
