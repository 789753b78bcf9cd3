"""A tracker that starts says how far it has read, and when it is ready."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kmq_spark.core.decisions import Decisions
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.state import PartitionState
from kmq_spark.tracker import catch_up
from kmq_spark.tracker.catch_up import CatchUp

CATCHING_UP = (
    "tracker of orders is catching up: 800,000 markers left to read before it decides anything, 0 messages in flight"
)
READY = "tracker of orders is ready: {}, 0 in flight, took 0.0 s"


def outcome(partition: int, read_to: int) -> PartitionOutcome:
    """Return the outcome of a batch that read so far."""
    status = replace(PartitionState.empty().status(), next_marker_offset=read_to)
    return PartitionOutcome(partition, status, Decisions.empty())


def test_what_is_left_is_logged_until_the_log_is_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "LOG_INTERVAL_S", -1.0)
    caplog.set_level("INFO")
    progress = CatchUp("orders", {0: 1_000_000, 1: 10})
    progress.observe([outcome(0, 200_000)])
    progress.observe([outcome(0, 1_000_000)])
    progress.observe([outcome(1, 12)])
    progress.observe([outcome(1, 13)])
    assert [record.getMessage() for record in caplog.records] == [
        CATCHING_UP,
        READY.format("2 partitions"),
    ]


def test_start_that_needs_one_batch_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    progress = CatchUp("orders", {0: 5}, time.monotonic())
    progress.observe([outcome(0, 6)])
    progress.observe([outcome(0, 7)])
    assert [record.getMessage() for record in caplog.records] == [READY.format("1 partition")]


@pytest.mark.parametrize(
    ("read_to", "is_idle", "warns"),
    [((200, 200), False, True), ((200, 201), False, False), ((200,), False, False), ((200,), True, True)],
    ids=["batches read nothing more", "a batch reads more", "a long batch", "no batch"],
)
def test_start_that_can_read_no_further_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, read_to: tuple[int, ...], *, is_idle: bool,
    warns: bool,
) -> None:  # fmt: skip
    now_s = [100.0]
    monkeypatch.setattr("kmq_spark.tracker.catch_up.time.monotonic", lambda: now_s[0])
    progress = CatchUp("orders", {0: 1_000, 1: 10})
    for read in read_to:
        progress.observe([outcome(0, read), outcome(1, 10)])
        now_s[0] += catch_up.BLOCKED_AFTER_S
    progress.warn_if_blocked(is_idle=is_idle)
    assert ("has to read markers partition 0 to offset 1000, and has read nothing for" in caplog.text) == warns


def test_start_that_reads_nothing_at_all_is_reported_with_the_partitions_that_have_markers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "BLOCKED_AFTER_S", -1.0)
    CatchUp("orders", {0: 0, 1: 10, 2: 5}).warn_if_blocked(is_idle=True)
    assert "has to read markers partition 1 to offset 10, partition 2 to offset 5, and" in caplog.text


def test_start_that_is_over_is_not_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "BLOCKED_AFTER_S", -1.0)
    progress = CatchUp("orders", {0: 5})
    progress.observe([outcome(0, 5)])
    progress.warn_if_blocked(is_idle=True)
    # Not the whole log: at level INFO it says that the tracker is ready.
    assert "has to read" not in caplog.text
