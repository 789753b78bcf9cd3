"""
Run several trackers in one process: one thread each, stopped together, their metrics on one port.

Rule 1: This module only supervises; a single tracker is `queue_tracker.QueueTracker`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kmq_spark.tracker.metrics import serving_metrics
from kmq_spark.tracker.queue_tracker import QueueTracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from kmq_spark.config import Settings


class TrackerService:
    """
    The trackers of several queues in one Spark application. Each has its own query, checkpoint and transactional id.

    Args:
        spark: Session that all trackers use.
        queues: Names of the queues, or `queue@subscription`; no duplicates.
        settings: All settings.

    Attributes:
        trackers: One tracker per queue, in the order of *queues*.
    """

    def __init__(self, spark: SparkSession, queues: Sequence[str], settings: Settings) -> None:
        """Create a tracker for each queue."""
        self._settings = settings
        self.trackers = [QueueTracker(spark, queue, settings) for queue in queues]
        self._ended = threading.Event()
        self._errors: list[BaseException] = []

    def stop(self) -> None:
        """Request that every tracker ends between two batches; safe to call in a signal handler."""
        for tracker in self.trackers:
            tracker.stop()

    def run(self) -> None:
        """
        Run all trackers until `stop`. When one fails, stop the others.

        Raises:
            KmqError: The error of the tracker that failed first.
        """
        threads = [
            threading.Thread(target=self._run_one, args=(tracker,), name=f"kmq-tracker-{tracker.queue}")
            for tracker in self.trackers
        ]
        with serving_metrics(self.trackers, self._settings):
            for thread in threads:
                thread.start()
            for thread in threads:
                # Join with a timeout, so that signal handlers can run in the main thread.
                while thread.is_alive():
                    thread.join(0.2)
        if self._errors:
            raise self._errors[0]

    def _run_one(self, tracker: QueueTracker) -> None:
        try:
            tracker.run()
        except BaseException as error:  # noqa: BLE001  # the main thread raises it
            self._errors.append(error)
            self.stop()
