"""
Run the tracker of one queue as a service, with Spark and Kafka's client.

Rule 1: This module only connects and supervises the parts. The rules are in `core`, the query is in `query.py`, the
sending is in `sender`.
Rule 2: A failed query is started again here, with backoff and a limit. Each start opens a new sender, so the tracker
decides nothing before it has read the log to its end.
Rule 3: A checkpoint that cannot be read is renamed, and the state is rebuilt from the markers topic.
Rule 4: A fenced tracker ends and is not started again: a newer tracker has the queue.
Rule 5: An error at the first start (no broker, a topic with wrong settings) is raised at once. After a successful start
the same error is retried: a broker that restarts does not know its topics for a moment.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.base import StreamingQueryException

from kmq_spark.config import plain
from kmq_spark.errors import FencedError, KafkaClientError, KmqError, TopicError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.client_errors import UNREACHABLE
from kmq_spark.kafka.lookups import wait_for_broker
from kmq_spark.kafka.topics import check_queue
from kmq_spark.pauses import RateLimit
from kmq_spark.spark.callbacks import Callback
from kmq_spark.spark.queries import is_stop_timeout, one_line
from kmq_spark.spark.restarts import FIRST_BACKOFF_S, restart_backoff_s
from kmq_spark.spark.session import local_checkpoint_settings, streaming_settings
from kmq_spark.tracker.catch_up import CatchUp
from kmq_spark.tracker.checkpoint_folder import CheckpointFolder
from kmq_spark.tracker.checkpoints import is_damaged, is_of_another_topic, prepare
from kmq_spark.tracker.fold_rows import FoldSettings
from kmq_spark.tracker.parts import (
    pauser_of,
    rules_of,
    rules_reader_of,
    sender_of,
    ticker_of,
)
from kmq_spark.tracker.progress import SNAPSHOT_LATE_BATCHES, batch_s, batches_since_snapshot, read_to
from kmq_spark.tracker.query import MarkersSource, build_query, read_markers
from kmq_spark.tracker.stats import TrackerStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kmq_spark.config import Settings
    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.kafka.positions import ResumePoint
    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.tracker.pacing import Pauser
    from kmq_spark.tracker.query import DeliverBatch
    from kmq_spark.tracker.sender.redelivery import RedeliverySender
    from kmq_spark.tracker.sender.sent import Sent
    from kmq_spark.tracker.ticker import Ticker

logger = logging.getLogger(__name__)

_JVM_CONNECTION_ERRORS = (Py4JNetworkError, ConnectionError)
"""What py4j raises when the JVM does not answer. Kafka's client raises neither."""

_JVM_IS_LOST = "lost the connection to Spark's JVM"

SNAPSHOT_WARN_INTERVAL_S = 60.0

FIRST_TICKS_S = 2.0
"""Longest wait for the first TICKs before the query starts, seconds."""

_LOOK_S = 0.05

STOP_WAIT_S = 10.0
"""How long a stop waits for the end of the query after Spark has stopped it."""


class _BatchRefusedError(Exception):
    """A batch began while its query was being stopped."""


class QueueTracker:
    """
    The tracker of one queue.

    Args:
        spark: Session. The tracker sets the streaming settings on it.
        queue: Name of the queue, or `queue@subscription` for one of its groups.
        settings: All settings.

    Attributes:
        snapshot_lag: Batches since the last uploaded snapshot of the state.
        stats: What the tracker has done since the process started.
        gives_way_s: How long this tracker pauses after each batch, so that another one can start sooner, seconds.
            Redelivery from this queue is later by as much. A pause ends when this becomes shorter than it.
        on_batch: Called after each batch with its outcomes and what was sent; None for no call.
    """

    def __init__(self, spark: SparkSession, queue: str, settings: Settings) -> None:
        """Store the settings; `run` does the work."""
        self._spark = spark
        self._settings = settings
        self._queue = queue
        self._checkpoint = f"{settings.tracker.checkpoint_dir.rstrip('/')}/{queue}"
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._batch_lock = threading.Lock()
        self._refuses_batches = False
        self._failure: BaseException | None = None
        self._periodic_work_failure: Exception | None = None
        self._failures_in_a_row = 0
        self._known_ids: frozenset[str] = frozenset()
        self._own_ids: set[str] = set()
        self._batch_began_s = time.monotonic()
        self._pauses_s: dict[int, float] = {}
        self._query: StreamingQuery | None = None
        self._sender: RedeliverySender | None = None
        self._ticker: Ticker | None = None
        self._first_batch = -1
        self._snapshot_warning_limit = RateLimit(SNAPSHOT_WARN_INTERVAL_S)
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
        return 0.0 if self._sender is None else self._sender.committed_at_epoch_s

    @property
    def tick_late_s(self) -> float | None:
        """For how long a TICK has been due that is not in the log, seconds; None before the first start."""
        return None if self._ticker is None else self._ticker.late_s()

    @property
    def batch_s(self) -> float | None:
        """Duration of the newest batch without its pause, seconds; None before the first batch."""
        return None if self._query is None else batch_s(self._query, self._pauses_s)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the markers of before the start are read; return whether it was within *timeout_s* seconds."""
        return self._ready.wait(timeout_s)

    def stop(self) -> None:
        """Request that `run` ends. What the running batch has decided is sent first."""
        self._stopping.set()

    def run(self) -> None:
        """
        Run until `stop` is called. With the trigger `available-now`: until all existing markers are processed.

        Raises:
            FencedError: A newer tracker of this queue has taken over.
            TopicError: A topic is missing or has wrong settings.
            KmqError: The query failed more often in a row than `restart_limit` allows, or with an error that a restart
                cannot correct.
        """
        while not self._stopping.is_set():
            try:
                self._run_once()
            except FencedError:
                raise
            except (KmqError, PySparkException, Py4JError, ConnectionError) as error:
                if self._stopping.is_set():
                    logger.warning("tracker of %s failed while stopping: %s", self._queue, _stop_failure(error))
                    return
                self._failures_in_a_row += 1
                if not self._is_transient(error) or self._failures_in_a_row > self._settings.tracker.restart_limit:
                    raise self._final_error(error) from error.__cause__
                if is_damaged(error) or is_of_another_topic(error):
                    CheckpointFolder(self._checkpoint, self._spark).rename_damaged()
                self._back_off(error)
            else:
                return

    def _is_transient(self, error: Exception) -> bool:
        """Return whether the error may be transient, so that a restart may help."""
        if isinstance(error, KafkaClientError):
            return error.retriable and bool(self._known_ids)
        if isinstance(error, TopicError):
            return bool(self._known_ids)
        if isinstance(error, KmqError):
            return error.retriable
        return not isinstance(error, _JVM_CONNECTION_ERRORS)

    def _final_error(self, error: Exception) -> KmqError:
        """Return the error to raise when the tracker ends. Log the original error at level DEBUG."""
        logger.debug("the tracker of %s ends with an error", self._queue, exc_info=error)
        if isinstance(error, KmqError):
            return error
        if isinstance(error, _JVM_CONNECTION_ERRORS):
            return KmqError(f"{_JVM_IS_LOST}: got {one_line(error)}; restart the tracker")
        return KmqError(
            f"the streaming query of {self._queue} failed {self._failures_in_a_row} times in a row: got "
            f"{one_line(error)}; fix the cause and restart the tracker; no message is lost or sent twice"
        )

    def _back_off(self, error: Exception) -> None:
        backoff_s = restart_backoff_s(self._failures_in_a_row)
        self.stats.restarts += 1
        logger.warning(
            "tracker of %s failed; restarting in %g s (restart %d of %d): %s",
            self._queue, backoff_s, self._failures_in_a_row, self._settings.tracker.restart_limit, one_line(error),
            extra={"action": "restart", "queue": self._queue},
        )  # fmt: skip
        self._stopping.wait(FIRST_BACKOFF_S)
        # End the backoff as soon as the broker is back, so that redelivery does not wait longer.
        is_unreachable = isinstance(error, KafkaClientError) and error.code in UNREACHABLE
        wait_for_broker(
            self._stopping,
            backoff_s - FIRST_BACKOFF_S,
            is_unreachable=is_unreachable,
            **self._settings.kafka.reach(),
        )

    def _run_once(self) -> None:
        """Open the sender, start the ticker, run the query until it ends."""
        began_s = time.monotonic()
        layout = check_queue(self._queue, **self._settings.kafka.reach())
        reader = rules_reader_of(self._settings, self._queue, layout)
        # Before the sender is opened: the ticker's client needs half a second until it can write, and redelivery is
        # away from the moment at which the older tracker is fenced.
        ticker = ticker_of(self._settings, layout)
        sender = sender_of(self._settings, self._queue, layout, reader)
        self._sender = sender
        is_done = False
        try:
            resume = sender.open(self._known_ids)
            self._known_ids |= sender.known_ids
            self._own_ids.add(sender.tracker_id)
            self._prepare_checkpoint(resume, sender)
            logger.info(
                "tracker %s of %s started; decides from marker offsets %s",
                sender.tracker_id, self._queue, json.dumps(dict(resume.decide_from)),
                extra={"action": "opened", "queue": self._queue},
            )  # fmt: skip
            self._ticker = ticker
            pauser = pauser_of(self._settings, self._queue, layout.topics, ticker)
            self._track(sender, ticker, pauser, resume, began_s)
            is_done = True
        finally:
            sender.close(is_stopped=is_done)

    def _prepare_checkpoint(self, resume: ResumePoint, sender: RedeliverySender) -> None:
        folder = CheckpointFolder(self._checkpoint, self._spark)
        prepare(
            folder,
            resume,
            sender.topics,
            must_be_whole=self._settings.tracker.fail_on_removed_markers,
            has_query_ended=self._has_own_query_ended(folder),
        )
        folder.write_topic_id(resume.topic_id)
        folder.write_tracker_id(sender.tracker_id)

    def _has_own_query_ended(self, folder: CheckpointFolder) -> bool:
        """Return whether a query of this object used the checkpoint last and has ended: none uses it now."""
        return folder.tracker_id() in self._own_ids and self._query is not None and not self._query.isActive

    def _track(
        self, sender: RedeliverySender, ticker: Ticker, pauser: Pauser, resume: ResumePoint, began_s: float
    ) -> None:
        self._failure = self._periodic_work_failure = None
        self._refuses_batches = False
        self._first_batch = -1
        ticker.start()
        try:
            if self._settings.tracker.trigger == "available-now":
                ticker.wait_first_ticks(self._settings.kafka.timeout)
            else:
                # With the first TICKs in the log the first batch decides; without them the second one does.
                with contextlib.suppress(KafkaClientError):
                    ticker.wait_first_ticks(FIRST_TICKS_S)
            catch_up = CatchUp(self._queue, resume.decide_from, began_s)
            deliver = Callback(self._deliver_function(sender, ticker, pauser, catch_up))
            try:
                query = self._query = self._start_query(sender.topics, resume, deliver)
                ticker.periodic_work = lambda: self._do_periodic_work(sender, query, catch_up)
                self._wait_for_end(query, ticker)
            finally:
                deliver.forget()
        finally:
            ticker.stop()
            pauser.close()

    def _start_query(self, topics: QueueTopics, resume: ResumePoint, deliver: DeliverBatch) -> StreamingQuery:
        tracker, kafka = self._settings.tracker, self._settings.kafka
        files = local_checkpoint_settings(tracker.checkpoint_dir, self._spark)
        for key, value in (streaming_settings(tracker.state_partitions) | files).items():
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
        fold_settings = FoldSettings(
            markers_topic=topics.markers_topic,
            local_rules=rules_of(self._settings, self._queue),
            decide_from=dict(resume.decide_from),
            rules_at_start=resume.rules,
            clock_at_start=resume.clocks,
        )
        trigger: dict[str, object] = (
            {"availableNow": True}
            if tracker.trigger == "available-now"
            else {"processingTime": f"{tracker.trigger_interval_ms} milliseconds"}
        )
        writer = build_query(
            read_markers(self._spark, source),
            fold_settings,
            deliver,
            query_name=f"kmq-tracker-{self._queue}",
            checkpoint=self._checkpoint,
            trigger=trigger,
        )
        return writer.start()

    def _deliver_function(
        self, sender: RedeliverySender, ticker: Ticker, pauser: Pauser, catch_up: CatchUp
    ) -> DeliverBatch:
        def deliver(batch_id: int, outcomes: list[PartitionOutcome]) -> None:
            with self._batch_lock:
                if self._refuses_batches:
                    message = f"batch {batch_id} of {self._queue} is not sent: the query is being stopped"
                    raise _BatchRefusedError(message)
                if self._first_batch < 0:
                    self._first_batch = batch_id
                try:
                    # The ticker first: the time of the next TICK does not depend on what this batch sends.
                    ticker.observe(outcomes)
                    pauser.observe(outcomes)
                    failpoint("tracker.batch")
                    sent = sender.deliver(outcomes)
                    failpoint("tracker.delivered")
                except BaseException as error:
                    # Spark wraps the text of this exception in a Java exception: keep the original.
                    self._failure = error
                    raise
                self.stats.add(outcomes, sent)
                if self.on_batch is not None:
                    self.on_batch(outcomes, sent)
                catch_up.observe(outcomes)
                self._failures_in_a_row = 0
                if catch_up.is_over:
                    self._ready.set()
            ticker.batch_ends()
            if sent.redelivered or sent.dead_lettered or sent.expired:
                logger.info(
                    "batch %d of %s: %d redelivered, %d dead-lettered, %d expired",
                    batch_id, self._queue, sent.redelivered, sent.dead_lettered, sent.expired,
                    extra={"action": "redelivered", "queue": self._queue},
                )  # fmt: skip
            self._pause_after(batch_id, pauser, catch_up)

        return deliver

    def _pause_after(self, batch_id: int, pauser: Pauser, catch_up: CatchUp) -> None:
        """
        Pause while nothing is due, to leave the processor to other processes.

        Without a pause batch follows batch, since consumers write markers all the time.
        """
        ended_s = time.monotonic()
        if catch_up.is_over and self._settings.tracker.trigger != "available-now":
            while time.monotonic() - ended_s < self.gives_way_s and not self._stopping.wait(_LOOK_S):
                pass
            pauser.pause(ended_s - self._batch_began_s)
        self._batch_began_s = time.monotonic()
        # Keep two: Spark's newest progress report may be of this batch or of the one before it.
        before_s = self._pauses_s.get(batch_id - 1, 0.0)
        self._pauses_s = {batch_id - 1: before_s, batch_id: self._batch_began_s - ended_s}

    def _do_periodic_work(self, sender: RedeliverySender, query: StreamingQuery, catch_up: CatchUp) -> None:
        """
        Do the periodic work that must not wait for a batch: look for rules, commit the positions.

        An idle queue has no batch that would report a failure, so a failure is kept, and `_wait_for_end` raises it.
        """
        try:
            sender.refresh_rules()
            sender.snapshot_lag = self.snapshot_lag = batches_since_snapshot(query, self._first_batch)
            self._warn_if_snapshot_is_late()
            sender.commit_read_to(read_to(query))
            if not catch_up.is_over:
                catch_up.warn_if_blocked(is_idle=not query.status["isTriggerActive"])
        except Exception as error:  # noqa: BLE001  # the ticker's thread: `_wait_for_end` raises it in the tracker's thread
            self._periodic_work_failure = error

    def _warn_if_snapshot_is_late(self) -> None:
        if self.snapshot_lag > SNAPSHOT_LATE_BATCHES and self._snapshot_warning_limit.allows():
            logger.warning(
                "the state of %s has had no snapshot for %d batches: Spark cannot upload one to %s; the query will "
                "fail after about 860 batches; check the log of the Spark driver and the file system",
                self._queue, self.snapshot_lag, self._checkpoint,
                extra={"action": "snapshot_late", "queue": self._queue},
            )  # fmt: skip

    def _wait_for_end(self, query: StreamingQuery, ticker: Ticker) -> None:
        """Wait for the end of the query. Stop it after `stop`, or when a helper thread failed."""
        try:
            while query.isActive and not self._stopping.is_set() and self._helper_failure(ticker) is None:
                self._stopping.wait(0.1)
            if query.isActive:
                self._stop_query(query, ticker)
            query.awaitTermination(int(STOP_WAIT_S))
        except StreamingQueryException as error:
            if isinstance(self._failure, KmqError):
                raise self._failure from error
            # A batch that was refused ends the query with an error. It is read again after the next start.
            if not self._refuses_batches:
                raise
        if (failure := self._helper_failure(ticker)) is not None:
            raise failure

    def _helper_failure(self, ticker: Ticker) -> Exception | None:
        """Return the failure of the ticker or of the periodic work; None if there is none. A restart replaces both."""
        failure = self._periodic_work_failure or ticker.failure
        if failure is None or isinstance(failure, (KmqError, PySparkException, Py4JError, ConnectionError)):
            return failure
        helper_error = KafkaClientError(
            f"the ticker of {self._queue} failed: got {type(failure).__name__}: {failure}; restarting the tracker",
            code="_FAIL",
            retriable=True,
        )
        helper_error.__cause__ = failure
        return helper_error

    def _stop_query(self, query: StreamingQuery, ticker: Ticker) -> None:
        """
        Stop the query as soon as the running batch has sent what it decided; do not wait for the end of a batch.

        On a busy queue batch follows batch, so a wait for a moment between two batches could take seconds.
        """
        # A batch that pauses has sent everything.
        ticker.end_pauses()
        # From here on no batch sends, so a batch that `query.stop()` interrupts has sent nothing. The lock is free
        # while the query stops: a batch that waited for it would keep Spark waiting until its time-out.
        with self._batch_lock:
            self._refuses_batches = True
        query.stop()


def _stop_failure(error: Exception) -> str:
    """Return what failed while the tracker stopped, in one line."""
    if is_stop_timeout(error):
        return "Spark did not end the running batch in time; the next tracker runs it again"
    if isinstance(error, _JVM_CONNECTION_ERRORS):
        return f"{_JVM_IS_LOST}: {one_line(error)}"
    return one_line(error)
