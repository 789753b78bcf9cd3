"""What only the queue in memory has: its clock, `kill`, `work`, messages made by hand, and the fixtures of pytest."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark import ConfigError, LeaseLostError, Message, MessageId, Retry, UsageError
from kmq_spark.testing import InMemoryQueue, make_message

if TYPE_CHECKING:
    from pathlib import Path


def send(queue: InMemoryQueue, *values: str, **options: Any) -> None:
    for value in values:
        queue.producer().send(value, **options)


def test_time_stands_still_until_a_test_moves_it() -> None:
    queue = InMemoryQueue()
    began = queue.now
    send(queue, "a", delay=timedelta(days=30))
    with queue.consumer() as consumer:
        assert consumer.receive() == []
        assert queue.now == began
        queue.advance(timedelta(days=30) - timedelta(seconds=1))
        assert consumer.receive() == []
        queue.advance(1.1)
        assert [message.value for message in consumer.receive()] == [b"a"]


def test_live_consumer_keeps_its_message_for_hours_and_a_killed_one_for_its_lease() -> None:
    queue = InMemoryQueue(rules={"max_deliveries": 5, "backoff": "none"})
    send(queue, "a", "b")
    living, killed = queue.consumer(lease=30), queue.consumer(lease=30)
    (kept,), (lost,) = living.receive(), killed.receive()
    queue.advance(3_600)
    assert kept.is_held
    assert lost.is_held
    queue.kill(killed)
    queue.advance(29)
    assert living.receive() == []
    queue.advance(60)
    (again,) = living.receive()
    assert (again.origin, again.delivery_count) == (lost.id, 2)
    queue.advance(12 * 3_600)
    assert not kept.is_held
    with pytest.raises(LeaseLostError, match="the lease ran out"):
        kept.ack()
    assert [message.origin for message in living.receive(10)] == [kept.id]


def test_work_ends_when_nothing_can_be_delivered_now_and_goes_on_later() -> None:
    queue = InMemoryQueue()
    send(queue, *map(str, range(10)))
    calls: list[int] = []

    def handle(message: Message) -> None:
        calls.append(message.delivery_count)
        if message.value == b"7" and message.delivery_count < 3:
            raise Retry(delay=60)

    assert queue.work(handle).acked == 9
    assert queue.in_flight_count == 1
    assert queue.work(handle).acked == 0
    queue.advance(62)
    queue.work(handle)
    queue.advance(63)
    assert queue.work(handle, concurrency=1).acked == 1
    assert queue.in_flight_count == 0
    assert sorted(calls) == [1] * 10 + [2, 3]


def test_work_that_never_ends_is_an_error() -> None:
    queue = InMemoryQueue(rules={"max_deliveries": 0, "backoff": "none"})
    send(queue, "a")
    with pytest.raises(UsageError, match=r"handlers still ran after 0\.2 s"):
        queue.work(lambda message: message.release(), timeout=0.2)


def test_rules_that_are_not_given_are_those_of_a_new_queue() -> None:
    queue = InMemoryQueue(rules={"max_deliveries": 3})
    send(queue, "a")
    with queue.consumer() as consumer:
        consumer.receive()[0].fail("no")
        queue.advance(0.9)
        assert consumer.receive() == []
        queue.advance(0.2)
        assert consumer.receive()[0].delivery_count == 2


def test_queues_beside_each_other_share_a_clock() -> None:
    orders = InMemoryQueue("orders")
    invoices = InMemoryQueue("invoices", beside=orders)
    send(invoices, "a", delay=5)
    with invoices.consumer() as consumer:
        assert consumer.receive() == []
        orders.advance(6)
        assert invoices.now == orders.now
        assert len(consumer.receive()) == 1


def test_message_is_made_by_hand() -> None:
    message = make_message("a", key="k", headers={"source": "shop"}, delivery_count=3, origin=MessageId(2, 7))
    assert (message.value, message.key, message.headers) == (b"a", b"k", [("source", b"shop")])
    assert (message.delivery_count, message.id, message.origin) == (3, MessageId(0, 0), MessageId(2, 7))
    assert message.is_held
    message.extend(60)
    assert message.is_held
    message.reject("bad")
    assert message.settled_by == "reject"
    with pytest.raises(UsageError, match="got ack after reject"):
        message.ack()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"name": "no spaces"}, "queue"),
        ({"partitions": 0}, "partitions is out of bounds: got 0"),
        ({"rules": {"max_retries": 3}}, "unknown rule of a queue"),
        ({"rules": {"max_deliveries": -1}}, "max_deliveries"),
        ({"beside": InMemoryQueue("queue")}, "queue exists: got 'queue' twice"),
    ],
)
def test_wrong_queue_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        InMemoryQueue(**arguments)


EMPTY = """
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_queue(kmq_queue, number):
    kmq_queue.producer().send("a")
    assert kmq_queue.work(lambda message: None).acked == 1
"""

BROKERS = """
import pytest
from kmq_spark import QueueProducer, create_queue

@pytest.mark.parametrize("number", [1, 2])
def test_queue(kmq_broker, number):
    servers = kmq_broker.bootstrap_servers
    create_queue(f"orders-{number}", bootstrap_servers=servers)
    with QueueProducer(f"orders-{number}", bootstrap_servers=servers) as producer:
        producer.send("a")
"""


@pytest.mark.parametrize(
    "text", [EMPTY, pytest.param(BROKERS, marks=[pytest.mark.kafka, pytest.mark.slow])], ids=["queue", "broker"]
)
def test_fixture_of_pytest_is_there(tmp_path: Path, text: str) -> None:
    test = tmp_path / "test_mine.py"
    test.write_text(text)
    # Where the package is installed, pytest has the plugin already, by the name of its entry point.
    plugins = ["-p", "no:kmq_spark", "-p", "kmq_spark.testing.plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), *plugins, str(test)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
