"""The positions that the sender commits, and what moves them."""

from __future__ import annotations

from kmq_spark.core.clock import ClockStart
from kmq_spark.core.decisions import Decisions
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.state import Status
from kmq_spark.kafka.positions import Heartbeat, Position, ResumePoint
from kmq_spark.tracker.sender.positions import SenderPositions


def loaded(next_offset: int = 10, needed_offset: int = 4) -> SenderPositions:
    """Return the positions of a tracker that takes one partition over from another tracker."""
    left = {0: Position(next_offset, needed_offset, "older", topic_id="T")}
    positions = SenderPositions("newer")
    positions.load(ResumePoint(left, {0: needed_offset}, topic_id="T"))
    return positions


def folded(next_offset: int, needed_offset: int, partition: int = 0, in_flight: int = 0) -> PartitionOutcome:
    """Return what a batch reports on one partition."""
    due_at_ms = 9_000 if in_flight else None
    status = Status(next_offset, 2_000, in_flight, needed_offset, due_at_ms, {})
    return PartitionOutcome(partition, status, Decisions.empty())


def offsets(positions: SenderPositions) -> dict[int, tuple[int, int]]:
    """Return next and needed offset by partition."""
    return {partition: (at.next_offset, at.needed_offset) for partition, at in positions.current.items()}


def test_tracker_that_takes_over_has_its_id_to_commit() -> None:
    positions = loaded()
    assert positions.is_changed
    assert positions.current == {0: Position(10, 4, "newer", topic_id="T")}
    positions.note_committed(positions.current)
    assert not positions.is_changed


def test_batch_that_is_read_again_does_not_move_a_position_back() -> None:
    positions = loaded()
    positions.update(folded(50, 40))
    positions.update(folded(20, 15))
    assert offsets(positions) == {0: (50, 40)}


def test_new_partition_has_a_position() -> None:
    positions = loaded()
    positions.update(folded(3, 1, partition=2))
    assert positions.current[2] == Position(3, 1, "newer", topic_id="T", clock=ClockStart(0, 2_000))


def test_idle_position_advances_only_after_a_batch_has_reported_on_its_partition() -> None:
    """Before that, the commit would hide a START that only the checkpoint contains."""
    positions = loaded()
    positions.advance_idle({0: 13, 7: 5})
    assert offsets(positions) == {0: (10, 4)}
    positions.update(folded(11, 11))
    positions.advance_idle({0: 13, 7: 5})
    assert offsets(positions) == {0: (13, 13)}
    positions.advance_idle({0: 12})
    assert offsets(positions) == {0: (13, 13)}


def test_idle_position_keeps_the_oldest_marker_that_is_needed() -> None:
    positions = loaded()
    positions.update(folded(20, 15, in_flight=1))
    positions.advance_idle({0: 22})
    assert offsets(positions) == {0: (22, 15)}


def test_heartbeat_reports_the_newest_status_of_its_partition() -> None:
    positions = loaded()
    before = positions.heartbeat(0, is_stopped=False, snapshot_lag=3, trouble="disk full")
    assert before[1:] == (0, None, False, 3, "disk full")
    assert Heartbeat.from_topic_partition(Position(1, 1).to_topic_partition("m", 0, before)) == before
    positions.update(folded(11, 5, in_flight=2))
    after = positions.heartbeat(0, is_stopped=True, snapshot_lag=0)
    assert (after.in_flight, after.due_at_ms, after.is_stopped, after.snapshot_lag) == (2, 9_000, True, 0)
