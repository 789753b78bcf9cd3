"""Send messages to a queue in an event loop: `await` returns when the message is durable."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from kmq_spark.errors import UsageError
from kmq_spark.producer.producer import QueueProducer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta
    from types import TracebackType
    from typing import Self, Unpack

    from kmq_spark.core.markers import MessageId
    from kmq_spark.errors import KmqError
    from kmq_spark.kafka.serializers import Serializer
    from kmq_spark.producer.options import Headers


class ProducerOptions(TypedDict, total=False):
    """The arguments of `QueueProducer`, whose documentation says what they mean."""

    bootstrap_servers: str
    max_message_bytes: int
    delivery_timeout: float | timedelta
    serializer: Serializer | None
    timeout: float | timedelta
    extra: Mapping[str, str] | None


class SendArguments(TypedDict, total=False):
    """The arguments of `QueueProducer.send`."""

    key: bytes | str | None
    headers: Headers | None
    partition: int | None
    logical_queue: str | None
    delay: float | timedelta | None
    at: datetime | float | None
    ttl: float | timedelta | None


class AsyncQueueProducer:
    """
    Producer of a queue for asyncio. Use it in an `async with` block, which connects and closes it.

    Many messages at once: `await asyncio.gather(*(producer.send(value) for value in values))`.
    """

    def __init__(self, queue: str, **options: Unpack[ProducerOptions]) -> None:
        """Keep the arguments, those of `QueueProducer`. Nothing is checked before the block is entered."""
        self._queue, self._options = queue, options
        self._opened: QueueProducer | None = None

    async def __aenter__(self) -> Self:
        """Connect. Raises what `QueueProducer(...)` raises."""
        self._opened = await asyncio.to_thread(QueueProducer, self._queue, **self._options)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the rest, and disconnect, also where the block was cancelled."""
        closing = asyncio.ensure_future(asyncio.to_thread(self._producer.__exit__, kind, error, trace))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    async def send(self, value: Any, **arguments: Unpack[SendArguments]) -> MessageId:  # noqa: ANN401  # as `QueueProducer`
        """
        Send a message, as `QueueProducer.send`; return its id when it is durable, with offset -1 if that is unknown.

        A cancelled call may have sent it.

        Raises:
            KmqError: It was not sent, or its delivery failed.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[MessageId] = loop.create_future()

        def report(found: MessageId | None, error: KmqError | None) -> None:
            loop.call_soon_threadsafe(partial(_settle, answer, found, error))

        if "delay" in arguments or "at" in arguments:
            # The first one asks the broker how long the topics keep messages.
            await asyncio.to_thread(self._producer.send, value, on_delivery=report, **arguments)
        else:
            self._producer.send(value, on_delivery=report, **arguments)
        return await answer

    @property
    def _producer(self) -> QueueProducer:
        if self._opened is None:
            message = f"producer of {self._queue} is not connected: got a call before `async with`; enter its block"
            raise UsageError(message)
        return self._opened


def _settle(answer: asyncio.Future[MessageId], found: MessageId | None, error: KmqError | None) -> None:
    if answer.done():
        return  # the caller was cancelled
    if error is not None:
        answer.set_exception(error)
    elif found is not None:
        answer.set_result(found)
