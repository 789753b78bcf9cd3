"""Handlers whose call returns before the work is done: coroutines are awaited, generators are refused."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import ConfigError, UsageError
from tests.kafka.conftest import Queue, consumer_of, covered, ended, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from kmq_spark.consumer.message import Message

pytestmark = pytest.mark.kafka


async def handle(_message: Message, _others: int = 0) -> None:
    """Handle a message on an event loop."""


def generate(_message: Message) -> Iterator[int]:
    """Do nothing until it is iterated."""
    yield 1


class Handler:
    """An object whose call is asynchronous."""

    async def __call__(self, message: Message) -> None:
        """Handle a message on an event loop."""
        await handle(message)


async def generate_in_a_loop(_message: Message) -> AsyncIterator[int]:
    """Do nothing until it is iterated."""
    yield 1


COROUTINES: list[Any] = [handle, functools.partial(handle, _others=1), Handler()]


@pytest.mark.parametrize("handler", COROUTINES)
def test_coroutine_is_awaited_whatever_it_hides_in(queue: Queue, handler: Any) -> None:  # noqa: ANN401  # of any type
    queue.send("a")
    consumer = consumer_of(queue)

    def stop() -> None:
        wait_until(lambda: bool(ended(queue)))
        consumer.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    consumer.run(handler)
    stopper.join()
    assert len(ended(queue)) == 1


REFUSED: list[Any] = [generate, functools.partial(generate), generate_in_a_loop, "handle"]


@pytest.mark.parametrize("handler", REFUSED)
def test_handler_whose_call_only_begins_work_is_refused_before_anything_is_received(queue: Queue, handler: Any) -> None:  # noqa: ANN401  # of a wrong type
    queue.send("a")
    with (
        consumer_of(queue) as consumer,
        pytest.raises(ConfigError, match=r"handler is an? (asynchronous )?generator function|handler is not callable"),
    ):
        consumer.run(handler)
    assert queue.markers() == []


def test_message_is_given_back_uncounted_where_its_handler_returns_work_that_is_not_done(queue: Queue) -> None:
    queue.send("a")
    consumer = consumer_of(queue)
    with pytest.raises(UsageError, match="handler returned work that has not run"):
        consumer.run(lambda message: handle(message), concurrency=1)  # noqa: PLW0108  # a plain function
    assert queue.markers(MarkerType.END) == []
    (release,) = queue.markers(MarkerType.KEEPALIVE)
    assert (covered(release.marker), release.marker.never_handed_out) == ([0], True)
