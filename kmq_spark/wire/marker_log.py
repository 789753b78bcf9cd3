"""
Records of one markers partition to markers at their place: what every form of the tracker does first.

Rule 1: a record that cannot be read becomes an unreadable one, never an exception.
Rule 2: a marker that only a tracker writes counts where its signature is right. Without a key, and below the marker
offset from which the queue's trackers sign, all of them count: they are of older trackers.
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
    How the trackers of a queue sign in one markers partition.

    Attributes:
        key: Empty where they do not.
        since: First marker offset from which they do.
    """

    key: bytes = field(default=b"", repr=False)
    since: int = 0


@dataclass(slots=True)
class MarkerLog:
    """
    Reader of one markers partition, for the time of one batch.

    Attributes:
        topic: Markers topic, for error texts.
        marker_partition: Markers partition.
        signing: How its trackers sign.
        markers: What was read.
        unreadable: Marker offset of each record that is no marker, and why.
    """

    topic: str
    marker_partition: int
    signing: Signing = field(default_factory=Signing)
    markers: list[LoggedMarker] = field(default_factory=list)
    unreadable: list[tuple[int, str]] = field(default_factory=list)

    def read(self, marker_offset: int, appended_at_ms: int, value: bytes | None) -> None:
        """Read a record, and add it to `markers`."""
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
