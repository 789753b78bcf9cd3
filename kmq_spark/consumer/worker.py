"""
Run a handler for each message or batch of a queue, in threads, until stopped.

Rule 1: if a handler returns, its message is acknowledged, unless the handler settled it. If it raises, the message is
released.
Rule 2: while the handlers work on a batch, the next batch is fetched and its STARTs are sent.
Rule 3: a stop releases the messages that no handler has seen, without counting the delivery, and waits for the running
handlers.
Rule 4: a suspect is handled while no other handler runs. The consumer waits for the other handlers for a bounded time.
Rule 5: an exception of a handler is always logged with its traceback, and counted.

Source: dramatiq's worker for the drain; SQS's Java messaging library for "return acknowledges".
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kmq_spark.consumer.checks import check_batch, check_handler, is_unstarted_work
from kmq_spark.consumer.handler_errors import error_text
from kmq_spark.consumer.handler_queue import HandlerQueue, Window
from kmq_spark.consumer.handling import handle_batch
from kmq_spark.consumer.interpreter import short_switch_interval, tuned_gc
from kmq_spark.consumer.leases import Verb
from kmq_spark.core.durations import milliseconds
from kmq_spark.errors import ConfigError, KmqError, LeaseLostError, UsageError
from kmq_spark.failpoints import failpoint, is_armed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta
    from types import FrameType

    from kmq_spark.consumer.batch import Batch
    from kmq_spark.consumer.intake import Intake
    from kmq_spark.consumer.message import Message
    from kmq_spark.consumer.started import StartedBatch

logger = logging.getLogger(__name__)

MAX_BATCH = 2_000
"""Maximum number of messages fetched at once. Larger batches bring no further gain."""

MAX_PENDING_BATCHES = 4
"""Maximum number of batches whose STARTs have no report yet. With more, messages would only be held longer."""

POLL_S = 0.1
"""Longest wait of the receiving thread, and so the longest delay until it sees a signal."""

IDLE_AFTER_S = 1.0
"""After this time without room, the receiving thread pauses its partitions and only serves the consumer group."""

ROOM_PAUSE_S = 0.002
"""Pause while there is no room: far shorter than the work in a window, and without noticeable CPU load."""

RETRY_PAUSE_S = 0.5
"""Pause after a retriable error of a receive."""


@dataclass(slots=True)
class RunSummary:
    """
    Counts of a run.

    Attributes:
        acked: Messages acknowledged.
        released: Messages released after a handler saw them, including those of handlers that raised.
        rejected: Messages rejected, for the dead-letter topic.
        failed: Handler calls that raised an `Exception`.
        lost: Messages settled after their lease had run out.
        unseen: Messages released before any handler saw them.
    """

    acked: int = 0
    released: int = 0
    rejected: int = 0
    failed: int = 0
    lost: int = 0
    unseen: int = 0

    def add(self, other: RunSummary) -> None:
        """Add the counts of *other*."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Worker:
    """
    One run of a handler.

    Args:
        intake: Fetches and starts the messages. No other code may use it during the run.
        close: Closes the consumer; called at the end of the run.
        handler: Called with each message, or with each batch.
        concurrency: Number of handler threads.
        retry_delay_ms: Delay before redelivery after the handler raised, without the queue's backoff.
        drain_timeout_ms: Longest wait for running handlers after a stop. After that, their messages are released while
            the handlers still run.
        max_batch: Maximum number of messages fetched at once.
        batch: Maximum number of messages of a batch, if the handler takes batches.
        batch_wait: Longest time to collect messages for a batch, seconds or a timedelta.
    """

    def __init__(
        self,
        *,
        intake: Intake,
        close: Callable[[], None],
        handler: Callable[[Any], object],
        concurrency: int,
        retry_delay_ms: int = 1_000,
        drain_timeout_ms: int = 20_000,
        max_batch: int = MAX_BATCH,
        batch: int | None = None,
        batch_wait: float | timedelta = 0.0,
    ) -> None:
        """Check the values; `run` starts the threads."""
        _check_least(concurrency=(concurrency, 1), max_batch=(max_batch, 1))
        _check_least(retry_delay_ms=(retry_delay_ms, 0), drain_timeout_ms=(drain_timeout_ms, 0))
        # Checked now: otherwise the first failure of a handler would raise the error, in a handler thread.
        milliseconds("retry_delay_ms", retry_delay_ms / 1000)
        self._batch_wait_s = 0.0
        if batch is not None:
            check_batch(batch, intake.max_in_flight)
            self._batch_wait_s = milliseconds("batch_wait", batch_wait) / 1000
        check_handler(handler)
        self._intake = intake
        self._close = close
        self._handler = _with_failpoints(handler) if is_armed() else handler
        self._max_batch = batch or max_batch
        self._batch = batch
        self._short_since: float | None = None
        self._delivered_count = 0
        self._delivered_lock = threading.Lock()
        self._retry_delay_s = retry_delay_ms / 1000
        self._drain_timeout_s = drain_timeout_ms / 1000
        self._window = Window(concurrency, intake.max_in_flight // (batch or 1))
        self._handler_queue: HandlerQueue[Any] = HandlerQueue()
        self._pending: deque[StartedBatch] = deque()
        self._fetched_at = time.monotonic()
        self._stopping = threading.Event()
        self._fatal_error: BaseException | None = None
        self._counts = [RunSummary() for _ in range(concurrency)]
        work = self._work if batch is None else self._work_batches
        self._threads = [
            threading.Thread(
                target=work,
                args=(counts,),
                name=f"kmq-handler-{number}",
                daemon=True,
            )
            for number, counts in enumerate(self._counts)
        ]

    def stop(self) -> None:
        """Ask the run to end; returns at once."""
        self._stopping.set()

    def delivered_count(self) -> int:
        """Return how many messages were passed to handlers so far."""
        if self._batch is None:
            return self._handler_queue.taken_count
        return self._delivered_count

    def acked_count(self) -> int:
        """Return how many messages were acknowledged so far."""
        return sum([counts.acked for counts in self._counts])

    def run(self) -> RunSummary:
        """
        Receive and handle messages until stopped, then close the consumer.

        Returns:
            Counts of messages by result.

        Raises:
            KmqError: The client failed permanently, or the last markers could not be written.
            UsageError: The handler returned work that has not run yet, such as a coroutine.
            KeyboardInterrupt: A second Ctrl+C arrived before the handlers had ended.
            BaseException: A handler raised something other than an `Exception`, such as `SystemExit`.
        """
        summary = RunSummary()
        with self._signals(), short_switch_interval(), tuned_gc():
            for thread in self._threads:
                thread.start()
            try:
                self._receive_until_stopped()
            finally:
                try:
                    summary.unseen = self._release_undelivered()
                    self._drain()
                finally:
                    self._close()
        for counts in self._counts:
            summary.add(counts)
        if self._fatal_error is not None:
            raise self._fatal_error
        logger.info("run ended: %s", summary, extra={"action": "run_ended"})
        return summary

    def _receive_until_stopped(self) -> None:
        while not self._stopping.is_set():
            try:
                self._step()
            except KmqError as error:
                if not error.retriable:
                    raise
                logger.warning("receive failed, retrying: %s", error, extra={"action": "receive_failed"})
                self._deliver_pending()
                self._stopping.wait(RETRY_PAUSE_S)

    def _deliver_pending(self) -> None:
        """Pass on the batches that were started before a fetch failed. Fetching may fail for longer than a lease."""
        try:
            while self._pending:
                self._handler_queue.put(self._finish_start())
        except KmqError as error:
            logger.warning("%s", error, extra={"action": "start_given_up"})

    def _step(self) -> None:
        """Fetch as room permits. Then pass a durable batch to the handlers, or wait for its STARTs or for room."""
        has_fetched = self._fetch()
        if self._pending:
            if not has_fetched or self._pending[0].is_reported or len(self._pending) >= MAX_PENDING_BATCHES:
                self._handler_queue.put(self._finish_start())
        elif not has_fetched and (self._intake.is_blocked or self._room() < 1):
            self._wait_for_room()

    def _room(self) -> int:
        """Return how many messages may be fetched now; 0 until half of the window is free."""
        self._window.measure(self._handler_queue.busy_s(), self._handler_queue.taken_count)
        pending = sum([len(batch.content) if self._batch is None else 1 for batch in self._pending])
        waiting = len(self._handler_queue) + pending
        if waiting > self._window.size // 2:
            return 0
        room = self._intake.room().max_messages
        return min(self._window.size - waiting, room) if self._batch is None else self._room_of_batch(room)

    def _room_of_batch(self, room: int) -> int:
        """Return the room for a batch. Wait `batch_wait` for that of a whole one: a batch is settled in steps."""
        if room < 1 or room >= self._max_batch:
            self._short_since = None
            return min(room, self._max_batch)
        now = time.monotonic()
        self._short_since = self._short_since or now
        return room if now - self._short_since >= self._batch_wait_s else 0

    def _fetch(self) -> bool:
        room = min(self._room(), self._max_batch)
        if room < 1:
            return False
        # With a pending batch, do not wait here: `_step` waits for its STARTs instead.
        timeout = 0.0 if self._pending else POLL_S
        batch = self._intake.take(room, timeout, gather_s=self._batch_wait_s)
        if not self._intake.is_blocked:
            self._fetched_at = time.monotonic()
        if batch is not None:
            self._pending.append(batch)
        return batch is not None

    def _finish_start(self) -> list[Any]:
        """Return what handlers are called with: messages, or one batch."""
        batch = self._pending[0]
        try:
            self._intake.wait_until_durable(batch)
        except KmqError:
            # The intake has sought back to this batch, so the pending batches are dropped. After other errors, such as
            # a failed fetch, they stay.
            self._pending.clear()
            raise
        self._pending.popleft()
        self._intake.commit(batch)
        content = batch.content
        if self._batch is None:
            return content._to_messages()  # noqa: SLF001  # private to the package: not for handlers
        content._retry_delay = self._retry_delay_s  # noqa: SLF001  # as above
        return [content] if content else []

    def _wait_for_room(self) -> None:
        if time.monotonic() - self._fetched_at > IDLE_AFTER_S:
            self._intake.serve_group()
        if len(self._handler_queue):
            self._handler_queue.wait_until_empty(ROOM_PAUSE_S)
        else:
            # The handlers hold `max_in_flight` messages or bytes: their settlements make room.
            self._stopping.wait(ROOM_PAUSE_S)

    def _release_undelivered(self) -> int:
        """Release the pending and waiting messages that no handler has seen, without counting the delivery."""
        self._stopping.set()
        unseen = self._handler_queue.close()
        try:
            while self._pending:
                unseen += self._finish_start()
        except KmqError as error:
            # Their STARTs are not durable, so their offsets are not committed: another consumer fetches them.
            logger.warning("%s", error, extra={"action": "start_given_up"})
        return sum([each._release_uncounted() for each in unseen])  # noqa: SLF001  # private to the package: not for handlers

    def _drain(self) -> None:
        until = time.monotonic() + self._drain_timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        running = sum([thread.is_alive() for thread in self._threads])
        if running:
            logger.warning(
                "%d handler(s) still running %g s after the stop; their messages are released",
                running,
                self._drain_timeout_s,
                extra={"action": "drain_timed_out"},
            )

    def _work(self, counts: RunSummary) -> None:  # noqa: C901  # function calls would cost more than the branches
        """Handle messages until there are no more. This loop may run a million times a second."""
        handler, pop, take = self._handler, self._handler_queue.pop, self._handler_queue.take
        while True:
            try:
                message = pop()
            except IndexError:
                waited_for = take()
                if waited_for is None:
                    return
                message = waited_for
            try:
                result = handler(message)
            except Exception as error:
                counts.failed += 1
                logger.exception("handler raised an exception for %r", message, extra={"action": "handler_failed"})
                self._settle(message, counts, Verb.RELEASE, error_text(error))
            except BaseException as error:  # noqa: BLE001  # raised again by `run`, in the thread that called it
                self._fatal_error = error
                self.stop()
                self._settle(message, counts, Verb.RELEASE, error_text(error))
            else:
                if result is not None and is_unstarted_work(result):
                    self._abort_run(message, result)
                    continue
                try:
                    message.ack()
                except LeaseLostError as error:
                    _count_lost(counts, error)
                except UsageError:
                    self._settle(message, counts, Verb.ACK)  # the handler has released or rejected it
                else:
                    counts.acked += 1

    def _work_batches(self, counts: RunSummary) -> None:
        """Handle batches until there are no more."""
        while (batch := self._handler_queue.take()) is not None:
            with self._delivered_lock:
                self._delivered_count += len(batch)
            fatal_error = handle_batch(self._handler, batch, counts)
            if fatal_error is not None:
                self._fatal_error = fatal_error
                self.stop()

    def _abort_run(self, message: Message, result: object) -> None:
        """End the run: the handler returned work that has not run yet, so the message is not done."""
        self._fatal_error = UsageError(
            f"handler returned work that has not run: got {type(result).__name__} for {message!r}; pass a function "
            "that finishes its work before it returns, for example `lambda message: asyncio.run(handle(message))`"
        )
        self.stop()
        message._release_uncounted()  # noqa: SLF001  # private to the package: not for handlers
        if inspect.iscoroutine(result) or inspect.isgenerator(result):
            result.close()  # otherwise Python warns that it was never awaited

    def _settle(self, message: Message, counts: RunSummary, default: Verb, error: str = "") -> None:
        """Settle the message unless the handler did, and count the result."""
        try:
            verb = message._finish(default, self._retry_delay_s, error)  # noqa: SLF001  # private to the package
        except LeaseLostError as lost:
            _count_lost(counts, lost)
            return
        if verb is Verb.ACK:
            counts.acked += 1
        elif verb is Verb.RELEASE:
            counts.released += 1
        else:
            counts.rejected += 1

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM. Only in the main thread: Python permits signal handlers nowhere else."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                # None: the previous handler was not set from Python and cannot be restored.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._stopping.is_set():
            raise KeyboardInterrupt
        self.stop()


def _count_lost(counts: RunSummary, error: LeaseLostError) -> None:
    counts.lost += 1
    logger.warning("%s", error, extra={"action": "lease_lost"})


def _with_failpoints(handler: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a handler with failpoints before and after the call. Used only if a failpoint is armed."""

    def handle(given: Message | Batch) -> object:
        failpoint("consumer.in-handler")
        result = handler(given)
        failpoint("consumer.handled")
        return result

    return handle


def _check_least(**bounds: tuple[int, int]) -> None:
    for name, (value, least) in bounds.items():
        if value < least:
            message = f"{name} is smaller than allowed: got {value!r}, minimum {least}; raise {name}"
            raise ConfigError(message)
