"""Run several trackers in one process: one thread each, stopped together, their metrics on one port."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from kmq_spark.errors import SetupError
from kmq_spark.spark.queries import run_together
from kmq_spark.tracker.metrics import serving_metrics
from kmq_spark.tracker.queue_tracker import QueueTracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from kmq_spark.config import Settings


FILES_A_QUEUE, FILES_BESIDE = 80, 150
"""Open files of this process: counted 45 for each queue, with a metrics port 75; most of them pipes and connections."""


class TrackerService:
    """
    The trackers of several queues in one Spark application. Each has its own query, checkpoint and transactional id.

    Attributes:
        trackers: One tracker per queue, in the order of *queues*.
    """

    def __init__(self, spark: SparkSession, queues: Sequence[str], settings: Settings) -> None:
        allow_open_files(len(queues))
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


def allow_open_files(queue_count: int) -> None:
    """Raise this process's limit of open files to what so many queues need. SetupError: the system allows fewer."""
    wanted = FILES_BESIDE + FILES_A_QUEUE * queue_count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        most = max(0, hard - FILES_BESIDE) // FILES_A_QUEUE
        message = (
            f"too many queues for one process: got {queue_count}; expected at most {most} with {hard} open files; "
            "raise the limit (`ulimit -Hn`, LimitNOFILE of systemd), or share the queues among several trackers"
        )
        raise SetupError(message)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
