"""
Run the tracker of one queue as a service, with Spark and Kafka's client.

Rule 1: this module only connects the parts. The rules are in `core`, the query is in `query.py`, the sending is in
`sender`.
Rule 2: each start of the query begins a new term before its first batch. A batch that Spark runs again decides under an
old term, and the sender drops its decisions.
Rule 3: an outage is retried, at the first start too; the command has checked before that the broker answers. A topic
that is missing or has wrong settings ends the first start at once. Later it is retried: a broker that restarts does not
know its topics for a moment.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from kmq_spark.config import plain
from kmq_spark.errors import KafkaClientError, KmqError, TopicError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.client_errors import UNREACHABLE
from kmq_spark.kafka.lookups import wait_for_broker
from kmq_spark.kafka.topics import check_queue
from kmq_spark.pauses import RateLimit
from kmq_spark.spark.queries import FIRST_PAUSE_S, QUERY_ERRORS, BatchFunction, RestartedQuery
from kmq_spark.spark.session import local_checkpoint_settings, streaming_settings
from kmq_spark.tracker.checkpoint import Checkpoint
from kmq_spark.tracker.fold_rows import FoldSettings
from kmq_spark.tracker.parts import pauser_of, sender_of, ticker_of
from kmq_spark.tracker.progress import SNAPSHOT_LATE_BATCHES, batch_s, batches_since_snapshot, read_to
from kmq_spark.tracker.query import MarkersSource, build_query, read_markers
from kmq_spark.tracker.stats import TrackerStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kmq_spark.config import Settings
    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.kafka.positions import ResumePoint
    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.tracker.pacing import Pauser
    from kmq_spark.tracker.sender.redelivery import RedeliverySender
    from kmq_spark.tracker.sender.sent import Sent
    from kmq_spark.tracker.ticker import Ticker

logger = logging.getLogger(__name__)

FIRST_TICKS_S = 2.0
"""Longest wait for the first TICKs before the query starts, seconds."""

DAMAGED_AFTER = 2
"""So many failures in a row without a batch mean that the checkpoint cannot be used. Rebuilding it is always safe."""

CATCH_UP_LOG_S = 2.0

BLOCKED_AFTER_S = 30.0
"""
A tracker that reads nothing for this time before it is ready is blocked: by a transaction that is open, or that Kafka
ended without an end marker (KAFKA-20734). Transactions of kmq-spark are shorter, or time out.
"""

STUCK_AFTER_S = 300.0
"""A tracker whose batches read no TICK for this time is in trouble, ready or not: one batch never takes as long."""

WARN_INTERVAL_S = 60.0

TOPIC_CHECK_S = 30.0
"""How often a running tracker checks what it checks at its start: that the topics exist, fit and are the same ones."""

_LOOK_S = 0.05


class QueueTracker(RestartedQuery):
    """
    The tracker of one queue.

    Attributes:
        gives_way_s: How long this tracker pauses after each batch, so that another one can start sooner, seconds.
            Redelivery from this queue is later by as much. A pause ends when this becomes shorter than it.
        on_batch: Called after each batch with its outcomes and what was sent; None for no call.
    """

    def __init__(self, spark: SparkSession, queue: str, settings: Settings) -> None:
        super().__init__(f"tracker of {queue}", queue, settings.tracker.restart_limit)
        self._spark = spark
        self._settings = settings
        self._checkpoint = f"{settings.tracker.checkpoint_dir.rstrip('/')}/{queue}"
        self._ready = threading.Event()
        self._own_ids: set[str] = set()
        self._failures_without_batch = 0
        self._run: _Run | None = None
        self._snapshot_warning_limit = RateLimit(WARN_INTERVAL_S)
        self._topic_check = RateLimit(TOPIC_CHECK_S)
        self.snapshot_lag = 0
        self.stats = TrackerStats()
        self.gives_way_s = 0.0
        self.on_batch: Callable[[Sequence[PartitionOutcome], Sent], None] | None = None

    @property
    def queue(self) -> str:
        """Name of the queue, or `queue@subscription`."""
        return self._queue

    @property
    def committed_at_s(self) -> float:
        """Time of the last offset commit, epoch seconds on this host's clock; 0 before the first."""
        return 0.0 if self._run is None else self._run.sender.committed_at_epoch_s

    @property
    def tick_late_s(self) -> float | None:
        """For how long a TICK has been due that is not in the log, seconds; None before the first start."""
        return None if self._run is None else self._run.ticker.late_s()

    @property
    def batch_s(self) -> float | None:
        """Duration of the newest batch without its pause, seconds; None before the first batch."""
        run = self._run
        return None if run is None or run.query is None else batch_s(run.query, run.pauses_s)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the TERM of this tracker is read in every partition; return whether it was within the time."""
        return self._ready.wait(timeout_s)

    @contextlib.contextmanager
    def open(self) -> Iterator[StreamingQuery]:
        """Take over the queue, and start the query."""
        began_s = time.monotonic()
        layout = check_queue(self._queue, **self._settings.kafka.reach())
        self._topic_check.allows()  # not again at once
        # Before the sender is opened: the ticker's client needs half a second until it can write, and redelivery is
        # away from the moment at which the older tracker is fenced.
        ticker = ticker_of(self._settings, layout)
        sender = sender_of(self._settings, layout)
        is_done = False
        try:
            sender.trouble = super().trouble()
            resume = sender.open(self._own_ids)
            self._own_ids.add(sender.tracker_id)
            checkpoint = Checkpoint(self._checkpoint, self._spark)
            if self._failures_without_batch == DAMAGED_AFTER:
                checkpoint.rename()
                self._failures_without_batch += 1  # not again: what fails with an empty one as well is no damage
            checkpoint.prepare(resume, layout.topics, must_be_whole=self._settings.tracker.fail_on_removed_markers)
            logger.info(
                "tracker %s of %s started: reads markers from %s",
                sender.tracker_id, self._queue, dict(resume.starting_offsets),
                extra={"action": "opened", "queue": self._queue},
            )  # fmt: skip
            with contextlib.ExitStack() as stack:
                pauser = pauser_of(self._settings, layout.topics, ticker)
                stack.callback(pauser.close)
                ticker.begin_term(sender.term)
                stack.callback(ticker.stop)
                ticker.start()
                if self._is_endless:
                    # With the first TICKs in the log the first batch decides; without them the second one does.
                    with contextlib.suppress(KafkaClientError):
                        ticker.wait_first_ticks(FIRST_TICKS_S)
                else:
                    ticker.wait_first_ticks(self._settings.kafka.timeout)
                run = self._run = _Run(sender, ticker, pauser, began_s)
                run.batch_function = BatchFunction(lambda *batch: self._deliver(run, *batch))
                stack.callback(run.batch_function.close)
                query = run.query = self._start_query(layout.topics, resume, run.batch_function)
                ticker.periodic_work = lambda: self._tend(run, query)
                yield query
                is_done = True
        finally:
            sender.close(is_stopped=is_done)

    def trouble(self) -> str:
        """As `RestartedQuery.trouble`, and whether no batch of Spark ends though there is something to read."""
        unread_s = 0.0 if self._run is None else self._run.ticker.unread_s()
        if unread_s < STUCK_AFTER_S:
            return super().trouble()
        return (
            f"has read no marker for {unread_s:.0f} s though there are some: a batch of Spark does not end, or a "
            "transaction is open in the markers topic"
        )

    def is_final(self, error: Exception) -> bool:
        """Return whether a restart cannot correct a failure."""
        if isinstance(error, TopicError):
            return self._run is None
        if not isinstance(error, KmqError):
            self._failures_without_batch += 1
        return super().is_final(error)

    def cause_of(self, error: Exception) -> str:
        """As `RestartedQuery.cause_of`; of a disk that is full, the folder and what is free."""
        cause, folder = super().cause_of(error), self._settings.tracker.checkpoint_dir
        if re.search("No space left|quota", cause) and local_checkpoint_settings(folder):
            with contextlib.suppress(OSError):
                disk = shutil.disk_usage(urlparse(folder).path)
                cause += f"; checkpoint folder {folder}: {disk.free >> 20} of {disk.total >> 20} MiB free"
        return cause

    def helper_failure(self) -> Exception | None:
        """Return the failure of the batch function, the ticker or the periodic work."""
        return None if self._run is None else self._run.failure()

    def before_stop(self) -> None:
        """End a pause, and wait until the running batch has sent what it decided. No batch sends anything after it."""
        if self._run is not None:
            self._run.ticker.end_pauses()
            self._run.batch_function.close()

    def pause(self, pause_s: float, error: Exception) -> None:
        """Wait, but only until the broker is back, so that redelivery does not wait longer."""
        self.stopping.wait(FIRST_PAUSE_S)
        is_unreachable = isinstance(error, KafkaClientError) and error.code in UNREACHABLE
        wait_for_broker(
            self.stopping, pause_s - FIRST_PAUSE_S, is_unreachable=is_unreachable, **self._settings.kafka.reach()
        )

    @property
    def _is_endless(self) -> bool:
        return self._settings.tracker.trigger != "available-now"

    def _start_query(self, topics: QueueTopics, resume: ResumePoint, deliver: BatchFunction) -> StreamingQuery:
        tracker, kafka = self._settings.tracker, self._settings.kafka
        files = local_checkpoint_settings(tracker.checkpoint_dir, self._spark)
        for key, value in (streaming_settings(tracker.state_partitions, len(tracker.queues)) | files).items():
            self._spark.conf.set(key, value)
        source = MarkersSource(
            bootstrap_servers=kafka.bootstrap_servers,
            topic=topics.markers_topic,
            starting_offsets=resume.starting_offsets,
            group_id_prefix=f"{topics.tracker_group}.source",
            max_markers_per_batch=tracker.max_markers_per_batch,
            extra=plain(kafka.spark_extra),
            fail_on_removed=tracker.fail_on_removed_markers,
            tasks=tracker.state_partitions,
        )
        trigger: dict[str, object] = {"processingTime": "0 seconds"} if self._is_endless else {"availableNow": True}
        writer = build_query(
            read_markers(self._spark, source),
            FoldSettings(topics.markers_topic, rules_at_start=resume.rules, clock_at_start=resume.clocks),
            deliver,
            query_name=f"kmq-tracker-{self._queue}",
            checkpoint=self._checkpoint,
            trigger=trigger,
        )
        return writer.start()

    def _deliver(self, run: _Run, batch_id: int, outcomes: list[PartitionOutcome]) -> None:
        if run.first_batch < 0:
            run.first_batch = batch_id
        # The ticker first: the time of the next TICK does not depend on what this batch sends.
        run.ticker.observe(outcomes)
        run.pauser.observe(outcomes)
        failpoint("tracker.batch")
        sent = run.sender.deliver(outcomes)
        failpoint("tracker.delivered")
        run.ticker.begin_term(run.sender.term)
        self.stats.add(outcomes, sent)
        if self.on_batch is not None:
            self.on_batch(outcomes, sent)
        self._failures_without_batch = 0
        run.catch_up.observe(self._queue, outcomes, run.sender.unread)
        if not run.sender.unread:
            self._ready.set()
        run.ticker.batch_ends()
        if sent.redelivered or sent.dead_lettered or sent.expired:
            logger.info(
                "batch %d of %s: %d redelivered, %d dead-lettered, %d expired",
                batch_id, self._queue, sent.redelivered, sent.dead_lettered, sent.expired,
                extra={"action": "redelivered", "queue": self._queue},
            )  # fmt: skip
        self._pause_after(run, batch_id)

    def _pause_after(self, run: _Run, batch_id: int) -> None:
        """
        Pause while nothing is due, to leave the processor to other processes.

        Without a pause batch follows batch, since consumers write markers all the time.
        """
        ended_s = time.monotonic()
        if not run.sender.unread and self._is_endless:
            while time.monotonic() - ended_s < self.gives_way_s and not self.stopping.wait(_LOOK_S):
                pass
            run.pauser.pause(ended_s - run.batch_began_s)
        run.batch_began_s = time.monotonic()
        # Keep two: Spark's newest progress report may be of this batch or of the one before it.
        before_s = run.pauses_s.get(batch_id - 1, 0.0)
        run.pauses_s = {batch_id - 1: before_s, batch_id: run.batch_began_s - ended_s}

    def _tend(self, run: _Run, query: StreamingQuery) -> None:
        """Do the periodic work that must not wait for a batch. A failure is kept, since an idle queue has no batch."""
        try:
            run.sender.trouble = super().trouble()
            run.sender.snapshot_lag = self.snapshot_lag = batches_since_snapshot(query, run.first_batch)
            if self.snapshot_lag > SNAPSHOT_LATE_BATCHES and self._snapshot_warning_limit.allows():
                logger.warning(
                    "the state of %s has had no snapshot for %d batches: Spark cannot upload one to %s; the query will "
                    "fail after about 860 batches; check the log of the Spark driver and the file system",
                    self._queue, self.snapshot_lag, self._checkpoint,
                    extra={"action": "snapshot_late", "queue": self._queue},
                )  # fmt: skip
            if self._topic_check.allows():
                # A broker that does not answer is noticed elsewhere.
                with contextlib.suppress(KafkaClientError):
                    check_queue(self._queue, **self._settings.kafka.reach())
                    run.sender.check_queue_topic()
            run.sender.tend(read_to(query))
            run.ticker.begin_term(run.sender.term)
            if run.sender.unread:
                run.catch_up.warn_if_blocked(self._queue, is_idle=not query.status["isTriggerActive"])
        except Exception as error:  # noqa: BLE001  # the ticker's thread: `_wait_for_end` raises it in the tracker's thread
            run.tending_failure = error


class _Run:
    """One start of the query, with its parts."""

    def __init__(self, sender: RedeliverySender, ticker: Ticker, pauser: Pauser, began_s: float) -> None:
        self.sender, self.ticker, self.pauser = sender, ticker, pauser
        self.batch_function: BatchFunction
        self.query: StreamingQuery | None = None
        self.catch_up = _CatchUp(began_s)
        self.tending_failure: Exception | None = None
        self.first_batch = -1
        self.batch_began_s = time.monotonic()
        self.pauses_s: dict[int, float] = {}

    def failure(self) -> Exception | None:
        """Return what failed beside Spark; None if nothing did."""
        if isinstance(in_batch := self.batch_function.failure, KmqError):
            return in_batch
        failure = self.tending_failure or self.ticker.failure
        if failure is None or isinstance(failure, QUERY_ERRORS):
            return failure
        error = KafkaClientError(
            f"the ticker failed: got {type(failure).__name__}: {failure}; restarting the tracker",
            code="_FAIL",
            retriable=True,
        )
        error.__cause__ = failure
        return error


class _CatchUp:
    """Logs how a starting tracker reads the markers below its TERM, and warns where no more of them can be read."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._read: dict[int, int] = {}
        self._in_flight: dict[int, int] = {}
        self._moved_s = self._observed_s = time.monotonic()
        self._is_over = False
        self._log_limit, self._blocked_limit = RateLimit(CATCH_UP_LOG_S), RateLimit(WARN_INTERVAL_S)
        self._log_limit.allows()  # the first line comes an interval after the start

    def observe(self, queue: str, outcomes: Sequence[PartitionOutcome], unread: frozenset[int]) -> None:
        """Note a batch, and log it if that is due."""
        before = dict(self._read)
        for outcome in outcomes:
            self._read[outcome.marker_partition] = outcome.status.next_marker_offset
            self._in_flight[outcome.marker_partition] = outcome.status.in_flight
        self._observed_s = time.monotonic()
        if self._read != before:
            self._moved_s = self._observed_s
        in_flight = sum(self._in_flight.values())
        if unread and self._log_limit.allows():
            logger.info(
                "tracker of %s is catching up: %d partitions left to read before it decides anything, read so far to "
                "%s, %s messages in flight",
                queue, len(unread), self._read, f"{in_flight:,}", extra={"action": "catching_up", "queue": queue},
            )  # fmt: skip
        elif not unread and not self._is_over:
            self._is_over = True
            logger.info(
                "tracker of %s is ready: %s in flight, took %.1f s",
                queue, f"{in_flight:,}", time.monotonic() - self._began_s, extra={"action": "ready", "queue": queue},
            )  # fmt: skip

    def warn_if_blocked(self, queue: str, *, is_idle: bool) -> None:
        """Warn if no marker was read for a long time. A batch that runs (not *is_idle*) may take long."""
        waited_s = time.monotonic() - self._moved_s
        is_in_first_batch_since = not is_idle and self._observed_s <= self._moved_s
        if waited_s < BLOCKED_AFTER_S or is_in_first_batch_since or not self._blocked_limit.allows():
            return
        logger.warning(
            "tracker of %s decides nothing: it cannot read its TERM, and has read nothing for %d s after %s; a "
            "transaction is open there, or Kafka wrote no end marker for it; see docs/operations.md, 'A transaction "
            "hangs'",
            queue, waited_s, self._read, extra={"action": "blocked", "queue": queue},
        )  # fmt: skip
