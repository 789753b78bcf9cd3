"""`receive` with prefetch: the same messages and guarantees, while the next batch is fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import ConfigError
from tests.kafka.conftest import consumer_of, covered, receive_all, wait_until
from tests.limits import COMES_S

if TYPE_CHECKING:
    from kmq_spark.consumer.message import Message
    from tests.kafka.conftest import Queue

pytestmark = pytest.mark.kafka


def test_every_message_comes_once_and_never_more_than_asked_for(queue: Queue) -> None:
    queue.send(*map(str, range(1_000)))
    found: list[bytes] = []
    with consumer_of(queue, prefetch=3) as consumer:
        sizes = [70, 30, 1, 200]
        while len(found) < 1_000:
            wanted = sizes[len(found) % 4]
            messages = consumer.receive(wanted, timeout=COMES_S)
            assert 0 < len(messages) <= wanted
            for message in messages:
                found.append(message.value or b"")
                message.ack()
    assert found == [str(number).encode() for number in range(1_000)]


def test_what_no_caller_asked_for_is_given_back_uncounted(queue: Queue) -> None:
    """Three batches were fetched and one was handed out: the other two are released without counting a delivery."""
    queue.send(*map(str, range(30)))
    with consumer_of(queue, prefetch=2) as consumer:
        assert wait_until(lambda: bool(messages := consumer.receive(5, timeout=1.0)) and _ack(messages))
        assert wait_until(lambda: consumer.in_flight_count > 0 or bool(consumer._receiver._pending))
    started = {offset for each in queue.markers(MarkerType.START) for offset in covered(each.marker)}
    unseen = {
        offset
        for each in queue.markers(MarkerType.KEEPALIVE)
        if each.marker.never_handed_out
        for offset in covered(each.marker)
    }
    ended = {offset for each in queue.markers(MarkerType.END) for offset in covered(each.marker)}
    assert started == unseen | ended
    assert not unseen & ended
    assert unseen


def _ack(messages: list[Message]) -> bool:
    for message in messages:
        message.ack()
    return True


def test_bound_on_what_is_held_covers_what_is_prefetched(queue: Queue) -> None:
    queue.send(*map(str, range(100)))
    with consumer_of(queue, prefetch=8, max_in_flight=25) as consumer:
        receive_all(consumer, 10, max_messages=10)
        consumer.receive(10, timeout=0.2)
        assert consumer.in_flight_count + sum(len(b.content) for b in consumer._receiver._pending) <= 25


def test_lease_of_its_own_does_not_go_with_prefetch(queue: Queue) -> None:
    with (
        consumer_of(queue, prefetch=1) as consumer,
        pytest.raises(ConfigError, match="cannot be combined with prefetch"),
    ):
        consumer.receive(1, lease=60)
