"""The checker's own reader of the protocol says of any bytes what the product's codec says, and shares no code."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faults import protocol
from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.in_flight import message_keys
from kmq_spark.core.markers import (
    MAX_DELIVERY_COUNT,
    MAX_DUE_AT_MS,
    MAX_MESSAGE_OFFSET,
    MAX_QUEUE_PARTITION,
    MAX_REDELIVER_AFTER_MS,
    Marker,
    MarkerType,
    MessageId,
    OffsetRange,
    Outcome,
    Release,
)
from kmq_spark.core.policy import QueueRules
from kmq_spark.errors import WireError
from kmq_spark.wire import headers
from kmq_spark.wire.codec import decode_marker, encode_marker

LEASES = st.integers(0, MAX_REDELIVER_AFTER_MS)
TEXTS = st.text(max_size=40) | st.text(min_size=995, max_size=1_010)
RULES = st.builds(
    QueueRules,
    st.integers(1, 2**53),
    st.integers(0, 10_000),
    st.builds(Backoff, st.sampled_from(BackoffKind), LEASES, LEASES, st.floats(0, 1)),
    st.booleans(),
)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[OffsetRange, ...]:
    """Return ascending ranges without overlap, up to the last offset."""
    first, covered = draw(st.integers(0, MAX_MESSAGE_OFFSET - 1_000_000) | st.integers(0, 300)), []
    for gap, count in draw(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 9_000)), min_size=1, max_size=8)):
        covered.append(OffsetRange(first + gap, count))
        first += gap + count
    return tuple(covered)


COVERED = {"queue_partition": st.integers(0, MAX_QUEUE_PARTITION), "ranges": ranges(), "consumer_id": TEXTS}
MARKERS = st.one_of(
    st.builds(
        Marker,
        st.just(MarkerType.START),
        **COVERED,
        redeliver_after_ms=LEASES,
        delivery_count=st.integers(1, MAX_DELIVERY_COUNT),
        never_handed_out=st.booleans(),
        due_at_ms=st.integers(0, MAX_DUE_AT_MS),
    ),
    st.builds(
        Marker,
        st.just(MarkerType.KEEPALIVE),
        **COVERED,
        redeliver_after_ms=LEASES,
        never_handed_out=st.booleans(),
        release=st.sampled_from(Release),
        reason=TEXTS,
    ),
    st.builds(Marker, st.just(MarkerType.END), **COVERED, outcome=st.sampled_from(Outcome), reason=TEXTS),
    st.builds(
        Marker,
        st.just(MarkerType.TICK),
        consumer_id=TEXTS,
    ),
    st.builds(Marker, st.just(MarkerType.RULES), consumer_id=TEXTS, rules=RULES),
)


def expected(value: bytes | None) -> protocol.Marker | None:
    """Return what the product's codec reads, in the checker's words."""
    try:
        marker = decode_marker(value)
    except WireError:
        return None
    rules = marker.rules
    own = protocol.Marker(
        protocol.MarkerType(marker.type),
        marker.queue_partition,
        tuple(protocol.OffsetRange(*each) for each in marker.ranges),
        marker.redeliver_after_ms,
        marker.delivery_count,
        protocol.Outcome(marker.outcome),
        marker.reason,
        marker.consumer_id,
        marker.never_handed_out,
        protocol.Release(marker.release),
        marker.due_at_ms,
    )
    if rules is None:
        return own
    backoff = rules.backoff
    return own._replace(
        rules=protocol.QueueRules(
            rules.max_deliveries,
            protocol.BackoffKind(backoff.kind),
            backoff.initial_ms,
            backoff.max_ms,
            backoff.jitter,
            rules.dead_letters_expired,
        )
    )


def assert_read_alike(value: bytes | None) -> None:
    """Compare the two readers."""
    found = protocol.decode(value)
    assert found == expected(value)


def varint(number: int, least: int = 1) -> bytes:
    """Return a number as protobuf writes it; with *least* bytes at least, which may be more than it needs."""
    found = bytearray()
    while number >= 0x80 or len(found) + 1 < least:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


NUMBERS = st.integers(0, 2**64 - 1) | st.integers(0, 300) | st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1])
INNER = st.lists(
    st.builds(lambda field, number: varint(field << 3) + varint(number), st.integers(1, 3), NUMBERS), max_size=4
).map(b"".join)
FIELD = st.one_of(
    st.builds(
        lambda field, number, least: varint(field << 3) + varint(number, least),
        st.integers(0, 20),
        NUMBERS,
        st.integers(1, 11),
    ),
    st.builds(
        lambda field, data: varint(field << 3 | 2) + varint(len(data)) + data,
        st.integers(0, 20),
        st.binary(max_size=12) | INNER,
    ),
    st.builds(lambda field, data: varint(field << 3 | 1) + data, st.integers(1, 20), st.binary(min_size=8, max_size=8)),
    st.builds(lambda field, data: varint(field << 3 | 5) + data, st.integers(1, 20), st.binary(min_size=4, max_size=4)),
    st.builds(
        lambda field, other, data: varint(field << 3 | 3) + data + varint(other << 3 | 4),
        st.integers(1, 4),
        st.integers(1, 4),
        INNER,
    ),
    st.binary(max_size=6),
)


@given(marker=MARKERS)
def test_markers_of_the_product_are_read_alike(marker: Marker) -> None:
    """Every type with every field."""
    assert_read_alike(encode_marker(marker))


@settings(max_examples=300)
@given(value=st.lists(FIELD, max_size=8).map(b"".join))
@example(b"\x0b\x0c\x1a\x00")  # a group
@example(b"\x10\x03\x1a\x16\x08" + b"\xff" * 9 + b"\x02\x10" + b"\xff" * 9 + b"\x01")  # 65 bits
@example(b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x02")
def test_fields_in_any_order_of_any_type_are_read_alike(value: bytes) -> None:
    """Fields twice, of a wrong type, unknown, in groups, packed and not, cut off."""
    assert_read_alike(value)


@settings(max_examples=300)
@given(marker=MARKERS, data=st.data())
def test_damaged_markers_are_read_alike(marker: Marker, data: st.DataObject) -> None:
    """Bytes changed, cut off, or appended."""
    value = bytearray(encode_marker(marker))
    for _ in range(data.draw(st.integers(1, 3))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    assert_read_alike(bytes(value))
    assert_read_alike(bytes(value[: data.draw(st.integers(0, len(value)))]))
    assert_read_alike(bytes(value) + data.draw(FIELD))


def test_nothing_is_no_marker() -> None:
    assert protocol.decode(None) is None
    assert protocol.decode(b"") is None


@given(
    rules=RULES,
    partition=st.integers(0, MAX_QUEUE_PARTITION),
    offset=st.integers(0, MAX_MESSAGE_OFFSET),
    count=st.integers(0, 200),
)
def test_backoff_is_the_one_that_the_tracker_adds(rules: QueueRules, partition: int, offset: int, count: int) -> None:
    """The rest of a message is a function of the log, jitter included, for both to the millisecond."""
    (delay_ms,) = rules.backoff.delays_ms(message_keys(partition, np.array([offset])), np.array([count])).tolist()
    own = expected(encode_marker(Marker(MarkerType.RULES, rules=rules)))
    assert own is not None
    assert own.rules is not None
    assert own.rules.backoff_ms(protocol.MessageId(partition, offset), count) == delay_ms


TEXT_BYTES = (
    st.none() | st.binary(max_size=22) | st.from_regex(rb"\A[0-9]{1,6}:[0-9]{1,16}\Z") | st.from_regex(rb"\A\d{1,20}\Z")
)


@given(value=TEXT_BYTES)
def test_headers_are_read_alike(value: bytes | None) -> None:
    """Numbers and places, and what is none."""
    assert protocol.number_of(value) == headers.read_number(value)
    place = MessageId.parse(value)
    assert protocol.place_of(value) == (place and protocol.MessageId(*place))


def test_names_of_headers_are_the_same() -> None:
    names = [
        name for name in dir(protocol) if name.isupper() and str(getattr(protocol, name)).startswith(("kmq-", "__dlq"))
    ]
    assert len(names) == 20
    for name in names:
        assert getattr(protocol, name) == getattr(headers, name)


def test_checker_shares_no_code_with_the_product() -> None:
    """Judging evidence loads no module of kmq_spark."""
    program = "import sys, faults.judge; print([name for name in sys.modules if name.startswith('kmq_spark')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
