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

import time
from itertools import islice
from typing import TYPE_CHECKING

from kmq_spark.config import plain
from kmq_spark.core.clock import ClockStart
from kmq_spark.core.fold import PartitionState, fold
from kmq_spark.core.markers import MarkerType
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.errors import FencedError, KafkaClientError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.log_reader import LSO_WAIT_S, PAUSE_S, LogReader
from kmq_spark.kafka.settings import reader_config
from kmq_spark.kafka.topics import check_queue
from kmq_spark.tracker.parts import sender_of, ticker_of
from kmq_spark.tracker.stats import TrackerStats
from kmq_spark.wire.marker_log import MarkerLog

if TYPE_CHECKING:
    from confluent_kafka import Message

    from kmq_spark.config import Settings
    from kmq_spark.kafka.positions import ResumePoint
    from kmq_spark.kafka.topics import QueueLayout
    from kmq_spark.tracker.sender.redelivery import RedeliverySender


def track_once(queue: str, settings: Settings) -> TrackerStats:
    """Redeliver or dead-letter the overdue messages of a queue, and return."""
    layout = check_queue(queue, **settings.kafka.reach())
    sender = sender_of(settings, layout)
    is_done = False
    try:
        resume = sender.open()
        if settings.tracker.fail_on_removed_markers:
            resume.check_nothing_removed(layout.topics.markers_topic)
        stats = _Once(sender, layout, resume, settings).run()
        is_done = True
    finally:
        sender.close(is_stopped=is_done)
    return stats


class _Once:
    """One run: folds and sends, from where a rebuild begins to a TICK of its term in each partition."""

    def __init__(self, sender: RedeliverySender, layout: QueueLayout, resume: ResumePoint, settings: Settings) -> None:
        self._sender, self._layout, self._resume, self._settings = sender, layout, resume, settings
        self._states: dict[int, PartitionState] = {}
        self._left: set[int] = set()  # partitions that have no TICK of the term yet
        self._term = 0
        self._stats = TrackerStats()

    def run(self) -> TrackerStats:
        topics, kafka = self._layout.topics, self._settings.kafka
        reading = reader_config(
            kafka.bootstrap_servers, topics.tracker_group, self._sender.tracker_id, plain(kafka.extra)
        )
        reader = LogReader(reading, topics.markers_topic, kafka.timeout)
        positions = dict(self._resume.starting_offsets)
        self._write_ticks()
        until_s = time.monotonic() + LSO_WAIT_S
        try:
            while self._left:
                records = reader.read({partition: positions[partition] for partition in self._left})
                while batch := list(islice(records, self._settings.tracker.max_markers_per_batch)):
                    self._take(batch)
                    until_s = time.monotonic() + LSO_WAIT_S
                positions |= reader.positions
                if self._left and time.monotonic() > until_s:
                    message = (
                        f"cannot read {topics.markers_topic} up to this tracker's TERM: nothing read for "
                        f"{LSO_WAIT_S:g} s, so a transaction is open there; wait until the broker has aborted it"
                    )
                    raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)
                time.sleep(PAUSE_S if self._left else 0)
        finally:
            reader.close()
        return self._stats

    def _write_ticks(self) -> None:
        """Write a TICK of the newest term to every markers partition: there is decided what is overdue by then."""
        self._term, self._left = self._sender.term, set(range(self._layout.partition_count))
        ticker = ticker_of(self._settings, self._layout)
        ticker.begin_term(self._term)
        ticker.start()
        try:
            ticker.wait_first_ticks(self._settings.kafka.timeout)
        finally:
            ticker.stop()

    def _take(self, records: list[Message]) -> None:
        outcomes = []
        for partition in sorted({record.partition() or 0 for record in records}):
            log = MarkerLog(self._layout.topics.markers_topic, partition)
            for record in records:
                if (record.partition() or 0) == partition:
                    log.read(record.offset() or 0, record.timestamp()[1], record.value())
            before = self._states.get(partition)
            if before is None:
                rules, clock = self._resume.rules.get(partition), self._resume.clocks.get(partition, ClockStart())
                before = PartitionState.rebuilding(rules, clock, log.markers)
            result = fold(before, log.markers)
            self._states[partition] = result.state
            outcomes.append(PartitionOutcome(partition, result.status, result.decisions, tuple(log.unreadable)))
            if result.status.term == self._term and any(
                marker is not None and marker.type is MarkerType.TICK and marker.term == self._term
                for _, _, marker in log.markers
            ):
                self._left.discard(partition)
        failpoint("tracker.batch")
        self._stats.add(outcomes, self._sender.deliver(outcomes))
        failpoint("tracker.delivered")
        if self._sender.is_fenced:
            message = f"the tracker of {self._layout.topics} was fenced: another one has the queue; run this again"
            raise FencedError(message)
        if self._sender.term != self._term:
            self._write_ticks()
