"""
Decode the records of one markers partition to markers with their offsets: the first step of every tracker form.

Rule 1: a record that cannot be decoded is reported as unreadable, never raised as an exception.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kmq_spark.core.events import LoggedMarker
from kmq_spark.errors import WireError
from kmq_spark.wire.codec import decode_marker


@dataclass(slots=True)
class MarkerLog:
    """
    The decoder of one markers partition, for one batch.

    Attributes:
        topic: Markers topic, for error texts.
        marker_partition: Number of the markers partition.
        markers: All records read so far; an unreadable one has no marker.
        unreadable: Marker offset and error text of each record that is not a marker.
    """

    topic: str
    marker_partition: int
    markers: list[LoggedMarker] = field(default_factory=list)
    unreadable: list[tuple[int, str]] = field(default_factory=list)

    def read(self, marker_offset: int, appended_at_ms: int, value: bytes | None) -> None:
        """Decode a record and add it to `markers`."""
        marker = None
        try:
            marker = decode_marker(value, topic=self.topic, partition=self.marker_partition, offset=marker_offset)
        except WireError as error:
            self.unreadable.append((marker_offset, str(error)))
        self.markers.append(LoggedMarker(marker_offset, appended_at_ms, marker))
