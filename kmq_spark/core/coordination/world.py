"""
The world of a coordination group: its members, claims, tasks and positions; what a record changes stands in `fold.py`.

Rule 1: a function of the log: every reader that has applied the same records has the same world.
Rule 2: members, resources and tasks are frozen values; the fold puts new ones in their place.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_MEMBERS = 5_000
MAX_RESOURCES = 50_000
"""Most resources that are held or have a position, in a group."""

MAX_TASKS = 10_000

STALE_AFTER = 2
"""A member is stale after this many T without a heartbeat; its holds ended after one T, by its own clock."""


class Member(NamedTuple):
    """
    A member of a group.

    Attributes:
        client_id: Its name.
        instance: The process that has the name.
        joined_at: Offset of the JOIN of this instance.
        metadata: Free bytes, for other members.
        is_draining: It gets no more tasks.
        seen_ms: The group's clock at its last heartbeat.
        renewed_ms: The group's clock at the last one that renewed its claims; none does while the group is paused.
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
    Something that one member at a time may hold.

    Attributes:
        holder: Client id of the holder, empty where it is free.
        epoch: Fencing token of the last claim: the offset of the record that granted it.
        position: Next one to process, None where no record has set one.
        claimed_to: End of the messages that the holder has claimed, for at most once.
    """

    holder: str = ""
    epoch: int = -1
    position: int | None = None
    claimed_to: int | None = None


class Task(NamedTuple):
    """
    A resource that only the assigned member may claim.

    Attributes:
        payload: Free bytes for the member that runs it.
        client_id: Client id of that member, empty where it is not assigned.
    """

    payload: bytes = b""
    client_id: str = ""


@dataclass(slots=True, eq=False)
class World:
    """
    A group as of an offset of its partition.

    Attributes:
        next_offset: Offset of the first record that was not applied.
        clock_ms: The group's clock: milliseconds that count for staleness (`fold.py`).
        last_append_ms: Append time of the last record, broker clock; -1 = none yet.
        newest_append_ms: Newest append time, broker clock; pauses end by it.
        heartbeat_ms: T; 0 = no member has joined yet.
        generation: Offset of the record that last changed the members; -1 = none.
        paused_until_ms: Broker clock; 0 = not paused.
        snapshot_at: Offset of the newest complete snapshot, -1 = none.
        members: By client id, in the order of their last heartbeats.
        held: Names of the resources of each holder, in the order in which the holders' claims were renewed.
        resources: By name.
        tasks: By name.
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
        """Return a world from its parts, as a snapshot has them; each holder is one of the members."""
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
        """Whether no claim is granted and none renewed."""
        return self.paused_until_ms > 0

    @property
    def leader(self) -> str:
        """Client id of the member that joined first, empty where there is none."""
        generation, client_id = self._leader
        if generation != self.generation:
            members = self.members.values()
            client_id = min(members, key=lambda member: member.joined_at).client_id if members else ""
            self._leader = (self.generation, client_id)
        return client_id

    @property
    def stale_after_ms(self) -> int:
        """Milliseconds of the group's clock after which a member without heartbeat is dropped."""
        return STALE_AFTER * self.heartbeat_ms

    @property
    def longest_step_ms(self) -> int:
        """Most that the group's clock moves from one record to the next."""
        return self.heartbeat_ms // 2
