"""
The records of the coordination topic as values, and the bounds of their fields.

Rule 1: all readers of a group must accept and reject the same records, or their worlds differ. So the bounds depend on
nothing that changes between Python versions, such as Unicode tables or the locale.
Rule 2: a task is a resource with an assigned member. Tasks and resources share one namespace.

Source: Marshal `message.go` (heartbeat, claim, release, claim messages, release group); the epochs, the tasks and the
snapshots are ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_NAME_CHARS = 255
"""Maximum length of a client id, resource or task, in characters."""

MAX_INSTANCE_CHARS = 64
"""Maximum length of an instance id, in characters; our client uses 16."""

MAX_TOPIC_ID_CHARS = 64
"""Maximum length of the id of a Kafka topic, in characters; Kafka's have 22."""

MAX_GROUP_CHARS = 200
"""Maximum length of a group name, in characters: metric labels and a Kafka consumer group contain it."""

MAX_METADATA_BYTES = 4_096
"""Maximum size of a member's metadata."""

MAX_PAYLOAD_BYTES = 4_096
"""Maximum size of a task's payload: a reference to the work, not the work itself."""

MAX_ENTRIES = 10_000
"""Maximum number of positions in a HEARTBEAT and of assignments in an ASSIGN; for more, write several records."""

MIN_HEARTBEAT_MS, MAX_HEARTBEAT_MS = 100, 60_000
"""Bounds of T. Below, a round trip may take longer than a hold; above, dead members are noticed too late."""

MAX_PAUSE_MS = 7 * 24 * 60 * 60 * 1000
"""Maximum pause of a group, seven days; a longer one is probably in the wrong unit."""

MAX_OFFSET = 2**63 - 1
"""Maximum position, epoch, generation and sequence."""

MAX_SNAPSHOT_PARTS = 256
"""Maximum number of records of a snapshot."""

MAX_PART_BYTES = 524_288
"""Maximum size of a snapshot's part, so that its record fits into Kafka's default limit of 1 MiB."""

MAX_RECORD_BYTES = 1_000_000
"""Maximum size of a record, below Kafka's default limit of 1,048,588 bytes per batch."""

_GROUP = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_GROUP_CHARS}}}")
# Control characters of ASCII and Latin-1, and surrogates, which UTF-8 cannot encode.
_NOT_IN_NAMES = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_SHOWN_CHARS = 60


class RecordType(IntEnum):
    """Types of records, with their numbers on the wire."""

    JOIN = 1
    HEARTBEAT = 2
    LEAVE = 3
    CLAIM = 4
    RELEASE = 5
    CLAIM_MESSAGES = 6
    PAUSE_GROUP = 7
    RESUME_GROUP = 8
    SET_POSITION = 9
    ADD_TASK = 10
    REMOVE_TASK = 11
    DRAIN = 12
    ASSIGN = 13
    SNAPSHOT = 14


class HeldPosition(NamedTuple):
    """The position of a resource under a claim: the next offset to process."""

    resource: str
    epoch: int
    position: int


class Assignment(NamedTuple):
    """A task and the client id of its member; empty to unassign the task."""

    task: str
    client_id: str


class SnapshotPart(NamedTuple):
    """Part *part* (from 0) of *parts* of a snapshot of the world before the record at offset *as_of*."""

    as_of: int
    part: int
    parts: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """
    One record of the coordination topic; the key of the Kafka record is the group.

    `FIELDS` lists the fields of each type; `wire/coordination.proto` documents them.
    """

    type: RecordType
    client_id: str
    instance: str
    sequence: int = 0
    """Number of the record, by which its instance recognizes it when reading it back."""
    metadata: bytes = b""
    heartbeat_ms: int = 0
    fast_reclaim: bool = False
    positions: tuple[HeldPosition, ...] = ()
    resource: str = ""
    """The task, for ADD_TASK and REMOVE_TASK."""
    epoch: int = 0
    position: int | None = None
    """None: RELEASE keeps the position, SET_POSITION removes the resource."""
    duration_ms: int = 0
    payload: bytes = b""
    member: str = ""
    generation: int = 0
    assignments: tuple[Assignment, ...] = ()
    snapshot: SnapshotPart | None = None
    topic_id: str = ""
    """Id of the Kafka topic whose offsets the positions of the resource are; empty: of none."""


FIELDS: dict[RecordType, tuple[str, ...]] = {
    RecordType.JOIN: ("metadata", "heartbeat_ms", "fast_reclaim"),
    RecordType.HEARTBEAT: ("positions",),
    RecordType.LEAVE: (),
    RecordType.CLAIM: ("resource", "topic_id"),
    RecordType.RELEASE: ("resource", "epoch", "position"),
    RecordType.CLAIM_MESSAGES: ("resource", "epoch", "position"),
    RecordType.PAUSE_GROUP: ("duration_ms",),
    RecordType.RESUME_GROUP: (),
    RecordType.SET_POSITION: ("resource", "position"),
    RecordType.ADD_TASK: ("resource", "payload"),
    RecordType.REMOVE_TASK: ("resource",),
    RecordType.DRAIN: ("member",),
    RecordType.ASSIGN: ("assignments", "generation"),
    RecordType.SNAPSHOT: ("snapshot",),
}
"""The fields of each type besides those of the writer; other fields are neither written nor read."""

FLEET_PREFIX = "kmq.fleet."
"""Prefix of the group names of tracker fleets."""


def is_group(name: object) -> bool:
    """Return whether something is a valid group name."""
    return isinstance(name, str) and _GROUP.fullmatch(name) is not None


def fleet_group(name: str) -> str:
    """Return the coordination group of a tracker fleet; raise a `ConfigError` if the name is not allowed."""
    if not name or not is_group(FLEET_PREFIX + name):
        message = (
            f"fleet name is not allowed: got {name!r:.80}; expected 1 to {MAX_GROUP_CHARS - len(FLEET_PREFIX)} of "
            "A-Z a-z 0-9 . _ -; choose another name"
        )
        raise ConfigError(message)
    return FLEET_PREFIX + name


def record_fault(record: Record) -> str:
    """Return what is out of bounds in a record; empty if nothing is."""
    fault = (
        name_fault("client id", record.client_id)
        or name_fault("instance", record.instance, MAX_INSTANCE_CHARS)
        or _number_fault("sequence", record.sequence, 0, MAX_OFFSET)
    )
    if fault:
        return fault
    for field in FIELDS[record.type]:
        if fault := _FAULTS[field](getattr(record, field)):
            return fault
    if record.type is RecordType.CLAIM_MESSAGES and record.position is None:
        return "position is missing: got None; expected 0 to the end of the messages"
    return ""


def name_fault(what: str, name: str, longest: int = MAX_NAME_CHARS) -> str:
    """Return what is wrong with a name; empty if nothing is."""
    if not name:
        return f"{what} is empty: got ''; expected 1 to {longest} characters"
    if len(name) > longest:
        return f"{what} is too long: got {len(name)} characters ({name[:_SHOWN_CHARS]!r}…); expected 1 to {longest}"
    if _NOT_IN_NAMES.search(name):
        return f"{what} has a control character: got {name[:_SHOWN_CHARS]!r}; expected printable characters"
    return ""


def _number_fault(what: str, number: int, least: int, most: int) -> str:
    if least <= number <= most:
        return ""
    return f"{what} is out of bounds: got {number!r}; expected {least} to {most}"


def _size_fault(what: str, data: bytes, most: int) -> str:
    if len(data) <= most:
        return ""
    return f"{what} is too large: got {len(data)} bytes; expected 0 to {most}"


def _fault_of_positions(positions: tuple[HeldPosition, ...]) -> str:
    if len(positions) > MAX_ENTRIES:
        return f"too many positions: got {len(positions)}; expected 0 to {MAX_ENTRIES}"
    for resource, epoch, position in positions:
        if fault := name_fault("resource", resource):
            return fault
        if not (0 <= epoch <= MAX_OFFSET and 0 <= position <= MAX_OFFSET):
            return _number_fault("epoch", epoch, 0, MAX_OFFSET) or _number_fault("position", position, 0, MAX_OFFSET)
    return ""


def _fault_of_assignments(assignments: tuple[Assignment, ...]) -> str:
    if len(assignments) > MAX_ENTRIES:
        return f"too many assignments: got {len(assignments)}; expected 0 to {MAX_ENTRIES}"
    for task, client_id in assignments:
        fault = name_fault("task", task) or (name_fault("client id", client_id) if client_id else "")
        if fault:
            return fault
    return ""


def _fault_of_snapshot(part: SnapshotPart | None) -> str:
    if part is None:
        return "snapshot is missing: got None; expected a part of a snapshot"
    return (
        _number_fault("as_of", part.as_of, 0, MAX_OFFSET)
        or _number_fault("parts", part.parts, 1, MAX_SNAPSHOT_PARTS)
        or _number_fault("part", part.part, 0, part.parts - 1)
        or _size_fault("part of a snapshot", part.data, MAX_PART_BYTES)
    )


_FAULTS: dict[str, Callable[[Any], str]] = {
    "metadata": lambda data: _size_fault("metadata", data, MAX_METADATA_BYTES),
    "heartbeat_ms": lambda ms: _number_fault("heartbeat interval in ms", ms, MIN_HEARTBEAT_MS, MAX_HEARTBEAT_MS),
    "fast_reclaim": lambda _: "",
    "positions": _fault_of_positions,
    "resource": lambda name: name_fault("resource", name),
    "epoch": lambda number: _number_fault("epoch", number, 0, MAX_OFFSET),
    "position": lambda number: "" if number is None else _number_fault("position", number, 0, MAX_OFFSET),
    "duration_ms": lambda number: _number_fault("pause in ms", number, 1, MAX_PAUSE_MS),
    "payload": lambda data: _size_fault("payload", data, MAX_PAYLOAD_BYTES),
    "member": lambda name: name_fault("member", name),
    "assignments": _fault_of_assignments,
    "generation": lambda number: _number_fault("generation", number, 0, MAX_OFFSET),
    "snapshot": _fault_of_snapshot,
    "topic_id": lambda name: name_fault("topic id", name, MAX_TOPIC_ID_CHARS) if name else "",
}
