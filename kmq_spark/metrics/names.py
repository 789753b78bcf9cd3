"""
The metrics: name, kind, labels and meaning. The code, the tests and the documentation use this one table.

Rule 1: Values have base units, and counters end in `_total`. The labels are `queue`, `partition`, `reason` and
`component`, never a message id.
Rule 2: The number of label values is bounded for any queue; see the bounds below.

Source: prometheus.io, "Metric and label naming"; RabbitMQ and SQS for the choice of metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal[
    "kmq_messages_ready",
    "kmq_messages_in_flight",
    "kmq_decisions_unconfirmed",
    "kmq_oldest_in_flight_age_seconds",
    "kmq_oldest_ready_age_seconds",
    "kmq_deliveries_total",
    "kmq_acks_total",
    "kmq_redeliveries_total",
    "kmq_dead_lettered_total",
    "kmq_dlq_depth",
    "kmq_redelivery_lateness_seconds",
    "kmq_tracker_batch_duration_seconds",
    "kmq_tracker_state_bytes",
    "kmq_tracker_marker_lag",
    "kmq_markers_unreadable_total",
    "kmq_markers_untrusted_total",
    "kmq_starts_nonexistent_total",
    "kmq_tracker_last_commit_timestamp_seconds",
    "kmq_tracker_batches_since_snapshot",
    "kmq_tracker_tick_delay_seconds",
    "kmq_queue_full",
    "kmq_producer_messages_total",
    "kmq_producer_uncommitted",
    "kmq_producer_last_commit_timestamp_seconds",
]

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """
    One metric.

    Attributes:
        kind: Metric kind of Prometheus.
        labels: Names of the labels.
        meaning: Help text, one line.
    """

    kind: Kind
    labels: tuple[str, ...]
    meaning: str


METRICS: dict[Name, Metric] = {
    "kmq_messages_ready": Metric("gauge", ("queue",), "Messages that no consumer has started."),
    "kmq_messages_in_flight": Metric(
        "gauge", ("queue", "partition"), "Messages started and not ended, those that wait for their time included."
    ),
    "kmq_decisions_unconfirmed": Metric(
        "gauge", ("queue", "partition"), "Messages decided whose END was not read back; stays up where sending fails."
    ),
    "kmq_oldest_in_flight_age_seconds": Metric(
        "gauge",
        ("queue",),
        "Age of the oldest lease; absent where nothing is in flight, or where it waits for its time.",
    ),
    "kmq_oldest_ready_age_seconds": Metric(
        "gauge", ("queue",), "Age of the oldest message that no consumer has started; absent where there is none."
    ),
    "kmq_deliveries_total": Metric(
        "counter", ("queue", "component"), "Messages handed out: by the log (tracker), by this process (worker)."
    ),
    "kmq_acks_total": Metric(
        "counter", ("queue", "component"), "Messages acknowledged: by the log (tracker), by this process (worker)."
    ),
    "kmq_redeliveries_total": Metric(
        "counter", ("queue", "reason"), "Messages sent again: lease_over, or given_back (released, deferred)."
    ),
    "kmq_dead_lettered_total": Metric(
        "counter", ("queue", "reason"), "Dead letters: delivery_limit, rejected, expired, unreadable (no marker)."
    ),
    "kmq_dlq_depth": Metric("gauge", ("queue",), "Dead letters neither redriven nor purged."),
    "kmq_redelivery_lateness_seconds": Metric(
        "histogram",
        ("queue",),
        "Append time of the message sent again, less its deadline; broker's clock on both sides.",
    ),
    "kmq_tracker_batch_duration_seconds": Metric("gauge", ("queue",), "How long the newest batch took."),
    "kmq_tracker_state_bytes": Metric("gauge", ("queue",), "Size of the folded state, over all markers partitions."),
    "kmq_tracker_marker_lag": Metric("gauge", ("queue", "partition"), "Markers that the tracker has not folded."),
    "kmq_markers_unreadable_total": Metric("counter", ("queue",), "Records of the markers topic that are no markers."),
    "kmq_markers_untrusted_total": Metric(
        "counter", ("queue",), "Markers that only a tracker writes, without a signature of the queue: ignored."
    ),
    "kmq_starts_nonexistent_total": Metric(
        "counter", ("queue",), "Started and taken out again: at or past the end of the queue topic is no message."
    ),
    "kmq_tracker_last_commit_timestamp_seconds": Metric(
        "gauge", ("queue",), "When the tracker last committed, by its host's clock: every five seconds, idle or not."
    ),
    "kmq_tracker_batches_since_snapshot": Metric(
        "gauge", ("queue",), "Batches since a snapshot of the state was uploaded; the query fails at some 860."
    ),
    "kmq_tracker_tick_delay_seconds": Metric(
        "gauge", ("queue",), "For how long something is due and no TICK was written; 0 where none is missing."
    ),
    "kmq_queue_full": Metric(
        "gauge", ("queue",), "1 while a markers partition holds more than `max_in_flight` and consumers fetch nothing."
    ),
    "kmq_producer_messages_total": Metric(
        "counter", ("queue",), "Messages that this producer with an id has committed."
    ),
    "kmq_producer_uncommitted": Metric("gauge", ("queue",), "Messages given to this producer and not committed."),
    "kmq_producer_last_commit_timestamp_seconds": Metric(
        "gauge", ("queue",), "When this producer last committed, by its host's clock; its start counts as one."
    ),
}

MAX_QUEUES = 500
"""Maximum number of queues with a label of their own; all others share the label `other`."""

MAX_PARTITIONS = 64
"""Maximum number of partitions with a label of their own; a queue with more has one label `all`."""

OTHER_QUEUE, ALL_PARTITIONS = "other", "all"

LATENESS_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 1.0, 2.0, 5.0, 15.0, 30.0, 60.0, 300.0)
"""Seconds. The targets are 0.3 at the median and 0.6 at the 99th percentile; a restart takes up to 30."""
