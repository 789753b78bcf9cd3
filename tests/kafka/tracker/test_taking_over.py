"""A tracker that starts again after a failure does not take its queue back from a newer tracker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kmq_spark.errors import FencedError
from kmq_spark.kafka.topics import create_queue
from kmq_spark.producer.producer import QueueProducer
from kmq_spark.tracker.sender.limits import SenderLimits
from kmq_spark.tracker.sender.redelivery import RedeliverySender
from tests.kafka.tracker.test_redelivery_sender import due, outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kmq_spark.kafka.topics import QueueLayout

pytestmark = pytest.mark.kafka


@pytest.fixture
def layout(bootstrap_servers: str) -> QueueLayout:
    """A queue with two messages in its first partition."""
    layout = create_queue(f"taking-over-{time.time_ns()}", bootstrap_servers=bootstrap_servers, partitions=2)
    with QueueProducer(layout.topics.queue_topic, bootstrap_servers=bootstrap_servers) as producer:
        for value in "ab":
            producer.send(value, partition=0)
    return layout


@pytest.fixture
def make_sender(bootstrap_servers: str, layout: QueueLayout) -> Iterator[Callable[[], RedeliverySender]]:
    """Make senders of the queue, not yet open."""
    made: list[RedeliverySender] = []

    def make() -> RedeliverySender:
        limits = SenderLimits(timeout=10)
        made.append(RedeliverySender(layout, bootstrap_servers=bootstrap_servers, limits=limits))
        return made[-1]

    yield make
    for sender in made:
        sender.close()


def test_tracker_that_starts_again_leaves_the_queue_to_the_newer_one(
    make_sender: Callable[[], RedeliverySender],
) -> None:
    """After SIGSTOP and SIGCONT its query fails for another reason than fencing: it must not fence the newer one."""
    older, newer = make_sender(), make_sender()
    older.open()
    newer.open()
    again = make_sender()
    with pytest.raises(FencedError, match=f"was fenced: newer tracker {newer.tracker_id} has taken over"):
        again.open(older.known_ids)
    assert newer.deliver([outcome(due(0))]).redelivered == 1  # still has the queue
    with pytest.raises(FencedError):
        older.deliver([outcome(due(1))])


def test_tracker_that_starts_again_alone_goes_on(make_sender: Callable[[], RedeliverySender]) -> None:
    first, second, third = make_sender(), make_sender(), make_sender()
    first.open()
    second.open(first.known_ids)
    third.open(second.known_ids)
    assert {second.tracker_id, third.tracker_id} <= third.known_ids
    assert third.deliver([outcome(due(0))]).redelivered == 1


def test_tracker_that_is_new_takes_over_from_whoever_has_the_queue(make_sender: Callable[[], RedeliverySender]) -> None:
    older, newer = make_sender(), make_sender()
    older.open()
    newer.open()
    assert {older.tracker_id, newer.tracker_id} <= newer.known_ids
