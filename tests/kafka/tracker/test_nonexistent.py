"""STARTs of offsets past the end of the queue topic, while a tracker runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from kmq_spark.core.markers import MAX_DUE_AT_MS, MAX_MESSAGES_PER_MARKER, Marker, MarkerType, OffsetRange
from kmq_spark.wire.codec import encode_marker
from tests.kafka.conftest import read_all
from tests.kafka.stage import receive_all, wait_until

if TYPE_CHECKING:
    from tests.kafka.stage import Stage

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def test_messages_that_do_not_exist_leave_within_seconds_and_a_message_beside_them_stays(stage: Stage) -> None:
    """A record of 30 bytes could otherwise occupy the tracker's memory until the year 9999."""
    past = Marker(
        MarkerType.START, 0, (OffsetRange(50_000_000, MAX_MESSAGES_PER_MARKER),), redeliver_after_ms=43_200_000
    )
    producer = Producer({"bootstrap.servers": stage.bootstrap_servers})
    with stage.tracking() as tracker, stage.consumer(lease_ms=3_600_000) as consumer:

        def counted(name: str) -> int:
            return sum(status.counters[name] for status in tracker.stats.statuses.values())

        def in_flight() -> int:
            return sum(status.in_flight for status in tracker.stats.statuses.values())

        stage.send("a")
        (message,) = receive_all(consumer, 1)
        for marker in (past, replace(past, due_at_ms=MAX_DUE_AT_MS, never_handed_out=True)):
            before = counted("nonexistent")
            producer.produce(f"{stage.queue}.markers", encode_marker(marker), partition=0)
            assert producer.flush(10) == 0
            assert wait_until(lambda before=before: counted("nonexistent") == before + MAX_MESSAGES_PER_MARKER)  # type: ignore[misc]  # a default, not an argument
            assert in_flight() == 1
        assert counted("started") == 2 * MAX_MESSAGES_PER_MARKER + 1
        message.ack()
        assert wait_until(lambda: in_flight() == 0)
        assert (counted("acked"), tracker.stats.redelivered, tracker.stats.dead_lettered) == (1, 0, 0)
    assert read_all(stage.bootstrap_servers, f"{stage.queue}.dlq") == []
