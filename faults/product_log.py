"""The markers log as the product reads it: for what is compared with the product's own fold, and for no verdict."""

from __future__ import annotations

from collections import defaultdict

from faults.topics import read_topic, topics_of
from kmq_spark.core.events import LoggedMarker
from kmq_spark.errors import WireError
from kmq_spark.wire.codec import decode_marker


def read_marker_logs(queue: str, bootstrap_servers: str) -> dict[int, list[LoggedMarker]]:
    """Return the markers of a queue by markers partition, in log order; None as the marker of an unreadable record."""
    markers_topic, _, _ = topics_of(queue)
    logs: defaultdict[int, list[LoggedMarker]] = defaultdict(list)
    for record in read_topic(markers_topic, bootstrap_servers):
        try:
            marker = decode_marker(record.value)
        except WireError:
            marker = None
        logs[record.partition].append(LoggedMarker(record.offset, record.timestamp_ms, marker))
    return dict(logs)
