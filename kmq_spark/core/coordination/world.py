"""
The world of a coordination group: its members, claims, tasks and positions.

Rule 1: a function of the log: every reader that applied the same records has the same world (`fold.py`).
Rule 2: this file keeps and looks up; what a record changes stands in `fold.py`.
Rule 3: what can be computed from the rest is no part of a snapshot: the resources of a member, its tasks, the leader.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_MEMBERS = 5_000
"""Most members of a group."""

MAX_RESOURCES = 50_000
"""Most resources that are held or have a position, in a group."""

MAX_TASKS = 10_000
"""Most tasks of a group."""

STALE_AFTER = 2
"""A member is stale after this many T without a heartbeat; its holds ended after one T, by its own clock."""


@dataclass(slots=True)
class Member:
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
        held: Resources that it holds.
        tasks: Tasks that it is assigned to.
    """

    client_id: str
    instance: str
    joined_at: int
    metadata: bytes = b""
    is_draining: bool = False
    seen_ms: int = 0
    renewed_ms: int = 0
    held: set[str] = field(default_factory=set)
    tasks: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Resource:
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


@dataclass(slots=True)
class Task:
    """
    A resource that only the assigned member may claim.

    Attributes:
        payload: Free bytes for the member that runs it.
        client_id: Client id of that member, empty where it is not assigned.
    """

    payload: bytes = b""
    client_id: str = ""


def first_joined(members: Mapping[str, Member]) -> str:
    """Return the client id of the member that joined first, empty where there is none."""
    return min(members.values(), key=lambda member: member.joined_at).client_id if members else ""


@dataclass(slots=True, eq=False)
class World:
    """
    A group as of an offset of its partition.

    Attributes:
        leader_rule: Members to the client id of the leader. Every member of a group must use the same rule, and it may
            depend on what a JOIN or a DRAIN sets, not on heartbeats.
        next_offset: Offset of the first record that was not applied.
        clock_ms: The group's clock: milliseconds that count for staleness (`fold.py`).
        last_append_ms: Append time of the last record, broker clock; -1 = none yet.
        newest_append_ms: Newest append time, broker clock; pauses end by it.
        heartbeat_ms: T; 0 = no member has joined yet.
        generation: Offset of the record that last changed the members; -1 = none.
        paused_until_ms: Broker clock; 0 = not paused.
        snapshot_at: Offset of the newest complete snapshot, -1 = none.
        members: By client id, in the order of their last heartbeats.
        holders: Members that hold resources, in the order in which their claims were renewed.
        resources: By name.
        tasks: By name.
    """

    leader_rule: Callable[[Mapping[str, Member]], str] = first_joined
    next_offset: int = 0
    clock_ms: int = 0
    last_append_ms: int = -1
    newest_append_ms: int = 0
    heartbeat_ms: int = 0
    generation: int = -1
    paused_until_ms: int = 0
    snapshot_at: int = -1
    members: OrderedDict[str, Member] = field(default_factory=OrderedDict)
    holders: OrderedDict[str, Member] = field(default_factory=OrderedDict)
    resources: dict[str, Resource] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    _leader: tuple[int, str] = (-1, "")

    @classmethod
    def restored(
        cls, members: Mapping[str, Member], resources: dict[str, Resource], tasks: dict[str, Task], **fields: Any
    ) -> World:
        """
        Return a world from its parts, as a snapshot has them.

        Args:
            members: By client id.
            resources: By name; each holder is one of the members.
            tasks: By name; each assigned one to one of the members.
            fields: The other attributes.
        """
        world = cls(resources=resources, tasks=tasks, **fields)
        for name, resource in resources.items():
            if resource.holder:
                members[resource.holder].held.add(name)
        for name, task in tasks.items():
            if task.client_id:
                members[task.client_id].tasks.add(name)
        by_seen = sorted(members.values(), key=lambda member: (member.seen_ms, member.joined_at))
        by_renewed = sorted(by_seen, key=lambda member: (member.renewed_ms, member.joined_at))
        world.members.update((member.client_id, member) for member in by_seen)
        world.holders.update((member.client_id, member) for member in by_renewed if member.held)
        return world

    @property
    def is_paused(self) -> bool:
        """Whether no claim is granted and none renewed."""
        return self.paused_until_ms > 0

    @property
    def leader(self) -> str:
        """Client id of the leader of this generation, empty where there is no member."""
        generation, client_id = self._leader
        if generation != self.generation:
            client_id = self.leader_rule(self.members)
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

    def epoch_of(self, resource: str, client_id: str, instance: str) -> int | None:
        """Return the epoch under which an instance of a member holds a resource, None where it does not."""
        member, claim = self.members.get(client_id), self.resources.get(resource)
        if member is None or member.instance != instance or claim is None or claim.holder != client_id:
            return None
        return claim.epoch

    def view(self) -> dict[str, Any]:
        """
        Return everything that makes a world, as plain values: two worlds are equal where their views are.

        The rows of members, resources and tasks are sorted by name.
        """
        return {
            "next_offset": self.next_offset,
            "clock_ms": self.clock_ms,
            "last_append_ms": self.last_append_ms,
            "newest_append_ms": self.newest_append_ms,
            "heartbeat_ms": self.heartbeat_ms,
            "generation": self.generation,
            "leader": self.leader,
            "paused_until_ms": self.paused_until_ms,
            "snapshot_at": self.snapshot_at,
            "members": {
                name: {
                    "instance": member.instance,
                    "joined_at": member.joined_at,
                    "metadata": member.metadata,
                    "is_draining": member.is_draining,
                    "seen_ms": member.seen_ms,
                    "renewed_ms": member.renewed_ms,
                    "held": sorted(member.held),
                    "tasks": sorted(member.tasks),
                }
                for name, member in sorted(self.members.items())
            },
            "resources": {
                name: {
                    "holder": resource.holder,
                    "epoch": resource.epoch,
                    "position": resource.position,
                    "claimed_to": resource.claimed_to,
                }
                for name, resource in sorted(self.resources.items())
            },
            "tasks": {
                name: {"payload": task.payload, "client_id": task.client_id}
                for name, task in sorted(self.tasks.items())
            },
        }
