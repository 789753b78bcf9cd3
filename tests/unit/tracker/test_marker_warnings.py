"""Warnings about markers that no correct client writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.core.decisions import Decisions
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.state import Status
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.tracker.sender.marker_warnings import MarkerWarnings

if TYPE_CHECKING:
    import pytest


def counting(partition: int = 0, **counters: int) -> PartitionOutcome:
    """Return what a batch reports on one partition: counters since its state began."""
    return PartitionOutcome(partition, Status(10, 2_000, 0, 4, None, counters), Decisions.empty())


def test_only_markers_that_are_new_since_the_last_batch_are_counted() -> None:
    """A counter belongs to a state: it begins again, smaller, where the state is rebuilt."""
    warnings = MarkerWarnings(QueueTopics("orders"))
    assert warnings.new_nonexistent(counting(nonexistent=5)) == 5
    assert warnings.new_nonexistent(counting(nonexistent=7)) == 2
    assert warnings.new_nonexistent(counting(1, nonexistent=7)) == 7
    assert warnings.new_nonexistent(counting(nonexistent=1)) == 0
    assert warnings.new_nonexistent(counting(nonexistent=3)) == 2


def test_batch_that_drops_nothing_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    warnings = MarkerWarnings(QueueTopics("orders"))
    warnings.log_nonexistent(0)
    assert caplog.records == []
    warnings.log_nonexistent(2)
    assert caplog.records[0].getMessage().startswith("2 messages of orders were dropped without a dead letter")
