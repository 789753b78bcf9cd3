"""Consumers, a broker and the tracker together: the promises about redelivery, on a real broker."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from kmq_spark.demo.audit import audit
from kmq_spark.tracker.queue_tracker import QueueTracker
from kmq_spark.tracker.service import TrackerService
from tests.kafka.stage import Stage, receive_all, wait_until
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def test_message_that_was_not_acked_comes_again_with_its_bytes_and_its_count(stage: Stage) -> None:
    """Redelivery keeps key, value and headers, counts the delivery, and never comes before the deadline."""
    stage.send("a", "b")
    with stage.tracking(), stage.consumer() as consumer:
        first = {message.value: message for message in receive_all(consumer, 2)}
        first[b"a"].ack()
        (again,) = receive_all(consumer, 1)
        again.ack()
        consumer.flush()
        assert (again.key, again.value, again.delivery_count) == (b"b", b"b", 2)
        assert again.headers == [("origin-app", b"tests")]
        assert again.origin == first[b"b"].id
        assert wait_until(lambda: not audit(stage.layout, stage.bootstrap_servers).lost)
    story = audit(stage.layout, stage.bootstrap_servers)
    assert (story.redelivered, story.early) == (1, 0)


def test_message_goes_to_dead_letter_after_max_deliveries(stage: Stage) -> None:
    """The third delivery of three is the last one."""
    stage.send("poison")
    with stage.tracking(), stage.consumer(lease=1) as consumer:
        counts = [receive_all(consumer, 1)[0].delivery_count for _ in range(3)]
        assert wait_until(lambda: len(audit(stage.layout, stage.bootstrap_servers).rejected) == 1)
        assert consumer.receive(1, timeout=1.0) == []
    assert counts == [1, 2, 3]


def test_rejected_message_goes_to_dead_letter_at_once(stage: Stage) -> None:
    """A rejection does not wait for the deadline."""
    stage.send("bad")
    with stage.tracking(), stage.consumer(lease=60) as consumer:
        receive_all(consumer, 1)[0].reject("no such account")
        consumer.flush()
        assert wait_until(lambda: len(audit(stage.layout, stage.bootstrap_servers).rejected) == 1)


def test_tracker_restarted_from_its_checkpoint_sends_nothing_twice(stage: Stage) -> None:
    """Stopped with messages in flight and started again: each is redelivered once."""
    stage.send(*(f"m{number}" for number in range(20)))
    with stage.consumer() as consumer:
        with stage.tracking():
            held = receive_all(consumer, 20)
            for message in held[:10]:
                message.ack()
            consumer.flush()
        with stage.tracking():
            again = receive_all(consumer, 10, ack=True)
            consumer.flush()
    story = audit(stage.layout, stage.bootstrap_servers)
    assert sorted(message.value or b"" for message in again) == sorted(message.value or b"" for message in held[10:])
    assert (story.redelivered, story.early, story.lost) == (10, 0, set())


@pytest.mark.slow
def test_lost_checkpoint_neither_loses_nor_repeats(stage: Stage) -> None:
    """A tracker with an empty checkpoint rebuilds its state from the markers topic and repeats no redelivery."""
    stage.send(*(f"m{number}" for number in range(10)))
    with stage.consumer() as consumer:
        with stage.tracking():
            receive_all(consumer, 10)
            first_round = receive_all(consumer, 10)  # delivery 2
            assert {message.delivery_count for message in first_round} == {2}
        with stage.tracking(checkpoint="another"):
            second_round = receive_all(consumer, 10, ack=True)  # delivery 3
            consumer.flush()
    story = audit(stage.layout, stage.bootstrap_servers)
    assert {message.delivery_count for message in second_round} == {3}
    assert (story.redelivered, story.early, story.lost) == (20, 0, set())


def test_cold_start_on_finished_messages_redelivers_none(stage: Stage) -> None:
    """A new tracker that reads a long log of finished messages redelivers none, however old the leases are."""
    stage.send(*(f"m{number}" for number in range(50)))
    with stage.consumer(lease=1) as consumer:
        for message in receive_all(consumer, 50):
            message.ack()
        consumer.flush()
    time.sleep(1.5)
    with stage.tracking(), stage.consumer(lease=1) as consumer:
        # What is redelivered shows that the tracker has decided, in both partitions, above all that it had to read.
        stage.send(*(f"late{number}" for number in range(10)))
        again = [*receive_all(consumer, 10), *receive_all(consumer, 10, ack=True)]
        consumer.flush()
    assert {message.value for message in again} == {b"late%d" % number for number in range(10)}
    assert audit(stage.layout, stage.bootstrap_servers).redelivered == 10


WORKER = """
import sys, time
from kmq_spark.consumer.consumer import QueueConsumer
# The group gives up a member that was killed after three seconds instead of ten.
extra = {"session.timeout.ms": "3000"}
consumer = QueueConsumer(sys.argv[2], bootstrap_servers=sys.argv[1], lease=2, extra=extra)
messages = []
while len(messages) < 5:
    messages += consumer.receive(5 - len(messages), timeout=1.0)
print("holding", flush=True)
time.sleep(600)
"""


@contextmanager
def worker_process(stage: Stage) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker that holds five messages and does nothing; it is dead at the end of the block, whatever happens."""
    command = [sys.executable, "-c", WORKER, stage.bootstrap_servers, stage.queue]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"holding\n"
        yield worker
    finally:
        worker.kill()
        worker.communicate()


def test_killed_consumers_messages_come_again_exactly_once(stage: Stage) -> None:
    """`kill -9` of a process that holds messages under keep-alive: each comes again once, after its lease."""
    stage.send(*(f"m{number}" for number in range(5)))
    with stage.tracking(), worker_process(stage) as worker:
        time.sleep(3.0)  # longer than its lease: keep-alive holds them
        assert audit(stage.layout, stage.bootstrap_servers).redelivered == 0
        worker.kill()
        worker.wait()
        with stage.consumer() as consumer:
            again = receive_all(consumer, 5)
            for message in again:
                message.ack()
            consumer.flush()
    story = audit(stage.layout, stage.bootstrap_servers)
    assert sorted(message.value or b"" for message in again) == [b"m0", b"m1", b"m2", b"m3", b"m4"]
    assert (story.redelivered, story.early, story.lost) == (5, 0, set())


def test_available_now_run_handles_what_is_due_and_ends(stage: Stage) -> None:
    """`--trigger available-now` writes its own TICKs, redelivers due messages, and ends by itself."""
    stage.send("a")
    with stage.consumer(lease=1) as consumer:
        receive_all(consumer, 1)
        time.sleep(1.2)
        tracker = QueueTracker(stage.spark, stage.queue, stage.settings(trigger="available-now"))
        tracker.run()
        (again,) = receive_all(consumer, 1)
        again.ack()
    assert (tracker.stats.redelivered, again.delivery_count) == (1, 2)


def test_one_application_tracks_several_queues(stage: Stage) -> None:
    """A query, a checkpoint and a transactional id for each queue, in one Spark application."""
    other = Stage(stage.spark, stage.bootstrap_servers, stage.folder, f"other.{stage.queue}")
    service = TrackerService(stage.spark, [stage.queue, other.queue], stage.settings())
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        assert all(tracker.wait_ready(COMES_S) for tracker in service.trackers)
        for each in (stage, other):
            each.send(each.queue)
        for each in (stage, other):
            with each.consumer() as consumer:
                first, second = receive_all(consumer, 1) + receive_all(consumer, 1)
                second.ack()
                assert (first.value, second.value) == (each.queue.encode(), each.queue.encode())
    finally:
        service.stop()
        thread.join(COMES_S)
    assert [tracker.stats.redelivered for tracker in service.trackers] == [1, 1]
