"""
Write the rows of DataFrames to a queue, each exactly once.

Rule 1: rows go to slots by a hash of their content; a slot is one task at a time, with a transactional id and a
position of its own (`slot_writer.py`). A repeated batch must have the same rows: then it is cut in the same way.
Rule 2: what can be refused is refused before anything is written: columns, nulls, sizes, times, the query, the slots.

Source: Spark's own Kafka sink is at least once (Structured Streaming + Kafka Integration Guide).
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from pyspark.sql import functions as F  # noqa: N812  # the field's name for it
from pyspark.sql.types import ArrayType, BinaryType, MapType, NumericType, StringType, StructType
from pyspark.storagelevel import StorageLevel

from kmq_spark.core.durations import seconds
from kmq_spark.core.names import LONGEST_QUEUE, QUEUE_NAME
from kmq_spark.core.producing import slot_of
from kmq_spark.core.sinking import Batch, SlotPosition, rows_to_skip
from kmq_spark.errors import ConfigError, SinkError
from kmq_spark.kafka.settings import MAX_MESSAGE_BYTES
from kmq_spark.sink.slot_writer import Row, SinkSettings, SlotResult, write_slot
from kmq_spark.wire.headers import PREFIX, RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import timedelta
    from typing import Unpack

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

logger = logging.getLogger(__name__)

_RESULT = "slot int, written long, skipped long"
_SHOWN_BYTES = 60
_LONGEST_WAIT_S = 10 * 365 * 24 * 60 * 60


@dataclass(frozen=True, slots=True)
class SinkSummary:
    """
    What became of a batch.

    Attributes:
        rows: Rows of the batch.
        written: Rows that were written now.
        skipped: Rows that an earlier attempt has written.
    """

    rows: int
    written: int
    skipped: int


class SinkOptions(TypedDict, total=False):
    """Optional arguments that `exactly_once_sink` and `write_queue` have in common; described at the former."""

    key: str | Column | None
    headers: str | Column | None
    logical_queue: str | Column | None
    delay: str | Column | None
    ttl: str | Column | None
    slots: int
    max_message_bytes: int
    rows_per_transaction: int
    timeout: float | timedelta
    extra: Mapping[str, str] | None


def exactly_once_sink(
    queue: str,
    *,
    sink_id: str,
    value: str | Column,
    bootstrap_servers: str,
    key: str | Column | None = None,
    headers: str | Column | None = None,
    logical_queue: str | Column | None = None,
    delay: str | Column | None = None,
    ttl: str | Column | None = None,
    slots: int = 8,
    continue_from_batch: int | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    rows_per_transaction: int = 10_000,
    timeout: float | timedelta = 15.0,
    extra: Mapping[str, str] | None = None,
) -> Callable[[DataFrame, int], None]:
    """
    Return a function for `foreachBatch` that writes each row to a queue exactly once.

    Args:
        queue: Name of the queue, and of its topic.
        sink_id: Name under which this sink continues after a restart; 1 to 90 of A-Z a-z 0-9 . _ -.
        value: Column of the payload, binary or text; no nulls.
        bootstrap_servers: Comma-separated `host:port`, as executors reach it.
        key: Column of the key, binary or text.
        headers: Column of headers: a map from text to binary or text, or an array of structs `name`, `value`.
        logical_queue: Column of the logical queue, text.
        delay: Column of the delay, seconds; null for none.
        ttl: Column of the time to live, seconds, more than 0; null for none.
        slots: Number of parts that a batch is cut into, 1 to 1,000. It must stay what it was with the first batch.
        continue_from_batch: First batch of a new query (a new checkpoint) that is written; earlier ones are skipped.
        max_message_bytes: Largest message, key, value and headers together. Use the value that the queue was created
            with.
        rows_per_transaction: Most rows of a transaction, 1 to 100,000.
        timeout: Timeout of each request to the broker, seconds or a timedelta.
        extra: librdkafka settings.

    Raises:
        ConfigError: A value is not allowed.
    """
    columns = {
        "value": value, "key": key, "headers": headers, "logical_queue": logical_queue, "delay": delay, "ttl": ttl
    }  # fmt: skip
    settings = SinkSettings(
        queue,
        sink_id,
        bootstrap_servers,
        slots,
        max_message_bytes,
        rows_per_transaction,
        seconds("timeout", timeout),
        extra,
    )

    def write_batch(batch: DataFrame, number: int) -> None:
        summary = _write(batch, columns, settings, Batch(query_id_of(batch), number, slots, continue_from_batch))
        logger.info(
            "batch %d of sink %s: %d rows to %s, %d written, %d written before",
            number, sink_id, summary.rows, queue, summary.written, summary.skipped,
            extra={"action": "sink_batch", "queue": queue},
        )  # fmt: skip

    return write_batch


def write_queue(
    frame: DataFrame,
    queue: str,
    *,
    sink_id: str,
    run_id: str,
    value: str | Column,
    bootstrap_servers: str,
    **options: Unpack[SinkOptions],
) -> SinkSummary:
    """
    Write the rows of a batch job to a queue, each exactly once for this run.

    The same run again, also after a failure, writes what is missing and nothing twice, as long as no other run of this
    sink came between and the frame has the same rows.

    Args:
        frame: The rows.
        queue: Name of the queue, and of its topic.
        sink_id: Id of this job; see `exactly_once_sink`.
        run_id: Name of this run: the same for a repetition, another one for the next run.
        value: Column of the payload, binary or text; no nulls.
        bootstrap_servers: Comma-separated `host:port`, as executors reach it.
        options: Optional arguments of `exactly_once_sink`, without `continue_from_batch`.

    Raises:
        ConfigError: A value or a column is not allowed.
        SinkError: Rows that do not fit, or a sink of another kind; nothing was written.
        Exception: Spark's, where a task has failed: run it again.
    """
    rest: dict[str, Any] = dict(options)
    columns = {"value": value, **{name: rest.pop(name, None) for name in _OPTIONAL_COLUMNS}}
    if "timeout" in rest:
        rest["timeout"] = seconds("timeout", rest["timeout"])
    settings = SinkSettings(queue, sink_id, bootstrap_servers, **rest)
    if not isinstance(run_id, str) or not run_id:
        message = f"run_id is not allowed: got {run_id!r}; expected a text that is not empty; name the run"
        raise ConfigError(message)
    return _write(frame, columns, settings, Batch(f"run:{run_id}", 0, settings.slots))


_OPTIONAL_COLUMNS = ("key", "headers", "logical_queue", "delay", "ttl")


def query_id_of(batch: DataFrame) -> str:
    """
    Return the id of the streaming query that a batch belongs to, which its checkpoint keeps.

    Raises:
        SinkError: The frame is no batch of a streaming query.
    """
    found = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    if not found:
        message = "frame is no batch of a streaming query: got no query id; use write_queue for a batch job"
        raise SinkError(message)
    return str(found)


def _write(
    frame: DataFrame, columns: Mapping[str, str | Column | None], settings: SinkSettings, batch: Batch
) -> SinkSummary:
    rows = message_columns(frame, columns, settings.slots).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        _check_rows(rows, settings)
        begun = _slots_that_began(settings, batch)
        ordered = rows.repartition(settings.slots, "slot").sortWithinPartitions(*rows.columns)
        results = ordered.mapInArrow(partial(write_partitions, settings, batch), _RESULT).collect()
    finally:
        rows.unpersist()
    if missing := begun.difference(row["slot"] for row in results):
        message = (
            f"batch {batch.number} came again with other rows in sink {settings.sink_id}: slots "
            f"{', '.join(map(str, sorted(missing)))} have committed rows of it, and got none now; make the query "
            "deterministic, or write its rows to a table first and send them from there"
        )
        raise SinkError(message)
    written, skipped = (sum(row[name] for row in results) for name in ("written", "skipped"))
    return SinkSummary(written + skipped, written, skipped)


def message_columns(frame: DataFrame, columns: Mapping[str, str | Column | None], slots: int) -> DataFrame:
    """
    Return the messages of a frame.

    Returns:
        One row a row, columns `slot: int`, `value: binary`, `key: binary`, `headers: array<struct<name, value>>`,
        `logical_queue: string`, `delay: double`, `ttl: double`.

    Raises:
        ConfigError: A column does not exist or has the wrong type.
    """
    chosen = frame.select(*(_chosen(frame, name, column).alias(name) for name, column in columns.items()))
    types = {each.name: each.dataType for each in chosen.schema.fields}
    text = [
        _text_or_binary("value", types["value"], F.col("value")).alias("value"),
        _text_or_binary("key", types["key"], F.col("key")).alias("key"),
        _headers(types["headers"]).alias("headers"),
        F.col("logical_queue").cast("string").alias("logical_queue"),
        _number("delay", types["delay"]).alias("delay"),
        _number("ttl", types["ttl"]).alias("ttl"),
    ]
    messages = chosen.select(*text)
    slot = F.pmod(F.xxhash64(*messages.columns), F.lit(slots)).cast("int")
    return messages.select(slot.alias("slot"), *messages.columns)


def _chosen(frame: DataFrame, name: str, column: str | Column | None) -> Column:
    if column is None:
        kinds = {"headers": "array<struct<name:string,value:binary>>", "logical_queue": "string", "delay": "double"}
        return F.lit(None).cast(kinds.get(name, "double" if name == "ttl" else "binary"))
    if isinstance(column, str):
        if column not in frame.columns:
            message = f"frame has no column {column!r} for {name}: got {', '.join(frame.columns)}; name one of these"
            raise ConfigError(message)
        return F.col(f"`{column}`")
    return column


def _text_or_binary(name: str, kind: object, column: Column) -> Column:
    if not isinstance(kind, (BinaryType, StringType)):
        message = (
            f"column of {name} has the wrong type: got {kind}, binary or string; use to_json(struct(…)) for several "
            "columns, or cast it"
        )
        raise ConfigError(message)
    return column.cast("binary")


def _headers(kind: object) -> Column:
    if isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
        entries = F.transform(
            F.map_entries("headers"),
            lambda each: F.struct(each["key"].alias("name"), each["value"].cast("binary").alias("value")),
        )
        # A map has no order, and rows are compared.
        return F.array_sort(entries)
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, StructType):
        names = kind.elementType.fieldNames()
        if names == ["name", "value"]:
            return F.transform(
                "headers",
                lambda each: F.struct(
                    each["name"].cast("string").alias("name"), each["value"].cast("binary").alias("value")
                ),
            )
    message = (
        f"column of headers has the wrong type: got {kind}, a map from string to binary or string, or an array of "
        "structs name, value; convert it"
    )
    raise ConfigError(message)


def _number(name: str, kind: object) -> Column:
    if not isinstance(kind, NumericType):
        message = f"column of {name} has the wrong type: got {kind}, a number of seconds; convert it"
        raise ConfigError(message)
    return F.col(name).cast("double")


def _check_rows(rows: DataFrame, settings: SinkSettings) -> None:
    """Refuse a batch that has a row which cannot be sent, before anything of it is written."""
    header_bytes = F.aggregate(
        F.coalesce(F.col("headers"), F.array()),
        F.lit(0),
        lambda total, each: total + F.octet_length(each["name"]) + F.coalesce(F.octet_length(each["value"]), F.lit(0)),
    )
    size = (
        F.octet_length("value") + F.coalesce(F.octet_length("key"), F.lit(0)) + header_bytes + F.lit(RECORD_BYTES)
    ).alias("size")
    name = F.regexp_like(F.col("logical_queue"), F.lit(f"^{QUEUE_NAME}$"))
    reserved = F.exists(F.col("headers"), lambda each: each["name"].isNull() | each["name"].startswith(PREFIX))
    limit_s = F.lit(float(_LONGEST_WAIT_S))
    problems = {
        "value is null": F.col("value").isNull(),
        f"larger than max_message_bytes {settings.max_message_bytes}": size > settings.max_message_bytes,
        f"logical queue is not 1 to {LONGEST_QUEUE} of A-Z a-z 0-9 . _ -": ~name,
        f"header name is null or begins with {PREFIX}": reserved,
        "delay is not 0 to 10 years": ~F.col("delay").between(F.lit(0.0), limit_s),
        "ttl is not more than 0 and at most 10 years": ~((F.col("ttl") > 0) & (F.col("ttl") <= limit_s)),
    }
    found = rows.agg(
        *(F.count(F.when(problem, 1)).alias(str(number)) for number, problem in enumerate(problems.values()))
    ).first()
    for number, (what, problem) in enumerate(problems.items()):
        if found is not None and found[str(number)]:
            begin = F.substring("value", 1, _SHOWN_BYTES).alias("value")
            row: Any = rows.filter(problem).select(size, begin, "key").first()
            message = (
                f"{found[str(number)]} row(s) cannot be sent to {settings.queue}: {what}: got one of {row['size']} "
                f"bytes, key {_shown(row['key'])}, value {_shown(row['value'])}; correct or filter these rows, nothing "
                "of the batch is written"
            )
            raise SinkError(message)


def _shown(value: bytearray | None) -> str:
    return repr(None if value is None else bytes(value[:_SHOWN_BYTES]))


def _slots_that_began(settings: SinkSettings, batch: Batch) -> set[int]:
    """Return the slots that have committed rows of this batch. Refuse on the driver what every task would refuse."""
    log = settings.log()
    log.ensure()
    begun = set()
    for found in log.all():
        sink_id, slot = slot_of(found.key) or ("", 0)
        if sink_id != settings.sink_id:
            continue
        if found.state is None:
            message = f"position of {found.key} cannot be read: {found.problem}"
            raise SinkError(message)
        if found.state.position is not None:
            where = f"slot {slot} of sink {settings.sink_id}"
            if rows_to_skip(SlotPosition.parse(found.state.position, where), batch, where) > 0:
                begun.add(slot)
    return begun


def write_partitions(
    settings: SinkSettings, batch: Batch, frames: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the slots of one partition, slot by slot, on an executor; yield a row for each slot."""
    import pyarrow as pa  # noqa: PLC0415  # on the executor

    results: list[SlotResult] = []
    for slot, rows in itertools.groupby(_rows(frames), key=lambda pair: pair[0]):
        results.append(write_slot(settings, batch, slot, (row for _, row in rows)))
    columns = list(zip(*results, strict=True)) or [()] * 3
    kinds = (pa.int32(), pa.int64(), pa.int64())
    yield pa.RecordBatch.from_arrays(
        [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)],
        names=list(SlotResult._fields),
    )


def _rows(frames: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Row]]:
    for frame in frames:
        columns = [frame.column(number).to_pylist() for number in range(frame.num_columns)]
        for slot, value, key, headers, logical_queue, delay, ttl in zip(*columns, strict=True):
            pairs = None if headers is None else [(each["name"], each["value"]) for each in headers]
            yield slot, Row(value, key, pairs, logical_queue, delay, ttl)
