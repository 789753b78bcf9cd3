"""A checkpoint of another version of the tracker: it is put aside, and the state is rebuilt from the markers topic."""

from __future__ import annotations

import struct
import zlib
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.state import GroupStateTimeout

from kmq_spark.core.state import STATE_VERSION
from kmq_spark.inspection.cluster import Cluster
from kmq_spark.spark.session import local_checkpoint_settings, streaming_settings
from kmq_spark.tracker.fold_rows import OUTPUT_SCHEMA, STATE_SCHEMA
from kmq_spark.tracker.query import MarkersSource, read_markers
from tests.kafka.stage import receive_all, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pandas as pd

    from tests.kafka.stage import Stage

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def write_checkpoint_of(version: int, stage: Stage, checkpoint: str) -> None:
    """Fold the markers topic as a tracker of that version does, as far as the checkpoint shows."""
    rest = bytes(200)
    blob = struct.pack("<4sHHI", b"KMQS", version, 1, zlib.crc32(rest)) + rest

    def remember(_key: Any, frames: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:  # noqa: ANN401
        list(frames)
        state.update((blob,))
        yield from ()

    for key, value in (streaming_settings(2) | local_checkpoint_settings(str(stage.folder), stage.spark)).items():
        stage.spark.conf.set(key, value)
    topic = stage.layout.topics.markers_topic
    source = MarkersSource(stage.bootstrap_servers, topic, {0: 0, 1: 0}, "older", 1_000_000, {})
    folded = (
        read_markers(stage.spark, source)
        .groupBy("marker_partition")
        .applyInPandasWithState(remember, OUTPUT_SCHEMA, STATE_SCHEMA, "append", GroupStateTimeout.NoTimeout)
    )
    query = (
        folded.writeStream.queryName("older-tracker")
        .outputMode("append")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .foreachBatch(lambda frame, _: frame.toArrow())
        .start()
    )
    query.awaitTermination(100)


def has_signed(stage: Stage) -> bool:
    """Return whether a tracker has committed a place in the markers topic."""
    topics = stage.layout.topics
    with closing(Cluster(stage.bootstrap_servers, 10_000)) as cluster:
        return bool(cluster.committed(topics.tracker_group, topics.markers_topic))


@pytest.mark.slow
def test_checkpoint_of_an_older_version_is_put_aside_and_rebuilt(stage: Stage) -> None:
    """An upgrade needs no manual step: messages in flight are redelivered at their deadlines."""
    stage.send("before")
    with stage.consumer() as consumer:
        # The older one has worked here: without offsets of its group the checkpoint would be of a topic made anew.
        with stage.tracking(checkpoint="earlier"):
            receive_all(consumer, 1, ack=True)
            consumer.flush()
            assert wait_until(lambda: has_signed(stage))
        stage.send("a")
        receive_all(consumer, 1)
        write_checkpoint_of(STATE_VERSION - 1, stage, str(stage.folder / "checkpoint" / stage.queue))
        with stage.tracking() as tracker:
            (again,) = receive_all(consumer, 1)
            again.ack()
            consumer.flush()
    assert (again.value, again.delivery_count, tracker.stats.restarts) == (b"a", 2, 1)
    assert (stage.folder / "checkpoint" / f"{stage.queue}.damaged-1" / "state").is_dir()
