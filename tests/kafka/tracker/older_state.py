"""A checkpoint that a tracker of another state version has left behind."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.state import GroupStateTimeout

from kmq_spark.spark.session import local_checkpoint_settings, streaming_settings
from kmq_spark.tracker.fold_rows import OUTPUT_SCHEMA, STATE_SCHEMA
from kmq_spark.tracker.query import MarkersSource, read_markers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pandas as pd
    from pyspark.sql import SparkSession

    from kmq_spark.kafka.topics import QueueLayout


def write_checkpoint_of(
    version: int, layout: QueueLayout, bootstrap_servers: str, spark: SparkSession, to: Path
) -> None:
    """Fold the markers topic as a tracker of that version does, as far as the checkpoint shows."""
    rest = bytes(200)
    blob = struct.pack("<4sHHI", b"KMQS", version, 1, zlib.crc32(rest)) + rest

    def remember(_key: Any, frames: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:  # noqa: ANN401
        list(frames)
        state.update((blob,))
        yield from ()

    for key, value in (streaming_settings(2) | local_checkpoint_settings(str(to.parent), spark)).items():
        spark.conf.set(key, value)
    begins_at = dict.fromkeys(range(layout.partition_count), 0)
    source = MarkersSource(bootstrap_servers, layout.topics.markers_topic, begins_at, "older", 1_000_000, {})
    folded = (
        read_markers(spark, source)
        .groupBy("marker_partition")
        .applyInPandasWithState(remember, OUTPUT_SCHEMA, STATE_SCHEMA, "append", GroupStateTimeout.NoTimeout)
    )
    query = (
        folded.writeStream.queryName("older-tracker")
        .outputMode("append")
        .option("checkpointLocation", str(to))
        .trigger(availableNow=True)
        .foreachBatch(lambda frame, _: frame.toArrow())
        .start()
    )
    query.awaitTermination(100)
