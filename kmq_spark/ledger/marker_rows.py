"""
Decode records of the markers topic into rows, in Spark's Python workers.

Rule 1: Only `wire.codec` decodes markers. A record that it rejects becomes a row with the text of the error.
Rule 2: TICKs are left out: they only move the clock and would be most of the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.errors import WireError
from kmq_spark.wire.codec import decode_marker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FIELDS = [
    ("marker_partition", "int", pa.int32()),
    ("marker_offset", "bigint", pa.int64()),
    ("appended_at_us", "bigint", pa.int64()),
    ("range_index", "int", pa.int32()),
    ("kind", "string", pa.string()),
    ("queue_partition", "int", pa.int32()),
    ("first_offset", "bigint", pa.int64()),
    ("message_count", "bigint", pa.int64()),
    ("redeliver_after_ms", "bigint", pa.int64()),
    ("due_at_ms", "bigint", pa.int64()),
    ("delivery_count", "int", pa.int32()),
    ("outcome", "string", pa.string()),
    ("reason", "string", pa.string()),
    ("release", "string", pa.string()),
    ("never_handed_out", "boolean", pa.bool_()),
    ("consumer_id", "string", pa.string()),
    ("error", "string", pa.string()),
]

DECODED_SCHEMA = ", ".join(f"{name} {kind}" for name, kind, _ in _FIELDS)
"""Columns of the result of `decode_batches`, in SQL."""

_ARROW_SCHEMA = pa.schema([(name, kind) for name, _, kind in _FIELDS])

Row = tuple[Any, ...]


def decode_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """
    Decode markers, for `mapInArrow`.

    Args:
        batches: One row per record, columns `marker_partition`, `marker_offset`, `appended_at_us`, `value`.

    Returns:
        Columns of `DECODED_SCHEMA`. Each range of each marker except TICKs is one row. Each unreadable record is one
        row with `error` set and `kind` null.
    """
    for batch in batches:
        rows: list[Row] = []
        names = ("marker_partition", "marker_offset", "appended_at_us", "value")
        for place_and_value in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
            rows.extend(_rows_of(*place_and_value))
        columns = list(zip(*rows, strict=True)) or [()] * len(_FIELDS)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, _ARROW_SCHEMA.types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=_ARROW_SCHEMA)


def _rows_of(partition: int, offset: int, appended_at_us: int, value: bytes | None) -> Iterator[Row]:
    place = (partition, offset, appended_at_us)
    try:
        marker = decode_marker(value)
    except WireError as error:
        yield (*place, 0, *[None] * (len(_FIELDS) - 5), str(error))
        return
    if marker.type is not MarkerType.TICK:
        for index, covered in enumerate(marker.ranges):
            yield (*place, index, *_values(marker, covered))


def _values(marker: Marker, covered: OffsetRange) -> Row:
    is_start, is_end = marker.type is MarkerType.START, marker.type is MarkerType.END
    return (
        marker.type.name,
        marker.queue_partition,
        covered.first,
        covered.count,
        None if is_end else marker.redeliver_after_ms,
        marker.due_at_ms or None,
        marker.delivery_count if is_start else None,
        marker.outcome.name if is_end else None,
        marker.reason or None,
        marker.release.name if marker.type is MarkerType.KEEPALIVE else None,
        None if is_end else marker.never_handed_out,
        marker.consumer_id or None,
        None,
    )
