"""The batch that is fetched ahead for a quick caller: its leases, its assignment, and a caller that stays away."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kmq_spark.consumer import pipeline
from kmq_spark.core.markers import MarkerType
from tests.kafka.conftest import Queue, ack, consumer_of, covered, given_back, receive_all, wait_until
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.consumer.consumer import QueueConsumer
    from kmq_spark.consumer.message import Message
    from kmq_spark.core.markers import MessageId

pytestmark = pytest.mark.kafka

MEMBERS = {
    "classic": {"max.poll.interval.ms": "6000", "session.timeout.ms": "6000"},
    "consumer": {"max.poll.interval.ms": "6000", "group.protocol": "consumer"},
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every caller counts as quick, and none as away."""
    monkeypatch.setattr(pipeline, "QUICK_CALLS", 0)
    monkeypatch.setattr(pipeline, "AWAY_S", 3_600.0)


def offsets_of(queue: Queue, *types: MarkerType) -> list[int]:
    """Return the message offsets that markers cover."""
    return [offset for each in queue.markers(*types) for offset in covered(each.marker)]


@pytest.mark.usefixtures("always")
def test_every_message_comes_once_and_never_more_than_asked_for(queue: Queue) -> None:
    queue.send(*map(str, range(1_000)))
    found: list[int] = []
    with consumer_of(queue) as consumer:
        sizes = [70, 30, 1, 200]
        while len(found) < 1_000:
            wanted = sizes[len(found) % 4]
            messages = consumer.receive(wanted, timeout=COMES_S)
            assert 0 < len(messages) <= wanted
            found += ack(messages)
    assert found == list(range(1_000))


def test_batch_is_ahead_of_a_quick_caller_and_given_back_where_the_caller_stays_away(queue: Queue) -> None:
    queue.send(*map(str, range(200)))
    with consumer_of(queue) as consumer:
        received = ack(receive_all(consumer, 5))
        for _ in range(10):
            received += ack(consumer.receive(5, timeout=COMES_S))
        assert wait_until(lambda: len(given_back(queue)) == 5)
        ahead = given_back(queue)
        assert ahead == list(range(len(received), len(received) + 5))
        assert queue.committed() == {0: len(received) + 5}
        assert consumer.in_flight_count == 0
        assert ack(receive_all(consumer, 5)) == [offset + 5 for offset in ahead]


def test_nothing_is_ahead_of_a_slow_caller(queue: Queue) -> None:
    queue.send(*map(str, range(100)))
    with consumer_of(queue) as consumer:
        received = ack(receive_all(consumer, 5))
        for _ in range(6):
            time.sleep(0.15)
            received += ack(consumer.receive(5, timeout=COMES_S))
            assert offsets_of(queue, MarkerType.START) == received


@pytest.mark.usefixtures("always")
def test_close_gives_back_what_is_ahead(queue: Queue) -> None:
    queue.send(*map(str, range(30)))
    with consumer_of(queue) as consumer:
        received = ack(receive_all(consumer, 5))
        assert wait_until(lambda: consumer.in_flight_count == 5)
    started = offsets_of(queue, MarkerType.START)
    assert received == sorted({*started} - {*given_back(queue)}) == offsets_of(queue, MarkerType.END)
    assert given_back(queue)
    assert queue.committed() == {0: len(started)}


@pytest.mark.usefixtures("always")
def test_limit_of_held_messages_covers_what_is_ahead(queue: Queue) -> None:
    queue.send(*map(str, range(100)))
    with consumer_of(queue, max_in_flight=25) as consumer:
        receive_all(consumer, 20, max_messages=10)
        assert consumer.receive(10, timeout=0.2)
        assert len(offsets_of(queue, MarkerType.START)) == 25


@pytest.mark.usefixtures("always")
def test_batch_of_another_lease_than_asked_for_is_given_back(queue: Queue) -> None:
    queue.send(*map(str, range(10)))
    with consumer_of(queue) as consumer:
        ack(receive_all(consumer, 2))
        assert [each.id.message_offset for each in consumer.receive(2, timeout=COMES_S, lease=60)] == [4, 5]
        consumer.flush()
        assert given_back(queue) == [2, 3]
    assert [each.marker.redeliver_after_ms for each in queue.markers(MarkerType.START)][:3] == [30_000, 30_000, 60_000]


@pytest.mark.usefixtures("always")
def test_leases_of_what_is_ahead_are_renewed(queue: Queue) -> None:
    """While the caller works for longer than a lease: what it gets next is held."""
    queue.send(*map(str, range(20)))
    with consumer_of(queue, lease=1) as consumer:
        first = receive_all(consumer, 5)
        time.sleep(2.5)
        second = consumer.receive(5, timeout=COMES_S)
        assert [message.is_held for message in first + second] == [True] * 10
        assert ack(first + second) == list(range(10))
        assert {5, 6, 7, 8, 9} <= {*offsets_of(queue, MarkerType.KEEPALIVE)}


@pytest.mark.usefixtures("always")
def test_batch_whose_lease_is_over_is_dropped(queue: Queue) -> None:
    """The tracker redelivers its messages; its position is committed, so that nobody fetches them again."""
    queue.send(*map(str, range(20)))
    with consumer_of(queue, lease=1, max_lease=1) as consumer:
        ack(receive_all(consumer, 5))
        time.sleep(1.2)
        later = receive_all(consumer, 5)
        assert all(message.is_held for message in later)
        assert ack(later) == [10, 11, 12, 13, 14]
    assert queue.committed()[0] >= 15
    assert not {5, 6, 7, 8, 9} & {*offsets_of(queue, MarkerType.END)}


def serve_until(consumers: list[QueueConsumer], counts: list[int]) -> bool:
    """Serve the group until each consumer owns so many partitions, without receiving anything."""

    def is_shared() -> bool:
        for consumer in consumers:
            consumer._pipeline._fetcher.serve_group()
        return [len(consumer._pipeline.owned) for consumer in consumers] == counts

    return wait_until(is_shared)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.slow)])
def test_position_does_not_go_back_when_a_partition_that_had_messages_ahead_returns(
    make_queue: Callable[..., Queue], protocol: str
) -> None:
    """Another consumer has received and acknowledged more of it meanwhile."""
    queue = make_queue(partitions=2)
    extra = {"group.protocol": protocol}
    with consumer_of(queue, extra=extra) as first:
        assert wait_until(lambda: not first.receive(1, 0.1) and len(first._pipeline.owned) == 2)
        for number in range(12):
            queue.send(*map(str, range(10)), partition=number % 2)
        handed: set[tuple[int, int]] = set()
        ahead: list[MessageId] = []

        def has_both_ahead() -> bool:
            # The client may have fetched all of one partition first.
            handed.update((each.id.queue_partition, each.id.message_offset) for each in first.receive(16, COMES_S))
            ahead[:] = [each.id for batch in first._pipeline._ahead for each in batch.content]
            return {each.queue_partition for each in ahead} == {0, 1}

        assert wait_until(has_both_ahead)
        with consumer_of(queue, extra=extra) as second:
            assert serve_until([first, second], [1, 1])
            (moved,) = second._pipeline.owned
            acked: list[Message] = []

            def has_all() -> bool:
                acked.extend(second.receive(100, timeout=0.2))
                return bool(acked) and acked[-1].id.message_offset == 59

            assert wait_until(has_all)
            ack(acked)
        assert serve_until([first], [2])
        found: list[Message] = []
        for _ in range(5):
            found += first.receive(10, timeout=0.2)
            assert queue.committed()[moved] == 60
        queue.send("new", partition=moved)

        def has_new() -> bool:
            found.extend(first.receive(10, timeout=0.2))
            return any(each.value == b"new" for each in found)

        assert wait_until(has_new)
        assert queue.committed()[moved] == 61
        places = [(each.id.queue_partition, each.id.message_offset) for each in acked + found]
        assert len(places) == len({*places})
        assert not handed & {*places}
        assert given_back(queue) == [each.message_offset for each in ahead if each.queue_partition == moved]


@pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.slow)])
def test_records_of_before_a_pause_that_was_too_long_for_the_group_are_not_handed_out(
    queue: Queue, protocol: str
) -> None:
    """A job of more than max.poll.interval.ms: the group gives the partition to another consumer meanwhile."""
    count = 3_000
    queue.send(*map(str, range(count)))
    with consumer_of(queue, max_in_flight=5_000, extra=MEMBERS[protocol]) as first:
        (long,) = receive_all(first, 1)
        with consumer_of(queue, max_in_flight=5_000, extra=MEMBERS[protocol]) as second:
            others = ack(receive_all(second, count - 1, max_messages=count))
            assert sorted(others) == list(range(1, count))
            assert first.receive(count, timeout=2.0) == []
            assert long.is_held
            long.ack()
        first.flush()
    assert sorted(offsets_of(queue, MarkerType.END)) == list(range(count))
