"""
Encode and decode marker records.

Rule 1: bytes from the log are untrusted. Decoding any bytes returns a marker within bounds or raises a `WireError`.
Rule 2: encoding and decoding check the same bounds, so every encoded marker can be decoded.
Rule 3: fields that do not belong to a marker's type are neither written nor read.

Source: kafka-mq-go `queue/internal/markerproducer.go` and `queue/proto/kafka_mq_v1.proto`. Its START contains key and
value of the message; they are accepted and ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.markers import (
    MAX_DELIVERY_COUNT,
    MAX_DUE_AT_MS,
    MAX_MESSAGE_OFFSET,
    MAX_MESSAGES_PER_MARKER,
    MAX_QUEUE_PARTITION,
    MAX_REDELIVER_AFTER_MS,
    MAX_TERM,
    MAX_TEXT_CHARS,
    Marker,
    MarkerType,
    OffsetRange,
    Outcome,
    Release,
)
from kmq_spark.core.policy import QueueRules
from kmq_spark.errors import MalformedRecordError, UnsupportedVersionError, WireError
from kmq_spark.wire import marker_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = 0
"""The version that this build writes, and the highest one that it reads: V1 of kafka-mq-go, which is 0 on the wire."""

_TYPES = {int(marker_type): marker_type for marker_type in MarkerType}
_OUTCOMES = {int(outcome): outcome for outcome in Outcome}
_WITHOUT_MESSAGES = frozenset({MarkerType.TICK, MarkerType.RULES, MarkerType.TERM})
_BACKOFFS = {int(kind): kind for kind in BackoffKind}
_RELEASES = {int(release): release for release in Release}
_MALFORMED = "find its writer: only kmq-spark and kafka-mq-go may write to a markers topic"


def encode_marker(marker: Marker) -> bytes:
    """
    Encode a marker.

    Source: docs/internals/protocol.md, marker record.
    """
    message = marker_pb2.Marker(consumer_id=_sent_text(marker.consumer_id))
    message.type = int(marker.type)  # type: ignore[assignment]  # an enum's number is what the runtime wants
    if marker.type in _WITHOUT_MESSAGES:
        message.message_id.partition = -1
        message.message_id.offset = -1
        if marker.type is MarkerType.RULES:
            _put_rules(message, marker.rules)
        else:
            message.term = _checked_term(marker.type, marker.term, "cannot write marker: {}; please report this bug")
        return _bytes_of(message)
    fault = _fault_of(marker.queue_partition, marker.ranges, marker.redeliver_after_ms, marker.due_at_ms)
    if fault:
        raise MalformedRecordError(f"cannot write marker: {fault}; this is a bug of the writer, please report it")
    message.message_id.partition = marker.queue_partition
    message.message_id.offset = marker.ranges[0].first
    if len(marker.ranges) > 1 or marker.ranges[0].count > 1:
        for first, count in marker.ranges:
            message.ranges.add(first=first, count=count)
    if marker.type is MarkerType.END:
        message.outcome = int(marker.outcome)  # type: ignore[assignment]  # as above
        message.reason = _sent_text(marker.reason)
        message.term = marker.term
    else:
        message.redeliver_after_ms = marker.redeliver_after_ms
    if marker.type is MarkerType.START:
        # 0 is read as 1, so a first delivery takes no bytes.
        message.delivery_count = 0 if marker.delivery_count <= 1 else min(marker.delivery_count, MAX_DELIVERY_COUNT)
        message.due_at_ms = marker.due_at_ms
    if marker.type is MarkerType.KEEPALIVE:
        message.release = int(marker.release)  # type: ignore[assignment]  # as above
        message.reason = _sent_text(marker.reason) if marker.release is Release.FAILED else ""
    if marker.type is not MarkerType.END:
        message.never_handed_out = marker.never_handed_out
    return _bytes_of(message)


def decode_marker(value: bytes | None, *, topic: str = "", partition: int = -1, offset: int = -1) -> Marker:
    """
    Decode the value of a record of the markers topic.

    Source: docs/internals/protocol.md, marker record.
    """
    try:
        return _marker_of(_message_of(value))
    except WireError as error:
        place = f" at {topic}[{partition}]@{offset}" if topic else ""
        message = f"cannot read marker{place}: {error}"
        raise type(error)(message, topic=topic, partition=partition, offset=offset) from error


def _message_of(value: bytes | None) -> marker_pb2.Marker:
    if not value:
        what = "the record has no value" if value is None else "the record is empty"
        raise MalformedRecordError(f"{what}; {_MALFORMED}")
    try:
        message: marker_pb2.Marker = marker_pb2.Marker.FromString(value)
    except DecodeError as error:
        raise MalformedRecordError(f"got {len(value)} bytes that are no Marker message; {_MALFORMED}") from error
    return message


def _bytes_of(message: marker_pb2.Marker) -> bytes:
    value: bytes = message.SerializeToString()
    return value


def _marker_of(message: marker_pb2.Marker) -> Marker:
    marker_type = _TYPES.get(message.type)
    if message.version != VERSION:
        raise _unsupported("version", message.version, VERSION)
    if marker_type is None:
        raise _unsupported("type", message.type, max(MarkerType))
    if marker_type in _WITHOUT_MESSAGES:
        return _without_messages(message, marker_type)
    if not message.HasField("message_id"):
        raise MalformedRecordError(f"a {marker_type.name} without message id; {_MALFORMED}")
    queue_partition, ranges = message.message_id.partition, _ranges_of(message)
    is_start = marker_type is MarkerType.START
    redeliver_after_ms = message.redeliver_after_ms if marker_type is not MarkerType.END else 0
    due_at_ms = message.due_at_ms if is_start else 0
    fault = _fault_of(queue_partition, ranges, redeliver_after_ms, due_at_ms)
    if fault:
        raise MalformedRecordError(f"{fault}; {_MALFORMED}")
    consumer_id = message.consumer_id[:MAX_TEXT_CHARS]
    if marker_type is MarkerType.END:
        outcome = _OUTCOMES.get(message.outcome)
        if outcome is None:
            raise _unsupported("outcome", message.outcome, max(Outcome))
        reason = message.reason[:MAX_TEXT_CHARS]
        return Marker(
            marker_type, queue_partition, ranges, outcome=outcome, reason=reason, consumer_id=consumer_id,
            term=_checked_term(marker_type, message.term),
        )  # fmt: skip
    release = _RELEASES.get(message.release)
    if release is None:
        raise _unsupported("release", message.release, max(Release))
    return Marker(
        marker_type,
        queue_partition,
        ranges,
        redeliver_after_ms,
        reason="" if is_start or release is not Release.FAILED else message.reason[:MAX_TEXT_CHARS],
        delivery_count=min(message.delivery_count or 1, MAX_DELIVERY_COUNT) if is_start else 1,
        consumer_id=consumer_id,
        never_handed_out=message.never_handed_out,
        release=Release.RENEWED if is_start else release,
        due_at_ms=due_at_ms,
    )


def _without_messages(message: marker_pb2.Marker, marker_type: MarkerType) -> Marker:
    """Decode a TICK, RULES or TERM marker."""
    got = (message.message_id.partition, message.message_id.offset)
    if message.ranges or (message.HasField("message_id") and got != (-1, -1)):
        raise MalformedRecordError(
            f"a {marker_type.name} that covers messages: got message id {got!r}, allowed (-1, -1); {_MALFORMED}"
        )
    consumer_id = message.consumer_id[:MAX_TEXT_CHARS]
    if marker_type is MarkerType.RULES:
        return Marker(marker_type, consumer_id=consumer_id, rules=_rules_of(message))
    return Marker(marker_type, consumer_id=consumer_id, term=_checked_term(marker_type, message.term))


def _checked_term(marker_type: MarkerType, term: int, text: str = f"{{}}; {_MALFORMED}") -> int:
    least = 1 if marker_type is MarkerType.TERM else 0
    if not least <= term <= MAX_TERM:
        fault = f"term of a {marker_type.name} out of bounds: got {term!r}, allowed {least} to {MAX_TERM}"
        raise MalformedRecordError(text.format(fault))
    return term


def _put_rules(message: marker_pb2.Marker, rules: QueueRules | None) -> None:
    fault = "RULES without rules" if rules is None else rules.fault()
    if rules is None or fault:
        raise MalformedRecordError(f"cannot write marker: {fault}; this is a bug of the writer, please report it")
    written, backoff = message.rules, rules.backoff
    written.version, written.max_deliveries = rules.version, rules.max_deliveries
    written.backoff = int(backoff.kind)  # type: ignore[assignment]  # an enum's number is what the runtime wants
    written.backoff_initial_ms, written.backoff_max_ms = backoff.initial_ms, backoff.max_ms
    written.backoff_jitter, written.dead_letters_expired = backoff.jitter, rules.dead_letters_expired


def _rules_of(message: marker_pb2.Marker) -> QueueRules:
    read = message.rules
    kind = _BACKOFFS.get(read.backoff)
    if kind is None:
        raise _unsupported("backoff", read.backoff, max(BackoffKind))
    backoff = Backoff(kind, read.backoff_initial_ms, read.backoff_max_ms, read.backoff_jitter)
    rules = QueueRules(read.version, read.max_deliveries, backoff, read.dead_letters_expired)
    if fault := rules.fault():
        raise MalformedRecordError(f"{fault}; {_MALFORMED}")
    return rules


def _ranges_of(message: marker_pb2.Marker) -> tuple[OffsetRange, ...]:
    first = message.message_id.offset
    if not message.ranges:
        return (OffsetRange(first, 1),)
    ranges = tuple([OffsetRange(part.first, part.count) for part in message.ranges])
    if ranges[0].first != first:
        raise MalformedRecordError(f"ranges begin at {ranges[0].first!r}, message id at {first!r}; {_MALFORMED}")
    return ranges


def _fault_of(queue_partition: int, ranges: Sequence[OffsetRange], redeliver_after_ms: int, due_at_ms: int) -> str:
    """Return a text that names the first value out of bounds; empty if all values are within bounds."""
    if not 0 <= queue_partition <= MAX_QUEUE_PARTITION:
        return f"queue partition out of bounds: got {queue_partition!r}, allowed 0 to {MAX_QUEUE_PARTITION}"
    if not 0 <= redeliver_after_ms <= MAX_REDELIVER_AFTER_MS:
        return f"lease out of bounds: got {redeliver_after_ms!r} ms, allowed 0 to {MAX_REDELIVER_AFTER_MS}"
    if not 0 <= due_at_ms <= MAX_DUE_AT_MS:
        return f"instant out of bounds: got {due_at_ms!r} ms, allowed 0 to {MAX_DUE_AT_MS}"
    return _fault_of_ranges(ranges)


def _fault_of_ranges(ranges: Sequence[OffsetRange]) -> str:
    if not ranges:
        return "no messages covered: got no ranges, at least 1 needed"
    end, total = 0, 0
    for first, count in ranges:
        if count < 1:
            return f"empty range: got count {count!r} at {first!r}, minimum 1"
        if first < end:
            return f"message offsets not ascending: got {first!r} after {end - 1!r}"
        end, total = first + count, total + count
        if end > MAX_MESSAGE_OFFSET + 1:
            return f"message offset out of bounds: got {end - 1!r}, maximum {MAX_MESSAGE_OFFSET}"
    if total > MAX_MESSAGES_PER_MARKER:
        return f"too many messages: got {total!r}, maximum {MAX_MESSAGES_PER_MARKER}"
    return ""


def _unsupported(what: str, got: int, known: int) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        f"{what} {int(got)}, this build reads up to {int(known)}; upgrade the tracker before the workers"
    )


def _sent_text(text: str) -> str:
    """Truncate a text and replace lone surrogates (from undecodable file names), which UTF-8 cannot encode."""
    return text[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode("utf-8")
