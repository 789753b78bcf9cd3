"""
Worlds of coordination groups to bytes and back: what SNAPSHOT records carry.

Rule 1: a snapshot comes from the log, so it is untrusted: what contradicts itself is refused.
Rule 2: equal worlds have equal bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kmq_spark.core.coordination.records import (
    MAX_HEARTBEAT_MS,
    MAX_INSTANCE_CHARS,
    MAX_METADATA_BYTES,
    MAX_OFFSET,
    MAX_PART_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_SNAPSHOT_PARTS,
    SnapshotPart,
    name_fault,
)
from kmq_spark.core.coordination.world import (
    MAX_MEMBERS,
    MAX_RESOURCES,
    MAX_TASKS,
    Member,
    Resource,
    Task,
    World,
    first_joined,
)
from kmq_spark.errors import MalformedRecordError, UnsupportedVersionError
from kmq_spark.wire import coordination_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

VERSION = 0
"""The version of snapshots that this build writes, and the last one it reads."""

_REFUSED = "the next snapshot of the group's leader replaces it"


def encode_world(world: World) -> bytes:
    """Return the bytes of a world."""
    message = coordination_pb2.World(
        next_offset=world.next_offset,
        clock_ms=world.clock_ms,
        newest_append_ms=world.newest_append_ms,
        last_append_ms=world.last_append_ms,
        heartbeat_ms=world.heartbeat_ms,
        generation=world.generation,
        paused_until_ms=world.paused_until_ms,
        snapshot_at=world.snapshot_at,
    )
    for client_id, member in sorted(world.members.items()):
        message.members.add(
            client_id=client_id,
            instance=member.instance,
            joined_at=member.joined_at,
            metadata=member.metadata,
            is_draining=member.is_draining,
            seen_ms=member.seen_ms,
            renewed_ms=member.renewed_ms,
        )
    for name, resource in sorted(world.resources.items()):
        message.resources.add(
            name=name,
            holder=resource.holder,
            epoch=resource.epoch,
            position=resource.position,
            claimed_to=resource.claimed_to,
        )
    for name, task in sorted(world.tasks.items()):
        message.tasks.add(name=name, payload=task.payload, client_id=task.client_id)
    value: bytes = message.SerializeToString()
    return value


def snapshot_parts(world: World, part_bytes: int = MAX_PART_BYTES) -> list[SnapshotPart]:
    """
    Return a snapshot as the parts that SNAPSHOT records carry.

    Args:
        world: As of `world.next_offset`.
        part_bytes: Size of a part, at most `MAX_PART_BYTES`.

    Returns:
        The parts in their order.

    Raises:
        MalformedRecordError: The world needs more than `MAX_SNAPSHOT_PARTS` parts.
    """
    data = encode_world(world)
    pieces = [data[start : start + part_bytes] for start in range(0, max(1, len(data)), part_bytes)]
    if len(pieces) > MAX_SNAPSHOT_PARTS:
        raise MalformedRecordError(
            f"the world is too large for a snapshot: got {len(data)} bytes, allowed are {MAX_SNAPSHOT_PARTS} parts of "
            f"{part_bytes} bytes; write smaller metadata and payloads"
        )
    return [SnapshotPart(world.next_offset, part, len(pieces), piece) for part, piece in enumerate(pieces)]


def decode_world(data: bytes, leader_rule: Callable[[Mapping[str, Member]], str] = first_joined) -> World:
    """
    Read a world.

    Args:
        data: As `encode_world` wrote it; all parts of a snapshot, joined.
        leader_rule: Leader rule of the group.

    Raises:
        MalformedRecordError: The bytes are no world, or it contradicts itself.
        UnsupportedVersionError: A newer version wrote it.
    """
    try:
        message: coordination_pb2.World = coordination_pb2.World.FromString(data)
    except DecodeError as error:
        raise MalformedRecordError(f"got {len(data)} bytes that are no snapshot; {_REFUSED}") from error
    if message.version != VERSION:
        raise UnsupportedVersionError(
            f"version {int(message.version)} of snapshots, this build reads up to {VERSION}; upgrade every member of "
            "the group before one that writes it"
        )
    fault = _fault_of(message)
    if fault:
        raise MalformedRecordError(f"snapshot contradicts itself: {fault}; {_REFUSED}")
    return World.restored(
        {
            one.client_id: Member(
                one.client_id,
                one.instance,
                one.joined_at,
                one.metadata,
                one.is_draining,
                one.seen_ms,
                one.renewed_ms,
            )
            for one in message.members
        },
        {
            one.name: Resource(
                one.holder,
                one.epoch,
                one.position if one.HasField("position") else None,
                one.claimed_to if one.HasField("claimed_to") else None,
            )
            for one in message.resources
        },
        {one.name: Task(one.payload, one.client_id) for one in message.tasks},
        leader_rule=leader_rule,
        next_offset=message.next_offset,
        clock_ms=message.clock_ms,
        last_append_ms=message.last_append_ms,
        newest_append_ms=message.newest_append_ms,
        heartbeat_ms=message.heartbeat_ms,
        generation=message.generation,
        paused_until_ms=message.paused_until_ms,
        snapshot_at=message.snapshot_at,
    )


def _fault_of(message: coordination_pb2.World) -> str:
    """Return what a world cannot be, empty where nothing is wrong."""
    members = {one.client_id for one in message.members}
    return (
        _fault_of_names("members", [one.client_id for one in message.members], MAX_MEMBERS)
        or _fault_of_names("resources", [one.name for one in message.resources], MAX_RESOURCES)
        or _fault_of_names("tasks", [one.name for one in message.tasks], MAX_TASKS)
        or _fault_of_numbers(message)
        or _first(_fault_of_member(one, message) for one in message.members)
        or _first(_fault_of_resource(one, message, members) for one in message.resources)
        or _first(_fault_of_task(one, members) for one in message.tasks)
    )


def _fault_of_names(what: str, names: list[str], most: int) -> str:
    if len(names) > most:
        return f"too many {what}: got {len(names)}, allowed 0 to {most}"
    if len(set(names)) < len(names):
        return f"{what} are named twice: got {len(names)} names, {len(set(names))} of them different"
    return _first(name_fault(what, name) for name in names)


def _fault_of_numbers(message: coordination_pb2.World) -> str:
    most = message.next_offset
    return (
        _out_of("next_offset", message.next_offset, 0, MAX_OFFSET)
        or _out_of("clock_ms", message.clock_ms, 0, MAX_OFFSET)
        or _out_of("newest_append_ms", message.newest_append_ms, 0, MAX_OFFSET)
        or _out_of("last_append_ms", message.last_append_ms, -1, message.newest_append_ms)
        or _out_of("heartbeat_ms", message.heartbeat_ms, 1 if message.members else 0, MAX_HEARTBEAT_MS)
        or _out_of("generation", message.generation, 0 if message.members else -1, most - 1)
        or _out_of("paused_until_ms", message.paused_until_ms, 0, MAX_OFFSET)
        or _out_of("snapshot_at", message.snapshot_at, -1, most - 1)
    )


def _fault_of_member(member: coordination_pb2.Member, message: coordination_pb2.World) -> str:
    return (
        name_fault("instance", member.instance, MAX_INSTANCE_CHARS)
        or _out_of("joined_at", member.joined_at, 0, message.generation)
        or _out_of("bytes of metadata", len(member.metadata), 0, MAX_METADATA_BYTES)
        or _out_of("seen_ms", member.seen_ms, 0, message.clock_ms)
        or _out_of("renewed_ms", member.renewed_ms, 0, member.seen_ms)
    )


def _fault_of_resource(resource: coordination_pb2.Resource, message: coordination_pb2.World, members: set[str]) -> str:
    if resource.holder and resource.holder not in members:
        return f"a holder that is no member: got {resource.holder[:60]!r}"
    if not resource.holder and not resource.HasField("position"):
        return f"a free resource without position: got {resource.name[:60]!r}"
    return (
        _out_of("epoch", resource.epoch, 0 if resource.holder else -1, message.next_offset - 1)
        or _out_of("position", resource.position, 0, MAX_OFFSET)
        or _out_of("claimed_to", resource.claimed_to, 0, MAX_OFFSET if resource.holder else 0)
    )


def _fault_of_task(task: coordination_pb2.Task, members: set[str]) -> str:
    if task.client_id and task.client_id not in members:
        return f"a task of no member: got {task.client_id[:60]!r}"
    return _out_of("bytes of payload", len(task.payload), 0, MAX_PAYLOAD_BYTES)


def _first(faults: Iterable[str]) -> str:
    return next((fault for fault in faults if fault), "")


def _out_of(what: str, number: int, least: int, most: int) -> str:
    return "" if least <= number <= most else f"{what} is out of bounds: got {number}, allowed {least} to {most}"
