"""What the codec accepts, what it refuses, and what it says then."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kmq_spark.core.markers import (
    MAX_DELIVERY_COUNT,
    MAX_DUE_AT_MS,
    MAX_MESSAGE_OFFSET,
    MAX_MESSAGES_PER_MARKER,
    MAX_QUEUE_PARTITION,
    MAX_REDELIVER_AFTER_MS,
    MAX_TEXT_CHARS,
    Marker,
    MarkerType,
    OffsetRange,
)
from kmq_spark.core.policy import QueueRules
from kmq_spark.errors import MalformedRecordError, UnsupportedVersionError, WireError
from kmq_spark.wire import marker_pb2
from kmq_spark.wire.codec import decode_marker, encode_marker
from tests.unit.core.test_fold_properties import MARKERS

WRITTEN = MARKERS.map(lambda logged: logged.marker).filter(lambda marker: marker is not None)
LARGEST = Marker(
    MarkerType.START,
    MAX_QUEUE_PARTITION,
    (OffsetRange(0, MAX_MESSAGES_PER_MARKER - 1), OffsetRange(MAX_MESSAGE_OFFSET, 1)),
    MAX_REDELIVER_AFTER_MS,
    MAX_DELIVERY_COUNT,
    consumer_id="ä☃" * (MAX_TEXT_CHARS // 2),
    due_at_ms=MAX_DUE_AT_MS,
)


@given(WRITTEN)
@example(LARGEST)
def test_marker_survives_the_wire(marker: Marker) -> None:
    """What is written is what is read."""
    assert marker == decode_marker(encode_marker(marker))


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_wire_errors(value: bytes) -> None:
    """Foreign records never stop the tracker."""
    with contextlib.suppress(WireError):
        decode_marker(value)


@given(WRITTEN, st.data())
def test_damaged_marker_is_read_within_bounds_or_refused(marker: Marker, data: st.DataObject) -> None:
    """A marker with any byte changed is within bounds all the same: it can be written again, or it is refused."""
    value = bytearray(encode_marker(marker))
    value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    try:
        damaged = decode_marker(bytes(value))
    except WireError:
        return
    assert damaged == decode_marker(encode_marker(damaged))


def message(**fields: object) -> bytes:
    """Return a record of a KEEPALIVE of message 0:7, with other fields in place."""
    given_fields = {"type": 2, "message_id": {"partition": 0, "offset": 7}, **fields}
    value: bytes = marker_pb2.Marker(**given_fields).SerializeToString()  # type: ignore[arg-type]  # wrong on purpose
    return value


NOWHERE = {"partition": -1, "offset": -1}

REFUSED: dict[str, tuple[bytes | None, str]] = {
    "no value": (None, "the record has no value"),
    "empty value": (b"", "the record is empty"),
    "no protobuf": (b"\xff\xff\xff", "got 3 bytes that are no Marker message"),
    "text that is not UTF-8": (b"\x1a\x00\x5a\x01\xff", "got 5 bytes that are no Marker message"),
    "no message id": (b"\x20\x01", "a START without message id"),
    "negative partition": (message(message_id={"partition": -1, "offset": 7}), "queue partition out of bounds: got -1"),
    "large partition": (
        message(message_id={"partition": 32_768, "offset": 7}),
        "queue partition out of bounds: got 32768, allowed 0 to 32767",
    ),
    "negative offset": (message(message_id={"offset": -2}), "message offsets not ascending: got -2 after -1"),
    "large offset": (
        message(message_id={"offset": 2**48}),
        "message offset out of bounds: got 281474976710656, maximum 281474976710655",
    ),
    "long lease": (
        message(redeliver_after_ms=MAX_REDELIVER_AFTER_MS + 1),
        "lease out of bounds: got 43200001 ms, allowed 0 to 43200000",
    ),
    "empty range": (message(ranges=[{"first": 7, "count": 0}]), "empty range: got count 0 at 7, minimum 1"),
    "overlap": (
        message(ranges=[{"first": 7, "count": 2}, {"first": 8, "count": 1}]),
        "message offsets not ascending: got 8 after 8",
    ),
    "descending ranges": (
        message(ranges=[{"first": 7, "count": 1}, {"first": 3, "count": 1}]),
        "message offsets not ascending: got 3 after 7",
    ),
    "hostile range": (
        message(ranges=[{"first": 7, "count": 2**32 - 1}]),
        "too many messages: got 4294967295, maximum 100000",
    ),
    "many full ranges": (
        message(ranges=[{"first": 7 + 60_000 * part, "count": 60_000} for part in range(2)]),
        "too many messages: got 120000, maximum 100000",
    ),
    "ranges beside the message id": (
        message(ranges=[{"first": 8, "count": 1}]),
        "ranges begin at 8, message id at 7",
    ),
    "tick of a message": (message(type=3), "a TICK that covers messages: got message id (0, 7), allowed (-1, -1)"),
    "rules of a message": (message(type=4), "a RULES that covers messages: got message id (0, 7), allowed (-1, -1)"),
    "rules without rules": (message(type=4, message_id=NOWHERE), "version out of bounds: got 0, allowed 1 to"),
    "rules with a long backoff": (
        message(type=4, message_id=NOWHERE, rules={"version": 1, "backoff_max_ms": 2**63}),
        "backoff_max_ms out of bounds: got 9223372036854775808, allowed 0 to 43200000",
    ),
    "rules with a jitter that is no number": (
        message(type=4, message_id=NOWHERE, rules={"version": 1, "backoff_jitter": float("nan")}),
        "backoff_jitter out of bounds: got nan, allowed 0 to 1",
    ),
    "tick with ranges": (
        message(type=3, message_id={"partition": -1, "offset": -1}, ranges=[{"first": 7, "count": 1}]),
        "a TICK that covers messages: got message id (-1, -1)",
    ),
}


@pytest.mark.parametrize(("value", "finding"), REFUSED.values(), ids=REFUSED)
def test_malformed_record_is_refused_with_its_place_and_finding(value: bytes | None, finding: str) -> None:
    """The error says where the record lies and what is wrong with it, as text and as attributes."""
    with pytest.raises(MalformedRecordError) as caught:
        decode_marker(value, topic="orders.markers", partition=3, offset=18_842)
    error = caught.value
    assert str(error).startswith(f"cannot read marker at orders.markers[3]@18842: {finding}")
    assert (error.topic, error.partition, error.offset) == ("orders.markers", 3, 18_842)


@pytest.mark.parametrize(
    ("value", "finding"),
    [
        (message(version=9), "version 9, this build reads up to 0"),
        (message(type=6), "type 6, this build reads up to 5"),
        (message(type=1, outcome=5), "outcome 5, this build reads up to 4"),
        (
            message(type=4, message_id=NOWHERE, rules={"version": 1, "backoff": 9}),
            "backoff 9, this build reads up to 3",
        ),
    ],
    ids=["version", "type", "outcome", "backoff"],
)
def test_marker_of_a_later_build_is_distinguished_from_a_malformed_one(value: bytes, finding: str) -> None:
    """The error says that the reader is too old."""
    with pytest.raises(UnsupportedVersionError) as caught:
        decode_marker(value)
    assert str(caught.value) == f"cannot read marker: {finding}; upgrade the tracker before the workers"


def test_tick_without_message_id_is_a_tick() -> None:
    """Only kafka-mq-go needs the message id of a TICK."""
    assert Marker(MarkerType.TICK) == decode_marker(b"\x10\x03")


def test_delivery_count_of_zero_reads_as_the_first_delivery() -> None:
    """kafka-mq-go's START carries none."""
    assert decode_marker(message(type=0)).delivery_count == 1


def test_delivery_count_past_its_bound_reads_as_the_bound() -> None:
    """A START protects its message whatever the count says."""
    assert decode_marker(message(type=0, delivery_count=2**32 - 1)).delivery_count == MAX_DELIVERY_COUNT


def test_long_texts_are_cut_in_both_directions() -> None:
    """Reason and consumer id travel on into headers."""
    long = Marker(MarkerType.END, 0, (OffsetRange(7, 1),), reason="r" * 5_000, consumer_id="c" * 5_000)
    assert len(decode_marker(encode_marker(long)).reason) == MAX_TEXT_CHARS
    foreign = decode_marker(message(type=1, reason="r" * 5_000, consumer_id="c" * 5_000))
    assert (len(foreign.reason), len(foreign.consumer_id)) == (MAX_TEXT_CHARS, MAX_TEXT_CHARS)


def test_text_with_half_a_surrogate_is_written_all_the_same() -> None:
    """Texts of operating system errors may hold undecodable file names."""
    marker = Marker(MarkerType.END, 0, (OffsetRange(7, 1),), reason="no file \udcff")
    assert decode_marker(encode_marker(marker)).reason == "no file ?"


@pytest.mark.parametrize(
    ("marker", "finding"),
    [
        (Marker(MarkerType.START, 0, ()), "no messages covered: got no ranges, at least 1 needed"),
        (Marker(MarkerType.START, -1, (OffsetRange(7, 1),)), "queue partition out of bounds: got -1"),
        (Marker(MarkerType.START, 0, (OffsetRange(7, MAX_MESSAGES_PER_MARKER + 1),)), "too many messages: got 100001"),
        (Marker(MarkerType.START, 0, (OffsetRange(7, 1),), -1), "lease out of bounds: got -1 ms"),
        (Marker(MarkerType.RULES), "RULES without rules"),
        (Marker(MarkerType.RULES, rules=QueueRules(0)), "version out of bounds: got 0"),
    ],
    ids=["no ranges", "partition", "messages", "lease", "no rules", "rules"],
)
def test_marker_that_no_reader_accepts_is_not_written(marker: Marker, finding: str) -> None:
    """A bug of a writer raises in the writer."""
    with pytest.raises(MalformedRecordError, match="cannot write marker: ") as caught:
        encode_marker(marker)
    assert finding in str(caught.value)
