"""Promises of delivery control that concern what a consumer holds, with `kill -9` of the consumer that holds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.core.markers import MarkerType, Release
from kmq_spark.demo.audit import audit
from kmq_spark.failpoints import EXIT_CODE
from kmq_spark.kafka.topics import create_queue
from kmq_spark.producer.producer import QueueProducer
from tests.kafka.conftest import Queue, covered
from tests.kafka.stage import Stage, receive_all, run_until
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark.consumer.message import Message

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]

KILLED_LEASE_S = 2

HOLDER = """
import json, sys, time
from kmq_spark import QueueConsumer
servers, queue, count, extend_s, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
# The group gives up a member that was killed after six seconds, the least that a broker allows by default.
extra = {"session.timeout.ms": "6000", "client.id": "killed"}
consumer = QueueConsumer(queue, bootstrap_servers=servers, extra=extra, **json.loads(options))
held = []
while len(held) < count:
    held += consumer.receive(100, timeout=0.5)
held += consumer.receive(100, timeout=1.0)  # nothing more where limits hold
if extend_s:
    min(held, key=lambda message: message.value).extend(extend_s)
    consumer.flush()
print(json.dumps([message.value.decode() for message in held]), flush=True)
time.sleep(600)
"""


@contextmanager
def holding(
    stage: Stage, count: int, extend_s: float = 0.0, **options: object
) -> Iterator[tuple[list[str], subprocess.Popen[bytes]]]:
    """Let a process receive *count* messages; yield what it holds, and the process, which is killed at the end."""
    options = {"lease": KILLED_LEASE_S, **options}
    program = [sys.executable, "-c", HOLDER, stage.bootstrap_servers, stage.queue]
    process = subprocess.Popen([*program, str(count), str(extend_s), json.dumps(options)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline()), process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """`kill -9`, and wait for the end; a second time does nothing."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def ack_all(messages: list[Message]) -> dict[bytes, int]:
    """Acknowledge; return the deliveries by value."""
    for message in messages:
        message.ack()
    return {message.value or b"": message.delivery_count for message in messages}


def started_by(stage: Stage, consumer_id: str) -> list[int]:
    """Return how many messages each START of a consumer covers."""
    starts = Queue(stage.queue, stage.bootstrap_servers).markers(MarkerType.START)
    return [len(covered(each.marker)) for each in starts if each.marker.consumer_id == consumer_id]


def test_extended_message_of_a_killed_consumer_rests_until_its_own_deadline_and_the_others_do_not(stage: Stage) -> None:
    stage.send("a long one", "b short one")
    with stage.tracking():
        # Long enough that a busy machine does not find both due at once: with 12 s that happened.
        with holding(stage, 2, extend_s=30.0, max_lease=KILLED_LEASE_S) as (held, process):
            assert sorted(held) == ["a long one", "b short one"]
            kill(process)
        with stage.consumer() as consumer:
            (short,) = receive_all(consumer, 1)
            assert (short.value, short.delivery_count) == (b"b short one", 2)
            short.ack()
            (long,) = receive_all(consumer, 1)
            assert (long.value, long.delivery_count) == (b"a long one", 2)
            long.ack()
            consumer.flush()
    (extension,) = Queue(stage.queue, stage.bootstrap_servers).markers(MarkerType.KEEPALIVE)
    assert (extension.marker.queue_partition, covered(extension.marker)) == (
        long.origin.queue_partition, [long.origin.message_offset]
    )  # fmt: skip
    assert 30_000 <= long.appended_at_ms - extension.appended_at_ms < 48_000
    story = audit(stage.layout, stage.bootstrap_servers)
    assert (story.redelivered, story.early, story.lost) == (2, 0, set())


def test_killed_consumer_held_no_more_than_its_limit_and_the_rest_was_never_counted(stage: Stage) -> None:
    names = {f"m{number}".encode() for number in range(12)}
    stage.send(*(name.decode() for name in names))
    with stage.tracking():
        with holding(stage, 3, max_in_flight=3) as (held, process):
            assert len(held) == 3
            kill(process)
        assert sum(started_by(stage, "killed")) == 3
        with stage.consumer(lease=60, max_in_flight=2) as consumer:
            deliveries: dict[bytes, int] = {}
            while len(deliveries) < len(names):
                messages = receive_all(consumer, 1)
                assert consumer.in_flight_count <= 2
                assert messages, "came no more"
                deliveries |= ack_all(messages)
            consumer.flush()
    assert deliveries == {name: 2 if name.decode() in held else 1 for name in names}


def test_message_of_a_killed_consumer_comes_again_to_its_logical_queue_alone(stage: Stage) -> None:
    with QueueProducer(stage.queue, bootstrap_servers=stage.bootstrap_servers) as producer:
        for number in range(500):
            producer.send(f"report {number}", logical_queue="reports")
        producer.send("mail", logical_queue="emails")
        producer.send("plain")
    with stage.tracking():
        with holding(stage, 1, logical_queue="emails") as (held, process):
            assert held == ["mail"]
            kill(process)
        options: dict[str, Any] = {"lease": 60}
        with (
            stage.consumer(logical_queue="emails", **options) as emails,
            stage.consumer(logical_queue="reports", **options) as reports,
            stage.consumer(**options) as plain,
        ):
            assert ack_all(receive_all(emails, 1)) == {b"mail": 2}
            assert ack_all(receive_all(plain, 1)) == {b"plain": 1}
            flood = ack_all(receive_all(reports, 500))
            assert flood == {f"report {number}".encode(): 1 for number in range(500)}
            for consumer in (emails, reports, plain):
                assert consumer.receive(10, timeout=1.0) == []
                consumer.flush()
    story = audit(stage.layout, stage.bootstrap_servers)
    assert (story.redelivered, story.early, story.lost) == (1, 0, set())


def test_killed_consumer_of_one_group_costs_another_group_nothing(stage: Stage) -> None:
    create_queue(f"{stage.queue}@billing", bootstrap_servers=stage.bootstrap_servers)
    stage.send("a", "b", "c")
    servers = stage.bootstrap_servers
    with stage.tracking() as own_tracker, stage.tracking("billing") as their_tracker:
        with holding(stage, 3, subscription="billing") as (held, process):
            assert sorted(held) == ["a", "b", "c"]
            kill(process)
        with (
            stage.consumer(lease=60) as own,
            QueueConsumer(stage.queue, subscription="billing", bootstrap_servers=servers, lease=60) as theirs,
        ):
            assert ack_all(receive_all(own, 3)) == {b"a": 1, b"b": 1, b"c": 1}
            assert ack_all(receive_all(theirs, 3)) == {b"a": 2, b"b": 2, b"c": 2}
            assert (own.receive(10, timeout=1.0), theirs.receive(10, timeout=1.0)) == ([], [])
    assert (own_tracker.stats.redelivered, their_tracker.stats.redelivered) == (0, 3)


RELEASER = """
import json, sys, time
from kmq_spark import QueueConsumer
extra = {"session.timeout.ms": "6000"}
consumer = QueueConsumer(sys.argv[2], bootstrap_servers=sys.argv[1], lease=20, extra=extra)
held = {}
while len(held) < 3:
    held |= {message.value: message for message in consumer.receive(3, timeout=0.5)}
held[b"later"].release(delay=8.0)
held[b"now"].release()
consumer.flush()
print("released", flush=True)
time.sleep(600)
"""


def test_messages_that_a_killed_consumer_had_given_back_come_when_it_said(stage: Stage) -> None:
    """`kill -9` while it holds a third: that one alone waits for its lease; each delivery that was seen counts."""
    stage.send("later", "now", "held")
    with stage.tracking():
        program = [sys.executable, "-c", RELEASER, stage.bootstrap_servers, stage.queue]
        process = subprocess.Popen(program, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"released\n"
        kill(process)
        with stage.consumer(lease=60) as consumer:
            came: list[Message] = []
            while len(came) < 3:
                came += receive_all(consumer, 1)
            counts = ack_all(came)
            consumer.flush()
    assert [message.value for message in came] == [b"now", b"later", b"held"]
    assert set(counts.values()) == {2}
    releases = Queue(stage.queue, stage.bootstrap_servers).markers(MarkerType.KEEPALIVE)
    (delayed,) = [each for each in releases if each.marker.redeliver_after_ms == 8_000]
    # Its lease would have ended 20 s after its START, later than that.
    assert 8_000 <= came[1].appended_at_ms - delayed.appended_at_ms < 15_000
    story = audit(stage.layout, stage.bootstrap_servers)
    assert (story.redelivered, story.early, story.lost) == (3, 0, set())


FAILING = """
import sys, time
from kmq_spark import QueueConsumer
extra = {"session.timeout.ms": "6000"}
consumer = QueueConsumer(sys.argv[2], bootstrap_servers=sys.argv[1], lease=15, extra=extra)
def handler(message):
    time.sleep(0.2)  # so that each leaves with a marker of its own
    raise RuntimeError("no database")
consumer.run(handler, concurrency=1)
"""


@pytest.mark.parametrize("point", ["tracker.end-sent", "tracker.committed"])
def test_failed_message_rests_as_long_though_consumer_and_tracker_are_killed_meanwhile(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """The rest is in the log: by the queue's rule and a jitter that the next tracker works out again."""
    rules = {"BACKOFF": "constant", "BACKOFF_INITIAL_MS": "4000", "BACKOFF_JITTER": "0.5", "MAX_DELIVERIES": "3"}
    for name, value in rules.items():
        monkeypatch.setenv(f"KMQ_QUEUE__{name}", value)
    stage.send("a", "b", "c")
    environment = {**os.environ, "KMQ_FAILPOINT": "consumer.release-sent:3"}
    program = [sys.executable, "-c", FAILING, stage.bootstrap_servers, stage.queue]
    failed = subprocess.run(program, env=environment, timeout=ENDS_S, capture_output=True, check=False)
    assert failed.returncode == EXIT_CODE, failed.stderr[-2_000:]
    command = [sys.executable, "-c", KILLED_TRACKER, stage.queue, stage.bootstrap_servers, str(stage.folder / "killed")]
    # The first commit signs the group's offsets; the second one is that of a batch.
    environment = {**os.environ, "KMQ_FAILPOINT": f"{point}:{2 if point == 'tracker.committed' else 1}"}
    killed = subprocess.run(command, env=environment, timeout=ENDS_S, capture_output=True, check=False)
    assert killed.returncode == EXIT_CODE, killed.stderr[-2_000:]
    with stage.tracking(), stage.consumer(lease=60) as consumer:
        again = receive_all(consumer, 3)
        assert ack_all(again) == {b"a": 2, b"b": 2, b"c": 2}
        consumer.flush()
        time.sleep(2.0)
        assert consumer.receive(10, timeout=1.0) == []
    markers = Queue(stage.queue, stage.bootstrap_servers).markers()
    failed_at, started_at = {}, {}
    for each in markers:
        places = [(each.marker.queue_partition, offset) for offset in covered(each.marker)]
        if each.marker.type is MarkerType.START:
            started_at.update(dict.fromkeys(places, each.appended_at_ms))
        elif each.marker.type is MarkerType.KEEPALIVE and each.marker.release is Release.FAILED:
            failed_at.update(dict.fromkeys(places, each.appended_at_ms))
    # The third may have died unsaid: then its lease is over first.
    assert len(failed_at) >= 2
    for message in again:
        place = (message.origin.queue_partition, message.origin.message_offset)
        # 4,000 less up to a half of it; after the release that failed, or after the whole lease.
        earliest_ms = failed_at.get(place, started_at[place] + 15_000) + 2_000
        assert message.appended_at_ms >= earliest_ms
    assert audit(stage.layout, stage.bootstrap_servers).redelivered == 3


CROWD_WORKER = """
import json, os, sys, time
from kmq_spark import QueueConsumer
extra = {"session.timeout.ms": "6000"}
consumer = QueueConsumer(sys.argv[2], bootstrap_servers=sys.argv[1], lease=2, extra=extra)
while not os.path.exists(sys.argv[3]):
    messages = consumer.receive(400, timeout=0.5)
    for message in messages:
        line = {"value": message.value.decode(), "delivery": message.delivery_count, "held": len(messages)}
        print(json.dumps(line), flush=True)
    if any(message.value == b"killer" for message in messages):
        time.sleep(0.2)  # its position is committed, so that it does not come from there again
        os.kill(os.getpid(), 9)
    for message in messages:
        message.ack()
consumer.close()
"""


def test_killer_in_a_crowd_of_suspects_is_the_only_one_that_dies(stage: Stage) -> None:
    """Five processes die; its neighbours go alone from their third delivery on, and are done."""
    innocents = {f"good {number}" for number in range(200)}
    stage.send(*sorted(innocents)[:100], "killer", *sorted(innocents)[100:])
    lines: list[dict[str, Any]] = []
    program = [sys.executable, "-c", CROWD_WORKER, stage.bootstrap_servers, stage.queue]
    with stage.tracking(max_deliveries=5) as tracker:

        def is_over() -> bool:
            return tracker.stats.dead_lettered >= 1 and not audit(stage.layout, stage.bootstrap_servers).lost

        for _ in range(8):
            exit_code, written = run_until(is_over, program, stage.folder / "over")
            lines += map(json.loads, written)
            if exit_code == 0:
                break
    assert tracker.stats.dead_lettered == 1
    assert {line["value"] for line in lines} == {*innocents, "killer"}
    held = {count: {line["held"] for line in lines if line["delivery"] == count} for count in range(1, 6)}
    assert (held[3], held[4], held[5]) == ({1}, {1}, {1})
    assert {line["value"] for line in lines if line["delivery"] == 5} == {"killer"}
    story = audit(stage.layout, stage.bootstrap_servers)
    assert (story.early, story.lost) == (0, set())


KILLED_TRACKER = """
import sys
from kmq_spark.cli.main import app
app(["tracker", "run", sys.argv[1], "--bootstrap-server", sys.argv[2], "--checkpoint-dir", sys.argv[3]])
"""
