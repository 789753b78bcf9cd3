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
    MAX_TOPIC_ID_CHARS,
    SnapshotPart,
    name_fault,
)
from kmq_spark.core.coordination.world import MAX_MEMBERS, MAX_RESOURCES, MAX_TASKS, Member, Resource, Task, World
from kmq_spark.errors import MalformedRecordError, UnsupportedVersionError
from kmq_spark.wire import coordination_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = 0
"""The version of snapshots that this build writes, and the last one it reads."""

_REFUSED = "the next snapshot of the group's leader replaces it"
_NUMBERS = (
    "next_offset",
    "clock_ms",
    "last_append_ms",
    "newest_append_ms",
    "heartbeat_ms",
    "generation",
    "paused_until_ms",
    "snapshot_at",
)
"""Fields of a world that are numbers."""


def encode_world(world: World) -> bytes:
    """Return the bytes of a world."""
    message = coordination_pb2.World(**{name: getattr(world, name) for name in _NUMBERS})
    for _, member in sorted(world.members.items()):
        message.members.add(**member._asdict())
    for name, resource in sorted(world.resources.items()):
        message.resources.add(name=name, **resource._asdict())
    for name, (payload, client_id) in sorted(world.tasks.items()):
        message.tasks.add(name=name, payload=payload, client_id=client_id)
    value: bytes = message.SerializeToString()
    return value


def snapshot_parts(world: World, part_bytes: int = MAX_PART_BYTES) -> list[SnapshotPart]:
    """Return a snapshot in pieces; raise a `MalformedRecordError` where it needs more than `MAX_SNAPSHOT_PARTS`."""
    data = encode_world(world)
    pieces = [data[start : start + part_bytes] for start in range(0, max(1, len(data)), part_bytes)]
    if len(pieces) > MAX_SNAPSHOT_PARTS:
        raise MalformedRecordError(
            f"the world is too large for a snapshot: got {len(data)} bytes; expected {MAX_SNAPSHOT_PARTS} parts of "
            f"{part_bytes} bytes; write smaller metadata and payloads"
        )
    return [SnapshotPart(world.next_offset, part, len(pieces), piece) for part, piece in enumerate(pieces)]


def decode_world(data: bytes) -> World:
    """Read a world: all parts of a snapshot, joined."""
    try:
        message: coordination_pb2.World = coordination_pb2.World.FromString(data)
    except DecodeError as error:
        raise MalformedRecordError(f"got {len(data)} bytes that are no snapshot; {_REFUSED}") from error
    if message.version != VERSION:
        raise UnsupportedVersionError(
            f"version {int(message.version)} of snapshots, this build reads up to {VERSION}; upgrade every member of "
            "the group before one that writes it"
        )
    fault = next(filter(None, _faults(message)), "")
    if fault:
        raise MalformedRecordError(f"snapshot contradicts itself: {fault}; {_REFUSED}")
    return World.restored(
        [Member(*(getattr(one, name) for name in Member._fields)) for one in message.members],
        {
            one.name: Resource(
                one.holder,
                one.epoch,
                one.position if one.HasField("position") else None,
                one.claimed_to if one.HasField("claimed_to") else None,
                one.topic_id,
            )
            for one in message.resources
        },
        tasks={one.name: Task(one.payload, one.client_id) for one in message.tasks},
        **{name: getattr(message, name) for name in _NUMBERS},
    )


def _faults(message: coordination_pb2.World) -> Iterator[str]:
    """Yield what a world cannot be; an empty text where something is right."""
    members = {one.client_id for one in message.members}
    yield from _faults_of_names("members", [one.client_id for one in message.members], MAX_MEMBERS)
    yield from _faults_of_names("resources", [one.name for one in message.resources], MAX_RESOURCES)
    yield from _faults_of_names("tasks", [one.name for one in message.tasks], MAX_TASKS)
    most, has_members = message.next_offset, bool(members)
    yield _out_of("next_offset", most, 0, MAX_OFFSET)
    yield _out_of("clock_ms", message.clock_ms, 0, MAX_OFFSET)
    yield _out_of("newest_append_ms", message.newest_append_ms, 0, MAX_OFFSET)
    yield _out_of("last_append_ms", message.last_append_ms, -1, message.newest_append_ms)
    yield _out_of("heartbeat_ms", message.heartbeat_ms, 1 if has_members else 0, MAX_HEARTBEAT_MS)
    yield _out_of("generation", message.generation, 0 if has_members else -1, most - 1)
    yield _out_of("paused_until_ms", message.paused_until_ms, 0, MAX_OFFSET)
    yield _out_of("snapshot_at", message.snapshot_at, -1, most - 1)
    for member in message.members:
        yield name_fault("instance", member.instance, MAX_INSTANCE_CHARS)
        yield _out_of("joined_at", member.joined_at, 0, message.generation)
        yield _out_of("bytes of metadata", len(member.metadata), 0, MAX_METADATA_BYTES)
        yield _out_of("seen_ms", member.seen_ms, 0, message.clock_ms)
        yield _out_of("renewed_ms", member.renewed_ms, 0, member.seen_ms)
    for resource in message.resources:
        if resource.holder and resource.holder not in members:
            yield f"a holder that is no member: got {resource.holder[:60]!r}"
        if not resource.holder and not resource.HasField("position"):
            yield f"a free resource without position: got {resource.name[:60]!r}"
        yield _out_of("epoch", resource.epoch, 0 if resource.holder else -1, most - 1)
        yield _out_of("position", resource.position, 0, MAX_OFFSET)
        yield _out_of("claimed_to", resource.claimed_to, 0, MAX_OFFSET if resource.holder else 0)
        yield name_fault("topic id", resource.topic_id, MAX_TOPIC_ID_CHARS) if resource.topic_id else ""
    for task in message.tasks:
        if task.client_id and task.client_id not in members:
            yield f"a task of no member: got {task.client_id[:60]!r}"
        yield _out_of("bytes of payload", len(task.payload), 0, MAX_PAYLOAD_BYTES)


def _faults_of_names(what: str, names: list[str], most: int) -> Iterator[str]:
    if len(names) > most:
        yield f"too many {what}: got {len(names)}; expected 0 to {most}"
    if len(set(names)) < len(names):
        yield f"{what} are named twice: got {len(names)} names, {len(set(names))} of them different"
    yield from (name_fault(what, name) for name in names)


def _out_of(what: str, number: int, least: int, most: int) -> str:
    return "" if least <= number <= most else f"{what} is out of bounds: got {number}; expected {least} to {most}"
