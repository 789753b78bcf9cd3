"""
The positions that the sender commits: how far each markers partition is folded.

Rule 1: a position never moves back.
Rule 2: a position means folded, not sent: what is decided and not yet confirmed is still needed (`Position`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kmq_spark.kafka.positions import Heartbeat, Position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.core.state import Status
    from kmq_spark.kafka.positions import ResumePoint


class SenderPositions:
    """
    The positions of one sender. The caller holds the sender's lock.

    Attributes:
        current: Positions that the next commit contains, by markers partition.
        committed: Positions that are committed, by markers partition.
        queue_id: Topic id of the queue topic when the tracker began; empty if unknown.
    """

    def __init__(self, tracker_id: str) -> None:
        self._tracker_id = tracker_id
        self.current: dict[int, Position] = {}
        self.committed: dict[int, Position] = {}
        self._topic_id = self.queue_id = ""
        self._statuses: dict[int, Status] = {}
        self._reported_partitions: frozenset[int] = frozenset()  # partitions that a batch since `load` has reported on

    def load(self, resume: ResumePoint) -> None:
        """Begin where a tracker begins."""
        self.current = {p: at._replace(tracker_id=self._tracker_id) for p, at in resume.positions.items()}
        self.committed = dict(resume.positions)
        self._topic_id, self.queue_id = resume.topic_id, resume.queue_id
        self._statuses, self._reported_partitions = {}, frozenset()

    @property
    def is_changed(self) -> bool:
        """Whether there is a position that is not committed."""
        return self.current != self.committed

    def update(self, outcome: PartitionOutcome) -> None:
        """Advance to what a batch has folded of one partition."""
        partition, status = outcome.marker_partition, outcome.status
        self._reported_partitions |= {partition}
        self._statuses[partition] = status
        before = self.current.get(partition)
        # A batch that is read again, after a checkpoint was lost or replaced by an older one, must not move the
        # committed offset back.
        if before is None or status.next_marker_offset >= before.next_offset:
            self.current[partition] = Position(
                status.next_marker_offset,
                status.needed_marker_offset,
                self._tracker_id,
                rules=status.needed_rules,
                topic_id=self._topic_id,
                clock=status.needed_clock,
                queue_id=self.queue_id,
            )

    def advance_idle(self, read_to: Mapping[int, int]) -> None:
        """Advance to what an idle query has read, in partitions on which a batch since `load` has reported."""
        for partition, next_offset in read_to.items():
            position = self.current.get(partition)
            if partition not in self._reported_partitions or position is None or position.next_offset >= next_offset:
                continue
            nothing_needed = position.needed_offset == position.next_offset
            needed_offset = next_offset if nothing_needed else position.needed_offset
            self.current[partition] = position._replace(next_offset=next_offset, needed_offset=needed_offset)

    def note_committed(self, positions: Mapping[int, Position]) -> None:
        """Note that these positions are committed."""
        self.committed |= positions

    def heartbeat(self, partition: int, *, is_stopped: bool, snapshot_lag: int, trouble: str = "") -> Heartbeat:
        """Return what the commit of a partition reports about the tracker; see `Heartbeat`."""
        status, now_ms = self._statuses.get(partition), int(time.time() * 1000)
        if status is None:
            return Heartbeat(now_ms, is_stopped=is_stopped, snapshot_lag=snapshot_lag, trouble=trouble)
        return Heartbeat(now_ms, status.in_flight, status.next_deadline_at_ms, is_stopped, snapshot_lag, trouble)
