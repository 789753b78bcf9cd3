"""Markers of other versions: with the fields of the first one alone, and with fields that no version of ours has."""

from __future__ import annotations

from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.wire.codec import encode_marker

MORE_FIELDS = b"\x98\x06\x01\xa2\x06\x03new"
"""Field 99, a number, and field 100, three bytes: no version of ours has them."""


def older_marker(kind: MarkerType, partition: int, offset: int, lease_ms: int = 0) -> bytes:
    """Return a START or an END with the fields of the first version alone: no count, no range, no writer."""
    place = b"\x08" + _varint(partition) + b"\x10" + _varint(offset)
    fields = b"\x10" + _varint(kind.value) + b"\x1a" + _varint(len(place)) + place
    return fields + (b"\x20" + _varint(lease_ms) if lease_ms else b"")


def newer_marker(kind: MarkerType, partition: int, offset: int, lease_ms: int = 0) -> bytes:
    """Return a START or an END with fields that no version of ours knows."""
    marker = Marker(kind, partition, (OffsetRange(offset, 1),), redeliver_after_ms=lease_ms, consumer_id="newer")
    return encode_marker(marker) + MORE_FIELDS


def _varint(value: int) -> bytes:
    """Return a number as protobuf writes it."""
    found = bytearray()
    while value > 0x7F:  # noqa: PLR2004  # seven bits a byte
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
