"""
The protocol as docs/protocol.md has it, written once more for the checker: markers from bytes, and names of headers.

Rule 1: nothing of this is the product's code, and nothing here is used by it: an oracle that shares its reader with
what it judges cannot see that reader's mistakes.
Rule 2: bytes in, a marker within bounds out, or None: what docs/protocol.md says is set aside.
Rule 3: the wire format is protobuf's, read by hand: field number and wire type, the last value counts, unknown fields
are skipped (https://protobuf.dev/programming-guides/encoding/).

`tests/unit/faults/test_protocol.py` compares it with the product's codec.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class MarkerType(IntEnum):
    """Field 2."""

    START = 0
    END = 1
    KEEPALIVE = 2
    TICK = 3
    RULES = 4


class Outcome(IntEnum):
    """Field 9."""

    ACKED = 0
    REJECTED = 1
    EXPIRED = 2
    REDELIVERED = 3
    DEAD_LETTERED = 4


class Release(IntEnum):
    """Field 13."""

    RENEWED = 0
    GIVEN_BACK = 1
    FAILED = 2


class BackoffKind(IntEnum):
    """Of field 15."""

    NONE = 0
    CONSTANT = 1
    LINEAR = 2
    EXPONENTIAL = 3


class MessageId(NamedTuple):
    """A place in the queue topic."""

    queue_partition: int
    message_offset: int


class OffsetRange(NamedTuple):
    """So many message offsets from the first on."""

    first: int
    size: int


class QueueRules(NamedTuple):
    """
    Rules of a queue.

    Attributes:
        max_deliveries: Last allowed delivery; 0 for no limit.
        backoff: How the backoff grows with the delivery count.
        backoff_initial_ms: After the first delivery.
        backoff_max_ms: At most.
        backoff_jitter: Share that a hash may take away, 0 to 1.
        dead_letters_expired: Whether an expired message becomes a dead letter.
    """

    max_deliveries: int = 0
    backoff: BackoffKind = BackoffKind.NONE
    backoff_initial_ms: int = 0
    backoff_max_ms: int = 0
    backoff_jitter: float = 0.0
    dead_letters_expired: bool = False

    def is_last(self, delivery_count: int) -> bool:
        """Return whether a message is not to be delivered again."""
        return 0 < self.max_deliveries <= delivery_count

    def backoff_ms(self, message_id: MessageId, delivery_count: int) -> int:
        """Return how much longer a message waits after that delivery."""
        count = max(1, delivery_count)
        match self.backoff:
            case BackoffKind.NONE:
                return 0
            case BackoffKind.CONSTANT:
                delay = float(self.backoff_initial_ms)
            case BackoffKind.LINEAR:
                delay = float(self.backoff_initial_ms) * count
            case BackoffKind.EXPONENTIAL:
                delay = float(self.backoff_initial_ms) * 2.0 ** min(count - 1, 62)
        delay = min(delay, float(self.backoff_max_ms))
        if self.backoff_jitter:
            delay -= delay * self.backoff_jitter * _share(message_id, count)
        return -int(-delay // 1)


class Marker(NamedTuple):
    """
    One record of the markers topic; docs/protocol.md has the fields.

    Attributes:
        type: What it says.
        queue_partition: Queue partition of all messages covered; -1 for none.
        ranges: Message offsets covered, ascending.
        redeliver_after_ms: START, KEEPALIVE: from its append time on.
        delivery_count: START.
        outcome: END.
        reason: END, KEEPALIVE of a delivery that failed.
        writer: Who wrote it.
        never_handed_out: START, KEEPALIVE.
        release: KEEPALIVE.
        due_at_ms: START.
        rules: RULES.
    """

    type: MarkerType
    queue_partition: int = -1
    ranges: tuple[OffsetRange, ...] = ()
    redeliver_after_ms: int = 0
    delivery_count: int = 1
    outcome: Outcome = Outcome.ACKED
    reason: str = ""
    writer: str = ""
    never_handed_out: bool = False
    release: Release = Release.RENEWED
    due_at_ms: int = 0
    rules: QueueRules | None = None

    def covered(self) -> Iterator[MessageId]:
        """Return the messages that it is about."""
        for first, size in self.ranges:
            for message_offset in range(first, first + size):
                yield MessageId(self.queue_partition, message_offset)


class LoggedMarker(NamedTuple):
    """
    A record of the markers topic at its place.

    Attributes:
        marker_offset: Where.
        appended_at_ms: Append time, epoch milliseconds; negative where there is none.
        marker: None where the record is no marker.
    """

    marker_offset: int
    appended_at_ms: int
    marker: Marker | None


DELIVERY_COUNT = "kmq-delivery-count"
ORIGIN = "kmq-origin"
PREVIOUS = "kmq-previous"
FIRST_SENT_MS = "kmq-first-sent-ms"
ATTEMPTS_MS = "kmq-attempts-ms"
SUBSCRIPTION = "kmq-subscription"
LOGICAL_QUEUE = "kmq-logical-queue"
DELAY_MS = "kmq-delay-ms"
NOT_BEFORE_MS = "kmq-not-before-ms"
TTL_MS = "kmq-ttl-ms"
EXPIRES_AT_MS = "kmq-expires-at-ms"
SILENT_COUNT = "kmq-silent-count"
MAX_DELIVERIES = "kmq-max-deliveries"
LAST_ERROR = "kmq-last-error"
DLQ_TOPIC = "__dlq.errors.topic"
DLQ_PARTITION = "__dlq.errors.partition"
DLQ_OFFSET = "__dlq.errors.offset"
DLQ_GROUP = "__dlq.errors.group"
DLQ_DELIVERY_COUNT = "__dlq.errors.delivery.count"
DLQ_MESSAGE = "__dlq.errors.message"

ATTEMPTS_KEPT = 20
REASON_CHARS = 1_000
ERROR_CHARS = 300
SET_ASIDE_BYTES = 65_536
"""So much of a record that is no marker is kept in its dead letter."""

_LAST_PARTITION = 32_767
_LAST_OFFSET = 2**48 - 1
_LONGEST_MS = 12 * 3_600_000
_LAST_INSTANT_MS = 253_402_300_799_999
_MOST_COVERED = 100_000
_MOST_DELIVERIES = 2**31 - 1
_MOST_MAX_DELIVERIES = 10_000
_LAST_VERSION = 2**53


class _BadError(Exception):
    """What lies there is no marker."""


class _Wire(IntEnum):
    VARINT = 0
    FIXED64 = 1
    LENGTH = 2
    GROUP = 3
    END_GROUP = 4
    FIXED32 = 5


_VARINT_BYTES, _TAG_BYTES, _DEEPEST = 10, 5, 100

Fields = dict[int, list[tuple[_Wire, int | bytes]]]
"""By field number: wire type and value, in the order of the record."""


def decode(value: bytes | None) -> Marker | None:
    """Return the marker of a record's value; None where it is none."""
    if not value:
        return None
    try:
        return _marker(_fields(value))
    except (_BadError, UnicodeDecodeError):
        return None


def _varint(data: bytes, at: int, longest: int = _VARINT_BYTES) -> tuple[int, int]:
    """Return a number, and where the next thing begins."""
    value = 0
    for number in range(longest):
        if at + number >= len(data):
            raise _BadError
        byte = data[at + number]
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:  # noqa: PLR2004  # no more bytes follow
            # Bits above the 64th are dropped.
            return value % 2**64, at + number + 1
    raise _BadError


def _fields(data: bytes) -> Fields:
    found: Fields = {}
    at = 0
    while at < len(data):
        number, wire, value, at = _field(data, at)
        found.setdefault(number, []).append((wire, value))
    return found


def _field(data: bytes, at: int, depth: int = 0) -> tuple[int, _Wire, int | bytes, int]:
    """Return field number, wire type, value, and where the next field begins."""
    tag, at = _varint(data, at, _TAG_BYTES)
    number, kind = tag >> 3, tag & 7
    if not 0 < number < 2**29 or kind not in set(_Wire):
        raise _BadError
    wire = _Wire(kind)
    if wire is _Wire.VARINT:
        return number, wire, *_varint(data, at)
    if wire is _Wire.GROUP:
        return number, wire, b"", _skip_group(data, at, number, depth + 1)
    if wire is _Wire.END_GROUP and depth == 0:
        raise _BadError
    size = {_Wire.FIXED64: 8, _Wire.FIXED32: 4, _Wire.END_GROUP: 0}.get(wire, 0)
    if wire is _Wire.LENGTH:
        size, at = _varint(data, at, _TAG_BYTES)
    if at + size > len(data):
        raise _BadError
    return number, wire, data[at : at + size], at + size


def _skip_group(data: bytes, at: int, number: int, depth: int) -> int:
    if depth >= _DEEPEST:
        raise _BadError
    while True:
        inner, wire, _, at = _field(data, at, depth)
        if wire is _Wire.END_GROUP:
            if inner != number:
                raise _BadError
            return at


def _numbers(fields: Fields, number: int) -> list[int]:
    """Return all varints of a field, packed ones among them."""
    found: list[int] = []
    for wire, value in fields.get(number, ()):
        if wire is _Wire.VARINT and isinstance(value, int):
            found.append(value)
        elif wire is _Wire.LENGTH and isinstance(value, bytes):
            at = 0
            while at < len(value):
                one, at = _varint(value, at)
                found.append(one)
    return found


def _number(fields: Fields, number: int) -> int:
    """Return an unsigned number, 0 where there is none."""
    found = [value for wire, value in fields.get(number, ()) if wire is _Wire.VARINT]
    return int(found[-1]) if found else 0


def _signed(value: int, bits: int) -> int:
    value &= 2**bits - 1
    return value - 2**bits if value >= 2 ** (bits - 1) else value


def _blobs(fields: Fields, number: int) -> list[bytes]:
    return [value for wire, value in fields.get(number, ()) if wire is _Wire.LENGTH and isinstance(value, bytes)]


def _text(fields: Fields, number: int) -> str:
    """Return a text; every one that is there must be UTF-8."""
    texts = [blob.decode("utf-8") for blob in _blobs(fields, number)]
    return texts[-1] if texts else ""


def _double(fields: Fields, number: int) -> float:
    found = [value for wire, value in fields.get(number, ()) if wire is _Wire.FIXED64 and isinstance(value, bytes)]
    return float(struct.unpack("<d", found[-1])[0]) if found else 0.0


def _within(value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise _BadError


def _marker(fields: Fields) -> Marker:
    # Everything that has a known number is read, whether the type needs it or not: bytes that no reader of this record
    # accepts make it no marker.
    reason, writer = _text(fields, 10)[:REASON_CHARS], _text(fields, 11)[:REASON_CHARS]
    # Parts of a message that comes in several pieces are one.
    place = _fields(b"".join(_blobs(fields, 3)))
    parts = [_fields(blob) for blob in _blobs(fields, 7)]
    rules = _fields(b"".join(_blobs(fields, 15)))
    named = _signed(_number(place, 1), 32), _signed(_number(place, 2), 64)
    number = _signed(_number(fields, 2), 32)
    if _signed(_number(fields, 1), 32) != 0 or number not in set(MarkerType):
        raise _BadError
    kind = MarkerType(number)
    common = Marker(kind, writer=writer)
    if kind in {MarkerType.TICK, MarkerType.RULES}:
        if parts or (_blobs(fields, 3) and named != (-1, -1)):
            raise _BadError
        if kind is MarkerType.RULES:
            return common._replace(rules=_rules(rules))
        return common
    if not _blobs(fields, 3):
        raise _BadError
    ranges = tuple(OffsetRange(_signed(_number(part, 1), 64), _number(part, 2) & 0xFFFF_FFFF) for part in parts)
    ranges = ranges or (OffsetRange(named[1], 1),)
    _check_ranges(ranges, named[1])
    _within(named[0], 0, _LAST_PARTITION)
    return _about_messages(fields, common._replace(queue_partition=named[0], ranges=ranges), reason)


def _about_messages(fields: Fields, common: Marker, reason: str) -> Marker:
    if common.type is MarkerType.END:
        outcome = _signed(_number(fields, 9), 32)
        if outcome not in set(Outcome):
            raise _BadError
        return common._replace(outcome=Outcome(outcome), reason=reason)
    after_ms, number = _number(fields, 4), _signed(_number(fields, 13), 32)
    _within(after_ms, 0, _LONGEST_MS)
    if number not in set(Release):
        raise _BadError
    common = common._replace(redeliver_after_ms=after_ms, never_handed_out=_number(fields, 12) != 0)
    if common.type is MarkerType.KEEPALIVE:
        return common._replace(release=Release(number), reason=reason if number == Release.FAILED else "")
    due_at_ms = _signed(_number(fields, 14), 64)
    _within(due_at_ms, 0, _LAST_INSTANT_MS)
    count = min((_number(fields, 8) & 0xFFFF_FFFF) or 1, _MOST_DELIVERIES)
    return common._replace(delivery_count=count, due_at_ms=due_at_ms)


def _check_ranges(ranges: tuple[OffsetRange, ...], first: int) -> None:
    if ranges[0].first != first:
        raise _BadError
    end = total = 0
    for each in ranges:
        if each.size < 1 or each.first < end or each.first + each.size > _LAST_OFFSET + 1:
            raise _BadError
        end, total = each.first + each.size, total + each.size
    _within(total, 1, _MOST_COVERED)


def _rules(fields: Fields) -> QueueRules:
    kind = _signed(_number(fields, 3), 32)
    if kind not in set(BackoffKind):
        raise _BadError
    limit, initial_ms, max_ms = _number(fields, 2) & 0xFFFF_FFFF, _number(fields, 4), _number(fields, 5)
    jitter = _double(fields, 6)
    _within(_number(fields, 1), 1, _LAST_VERSION)
    _within(limit, 0, _MOST_MAX_DELIVERIES)
    _within(initial_ms, 0, _LONGEST_MS)
    _within(max_ms, 0, _LONGEST_MS)
    _within(jitter, 0, 1)
    return QueueRules(limit, BackoffKind(kind), initial_ms, max_ms, jitter, _number(fields, 7) != 0)


def _share(message_id: MessageId, count: int) -> float:
    """Return a number from 0 to below 1 for a message and a delivery."""
    key = (message_id.queue_partition << 48) + message_id.message_offset
    return (_splitmix64(_splitmix64(key) + count) >> 11) * 2.0**-53


def _splitmix64(value: int) -> int:
    value = (value + 0x9E37_79B9_7F4A_7C15) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) % 2**64
    return value ^ (value >> 31)


_MAX_DIGITS = 19


def number_of(header: bytes | None) -> int | None:
    """Return the number that a header says, at least 0; None where it says none."""
    return int(header) if header is not None and len(header) <= _MAX_DIGITS and header.isdigit() else None


def place_of(header: bytes | None) -> MessageId | None:
    """Return the place that a header says, `partition:offset`; None where it says none."""
    partition, _, offset = (header or b"").partition(b":")
    if not (partition.isdigit() and offset.isdigit()) or len(partition) > 5 or len(offset) > 15:  # noqa: PLR2004
        return None
    place = MessageId(int(partition), int(offset))
    return place if place.queue_partition <= _LAST_PARTITION and place.message_offset <= _LAST_OFFSET else None
