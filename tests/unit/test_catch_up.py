"""A tracker that rebuilds says how far it is, and is silent where there was nothing to wait for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kmq_spark import catch_up
from kmq_spark.catch_up import CatchUp
from kmq_spark.core.decisions import Decisions
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.state import PartitionState

if TYPE_CHECKING:
    import pytest


def outcome(partition: int, read_to: int) -> PartitionOutcome:
    """Return the outcome of a batch that read so far."""
    status = replace(PartitionState.empty().status(), next_marker_offset=read_to)
    return PartitionOutcome(partition, status, Decisions.empty())


def test_what_is_left_is_told_until_the_log_is_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "TELL_EVERY_S", -1.0)
    caplog.set_level("INFO")
    progress = CatchUp("orders", {0: 1_000_000, 1: 10})
    progress.observe([outcome(0, 200_000)])
    progress.observe([outcome(0, 1_000_000)])
    progress.observe([outcome(1, 12)])
    progress.observe([outcome(1, 13)])
    assert [record.getMessage() for record in caplog.records] == [
        "tracker of orders: 800,000 markers left to read before anything is decided, 0 messages in flight",
        "tracker of orders: the log is read to its end, 0 messages in flight",
    ]


def test_start_that_needs_one_batch_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    CatchUp("orders", {0: 5}).observe([outcome(0, 6)])
    assert not caplog.records
