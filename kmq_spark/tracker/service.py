"""Run several trackers in one process: one thread each, stopped together, their metrics on one port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.spark.queries import run_together
from kmq_spark.tracker.metrics import serving_metrics
from kmq_spark.tracker.queue_tracker import QueueTracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from kmq_spark.config import Settings


class TrackerService:
    """
    The trackers of several queues in one Spark application. Each has its own query, checkpoint and transactional id.

    Attributes:
        trackers: One tracker per queue, in the order of *queues*.
    """

    def __init__(self, spark: SparkSession, queues: Sequence[str], settings: Settings) -> None:
        self._settings = settings
        self.trackers = [QueueTracker(spark, queue, settings) for queue in queues]

    def stop(self) -> None:
        """Request that every tracker ends between two batches; safe to call in a signal handler."""
        for tracker in self.trackers:
            tracker.stop()

    def run(self) -> None:
        """Run all trackers until `stop`. When one fails for good, the others go on; its error is raised at the end."""
        with serving_metrics(self.trackers, self._settings):
            run_together(self.trackers, ends_all=False)
