"""
Handler processes: each has a pipe of its own and works on one message, or one batch, at a time.

Rule 1: the thread that sent a message waits for its process. So whatever ends the process, this thread names the
message, and no other process is touched: they share no lock, no pipe and no queue. (In pebble's pool they share a lock
and a pipe: a kill at the wrong moment stops them all, and a process that dies without a task breaks the pool.)
Rule 2: whatever happens to a process, its message is settled, or released uncounted.
"""

# ruff: noqa: SLF001  # settles messages by methods that are not for handlers

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from kmq_spark.consumer.batch import Batch
from kmq_spark.errors import ConfigError, KmqError, LeaseLostError, UsageError
from kmq_spark.kafka.clock import now_s
from kmq_spark.worker.child import Start, main
from kmq_spark.worker.handed import Handed, Outcome, batch_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from kmq_spark.consumer.consumer import QueueConsumer
    from kmq_spark.consumer.message import Message

logger = logging.getLogger(__name__)

MAX_STARTS = 10
"""Starts of a process that fail in a row, after which the run ends."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pause before a process is started again; doubled from failure to failure. Ten starts take about 20 seconds."""

POLL_S = 0.2
"""Between two looks at a process that says nothing; its answer is noticed at once."""

HANG_MARGIN_S = 0.5
"""A handler that hangs is killed this long before its lease ends, so that the reason is stored with the message."""

LEAVE_S = 3.0
"""Time for idle processes to end after their pipes are closed; then they are killed."""


class ProcessOverError(Exception):
    """A handler process died, or was killed because its handler hung, before it said what became of its messages."""

    def __init__(self, reason: str, *, was_killed: bool = False) -> None:
        super().__init__(reason)
        self.was_killed = was_killed


class _Slot:
    """A place for a handler process, and the one that runs in it."""

    process: SpawnProcess | None = None
    connection: Connection | None = None
    failures = 0
    """Deaths, also while it was started, since a process of this slot has last handled a message."""

    def start(self, start: Start) -> None:
        """Start a process, without waiting until it is ready."""
        self.end()
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(start, theirs), name="kmq-handler")
        try:
            self.process.start()
        finally:
            theirs.close()  # otherwise its death is not seen

    def send(self, handed: Handed) -> bool:
        """Send messages; return False if the process has died."""
        assert self.process is not None
        assert self.connection is not None
        with suppress(OSError):
            if self.process.is_alive():
                self.connection.send(handed)
                return True
        return False

    def answer(self, why_kill: Callable[[], str]) -> object:
        """Wait for what the process says. ProcessOverError if it dies, or is killed since *why_kill* has a reason."""
        assert self.process is not None
        assert self.connection is not None
        process = f"handler process {self.process.pid}"
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while not self.connection.poll(POLL_S):
                if reason := why_kill():
                    self.end()
                    raise ProcessOverError(f"{process} was killed: {reason}", was_killed=True)
                # A program that the handler has started may hold the pipe of a dead process open.
                if not self.process.is_alive() and not self.connection.poll(0):
                    raise EOFError
            return self.connection.recv()
        self.process.join(POLL_S)
        code = self.process.exitcode
        self.end()
        if code is not None and code < 0:
            name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
            raise ProcessOverError(f"{process} was ended by {name}")
        raise ProcessOverError(f"{process} ended with exit code {code}")

    def kill(self) -> None:
        """End the process at once; it may have ended before. The thread that waits for it closes the pipe."""
        if self.process is not None and self.process.pid is not None:
            self.process.kill()
            self.process.join()

    def end(self) -> None:
        """End the process, and close the pipe. Only for the thread that has the slot."""
        self.kill()
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class HandlerProcesses:
    """
    A handler for `QueueConsumer.run` that passes messages to processes; `run` needs as many threads.

    When the processes cannot go on, the consumer that is attached is stopped, and `error` says why.
    """

    def __init__(self, start: Start, count: int, max_lease_s: float) -> None:
        self._start, self._max_lease_s = start, max_lease_s
        self._consumer: QueueConsumer | None = None
        self._slots = [_Slot() for _ in range(count)]
        self._idle: deque[_Slot] = deque()
        self._ready: set[_Slot] = set()
        self._changed = threading.Condition()
        self._spawning = threading.Lock()
        self._is_closed = self._was_ready = False
        self._problem = "they are starting"
        self.handle: Callable[[Batch], dict[int, Exception | str] | None] = self._handle
        """Each call of a handler; replaced to measure them: it raises `ProcessOverError` where a process ends."""
        self.error: KmqError | None = None

    def start(self) -> None:
        """Start the processes, without waiting until they are ready."""
        for slot in self._slots:
            self._start_in_background(slot)

    def wait_ready(self, timeout: float) -> bool:
        """Wait until a process is ready. Raises the error with which they cannot be started."""
        with self._changed:
            self._changed.wait_for(lambda: self._was_ready or self.error, timeout)
        if self.error is not None:
            raise self.error
        return self._was_ready

    def attach(self, consumer: QueueConsumer) -> None:
        """Stop the run of this consumer when the processes cannot go on; at once if that is so."""
        self._consumer = consumer
        if self.error is not None:
            consumer.stop()

    def health(self) -> str:
        """Return why no process is ready or at work; empty if one is."""
        with self._changed:
            return "" if self._ready else f"no handler process is ready: {self._problem}"

    def close(self) -> None:
        """End all processes; those at work, whose messages the consumer has released, at once."""
        with self._changed:
            self._is_closed = True
            idle = list(self._idle)
            self._changed.notify_all()
        with self._spawning:  # none is started any more
            for slot in {*self._slots}.difference(idle):
                slot.kill()
        for slot in idle:
            if slot.connection is not None:
                slot.connection.close()  # which ends an idle process
                slot.connection = None
        until = time.monotonic() + LEAVE_S
        for slot in idle:
            if slot.process is not None:
                slot.process.join(max(0.0, until - time.monotonic()))
            slot.end()

    def __call__(self, given: Message | Batch) -> object:
        """Have a process handle a message or a batch; return or raise what its handler does."""
        batch = given if isinstance(given, Batch) else batch_of(given)
        try:
            return self.handle(batch)
        except ProcessOverError as over:
            if isinstance(given, Batch):
                if len(batch) > 1 and not over.was_killed:
                    return self._one_by_one(batch)
                return dict.fromkeys(range(len(batch)), str(over))
            with suppress(LeaseLostError):
                given.fail(str(over))
            return None

    def _one_by_one(self, batch: Batch) -> dict[int, Exception | str]:
        """Handle each message of a batch that ended its process alone, so that only the one that ended it fails."""
        failures: dict[int, Exception | str] = {}
        for index, _ in enumerate(batch):
            try:
                found = self.handle(batch._of([index]))
            except ProcessOverError as over:
                failures[index] = str(over)
            except Exception as error:  # noqa: BLE001  # the policy decides
                failures[index] = error
            else:
                failures.update((index, error) for error in (found or {}).values())
        return failures

    def _handle(self, batch: Batch) -> dict[int, Exception | str] | None:
        """Have a process handle messages, settle what its handler has settled, and return the failures of a batch."""
        try:
            outcome = self._outcome(batch)
        except ProcessOverError as over:
            if not self._is_closed:
                what = repr(batch) if self._start.is_batch else repr(batch[0])
                # Without a traceback, which would be ours.
                more = {"action": "handler_process_ended", "origin": batch[0].origin.text}
                logger.error("%s; it was handling %s", over, what, extra=more)  # noqa: TRY400
                raise
            outcome = None
        if outcome is None or outcome.refused:
            batch._release_uncounted()
            if outcome is not None:
                self._give_up(UsageError(outcome.refused))
            return None
        outcome.settle(batch)
        if outcome.error is not None:
            raise outcome.error.restored()  # type: ignore[misc]  # never a text: it was raised
        return None if outcome.failures is None else {i: each.restored() for i, each in outcome.failures.items()}

    def _outcome(self, batch: Batch) -> Outcome | None:
        """Return what became of the messages; None if there is no process any more."""
        handed = Handed.of(batch)
        while (slot := self._take()) is not None:
            if slot.send(handed):
                break
            self._note_over(slot, "one died while it had no message")
        else:
            return None
        begun_s = time.monotonic()
        try:
            found = slot.answer(lambda: self._hang(batch, begun_s))
        except ProcessOverError as over:
            self._note_over(slot, str(over))
            raise
        slot.failures = 0
        with self._changed:
            self._idle.append(slot)
            self._changed.notify()
        assert isinstance(found, Outcome)
        return found

    def _take(self) -> _Slot | None:
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._is_over())
            return None if self._is_over() else self._idle.popleft()

    def _note_over(self, slot: _Slot, problem: str) -> None:
        with self._changed:
            self._ready.discard(slot)
            self._problem = problem
        slot.failures += 1
        self._start_in_background(slot)

    def _start_in_background(self, slot: _Slot) -> None:
        threading.Thread(target=self._bring_up, args=(slot,), name="kmq-process-start", daemon=True).start()

    def _bring_up(self, slot: _Slot) -> None:
        """Start the process of a slot until it is ready, with pauses."""
        for attempt in range(1, MAX_STARTS + 1):
            pause_s = min(FIRST_PAUSE_S * 2 ** min(slot.failures - 1, 10), LONGEST_PAUSE_S) if slot.failures else 0.0
            with self._changed:
                self._changed.wait_for(self._is_over, pause_s)
            is_refused = False
            try:
                with self._spawning:
                    if self._is_over():
                        return
                    slot.start(self._start)
                problem = str(slot.answer(lambda: "the run is over" if self._is_over() else ""))
                is_refused = bool(problem) and not self._was_ready
            except ProcessOverError as over:
                problem = f"{over} in its start"
            except OSError as error:  # no memory, or too many processes or files
                problem = f"handler process has not started: {error}"
            with self._changed:
                if not problem:
                    self._ready.add(slot)
                    self._idle.append(slot)
                    self._was_ready = True
                    self._changed.notify_all()
                    return
                self._problem = problem
            slot.failures += 1
            if self._is_over():
                return
            if is_refused:
                self._give_up(ConfigError(problem))
                return
            logger.warning(
                "%s, attempt %d of %d", problem, attempt, MAX_STARTS, extra={"action": "handler_process_ended"}
            )
        self._give_up(KmqError(f"handler processes cannot be started: {problem}, {MAX_STARTS} times; see their output"))

    def _hang(self, batch: Batch, begun_s: float) -> str:
        """Return why a handler is to be killed; empty while it may go on."""
        now = now_s()
        # Keep-alive renews a lease only by its whole length, so the lease ends somewhat before `limit_at`.
        ends = any(
            now + lease.duration_s > lease.limit_at and lease.ends_at - HANG_MARGIN_S < now and not lease.end_reason
            for lease, *_ in batch._parts
        )
        # Some of it may have passed while the message waited for a process.
        has_hung = time.monotonic() - begun_s >= self._max_lease_s / (2 if ends else 1)
        return f"its handler hung until max_lease, {self._max_lease_s:g} s" if has_hung else ""

    def _is_over(self) -> bool:
        return self._is_closed or self.error is not None

    def _give_up(self, error: KmqError) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
        if self._consumer is not None:
            self._consumer.stop()
