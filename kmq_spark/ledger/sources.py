"""
The input of a ledger: the topics of a queue as streams of rows, one row per record or range.

Rule 1: The content of the topics is untrusted. Unreadable headers become null, unreadable markers become rows with an
error.
Rule 2: Message values stay in Kafka. The ledger stores only their size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812  # the field's name for it

from kmq_spark.core.markers import MAX_MESSAGE_OFFSET, MAX_QUEUE_PARTITION, Marker, MarkerType, OffsetRange
from kmq_spark.errors import WireError
from kmq_spark.ledger.schema import COLUMNS, DEAD_LETTERS, MARKERS, MESSAGES
from kmq_spark.wire import headers as H  # noqa: N812  # a namespace of names
from kmq_spark.wire.codec import decode_marker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark.sql import Column, DataFrame


_FIELDS = (
    *("marker_partition", "marker_offset", "appended_at_us", "range_index", "kind", "event", "queue_partition"),
    *("first_offset", "message_count", "redeliver_after_ms", "due_at_ms", "delivery_count", "outcome", "reason"),
    *("release", "never_handed_out", "consumer_id", "error"),
)
_KINDS = {**COLUMNS[MARKERS], "appended_at_us": "bigint", "due_at_ms": "bigint"}
_ARROW_KINDS = {"int": pa.int32(), "bigint": pa.int64(), "string": pa.string(), "boolean": pa.bool_()}
_ARROW_SCHEMA = pa.schema([(name, _ARROW_KINDS[_KINDS[name]]) for name in _FIELDS])

DECODED_SCHEMA = ", ".join(f"{name} {_KINDS[name]}" for name in _FIELDS)
"""Columns of the result of `decode_batches`, in SQL."""

Row = tuple[Any, ...]


def decode_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Decode markers, for `mapInArrow`."""
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
        marker.event,
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


def marker_rows(records: DataFrame, queue: str, subscription: str) -> DataFrame:
    """
    Convert records of a markers topic to rows of `markers`.

    Each range of a marker is a row, a TICK is none, an unreadable record is one row with `error` set.
    """
    raw = records.select(
        F.col("partition").alias("marker_partition"),
        F.col("offset").alias("marker_offset"),
        F.unix_micros("timestamp").alias("appended_at_us"),
        F.col("value"),
    )
    decoded = raw.mapInArrow(decode_batches, DECODED_SCHEMA)
    values = {
        "queue": F.lit(queue),
        "subscription": F.lit(subscription),
        "appended_at": F.timestamp_micros("appended_at_us"),
        "due_at": F.timestamp_millis("due_at_ms"),
    }
    values["marker_date"] = F.to_date(values["appended_at"])
    return _shaped(decoded, MARKERS, values)


def message_rows(records: DataFrame, queue: str) -> DataFrame:
    """Convert records of a queue topic to rows of `messages`: metadata, never the value."""
    origin, previous = _place(H.ORIGIN), _place(H.PREVIOUS)
    is_copy = origin.isNotNull()
    values = {
        "queue": F.lit(queue),
        "sent_date": F.to_date("timestamp"),
        "queue_partition": F.col("partition"),
        "message_offset": F.col("offset"),
        "sent_at": F.col("timestamp"),
        "origin_partition": F.coalesce(origin["place_partition"], F.col("partition")),
        "origin_offset": F.coalesce(origin["place_offset"], F.col("offset")),
        "previous_partition": previous["place_partition"],
        "previous_offset": previous["place_offset"],
        "first_sent_at": F.coalesce(_instant(H.FIRST_SENT_MS), F.col("timestamp")),
        "is_first_copy": ~is_copy,
        "delivery_count": _number(H.DELIVERY_COUNT).cast("int"),
        "silent_count": _number(H.SILENT_COUNT).cast("int"),
        "logical_queue": _text(H.LOGICAL_QUEUE),
        "for_subscription": _text(H.SUBSCRIPTION),
        "delay_ms": _number(H.DELAY_MS),
        "not_before": _instant(H.NOT_BEFORE_MS),
        "ttl_ms": _number(H.TTL_MS),
        "expires_at": _instant(H.EXPIRES_AT_MS),
        "value_bytes": F.length("value").cast("long"),
        "header_count": F.coalesce(F.size("headers"), F.lit(0)),
        "producer_id": _text(H.PRODUCER),
        "producer_generation": _number(H.GENERATION),
        "producer_sequence": _number(H.SEQUENCE),
    }
    return _shaped(records, MESSAGES, values)


def dead_letter_rows(records: DataFrame, queue: str, subscription: str) -> DataFrame:
    """Convert records of a dead-letter topic to rows of `dead_letters`."""
    origin, previous = _place(H.ORIGIN), _place(H.PREVIOUS)
    numbers = F.filter(
        F.transform(F.split(_text(H.ATTEMPTS_MS), ","), lambda text: text.try_cast("bigint")), lambda at: at.isNotNull()
    )
    values = {
        "queue": F.lit(queue),
        "subscription": F.lit(subscription),
        "dead_date": F.to_date("timestamp"),
        "dead_letter_partition": F.col("partition"),
        "dead_letter_offset": F.col("offset"),
        "dead_at": F.col("timestamp"),
        "source_partition": F.coalesce(previous["place_partition"], _number(H.DLQ_PARTITION).cast("int")),
        "source_offset": F.coalesce(previous["place_offset"], _number(H.DLQ_OFFSET)),
        "origin_partition": origin["place_partition"],
        "origin_offset": origin["place_offset"],
        "reason": _text(H.DLQ_MESSAGE),
        "delivery_count": F.coalesce(_number(H.DELIVERY_COUNT), _number(H.DLQ_DELIVERY_COUNT)).cast("int"),
        "first_sent_at": _instant(H.FIRST_SENT_MS),
        "attempts_at": F.transform(numbers, F.timestamp_millis),
        "logical_queue": _text(H.LOGICAL_QUEUE),
        "value_bytes": F.length("value").cast("long"),
    }
    return _shaped(records, DEAD_LETTERS, values)


def _shaped(records: DataFrame, table: str, values: Mapping[str, Column]) -> DataFrame:
    """Return the columns of a table in order: from *values* if it has the column, otherwise from *records*."""
    return records.select(
        *(values.get(name, F.col(name)).cast(kind).alias(name) for name, kind in COLUMNS[table].items())
    )


_MAX_INSTANT_MS = 253_402_300_799_999
"""End of the year 9999, the last instant of Spark's timestamps."""


def _text(name: str) -> Column:
    """Return the last header with a name as text; null if there is none. Bytes that are not UTF-8 become U+FFFD."""
    matching = F.filter("headers", lambda header: header["key"] == name)
    return F.make_valid_utf8(F.try_element_at(matching, F.lit(-1))["value"].cast("string"))


def _number(name: str) -> Column:
    """Return a header as a number of at least 0; null if it is not one."""
    text = _text(name)
    return F.when(text.rlike("^[0-9]{1,18}$"), text.try_cast("bigint"))


def _instant(name: str) -> Column:
    number = _number(name)
    return F.when(number <= _MAX_INSTANT_MS, F.timestamp_millis(number))


def _place(name: str) -> Column:
    """Return a `partition:offset` header as a struct; null if it is not one."""
    text = _text(name)
    partition = F.split_part(text, F.lit(":"), F.lit(1)).try_cast("int")
    offset = F.split_part(text, F.lit(":"), F.lit(2)).try_cast("bigint")
    is_place = (
        text.rlike("^[0-9]{1,5}:[0-9]{1,15}$") & (partition <= MAX_QUEUE_PARTITION) & (offset <= MAX_MESSAGE_OFFSET)
    )
    return F.when(is_place, F.struct(partition.alias("place_partition"), offset.alias("place_offset")))
