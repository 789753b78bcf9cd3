"""
Receive messages of a queue in an event loop.

Rule 1: a call that may wait for the broker runs in a thread. `ack`, `release` and `reject` do not wait: they are called
as in the synchronous consumer.
Rule 2: leases are renewed by a thread of the consumer, also while the loop is blocked.

Source: aiokafka's `async for`; the consumer itself is `QueueConsumer`.
"""

# ruff: noqa: ASYNC109, SLF001  # a second face of `QueueConsumer`, with its arguments

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from kmq_spark.consumer.async_worker import in_thread
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from datetime import timedelta
    from types import TracebackType
    from typing import Self, Unpack

    from kmq_spark.consumer.batch import Batch
    from kmq_spark.consumer.message import Message
    from kmq_spark.consumer.policy import Rule
    from kmq_spark.consumer.worker import RunSummary
    from kmq_spark.kafka.serializers import Deserializer
    from kmq_spark.producer.async_producer import SendArguments

T = TypeVar("T")

AHEAD_S, MOST_AHEAD = 0.1, 100
"""`async for` receives what its caller works off in this time, at most so many: others cannot take it."""


class DeliveryOptions(TypedDict, total=False):
    """The arguments of `QueueConsumer`, whose documentation says what they mean, but for those of the connection."""

    logical_queue: str
    subscription: str
    lease: float | timedelta | None
    max_lease: float | timedelta | None
    max_in_flight: int
    isolate_after: int
    deserializer: Deserializer | None


class ConsumerOptions(DeliveryOptions, total=False):
    """The arguments of `QueueConsumer`."""

    bootstrap_servers: str
    timeout: float
    extra: Mapping[str, str] | None


class AsyncQueueConsumer:
    """
    Consumer of a queue for asyncio. Use it in an `async with` block, which connects and closes it.

        async with AsyncQueueConsumer("orders", bootstrap_servers=servers) as consumer:
            async for message in consumer:
                await handle(message)
                message.ack()
    """

    def __init__(self, queue: str, **options: Unpack[ConsumerOptions]) -> None:
        """Keep the arguments, those of `QueueConsumer`. Nothing is checked before the block is entered."""
        self._queue, self._options = queue, options
        self._opened: QueueConsumer | None = None
        self._receiving: ThreadPoolExecutor | None = None
        self._waiting: deque[Message] = deque()
        self._wanted, self._given_at, self._given_count = 1, 0.0, 0

    async def __aenter__(self) -> Self:
        """Connect. Raises what `QueueConsumer(...)` raises."""
        self._opened = await self._connect()
        self._receiving = ThreadPoolExecutor(1, f"kmq-receive-{self._queue}")
        return self

    async def _connect(self) -> QueueConsumer:
        return await asyncio.to_thread(QueueConsumer, self._queue, **self._options)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the consumer, also where the block was cancelled."""
        closing = asyncio.ensure_future(asyncio.to_thread(self._close, kind, error, trace))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    @property
    def in_flight_count(self) -> int:
        """Count of messages held."""
        return self._consumer.in_flight_count

    @property
    def problem(self) -> str:
        """What is wrong with the handlers, as `QueueConsumer.problem`."""
        return self._consumer.problem

    async def receive(
        self, max_messages: int = 1, timeout: float = 1.0, lease: float | timedelta | None = None
    ) -> list[Message]:
        """Receive messages, as `QueueConsumer.receive`. What a cancelled call has received is given back."""
        return await self._in_thread(lambda: self._consumer.receive(max_messages, timeout, lease))

    async def receive_batch(
        self, max_messages: int = 500, timeout: float = 1.0, lease: float | timedelta | None = None
    ) -> Batch:
        """Receive messages as one batch, as `QueueConsumer.receive_batch`; cancelled as `receive`."""
        return await self._in_thread(lambda: self._consumer.receive_batch(max_messages, timeout, lease))

    def __aiter__(self) -> AsyncIterator[Message]:
        """Return an iterator over messages, one after the other, until `stop`."""
        return self

    async def __anext__(self) -> Message:
        """Return the next message. The caller settles it."""
        while not self._consumer._is_stopped:
            while self._waiting:
                message = self._waiting.popleft()
                if message.is_held:
                    return message
            now = time.monotonic()
            each_s = (now - self._given_at) / max(1, self._given_count)
            self._wanted = min(MOST_AHEAD, 2 * self._wanted, max(1, int(AHEAD_S / max(each_s, 1e-6))))
            self._waiting.extend(await self.receive(self._wanted))
            self._given_at, self._given_count = time.monotonic(), len(self._waiting)
        self._give_back_waiting()
        raise StopAsyncIteration

    async def run(
        self,
        handler: Callable[[Any], Awaitable[object]],
        *,
        concurrency: int = 100,
        batch: int | None = None,
        batch_wait: float | timedelta = 0.05,
        drain_timeout: float | timedelta = 20,
        retry: Mapping[type[BaseException], Rule] | None = None,
    ) -> RunSummary:
        """
        Call a coroutine function for each message, or each batch, until stopped; then close. See `QueueConsumer.run`.

        `stop` ends the run, and SIGTERM, unless the program handles it. If the run is cancelled, so are the handlers,
        and their messages are released.

        Args:
            handler: Called with one message, or with a batch where *batch* is given; what it returns or raises has the
                meaning that it has there.
            concurrency: Largest number of handlers that run at once. They hold at most `max_in_flight` messages.
            batch: Maximum number of messages of a batch.
            batch_wait: Longest time to collect a batch, seconds or a timedelta.
            drain_timeout: Longest wait for running handlers after a stop, seconds or a timedelta. Those that still run
                are cancelled.
            retry: What becomes of messages whose handler raised, by type of exception.

        Raises:
            ConfigError: A value is out of bounds.
            UsageError: The consumer is closed, or the handler is not a coroutine function.
            KmqError: The client failed permanently, or the last markers could not be written.
        """
        return await self._consumer._run_tasks(
            handler,
            concurrency=concurrency,
            batch=batch,
            batch_wait=batch_wait,
            drain_timeout=drain_timeout,
            retry=retry,
        )

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncTransaction]:
        """
        Open a block whose results and acknowledgements are written atomically when it ends.

        As `QueueConsumer.transaction`, but all errors are raised when the block ends.
        """
        recorded = AsyncTransaction()
        yield recorded
        await asyncio.to_thread(self._commit, recorded)

    def _commit(self, recorded: AsyncTransaction) -> None:
        with self._consumer.transaction() as tx:
            for topic, value, options in recorded.sent:
                tx.send(topic, value, **options)
            for message in recorded.acked:
                tx.ack(message)

    async def flush(self, timeout: float = 30.0) -> None:
        """Wait until the marker of every message settled so far is durable, as `QueueConsumer.flush`."""
        await asyncio.to_thread(self._consumer.flush, timeout)

    def stop(self) -> None:
        """Ask `run` and `async for` to end. May be called from any thread or signal handler."""
        self._consumer.stop()

    def _close(self, *raised: Any) -> None:  # as `__exit__`
        if self._receiving is not None:
            self._receiving.shutdown(wait=True)
        self._give_back_waiting()
        self._consumer.__exit__(*raised)

    def _give_back_waiting(self) -> None:
        while self._waiting:
            self._waiting.popleft()._release_uncounted()

    @property
    def _consumer(self) -> QueueConsumer:
        if self._opened is None:
            message = f"consumer of {self._queue} is not connected: got a call before `async with`; enter its block"
            raise UsageError(message)
        return self._opened

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await in_thread(self._receiving or ThreadPoolExecutor(1), call)


class AsyncTransaction:
    """Results and acknowledgements of a block of `AsyncQueueConsumer.transaction`; nothing is sent before its end."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes | str | None, SendArguments]] = []
        self.acked: list[Message | Batch] = []

    def send(self, topic: str, value: bytes | str | None, **arguments: Unpack[SendArguments]) -> None:
        """Record a result, as `Transaction.send`."""
        self.sent.append((topic, value, arguments))

    def ack(self, message: Message | Batch) -> None:
        """Record that a message, or what is not settled of a batch, is done, as `Transaction.ack`."""
        self.acked.append(message)
