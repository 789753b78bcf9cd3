"""The tracker's query on a real Spark session: state across batches, restarts and failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chispa import assert_df_equality
from pyspark.errors.exceptions.base import StreamingQueryException

from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.core.policy import DecisionAction
from kmq_spark.spark.session import streaming_settings
from kmq_spark.tracker.fold_rows import ROW_REDELIVER, ROW_STATUS, FoldSettings
from kmq_spark.tracker.query import MarkersSource, build_query, decide, read_markers
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from kmq_spark.core.outcome import PartitionOutcome

pytestmark = pytest.mark.spark

SETTINGS = FoldSettings("orders.markers")

TERM, TICK = encode_marker(Marker(MarkerType.TERM, term=5)), encode_marker(Marker(MarkerType.TICK, term=5))

MARKERS_SCHEMA = "marker_partition int, marker_offset long, appended_at_ms long, value binary"

Row = tuple[int, int, int, bytes]


def start(first: int, count: int = 1) -> bytes:
    """Return the bytes of a START with a lease of one second."""
    return encode_marker(Marker(MarkerType.START, 0, (OffsetRange(first, count),), redeliver_after_ms=1_000))


def begin(marker_partition: int) -> list[Row]:
    """Return the TERM of a markers partition."""
    return [(marker_partition, 9, 5_000, TERM)]


class MarkersFolder:
    """A folder that Spark reads as a stream: one file a batch, so that a test says what a batch holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "markers"
        self.folder.mkdir()
        self._files = 0

    def append(self, *rows: Row) -> None:
        """Add one batch of (markers partition, marker offset, append time, value)."""
        names = ["marker_partition", "marker_offset", "appended_at_ms", "value"]
        types = [pa.int32(), pa.int64(), pa.int64(), pa.binary()]
        table = pa.table(
            {
                name: pa.array(column, kind)
                for name, kind, column in zip(names, types, zip(*rows, strict=True), strict=True)
            }
        )
        self._files += 1
        pq.write_table(table, self.folder / f"batch-{self._files:03}.parquet")

    def read(self, spark: SparkSession) -> DataFrame:
        """Return the stream."""
        options = {"maxFilesPerTrigger": "1"}
        return spark.readStream.schema(MARKERS_SCHEMA).options(**options).parquet(str(self.folder))


@pytest.fixture
def markers(tmp_path: Path, spark: SparkSession) -> MarkersFolder:
    """Return an empty markers stream, with the tracker's streaming settings in force."""
    for key, value in streaming_settings(2).items():
        spark.conf.set(key, value)
    return MarkersFolder(tmp_path)


class Runs:
    """Runs the query over what is there, as often as a test likes, from one checkpoint."""

    def __init__(self, spark: SparkSession, markers: MarkersFolder, checkpoint: Path) -> None:
        self._spark = spark
        self._markers = markers
        self._checkpoint = checkpoint
        self.fail_next = False

    def run(self, settings: FoldSettings = SETTINGS) -> list[PartitionOutcome]:
        """Run once over everything that is new; return the outcomes of all batches."""
        outcomes: list[PartitionOutcome] = []

        def deliver(_batch_id: int, batch: list[PartitionOutcome]) -> None:
            if self.fail_next:
                self.fail_next = False
                message = "the broker is away"
                raise RuntimeError(message)
            outcomes.extend(batch)

        query = build_query(
            self._markers.read(self._spark),
            settings,
            deliver,
            query_name="tracker-under-test",
            checkpoint=str(self._checkpoint),
            trigger={"availableNow": True},
        ).start()
        query.awaitTermination(120)
        return outcomes


@pytest.fixture
def runs(spark: SparkSession, markers: MarkersFolder, tmp_path: Path) -> Runs:
    """Return a runner on the markers stream."""
    return Runs(spark, markers, tmp_path / "checkpoint")


def decided(outcomes: list[PartitionOutcome]) -> list[tuple[int, int]]:
    """Return (markers partition, message offset) of every decision."""
    return [
        (outcome.marker_partition, message_offset)
        for outcome in outcomes
        for message_offset in outcome.decisions.message_offset.tolist()
    ]


def test_decisions_frame_names_each_due_message(spark: SparkSession, markers: MarkersFolder) -> None:
    """One row per run of messages and one status row per partition; the fold returns nothing else."""
    markers.append(
        (0, 9, 5_000, TERM),
        (0, 10, 5_000, start(1, 2)),
        (1, 19, 5_000, TERM),
        (1, 20, 5_000, start(7)),
        (0, 11, 6_001, TICK),
    )
    frame = decide(markers.read(spark), SETTINGS)
    query = frame.writeStream.format("memory").queryName("decisions").outputMode("append").start()
    query.processAllAvailable()
    query.stop()
    names = ("marker_partition", "row_kind", "message_offset", "message_count", "deadline_at_ms")
    actual = spark.table("decisions").select(*names)
    expected = spark.createDataFrame(
        [
            (0, ROW_STATUS, -1, -1, -1),
            (0, ROW_REDELIVER, 1, 2, 6_000),  # messages 1 and 2; 5_000 + 1_000
            (1, ROW_STATUS, -1, -1, -1),
        ],
        "marker_partition int, row_kind byte, message_offset long, message_count int, deadline_at_ms long",
    )
    assert_df_equality(expected, actual, ignore_row_order=True, ignore_nullable=True)


def test_restart_from_checkpoint_keeps_messages_in_flight_and_repeats_only_what_was_not_delivered(
    markers: MarkersFolder, runs: Runs
) -> None:
    """
    What was started before a restart is decided after it, once in a term; a new term decides anew.

    A batch that could not be delivered decides the same again: decisions are a function of the log.
    """
    markers.append(*begin(0), (0, 10, 5_000, start(1)))
    assert decided(runs.run()) == []
    markers.append((0, 11, 6_001, TICK))
    runs.fail_next = True
    with pytest.raises(StreamingQueryException, match="the broker is away"):
        runs.run()
    assert decided(runs.run()) == [(0, 1)]
    markers.append((0, 12, 9_000, TICK))
    assert decided(runs.run()) == []
    newer, tick = encode_marker(Marker(MarkerType.TERM, term=6)), encode_marker(Marker(MarkerType.TICK, term=6))
    markers.append((0, 13, 9_000, newer), (0, 14, 9_000, TICK), (0, 15, 9_000, tick))
    assert decided(runs.run()) == [(0, 1)]


def test_outcome_carries_status_and_columns_of_each_partition(markers: MarkersFolder, runs: Runs) -> None:
    """The sender gets the values of the core, partition by partition."""
    markers.append(
        (0, 9, 5_000, TERM),
        (0, 10, 5_000, start(1)),
        (3, 39, 5_000, TERM),
        (3, 40, 5_000, start(9)),
        (3, 41, 6_500, TICK),
    )
    first, second = runs.run()
    assert (first.marker_partition, first.status.in_flight, first.status.next_marker_offset) == (0, 1, 11)
    assert (second.marker_partition, second.status.marked, second.status.next_marker_offset) == (3, 1, 42)
    assert second.decisions.action.tolist() == [DecisionAction.REDELIVER]
    assert second.decisions.tick_at_ms.tolist() == [6_500]


def test_markers_partitions_share_tasks(spark: SparkSession) -> None:
    """A task a partition costs more with its start than with what it reads."""
    source = MarkersSource("127.0.0.1:1", "orders.markers", dict.fromkeys(range(64), 0), "kmq", 1_000, {}, tasks=3)
    plan = read_markers(spark, source)._jdf.queryExecution().logical()  # only a query that runs has partitions
    assert (plan.numPartitions(), plan.shuffle()) == (3, False)
