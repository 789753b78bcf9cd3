"""The queue between the receiving thread and the handlers, and how many messages wait in it."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka import Message as KafkaMessage

from kmq_spark.consumer.leases import Lease, Outbox
from kmq_spark.consumer.message import Message
from kmq_spark.consumer.worker import HandlerQueue, Window
from tests.limits import COMES_S


def messages_of(count: int) -> list[Message]:
    """Return messages under one lease."""
    lease = Lease(
        outbox=Outbox(3), delivery_count=1, held=set(range(count)), renewed_at=0.0, ends_at=30.0, limit_at=300.0
    )
    record = KafkaMessage("orders", 3, 0, b"", b"", None, None, (2, 1_000))
    return [Message(record, offset, lease) for offset in range(count)]


def sizes_of_rounds(work_s: float, round_trip_s: float, rounds: int) -> list[int]:
    """Return the window after each round: a full window is handled, then the next START takes a round trip."""
    now = 0.0
    queue: HandlerQueue = HandlerQueue(lambda: now)
    window = Window(1, 200)

    def handle() -> None:
        nonlocal now
        while queue.take() is not None:
            now += work_s

    thread = threading.Thread(target=handle)
    thread.start()
    sizes = []
    try:
        for _ in range(rounds):
            queue.put(messages_of(window.size))
            queue.wait_until_empty(60)
            now += round_trip_s
            window.measure(queue.busy_s(), queue.taken_count)
            sizes.append(window.size)
    finally:
        queue.close()
        thread.join(COMES_S)
    return sizes


def test_handed_over_messages_come_out_in_order_and_the_rest_at_the_close() -> None:
    messages = messages_of(3)
    ready: HandlerQueue = HandlerQueue()
    ready.put(messages)
    assert ready.take() is messages[0]
    assert ready.taken_count == 1
    assert ready.close() == messages[1:]
    assert ready.take() is None


@pytest.mark.parametrize("round_trip_s", [0.001, 0.5, 60.0])
def test_window_of_fast_handlers_grows_however_long_a_start_takes(round_trip_s: float) -> None:
    sizes = sizes_of_rounds(0.0005, round_trip_s, 5)
    assert sizes[:3] == [5, 30, 180]
    assert sizes[-1] == 200


@pytest.mark.parametrize("round_trip_s", [0.001, 0.5])
def test_window_of_slow_handlers_stays_small(round_trip_s: float) -> None:
    assert sizes_of_rounds(1.0, round_trip_s, 3) == [1, 1, 1]
    assert sizes_of_rounds(0.02, round_trip_s, 3) == [5, 5, 5]


def test_window_follows_the_rate_of_the_handlers() -> None:
    window = Window(8, 1_000)
    # 50 messages in 0.1 s are 500 a second, 50 in the 0.1 s that a window holds.
    window.measure(0.1, 50)
    assert window.size == 50
    window.measure(1.1, 51)
    assert window.size == 8
    window.measure(1.2, 1_000_000)
    assert window.size == 1_000
