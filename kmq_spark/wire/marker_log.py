"""
Decode the records of one markers partition to markers with their offsets: the first step of every tracker form.

Rule 1: a record that cannot be decoded is reported as unreadable, never raised as an exception.
Rule 2: a marker that only a tracker may write counts only with a valid signature. Without a key, and below the marker
offset from which the queue's trackers sign, all of them count, because older trackers wrote them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kmq_spark.core.events import LoggedMarker
from kmq_spark.errors import WireError
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.signature import is_signed, needs_signature


@dataclass(frozen=True, slots=True)
class Signing:
    """
    How the trackers of a queue sign markers in one markers partition.

    Attributes:
        key: Signing key; empty if the trackers do not sign.
        since: First marker offset from which on they sign.
    """

    key: bytes = field(default=b"", repr=False)
    since: int = 0


@dataclass(slots=True)
class MarkerLog:
    """
    The decoder of one markers partition, for one batch.

    Attributes:
        topic: Markers topic, for error texts.
        marker_partition: Number of the markers partition.
        signing: How its trackers sign markers.
        markers: All records read so far; an unreadable one has no marker.
        unreadable: Marker offset and error text of each record that is not a marker.
    """

    topic: str
    marker_partition: int
    signing: Signing = field(default_factory=Signing)
    markers: list[LoggedMarker] = field(default_factory=list)
    unreadable: list[tuple[int, str]] = field(default_factory=list)

    def read(self, marker_offset: int, appended_at_ms: int, value: bytes | None) -> None:
        """Decode a record and add it to `markers`."""
        marker = None
        try:
            marker = decode_marker(value, topic=self.topic, partition=self.marker_partition, offset=marker_offset)
        except WireError as error:
            self.unreadable.append((marker_offset, str(error)))
        else:
            signing = self.signing
            if signing.key and marker_offset >= signing.since and needs_signature(marker):
                is_trusted = is_signed(value or b"", self.marker_partition, signing.key)
                marker = marker if is_trusted else replace(marker, is_trusted=False)
        self.markers.append(LoggedMarker(marker_offset, appended_at_ms, marker))
