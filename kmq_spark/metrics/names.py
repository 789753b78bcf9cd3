"""
The metrics: name, kind, labels and meaning. The code, the tests and the documentation use this one table.

Rule 1: Values have base units, and counters end in `_total`. The labels are `queue`, `partition`, `reason`, `error`,
`component` and `group` (of a fleet), never a message id.
Rule 2: The number of label values is bounded for any queue; see the bounds below.

Source: prometheus.io, "Metric and label naming"; RabbitMQ and SQS for the choice of metrics.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Name = str
"""A key of `METRICS`."""


class Metric(NamedTuple):
    """Kind of a metric in Prometheus, the names of its labels, and its help text, one line."""

    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    meaning: str


METRICS: dict[Name, Metric] = {
    "kmq_messages_ready": Metric("gauge", ("queue",), "Messages that no consumer has started."),
    "kmq_messages_in_flight": Metric(
        "gauge", ("queue", "partition"), "Messages started and not ended, deferred messages included."
    ),
    "kmq_decisions_unconfirmed": Metric(
        "gauge",
        ("queue", "partition"),
        "Messages decided whose END was not read back yet; stays above 0 while sending fails.",
    ),
    "kmq_oldest_in_flight_age_seconds": Metric(
        "gauge",
        ("queue",),
        "Age of the oldest lease; absent if nothing is in flight, or if the oldest is a deferral.",
    ),
    "kmq_oldest_ready_age_seconds": Metric(
        "gauge", ("queue",), "Age of the oldest message that no consumer has started; absent if there is none."
    ),
    "kmq_deliveries_total": Metric(
        "counter",
        ("queue", "component"),
        "Messages handed out: according to the log (tracker), or by this process (worker).",
    ),
    "kmq_acks_total": Metric(
        "counter",
        ("queue", "component"),
        "Messages acknowledged: according to the log (tracker), or by this process (worker).",
    ),
    "kmq_messages_held": Metric("gauge", ("queue",), "Messages that the runs of this process hold (worker)."),
    "kmq_leases_lost_total": Metric(
        "counter", ("queue",), "Messages that this process settled after their lease had run out (worker)."
    ),
    "kmq_handler_duration_seconds": Metric(
        "histogram", ("queue",), "Duration of the calls of a handler, those that raise included (worker)."
    ),
    "kmq_handler_failures_total": Metric(
        "counter",
        ("queue", "error"),
        "Calls of a handler that raised or ended its process (`ProcessOverError`), by exception (worker).",
    ),
    "kmq_redeliveries_total": Metric(
        "counter", ("queue", "reason"), "Messages redelivered: lease_over, or given_back (released, deferred)."
    ),
    "kmq_dead_lettered_total": Metric(
        "counter",
        ("queue", "reason"),
        "Dead letters: delivery_limit, rejected, expired.",
    ),
    "kmq_dlq_depth": Metric("gauge", ("queue",), "Dead letters that were neither redriven nor purged."),
    "kmq_redelivery_lateness_seconds": Metric(
        "histogram",
        ("queue",),
        "Append time of the redelivered message minus its deadline; both on the broker's clock.",
    ),
    "kmq_tracker_batch_duration_seconds": Metric("gauge", ("queue",), "Duration of the latest batch."),
    "kmq_tracker_state_bytes": Metric("gauge", ("queue",), "Size of the folded state of all markers partitions."),
    "kmq_tracker_marker_lag": Metric("gauge", ("queue", "partition"), "Markers that the tracker has not folded yet."),
    "kmq_markers_unreadable_total": Metric(
        "counter", ("queue",), "Records of the markers topic that are not valid markers."
    ),
    "kmq_tracker_last_commit_timestamp_seconds": Metric(
        "gauge",
        ("queue",),
        "Time of the tracker's last commit, clock of its host; it commits every five seconds, also when idle.",
    ),
    "kmq_tracker_failing": Metric("gauge", ("queue",), "1 while its query fails, until a batch succeeds; else 0."),
    "kmq_tracker_batches_since_snapshot": Metric(
        "gauge",
        ("queue",),
        "Batches since the last snapshot of the state was uploaded; the query fails after about 860.",
    ),
    "kmq_tracker_tick_delay_seconds": Metric(
        "gauge", ("queue",), "How long messages have been due without a TICK in the log; 0 if no TICK is missing."
    ),
    "kmq_group_members": Metric(
        "gauge", ("group",), "Members of the fleet's coordination group, those that stand by included."
    ),
    "kmq_group_silent_members": Metric(
        "gauge",
        ("group",),
        "Members without a heartbeat for more than T, by the group's clock: their holds are over; free at 2T.",
    ),
    "kmq_group_held": Metric("gauge", ("group",), "Queues that a process of the fleet holds."),
    "kmq_group_unheld": Metric(
        "gauge", ("group",), "Queues of the fleet that no process holds: they are redelivered by none."
    ),
    "kmq_group_generation": Metric(
        "gauge",
        ("group",),
        "Offset of the record that last changed the members; each change is a join, an end or a death.",
    ),
    "kmq_group_heartbeat_age_seconds": Metric(
        "gauge", ("group",), "Age of the oldest heartbeat of a member, by the group's clock; a member is dropped at 2T."
    ),
}

MAX_QUEUES = 500
"""Maximum number of queues with a label of their own; all others share the label `other`."""

MAX_PARTITIONS = 64
"""Maximum number of partitions with a label of their own; a queue with more has one label `all`."""

OTHER_QUEUE, ALL_PARTITIONS = "other", "all"

HANDLER_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0, 3_600.0)
"""Seconds."""

LATENESS_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 1.0, 2.0, 5.0, 15.0, 30.0, 60.0, 300.0)
"""Seconds. The targets are 0.3 at the median and 0.6 at the 99th percentile; a restart takes up to 30."""
