"""The consumer: START before hand-off, leases, settling, and what a closed consumer leaves behind."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.consumer import marker_writer
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.core.markers import MarkerType, Outcome, Release
from kmq_spark.errors import ConfigError, LeaseLostError, TopicError, UsageError
from kmq_spark.kafka.settings import producer_config
from tests.kafka.conftest import Queue, consumer_of, covered, receive_all, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.kafka


def test_receive_returns_at_most_what_was_asked_for_and_starts_no_more(queue: Queue) -> None:
    queue.send(*"abcdef")
    with consumer_of(queue) as consumer:
        assert [each.value for each in receive_all(consumer, 2, max_messages=2)] == [b"a", b"b"]
        (start,) = queue.markers(MarkerType.START)
        assert covered(start.marker) == [0, 1]
        assert consumer.in_flight_count == 2


def test_start_is_durable_and_position_committed_when_messages_are_handed_out(queue: Queue) -> None:
    queue.send(*"abc")
    with consumer_of(queue, lease=5, extra={"client.id": "worker-7"}) as consumer:
        receive_all(consumer, 3)
        (start,) = queue.markers(MarkerType.START)
        assert start.marker.type == MarkerType.START
        assert start.marker.redeliver_after_ms == 5_000
        assert start.marker.consumer_id == "worker-7"
        assert wait_until(lambda: queue.committed() == {0: 3})


def test_one_start_a_partition_and_batch_on_the_markers_partition_of_the_queue_partition(
    make_queue: Callable[..., Queue],
) -> None:
    queue = make_queue(partitions=3)
    for partition in range(3):
        queue.send(*"abcd", partition=partition)
    with consumer_of(queue) as consumer:
        assert wait_until(lambda: consumer.receive(1, 0.2) is not None and len(consumer._pipeline.owned) == 3)
        receive_all(consumer, 12 - consumer.in_flight_count)
    starts = queue.markers(MarkerType.START)
    assert all(each.marker_partition == each.marker.queue_partition for each in starts)
    for number in range(3):
        assert [o for each in starts if each.marker_partition == number for o in covered(each.marker)] == [0, 1, 2, 3]


def test_messages_of_several_delivery_counts_get_a_start_each(queue: Queue) -> None:
    from confluent_kafka import Producer  # noqa: PLC0415  # QueueProducer refuses our own headers

    producer = Producer(producer_config(queue.bootstrap_servers))
    for count in (None, b"1", b"1", b"4"):
        producer.produce(queue.name, b"x", headers=[("kmq-delivery-count", count)] if count else None)
    producer.flush(10)
    with consumer_of(queue) as consumer:
        messages = receive_all(consumer, 4)
    assert [each.delivery_count for each in messages] == [1, 2, 2, 5]
    starts = {each.marker.delivery_count: covered(each.marker) for each in queue.markers(MarkerType.START)}
    assert starts == {1: [0], 2: [1, 2], 5: [3]}


def test_acks_are_gathered_into_one_end(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker_writer, "LINGER_S", 0.3)
    queue.send(*"abcdef")
    with consumer_of(queue) as consumer:
        messages = receive_all(consumer, 6)
        for number in (5, 0, 1, 3):
            messages[number].ack()
        consumer.flush()
        (end,) = queue.markers(MarkerType.END)
        assert covered(end.marker) == [0, 1, 3, 5]
        assert end.marker.outcome == Outcome.ACKED
        assert consumer.in_flight_count == 2


def test_release_and_reject_write_their_markers(queue: Queue) -> None:
    queue.send(*"abcd")
    with consumer_of(queue) as consumer:
        first, second, third, fourth = receive_all(consumer, 4)
        first.release()
        second.release(delay=1.5)
        third.reject("no such customer")
        fourth.ack()
        consumer.flush()
    delays = {each.marker.redeliver_after_ms: covered(each.marker) for each in queue.markers(MarkerType.KEEPALIVE)}
    assert delays == {0: [0], 1_500: [1]}
    assert {each.marker.release for each in queue.markers(MarkerType.KEEPALIVE)} == {Release.GIVEN_BACK}
    ends = {each.marker.outcome: each.marker for each in queue.markers(MarkerType.END)}
    assert covered(ends[Outcome.REJECTED]) == [2]
    assert ends[Outcome.REJECTED].reason == "no such customer"
    assert covered(ends[Outcome.ACKED]) == [3]


def test_keep_alive_holds_a_message_until_its_bound_and_then_lets_go(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """The keep-alive has a limit, so that a hanging handler cannot hold its message indefinitely."""
    queue.send("a")
    with consumer_of(queue, lease=1, max_lease=2.5) as consumer:
        (message,) = receive_all(consumer, 1)
        assert not wait_until(lambda: consumer.in_flight_count == 0, 1.4)
        assert wait_until(lambda: consumer.in_flight_count == 0)
        # A lease holds nothing from its end on; the thread that reports it looks every 100 ms.
        assert wait_until(lambda: "lease lost: 1 message(s)" in caplog.text)
        with pytest.raises(LeaseLostError):
            message.ack()
        consumer.flush()
    (start,) = queue.markers(MarkerType.START)
    renewals = queue.markers(MarkerType.KEEPALIVE)
    assert len(renewals) >= 2
    assert all(each.marker.redeliver_after_ms == 1_000 for each in renewals)
    # A second for the sweep, on a slow machine.
    assert renewals[-1].appended_at_ms + 1_000 <= start.appended_at_ms + 2_500 + 1_000
    assert len(queue.markers(MarkerType.END)) == 1


def test_receive_waits_for_the_first_message_alone(queue: Queue) -> None:
    """`receive` returns as soon as it has one message; it does not wait for a full batch."""
    with consumer_of(queue) as consumer:
        assert wait_until(lambda: consumer.receive(1, timeout=0.1) == [] and bool(consumer._pipeline.owned))
        threading.Timer(0.3, queue.send, args="ab").start()
        # One that waits for a hundred outlasts the time of this test.
        assert consumer.receive(100, timeout=3_600)


def test_receive_in_two_threads_is_an_error(queue: Queue) -> None:
    with consumer_of(queue) as consumer:
        thread = threading.Thread(target=consumer.receive, args=(1, 1.0))
        thread.start()
        time.sleep(0.2)
        with pytest.raises(UsageError, match="receive is running in another thread"):
            consumer.receive()
        thread.join()


def test_missing_queue_is_reported_with_the_command(bootstrap_servers: str) -> None:
    with pytest.raises(TopicError, match="run `kmq queue create not-there`"):
        QueueConsumer("not-there", bootstrap_servers=bootstrap_servers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lease": 0}, "lease is out of bounds: got 0, 1 to 43200 seconds"),
        ({"lease": 5, "max_lease": 4}, "max_lease is out of bounds: got 4, 5 to 43200 seconds"),
        ({"lease": 5, "max_in_flight": 0}, "max_in_flight is out of bounds"),
        ({"extra": {"enable.auto.commit": "true"}}, "setting enable.auto.commit would break a guarantee"),
    ],
)
def test_value_out_of_bounds_is_refused_before_connecting(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QueueConsumer("orders", bootstrap_servers="127.0.0.1:1", **options)
