"""
The views of the ledger as functions. Each returns a DataFrame of the ledger that `open_ledger` opened last.

Rule 1: Filters are applied below the views' window functions if possible: a query for one queue or one message reads
only its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812  # the field's name for it

from kmq_spark.ledger.queries import queue_and_group
from kmq_spark.ledger.views import read_view

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def deliveries(spark: SparkSession, queue: str = "") -> DataFrame:
    """Return each lease of a queue, or of all queues: start, end, outcome, duration and consumer."""
    return of_queue(read_view(spark, "deliveries"), queue)


def story(spark: SparkSession, queue: str, partition: int, offset: int) -> DataFrame:
    """
    Return all events of one message, over all its copies, in order.

    Args:
        spark: Session.
        queue: `queue`, or `queue@subscription` for the events of one group.
        partition: Queue partition of any copy of the message.
        offset: Message offset of that copy.

    Returns:
        One row per event: `at`, `event`, `queue_partition`, `message_offset`, `delivery_count`, `who`, `detail`, …;
        empty if the ledger does not contain the message.
    """
    name, group = queue_and_group(queue)
    messages = read_view(spark, "messages")
    origin = (
        messages.where((F.col("queue") == name) & (F.col("queue_partition") == partition))
        .where(F.col("message_offset") == offset)
        .select("origin_partition", "origin_offset")
        .first()
    )
    first = (origin["origin_partition"], origin["origin_offset"]) if origin is not None else (partition, offset)
    events = read_view(spark, "message_story").where(
        (F.col("queue") == name) & (F.col("origin_partition") == first[0]) & (F.col("origin_offset") == first[1])
    )
    if group is not None:
        events = events.where(F.col("group_name").isNull() | (F.col("group_name") == group))
    return events.orderBy("at", "message_offset", "step")


def slowest_handlers(spark: SparkSession, queue: str = "") -> DataFrame:
    """Return the consumers by the duration of their handlers, the slowest first."""
    return of_queue(read_view(spark, "slowest_handlers"), queue)


def hottest_poison(spark: SparkSession, queue: str = "") -> DataFrame:
    """Return the messages whose deliveries fail repeatedly, the worst first."""
    return of_queue(read_view(spark, "hottest_poison"), queue)


def redeliveries_by_hour(spark: SparkSession, queue: str = "") -> DataFrame:
    """Return how many messages were redelivered in each hour, why, and how late; the newest hour first."""
    return of_queue(read_view(spark, "redeliveries_by_hour"), queue)


def stuck_now(spark: SparkSession, queue: str = "") -> DataFrame:
    """Return the messages that are overdue, or in flight for more than an hour; the oldest first."""
    return of_queue(read_view(spark, "stuck_now"), queue)


def in_flight(spark: SparkSession, queue: str = "") -> DataFrame:
    """Return the messages that are started and not ended."""
    return of_queue(read_view(spark, "in_flight"), queue)


def totals(spark: SparkSession, queue: str = "") -> DataFrame:
    """Return one row per queue and group: number of started messages and of each result. The numbers must add up."""
    return of_queue(read_view(spark, "totals"), queue)


def ownership(spark: SparkSession, queue: str = "") -> DataFrame:
    """Return each claim of a coordination group: owner, epoch, begin and end. With *queue*: which tracker had it."""
    return of_queue(read_view(spark, "ownership"), queue)


def of_queue(rows: DataFrame, queue: str) -> DataFrame:
    """Return only the rows of `queue`, or of `queue@subscription`; all rows if *queue* is empty."""
    if not queue:
        return rows
    name, group = queue_and_group(queue)
    rows = rows.where(F.col("queue") == name)
    return rows if group is None else rows.where(F.col("group_name") == group)
