"""
The state (world) of a coordination group: members, claims, tasks and positions. `fold.py` applies records to it.

Rule 1: the world is a function of the log: readers that have applied the same records have the same world.
Rule 2: members, resources and tasks are immutable; the fold replaces them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_MEMBERS = 5_000
MAX_RESOURCES = 50_000
"""Maximum number of resources in a group that are held or have a position."""

MAX_TASKS = 10_000

STALE_AFTER = 2
"""A member is stale after this many T without a heartbeat. By its own clock, its holds ended after one T."""


class Member(NamedTuple):
    """
    A member of a group.

    Attributes:
        instance: Id of the process that uses the name.
        joined_at: Offset of this instance's JOIN.
        is_draining: Whether no more tasks are assigned to it.
        seen_ms: The group's clock at its last heartbeat.
        renewed_ms: The group's clock at its last heartbeat that renewed its claims (none does in a pause).
    """

    client_id: str
    instance: str
    joined_at: int
    metadata: bytes = b""
    is_draining: bool = False
    seen_ms: int = 0
    renewed_ms: int = 0


class Resource(NamedTuple):
    """
    Something that only one member may hold at a time.

    Attributes:
        holder: Client id of the holder; empty if the resource is free.
        epoch: Fencing token of the last claim: the offset of its record.
        position: Next offset to process; None if no record has set it.
        claimed_to: End of the messages that the holder has claimed (at-most-once delivery).
        topic_id: Id of the Kafka topic whose offset the position is; empty if unknown or of none.
    """

    holder: str = ""
    epoch: int = -1
    position: int | None = None
    claimed_to: int | None = None
    topic_id: str = ""


class Task(NamedTuple):
    """
    A resource that only the assigned member may claim.

    Attributes:
        payload: Any bytes, for the member that runs the task.
        client_id: Client id of the assigned member; empty if there is none.
    """

    payload: bytes = b""
    client_id: str = ""


@dataclass(slots=True, eq=False)
class World:
    """
    A group as of an offset of its partition.

    Attributes:
        clock_ms: The group's clock, which decides who is stale (`fold.py`).
        last_append_ms: Append time of the last record, broker clock; -1 before the first.
        newest_append_ms: Newest append time, broker clock; it ends pauses.
        heartbeat_ms: T; 0 before the first JOIN.
        generation: Offset of the record that last changed the members; -1 before the first.
        paused_until_ms: End of the pause, broker clock; 0 if there is none.
        snapshot_at: Offset of the newest complete snapshot; -1 before the first.
        members: By client id, in the order of their last heartbeats.
        held: Names of the held resources by client id, in the order in which the claims were last renewed.
    """

    next_offset: int = 0
    clock_ms: int = 0
    last_append_ms: int = -1
    newest_append_ms: int = 0
    heartbeat_ms: int = 0
    generation: int = -1
    paused_until_ms: int = 0
    snapshot_at: int = -1
    members: OrderedDict[str, Member] = field(default_factory=OrderedDict)
    held: OrderedDict[str, set[str]] = field(default_factory=OrderedDict)
    resources: dict[str, Resource] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    _leader: tuple[int, str] = (-1, "")

    @classmethod
    def restored(cls, members: list[Member], resources: dict[str, Resource], **fields: Any) -> World:
        """Return the world of a snapshot; every holder must be a member."""
        world = cls(resources=resources, **fields)
        by_seen = sorted(members, key=lambda member: (member.seen_ms, member.joined_at))
        world.members.update((member.client_id, member) for member in by_seen)
        held: dict[str, set[str]] = {}
        for name, resource in resources.items():
            if resource.holder:
                held.setdefault(resource.holder, set()).add(name)
        by_renewed = sorted(by_seen, key=lambda member: (member.renewed_ms, member.joined_at))
        world.held.update((one.client_id, held[one.client_id]) for one in by_renewed if one.client_id in held)
        return world

    @property
    def is_paused(self) -> bool:
        """Whether the group is paused: claims are neither granted nor renewed."""
        return self.paused_until_ms > 0

    @property
    def leader(self) -> str:
        """Client id of the member that joined first; empty if there is no member."""
        generation, client_id = self._leader
        if generation != self.generation:
            members = self.members.values()
            client_id = min(members, key=lambda member: member.joined_at).client_id if members else ""
            self._leader = (self.generation, client_id)
        return client_id

    @property
    def stale_after_ms(self) -> int:
        """Time on the group's clock after which a member without a heartbeat is dropped."""
        return STALE_AFTER * self.heartbeat_ms

    @property
    def longest_step_ms(self) -> int:
        """Maximum step of the group's clock from one record to the next."""
        return self.heartbeat_ms // 2
