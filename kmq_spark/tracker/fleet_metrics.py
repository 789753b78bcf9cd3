"""
The metrics of one process of a fleet: those of the trackers that it runs now, and those of the fleet's group.

Rule 1: a queue has samples in the process that tracks it and in no other, so that sums over the fleet are right.
Rule 2: every process has the group's samples: they show the group as this process reads it.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kmq_spark.errors import UsageError
from kmq_spark.metrics.exposition import MetricsServer
from kmq_spark.metrics.samples import Sample
from kmq_spark.tracker.metrics import TrackerMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kmq_spark.config import Settings
    from kmq_spark.coordination.coordinator import GroupView
    from kmq_spark.metrics.names import Name
    from kmq_spark.metrics.samples import Histogram
    from kmq_spark.tracker.metrics import TrackerView

logger = logging.getLogger(__name__)


class FleetMetrics:
    """
    The metrics of one process.

    Args:
        fleet: Name of the fleet, a label.
        settings: Broker addresses and the interval of the checks.
    """

    def __init__(self, fleet: str, settings: Settings) -> None:
        """Watch nothing yet."""
        self._fleet, self._settings = fleet, settings
        self._lock = threading.Lock()
        self._watched: dict[str, TrackerMetrics] = {}

    def add(self, tracker: TrackerView) -> None:
        """Watch a tracker that is about to start; it takes the place of a former one of its queue."""
        metrics = TrackerMetrics([tracker], self._settings)
        with self._lock:
            former = self._watched.pop(tracker.queue, None)
            self._watched[tracker.queue] = metrics
        if former is not None:
            former.stop()
        threading.Thread(target=metrics.watch, name=f"kmq-metrics-{tracker.queue}", daemon=True).start()

    def remove(self, queue: str) -> None:
        """Watch the tracker of a queue no more."""
        with self._lock:
            metrics = self._watched.pop(queue, None)
        if metrics is not None:
            metrics.stop()

    def stop(self) -> None:
        """Stop the background threads."""
        for queue in list(self._watched):
            self.remove(queue)

    def samples(self, view: Callable[[], GroupView], takeovers: int) -> list[Sample]:
        """
        Return all samples except the histograms.

        Args:
            view: Returns the world of the fleet's group, see `Coordinator.view`.
            takeovers: Queues that this process took over from one that did not release them.
        """
        found = [sample for metrics in self._current() for sample in metrics.samples()]
        try:
            return found + _group_samples(self._fleet, view(), takeovers)
        except UsageError:
            # It has not joined yet, or has left.
            return found

    def lateness(self) -> list[tuple[tuple[str, ...], Histogram]]:
        """Return the histograms of the redeliveries' lateness, by queue label."""
        return [row for metrics in self._current() for row in metrics.lateness()]

    def health(self) -> str:
        """Return the problems of the running trackers; empty if there is none. A standby is healthy."""
        return "; ".join(filter(None, (metrics.health() for metrics in self._current())))

    def _current(self) -> list[TrackerMetrics]:
        with self._lock:
            return list(self._watched.values())


@contextmanager
def serving_fleet_metrics(
    metrics: FleetMetrics, settings: Settings, view: Callable[[], GroupView], takeovers: Callable[[], int]
) -> Iterator[None]:
    """
    Serve the metrics of a fleet's process over HTTP inside a `with` block. Does nothing if no port is set.

    Args:
        metrics: Of this process.
        settings: Port and host of the server.
        view: See `FleetMetrics.samples`.
        takeovers: Returns the number of takeovers.

    Raises:
        ConfigError: `prometheus-client` is not installed, or the server cannot listen on the port.
    """
    if not settings.metrics.port:
        yield
        return
    port, host = settings.metrics.port, settings.metrics.host
    with MetricsServer(
        port, host, lambda: metrics.samples(view, takeovers()), metrics.lateness, metrics.health
    ):  # fmt: skip
        logger.info("metrics on http://%s:%d/metrics", host, port)
        try:
            yield
        finally:
            metrics.stop()


def _group_samples(group: str, view: GroupView, takeovers: int) -> list[Sample]:
    held = sum(bool(view.holder(task)) for task in view.tasks)
    ages_s = [(view.clock_ms - member.seen_ms) / 1000 for member in view.members.values()]
    values: tuple[tuple[Name, float], ...] = (
        ("kmq_group_members", len(view.members)),
        ("kmq_group_silent_members", sum(age_s > view.heartbeat for age_s in ages_s)),
        ("kmq_group_held", held),
        ("kmq_group_unheld", len(view.tasks) - held),
        ("kmq_group_generation", view.generation),
        ("kmq_group_heartbeat_age_seconds", max(ages_s, default=0)),
        ("kmq_group_takeovers_total", takeovers),
    )
    return [Sample(name, (group,), value) for name, value in values]
