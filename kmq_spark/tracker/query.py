"""
Build the redelivery tracker's streaming query: markers topic -> fold -> one call of *deliver* per batch.

Rule 1: `build_query` returns a writer that is not started. `queue_tracker.py` starts, watches and stops the query.
Rule 2: This module uses no Kafka client. The caller passes in the function that carries out the decisions.
Rule 3: The output of a batch is read exactly once, before anything else: if it is not read to its end, Spark does not
commit the state of the batch.

Source: kmq `RedeliveryTracker`, kafka-mq-go `redelivery/`; Spark's arbitrary stateful operator.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  # the conventional name
from pyspark.sql.streaming.state import GroupStateTimeout

from kmq_spark.core.decisions import Decisions
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.state import Status
from kmq_spark.tracker.fold_rows import (
    OUTPUT_SCHEMA,
    ROW_STATUS,
    ROW_UNREADABLE,
    STATE_SCHEMA,
    FoldSettings,
    fold_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    DeliverBatch = Callable[[int, list[PartitionOutcome]], None]


@dataclass(frozen=True, slots=True)
class MarkersSource:
    """
    The settings of Spark's Kafka source for the markers topic.

    Attributes:
        starting_offsets: First marker offset of every partition, for a query without checkpoint.
        group_id_prefix: Prefix of the names that Spark generates for its consumer groups; ACLs need it.
        extra: Settings of the Java client without the `kafka.` prefix, such as `security.protocol`.
        fail_on_removed: Whether the query fails if retention removed markers before they were read.
        tasks: Most Spark tasks that read. Without a limit each markers partition has one, and costs most of its time
            with its start.
    """

    bootstrap_servers: str
    topic: str
    starting_offsets: Mapping[int, int]
    group_id_prefix: str
    max_markers_per_batch: int
    extra: Mapping[str, str]
    fail_on_removed: bool = True
    tasks: int = 2

    def options(self) -> dict[str, str]:
        """Return the options of Spark's Kafka source."""
        return {
            **{f"kafka.{key}": value for key, value in self.extra.items()},
            "kafka.bootstrap.servers": self.bootstrap_servers,
            "subscribe": self.topic,
            "startingOffsets": json.dumps({self.topic: {str(p): o for p, o in self.starting_offsets.items()}}),
            "maxOffsetsPerTrigger": str(self.max_markers_per_batch),
            "groupIdPrefix": self.group_id_prefix,
            # The END of an aborted transaction must not be read.
            "kafka.isolation.level": "read_committed",
            # A fetch of a partition with a few new records waits this long first; by default it is 500 ms, and a task
            # reads its partitions one after the other. Nothing is gained by it: only what the broker has is read.
            "kafka.fetch.max.wait.ms": "1",
            # Spark asks for the bounds of the partition after each poll, two round trips. By default a poll returns 500
            # records; this is about what one fetch (max.partition.fetch.bytes) holds.
            "kafka.max.poll.records": "10000",
            # By default a task that lost its broker connection waits two minutes (spark.network.timeout), even if the
            # broker is back after five seconds. With these timeouts the query fails and restarts with new clients.
            "kafkaConsumer.pollTimeoutMs": "10000",
            "kafka.request.timeout.ms": "10000",
            "kafka.default.api.timeout.ms": "15000",
            # A marker that retention removed before it was read may have been a START: do not ignore that.
            "failOnDataLoss": str(self.fail_on_removed).lower(),
        }


def read_markers(spark: SparkSession, source: MarkersSource) -> DataFrame:
    """Read the markers topic as a stream."""
    records = spark.readStream.format("kafka").options(**source.options()).load()
    return records.select(
        F.col("partition").alias("marker_partition"),
        F.col("offset").alias("marker_offset"),
        F.unix_millis("timestamp").alias("appended_at_ms"),
        F.col("value"),
    ).coalesce(source.tasks)


def decide(markers: DataFrame, settings: FoldSettings) -> DataFrame:
    """Fold the markers of each partition and decide which messages are due."""
    return markers.groupBy("marker_partition").applyInPandasWithState(
        partial(fold_rows, settings=settings),
        OUTPUT_SCHEMA,
        STATE_SCHEMA,
        "append",
        # The tracker's time is the append time of TICKs. Spark's timeouts use other clocks.
        GroupStateTimeout.NoTimeout,
    )


def build_query(
    markers: DataFrame,
    settings: FoldSettings,
    deliver: DeliverBatch,
    *,
    query_name: str,
    checkpoint: str,
    trigger: Mapping[str, Any],
) -> DataStreamWriter:
    """Build the query without starting it."""

    def deliver_batch(decisions: DataFrame, batch_id: int) -> None:
        deliver(batch_id, outcomes_of(decisions.toArrow()))

    return (
        decide(markers, settings)
        .writeStream.queryName(query_name)
        .outputMode("append")
        .option("checkpointLocation", checkpoint)
        .trigger(**trigger)
        .foreachBatch(deliver_batch)
    )


def outcomes_of(table: pa.Table) -> list[PartitionOutcome]:
    """Convert the rows of a batch to outcomes, one per markers partition."""
    columns = {name: table.column(name).to_numpy() for name in table.column_names if name != "detail"}
    columns["action"] = columns["row_kind"]  # the row kinds of decisions have the values of `DecisionAction`
    detail = table.column("detail")
    outcomes = []
    for status_row in (columns["row_kind"] == ROW_STATUS).nonzero()[0].tolist():
        marker_partition = int(columns["marker_partition"][status_row])
        mine = columns["marker_partition"] == marker_partition
        unreadable_rows = (mine & (columns["row_kind"] == ROW_UNREADABLE)).nonzero()[0]
        decided_rows = (mine & (columns["row_kind"] != ROW_STATUS) & (columns["row_kind"] != ROW_UNREADABLE)).nonzero()[
            0
        ]
        outcomes.append(
            PartitionOutcome(
                marker_partition=marker_partition,
                status=Status.from_dict(json.loads(detail[status_row].as_py())),
                decisions=Decisions.from_columns(
                    {name: column[decided_rows] for name, column in columns.items()},
                    detail.take(decided_rows).to_pylist(),
                ),
                unreadable=tuple(detail.take(unreadable_rows).to_pylist()),
            )
        )
    return sorted(outcomes, key=lambda outcome: outcome.marker_partition)
