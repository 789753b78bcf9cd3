"""STARTs and committed offsets in one transaction: a crash between them repeats no message."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from kmq_spark.consumer import intake
from kmq_spark.consumer.markers.starts import TransactionalStarts
from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import FencedError, KafkaClientError
from kmq_spark.failpoints import EXIT_CODE, VARIABLE
from kmq_spark.kafka.queue_topics import QueueTopics
from tests.kafka.conftest import Queue, consumer_of, covered, receive_all, wait_until
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.consumer.message import Message

pytestmark = pytest.mark.kafka

# A session of 6 s is the shortest that the broker takes.
RECEIVER = """
import sys
from kmq_spark.consumer.consumer import QueueConsumer
consumer = QueueConsumer(
    sys.argv[2], bootstrap_servers=sys.argv[1], start_in_transaction=True, lease_ms=4_000, consumer_id="first",
    extra={"session.timeout.ms": "6000"},
)
while not (messages := consumer.receive(5, timeout=1.0)):
    pass
print(*[message.value.decode() for message in messages], flush=True)
"""


def started(queue: Queue) -> list[int]:
    """Return the offsets that have a START a tracker sees."""
    return sorted(offset for each in queue.markers(MarkerType.START) for offset in covered(each.marker))


def test_start_and_position_are_written_together(make_queue: Callable[..., Queue]) -> None:
    queue = make_queue(partitions=2)
    for partition in range(2):
        queue.send(*"abc", partition=partition)
    with consumer_of(queue, start_in_transaction=True) as consumer:
        messages = receive_all(consumer, 6)
        # Committed with the START, so there is nothing to wait for.
        assert queue.committed() == {0: 3, 1: 3}
        assert started(queue) == [0, 0, 1, 1, 2, 2]
        for message in messages:
            message.ack()
    assert queue.committed() == {0: 3, 1: 3}


def test_position_after_skipped_messages_does_not_set_the_group_back(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of another logical queue are skipped, and their position is due after a newer one is committed."""
    monkeypatch.setattr(intake, "COMMIT_SKIPPED_S", 4.0)
    with consumer_of(queue, start_in_transaction=True) as consumer:
        queue.send("a")
        receive_all(consumer, 1)
        queue.send("other", logical_queue="emails")
        assert wait_until(lambda: not consumer.receive(1, 0.1) and queue.committed() == {0: 2})
        queue.send("other", logical_queue="emails")
        consumer.receive(1, 0.5)
        queue.send("b")
        receive_all(consumer, 1)
        assert queue.committed() == {0: 4}
        until_s = time.monotonic() + 4.5
        while time.monotonic() < until_s:
            consumer.receive(1, 0.1)
        assert queue.committed() == {0: 4}


def test_position_after_skipped_messages_is_committed_in_a_transaction(queue: Queue) -> None:
    """A newer producer with this transactional id fences it; a commit by the client of the group would succeed."""
    with consumer_of(queue, start_in_transaction=True, consumer_id="same") as consumer:
        queue.send("a")
        receive_all(consumer, 1)
        transactional_id = f"{QueueTopics(queue.name).consumer_transactional_id('same')}.starts"
        newer = Producer({"bootstrap.servers": queue.bootstrap_servers, "transactional.id": transactional_id})
        newer.init_transactions(30)
        queue.send("other", logical_queue="emails")
        with pytest.raises(FencedError, match="give each consumer its own consumer_id"):
            wait_until(lambda: bool(consumer.receive(1, 0.1)))
        assert queue.committed() == {0: 1}
        assert consumer._intake._fetcher.offset_commits._uncommitted == {0: 2}


@pytest.mark.slow
@pytest.mark.parametrize("point", ["consumer.start-tx-sent", "consumer.start-tx-before-commit"])
def test_crash_between_start_and_commit_repeats_nothing(queue: Queue, point: str) -> None:
    """Neither was committed: the next consumer starts each message once, and no tracker sees the first START."""
    queue.send(*"abcde")
    crashed = run_receiver(queue, point)
    assert (crashed.returncode, crashed.stdout) == (EXIT_CODE, "")
    with consumer_of(queue, start_in_transaction=True) as consumer:
        again = receive_until(consumer.receive, 5)
        assert [(each.value, each.delivery_count) for each in again] == [(b"%c" % c, 1) for c in b"abcde"]
    assert started(queue) == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_crash_after_the_commit_repeats_nothing(queue: Queue) -> None:
    """Both were committed: started messages belong to the tracker, no consumer fetches them again."""
    queue.send(*"abcde")
    crashed = run_receiver(queue, "consumer.start-durable")
    assert (crashed.returncode, crashed.stdout) == (EXIT_CODE, "")
    queue.send("f")
    with consumer_of(queue, start_in_transaction=True) as consumer:
        assert [each.value for each in receive_until(consumer.receive, 1)] == [b"f"]
    assert started(queue) == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_consumer_that_was_thrown_out_of_the_group_starts_nothing(queue: Queue) -> None:
    """It fetched before it was suspended and is no member any more: neither START nor offset is committed."""
    queue.send(*"ab")
    with consumer_of(queue, start_in_transaction=True) as gone:
        receive_all(gone, 1)[0].ack()
        membership = gone._intake._fetcher.client.consumer_group_metadata()
    with consumer_of(queue, start_in_transaction=True) as consumer:
        fetcher = consumer._intake._fetcher
        fetcher.return_to_buffer(fetcher.fetch(1, 10.0))
        starts = consumer._intake._starts
        assert isinstance(starts, TransactionalStarts)
        own, starts._group_metadata = starts._group_metadata, lambda: membership
        batch = consumer._intake.take(1, 0.0)
        assert batch is not None
        with pytest.raises(
            KafkaClientError, match=r"cannot start messages of .*; the messages are fetched again"
        ) as raised:
            consumer._intake.wait_until_durable(batch)
        assert raised.value.retriable
        starts._group_metadata = own
        assert (started(queue), queue.committed()) == ([0], {0: 1})
        assert [each.value for each in receive_all(consumer, 1)] == [b"b"]
    assert started(queue) == [0, 1]


def test_pipelined_run_starts_in_transactions_too(queue: Queue) -> None:
    queue.send(*map(str, range(300)))
    consumer = consumer_of(queue, start_in_transaction=True)
    handled: list[bytes] = []

    def handle(message: Message) -> None:
        handled.append(message.value or b"")
        if len(handled) == 300:
            consumer.stop()

    summary = consumer.run(handle, concurrency=2)
    assert sorted(handled) == sorted(str(number).encode() for number in range(300))
    assert (summary.acked, summary.lost) == (300, 0)
    assert wait_until(lambda: queue.committed() == {0: 300})
    assert started(queue) == list(range(300))


def run_receiver(queue: Queue, point: str) -> subprocess.CompletedProcess[str]:
    """Run a consumer that ends at a crash point."""
    return subprocess.run(
        [sys.executable, "-c", RECEIVER, queue.bootstrap_servers, queue.name],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=ENDS_S,
        env={**os.environ, VARIABLE: point},
    )


def receive_until(receive: Callable[[int, float], list[Message]], count: int) -> list[Message]:
    """Receive so many; the dead one's session and transaction have to end first."""
    found: list[Message] = []
    until = time.monotonic() + COMES_S
    while len(found) < count and time.monotonic() < until:
        found += receive(count - len(found), 0.5)
    assert len(found) == count
    return found
