"""What the codec of the coordination topic writes, accepts and refuses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.coordination.records import (
    FIELDS,
    MAX_ENTRIES,
    MAX_HEARTBEAT_MS,
    MAX_NAME_CHARS,
    MAX_OFFSET,
    MAX_PAUSE_MS,
    MAX_RECORD_BYTES,
    MIN_HEARTBEAT_MS,
    Assignment,
    HeldPosition,
    Record,
    RecordType,
    SnapshotPart,
)
from kmq_spark.errors import MalformedRecordError, UnsupportedVersionError, WireError
from kmq_spark.wire import coordination_pb2
from kmq_spark.wire.coordination import decode_record, encode_record

CLIENT = {"client_id": "a", "instance": "i1"}

GOLDEN: dict[str, tuple[Record, str]] = {
    "join": (
        Record(
            RecordType.JOIN,
            "a",
            "i1",
            1,
            metadata=b"m",
            heartbeat_ms=2_000,
            fast_reclaim=True,
        ),
        "10011a016122026931280132016d40d00f4801",
    ),
    "heartbeat": (
        Record(RecordType.HEARTBEAT, "a", "i1", 2, positions=(HeldPosition("r/0", 7, 300),)),
        "10021a0161220269312802520a0a03722f30100718ac02",
    ),
    "leave": (Record(RecordType.LEAVE, "a", "i1", 3), "10031a0161220269312803"),
    "claim": (Record(RecordType.CLAIM, "a", "i1", 4, resource="r/0"), "10041a01612202693128045a03722f30"),
    "claim of a topic's partition": (
        Record(RecordType.CLAIM, "a", "i1", 4, resource="r/0", topic_id="x"),
        "10041a01612202693128045a03722f30a2010178",
    ),
    "release": (
        Record(RecordType.RELEASE, "a", "i1", 5, resource="r/0", epoch=7, position=0),
        "10051a01612202693128055a03722f3060076800",
    ),
    "release without position": (
        Record(RecordType.RELEASE, "a", "i1", 5, resource="r/0", epoch=7),
        "10051a01612202693128055a03722f306007",
    ),
    "claim messages": (
        Record(RecordType.CLAIM_MESSAGES, "a", "i1", 6, resource="r/0", epoch=7, position=300),
        "10061a01612202693128065a03722f30600768ac02",
    ),
    "pause group": (
        Record(RecordType.PAUSE_GROUP, "a", "i1", 7, duration_ms=600_000),
        "10071a016122026931280770c0cf24",
    ),
    "resume group": (Record(RecordType.RESUME_GROUP, "a", "i1", 8), "10081a0161220269312808"),
    "set position": (
        Record(RecordType.SET_POSITION, "a", "i1", 9, resource="r/0", position=5),
        "10091a01612202693128095a03722f306805",
    ),
    "add task": (
        Record(RecordType.ADD_TASK, "a", "i1", 10, resource="t", payload=b"p"),
        "100a1a016122026931280a5a01747a0170",
    ),
    "remove task": (Record(RecordType.REMOVE_TASK, "a", "i1", 11, resource="t"), "100b1a016122026931280b5a0174"),
    "drain": (Record(RecordType.DRAIN, "a", "i1", 12, member="b"), "100c1a016122026931280c82010162"),
    "assign": (
        Record(RecordType.ASSIGN, "a", "i1", 13, generation=9, assignments=(Assignment("t", "b"), Assignment("u", ""))),
        "100d1a016122026931280d880109920106" + "0a01741201629201030a0175",
    ),
    "snapshot": (
        Record(RecordType.SNAPSHOT, "a", "i1", 14, snapshot=SnapshotPart(11, 0, 2, b"w")),
        "100e1a016122026931280e9a0107080b1802220177",
    ),
}


@pytest.mark.parametrize(("record", "written"), GOLDEN.values(), ids=GOLDEN)
def test_record_has_these_bytes(record: Record, written: str) -> None:
    """Bytes in topics outlive this build: they never change for a version."""
    assert encode_record(record).hex() == written
    assert decode_record(bytes.fromhex(written)) == record


def test_every_type_has_golden_bytes() -> None:
    """A type that is added needs them too."""
    assert {record.type for record, _ in GOLDEN.values()} == set(RecordType)


NAMES = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=12)
OFFSETS = st.integers(0, MAX_OFFSET)
HEADS: dict[str, Any] = {"client_id": NAMES, "instance": NAMES, "sequence": OFFSETS}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "metadata": st.binary(max_size=20),
    "heartbeat_ms": st.integers(MIN_HEARTBEAT_MS, MAX_HEARTBEAT_MS),
    "fast_reclaim": st.booleans(),
    "positions": st.lists(st.builds(HeldPosition, NAMES, OFFSETS, OFFSETS), max_size=4).map(tuple),
    "resource": NAMES,
    "epoch": OFFSETS,
    "position": OFFSETS,
    "duration_ms": st.integers(1, MAX_PAUSE_MS),
    "payload": st.binary(max_size=20),
    "member": NAMES,
    "assignments": st.lists(st.builds(Assignment, NAMES, NAMES | st.just("")), max_size=4).map(tuple),
    "generation": OFFSETS,
    "topic_id": NAMES | st.just(""),
    "snapshot": st.builds(SnapshotPart, OFFSETS, st.integers(0, 2), st.integers(3, 9), st.binary(max_size=20)),
}
RECORDS = st.one_of(
    [
        st.builds(Record, st.just(kind), **HEADS, **{field: VALUES[field] for field in fields})
        for kind, fields in FIELDS.items()
    ]
)


@given(RECORDS)
def test_record_survives_the_wire(record: Record) -> None:
    """What is written is what is read."""
    assert decode_record(encode_record(record)) == record


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_wire_errors(value: bytes) -> None:
    """Foreign records never stop a member."""
    with contextlib.suppress(WireError):
        decode_record(value)


@given(RECORDS, st.data())
def test_damaged_record_is_read_within_bounds_or_refused(record: Record, data: st.DataObject) -> None:
    """A record with any byte changed can be written again, or it is refused."""
    value = bytearray(encode_record(record))
    value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    try:
        damaged = decode_record(bytes(value))
    except WireError:
        return
    assert decode_record(encode_record(damaged)) == damaged


@given(RECORDS, RECORDS)
def test_fields_of_other_types_are_not_read(record: Record, other: Record) -> None:
    """A record with the fields of two types is read as its own type alone."""
    message = coordination_pb2.Coordination.FromString(encode_record(other))
    message.MergeFromString(encode_record(record))
    if record.type is other.type:
        return
    read = decode_record(message.SerializeToString())
    assert decode_record(encode_record(read)) == read
    assert read.type is record.type


def bytes_of(kind: int, **fields: object) -> bytes:
    """Return the bytes of a record, with fields that may be wrong."""
    given_fields = {**CLIENT, "type": kind, **fields}
    value: bytes = coordination_pb2.Coordination(**given_fields).SerializeToString()  # type: ignore[arg-type]  # wrong on purpose
    return value


REFUSED: dict[str, tuple[bytes | None, str]] = {
    "no value": (None, "the record has no value"),
    "no protobuf": (b"\xff\xff\xff", "got 3 bytes that are no Coordination message"),
    "large record": (
        b"\x32" + bytes(MAX_RECORD_BYTES),
        "the record is too large: got 1000001 bytes; expected 1 to 1000000",
    ),
    "no client id": (bytes_of(3, client_id=""), "LEAVE: client id is empty: got ''; expected 1 to 255 characters"),
    "control character": (bytes_of(3, client_id="a\nb"), "LEAVE: client id has a control character: got 'a\\nb'"),
    "many positions": (
        bytes_of(2, positions=[{"resource": "r"}] * (MAX_ENTRIES + 1)),
        "HEARTBEAT: too many positions: got 10001; expected 0 to 10000",
    ),
    "negative epoch": (
        bytes_of(2, positions=[{"resource": "r", "epoch": -1}]),
        "HEARTBEAT: epoch is out of bounds: got -1; expected 0 to 9223372036854775807",
    ),
    "no snapshot": (bytes_of(14), "SNAPSHOT: snapshot is missing: got None; expected a part of a snapshot"),
    "part past the last one": (
        bytes_of(14, snapshot={"as_of": 1, "part": 2, "parts": 2}),
        "SNAPSHOT: part is out of bounds: got 2; expected 0 to 1",
    ),
}


@pytest.mark.parametrize(("value", "finding"), REFUSED.values(), ids=REFUSED)
def test_malformed_record_is_refused_with_its_place_and_finding(value: bytes | None, finding: str) -> None:
    """The error contains the place of the record and the fault, as text and as attributes."""
    with pytest.raises(MalformedRecordError) as caught:
        decode_record(value, topic="kmq.coordination", partition=3, offset=18)
    error = caught.value
    assert str(error).startswith(f"cannot read coordination record at kmq.coordination[3]@18: {finding}")
    assert (error.topic, error.partition, error.offset) == ("kmq.coordination", 3, 18)


@pytest.mark.parametrize(
    ("value", "finding"),
    [
        (bytes_of(3, version=9), "version 9, this build reads up to 0"),
        (bytes_of(15), "type 15, this build reads up to 14"),
    ],
    ids=["version", "type"],
)
def test_record_of_a_later_build_differs_from_a_malformed_one(value: bytes, finding: str) -> None:
    """A member that meets one cannot know the world any more, and has to stop."""
    with pytest.raises(UnsupportedVersionError) as caught:
        decode_record(value)
    assert str(caught.value).startswith(f"cannot read coordination record: {finding}; upgrade every member")


@pytest.mark.parametrize(
    ("record", "finding"),
    [
        (Record(RecordType.CLAIM, "a", "i", resource="r" * 300), "cannot write CLAIM: resource is too long: got 300"),
        (
            Record(
                RecordType.HEARTBEAT,
                "a",
                "i",
                positions=(HeldPosition("é" * MAX_NAME_CHARS, 0, 0),) * 2_000,
            ),
            "cannot write HEARTBEAT: the record is too large: got 1032008 bytes",
        ),
    ],
    ids=["name", "size"],
)
def test_record_that_no_reader_accepts_is_not_written(record: Record, finding: str) -> None:
    """The caller gets the error, not the readers."""
    with pytest.raises(MalformedRecordError) as caught:
        encode_record(record)
    assert str(caught.value).startswith(finding)
