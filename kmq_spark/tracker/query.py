"""
The redelivery tracker's streaming query: markers topic -> fold -> one delivery a batch.

Rule 1: returns an unstarted writer; who starts, watches and stops it is `service.py`.
Rule 2: Kafka's client is not known here: what to do with decisions is a callable that is passed in.
Rule 3: the output of a batch is drained exactly once, first thing: an output that is not drained leaves the state of
the batch uncommitted.

Source: kmq `RedeliveryTracker`, kafka-mq-go `redelivery/`; the shape is Spark's arbitrary stateful operator.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  # the field's name for it
from pyspark.sql.streaming.state import GroupStateTimeout

from kmq_spark.core.decisions import Decisions
from kmq_spark.core.outcome import PartitionOutcome, UnreadableRecord
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
    Where the markers are read from.

    Attributes:
        bootstrap_servers: `host:port`, comma-separated.
        topic: Markers topic.
        starting_offsets: First marker offset by partition for a query without checkpoint; every partition is named.
        group_id_prefix: Prefix of the consumer groups that Spark makes up, for ACLs.
        max_markers_per_batch: Bound on one batch.
        extra: Java client keys without the `kafka.` prefix, such as `security.protocol`.
        fail_on_removed: Whether markers that were removed before they were read stop the query.
    """

    bootstrap_servers: str
    topic: str
    starting_offsets: Mapping[int, int]
    group_id_prefix: str
    max_markers_per_batch: int
    extra: Mapping[str, str]
    fail_on_removed: bool = True

    def options(self) -> dict[str, str]:
        """Return the options of Spark's Kafka source."""
        return {
            **{f"kafka.{key}": value for key, value in self.extra.items()},
            "kafka.bootstrap.servers": self.bootstrap_servers,
            "subscribe": self.topic,
            "startingOffsets": json.dumps({self.topic: {str(p): o for p, o in self.starting_offsets.items()}}),
            "maxOffsetsPerTrigger": str(self.max_markers_per_batch),
            "groupIdPrefix": self.group_id_prefix,
            # An END of a transaction that was aborted must not be seen.
            "kafka.isolation.level": "read_committed",
            # Every small partition otherwise waits out the 500 ms long poll: 2400 ms -> 390 ms a batch.
            "kafka.fetch.max.wait.ms": "10",
            # A task that lost its broker otherwise waits two minutes (spark.network.timeout) for one that is back after
            # five seconds; the query fails instead, and is started again with new clients.
            "kafkaConsumer.pollTimeoutMs": "10000",
            "kafka.request.timeout.ms": "10000",
            "kafka.default.api.timeout.ms": "15000",
            # A marker that retention removed before we read it may have been a START: never go on in silence.
            "failOnDataLoss": str(self.fail_on_removed).lower(),
        }


def read_markers(spark: SparkSession, source: MarkersSource) -> DataFrame:
    """
    Read the markers topic as a stream.

    Returns:
        One row per record: `marker_partition: int`, `marker_offset: long`, `appended_at_ms: long` (broker clock),
        `value: binary`; order not kept.
    """
    records = spark.readStream.format("kafka").options(**source.options()).load()
    return records.select(
        F.col("partition").alias("marker_partition"),
        F.col("offset").alias("marker_offset"),
        F.unix_millis("timestamp").alias("appended_at_ms"),
        F.col("value"),
    )


def decide(markers: DataFrame, settings: FoldSettings) -> DataFrame:
    """
    Fold the markers of each partition and tell what is due.

    Args:
        markers: As `read_markers` returns them.
        settings: Of the queue.

    Returns:
        A streaming frame with the columns of `OUTPUT_SCHEMA`.
    """
    return markers.groupBy("marker_partition").applyInPandasWithState(
        partial(fold_rows, settings=settings),
        OUTPUT_SCHEMA,
        STATE_SCHEMA,
        "append",
        # Time comes from TICKs in the log; Spark's own timeouts are clocks of another kind.
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
    """
    Put the query together, unstarted.

    Args:
        markers: As `read_markers` returns them.
        settings: Of the queue.
        deliver: Called once a batch, on the driver, with the batch id and an outcome a markers partition; returning
            means that all of it is done, raising fails the batch, which is then run again.
        query_name: Shown by Spark.
        checkpoint: Folder of this query's checkpoint.
        trigger: Keyword arguments of `DataStreamWriter.trigger`.
    """

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
    """
    Turn the rows of a batch into values of the core, one a markers partition.

    Args:
        table: Columns of `OUTPUT_SCHEMA`.

    Returns:
        In ascending order of the markers partition.
    """
    columns = {name: table.column(name).to_numpy() for name in table.column_names if name != "detail"}
    columns["action"] = columns["row_kind"]  # the kinds of decision rows are the actions
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
                unreadable=tuple(
                    UnreadableRecord(int(columns["message_offset"][row]), detail[row].as_py())
                    for row in unreadable_rows.tolist()
                ),
            )
        )
    return sorted(outcomes, key=lambda outcome: outcome.marker_partition)
