"""
Run a handler for each message or batch of a queue, in threads, until stopped.

Rule 1: what a handler returns or raises settles its messages, see `QueueConsumer.run`. A failure that cannot be read
(wrong index, wrong type) counts as an exception of the handler: no message is acknowledged because of it.
Rule 2: a stop releases the messages that no handler has seen, without counting the delivery, and waits for the running
handlers.
Rule 3: in a child that a handler forks, the run is over: signals do there what they did before, nothing is handled.

Source: dramatiq's worker for the drain; SQS for "return acknowledges" and for `batchItemFailures`.
"""

# ruff: noqa: SLF001  # settles messages by methods that are not for handlers

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import index as to_index
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from kmq_spark.consumer.batch import Batch, Settlement
from kmq_spark.consumer.checks import check_bounds
from kmq_spark.consumer.leases import Verb
from kmq_spark.consumer.message import Message, one_line, text_of_failure
from kmq_spark.consumer.policy import FailurePolicy
from kmq_spark.consumer.signals import handled
from kmq_spark.core.durations import milliseconds
from kmq_spark.errors import BatchFailed, ConfigError, KmqError, LeaseLostError, UsageError
from kmq_spark.failpoints import failpoint, is_armed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from datetime import timedelta
    from types import FrameType

    from kmq_spark.consumer.batch import Failures
    from kmq_spark.consumer.pipeline import Pipeline
    from kmq_spark.consumer.policy import Rule

logger = logging.getLogger(__name__)

MAX_CONCURRENCY = 10_000

MAX_FETCH = 2_000
"""Maximum number of messages fetched at once. More at once bring no further gain."""

POLL_S = 0.1
"""Longest wait of the receiving thread, and so the longest delay until it sees a signal."""

ROOM_PAUSE_S = 0.002
"""Pause while there is no room: far shorter than the work in a window, and without noticeable CPU load."""

WINDOW_S = 0.1
"""Waiting work in seconds, at the handlers' rate: many broker round trips, but too short for a person to notice."""

MEASURE_INTERVAL_S = 0.02
"""Shortest time of work over which the handlers' rate is measured."""

STUCK_S = 60.0
"""After this time without a message taken, though some wait, a worker says that all its handlers are busy."""

SWITCH_INTERVAL_S = 0.0005
"""
Python's switch interval during a run: how long a handler thread keeps the interpreter lock while another thread waits
for it. Python's default is 5 ms. The receiving thread needs the lock after each of its broker calls, and with the
default it would wait most of the time.
"""

COLLECT_AFTER = 50_000
"""Threshold of the garbage collector's first generation during a run: the messages of many batches. Default: 700."""


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

    def count(self, verb: Verb, count: int = 1) -> None:
        """Count messages that were settled with a verb."""
        if verb is Verb.ACK:
            self.acked += count
        elif verb is Verb.RELEASE:
            self.released += count
        elif verb is Verb.REJECT:
            self.rejected += count

    def count_lost(self, error: LeaseLostError) -> None:
        """Count and log a message whose lease was lost."""
        self.lost += 1
        logger.warning("%s", error, extra={"action": "lease_lost"})


class HandlerQueue:
    """
    Messages, or batches, that wait for a handler thread.

    A batch is added under a lock; a thread takes a message with one atomic `deque.popleft` (`pop`, which raises
    IndexError if none waits): `queue.SimpleQueue` needs a lock for each, which at a million messages a second takes
    most of the time. *clock* returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._ready: deque[Any] = deque()
        self.pop = self._ready.popleft
        self._changed = threading.Condition()
        self._is_closed = False
        self._put_count = 0
        self._is_empty = threading.Event()

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._ready)

    @property
    def taken_count(self) -> int:
        """Count of those taken so far."""
        return self._put_count - len(self._ready)

    def busy_s(self) -> float:
        """Return for how long the handlers have had work, seconds: from a `put` until a thread finds none."""
        with self._changed:
            return self._busy_s + self._current_stretch_s()

    def put(self, items: Sequence[Any]) -> None:
        """Add items and wake one handler thread for each."""
        with self._changed:
            if self._busy_since is None and items:
                self._busy_since = self._clock()
            self._put_count += len(items)
            self._is_empty.clear()
            self._ready.extend(items)
            self._changed.notify(len(items))

    def take(self) -> Any | None:  # noqa: ANN401  # a message or a batch
        """Return the next one; wait for it if needed. Return None after `close`."""
        while True:
            with contextlib.suppress(IndexError):
                return self.pop()
            with self._changed:
                # Checked again under the lock: otherwise a batch added in between would not end this wait.
                if not self._ready:
                    self._busy_s += self._current_stretch_s()
                    self._busy_since = None
                    self._is_empty.set()
                while not self._ready:
                    if self._is_closed:
                        return None
                    self._changed.wait()

    def wait_until_empty(self, timeout: float) -> None:
        """Wait until a handler thread finds nothing, at most *timeout* seconds."""
        self._is_empty.wait(timeout)

    def close(self) -> list[Any]:
        """Wake every waiting thread, and return what no thread has taken."""
        left = []
        with self._changed:
            self._is_closed = True
            with contextlib.suppress(IndexError):
                while True:
                    left.append(self.pop())
            self._changed.notify_all()
        return left

    def abandon(self) -> None:
        """Forget everything, in a forked child: another thread of the parent may have held the lock."""
        self._changed = threading.Condition()
        self._is_closed = True
        self._ready.clear()

    def _current_stretch_s(self) -> float:
        return 0.0 if self._busy_since is None else self._clock() - self._busy_since


class Window:
    """
    Number of messages that may wait for a handler thread: the number that the handlers take in `WINDOW_S`.

    No other consumer can process a message that waits here, so slow handlers get a small window. Fast handlers need a
    large one, because the next START takes a round trip to the broker. The window grows by itself: each one that the
    handlers empty at once lets the next be up to five times as large.
    """

    def __init__(self, min_size: int, max_size: int) -> None:
        self._min_size = min(min_size, max_size)
        self._max_size = max_size
        self._busy_s = 0.0
        self._taken_count = 0
        self.size = self._min_size

    def measure(self, busy_s: float, taken_count: int) -> None:
        """Set `size` from how long the handlers have had work since the start, and how many messages they took."""
        passed_s, taken = busy_s - self._busy_s, taken_count - self._taken_count
        rate = taken / max(passed_s, MEASURE_INTERVAL_S)
        size = max(self._min_size, min(self._max_size, round(rate * WINDOW_S)))
        if passed_s < MEASURE_INTERVAL_S:
            # Too short to show that the handlers are slow.
            self.size = max(self.size, size)
            return
        self.size = size
        self._busy_s, self._taken_count = busy_s, taken_count


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
        retry: Mapping[type[BaseException], Rule] | None,
    ) -> None:
        check_bounds("concurrency", concurrency, 1, MAX_CONCURRENCY)
        self._drain_timeout_s = milliseconds("drain_timeout", drain_timeout) / 1000
        self._batch_wait_s = 0.0
        if batch is not None:
            check_bounds("batch", batch, 1, max_in_flight)
            self._batch_wait_s = milliseconds("batch_wait", batch_wait) / 1000
        check_handler(handler)
        self._policy = FailurePolicy(retry)
        self._pipeline = pipeline
        self._close = close
        self._handler = _with_failpoints(handler) if is_armed() else handler
        self._batch = batch
        self._delivered_count = 0
        self._delivered_lock = threading.Lock()
        self._window = Window(concurrency, max_in_flight // (batch or 1))
        self._handler_queue = HandlerQueue()
        self._stopping = threading.Event()
        self._taken_count, self._taken_at_s = 0, time.monotonic()
        self._fatal_error: BaseException | None = None
        self._pid = os.getpid()
        self._counts = [RunSummary() for _ in range(concurrency)]
        work = self._work if batch is None else self._work_batches
        self._threads = [
            threading.Thread(target=work, args=(counts,), name=f"kmq-handler-{number}", daemon=True)
            for number, counts in enumerate(self._counts)
        ]

    def stop(self) -> None:
        """Ask the run to end; returns at once."""
        self._stopping.set()

    def counts(self) -> tuple[int, int, int]:
        """Return how many messages were passed to handlers so far, were acknowledged, and had lost their lease."""
        delivered = self._handler_queue.taken_count if self._batch is None else self._delivered_count
        return delivered, sum([each.acked for each in self._counts]), sum([each.lost for each in self._counts])

    def run(self) -> RunSummary:
        """Receive and handle messages until stopped, then close the consumer; see `QueueConsumer.run`."""
        summary = RunSummary()
        _running.add(self)
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
            self._say_if_stuck()
            return
        self._taken_at_s = time.monotonic()  # there is room: nothing waits too long yet
        if self._batch is None:
            self._handler_queue.put(self._pipeline.receive(min(wanted, MAX_FETCH), POLL_S, Batch._to_messages))
        elif batch := self._pipeline.receive(self._batch, POLL_S, _itself, gather_s=self._batch_wait_s):
            self._handler_queue.put([batch])

    def _wanted(self) -> int:
        """Return how many messages, or batches, may be received now; 0 until half of the window is free."""
        waiting = len(self._handler_queue)
        self._window.measure(self._handler_queue.busy_s(), self._handler_queue.taken_count)
        return 0 if waiting > self._window.size // 2 else self._window.size - waiting

    def _say_if_stuck(self) -> None:
        taken, now_s = self._handler_queue.taken_count, time.monotonic()
        if taken != self._taken_count:
            self._taken_count, self._taken_at_s = taken, now_s
        elif now_s - self._taken_at_s > STUCK_S:
            self._taken_at_s = now_s  # said again after as long
            logger.warning(
                "all %d handlers have been busy for %g s while %d message(s) wait: find out what they wait for, and "
                "give every call a time-out",
                len(self._threads), STUCK_S, len(self._handler_queue), extra={"action": "handlers_stuck"},
            )  # fmt: skip

    def _give_back(self) -> int:
        """Release the messages that no handler has seen, without counting the delivery."""
        self._stopping.set()
        unseen: int = sum([each._release_uncounted() for each in self._handler_queue.close()])
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
                counts.count_lost(error)
            except UsageError:
                settle(message, counts, self._policy)  # the handler has released or rejected it
            else:
                counts.acked += 1

    def _work_batches(self, counts: RunSummary) -> None:
        """Handle batches until there are no more."""
        while (batch := self._handler_queue.take()) is not None:
            with self._delivered_lock:
                self._delivered_count += len(batch)
            fatal_error = handle_batch(self._handler, batch, counts, self._policy)
            if fatal_error is not None:
                self._end(fatal_error)

    def _fail(self, message: Message, counts: RunSummary, error: BaseException) -> None:
        if self._pid != os.getpid():
            _end_child(error)
        if not isinstance(error, Exception):
            self._end(error)
        fail(message, counts, self._policy, error)

    def _end(self, error: BaseException) -> None:
        """End the run with an error, which `run` raises in the thread that called it."""
        if self._pid != os.getpid():
            _end_child(error)
        self._fatal_error = error
        self.stop()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM. Only in the main thread: Python permits signal handlers nowhere else."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with handled((signal.SIGINT, signal.SIGTERM)) as before:
            for number in before:
                signal.signal(number, self._on_signal)
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._stopping.is_set():
            raise KeyboardInterrupt
        self.stop()


_running: weakref.WeakSet[Worker] = weakref.WeakSet()


def _leave_in_child() -> None:
    for worker in list(_running):
        worker._handler_queue.abandon()


os.register_at_fork(after_in_child=_leave_in_child)


def _end_child(error: BaseException) -> NoReturn:
    """End a forked child with what its handler has raised, as Python ends a process."""
    code = error.code if isinstance(error, SystemExit) else 1
    if not isinstance(error, SystemExit) or not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n" if isinstance(error, SystemExit) else "".join(traceback.format_exception(error)))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


_WORKING = "a function that finishes its work before it returns, or a coroutine function"

_LAZY_KINDS: dict[str, Callable[[object], bool]] = {
    "an asynchronous generator function": inspect.isasyncgenfunction,
    "a generator function": inspect.isgeneratorfunction,
}


def check_handler(handler: object) -> None:
    """
    Raise ConfigError for a handler that does not do its work when it is called.

    A generator function only returns an object that runs later: its messages would be acknowledged without any work,
    and lost. So would those of an object with such a `__call__`, and of a partial.
    """
    if not callable(handler):
        message = f"handler is not callable: got {handler!r}; expected a function of one message"
        raise ConfigError(message)
    for each in _functions_of(handler):
        for kind, is_kind in _LAZY_KINDS.items():
            if is_kind(each):
                message = f"handler is {kind}: got {handler!r}; expected {_WORKING}"
                raise ConfigError(message)


def is_coroutine_function(handler: object) -> TypeGuard[Callable[[Any], Awaitable[object]]]:
    """Return whether a handler must be awaited; also for a partial, and an object with such a `__call__`."""
    return any(map(inspect.iscoroutinefunction, _functions_of(handler)))


def _functions_of(handler: object) -> tuple[object, object]:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return handler, inspect.getattr_static(type(handler), "__call__", None)


def is_unstarted_work(result: object) -> bool:
    """Return whether the return value of a handler is work that has not run yet, such as a coroutine."""
    return inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)


def refuse_unstarted(given: Message | Batch, result: object) -> UsageError:
    """Release messages uncounted whose handler returned work that has not run yet. Return the error for the run."""
    error = UsageError(
        f"handler returned work that has not run: got {type(result).__name__} for {given!r}; expected {_WORKING}"
    )
    given._release_uncounted()
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()  # otherwise Python warns that it was never awaited
    return error


def fail(message: Message, counts: RunSummary, policy: FailurePolicy, error: BaseException) -> None:
    """Settle a message whose handler raised, unless the handler did, and count and log it."""
    if isinstance(error, Exception):
        counts.failed += 1
        _log_failure(message, error, policy)
    settle(message, counts, policy, error)


def settle(message: Message, counts: RunSummary, policy: FailurePolicy, error: BaseException | None = None) -> None:
    """Settle a message as its handler's end says, unless the handler did, and count it."""
    try:
        verb = message._finish(None if error is None else policy.settled(error))
    except LeaseLostError as lost:
        counts.count_lost(lost)
    else:
        counts.count(verb)


def handle_batch(
    handler: Callable[[Batch], object], batch: Batch, counts: RunSummary, policy: FailurePolicy
) -> BaseException | None:
    """Call the handler, settle the batch, and add the results to *counts*. Return the exception that ends the run."""
    failed: dict[Verb, Settlement] = {}
    try:
        try:
            result = handler(batch)
        except BatchFailed as error:
            failed = _fail(batch, error.failures, policy)
            counts.failed += 1
        else:
            if isinstance(result, Mapping):
                failed = _fail(batch, result, policy)
            elif is_unstarted_work(result):
                return refuse_unstarted(batch, result)
            elif result is not None:
                message = (
                    f"handler of batches returned a wrong type: got {type(result).__name__} for {batch!r}; expected "
                    "None or a mapping from indices to exceptions or texts"
                )
                batch._release_uncounted()
                return UsageError(message)
    except BaseException as error:  # noqa: BLE001  # the worker passes it to the thread that called `run`
        if isinstance(error, Exception):
            counts.failed += 1
            _log_failure(batch, error, policy)
        kind = policy.settled(error)
        _count(counts, batch, {kind.verb: batch._settle_rest(kind)})
        return None if isinstance(error, Exception) else error
    _count(counts, batch, {**failed, Verb.ACK: batch._settle_rest()})
    return None


def _log_failure(given: Message | Batch, error: Exception, policy: FailurePolicy) -> None:
    first = given[0] if isinstance(given, Batch) else given
    named, extra = repr(given), {"action": "handler_failed", "origin": first.origin.text}
    if isinstance(given, Message):
        named = f"message {given.origin.text}, key {one_line(repr(given.key))[:100]}, delivery {given.delivery_count}"
    settled = policy.settled(error)
    if isinstance(given, Message) and given.is_settled:
        then = "settled before, and stays so"
    elif settled.verb is Verb.REJECT:
        then = "a dead letter now"
    else:
        delay = f"in {settled.delay_ms / 1000:g} s" if settled.delay_ms else "as the queue's rules say"
        then = f"delivered again {delay}, up to the limit of deliveries"
    if policy.is_expected(error):
        logger.info("handler failed for %s (%s): %s", named, then, text_of_failure(error), extra=extra)
    else:
        logger.error("handler failed for %s (%s)", named, then, exc_info=error, extra=extra)


def _fail(batch: Batch, failures: Failures, policy: FailurePolicy) -> dict[Verb, Settlement]:
    found = batch._settle_as({to_index(index): policy.settled(error) for index, error in failures.items()})
    if not all(map(policy.is_expected, failures.values())):
        index, reason = next(iter(failures.items()))
        logger.warning(
            "handler failed %d of %d message(s) of a batch, the first is %r: %r",
            len(failures), len(batch), batch[index], reason,
            extra={"action": "handler_failed", "origin": batch[index].origin.text},
        )  # fmt: skip
    return found


def _count(counts: RunSummary, batch: Batch, settlements: Mapping[Verb, Settlement]) -> None:
    """Count the batch by verb. Messages that these settlements found lost count as lost."""
    verbs = batch._verb_counts()
    for verb, settlement in settlements.items():
        verbs[verb] -= settlement.late
        lost_count = settlement.late + settlement.gone
        if lost_count:
            counts.lost += lost_count
            logger.warning(
                "leases of %d of %d message(s) of a batch are lost: %s",
                lost_count, len(batch), settlement.why, extra={"action": "lease_lost"},
            )  # fmt: skip
    for verb in Verb:
        counts.count(verb, verbs[verb])


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
