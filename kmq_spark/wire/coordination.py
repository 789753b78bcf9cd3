"""
Records of the coordination topic to bytes and back.

Rule 1: bytes from the log are untrusted: whatever they are, reading gives a record within bounds or a `WireError`.
Rule 2: both directions check the same bounds, and a bound changes with the version only: readers of another build must
refuse the same bytes, or the worlds of a group's readers differ.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from kmq_spark.core.coordination.records import (
    FIELDS,
    MAX_RECORD_BYTES,
    Assignment,
    HeldPosition,
    Record,
    RecordType,
    SnapshotPart,
    record_fault,
)
from kmq_spark.errors import MalformedRecordError, UnsupportedVersionError, WireError
from kmq_spark.wire import coordination_pb2

VERSION = 0
"""The version this build writes, and the last one it reads."""

_TYPES = {int(record_type): record_type for record_type in RecordType}
_MALFORMED = "find its writer: only kmq-spark may write to a coordination topic"


def encode_record(record: Record) -> bytes:
    """Return the value of a record; raise a `MalformedRecordError` where no reader would accept it."""
    if fault := record_fault(record):
        raise MalformedRecordError(f"cannot write {record.type.name}: {fault}; check the arguments of the call")
    message = coordination_pb2.Coordination(
        client_id=record.client_id, instance=record.instance, sequence=record.sequence
    )
    message.type = int(record.type)  # type: ignore[assignment]  # an enum's number is what the runtime wants
    for field in FIELDS[record.type]:
        _put(message, field, getattr(record, field))
    value: bytes = message.SerializeToString()
    if len(value) > MAX_RECORD_BYTES:
        raise MalformedRecordError(
            f"cannot write {record.type.name}: the record is too large: got {len(value)} bytes; "
            f"expected 1 to {MAX_RECORD_BYTES}; write several records"
        )
    return value


def _put(message: coordination_pb2.Coordination, field: str, value: Any) -> None:  # noqa: ANN401  # of any field
    if field in {"positions", "assignments"}:
        rows = getattr(message, field)
        for row in value:
            rows.add(**row._asdict())
    elif field == "snapshot":
        message.snapshot.MergeFrom(coordination_pb2.SnapshotPart(**value._asdict()))
    elif value is not None:
        setattr(message, field, value)


def decode_record(value: bytes | None, *, topic: str = "", partition: int = -1, offset: int = -1) -> Record:
    """Read the value of a record of the coordination topic; its place is for the error text."""
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
            f"the record is too large: got {len(value)} bytes; expected 1 to {MAX_RECORD_BYTES}; {_MALFORMED}"
        )
    try:
        message: coordination_pb2.Coordination = coordination_pb2.Coordination.FromString(value)
    except DecodeError as error:
        raise MalformedRecordError(f"got {len(value)} bytes that are no Coordination message; {_MALFORMED}") from error
    return message


def _record_of(message: coordination_pb2.Coordination) -> Record:
    kind = _TYPES.get(message.type)
    if message.version != VERSION:
        raise _unsupported("version", message.version, VERSION)
    if kind is None and message.type != 0:
        raise _unsupported("type", message.type, max(RecordType))
    if kind is None:
        raise MalformedRecordError(f"a record without type: got 0; expected 1 to {int(max(RecordType))}; {_MALFORMED}")
    fields = {field: _got(message, field) for field in FIELDS[kind]}
    record = Record(kind, message.client_id, message.instance, message.sequence, **fields)
    if fault := record_fault(record):
        raise MalformedRecordError(f"{kind.name}: {fault}; {_MALFORMED}")
    return record


def _got(message: coordination_pb2.Coordination, field: str) -> Any:  # noqa: ANN401  # of any field
    if field == "positions":
        return tuple([HeldPosition(at.resource, at.epoch, at.position) for at in message.positions])
    if field == "assignments":
        return tuple([Assignment(one.task, one.client_id) for one in message.assignments])
    if field in {"position", "snapshot"} and not message.HasField(field):
        return None
    if field == "snapshot":
        part = message.snapshot
        return SnapshotPart(part.as_of, part.part, part.parts, part.data)
    return getattr(message, field)


def _unsupported(what: str, got: int, known: int) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        f"{what} {int(got)}, this build reads up to {int(known)}; upgrade every member of the group before one that "
        "writes it"
    )
