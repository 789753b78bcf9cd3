"""
What a member does while it is the leader of its group: assign tasks, and write snapshots.

Rule 1: every session has a `Leader`; it writes only while the log says that this member leads.
Rule 2: one ASSIGN at a time: while the last one may still be read back, no other is written.
Rule 3: all methods are called under the session's lock.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kmq_spark.core.coordination.assign import changes
from kmq_spark.core.coordination.holds import NEVER_HELD
from kmq_spark.core.coordination.records import RecordType
from kmq_spark.errors import KafkaClientError, WireError
from kmq_spark.wire.coordination_snapshot import snapshot_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.coordination.session import Session
    from kmq_spark.core.coordination.assign import Assign

logger = logging.getLogger(__name__)

SNAPSHOT_EVERY_RECORDS = 5_000
"""Records of the partition after which the leader writes a snapshot, whatever the time."""

SNAPSHOT_EVERY_MS = 60_000.0
SNAPSHOTS_IN_RETENTION = 4
"""Snapshots that the topic holds at any time, at least."""

ASSIGNMENTS_AT_ONCE = 900
"""Assignments in one record: with the longest names it stays below the largest record."""


def snapshot_every_ms(retention_ms: int) -> float:
    """
    Return the time after which a leader writes a snapshot, milliseconds.

    Args:
        retention_ms: How long the topic keeps records; 0 or less if that is unknown or without limit.
    """
    return min(SNAPSHOT_EVERY_MS, retention_ms / SNAPSHOTS_IN_RETENTION) if retention_ms > 0 else SNAPSHOT_EVERY_MS


class Leader:
    """
    The leader's part of a session.

    Args:
        session: Writes the records and has the group's world.
        assign: Spreads the tasks.
        snapshot_every_ms: Time after which a snapshot is written, if there are new records.
        clock_ms: Monotonic clock, milliseconds.

    Attributes:
        snapshot_every_ms: As given.
    """

    def __init__(
        self, session: Session, assign: Assign, snapshot_every_ms: float, clock_ms: Callable[[], float]
    ) -> None:
        """Begin with nothing assigned, and the time of the last snapshot unknown: now."""
        self.snapshot_every_ms = snapshot_every_ms
        self._session, self._assign, self._clock_ms = session, assign, clock_ms
        self._assign_sequence, self._assign_sent_ms = 0, NEVER_HELD
        self._snapshot_ms = clock_ms()
        self._has_news = True

    def note_change(self) -> None:
        """Assign again at the next turn: the group has changed."""
        self._has_news = True

    def lead(self) -> None:
        """Assign tasks and write snapshots, if this member is the leader and there is reason to."""
        session = self._session
        if session.failure is not None or not session.is_member or session.world.leader != session.client_id:
            return
        try:
            if self._has_news and not self._is_assigning():
                self._has_news = False
                self._assign_tasks()
            if self._is_snapshot_due():
                self._write_snapshot()
        except KafkaClientError as error:
            self._has_news = True
            logger.warning("cannot lead: %s", error, extra={"action": "lead_failed"})

    def _is_assigning(self) -> bool:
        """Return whether an ASSIGN is on its way; one that is not read back within T is given up."""
        is_on_its_way = self._session.is_unanswered(self._assign_sequence)
        return is_on_its_way and self._clock_ms() < self._assign_sent_ms + self._session.heartbeat_ms

    def _assign_tasks(self) -> None:
        session = self._session
        if not session.world.tasks:
            return
        rows = changes(session.world, self._assign)
        self._assign_sent_ms = self._clock_ms()
        for start in range(0, len(rows), ASSIGNMENTS_AT_ONCE):
            session.forget_answer(self._assign_sequence)
            self._assign_sequence = session.send(
                RecordType.ASSIGN,
                awaited=True,
                generation=session.world.generation,
                assignments=tuple(rows[start : start + ASSIGNMENTS_AT_ONCE]),
            )

    def _is_snapshot_due(self) -> bool:
        world = self._session.world
        if world.next_offset - world.snapshot_at >= SNAPSHOT_EVERY_RECORDS:
            return self._clock_ms() - self._snapshot_ms > self._session.heartbeat_ms
        is_time = self._clock_ms() - self._snapshot_ms >= self.snapshot_every_ms
        return is_time and world.next_offset > world.snapshot_at + 1

    def _write_snapshot(self) -> None:
        self._snapshot_ms = self._clock_ms()
        try:
            parts = snapshot_parts(self._session.world)
        except WireError as error:
            logger.warning("cannot write a snapshot: %s", error, extra={"action": "snapshot_failed"})
            return
        for part in parts:
            self._session.send(RecordType.SNAPSHOT, snapshot=part)
