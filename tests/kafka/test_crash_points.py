"""What dies at a crash point that no scenario of the campaign passes: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from kmq_spark.core.markers import MarkerType
from kmq_spark.failpoints import EXIT_CODE, VARIABLE
from kmq_spark.kafka.topics import check_queue, create_queue_topics
from tests.kafka.conftest import Queue, consumer_of, covered, drop, read_all, receive_all, seen, track, wait_until
from tests.kafka.stage import put_rules
from tests.limits import ENDS_S

pytestmark = [pytest.mark.kafka]

HOLDER = """
import sys, time
from kmq_spark.consumer.consumer import QueueConsumer
queue, servers, what = sys.argv[1:]
consumer = QueueConsumer(queue, bootstrap_servers=servers, lease=1, extra={"session.timeout.ms": "3000"})
while not (messages := consumer.receive(3, timeout=1.0)):
    pass
if what == "extends":
    messages[0].extend(2)
if what == "leaves":
    messages[0].ack()
    consumer.close()
time.sleep(60)
"""


def run(program: list[str], point: str = "") -> int:
    """Run a program with an armed crash point, or with none; return its exit code."""
    environment = {**os.environ, VARIABLE: point} if point else None
    done = subprocess.run([sys.executable, *program], env=environment, capture_output=True, timeout=ENDS_S, check=False)
    assert done.returncode in {0, EXIT_CODE}, done.stderr.decode()[-2_000:]
    return done.returncode


@pytest.mark.parametrize(
    ("point", "what"), [("consumer.renewal-sent", "renews"), ("consumer.extension-sent", "extends")]
)
def test_consumer_killed_as_it_renews_leaves_its_messages_to_the_tracker(queue: Queue, point: str, what: str) -> None:
    """Whether the longer lease is durable or not: each message comes again, once, when its lease is over."""
    put_rules(queue.name, queue.bootstrap_servers, max_deliveries=0)
    queue.send("a", "b")
    assert run(["-c", HOLDER, queue.name, queue.bootstrap_servers, what], point) == EXIT_CODE
    started = sum(len(covered(each.marker)) for each in queue.markers(MarkerType.START))
    redelivered: list[int] = []

    def all_redelivered() -> bool:
        redelivered.append(track(queue).redelivered)
        return sum(redelivered) >= started

    assert wait_until(all_redelivered)
    assert track(queue).redelivered == 0
    assert len(seen(queue)) == 2 + started


def test_consumer_killed_as_it_gives_partitions_up_has_committed_its_position(queue: Queue) -> None:
    """The next one gets what comes after it, and nothing that was started before."""
    queue.send("a", "b", "c")
    assert run(["-c", HOLDER, queue.name, queue.bootstrap_servers, "leaves"], "consumer.revoked") == EXIT_CODE
    started = sum(len(covered(each.marker)) for each in queue.markers(MarkerType.START))
    assert queue.committed() == {0: started}
    queue.send("d")
    rest = [b"a", b"b", b"c", b"d"][started:]
    with consumer_of(queue, extra={"session.timeout.ms": "3000"}) as consumer:
        assert [each.value for each in receive_all(consumer, len(rest))] == rest


def test_tracker_killed_before_it_aborts_sends_nothing_twice(bootstrap_servers: str) -> None:
    """A message that the broker refuses with our headers: the open transaction is aborted by the next tracker."""
    name = f"aborting-{time.time_ns()}"
    create_queue_topics(name, bootstrap_servers=bootstrap_servers, partitions=1, max_message_bytes=10_000)
    queue, large = Queue(name, bootstrap_servers), "x" * (10_000 + 16 * 1024 - 110)
    queue.send("small", large)
    drop(queue, 2)
    command = ["-m", "kmq_spark.cli.main", "tracker", "once", name, "--bootstrap-server", bootstrap_servers]
    assert run(command, "tracker.aborting") == EXIT_CODE
    ended = [track(queue) for _ in range(2)]
    assert [(each.redelivered, each.dead_lettered) for each in ended] == [(1, 1), (0, 0)]
    assert seen(queue) == [b"small", large.encode(), b"small"]
    assert [record.value() for record in read_all(bootstrap_servers, f"{name}.dlq")] == [large.encode()]


def test_queue_that_was_half_made_is_made_whole(bootstrap_servers: str) -> None:
    """`kmq queue create` dies behind the first topic; run again it makes what is missing."""
    name = f"half-{time.time_ns()}"
    command = ["-m", "kmq_spark.cli.main", "queue", "create", name, "--bootstrap-server", bootstrap_servers]
    assert run(command, "queue.topic-created") == EXIT_CODE
    assert run(command) == 0
    assert check_queue(name, bootstrap_servers=bootstrap_servers).partition_count == 4
