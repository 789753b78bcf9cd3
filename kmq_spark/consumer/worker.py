"""
Run a handler over a queue's messages, in threads, until stopped.

Rule 1: a handler that returns acknowledges, unless it settled the message itself; one that raises releases.
Rule 2: the next batch is fetched, and its START under way, while this one is worked on.
Rule 3: a stop gives back what no handler has seen, uncounted, and waits for the handlers that run.
Rule 4: a suspect is handled while no other handler runs; others are let finish for it, for a bounded time.
Rule 5: no exception of a handler is swallowed: it is logged with its traceback and counted.

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
from typing import TYPE_CHECKING

from kmq_spark.consumer.checks import check_handler, is_deferred
from kmq_spark.consumer.handler_errors import error_text
from kmq_spark.consumer.handler_queue import HandOver, Window
from kmq_spark.consumer.interpreter import short_switches, spared_collector
from kmq_spark.consumer.leases import Verb
from kmq_spark.errors import ConfigError, KmqError, LeaseLostError, UsageError
from kmq_spark.failpoints import failpoint, is_armed
from kmq_spark.kafka.durations import milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from kmq_spark.consumer.batch import Batch
    from kmq_spark.consumer.intake import Intake
    from kmq_spark.consumer.message import Message

logger = logging.getLogger(__name__)

MAX_BATCH = 2_000
"""Most messages fetched at once; larger ones no longer help."""

MAX_BATCHES_UNDER_WAY = 4
"""Batches whose STARTs are under way; more would only be held longer."""

POLL_S = 0.1
"""Longest wait of the receiving thread: a signal is seen this late at most."""

IDLE_AFTER_S = 1.0
"""Without room for this long, the receiving thread pauses its partitions and serves the group alone."""

ROOM_PAUSE_S = 0.002
"""Pause while there is no room: far below the work that a window holds, and no load on the machine."""

RETRY_PAUSE_S = 0.5
"""Pause after a receive that failed and may be made again."""


@dataclass(slots=True)
class RunSummary:
    """
    What a run has done, in messages.

    Attributes:
        acked: Acknowledged.
        released: Given back after a handler saw them, those of handlers that raised included.
        rejected: Sent to the dead-letter topic.
        failed: Handlers that raised.
        lost: Settled after their lease had run out.
        unseen: Given back without a handler having seen them.
    """

    acked: int = 0
    released: int = 0
    rejected: int = 0
    failed: int = 0
    lost: int = 0
    unseen: int = 0

    def add(self, other: RunSummary) -> None:
        """Add another's counts."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Worker:
    """
    One run of a handler.

    Args:
        intake: Where messages come from; nobody else may use it during the run.
        close: Closes the consumer, at the end of the run.
        handler: Called with each message.
        concurrency: Handler threads.
        retry_delay_ms: How long a message rests after its handler raised.
        drain_timeout_ms: How long a stop waits for running handlers; then their messages are released under them.
        max_batch: Most messages fetched at once.
    """

    def __init__(
        self,
        *,
        intake: Intake,
        close: Callable[[], None],
        handler: Callable[[Message], object],
        concurrency: int,
        retry_delay_ms: int = 1_000,
        drain_timeout_ms: int = 20_000,
        max_batch: int = MAX_BATCH,
    ) -> None:
        """Check the values; nothing starts yet."""
        _check_least(concurrency=(concurrency, 1), max_batch=(max_batch, 1))
        _check_least(retry_delay_ms=(retry_delay_ms, 0), drain_timeout_ms=(drain_timeout_ms, 0))
        # Of each release: refused now, not in a handler thread at the first failure.
        milliseconds("retry_delay_ms", retry_delay_ms / 1000)
        check_handler(handler)
        self._intake = intake
        self._close = close
        self._handler = _with_failpoints(handler) if is_armed() else handler
        self._max_batch = max_batch
        self._retry_delay_s = retry_delay_ms / 1000
        self._drain_timeout_s = drain_timeout_ms / 1000
        self._window = Window(concurrency, intake.max_in_flight)
        self._ready = HandOver()
        self._under_way: deque[Batch] = deque()
        self._fetched_at = time.monotonic()
        self._stopping = threading.Event()
        self._crash: BaseException | None = None
        self._counts = [RunSummary() for _ in range(concurrency)]
        self._threads = [
            threading.Thread(target=self._work, args=(counts,), name=f"kmq-handler-{number}", daemon=True)
            for number, counts in enumerate(self._counts)
        ]

    def stop(self) -> None:
        """Ask the run to end; returns at once."""
        self._stopping.set()

    def handed_out_count(self) -> int:
        """Return how many messages handlers were given so far."""
        return self._ready.taken_count

    def acked_count(self) -> int:
        """Return how many messages were acknowledged so far."""
        return sum([counts.acked for counts in self._counts])

    def run(self) -> RunSummary:
        """
        Receive and handle until stopped, then close the consumer.

        Returns:
            What was done.

        Raises:
            KmqError: The client failed for good, or the last markers could not be written.
            KeyboardInterrupt: A second Ctrl+C came before the handlers had ended.
            BaseException: What a handler raised that is no `Exception`, such as `SystemExit`.
        """
        summary = RunSummary()
        with self._signals(), short_switches(), spared_collector():
            for thread in self._threads:
                thread.start()
            try:
                self._receive_until_stopped()
            finally:
                try:
                    summary.unseen = self._give_back_unseen()
                    self._drain()
                finally:
                    self._close()
        for counts in self._counts:
            summary.add(counts)
        if self._crash is not None:
            raise self._crash
        logger.info("run ended: %s", summary, extra={"action": "run_ended"})
        return summary

    def _receive_until_stopped(self) -> None:
        while not self._stopping.is_set():
            try:
                self._step()
            except KmqError as error:
                if not error.retriable:
                    raise
                logger.warning("receiving failed, trying again: %s", error, extra={"action": "receive_failed"})
                self._hand_over_under_way()
                self._stopping.wait(RETRY_PAUSE_S)

    def _hand_over_under_way(self) -> None:
        """Hand over what was started before a fetch failed: fetching may fail for longer than its leases last."""
        try:
            while self._under_way:
                self._ready.put(self._finish_start())
        except KmqError as error:
            logger.warning("%s", error, extra={"action": "start_given_up"})

    def _step(self) -> None:
        """Fetch what there is room for, then hand over what is durable, or wait for it or for room."""
        has_fetched = self._fetch()
        if self._under_way:
            if not has_fetched or self._under_way[0].is_reported or len(self._under_way) >= MAX_BATCHES_UNDER_WAY:
                self._ready.put(self._finish_start())
        elif not has_fetched and (self._intake.is_blocked or self._room() < 1):
            self._wait_for_room()

    def _room(self) -> int:
        """Return how many messages may be fetched now; 0 until half of the window is free."""
        self._window.look(time.monotonic(), self._ready.taken_count)
        under_way = sum([len(batch.messages) for batch in self._under_way])
        waiting = len(self._ready) + under_way
        if waiting > self._window.size // 2:
            return 0
        return min(self._window.size - waiting, self._intake.room().max_messages)

    def _fetch(self) -> bool:
        room = min(self._room(), self._max_batch)
        if room < 1:
            return False
        # With a batch under way its answer is waited for instead.
        timeout = 0.0 if self._under_way else POLL_S
        batch = self._intake.take(room, timeout)
        if not self._intake.is_blocked:
            self._fetched_at = time.monotonic()
        if batch is not None:
            self._under_way.append(batch)
        return batch is not None

    def _finish_start(self) -> list[Message]:
        batch = self._under_way[0]
        try:
            self._intake.wait_until_durable(batch)
        except KmqError:
            # The intake has sought back to it. After other failures, a fetch's for one, what is under way goes on.
            self._under_way.clear()
            raise
        self._under_way.popleft()
        self._intake.commit(batch)
        return batch.messages

    def _wait_for_room(self) -> None:
        if time.monotonic() - self._fetched_at > IDLE_AFTER_S:
            self._intake.idle()
        if len(self._ready):
            self._ready.wait_until_dry(ROOM_PAUSE_S)
        else:
            # Handlers hold as many as they may: their acks make room.
            self._stopping.wait(ROOM_PAUSE_S)

    def _give_back_unseen(self) -> int:
        """Release what no handler has seen, uncounted: batches under way and messages that wait."""
        self._stopping.set()
        unseen = self._ready.close()
        try:
            while self._under_way:
                unseen += self._finish_start()
        except KmqError as error:
            # Not durable, so not committed: another consumer fetches them.
            logger.warning("%s", error, extra={"action": "start_given_up"})
        return sum([message._release_unseen() for message in unseen])  # noqa: SLF001  # private to the package: not for handlers

    def _drain(self) -> None:
        until = time.monotonic() + self._drain_timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        running = sum([thread.is_alive() for thread in self._threads])
        if running:
            logger.warning(
                "%d handler(s) still run after %g s; their messages are released",
                running,
                self._drain_timeout_s,
                extra={"action": "drain_timed_out"},
            )

    def _work(self, counts: RunSummary) -> None:  # noqa: C901  # calls would cost more than the branches
        """Handle messages until there are no more; each step here is made a million times a second."""
        handler, pop, take = self._handler, self._ready.pop, self._ready.take
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
                logger.exception("handler raised on %r", message, extra={"action": "handler_failed"})
                self._settle(message, counts, Verb.RELEASE, error_text(error))
            except BaseException as error:  # noqa: BLE001  # raised again by `run`, in the thread that called it
                self._crash = error
                self.stop()
                self._settle(message, counts, Verb.RELEASE, error_text(error))
            else:
                if result is not None and is_deferred(result):
                    self._refuse(message, result)
                    continue
                try:
                    message.ack()
                except LeaseLostError as error:
                    _lose(counts, error)
                except UsageError:
                    self._settle(message, counts, Verb.ACK)  # the handler has released or rejected it
                else:
                    counts.acked += 1

    def _refuse(self, message: Message, result: object) -> None:
        """End the run: the handler has returned work that is yet to be done, so the message is not done."""
        self._crash = UsageError(
            f"handler returned work that is not done: got {type(result).__name__} for {message!r}; give a function "
            "that has done its work when it returns, for example `lambda message: asyncio.run(handle(message))`"
        )
        self.stop()
        message._release_unseen()  # noqa: SLF001  # private to the package: not for handlers
        if inspect.iscoroutine(result) or inspect.isgenerator(result):
            result.close()  # Python would warn that it was never awaited

    def _settle(self, message: Message, counts: RunSummary, default: Verb, error: str = "") -> None:
        """Settle what the handler has not, and count how it ended."""
        try:
            verb = message._finish(default, self._retry_delay_s, error)  # noqa: SLF001  # private to the package
        except LeaseLostError as lost:
            _lose(counts, lost)
            return
        if verb is Verb.ACK:
            counts.acked += 1
        elif verb is Verb.RELEASE:
            counts.released += 1
        else:
            counts.rejected += 1

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM where this is the main thread; others may not set handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                # None: it was set by other code than Python's, and cannot be put back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._stopping.is_set():
            raise KeyboardInterrupt
        self.stop()


def _lose(counts: RunSummary, error: LeaseLostError) -> None:
    counts.lost += 1
    logger.warning("%s", error, extra={"action": "lease_lost"})


def _with_failpoints(handler: Callable[[Message], object]) -> Callable[[Message], object]:
    """Return a handler with the points before and behind it, where one of them may be meant."""

    def handle(message: Message) -> object:
        failpoint("consumer.in-handler")
        result = handler(message)
        failpoint("consumer.handled")
        return result

    return handle


def _check_least(**bounds: tuple[int, int]) -> None:
    for name, (value, least) in bounds.items():
        if value < least:
            message = f"{name} is smaller than allowed: got {value!r}, minimum {least}; raise {name}"
            raise ConfigError(message)
