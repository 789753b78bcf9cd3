"""
Decode the records of one markers partition to markers with their offsets: the first step of every tracker form.

Rule 1: a record that cannot be decoded is reported as unreadable, never raised as an exception.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kmq_spark.core.events import LoggedMarker
from kmq_spark.errors import WireError
from kmq_spark.wire.codec import decode_marker

UNREADABLE_KEPT = 3
"""Records of a batch that are not markers and whose text is kept; the others are only counted."""

UNREADABLE_BYTES = 16
"""Bytes of such a record that its text shows."""


@dataclass(slots=True)
class MarkerLog:
    """
    The decoder of one markers partition, for one batch.

    Attributes:
        markers: All records read so far; an unreadable one has no marker.
        unreadable: What the first records say that are not markers: place, reason, first bytes.
    """

    topic: str
    marker_partition: int
    markers: list[LoggedMarker] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def read(self, marker_offset: int, appended_at_ms: int, value: bytes | None) -> None:
        """Decode a record and add it to `markers`."""
        marker = None
        try:
            marker = decode_marker(value, topic=self.topic, partition=self.marker_partition, offset=marker_offset)
        except WireError as error:
            if len(self.unreadable) < UNREADABLE_KEPT:
                self.unreadable.append(f"{error}; it begins with {(value or b'')[:UNREADABLE_BYTES].hex()!r}")
        self.markers.append(LoggedMarker(marker_offset, appended_at_ms, marker))
