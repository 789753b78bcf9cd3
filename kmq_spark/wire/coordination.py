"""
Records of the coordination topic to bytes and back.

Rule 1: bytes from the log are untrusted: whatever they are, reading gives a record within bounds or a `WireError`.
Rule 2: what is written can be read: both directions check the same bounds.
Rule 3: fields that do not belong to a record's type are neither written nor read.
Rule 4: a reader of another build must refuse the same bytes, or the worlds of a group's readers differ. So a bound
changes with the version only, and readers are upgraded before writers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kmq_spark.core.coordination.records import (
    MAX_RECORD_BYTES,
    WITH_EPOCH,
    WITH_POSITION,
    WITH_RESOURCE,
    Assignment,
    HeldPosition,
    Record,
    RecordType,
    SnapshotPart,
    record_fault,
)
from kmq_spark.errors import MalformedRecordError, UnsupportedVersionError, WireError
from kmq_spark.wire import coordination_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = 0
"""The version this build writes, and the last one it reads."""

_TYPES = {int(record_type): record_type for record_type in RecordType}
_MALFORMED = "find its writer: only kmq-spark may write to a coordination topic"
_OUR_BUG = "check the arguments of the call"


def encode_record(record: Record) -> bytes:
    """
    Return the bytes of a record.

    Args:
        record: Within the bounds of `core.coordination.records`.

    Returns:
        The record value; the key is the group's name.

    Raises:
        MalformedRecordError: A value is out of bounds, so that no reader would accept it.

    Source: docs/coordination.md, records.
    """
    if fault := record_fault(record):
        raise MalformedRecordError(f"cannot write {record.type.name}: {fault}; {_OUR_BUG}")
    message = coordination_pb2.Coordination(
        client_id=record.client_id, instance=record.instance, sequence=record.sequence
    )
    message.type = int(record.type)  # type: ignore[assignment]  # an enum's number is what the runtime wants
    _put_fields(message, record)
    value: bytes = message.SerializeToString()
    if len(value) > MAX_RECORD_BYTES:
        raise MalformedRecordError(
            f"cannot write {record.type.name}: the record is too large: got {len(value)} bytes, "
            f"allowed 1 to {MAX_RECORD_BYTES}; write several records"
        )
    return value


def decode_record(value: bytes | None, *, topic: str = "", partition: int = -1, offset: int = -1) -> Record:
    """
    Read the value of a record of the coordination topic.

    Args:
        value: The value as read from the log, None for a record without value.
        topic: Coordination topic, for the error.
        partition: Its partition, for the error.
        offset: Offset of the record, for the error.

    Returns:
        A record within the bounds of `core.coordination.records`.

    Raises:
        MalformedRecordError: The bytes are no record, or a value is out of bounds.
        UnsupportedVersionError: The version or the type is newer than this build.

    Source: docs/coordination.md, records.
    """
    try:
        return _record_of(_message_of(value))
    except WireError as error:
        place = f" at {topic}[{partition}]@{offset}" if topic else ""
        message = f"cannot read coordination record{place}: {error}"
        raise type(error)(message, topic=topic, partition=partition, offset=offset) from error


def _message_of(value: bytes | None) -> coordination_pb2.Coordination:
    if not value:
        what = "the record has no value" if value is None else "the record is empty"
        raise MalformedRecordError(f"{what}; {_MALFORMED}")
    if len(value) > MAX_RECORD_BYTES:
        raise MalformedRecordError(
            f"the record is too large: got {len(value)} bytes, allowed 1 to {MAX_RECORD_BYTES}; {_MALFORMED}"
        )
    try:
        message: coordination_pb2.Coordination = coordination_pb2.Coordination.FromString(value)
    except DecodeError as error:
        raise MalformedRecordError(f"got {len(value)} bytes that are no Coordination message; {_MALFORMED}") from error
    return message


def _put_fields(message: coordination_pb2.Coordination, record: Record) -> None:
    """Write the fields of a record's type."""
    kind = record.type
    if kind in WITH_RESOURCE:
        message.resource = record.resource
    if kind in WITH_EPOCH:
        message.epoch = record.epoch
    if kind in WITH_POSITION and record.position is not None:
        message.position = record.position
    put = _PUT.get(kind)
    if put is not None:
        put(message, record)


def _put_join(message: coordination_pb2.Coordination, record: Record) -> None:
    message.metadata = record.metadata
    message.heartbeat_ms, message.fast_reclaim = record.heartbeat_ms, record.fast_reclaim


def _put_positions(message: coordination_pb2.Coordination, record: Record) -> None:
    for resource, epoch, position in record.positions:
        message.positions.add(resource=resource, epoch=epoch, position=position)


def _put_pause(message: coordination_pb2.Coordination, record: Record) -> None:
    message.duration_ms = record.duration_ms


def _put_payload(message: coordination_pb2.Coordination, record: Record) -> None:
    message.payload = record.payload


def _put_member(message: coordination_pb2.Coordination, record: Record) -> None:
    message.member = record.member


def _put_assignments(message: coordination_pb2.Coordination, record: Record) -> None:
    message.generation = record.generation
    for task, client_id in record.assignments:
        message.assignments.add(task=task, client_id=client_id)


def _put_snapshot(message: coordination_pb2.Coordination, record: Record) -> None:
    assert record.snapshot is not None  # else it is out of bounds
    as_of, part, parts, data = record.snapshot
    message.snapshot.as_of, message.snapshot.part, message.snapshot.parts = as_of, part, parts
    message.snapshot.data = data


_PUT: dict[RecordType, Callable[[coordination_pb2.Coordination, Record], None]] = {
    RecordType.JOIN: _put_join,
    RecordType.HEARTBEAT: _put_positions,
    RecordType.PAUSE_GROUP: _put_pause,
    RecordType.ADD_TASK: _put_payload,
    RecordType.DRAIN: _put_member,
    RecordType.ASSIGN: _put_assignments,
    RecordType.SNAPSHOT: _put_snapshot,
}
"""Writers of the fields that one type alone has."""


def _record_of(message: coordination_pb2.Coordination) -> Record:
    kind = _TYPES.get(message.type)
    if message.version != VERSION:
        raise _unsupported("version", message.version, VERSION)
    if kind is None and message.type != 0:
        raise _unsupported("type", message.type, max(RecordType))
    if kind is None:
        raise MalformedRecordError(f"a record without type: got 0, allowed 1 to {int(max(RecordType))}; {_MALFORMED}")
    read = _READ.get(kind)
    record = Record(
        kind,
        message.client_id,
        message.instance,
        message.sequence,
        resource=message.resource if kind in WITH_RESOURCE else "",
        epoch=message.epoch if kind in WITH_EPOCH else 0,
        position=message.position if kind in WITH_POSITION and message.HasField("position") else None,
        **(read(message) if read else {}),  # type: ignore[arg-type]  # each by its own name
    )
    if fault := record_fault(record):
        raise MalformedRecordError(f"{kind.name}: {fault}; {_MALFORMED}")
    return record


def _read_join(message: coordination_pb2.Coordination) -> dict[str, object]:
    return {
        "metadata": message.metadata,
        "heartbeat_ms": message.heartbeat_ms,
        "fast_reclaim": message.fast_reclaim,
    }


def _read_positions(message: coordination_pb2.Coordination) -> dict[str, object]:
    return {"positions": tuple([HeldPosition(at.resource, at.epoch, at.position) for at in message.positions])}


def _read_assignments(message: coordination_pb2.Coordination) -> dict[str, object]:
    assignments = tuple([Assignment(one.task, one.client_id) for one in message.assignments])
    return {"generation": message.generation, "assignments": assignments}


def _read_snapshot(message: coordination_pb2.Coordination) -> dict[str, object]:
    if not message.HasField("snapshot"):
        return {}
    part = message.snapshot
    return {"snapshot": SnapshotPart(part.as_of, part.part, part.parts, part.data)}


_READ: dict[RecordType, Callable[[coordination_pb2.Coordination], dict[str, object]]] = {
    RecordType.JOIN: _read_join,
    RecordType.HEARTBEAT: _read_positions,
    RecordType.PAUSE_GROUP: lambda message: {"duration_ms": message.duration_ms},
    RecordType.ADD_TASK: lambda message: {"payload": message.payload},
    RecordType.DRAIN: lambda message: {"member": message.member},
    RecordType.ASSIGN: _read_assignments,
    RecordType.SNAPSHOT: _read_snapshot,
}
"""Readers of the fields that one type alone has."""


def _unsupported(what: str, got: int, known: int) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        f"{what} {int(got)}, this build reads up to {int(known)}; upgrade every member of the group before one that "
        "writes it"
    )
