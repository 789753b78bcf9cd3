"""A message that kills its process is handed out alone, so that no other message loses a delivery."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from kmq_spark.consumer import admission
from kmq_spark.core.markers import MarkerType
from tests.kafka.conftest import Queue, consumer_of, covered, receive_all, stopped_if_it_hangs, wait_until
from tests.kafka.consumer.test_delivery_control_consumer import deferrals, write
from tests.limits import COMES_S

if TYPE_CHECKING:
    from kmq_spark.consumer.message import Message

pytestmark = pytest.mark.kafka


def test_suspect_is_deferred_for_a_receiver_that_holds_others_and_the_rest_goes_on(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "DRAIN_S", 1.0)
    write(queue, "a")
    write(queue, *["mean", "meaner"], silent_count=2, delivery_count=2)
    write(queue, "b")
    with consumer_of(queue) as consumer:
        receive_all(consumer, 1, max_messages=1)
        (message,) = consumer.receive(10, timeout=COMES_S)
        assert message.value == b"b"
        assert wait_until(lambda: queue.committed() == {0: 4})
    starts = [each.marker for each in queue.markers(MarkerType.START) if each.marker.never_handed_out]
    assert sorted(offset for each in starts for offset in covered(each)) == [1, 2]
    assert {each.delivery_count for each in starts} == {3}
    assert {each.redeliver_after_ms for each in starts} == {1_000 * admission.DEFER_S}


def test_lost_suspect_makes_room_for_others(queue: Queue) -> None:
    write(queue, "mean", silent_count=2)
    write(queue, "a")
    with consumer_of(queue, lease=1, max_lease=1) as consumer:
        assert [each.value for each in receive_all(consumer, 1)] == [b"mean"]
        # One that waits for more outlasts the time of this test.
        assert [each.value for each in consumer.receive(5, timeout=3_600)] == [b"a"]


def test_run_handles_a_suspect_while_no_other_handler_runs(queue: Queue) -> None:
    write(queue, *map(str, range(20)))
    write(queue, "mean", silent_count=2)
    write(queue, *map(str, range(20)))
    running: set[bytes | None] = set()
    beside: list[int] = []
    held: list[int] = []
    done: list[bytes | None] = []
    lock = threading.Lock()
    consumer = consumer_of(queue)

    def handler(message: Message) -> None:
        with lock:
            running.add((message.value or b"") + str(message.id.message_offset).encode())
        if message.value == b"mean":
            for _ in range(20):
                time.sleep(0.01)
                beside.append(len(running))
                held.append(consumer.in_flight_count)
        else:
            time.sleep(0.01)
        with lock:
            running.discard((message.value or b"") + str(message.id.message_offset).encode())
            done.append(message.value)
            if len(done) == 41:
                consumer.stop()

    with stopped_if_it_hangs(consumer):
        summary = consumer.run(handler, concurrency=4)
    assert summary.acked == 41
    assert set(beside) == {1}
    assert set(held) == {1}
    assert deferrals(queue) == []


def test_suspects_go_one_at_a_time_and_in_order(queue: Queue) -> None:
    write(queue, *map(str, range(8)), silent_count=2, delivery_count=2)
    write(queue, "good")
    found: list[bytes | None] = []
    with consumer_of(queue) as consumer:
        while len(found) < 9:
            (message,) = consumer.receive(100, timeout=COMES_S)
            assert consumer.in_flight_count == 1
            found.append(message.value)
            message.ack()
    assert found == [*(str(number).encode() for number in range(8)), b"good"]
    assert deferrals(queue) == []


def test_suspect_does_not_stop_a_run_whose_handlers_take_long(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any producer may send such a message: it waits while the messages behind it are handled."""
    monkeypatch.setattr(admission, "DRAIN_S", 1.0)
    write(queue, "long")
    write(queue, "mean", silent_count=2)
    write(queue, *["good"] * 20)
    is_over = threading.Event()
    done: list[bytes | None] = []
    consumer = consumer_of(queue)

    def handler(message: Message) -> None:
        if message.value == b"long":
            is_over.wait(COMES_S)
        done.append(message.value)
        if len(done) == 20:
            is_over.set()
            consumer.stop()

    with stopped_if_it_hangs(consumer):
        consumer.run(handler, concurrency=4)
    assert done[:20] == [b"good"] * 20
    assert [offsets for offsets, _, _ in deferrals(queue)] == [[1]]
