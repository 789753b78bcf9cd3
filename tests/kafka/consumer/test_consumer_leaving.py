"""Consumers that close, lose a partition, are killed or forked: what they leave behind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient

from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import LeaseLostError, UsageError
from kmq_spark.kafka.lookups import EARLIEST, offsets_of
from kmq_spark.kafka.settings import admin_config
from tests.kafka.conftest import Queue, add_partitions, consumer_of, covered, receive_all, wait_until
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.consumer.consumer import QueueConsumer

pytestmark = pytest.mark.kafka


def test_closing_gives_back_what_is_held_and_leaves_the_group(queue: Queue) -> None:
    queue.send(*"abc")
    consumer = consumer_of(queue)
    messages = receive_all(consumer, 2, max_messages=2)
    messages[0].ack()
    consumer.close()
    consumer.close()
    (release,) = queue.markers(MarkerType.KEEPALIVE)
    assert (covered(release.marker), release.marker.redeliver_after_ms) == ([1], 0)
    assert not release.marker.never_handed_out
    assert queue.committed() == {0: 2}
    with pytest.raises(LeaseLostError, match="the consumer was closed"):
        messages[1].ack()
    with pytest.raises(UsageError, match="consumer is closed"):
        consumer.receive()
    with consumer_of(queue) as other:
        # at once: a member that had not left would be waited for
        assert [each.value for each in receive_all(other, 1)] == [b"c"]


def test_held_messages_stay_held_when_their_partition_goes_to_another(make_queue: Callable[..., Queue]) -> None:
    queue = make_queue(partitions=2)
    for partition in range(2):
        queue.send(*"abc", partition=partition)
    with consumer_of(queue) as first:
        messages = receive_all(first, 6)
        with consumer_of(queue) as second:

            def rebalanced() -> bool:
                first.receive(1, 0.1)
                second.receive(1, 0.1)
                return len(second._pipeline.owned) == 1 == len(first._pipeline.owned)

            assert wait_until(rebalanced)
            for message in messages:
                message.ack()
            first.flush()
            queue.send("new", partition=0)
            queue.send("new", partition=1)
            got = [each.value for each in receive_all(first, 1) + receive_all(second, 1)]
            assert got == [b"new", b"new"]
    ended = [offset for each in queue.markers(MarkerType.END) for offset in covered(each.marker)]
    assert sorted(ended) == [0, 0, 1, 1, 2, 2]


def test_client_that_knew_the_older_partitions_finds_the_offsets_of_a_new_one(make_queue: Callable[..., Queue]) -> None:
    """It finds no leader until it reads the metadata anew; a consumer that was given the partition stood still."""
    queue = make_queue(partitions=1)
    admin = AdminClient(admin_config(queue.bootstrap_servers))
    assert offsets_of(admin, queue.name, [0], EARLIEST, 10) == {0: 0}
    add_partitions(queue.bootstrap_servers, 2, queue.name)
    assert offsets_of(admin, queue.name, [1], EARLIEST, COMES_S) == {1: 0}


def test_forked_process_must_make_its_own_consumer(queue: Queue) -> None:
    queue.send("a")
    consumer = consumer_of(queue)
    (message,) = receive_all(consumer, 1)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if refused_in_child(consumer) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    message.ack()
    consumer.close()
    assert len(queue.markers(MarkerType.END)) == 1


def refused_in_child(consumer: QueueConsumer) -> bool:
    """Return whether a child process gets an error from each call, and leaves the parent's clients alone."""
    refused = 0
    for call in (consumer.receive, consumer.flush, consumer.transaction().__enter__):
        try:
            call()
        except UsageError:
            refused += 1
    consumer.close()
    return refused == 3
