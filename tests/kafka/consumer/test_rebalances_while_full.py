"""A consumer at its limit of held messages: its partitions are revoked and assigned again, other members join."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kafka.conftest import Queue, ack, consumer_of, receive_all, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.consumer.consumer import QueueConsumer
    from kmq_spark.consumer.message import Message

pytestmark = pytest.mark.kafka


def fill(queue: Queue, consumer: QueueConsumer, partitions: int) -> list[Message]:
    """Let a consumer own every partition and hold all it may, until it has paused its partitions."""
    assert wait_until(lambda: not consumer.receive(1, 0.1) and len(consumer._pipeline.owned) == partitions)
    for partition in range(partitions):
        queue.send(*"ab", partition=partition)
    messages = receive_all(consumer, 2)
    assert consumer.receive(1, timeout=1.5) == []
    assert consumer._pipeline._fetcher._paused == set(range(partitions))
    return messages


@pytest.mark.parametrize("group_protocol", ["classic", pytest.param("consumer", marks=pytest.mark.slow)])
def test_partition_that_was_revoked_while_the_consumer_was_full_is_read_when_it_comes_back(
    make_queue: Callable[..., Queue], group_protocol: str
) -> None:
    queue = make_queue(partitions=2)
    with consumer_of(queue, max_in_flight=2, extra={"group.protocol": group_protocol}) as first:
        held = fill(queue, first, partitions=2)
        with consumer_of(queue, extra={"group.protocol": group_protocol}) as second:

            def shared() -> bool:
                first.receive(1, 1.3)
                ack(second.receive(1, 0.1))
                return len(first._pipeline.owned) == 1 == len(second._pipeline.owned)

            assert wait_until(shared)
        ack(held)

        def owns_all() -> bool:
            ack(first.receive(1, 0.1))
            return len(first._pipeline.owned) == 2

        assert wait_until(owns_all)
        for partition in range(2):
            queue.send("new", partition=partition)
        found: set[int] = set()

        def all_read() -> bool:
            messages = first.receive(2, 0.2)
            ack(messages)
            found.update(each.id.queue_partition for each in messages if each.value == b"new")
            return found == {0, 1}

        assert wait_until(all_read), found
