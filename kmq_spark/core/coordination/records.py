"""
The vocabulary of the coordination topic: what a record says, without its bytes.

Rule 1: values only; no clock, no Kafka.
Rule 2: every reader of a group must accept and refuse the same records, or their worlds differ. So the bounds depend on
nothing that changes between versions of Python: not on Unicode tables, not on locale.
Rule 3: a task is a resource that one member at a time is assigned to. Both share one set of names.

Source: Marshal `message.go` (heartbeat, claim, release, claim messages, release group); the epochs, the tasks and the
snapshots are ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_NAME_CHARS = 255
"""Longest client id, resource or task, in characters."""

MAX_INSTANCE_CHARS = 64
"""Longest instance, in characters; `new_instance` of the client writes 16."""

MAX_GROUP_CHARS = 200
"""Longest name of a group, in characters: it becomes part of metric labels and of Kafka's consumer group."""

MAX_METADATA_BYTES = 4_096
"""Largest metadata of a member."""

MAX_PAYLOAD_BYTES = 4_096
"""Largest payload of a task: where the work lies, not the work."""

MAX_ENTRIES = 10_000
"""Most positions in a HEARTBEAT and most assignments in an ASSIGN; a client with more writes several records."""

MIN_HEARTBEAT_MS, MAX_HEARTBEAT_MS = 100, 60_000
"""Bounds of T. Below, the broker's round trip is longer than a hold; above, a dead member is noticed too late."""

MAX_PAUSE_MS = 7 * 24 * 60 * 60 * 1000
"""Longest pause of a group, seven days; a longer one is a unit mistaken."""

MAX_OFFSET = 2**63 - 1
"""Largest position, epoch or generation."""

MAX_SEQUENCE = 2**63 - 1
"""Largest number of a record within its instance."""

MAX_SNAPSHOT_PARTS = 256
"""Most records that a snapshot is cut into."""

MAX_PART_BYTES = 524_288
"""Largest part of a snapshot: with its frame, it fits into Kafka's default of 1 MiB a record."""

MAX_RECORD_BYTES = 1_000_000
"""Largest record, below Kafka's default of 1,048,588 bytes a batch; names are up to four bytes a character."""

_GROUP = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_GROUP_CHARS}}}")
# Controls of ASCII and of Latin-1, and halves of surrogate pairs: neither a terminal nor UTF-8 carries them.
_NOT_IN_NAMES = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_SHOWN_CHARS = 60


class RecordType(IntEnum):
    """What a record says; the numbers are those on the wire."""

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
    """
    How far a holder has come.

    Attributes:
        resource: What it holds.
        epoch: Epoch of its claim.
        position: Next one to process, as in Kafka's committed offsets.
    """

    resource: str
    epoch: int
    position: int


class Assignment(NamedTuple):
    """A task and the client id of the member that is to run it; empty for no member."""

    task: str
    client_id: str


class SnapshotPart(NamedTuple):
    """
    A piece of a snapshot.

    Attributes:
        as_of: Offset of the first record that is not in the snapshot.
        part: Its number, from 0.
        parts: Pieces of the snapshot.
        data: Its bytes.
    """

    as_of: int
    part: int
    parts: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """
    One record of the coordination topic; its group is the key of the Kafka record.

    Attributes:
        type: What it says.
        client_id: Who wrote it.
        instance: Which process of that client id.
        sequence: Counts the records of the instance, so that it knows its own when it reads them back.
        metadata: JOIN: free bytes of the member, for other members.
        heartbeat_ms: JOIN: T, counts where the group has no members.
        fast_reclaim: JOIN: the other instance of this client id is gone, its claims are to be taken over.
        positions: HEARTBEAT: of resources that the member holds.
        resource: CLAIM, RELEASE, CLAIM_MESSAGES, SET_POSITION: the resource; ADD_TASK, REMOVE_TASK: the task.
        epoch: RELEASE, CLAIM_MESSAGES: of the claim.
        position: RELEASE: where the holder stopped; CLAIM_MESSAGES: end of the messages; SET_POSITION: the new one.
            None: RELEASE leaves it, SET_POSITION forgets it.
        duration_ms: PAUSE_GROUP: how long, in milliseconds from the append time.
        payload: ADD_TASK: free bytes for the member that runs it.
        member: DRAIN: client id of the member.
        generation: ASSIGN: generation of the group that the assignments were made for.
        assignments: ASSIGN.
        snapshot: SNAPSHOT.
    """

    type: RecordType
    client_id: str
    instance: str
    sequence: int = 0
    metadata: bytes = b""
    heartbeat_ms: int = 0
    fast_reclaim: bool = False
    positions: tuple[HeldPosition, ...] = ()
    resource: str = ""
    epoch: int = 0
    position: int | None = None
    duration_ms: int = 0
    payload: bytes = b""
    member: str = ""
    generation: int = 0
    assignments: tuple[Assignment, ...] = ()
    snapshot: SnapshotPart | None = None


WITH_RESOURCE = frozenset(
    {
        RecordType.CLAIM,
        RecordType.RELEASE,
        RecordType.CLAIM_MESSAGES,
        RecordType.SET_POSITION,
        RecordType.ADD_TASK,
        RecordType.REMOVE_TASK,
    }
)
"""Types that name a resource or a task."""

WITH_EPOCH = frozenset({RecordType.RELEASE, RecordType.CLAIM_MESSAGES})
"""Types that carry the epoch of one claim."""

WITH_POSITION = frozenset({RecordType.RELEASE, RecordType.CLAIM_MESSAGES, RecordType.SET_POSITION})
"""Types that carry one position."""


def is_group(name: object) -> bool:
    """Return whether something is a name of a group."""
    return isinstance(name, str) and _GROUP.fullmatch(name) is not None


def name_fault(what: str, name: str, longest: int = MAX_NAME_CHARS) -> str:
    """
    Return what is wrong with a name, empty where nothing is.

    Args:
        what: `client id`, `resource`, `task`, `instance`.
        name: As it was given.
        longest: Characters that it may have.
    """
    if not name:
        return f"{what} is empty: got '', allowed 1 to {longest} characters"
    if len(name) > longest:
        return f"{what} is too long: got {len(name)} characters ({name[:_SHOWN_CHARS]!r}…), allowed 1 to {longest}"
    if _NOT_IN_NAMES.search(name):
        return f"{what} has a control character: got {name[:_SHOWN_CHARS]!r}, allowed are printable characters"
    return ""


def record_fault(record: Record) -> str:
    """
    Return what is out of bounds in a record, empty where nothing is.

    Args:
        record: Fields that do not belong to its type are not looked at.
    """
    return (
        name_fault("client id", record.client_id)
        or name_fault("instance", record.instance, MAX_INSTANCE_CHARS)
        or _number_fault("sequence", record.sequence, 0, MAX_SEQUENCE)
        or _FAULTS[record.type](record)
    )


def _fault_of_nothing(_: Record) -> str:
    return ""


def _fault_of_join(record: Record) -> str:
    return _size_fault("metadata", record.metadata, MAX_METADATA_BYTES) or _number_fault(
        "heartbeat interval in ms", record.heartbeat_ms, MIN_HEARTBEAT_MS, MAX_HEARTBEAT_MS
    )


def _fault_of_pause(record: Record) -> str:
    return _number_fault("pause in ms", record.duration_ms, 1, MAX_PAUSE_MS)


def _fault_of_drain(record: Record) -> str:
    return name_fault("member", record.member)


def _fault_of_resource(record: Record) -> str:
    kind = record.type
    fault = name_fault("resource", record.resource)
    if not fault and kind in WITH_EPOCH:
        fault = _number_fault("epoch", record.epoch, 0, MAX_OFFSET)
    if not fault and kind in WITH_POSITION and record.position is not None:
        fault = _number_fault("position", record.position, 0, MAX_OFFSET)
    if not fault and kind is RecordType.CLAIM_MESSAGES and record.position is None:
        fault = "position is missing: got None, allowed 0 to the end of the messages"
    if not fault and kind is RecordType.ADD_TASK:
        fault = _size_fault("payload", record.payload, MAX_PAYLOAD_BYTES)
    return fault


def _fault_of_positions(record: Record) -> str:
    positions = record.positions
    if len(positions) > MAX_ENTRIES:
        return f"too many positions: got {len(positions)}, allowed 0 to {MAX_ENTRIES}"
    for resource, epoch, position in positions:
        fault = (
            name_fault("resource", resource)
            or _number_fault("epoch", epoch, 0, MAX_OFFSET)
            or _number_fault("position", position, 0, MAX_OFFSET)
        )
        if fault:
            return fault
    return ""


def _fault_of_assignments(record: Record) -> str:
    if len(record.assignments) > MAX_ENTRIES:
        return f"too many assignments: got {len(record.assignments)}, allowed 0 to {MAX_ENTRIES}"
    for task, client_id in record.assignments:
        fault = name_fault("task", task) or (name_fault("client id", client_id) if client_id else "")
        if fault:
            return fault
    return _number_fault("generation", record.generation, 0, MAX_OFFSET)


def _fault_of_snapshot(record: Record) -> str:
    part = record.snapshot
    if part is None:
        return "snapshot is missing: got None, allowed a part of a snapshot"
    return (
        _number_fault("as_of", part.as_of, 0, MAX_OFFSET)
        or _number_fault("parts", part.parts, 1, MAX_SNAPSHOT_PARTS)
        or _number_fault("part", part.part, 0, part.parts - 1)
        or _size_fault("part of a snapshot", part.data, MAX_PART_BYTES)
    )


def _number_fault(what: str, number: int, least: int, most: int) -> str:
    if least <= number <= most:
        return ""
    return f"{what} is out of bounds: got {number!r}, allowed {least} to {most}"


def _size_fault(what: str, data: bytes, most: int) -> str:
    if len(data) <= most:
        return ""
    return f"{what} is too large: got {len(data)} bytes, allowed 0 to {most}"


_FAULTS: dict[RecordType, Callable[[Record], str]] = {
    **dict.fromkeys(WITH_RESOURCE, _fault_of_resource),
    RecordType.JOIN: _fault_of_join,
    RecordType.HEARTBEAT: _fault_of_positions,
    RecordType.LEAVE: _fault_of_nothing,
    RecordType.PAUSE_GROUP: _fault_of_pause,
    RecordType.RESUME_GROUP: _fault_of_nothing,
    RecordType.DRAIN: _fault_of_drain,
    RecordType.ASSIGN: _fault_of_assignments,
    RecordType.SNAPSHOT: _fault_of_snapshot,
}
