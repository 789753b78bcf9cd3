"""
Several trackers in one process: a thread each, stopped together, their metrics on one port.

Rule 1: supervision only; one tracker is `service.QueueTracker`.
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
    Several queues in one Spark application, a query, a checkpoint and a transactional id each.

    Args:
        spark: Session.
        queues: Their names, without repeats.
        settings: All settings.
    """

    def __init__(self, spark: SparkSession, queues: Sequence[str], settings: Settings) -> None:
        """Make a tracker for each queue."""
        self._settings = settings
        self.trackers = [QueueTracker(spark, queue, settings) for queue in queues]
        self._ended = threading.Event()
        self._errors: list[BaseException] = []

    def stop(self) -> None:
        """Ask every tracker to end between two batches; safe in a signal handler."""
        for tracker in self.trackers:
            tracker.stop()

    def run(self) -> None:
        """
        Run all trackers until stopped; one that ends with an error ends the others too.

        Raises:
            KmqError: The first error of a tracker.
        """
        threads = [
            threading.Thread(target=self._run_one, args=(tracker,), name=f"kmq-tracker-{tracker.queue}")
            for tracker in self.trackers
        ]
        with serving_metrics(self.trackers, self._settings):
            for thread in threads:
                thread.start()
            for thread in threads:
                # In slices, so that a signal handler of the main thread gets its turn.
                while thread.is_alive():
                    thread.join(0.2)
        if self._errors:
            raise self._errors[0]

    def _run_one(self, tracker: QueueTracker) -> None:
        try:
            tracker.run()
        except BaseException as error:  # noqa: BLE001  # told to the main thread, which raises it
            self._errors.append(error)
            self.stop()
