"""A consumer whose broker is far away or does not answer: what it writes meanwhile."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from faults.proxy import ProxiedBroker
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.core.markers import MarkerType
from kmq_spark.kafka.topics import create_queue
from tests.brokers import quick_java
from tests.kafka.conftest import Queue, covered, receive_all, stopped_if_it_hangs, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark.consumer.message import Message

pytestmark = pytest.mark.kafka

COUNT = 100
DELAY_S = 0.1
"""In each direction, so a START takes 0.2 s. A run takes as much ahead as its handlers do in 0.1 s."""


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedBroker]:
    """Yield a broker behind proxies."""
    started = ProxiedBroker.start(tmp_path_factory.mktemp("proxied"), quick_java())
    with closing(started.broker), closing(started.workers), closing(started.trackers):
        yield started


@pytest.fixture
def queue(proxied: ProxiedBroker, request: pytest.FixtureRequest) -> Queue:
    """Create a queue with one partition. Its own clients do not use a proxy."""
    proxied.workers.heal()
    proxied.workers.delay(0)
    name = request.node.name.replace("_", "-")
    create_queue(name, bootstrap_servers=proxied.broker.bootstrap_servers, partitions=1)
    return Queue(name, proxied.broker.bootstrap_servers)


def test_run_starts_more_messages_at_once_where_each_start_takes_long(proxied: ProxiedBroker, queue: Queue) -> None:
    """One message a round trip would be 100 STARTs."""
    queue.send(*map(str, range(COUNT)))
    proxied.workers.delay(DELAY_S)
    consumer = QueueConsumer(queue.name, bootstrap_servers=proxied.workers.address)
    handled: list[Message] = []

    def handle(message: Message) -> None:
        handled.append(message)
        if len(handled) == COUNT:
            consumer.stop()

    with stopped_if_it_hangs(consumer):
        consumer.run(handle, concurrency=1)
    assert len(handled) == COUNT
    assert len(queue.markers(MarkerType.START)) <= COUNT // 4


def test_settled_messages_are_collected_while_the_marker_before_is_not_confirmed(
    proxied: ProxiedBroker, queue: Queue
) -> None:
    """A marker each 5 ms would fill the client's limit of requests, and librdkafka then uses a whole core."""
    queue.send(*map(str, range(21)))
    with QueueConsumer(queue.name, bootstrap_servers=proxied.workers.address) as consumer:
        messages = receive_all(consumer, 21)
        proxied.workers.cut()
        messages[0].ack()
        assert wait_until(lambda: consumer._producer.is_waiting)
        for number in range(1, 21, 2):
            messages[number].ack()
            messages[number + 1].release()
            # Longer than `LINGER_S`, the time between two rounds of the writer.
            time.sleep(0.02)
        proxied.workers.heal()
        # Nothing is flushed: they are written by themselves.
        assert wait_until(lambda: len(queue.markers(MarkerType.END, MarkerType.KEEPALIVE)) > 2)
        first, second = queue.markers(MarkerType.END)
        (release,) = queue.markers(MarkerType.KEEPALIVE)
    assert covered(first.marker) == [0]
    assert covered(second.marker) == list(range(1, 21, 2))
    assert covered(release.marker) == list(range(2, 21, 2))
