"""Producer and consumer in an event loop."""

# ruff: noqa: ASYNC110  # what is waited for is in the log

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark import (
    AsyncQueueConsumer,
    AsyncQueueProducer,
    Batch,
    BatchFailed,
    KafkaClientError,
    Message,
    MessageId,
    Reject,
    RunSummary,
    UsageError,
)
from tests.kafka.conftest import Queue, consumer_of, ended, read_all, receive_all, track
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.kafka


def consumer_in_loop(queue: Queue, **options: Any) -> AsyncQueueConsumer:
    return AsyncQueueConsumer(queue.name, bootstrap_servers=queue.bootstrap_servers, **options)


def run_until(queue: Queue, handler: Callable[[Any], Any], is_done: Callable[[], bool], **options: Any) -> RunSummary:
    """Run a handler until something is so; return the summary."""
    of_consumer = {name: options.pop(name) for name in ("lease", "max_lease", "max_in_flight") if name in options}

    async def main() -> RunSummary:
        async with consumer_in_loop(queue, **of_consumer) as consumer:
            running = asyncio.create_task(consumer.run(handler, **options))
            until = time.monotonic() + COMES_S
            while not (is_done() or running.done()) and time.monotonic() < until:
                await asyncio.sleep(0.02)
            consumer.stop()
            return await running

    return asyncio.run(main())


def test_message_that_cannot_be_sent_is_an_error_of_its_call(queue: Queue) -> None:
    async def main() -> tuple[Any, Any]:
        async with AsyncQueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers) as producer:
            return await asyncio.gather(producer.send(b"x" * 2_000_000), producer.send("b"), return_exceptions=True)

    too_large, sent = asyncio.run(main())
    assert isinstance(too_large, KafkaClientError)
    assert sent == MessageId(0, 0)


def test_call_outside_the_block_is_an_error() -> None:
    consumer = AsyncQueueConsumer("orders", bootstrap_servers="127.0.0.1:1")
    with pytest.raises(UsageError, match="consumer of orders is not connected: got a call before `async with`"):
        asyncio.run(consumer.receive())


def test_handlers_wait_at_once_in_one_loop(queue: Queue) -> None:
    count, threads, waiting, most = 2_000, set(), 0, 0
    queue.send(*map(str, range(count)))
    go_on = asyncio.Event()

    async def handle(_message: Message) -> None:
        nonlocal waiting, most
        threads.add(threading.get_ident())
        waiting += 1
        most = max(most, waiting)
        if waiting == count:
            go_on.set()
        await go_on.wait()

    summary = run_until(
        queue, handle, lambda: go_on.is_set() and len(ended(queue)) == count, concurrency=count, max_in_flight=count
    )
    assert (summary.acked, most, len(threads)) == (count, count, 1)


def test_batches_are_handled_and_their_failures_come_again(queue: Queue) -> None:
    queue.send(*map(str, range(20)))
    seen: list[int] = []

    async def handle(batch: Batch) -> None:
        await asyncio.sleep(0)
        seen.append(len(batch))
        raise BatchFailed({0: Reject("first"), 1: "second"})

    summary = run_until(queue, handle, lambda: sum(seen) == 20, batch=20, batch_wait=5)
    assert (summary.acked, summary.released, summary.rejected) == (20 - 2 * len(seen), len(seen), len(seen))


def test_cancelled_run_loses_no_message(queue: Queue) -> None:
    queue.send(*"abc")
    seen = []

    async def handle(message: Message) -> None:
        seen.append(message.value)
        await asyncio.sleep(3_600)

    async def main() -> None:
        async with consumer_in_loop(queue) as consumer:
            running = asyncio.create_task(consumer.run(handle))
            while len(seen) < 3:
                await asyncio.sleep(0.02)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert running.cancelled()

    asyncio.run(main())
    assert track(queue).redelivered == 3


def test_cancelled_receive_gives_back_what_it_has_received(queue: Queue) -> None:
    async def main() -> None:
        async with consumer_in_loop(queue) as consumer:
            assert await consumer.receive(timeout=0) == []
            receiving = asyncio.create_task(consumer.receive(10, timeout=COMES_S))
            await asyncio.sleep(0.1)
            receiving.cancel()
            await asyncio.to_thread(queue.send, "a")
            await asyncio.gather(receiving, return_exceptions=True)

    asyncio.run(main())
    assert track(queue).redelivered == 1
    with consumer_of(queue) as consumer:
        found = receive_all(consumer, 1)
    assert [message.delivery_count for message in found] == [1]


def test_results_and_acks_of_a_block_are_one_transaction(queue: Queue, make_queue: Callable[..., Queue]) -> None:
    results = make_queue()
    queue.send("a")

    async def main() -> None:
        async with consumer_in_loop(queue) as consumer:
            (message,) = await consumer.receive(timeout=COMES_S)
            async with consumer.transaction() as tx:
                tx.send(results.name, b"done", key="k")
                tx.ack(message)
            with pytest.raises(UsageError):
                message.release()

    asyncio.run(main())
    assert [record.value() for record in read_all(queue.bootstrap_servers, results.name)] == [b"done"]
    assert len(ended(queue)) == 1


def test_handler_that_is_not_awaitable_ends_the_run(queue: Queue) -> None:
    queue.send("a")
    with pytest.raises(UsageError, match="handler is not a coroutine function: got NoneType for <Message 0:0"):
        run_until(queue, lambda _message: None, lambda: False)
    assert track(queue).redelivered == 1


WAITING = 10_000

WAITS = """
import asyncio, sys
from kmq_spark import AsyncQueueConsumer

async def handle(message):
    global running
    running += 1
    if running == {waiting}:
        print("all wait", flush=True)
    await asyncio.sleep(3600)

async def main():
    options = {{"bootstrap_servers": sys.argv[2], "lease": 20, "max_in_flight": {waiting}}}
    async with AsyncQueueConsumer(sys.argv[1], **options) as consumer:
        await consumer.run(handle, concurrency={waiting}, drain_timeout=1)

running = 0
asyncio.run(main())
"""


@pytest.mark.slow  # ten thousand handlers
def test_ten_thousand_handlers_wait_at_once_and_lose_nothing_when_their_process_ends(
    make_queue: Callable[..., Queue],
) -> None:
    queue = make_queue(2)
    queue.send(*map(str, range(WAITING)))
    command = [sys.executable, "-c", WAITS.format(waiting=WAITING), queue.name, queue.bootstrap_servers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "all wait\n"
        process.terminate()
        assert process.wait(COMES_S) == 0
    assert track(queue).redelivered == WAITING
    with consumer_of(queue, max_in_flight=WAITING) as consumer:
        again = receive_all(consumer, WAITING, max_messages=WAITING)
        assert sorted(int(message.value or b"") for message in again) == list(range(WAITING))
        assert {message.delivery_count for message in again} == {2}


def test_leases_are_renewed_while_the_event_loop_is_blocked(queue: Queue) -> None:
    queue.send("a")
    counts: list[int] = []

    async def handle(message: Message) -> None:
        counts.append(message.delivery_count)
        time.sleep(3)  # noqa: ASYNC251  # blocks the loop for three leases
        track(queue)

    assert run_until(queue, handle, lambda: bool(counts) and len(ended(queue)) == 1, lease=1).acked == 1
    assert counts == [1]


def test_message_of_an_event_loop_that_is_blocked_beyond_max_lease_comes_again(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts as lost, and is logged."""
    queue.send("a")
    counts: list[int] = []

    async def handle(message: Message) -> None:
        counts.append(message.delivery_count)
        if message.delivery_count == 1:
            time.sleep(3)  # noqa: ASYNC251  # blocks the loop, 2 s beyond max_lease
            track(queue)

    summary = run_until(queue, handle, lambda: len(ended(queue)) == 2, lease=1, max_lease=1)
    assert (counts, summary.acked, summary.lost) == ([1, 2], 1, 1)
    assert "lease of message 0:0 is lost: the lease ran out; " in caplog.text
    assert "raise max_lease if handlers take longer" in caplog.text
