"""
The metrics of one tracker as samples. The module is pure, so that tests need no server.

Rule 1: Gauges and message counters come from the folded state, not from what this process has seen: process counters
drift when another process finishes the work. Reasons and lateness are counted in the process and start at 0 with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.core.policy import DecisionAction
from kmq_spark.metrics.names import ALL_PARTITIONS, LATENESS_BUCKETS, MAX_PARTITIONS, MAX_QUEUES, OTHER_QUEUE, Name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.core.state import Status


DEAD_REASONS = ("delivery_limit", "rejected", "expired")


class Sample(NamedTuple):
    """One value of a metric."""

    name: Name
    labels: tuple[str, ...]
    value: float


@dataclass(slots=True)
class Histogram:
    """Number of observations by bucket of `LATENESS_BUCKETS`, those above the last bound at the end, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENESS_BUCKETS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(LATENESS_BUCKETS, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return each upper bound with the cumulative count, as Prometheus defines it."""
        found, so_far = [], 0
        for bound, count in zip((*map(str, LATENESS_BUCKETS), "+Inf"), self.counts, strict=True):
            so_far += count
            found.append((bound, float(so_far)))
        return found


@dataclass(slots=True)
class TrackerNumbers:
    """
    The values from which the metrics of one queue's tracker are computed; None if unknown.

    `redelivered` and `dead_lettered` count messages by reason since the process started. Instants are epoch seconds,
    those of messages and STARTs are append times.
    """

    statuses: dict[int, Status] = field(default_factory=dict)
    redelivered: Counter[str] = field(default_factory=lambda: Counter(lease_over=0, given_back=0))
    dead_lettered: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(DEAD_REASONS, 0)))
    lateness: Histogram = field(default_factory=Histogram)
    committed_at_s: float = 0.0
    batch_s: float | None = None
    tick_late_s: float | None = None
    snapshot_lag: int | None = None
    is_failing: bool = False
    lags: Mapping[int, int] = field(default_factory=dict)
    ready: int | None = None
    oldest_ready_at_s: float | None = None
    oldest_in_flight_at_s: float | None = None
    dead_letters: int | None = None

    def add(self, outcomes: Sequence[PartitionOutcome], lateness_ms: Iterable[int]) -> None:
        """Count the decisions of one completed batch."""
        for outcome in outcomes:
            self.statuses[outcome.marker_partition] = outcome.status
            decisions = outcome.decisions
            columns = (decisions.action, decisions.is_silent, decisions.message_count)
            for action, is_silent, count, reason in zip(
                *(column.tolist() for column in columns), decisions.reasons, strict=True
            ):
                if action == DecisionAction.REDELIVER:
                    self.redelivered["lease_over" if is_silent else "given_back"] += count
                else:
                    self.dead_lettered[dead_reason(reason)] += count
        for late_ms in lateness_ms:
            self.lateness.observe(late_ms / 1000)


def dead_reason(text: str) -> str:
    """Return the kind of a dead letter's reason, one of a few fixed words: the text itself may come from a handler."""
    if text.startswith("delivery limit reached"):
        return "delivery_limit"
    return "expired" if text.startswith("expired") else "rejected"


def queue_labels(queues: Sequence[str]) -> dict[str, str]:
    """Return the label of each queue: its name, or `other` for queues beyond `MAX_QUEUES`."""
    return {queue: queue if number < MAX_QUEUES else OTHER_QUEUE for number, queue in enumerate(queues)}


def samples_of(queue: str, numbers: TrackerNumbers, now_s: float) -> Iterator[Sample]:
    """Yield the samples of one tracker, without the histogram; *queue* is the label."""
    statuses, counters = numbers.statuses, Counter[str]()
    for status in statuses.values():
        counters.update(status.counters)
    in_flight = {partition: status.in_flight for partition, status in statuses.items()}
    unconfirmed = {partition: status.marked for partition, status in statuses.items()}
    yield from _by_partition("kmq_messages_in_flight", queue, in_flight)
    yield from _by_partition("kmq_decisions_unconfirmed", queue, unconfirmed)
    yield from _by_partition("kmq_tracker_marker_lag", queue, numbers.lags)
    yield Sample("kmq_deliveries_total", (queue, "tracker"), counters["started"] + counters["renewed"])
    yield Sample("kmq_acks_total", (queue, "tracker"), counters["acked"])
    yield Sample("kmq_markers_unreadable_total", (queue,), counters["unreadable"])
    yield Sample("kmq_tracker_state_bytes", (queue,), sum(status.state_bytes for status in statuses.values()))
    for reason, count in numbers.redelivered.items():
        yield Sample("kmq_redeliveries_total", (queue, reason), count)
    for reason, count in numbers.dead_lettered.items():
        yield Sample("kmq_dead_lettered_total", (queue, reason), count)
    known = (
        ("kmq_messages_ready", numbers.ready),
        ("kmq_dlq_depth", numbers.dead_letters),
        ("kmq_oldest_ready_age_seconds", _age(numbers.oldest_ready_at_s, now_s)),
        ("kmq_oldest_in_flight_age_seconds", _age(numbers.oldest_in_flight_at_s, now_s)),
        ("kmq_tracker_batch_duration_seconds", numbers.batch_s),
        ("kmq_tracker_last_commit_timestamp_seconds", numbers.committed_at_s or None),
        ("kmq_tracker_tick_delay_seconds", numbers.tick_late_s),
        ("kmq_tracker_failing", numbers.is_failing),
        ("kmq_tracker_batches_since_snapshot", numbers.snapshot_lag),
    )
    for name, value in known:
        if value is not None:
            yield Sample(name, (queue,), value)


def _by_partition(name: Name, queue: str, values: Mapping[int, int]) -> Iterator[Sample]:
    if len(values) > MAX_PARTITIONS:
        yield Sample(name, (queue, ALL_PARTITIONS), sum(values.values()))
        return
    for partition, value in sorted(values.items()):
        yield Sample(name, (queue, str(partition)), value)


def _age(at_s: float | None, now_s: float) -> float | None:
    return None if at_s is None else max(0.0, now_s - at_s)
