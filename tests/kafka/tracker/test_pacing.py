"""The tracker of a busy queue without due messages pauses between two batches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.kafka.stage import wait_until

if TYPE_CHECKING:
    from tests.kafka.stage import Stage

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

REST_S = 2.0
BUSY_S = 8.0


def test_tracker_of_a_busy_queue_with_long_leases_pauses_between_batches(stage: Stage) -> None:
    """Markers arrive ten times a second; the tracker's batch durations do not contain the pauses."""
    count = round(BUSY_S * 10)
    stage.send(*map(str, range(count)))
    with stage.tracking(rest_ms=round(REST_S * 1000)) as tracker, stage.consumer(lease_ms=3_600_000) as consumer:
        (query,) = (each for each in stage.spark.streams.active if (each.name or "").endswith(stage.queue))
        until, settled = time.monotonic() + BUSY_S, 0
        pauses_s: list[float] = []
        while time.monotonic() < until and settled < count:
            for message in consumer.receive(1, timeout=0.1):
                message.ack()
                settled += 1
            time.sleep(0.1)
            # The progress may be of another batch by the time that it is asked for again.
            progress, worked_s, newer = query.lastProgress, tracker.batch_s, query.lastProgress
            if progress and newer and worked_s is not None and newer.batchId == progress.batchId:
                pauses_s.append(progress.durationMs["triggerExecution"] / 1000 - worked_s)
        assert wait_until(lambda: sum(at.counters["acked"] for at in tracker.stats.statuses.values()) == settled > 0)
        # The longest: a TICK that is due ends a pause early.
        assert max(pauses_s) >= REST_S * 0.9
