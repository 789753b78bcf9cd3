"""
What the leader of a group does: spread the tasks over the members, and write snapshots.

Rule 1: no clock and no log here: a session asks what is due, and writes it.
Rule 2: an assignment depends on the world alone, so two leaders with the same world assign the same.

Source: KIP-54, sticky assignment.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.core.coordination.holds import NEVER_HELD
from kmq_spark.core.coordination.records import Assignment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kmq_spark.core.coordination.world import World

    Assign = Callable[[Sequence[str], Sequence["Candidate"], Mapping[str, str]], Mapping[str, str]]
    """From tasks, members, and the present task-to-member assignment to the wanted one."""

ASSIGNMENTS_AT_ONCE = 900
"""Assignments in one record: with the longest names it stays below the largest record."""

SNAPSHOT_EVERY_RECORDS = 5_000
"""Records of the partition after which the leader writes a snapshot, whatever the time."""

SNAPSHOT_EVERY_MS = 60_000.0
SNAPSHOTS_IN_RETENTION = 4
"""Snapshots that the topic holds at any time, at least."""


def snapshot_every_ms(retention_ms: int) -> float:
    """Return the time after which a leader writes a snapshot; *retention_ms* is 0 or less if unknown or endless."""
    return min(SNAPSHOT_EVERY_MS, retention_ms / SNAPSHOTS_IN_RETENTION) if retention_ms > 0 else SNAPSHOT_EVERY_MS


class Candidate(NamedTuple):
    """A member that may get tasks."""

    client_id: str
    metadata: bytes = b""


def sticky_balanced(tasks: Sequence[str], members: Sequence[Candidate], current: Mapping[str, str]) -> dict[str, str]:
    """
    Return a balanced assignment that moves as few tasks as possible.

    Args:
        tasks: All tasks of the group.
        members: Members that may get tasks.
        current: Task to client id, as it stands.

    Returns:
        Task to client id. Numbers of tasks differ by at most one between members.
    """
    if not members:
        return {}
    level, more = divmod(len(tasks), len(members))
    has = Counter(current.values())
    # One task more goes to those that have most.
    order = sorted((member.client_id for member in members), key=lambda client_id: (-has[client_id], client_id))
    quotas = {client_id: level + (row < more) for row, client_id in enumerate(order)}
    assigned: dict[str, str] = {}
    left: list[str] = []
    for task in sorted(tasks):
        client_id = current.get(task, "")
        if quotas.get(client_id, 0) > 0:
            quotas[client_id] -= 1
            assigned[task] = client_id
        else:
            left.append(task)
    places = (client_id for client_id in sorted(quotas) for _ in range(quotas[client_id]))
    assigned.update(zip(left, places, strict=True))
    return assigned


def changes(world: World, assign: Assign = sticky_balanced) -> list[Assignment]:
    """Return the assignments that differ from those that stand; an empty client id takes a task from its member."""
    candidates = [
        Candidate(member.client_id, member.metadata)
        for _, member in sorted(world.members.items())
        if not member.is_draining
    ]
    current = {name: task.client_id for name, task in world.tasks.items() if task.client_id}
    wanted = assign(sorted(world.tasks), candidates, current)
    # A function of the user may name tasks and members that do not exist.
    allowed = {candidate.client_id for candidate in candidates}
    return [
        Assignment(name, client_id)
        for name in sorted(world.tasks)
        if (client_id := wanted.get(name, "") if wanted.get(name, "") in allowed else "") != current.get(name, "")
    ]


class Duties:
    """
    What is due for the leader of a group.

    Args:
        assign: Spreads the tasks.
        snapshot_every_ms: Time after which a snapshot is due, if there are new records.
        now_ms: The member's monotonic clock. The time of the last snapshot is unknown: it counts as now.
    """

    def __init__(self, assign: Assign, snapshot_every_ms: float, now_ms: float) -> None:
        self.snapshot_every_ms = snapshot_every_ms
        self._assign = assign
        self._has_news = True
        self._on_their_way, self._given_up_ms = 0, NEVER_HELD
        self._snapshot_ms = now_ms

    def note_change(self) -> None:
        """Note that the group has changed, or that an ASSIGN could not be written."""
        self._has_news = True

    def note_assign_read(self) -> None:
        """Note that an own ASSIGN was read back."""
        self._on_their_way -= 1

    def assignments(self, world: World, now_ms: float) -> list[tuple[Assignment, ...]]:
        """Return what to assign now, for one ASSIGN each; nothing while the last ones may still be read back."""
        if not (self._has_news and world.tasks) or (self._on_their_way > 0 and now_ms < self._given_up_ms):
            return []
        self._has_news = False
        rows = changes(world, self._assign)
        starts = range(0, len(rows), ASSIGNMENTS_AT_ONCE)
        # One that is not read back within T is given up.
        self._on_their_way, self._given_up_ms = len(starts), now_ms + world.heartbeat_ms
        return [tuple(rows[start : start + ASSIGNMENTS_AT_ONCE]) for start in starts]

    def is_snapshot_due(self, world: World, now_ms: float) -> bool:
        """Return whether to write a snapshot now; the next one is due after this one."""
        passed_ms, records = now_ms - self._snapshot_ms, world.next_offset - world.snapshot_at
        if records >= SNAPSHOT_EVERY_RECORDS:
            is_due = passed_ms > world.heartbeat_ms
        else:
            is_due = passed_ms >= self.snapshot_every_ms and records > 1
        if is_due:
            self._snapshot_ms = now_ms
        return is_due
