"""
The duties of a group's leader: assign tasks to members, and write snapshots.

Rule 1: no clock and no log here: the session asks what is due and writes it.
Rule 2: an assignment depends on the world only, so two leaders with the same world make the same assignment.

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
    """A function of tasks, members and the current task-to-member assignment that returns the new assignment."""

ASSIGNMENTS_AT_ONCE = 900
"""Assignments in one record. Even with the longest names, the record is not too large."""

SNAPSHOT_EVERY_RECORDS = 5_000
"""Number of records after which the leader writes a snapshot, however little time has passed."""

SNAPSHOT_EVERY_MS = 60_000.0
"""As seldom; and at once when a member begins to lead: records that it has read may be deleted before the next one."""

SNAPSHOTS_IN_RETENTION = 4
"""Minimum number of snapshots that the topic retains."""


def snapshot_every_ms(retention_ms: int) -> float:
    """Return the interval of the snapshots; *retention_ms* is 0 or less if unknown or unlimited."""
    return min(SNAPSHOT_EVERY_MS, retention_ms / SNAPSHOTS_IN_RETENTION) if retention_ms > 0 else SNAPSHOT_EVERY_MS


class Candidate(NamedTuple):
    """A member to which tasks may be assigned."""

    client_id: str
    metadata: bytes = b""


def sticky_balanced(tasks: Sequence[str], members: Sequence[Candidate], current: Mapping[str, str]) -> dict[str, str]:
    """Return a balanced assignment that moves as few tasks as possible."""
    if not members:
        return {}
    level, more = divmod(len(tasks), len(members))
    has = Counter(current.values())
    # The remainder goes to the members that have the most tasks.
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
    """Return the assignments that differ from the current ones; an empty client id unassigns a task."""
    candidates = [
        Candidate(member.client_id, member.metadata)
        for _, member in sorted(world.members.items())
        if not member.is_draining
    ]
    current = {name: task.client_id for name, task in world.tasks.items() if task.client_id}
    wanted = assign(sorted(world.tasks), candidates, current)
    # A user's function may return tasks and members that do not exist.
    allowed = {candidate.client_id for candidate in candidates}
    return [
        Assignment(name, client_id)
        for name in sorted(world.tasks)
        if (client_id := wanted.get(name, "") if wanted.get(name, "") in allowed else "") != current.get(name, "")
    ]


class Duties:
    """
    Decides what a leader must write now.

    `has_news`: whether the group has changed since the tasks were assigned. *now_ms* is the member's monotonic clock.
    """

    def __init__(self, assign: Assign, snapshot_every_ms: float) -> None:
        self.assign, self.snapshot_every_ms = assign, snapshot_every_ms
        self.has_news = True
        self._on_their_way, self._given_up_ms = 0, NEVER_HELD
        self._snapshot_ms = NEVER_HELD

    def note_assigns(self, records: int, until_ms: float) -> None:
        """Note that so many ASSIGNs are on their way; wait for them until then."""
        self._on_their_way, self._given_up_ms = records, until_ms

    def note_assign_read(self) -> None:
        """Note that an own ASSIGN was read back."""
        self._on_their_way -= 1

    def is_assign_due(self, world: World, now_ms: float) -> bool:
        """Return whether to assign the tasks now; not while earlier ASSIGNs are on their way."""
        return bool(self.has_news and world.tasks) and (self._on_their_way <= 0 or now_ms >= self._given_up_ms)

    def is_snapshot_due(self, world: World, now_ms: float) -> bool:
        """Return whether to write a snapshot now; if so, the interval begins again."""
        passed_ms, records = now_ms - self._snapshot_ms, world.next_offset - world.snapshot_at
        if records >= SNAPSHOT_EVERY_RECORDS or world.snapshot_at < world.members[world.leader].joined_at:
            is_due = passed_ms > world.heartbeat_ms
        else:
            is_due = passed_ms >= self.snapshot_every_ms and records > 1
        if is_due:
            self._snapshot_ms = now_ms
        return is_due
