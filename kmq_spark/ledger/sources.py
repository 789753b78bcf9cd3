"""
The input of a ledger: the topics of a queue as streams of rows, one row per record or range.

Rule 1: The ledger never affects the tracker: it has other consumer groups and other checkpoints, and does not write to
Kafka.
Rule 2: The content of the topics is untrusted. Unreadable headers become null, unreadable markers become rows with an
error.
Rule 3: Message values stay in Kafka. The ledger stores only their size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812  # the field's name for it
from pyspark.sql.streaming.state import GroupStateTimeout

from kmq_spark.core.markers import MAX_MESSAGE_OFFSET, MAX_QUEUE_PARTITION
from kmq_spark.ledger.coordination_rows import FOLDED_SCHEMA, STATE_SCHEMA, FoldRecordsSettings, fold_records
from kmq_spark.ledger.marker_rows import DECODED_SCHEMA, decode_batches
from kmq_spark.ledger.schema import COLUMNS, COORDINATION, DEAD_LETTERS, MARKERS, MESSAGES
from kmq_spark.wire import headers as H  # noqa: N812  # a namespace of names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column, DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class TopicSource:
    """
    One topic, read as a stream.

    Attributes:
        bootstrap_servers: Comma-separated `host:port`.
        topic: Name of the topic.
        group_id_prefix: Prefix of the consumer group names that Spark generates, for ACLs.
        starting_offsets: Offsets by partition at which to begin without a checkpoint; empty for the beginning of the
            log.
        max_records_per_batch: Maximum number of records per batch.
        fail_on_removed: Whether the query fails if records were removed before they were read.
        extra: Java client keys without the `kafka.` prefix.
    """

    bootstrap_servers: str
    topic: str
    group_id_prefix: str
    starting_offsets: Mapping[int, int] = field(default_factory=dict)
    max_records_per_batch: int = 200_000
    fail_on_removed: bool = True
    extra: Mapping[str, str] = field(default_factory=dict)

    def options(self) -> dict[str, str]:
        """Return the options of Spark's Kafka source."""
        offsets = {self.topic: {str(partition): offset for partition, offset in self.starting_offsets.items()}}
        return {
            **{f"kafka.{key}": value for key, value in self.extra.items()},
            "kafka.bootstrap.servers": self.bootstrap_servers,
            "subscribe": self.topic,
            "startingOffsets": json.dumps(offsets) if self.starting_offsets else "earliest",
            "maxOffsetsPerTrigger": str(self.max_records_per_batch),
            "groupIdPrefix": self.group_id_prefix,
            # Skip the records of aborted transactions.
            "kafka.isolation.level": "read_committed",
            # As in the tracker: otherwise small partitions wait for the 500 ms long poll.
            "kafka.fetch.max.wait.ms": "10",
            "kafkaConsumer.pollTimeoutMs": "30000",
            "failOnDataLoss": str(self.fail_on_removed).lower(),
            "includeHeaders": "true",
        }


def read_topic(spark: SparkSession, source: TopicSource) -> DataFrame:
    """Read a topic as a stream, with Kafka's own columns (`key`, `value`, `partition`, `offset`, `timestamp`, …)."""
    return spark.readStream.format("kafka").options(**source.options()).load()


def marker_rows(records: DataFrame, queue: str, group: str) -> DataFrame:
    """
    Convert records of a markers topic to rows of `markers`.

    Args:
        records: One row per Kafka record: `value: binary`, `partition: int`, `offset: long`, `timestamp: timestamp`.
        queue: Name of the queue.
        group: Name of the group; empty for the queue's own group.

    Returns:
        One row per range of each marker, no row for a TICK, and one row with `error` set per unreadable record.
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
        "group_name": F.lit(group),
        "appended_at": F.timestamp_micros("appended_at_us"),
        "due_at": F.timestamp_millis("due_at_ms"),
    }
    values["marker_date"] = F.to_date(values["appended_at"])
    return _shaped(decoded, MARKERS, values)


def message_rows(records: DataFrame, queue: str) -> DataFrame:
    """
    Convert records of a queue topic to rows of `messages`: metadata, never the value.

    Args:
        records: Kafka records with their headers.
        queue: Name of the queue.

    Returns:
        One row per record.
    """
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
        "for_group": _text(H.SUBSCRIPTION),
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


def dead_letter_rows(records: DataFrame, queue: str, group: str) -> DataFrame:
    """
    Convert records of a dead-letter topic to rows of `dead_letters`.

    Args:
        records: Kafka records with their headers.
        queue: Name of the queue.
        group: Name of the group; empty for the queue's own group.

    Returns:
        One row per record. `is_marker` is true for an unreadable record of the markers topic that was set aside.
    """
    origin, previous = _place(H.ORIGIN), _place(H.PREVIOUS)
    source_topic = _text(H.DLQ_TOPIC)
    numbers = F.filter(
        F.transform(F.split(_text(H.ATTEMPTS_MS), ","), lambda text: text.try_cast("bigint")), lambda at: at.isNotNull()
    )
    values = {
        "queue": F.lit(queue),
        "group_name": F.lit(group),
        "dead_date": F.to_date("timestamp"),
        "dead_letter_partition": F.col("partition"),
        "dead_letter_offset": F.col("offset"),
        "dead_at": F.col("timestamp"),
        "is_marker": F.coalesce(source_topic.endswith(".markers"), F.lit(False)) & origin.isNull(),  # noqa: FBT003  # a literal of SQL
        "source_topic": source_topic,
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


def coordination_rows(records: DataFrame, written: Mapping[tuple[int, str], int]) -> DataFrame:
    """
    Convert records of the coordination topic to rows of `coordination`.

    Args:
        records: A stream of Kafka records. Without a checkpoint it must begin with the first record of the topic.
        written: Offset of the newest record whose rows the table has, by partition and group.

    Returns:
        One row per change of a group.
    """
    raw = records.select(
        F.col("partition").alias("coordination_partition"),
        F.col("offset").alias("record_offset"),
        F.unix_millis("timestamp").alias("appended_at_ms"),
        F.col("key"),
        F.col("value"),
    )
    changes = raw.groupBy("coordination_partition").applyInPandasWithState(
        partial(fold_records, settings=FoldRecordsSettings(dict(written))),
        FOLDED_SCHEMA,
        STATE_SCHEMA,
        "append",
        # Time passes by the append times of records.
        GroupStateTimeout.NoTimeout,
    )
    return change_rows(changes)


def change_rows(changes: DataFrame) -> DataFrame:
    """
    Convert the results of `fold_records` to rows of `coordination`.

    Args:
        changes: Columns of `FOLDED_SCHEMA`.

    Returns:
        One row per change.
    """
    values = {"appended_at": F.timestamp_millis("appended_at_ms")}
    values["change_date"] = F.to_date(values["appended_at"])
    return _shaped(changes, COORDINATION, values)


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
