"""Spark's maintenance of the state of a running tracker: snapshots are uploaded, and old files removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kafka.conftest import wait_until
from tests.kafka.stage import receive_all

if TYPE_CHECKING:
    from tests.kafka.stage import Stage

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

BATCHES = 40
"""More than Spark lets pass between two snapshots (10), and than it keeps (10 and what a snapshot needs)."""


@pytest.mark.slow  # Spark uploads every ten seconds
def test_state_of_a_tracker_that_runs_on_is_uploaded_and_what_is_older_is_removed(stage: Stage) -> None:
    """Without a snapshot the lineage in each commit grows until Spark cannot write it, after 863 batches."""
    state = stage.folder / "checkpoint" / stage.queue / "state" / "0"

    def another_batch(tracker_batches: int) -> bool:
        stage.send("a")
        receive_all(consumer, 1, ack=True)
        consumer.flush()
        return wait_until(lambda: tracker.stats.batches > tracker_batches)

    with stage.consumer() as consumer, stage.tracking() as tracker:
        assert another_batch(tracker.stats.batches)
        first = {path.name for path in state.glob("*/1_*.changelog")}
        assert first
        while tracker.stats.batches < BATCHES:
            assert another_batch(tracker.stats.batches)
        assert wait_until(lambda: another_batch(tracker.stats.batches) and any(state.glob("*/*.zip")))
        assert wait_until(
            lambda: (
                another_batch(tracker.stats.batches) and not first & {path.name for path in state.glob("*/*.changelog")}
            )
        )
        # The tracker sees it itself, on any file system: otherwise it would be unknown until the query fails.
        assert wait_until(
            lambda: another_batch(tracker.stats.batches) and 0 < tracker.snapshot_lag < tracker.stats.batches - 10
        )
        assert tracker.restarts == 0
