"""
Run a coroutine function for each message or batch of a queue, as tasks of one event loop, until stopped.

Rule 1: what waits for the broker runs in a thread of its own, so the loop is never blocked by it. What settles a
message does not wait, and is called as it is.
Rule 2: a stop gives back what no handler has seen, and waits for the running handlers. A cancelled run cancels them.
Rule 3: a signal that somebody else handles is left to him: the loop may be that of a web server.

Source: `worker.py`, whose results, errors and counts are the same.
"""

# ruff: noqa: SLF001  # settles messages by methods that are not for handlers

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from kmq_spark.consumer.batch import Batch
from kmq_spark.consumer.checks import check_bounds
from kmq_spark.consumer.policy import FailurePolicy
from kmq_spark.consumer.signals import handled
from kmq_spark.consumer.worker import (
    MAX_CONCURRENCY,
    MAX_FETCH,
    POLL_S,
    RunSummary,
    fail,
    handle_batch,
    is_unstarted_work,
    refuse_unstarted,
    settle,
)
from kmq_spark.core.durations import milliseconds
from kmq_spark.errors import ConfigError, KmqError, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from concurrent.futures import Future
    from datetime import timedelta

    from kmq_spark.consumer.message import Message
    from kmq_spark.consumer.pipeline import Pipeline
    from kmq_spark.consumer.policy import Rule

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

CANCEL_S = 5.0
"""How long a stop waits for handlers that it has cancelled."""

GATHER_ROOM_S = 0.01
"""How long a full run waits for a tenth of its room: a START for each message would cost a round trip for each."""


class AsyncWorker:
    """One run of a coroutine function. No other code may use *pipeline* meanwhile; *close* closes the consumer."""

    def __init__(
        self,
        pipeline: Pipeline,
        close: Callable[[], None],
        handler: Callable[[Any], Awaitable[object]],
        *,
        max_in_flight: int,
        concurrency: int,
        batch: int | None,
        batch_wait: float | timedelta,
        drain_timeout: float | timedelta,
        retry: Mapping[type[BaseException], Rule] | None,
        takes_interrupts: bool = False,
    ) -> None:
        check_bounds("concurrency", concurrency, 1, MAX_CONCURRENCY)
        if batch is not None:
            check_bounds("batch", batch, 1, max_in_flight)
        if not callable(handler):
            message = f"handler is not callable: got {handler!r}; expected a coroutine function of one message"
            raise ConfigError(message)
        self._drain_timeout_s = milliseconds("drain_timeout", drain_timeout) / 1000
        self._batch_wait_s = milliseconds("batch_wait", batch_wait) / 1000
        self._policy = FailurePolicy(retry)
        self._pipeline, self._close, self._handler = pipeline, close, handler
        self._concurrency, self._batch = concurrency, batch
        self._takes_interrupts = takes_interrupts
        self._summary = RunSummary()
        self._delivered_count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._fatal_error: BaseException | None = None
        self._is_stopped = self._is_cancelling = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receiving = ThreadPoolExecutor(1, "kmq-receive")

    def stop(self) -> None:
        """Ask the run to end; returns at once; from any thread."""
        self._is_stopped = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake)

    def counts(self) -> tuple[int, int, int]:
        """Return how many messages were passed to handlers so far, were acknowledged, and had lost their lease."""
        return self._delivered_count, self._summary.acked, self._summary.lost

    async def run(self) -> RunSummary:
        """Receive and handle messages until stopped, then close the consumer; see `QueueConsumer.run`."""
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        drain_s = 0.0
        try:
            with self._signals():
                while not self._is_stopped:
                    await self._step()
                drain_s = self._drain_timeout_s
        finally:
            self._is_stopped = True
            try:
                await asyncio.to_thread(self._give_back)
                await self._drain(drain_s)
            finally:
                await asyncio.to_thread(self._close)
        if self._fatal_error is not None:
            raise self._fatal_error
        logger.info("run ended: %s", self._summary, extra={"action": "run_ended"})
        return self._summary

    async def _step(self) -> None:
        free = self._concurrency - len(self._tasks)
        if free < max(1, self._concurrency // 10):
            await self._wait(GATHER_ROOM_S)
            free = self._concurrency - len(self._tasks)
        if free < 1:
            await in_thread(self._receiving, self._pipeline.serve_group_if_due)
            await self._wait(POLL_S)
            return
        if self._batch is None:
            wanted = min(free, MAX_FETCH)
            given = await in_thread(self._receiving, lambda: self._pipeline.receive(wanted, POLL_S, Batch._to_messages))
            self._delivered_count += len(given)
            for message in given:
                self._begin(self._handle(message))
        elif batch := await in_thread(self._receiving, self._receive_batch):
            self._delivered_count += len(batch)
            self._begin(self._handle_batch(batch))

    def _receive_batch(self) -> Batch:
        return self._pipeline.receive(self._batch or 1, POLL_S, lambda batch: batch, gather_s=self._batch_wait_s)

    def _begin(self, work: Any) -> None:  # noqa: ANN401  # a coroutine
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._wake()

    def _wake(self) -> None:
        self._woken.set()

    async def _wait(self, longest_s: float) -> None:
        """Wait until a handler has ended, or the run is to end."""
        self._woken.clear()
        if not self._is_stopped:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), longest_s)

    async def _handle(self, message: Message) -> None:
        result, error = await self._outcome(message)
        if error is not None:
            fail(message, self._summary, self._policy, error)
        elif is_unstarted_work(result):
            self._end(refuse_unstarted(message, result))
        else:
            settle(message, self._summary, self._policy)

    async def _handle_batch(self, batch: Batch) -> None:
        result, error = await self._outcome(batch)

        def outcome(_batch: Batch) -> object:
            if error is not None:
                raise error
            return result

        if (fatal_error := handle_batch(outcome, batch, self._summary, self._policy)) is not None:
            self._end(fatal_error)

    async def _outcome(self, given: Message | Batch) -> tuple[object, Exception | None]:
        """Return what the handler returns or raises. What is no `Exception` ends the run."""
        try:
            work = self._handler(given)
            if inspect.isawaitable(work):
                return await work, None
            error = UsageError(f"handler is not a coroutine function: got {type(work).__name__} for {given!r}")
            self._end(error)
        except asyncio.CancelledError:
            if self._is_cancelling:
                raise  # the message stays held, and is released when the consumer is closed
            return None, RuntimeError("the handler's own work was cancelled")
        except Exception as error:  # noqa: BLE001  # the policy decides
            return None, error
        except BaseException as error:  # noqa: BLE001  # `run` raises it
            self._end(error)
            return None, RuntimeError(f"the run ends with {type(error).__name__}")
        return None, error

    def _end(self, error: BaseException) -> None:
        """End the run with an error, which `run` raises."""
        self._fatal_error = self._fatal_error or error
        self._is_stopped = True
        self._wake()

    def _give_back(self) -> None:
        """Release what is fetched ahead, without counting the delivery."""
        self._receiving.shutdown(wait=True)
        try:
            self._summary.unseen += self._pipeline.give_back()
        except KmqError as error:
            # Their STARTs are not durable, so their offsets are not committed: another consumer fetches them.
            logger.warning("%s", error, extra={"action": "start_given_up"})

    async def _drain(self, longest_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=longest_s)
        if running := list(self._tasks):
            logger.warning(
                "%d handler(s) still running %g s after the stop are cancelled; their messages are released",
                len(running), longest_s, extra={"action": "drain_timed_out"},
            )  # fmt: skip
            self._is_cancelling = True
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=CANCEL_S)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop on SIGTERM, unless somebody else handles it; in a run of its own also on SIGINT."""
        loop = asyncio.get_running_loop()
        numbers: list[int] = []
        if threading.current_thread() is threading.main_thread():
            if self._takes_interrupts or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                numbers.append(signal.SIGTERM)
            if self._takes_interrupts:
                numbers.append(signal.SIGINT)
        with handled(numbers):
            for number in numbers:
                loop.add_signal_handler(number, self._on_signal, number)
            try:
                yield
            finally:
                for number in numbers:
                    loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT and self._is_stopped:
            raise KeyboardInterrupt
        self.stop()


async def in_thread(thread: ThreadPoolExecutor, call: Callable[[], Result]) -> Result:
    """Call in the thread that receives. What a cancelled call has received is released, not counted."""
    answer = thread.submit(call)
    try:
        return await asyncio.wrap_future(answer)
    except asyncio.CancelledError:
        answer.add_done_callback(_give_back)
        raise


def _give_back(answer: Future[Any]) -> None:
    if answer.cancelled() or answer.exception() is not None:
        return
    given = answer.result()
    for each in [given] if isinstance(given, Batch) else given or ():
        each._release_uncounted()
