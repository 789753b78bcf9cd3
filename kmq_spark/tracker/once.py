"""
Run the tracker once, without Spark: write a TICK, read the markers that are needed, decide, send, exit.

This is for environments without a long-running Spark job (serverless jobs, cron). It reads the same markers as a
tracker that has lost its checkpoint: from the oldest marker that is still needed.

Rule 1: It uses the rules, the sender and the clock of the streaming tracker. It is a tracker like any other: it fences
the others, and they fence it.
Rule 2: Its only stored state is the offsets of the tracker's consumer group and their metadata, in Kafka. It reads and
writes no checkpoint.
Rule 3: It has at most `max_markers_per_batch` markers in memory at a time.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from kmq_spark.config import plain
from kmq_spark.core.clock import ClockStart
from kmq_spark.core.fold import PartitionState, fold
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.log_reader import read_committed
from kmq_spark.kafka.settings import reader_config
from kmq_spark.kafka.topics import check_queue
from kmq_spark.tracker.parts import rules_of, sender_of, ticker_of
from kmq_spark.tracker.stats import TrackerStats
from kmq_spark.wire.marker_log import MarkerLog

if TYPE_CHECKING:
    from confluent_kafka import Message

    from kmq_spark.config import Settings
    from kmq_spark.core.policy import Rules
    from kmq_spark.kafka.positions import ResumePoint
    from kmq_spark.kafka.topics import QueueLayout
    from kmq_spark.tracker.sender.redelivery import RedeliverySender

logger = logging.getLogger(__name__)


def track_once(queue: str, settings: Settings) -> TrackerStats:
    """
    Redeliver or dead-letter the overdue messages of a queue, and return.

    Args:
        queue: Name of the queue, or `queue@subscription`.
        settings: All settings. Those in `[tracker]` about Spark and its checkpoint are not used.

    Returns:
        What was done; all of it is committed.

    Raises:
        FencedError: A newer tracker of this queue has taken over.
        TopicError: A topic is missing or has wrong settings.
        KmqError: Retention removed markers before they were read, or the broker does not answer; run it again.
    """
    layout = check_queue(queue, **settings.kafka.reach())
    sender = sender_of(settings, queue, layout)
    is_done = False
    try:
        resume = sender.open()
        if settings.tracker.fail_on_removed_markers:
            resume.check_nothing_removed(layout.topics.markers_topic)
        _write_ticks(settings, layout)
        stats = _fold_and_send(sender, layout, resume, settings, rules_of(settings, queue))
        is_done = True
    finally:
        sender.close(is_stopped=is_done)
    return stats


def _write_ticks(settings: Settings, layout: QueueLayout) -> None:
    """Write a TICK to every markers partition, at which messages that are overdue on the broker's clock are decided."""
    ticker = ticker_of(settings, layout)
    ticker.start()
    try:
        ticker.wait_first_ticks(settings.kafka.timeout)
    finally:
        ticker.stop()


def _fold_and_send(
    sender: RedeliverySender, layout: QueueLayout, resume: ResumePoint, settings: Settings, rules: Rules
) -> TrackerStats:
    stats, topics, kafka = TrackerStats(), layout.topics, settings.kafka
    reading = reader_config(kafka.bootstrap_servers, topics.tracker_group, sender.tracker_id, plain(kafka.extra))
    states: dict[int, PartitionState] = {}
    partitions, starts = range(layout.partition_count), resume.starting_offsets
    records = read_committed(reading, topics.markers_topic, partitions, kafka.timeout, starts=starts, patience_s=0)
    while batch := list(islice(records, settings.tracker.max_markers_per_batch)):
        outcomes = []
        for partition in sorted({_partition(record) for record in batch}):
            partition_rules = replace(rules, decide_from_marker_offset=resume.decide_from.get(partition, 0))
            partition_records = [record for record in batch if _partition(record) == partition]
            log = MarkerLog(topics.markers_topic, partition)
            for record in partition_records:
                log.read(record.offset() or 0, record.timestamp()[1], record.value())
            before = states.get(partition)
            if before is None:
                rules_at_start, clock = resume.rules.get(partition), resume.clocks.get(partition, ClockStart())
                before = PartitionState.rebuilding(rules_at_start, clock, log.markers)
            states[partition], outcome = _fold_partition(log, before, partition_rules)
            outcomes.append(outcome)
        failpoint("tracker.batch")
        stats.add(outcomes, sender.deliver(outcomes))
        failpoint("tracker.delivered")
    return stats


def _fold_partition(log: MarkerLog, before: PartitionState, rules: Rules) -> tuple[PartitionState, PartitionOutcome]:
    """Fold the markers of one partition, as the tracker's state function does; return the new state and the outcome."""
    result = fold(before, log.markers, rules)
    outcome = PartitionOutcome(log.marker_partition, result.status, result.decisions, tuple(log.unreadable))
    return result.state, outcome


def _partition(record: Message) -> int:
    return record.partition() or 0
