"""Handlers whose call returns before the work is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import ConfigError, UsageError
from tests.kafka.conftest import Queue, consumer_of, covered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark.consumer.message import Message

pytestmark = pytest.mark.kafka


def generate(_message: Message) -> Iterator[int]:
    """Do nothing until it is iterated."""
    yield 1


def test_handler_whose_call_only_begins_work_is_refused_before_anything_is_received(queue: Queue) -> None:
    queue.send("a")
    with consumer_of(queue) as consumer, pytest.raises(ConfigError, match="handler is a generator function"):
        consumer.run(generate)
    assert queue.markers() == []


def test_message_is_given_back_uncounted_where_its_handler_returns_work_that_is_not_done(queue: Queue) -> None:
    async def handle() -> None:
        """Do nothing until it is awaited."""

    queue.send("a")
    consumer = consumer_of(queue)
    with pytest.raises(UsageError, match="handler returned work that has not run"):
        consumer.run(lambda _message: handle(), concurrency=1)
    assert queue.markers(MarkerType.END) == []
    (release,) = queue.markers(MarkerType.KEEPALIVE)
    assert (covered(release.marker), release.marker.never_handed_out) == ([0], True)
