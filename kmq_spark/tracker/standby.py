"""
Keep a process ready to track: load in advance what the first batch needs, and notice that the JVM is gone.

The warm-up reads markers, sends nothing and commits nothing. If it fails, the first batch takes
longer.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka.admin import AdminClient
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from kmq_spark.config import plain
from kmq_spark.errors import KmqError
from kmq_spark.kafka.lookups import EARLIEST, LATEST, offsets_of
from kmq_spark.kafka.settings import admin_config, make_client, new_client_id
from kmq_spark.kafka.topics import check_queue
from kmq_spark.spark.queries import one_line
from kmq_spark.spark.session import local_checkpoint_settings, streaming_settings
from kmq_spark.tracker.fold_rows import FoldSettings
from kmq_spark.tracker.query import MarkersSource, build_query, read_markers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kmq_spark.config import Settings
    from kmq_spark.kafka.topics import QueueLayout

logger = logging.getLogger(__name__)

WARM_UP_S = 60
"""Longest warm-up, seconds; it takes about five on two cores."""

MARKERS_READ = 50
"""Markers at the end of each partition that the warm-up reads."""


def warm_up(spark: SparkSession, queue: str, settings: Settings) -> bool:
    """
    Run one batch of a tracker's query, so that classes are loaded, code is compiled and a Python worker is started.

    Return whether a batch was run; not so where the queue has no markers yet.
    """
    began_s = time.monotonic()
    checkpoint = f"{settings.tracker.checkpoint_dir.rstrip('/')}/{new_client_id('warm-up')}"
    try:
        layout = check_queue(queue, **settings.kafka.reach())
        is_done = _run_batch(spark, layout, queue, settings, checkpoint)
    except (KmqError, PySparkException, Py4JError, ConnectionError) as error:
        logger.warning("warm-up failed, the first batch takes longer: %s", one_line(error))
        return False
    finally:
        _delete(spark, checkpoint)
    logger.info(
        "warm-up of %s took %.1f s", queue, time.monotonic() - began_s, extra={"action": "warm_up", "queue": queue}
    )
    return is_done


def check_jvm(spark: SparkSession) -> None:
    """Return while the session's JVM answers and its context is open; else raise a `KmqError`."""
    try:
        java_context = spark.sparkContext._jsc  # noqa: SLF001  # no other way to the context's state
        is_open = java_context is not None and not java_context.sc().isStopped()
    except (Py4JError, ConnectionError) as error:
        message = f"the JVM of Spark is gone: got {one_line(error)}; start the tracker again"
        raise KmqError(message) from error
    if not is_open:
        message = "the Spark session is closed: got a stopped context; start the tracker again"
        raise KmqError(message)


def _run_batch(spark: SparkSession, layout: QueueLayout, queue: str, settings: Settings, checkpoint: str) -> bool:
    tracker, kafka = settings.tracker, settings.kafka
    topics = layout.topics
    files = local_checkpoint_settings(tracker.checkpoint_dir, spark)
    for key, value in (streaming_settings(tracker.state_partitions) | files).items():
        spark.conf.set(key, value)
    source = MarkersSource(
        bootstrap_servers=kafka.bootstrap_servers,
        topic=topics.markers_topic,
        starting_offsets=_near_the_end(layout, settings),
        group_id_prefix=f"{topics.tracker_group}.source",
        max_markers_per_batch=tracker.max_markers_per_batch,
        extra=plain(kafka.spark_extra),
        fail_on_removed=False,
        tasks=tracker.state_partitions,
    )
    batches: list[int] = []
    query = build_query(
        read_markers(spark, source),
        FoldSettings(topics.markers_topic),
        lambda batch_id, _outcomes: batches.append(batch_id),
        query_name=f"kmq-warm-up-{queue}",
        checkpoint=checkpoint,
        trigger={"availableNow": True},
    ).start()
    try:
        query.awaitTermination(WARM_UP_S)
    finally:
        query.stop()
    return bool(batches)


def _near_the_end(layout: QueueLayout, settings: Settings) -> dict[int, int]:
    """Return an offset near the end of each markers partition."""
    kafka, topic, partitions = settings.kafka, layout.topics.markers_topic, range(layout.partition_count)
    admin = make_client(AdminClient, admin_config(kafka.bootstrap_servers, extra=plain(kafka.extra)))
    first = offsets_of(admin, topic, partitions, EARLIEST, kafka.timeout)
    end = offsets_of(admin, topic, partitions, LATEST, kafka.timeout)
    return {partition: max(first[partition], end[partition] - MARKERS_READ) for partition in partitions}


def _delete(spark: SparkSession, folder: str) -> None:
    """Delete a folder on any file system that the JVM can write."""
    try:
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001  # no other way to Hadoop's file systems
        path = jvm.org.apache.hadoop.fs.Path(folder)
        path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()).delete(path, True)  # noqa: FBT003, SLF001  # Hadoop's: recursive; as above
    except (PySparkException, Py4JError, ConnectionError) as error:
        logger.warning("cannot delete %s, delete it: %s", folder, one_line(error))
