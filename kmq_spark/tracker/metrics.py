"""
The metrics of the trackers of one process: what they folded, and what a periodic check of the topics finds.

Rule 1: A scrape reads stored values. A background thread sends the requests to the broker, however often Prometheus
scrapes.
Rule 2: Metrics never fail a tracker: a value that cannot be read is left out, with a log line once a minute.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import KmqError, WireError
from kmq_spark.inspection.facts import HEARTBEAT_LATE_MS
from kmq_spark.inspection.inspector import QueueInspector
from kmq_spark.kafka.payloads import PayloadReader
from kmq_spark.metrics.exposition import MetricsServer
from kmq_spark.metrics.samples import Sample, TrackerNumbers, queue_labels, samples_of
from kmq_spark.pauses import RateLimit
from kmq_spark.wire.codec import decode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kmq_spark.config import Settings
    from kmq_spark.coordination.coordinator import GroupView
    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.metrics.names import Name
    from kmq_spark.metrics.samples import Histogram
    from kmq_spark.tracker.sender.sent import Sent

logger = logging.getLogger(__name__)

WARN_INTERVAL_S = 60.0

LOOK_INTERVAL_S = 10.0
"""How often the topics are looked at for what the tracker does not fold: ready, lag, dead letters."""


class TrackerView(Protocol):
    """The part of a tracker that the metrics use."""

    on_batch: Callable[[Sequence[PartitionOutcome], Sent], None] | None
    snapshot_lag: int

    @property
    def queue(self) -> str:
        """Name of the queue, or `queue@subscription`."""

    @property
    def committed_at_s(self) -> float:
        """Time of the tracker's last offset commit, epoch seconds; 0 before the first."""

    @property
    def tick_late_s(self) -> float | None:
        """For how long a TICK has been due that is not in the log, seconds; None before the first start."""

    @property
    def batch_s(self) -> float | None:
        """Duration of the newest batch without its pause, seconds; None before the first batch."""

    def trouble(self) -> str:
        """Return what the last failure was, until a batch has been committed after it; empty where all is well."""


class TrackerMetrics:
    """
    The metrics of several trackers.

    A process of a fleet adds and removes them: a queue has samples in the process that tracks it and in no other, so
    that sums over the fleet are right.
    """

    def __init__(
        self, trackers: Sequence[TrackerView], settings: Settings, more: Callable[[], list[Sample]] = list
    ) -> None:
        self._settings, self._more = settings, more
        self._lock = threading.Lock()
        self._trackers: dict[str, TrackerView] = {}
        self._numbers: dict[str, TrackerNumbers] = {}
        self._labels: dict[str, str] = {}
        self._stopping = threading.Event()
        self._warning_limit = RateLimit(WARN_INTERVAL_S)
        self._starts: dict[tuple[str, int], tuple[int, float | None]] = {}
        for tracker in trackers:
            self.add(tracker)

    def add(self, tracker: TrackerView) -> None:
        """Watch a tracker that is about to start; it takes the place of a former one of its queue."""
        numbers = TrackerNumbers()
        with self._lock:
            self._trackers[tracker.queue], self._numbers[tracker.queue] = tracker, numbers
            self._labels = queue_labels(list(self._trackers))
        tracker.on_batch = self._batch_callback(numbers)

    def remove(self, queue: str) -> None:
        """Watch the tracker of a queue no more."""
        with self._lock:
            self._trackers.pop(queue, None)
            self._numbers.pop(queue, None)
            self._labels = queue_labels(list(self._trackers))

    def samples(self) -> list[Sample]:
        """Return all samples except the histogram."""
        found = self._more()
        with self._lock:
            for tracker in self._trackers.values():
                numbers = self._numbers[tracker.queue]
                numbers.committed_at_s, numbers.batch_s = tracker.committed_at_s, tracker.batch_s
                numbers.tick_late_s, numbers.snapshot_lag = tracker.tick_late_s, tracker.snapshot_lag
                numbers.is_failing = bool(tracker.trouble())
                found += samples_of(self._labels[tracker.queue], numbers, time.time())
        return found

    def lateness(self) -> list[tuple[tuple[str, ...], Histogram]]:
        """Return the histogram of the redeliveries' lateness, by queue label."""
        with self._lock:
            return [((self._labels[queue],), numbers.lateness) for queue, numbers in self._numbers.items()]

    def health(self) -> str:
        """Return what is wrong, such as a tracker that does not commit; empty where all trackers run."""
        now_s = time.time()
        found = []
        with self._lock:
            trackers = list(self._trackers.values())
        for tracker in trackers:
            late_s = now_s - tracker.committed_at_s
            if trouble := tracker.trouble():
                found.append(f"tracker of {tracker.queue}: {trouble}")
            elif not tracker.committed_at_s:
                found.append(f"tracker of {tracker.queue} has not started")
            elif late_s > HEARTBEAT_LATE_MS / 1000:
                found.append(f"tracker of {tracker.queue} has not committed for {late_s:.0f} s")
            elif (tracker.tick_late_s or 0.0) > HEARTBEAT_LATE_MS / 1000:
                found.append(f"tracker of {tracker.queue} cannot write TICKs for {tracker.tick_late_s:.0f} s")
        return "; ".join(found)

    def watch(self) -> None:
        """Check the topics periodically until `stop`."""
        inspectors: dict[str, QueueInspector] = {}
        try:
            while not self._stopping.is_set():
                with self._lock:
                    queues = set(self._trackers)
                for queue in inspectors.keys() - queues:
                    inspectors.pop(queue).close()
                for queue in queues:
                    try:
                        if queue not in inspectors:
                            inspectors[queue] = self._inspector(queue)
                        self.check_topics(queue, inspectors[queue])
                    except KmqError as error:
                        self._warn(queue, error)
                self._stopping.wait(LOOK_INTERVAL_S)
        finally:
            for inspector in inspectors.values():
                inspector.close()

    def stop(self) -> None:
        """Request that `watch` ends."""
        self._stopping.set()

    def check_topics(self, queue: str, inspector: QueueInspector) -> None:
        """Read from the topics the numbers that the tracker does not know, and store them."""
        numbers = self._numbers.get(queue)
        if numbers is None:  # removed a moment ago
            return
        view = inspector.look(with_markers=False)
        with self._lock:
            statuses = dict(numbers.statuses)
        markers = view.markers_topic
        lags = {
            partition: inspector.backlog(markers.name, {partition: status.next_marker_offset}, markers.end).count
            for partition, status in statuses.items()
        }
        oldest_s = self._oldest_start_s(
            queue, inspector, {p: s.needed_marker_offset for p, s in statuses.items() if s.in_flight}
        )
        with self._lock:
            numbers.ready, numbers.dead_letters = view.ready.count, view.dead_letters.count
            numbers.lags = lags
            oldest_at_ms = view.ready.oldest_at_ms
            numbers.oldest_ready_at_s = None if oldest_at_ms is None else oldest_at_ms / 1000
            numbers.oldest_in_flight_at_s = oldest_s

    def _batch_callback(self, numbers: TrackerNumbers) -> Callable[[Sequence[PartitionOutcome], Sent], None]:
        def add(outcomes: Sequence[PartitionOutcome], sent: Sent) -> None:
            with self._lock:
                numbers.add(outcomes, sent.lateness_ms)

        return add

    def _inspector(self, queue: str) -> QueueInspector:
        return QueueInspector(queue, **self._settings.kafka.reach())

    def _oldest_start_s(self, queue: str, inspector: QueueInspector, needed: dict[int, int]) -> float | None:
        """
        Return when the oldest message in flight was started, epoch seconds; None where none is known.

        That is the append time of the oldest START that is still needed. *needed* is its offset by markers partition.
        """
        wanted = {p: [offset] for p, offset in needed.items() if self._starts.get((queue, p), (-1, None))[0] != offset}
        if wanted:
            topic, timeout = inspector.topics.markers_topic, self._settings.kafka.timeout
            reader = PayloadReader(inspector.reader_config, topic, timeout)
            try:
                for found in reader.read(wanted):
                    is_start = found.message is not None and _is_lease(found.message.value())
                    at_s = found.message.timestamp()[1] / 1000 if found.message is not None and is_start else None
                    self._starts[queue, found.partition] = (found.offset, at_s)
            finally:
                reader.close()
        known = [self._starts[queue, partition][1] for partition in needed]
        return min((at_s for at_s in known if at_s is not None), default=None)

    def _warn(self, queue: str, error: KmqError) -> None:
        if self._warning_limit.allows():
            logger.warning(
                "metrics of %s are not up to date: %s", queue, error, extra={"action": "metrics", "queue": queue}
            )


@contextmanager
def serving_metrics(
    trackers: Sequence[TrackerView], settings: Settings, more: Callable[[], list[Sample]] = list
) -> Iterator[TrackerMetrics | None]:
    """Serve the metrics of trackers over HTTP inside a `with` block; yield None, and do nothing, if no port is set."""
    if not settings.metrics.port:
        yield None
        return
    metrics = TrackerMetrics(trackers, settings, more)
    with MetricsServer(settings.metrics.port, settings.metrics.host, metrics.samples, metrics.lateness, metrics.health):
        logger.info("metrics on http://%s:%d/metrics", settings.metrics.host, settings.metrics.port)
        thread = threading.Thread(target=metrics.watch, name="kmq-metrics", daemon=True)
        thread.start()
        try:
            yield metrics
        finally:
            metrics.stop()
            thread.join(1.0)  # it may wait for a broker that is away


def fleet_samples(name: str, view: GroupView) -> list[Sample]:
    """Return the samples of a fleet's coordination group, as this process reads it: every process has them."""
    held = sum(bool(view.holder(task)) for task in view.tasks)
    ages_s = [(view.clock_ms - member.seen_ms) / 1000 for member in view.members.values()]
    values: tuple[tuple[Name, float], ...] = (
        ("kmq_group_members", len(view.members)),
        ("kmq_group_silent_members", sum(age_s > view.heartbeat for age_s in ages_s)),
        ("kmq_group_held", held),
        ("kmq_group_unheld", len(view.tasks) - held),
        ("kmq_group_generation", view.generation),
        ("kmq_group_heartbeat_age_seconds", max(ages_s, default=0)),
    )
    return [Sample(metric, (name,), value) for metric, value in values]


def _is_lease(value: bytes | None) -> bool:
    """Return whether a marker is a START that is not a deferral: an old deferral is no sign of a problem."""
    try:
        marker = decode_marker(value)
    except WireError:
        return False
    return marker.type is MarkerType.START and not marker.never_handed_out
