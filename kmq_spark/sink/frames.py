"""
Write the rows of DataFrames to a queue, each exactly once.

Rule 1: rows go to slots by a hash of their content; a slot is one task at a time, with a transactional id and a
position of its own (`slot_writer.py`). A repeated batch must have the same rows: then it is cut in the same way.
Rule 2: what can be refused is refused before anything is written: columns, nulls, sizes, times, the query, the slots.
Rule 3: no order is promised between rows: a DataFrame has none.

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

from kmq_spark.core.names import LONGEST_QUEUE, QUEUE_NAME
from kmq_spark.core.producing import slot_of
from kmq_spark.core.sinking import Batch, SlotPosition, rows_to_skip
from kmq_spark.errors import ConfigError, SinkError, TopicError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import BULK_TRANSACTION_TIMEOUT_MS, MAX_MESSAGE_BYTES
from kmq_spark.kafka.topics import partition_count
from kmq_spark.producer.position_log import PositionLog
from kmq_spark.sink.settings import (
    BYTES_PER_TRANSACTION,
    DEAD_LETTER,
    DELIVERY_TIMEOUT_MS,
    FAIL,
    ROWS_PER_TRANSACTION,
    SLOTS,
    TIMEOUT,
    SinkSettings,
)
from kmq_spark.sink.slot_writer import Row, SinkPlan, SlotResult, write_slot
from kmq_spark.wire.headers import PREFIX, RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Unpack

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

logger = logging.getLogger(__name__)

_RESULT = "slot int, written long, skipped long, transactions long, dead_lettered long"
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
        transactions: Transactions committed now.
        dead_lettered: Rows among the written that were too large, and became dead letters.
    """

    rows: int
    written: int
    skipped: int
    transactions: int
    dead_lettered: int = 0


class SinkOptions(TypedDict, total=False):
    """Optional arguments that `exactly_once_sink` and `write_queue` have in common; described at the former."""

    key: str | Column | None
    headers: str | Column | None
    queue: str | Column | None
    delay: str | Column | None
    ttl: str | Column | None
    slots: int
    max_message_bytes: int
    rows_per_transaction: int
    bytes_per_transaction: int
    transaction_timeout_ms: int
    delivery_timeout_ms: int
    timeout: float
    extra: Mapping[str, str] | None
    oversize: str


def exactly_once_sink(
    topic: str,
    *,
    sink_id: str,
    value: str | Column,
    bootstrap_servers: str,
    key: str | Column | None = None,
    headers: str | Column | None = None,
    queue: str | Column | None = None,
    delay: str | Column | None = None,
    ttl: str | Column | None = None,
    slots: int = SLOTS,
    continue_from_batch: int | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    rows_per_transaction: int = ROWS_PER_TRANSACTION,
    bytes_per_transaction: int = BYTES_PER_TRANSACTION,
    transaction_timeout_ms: int = BULK_TRANSACTION_TIMEOUT_MS,
    delivery_timeout_ms: int = DELIVERY_TIMEOUT_MS,
    timeout: float = TIMEOUT,
    extra: Mapping[str, str] | None = None,
    oversize: str = FAIL,
    on_batch: Callable[[int], None] = lambda _written: None,
) -> Callable[[DataFrame, int], None]:
    """
    Return a function for `foreachBatch` that writes each row to a queue exactly once.

    Args:
        topic: Name of the queue, and of its topic.
        sink_id: Name under which this sink continues after a restart; 1 to 90 of A-Z a-z 0-9 . _ -.
        value: Column of the payload, binary or text; no nulls.
        bootstrap_servers: Comma-separated `host:port`, as executors reach it.
        key: Column of the key, binary or text.
        headers: Column of headers: a map from text to binary or text, or an array of structs `name`, `value`.
        queue: Column of the logical queue, text.
        delay: Column of the delay, seconds; null for none.
        ttl: Column of the time to live, seconds, more than 0; null for none.
        slots: Into how many parts a batch is cut, 1 to 1,000; it stays what it was with the first batch.
        continue_from_batch: First batch of a new query (a new checkpoint) that is written; batches before are skipped.
        max_message_bytes: Largest message, key, value and headers together; as the queue was made with.
        rows_per_transaction: Most rows of a transaction.
        bytes_per_transaction: Bytes after which a transaction ends.
        transaction_timeout_ms: When the broker aborts the transaction of an executor that died within it.
        delivery_timeout_ms: How long a transaction is tried again while the broker is away.
        timeout: Bound on each call to the broker.
        extra: librdkafka settings.
        oversize: What becomes of a row that is larger than *max_message_bytes*: `fail`, the batch fails before anything
            of it is written; `dead-letter`, its beginning goes to the dead-letter topic, with size and hash.
        on_batch: Called behind each batch with the number of rows that were written now.

    Raises:
        ConfigError: A value is not allowed.
    """
    columns = {"value": value, "key": key, "headers": headers, "queue": queue, "delay": delay, "ttl": ttl}
    settings = SinkSettings(
        queue=topic,
        sink_id=sink_id,
        bootstrap_servers=bootstrap_servers,
        slots=slots,
        max_message_bytes=max_message_bytes,
        rows_per_transaction=rows_per_transaction,
        bytes_per_transaction=bytes_per_transaction,
        transaction_timeout_ms=transaction_timeout_ms,
        delivery_timeout_ms=delivery_timeout_ms,
        timeout=timeout,
        extra=extra,
        oversize=oversize,
    )

    def write_batch(batch: DataFrame, number: int) -> None:
        query = query_id_of(batch)
        summary = _write(batch, columns, settings, Batch(query, number, slots, continue_from_batch))
        logger.info(
            "batch %d of sink %s: %d rows to %s, %d written, %d written before",
            number, sink_id, summary.rows, topic, summary.written, summary.skipped,
            extra={"action": "sink_batch", "queue": topic},
        )  # fmt: skip
        on_batch(summary.written)

    return write_batch


def write_queue(
    frame: DataFrame,
    topic: str,
    *,
    sink_id: str,
    run_id: str,
    value: str | Column,
    bootstrap_servers: str,
    **options: Unpack[SinkOptions],
) -> SinkSummary:
    """
    Write the rows of a batch job to a queue, each exactly once for this run.

    The same run again, after a failure too, writes what is missing and nothing twice, as long as no other run of this
    sink came between and the frame has the same rows.

    Args:
        frame: The rows.
        topic: Name of the queue, and of its topic.
        sink_id: Id of this job; see `exactly_once_sink`.
        run_id: Name of this run: the same for a repetition, another one for the next run.
        value: Column of the payload, binary or text; no nulls.
        bootstrap_servers: Comma-separated `host:port`, as executors reach it.
        options: Optional arguments of `exactly_once_sink`, all but `continue_from_batch` and `on_batch`.

    Raises:
        ConfigError: A value or a column is not allowed.
        SinkError: Rows that do not fit, or a sink of another kind; nothing was written.
        Exception: Spark's, where a task has failed: run it again.
    """
    rest: dict[str, Any] = dict(options)
    columns = {"value": value, **{name: rest.pop(name, None) for name in ("key", "headers", "queue", "delay", "ttl")}}
    settings = SinkSettings(queue=topic, sink_id=sink_id, bootstrap_servers=bootstrap_servers, **rest)
    if not isinstance(run_id, str) or not run_id:
        message = f"run_id is not allowed: got {run_id!r}, a text that is not empty; name the run"
        raise ConfigError(message)
    return _write(frame, columns, settings, Batch(f"run:{run_id}", 0, settings.slots))


def query_id_of(batch: DataFrame) -> str:
    """
    Return the id of the streaming query that a batch belongs to, which lives in its checkpoint.

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
        begun = _check_positions(settings, batch)
        ordered = rows.repartition(settings.slots, "slot").sortWithinPartitions(*rows.columns)
        results = ordered.mapInArrow(partial(write_partitions, SinkPlan(settings, batch)), _RESULT).collect()
    finally:
        rows.unpersist()
    missing = begun.difference(row["slot"] for row in results)
    if missing:
        message = (
            f"batch {batch.number} came again with other rows in sink {settings.sink_id}: slots "
            f"{', '.join(map(str, sorted(missing)))} have committed rows of it, and got none now; make the query "
            "deterministic, or write its rows to a table first and send them from there"
        )
        raise SinkError(message)
    written, skipped, transactions, dead_lettered = (sum(row[name] for row in results) for name in _RESULT_COUNTS)
    if dead_lettered:
        logger.warning(
            "batch %d of sink %s: %d rows are too large for %s and were sent to its dead-letter topic",
            batch.number, settings.sink_id, dead_lettered, settings.queue,
            extra={"action": "sink_batch", "queue": settings.queue},
        )  # fmt: skip
    return SinkSummary(written + skipped, written, skipped, transactions, dead_lettered)


_RESULT_COUNTS = ("written", "skipped", "transactions", "dead_lettered")


def message_columns(frame: DataFrame, columns: Mapping[str, str | Column | None], slots: int) -> DataFrame:
    """
    Return the messages of a frame.

    Args:
        frame: Any rows.
        columns: By `value`, `key`, `headers`, `queue`, `delay`, `ttl`: name or expression of a column, None for none.
        slots: Slots of the sink.

    Returns:
        One row a row, columns `slot: int`, `value: binary`, `key: binary`, `headers: array<struct<name, value>>`,
        `queue: string`, `delay: double`, `ttl: double`.

    Raises:
        ConfigError: A column does not exist or has the wrong type.
    """
    chosen = frame.select(*(_chosen(frame, name, column).alias(name) for name, column in columns.items()))
    types = {each.name: each.dataType for each in chosen.schema.fields}
    text = [
        _text_or_binary("value", types["value"], F.col("value")).alias("value"),
        _text_or_binary("key", types["key"], F.col("key")).alias("key"),
        _headers(types["headers"]).alias("headers"),
        F.col("queue").cast("string").alias("queue"),
        _number("delay", types["delay"]).alias("delay"),
        _number("ttl", types["ttl"]).alias("ttl"),
    ]
    messages = chosen.select(*text)
    slot = F.pmod(F.xxhash64(*messages.columns), F.lit(slots)).cast("int")
    return messages.select(slot.alias("slot"), *messages.columns)


def _chosen(frame: DataFrame, name: str, column: str | Column | None) -> Column:
    if column is None:
        kinds = {"headers": "array<struct<name:string,value:binary>>", "queue": "string", "delay": "double"}
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
    name = F.regexp_like(F.col("queue"), F.lit(f"^{QUEUE_NAME}$"))
    reserved = F.exists(F.col("headers"), lambda each: each["name"].isNull() | each["name"].startswith(PREFIX))
    limit_s = F.lit(float(_LONGEST_WAIT_S))
    problems = {
        "value is null": F.col("value").isNull(),
        f"larger than max_message_bytes {settings.max_message_bytes}": (
            (size > settings.max_message_bytes) & F.lit(settings.oversize == FAIL)
        ),
        f"queue is not 1 to {LONGEST_QUEUE} of A-Z a-z 0-9 . _ -": ~name,
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


def _check_positions(settings: SinkSettings, batch: Batch) -> set[int]:
    """
    Refuse on the driver what every task would refuse, and find out that the queue exists.

    Returns:
        Slots that have committed rows of this batch.
    """
    log = PositionLog(QueueTopics(settings.queue), settings.bootstrap_servers, settings.timeout, settings.extra)
    log.ensure()
    if settings.oversize == DEAD_LETTER:
        _check_dead_letter_topic(log, settings)
    begun = set()
    for found in log.all():
        sink_id, slot = slot_of(found.key) or ("", 0)
        if sink_id != settings.sink_id:
            continue
        if found.state is None:
            raise SinkError(f"position of {found.key} cannot be read: {found.problem}")
        if found.state.position is not None:
            where = f"slot {slot} of sink {settings.sink_id}"
            if rows_to_skip(SlotPosition.parse(found.state.position, where), batch, where) > 0:
                begun.add(slot)
    return begun


def _check_dead_letter_topic(log: PositionLog, settings: SinkSettings) -> None:
    letters = QueueTopics(settings.queue).dead_letter_topic
    if not partition_count(log.admin, letters, settings.bootstrap_servers, settings.timeout):
        message = (
            f"sink {settings.sink_id} needs topic {letters!r} for rows that are too large: it does not exist; run "
            f"`kmq queue create {settings.queue}`, or use oversize={FAIL!r}"
        )
        raise TopicError(message)


def write_partitions(plan: SinkPlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """
    Write the slots of one partition; runs on an executor.

    Args:
        plan: Plan of the sink and its batch.
        batches: Rows of whole slots, slot by slot, in the order of their content.

    Yields:
        One row a slot.
    """
    import pyarrow as pa  # noqa: PLC0415  # on the executor

    results: list[SlotResult] = []
    for slot, rows in itertools.groupby(_rows(batches), key=lambda pair: pair[0]):
        results.append(write_slot(plan, slot, (row for _, row in rows)))
    columns = list(zip(*results, strict=True)) or [()] * 5
    kinds = (pa.int32(), pa.int64(), pa.int64(), pa.int64(), pa.int64())
    yield pa.RecordBatch.from_arrays(
        [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)],
        names=["slot", *_RESULT_COUNTS],
    )


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Row]]:
    for batch in batches:
        columns = [batch.column(number).to_pylist() for number in range(batch.num_columns)]
        for slot, value, key, headers, queue, delay, ttl in zip(*columns, strict=True):
            pairs = None if headers is None else [(each["name"], each["value"]) for each in headers]
            yield slot, Row(value, key, pairs, queue, delay, ttl)
