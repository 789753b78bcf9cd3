"""
Run a handler for each message or batch of a queue, in threads, until stopped.

Rule 1: if a handler returns, its message is acknowledged, unless the handler settled it. If it raises, the message is
released.
Rule 2: a stop releases the messages that no handler has seen, without counting the delivery, and waits for the running
handlers.

Source: dramatiq's worker for the drain; SQS's Java messaging library for "return acknowledges".
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from kmq_spark.consumer.batch import Batch
from kmq_spark.consumer.checks import check_batch, check_bounds, check_handler, is_unstarted_work
from kmq_spark.consumer.handler_queue import HandlerQueue, Window
from kmq_spark.consumer.handling import RunSummary, count_lost, count_settled, handle_batch, refuse_unstarted
from kmq_spark.core.durations import milliseconds
from kmq_spark.errors import KmqError, LeaseLostError, UsageError
from kmq_spark.failpoints import failpoint, is_armed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta
    from types import FrameType

    from kmq_spark.consumer.message import Message
    from kmq_spark.consumer.pipeline import Pipeline

logger = logging.getLogger(__name__)

MAX_FETCH = 2_000
"""Maximum number of messages fetched at once. More at once bring no further gain."""

POLL_S = 0.1
"""Longest wait of the receiving thread, and so the longest delay until it sees a signal."""

ROOM_PAUSE_S = 0.002
"""Pause while there is no room: far shorter than the work in a window, and without noticeable CPU load."""

RETRY_PAUSE_S = 0.5
"""Pause after a retriable error of a receive."""

SWITCH_INTERVAL_S = 0.0005
"""
Python's switch interval during a run: how long a handler thread keeps the interpreter lock while another thread waits
for it. Python's default is 5 ms. The receiving thread needs the lock after each of its broker calls, and with the
default it would wait most of the time.
"""

COLLECT_AFTER = 50_000
"""Threshold of the garbage collector's first generation during a run: the messages of many batches. Default: 700."""


class Worker:
    """One run of a handler. No other code may use *pipeline* during the run; *close* closes the consumer at its end."""

    def __init__(
        self,
        pipeline: Pipeline,
        close: Callable[[], None],
        handler: Callable[[Any], object],
        *,
        max_in_flight: int,
        concurrency: int,
        batch: int | None,
        batch_wait: float | timedelta,
        drain_timeout: float | timedelta,
    ) -> None:
        check_bounds(concurrency=concurrency)
        self._drain_timeout_s = milliseconds("drain_timeout", drain_timeout) / 1000
        self._batch_wait_s = 0.0
        if batch is not None:
            check_batch(batch, max_in_flight)
            self._batch_wait_s = milliseconds("batch_wait", batch_wait) / 1000
        check_handler(handler)
        self._pipeline = pipeline
        self._close = close
        self._handler = _with_failpoints(handler) if is_armed() else handler
        self._batch = batch
        self._delivered_count = 0
        self._delivered_lock = threading.Lock()
        self._window = Window(concurrency, max_in_flight // (batch or 1))
        self._handler_queue: HandlerQueue[Any] = HandlerQueue()
        self._stopping = threading.Event()
        self._fatal_error: BaseException | None = None
        self._counts = [RunSummary() for _ in range(concurrency)]
        work = self._work if batch is None else self._work_batches
        self._threads = [
            threading.Thread(target=work, args=(counts,), name=f"kmq-handler-{number}", daemon=True)
            for number, counts in enumerate(self._counts)
        ]

    def stop(self) -> None:
        """Ask the run to end; returns at once."""
        self._stopping.set()

    def counts(self) -> tuple[int, int]:
        """Return how many messages were passed to handlers so far, and how many were acknowledged."""
        delivered = self._handler_queue.taken_count if self._batch is None else self._delivered_count
        return delivered, sum([counts.acked for counts in self._counts])

    def run(self) -> RunSummary:
        """Receive and handle messages until stopped, then close the consumer; see `QueueConsumer.run`."""
        summary = RunSummary()
        with self._signals(), _tuned_interpreter():
            for thread in self._threads:
                thread.start()
            try:
                while not self._stopping.is_set():
                    self._step()
            finally:
                try:
                    summary.unseen = self._give_back()
                    self._drain()
                finally:
                    self._close()
        for counts in self._counts:
            summary.add(counts)
        if self._fatal_error is not None:
            raise self._fatal_error
        logger.info("run ended: %s", summary, extra={"action": "run_ended"})
        return summary

    def _step(self) -> None:
        """Receive what the handlers have room for, or wait for room."""
        wanted = self._wanted()
        if wanted < 1:
            self._pipeline.serve_group_if_due()
            self._handler_queue.wait_until_empty(ROOM_PAUSE_S)
            return
        try:
            if self._batch is None:
                self._handler_queue.put(self._pipeline.receive(min(wanted, MAX_FETCH), POLL_S, Batch._to_messages))  # noqa: SLF001  # not for handlers
            elif batch := self._pipeline.receive(self._batch, POLL_S, _itself, gather_s=self._batch_wait_s):
                self._handler_queue.put([batch])
        except KmqError as error:
            if not error.retriable:
                raise
            logger.warning("receive failed, retrying: %s", error, extra={"action": "receive_failed"})
            self._stopping.wait(RETRY_PAUSE_S)

    def _wanted(self) -> int:
        """Return how many messages, or batches, may be received now; 0 until half of the window is free."""
        waiting = len(self._handler_queue)
        self._window.measure(self._handler_queue.busy_s(), self._handler_queue.taken_count)
        return 0 if waiting > self._window.size // 2 else self._window.size - waiting

    def _give_back(self) -> int:
        """Release the messages that no handler has seen, without counting the delivery."""
        self._stopping.set()
        unseen: int = sum([each._release_uncounted() for each in self._handler_queue.close()])  # noqa: SLF001  # as above
        try:
            return unseen + self._pipeline.give_back()
        except KmqError as error:
            # Their STARTs are not durable, so their offsets are not committed: another consumer fetches them.
            logger.warning("%s", error, extra={"action": "start_given_up"})
            return unseen

    def _drain(self) -> None:
        until = time.monotonic() + self._drain_timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        running = sum([thread.is_alive() for thread in self._threads])
        if running:
            logger.warning(
                "%d handler(s) still running %g s after the stop; their messages are released",
                running, self._drain_timeout_s, extra={"action": "drain_timed_out"},
            )  # fmt: skip

    def _work(self, counts: RunSummary) -> None:
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
            except BaseException as error:  # noqa: BLE001  # `run` raises again what is no `Exception`
                self._fail(message, counts, error)
                continue
            if result is not None and is_unstarted_work(result):
                self._end(refuse_unstarted(message, result))
                continue
            try:
                message.ack()
            except LeaseLostError as error:
                count_lost(counts, error)
            except UsageError:
                self._settle(message, counts)  # the handler has released or rejected it
            else:
                counts.acked += 1

    def _work_batches(self, counts: RunSummary) -> None:
        """Handle batches until there are no more."""
        while (batch := self._handler_queue.take()) is not None:
            with self._delivered_lock:
                self._delivered_count += len(batch)
            fatal_error = handle_batch(self._handler, batch, counts)
            if fatal_error is not None:
                self._end(fatal_error)

    def _fail(self, message: Message, counts: RunSummary, error: BaseException) -> None:
        if isinstance(error, Exception):
            counts.failed += 1
            logger.error(
                "handler raised an exception for %r", message, exc_info=error, extra={"action": "handler_failed"}
            )
        else:
            self._end(error)
        self._settle(message, counts, error)

    def _end(self, error: BaseException) -> None:
        """End the run with an error, which `run` raises in the thread that called it."""
        self._fatal_error = error
        self.stop()

    def _settle(self, message: Message, counts: RunSummary, error: BaseException | None = None) -> None:
        """Settle the message unless the handler did, and count the result."""
        try:
            verb = message._finish(error)  # noqa: SLF001  # private to the package: not for handlers
        except LeaseLostError as lost:
            count_lost(counts, lost)
            return
        count_settled(counts, verb)

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


def _itself(batch: Batch) -> Batch:
    return batch


@contextlib.contextmanager
def _tuned_interpreter() -> Iterator[None]:
    """
    Shorten the switch interval of threads, and run the garbage collector less often, without what exists now.

    A message is not part of a reference cycle, but every collection that runs during its lifetime scans it. By default
    there is a collection every 700 new objects, and sometimes one of all objects, including all imported modules. With
    a fast handler that took a third of the time. Both settings are of the whole process, and restored at the end.
    """
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(min(interval, SWITCH_INTERVAL_S))
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(thresholds[0], COLLECT_AFTER) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        sys.setswitchinterval(interval)


def _with_failpoints(handler: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a handler with failpoints before and after the call. Used only if a failpoint is armed."""

    def handle(given: Message | Batch) -> object:
        failpoint("consumer.in-handler")
        result = handler(given)
        failpoint("consumer.handled")
        return result

    return handle
