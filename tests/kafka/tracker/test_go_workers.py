"""kafka-mq-go's producers and workers with our tracker and our consumers: the same topics and wire format."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kmq_spark.demo.audit import audit
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.headers import DELIVERY_COUNT, PREVIOUS
from tests.kafka.conftest import read_all
from tests.kafka.go_worker import GoWorker, group_of
from tests.kafka.stage import LEASE_MS, wait_until
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka import Message

    from tests.kafka.stage import Stage

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

GO_LEASE_MS = 1_000


class Copy(NamedTuple):
    """A copy that the tracker made: the record, and how long after its deadline it was appended."""

    record: Message
    late_ms: int


def queue_id(name: str) -> str:
    """Return a name of one of its queues that no other test uses: the group of a killed worker lives on."""
    return f"{name}-{time.time_ns()}"


def copies(stage: Stage) -> list[Copy]:
    """Return the redeliveries, in the order of their append times; key and value are looked at on the way."""
    records = {(each.partition(), each.offset()): each for each in read_all(stage.bootstrap_servers, stage.queue)}
    deadlines: dict[tuple[int, int], int] = {}
    for each in read_all(stage.bootstrap_servers, f"{stage.queue}.markers"):
        marker = decode_marker(each.value())
        if marker.redeliver_after_ms:
            deadlines[marker.queue_partition, marker.ranges[0].first] = each.timestamp()[1] + marker.redeliver_after_ms
    found = []
    for record in records.values():
        headers = dict(record.headers() or [])
        if DELIVERY_COUNT in headers:
            partition, offset = map(int, headers[PREVIOUS].decode().split(":"))
            before = records[partition, offset]
            assert (record.key(), record.value()) == (before.key(), before.value())
            found.append(Copy(record, record.timestamp()[1] - deadlines[partition, offset]))
    return sorted(found, key=lambda copy: copy.record.timestamp()[1])


def test_message_that_a_go_worker_drops_comes_again_and_not_before_its_deadline(stage: Stage) -> None:
    """On an idle queue, with a lease of one second: the same bytes and key, so that a Go worker accepts the copy."""
    emails = queue_id("emails")
    payloads = [bytes(range(256)), b"\x00", os.urandom(1_000)]
    with stage.tracking() as tracker, GoWorker(stage.bootstrap_servers, stage.queue, emails) as worker:
        for payload in payloads:
            worker.send(payload)
            dropped = worker.receive()
            assert dropped is not None
            again = worker.receive()
            assert again is not None
            assert (payload, payload) == (dropped.payload, again.payload)
            worker.ack(again)
        assert sum(each.counters["unreadable"] for each in tracker.stats.statuses.values()) == 0
    redelivered = copies(stage)
    assert [emails.encode()] * 3 == [copy.record.key() for copy in redelivered]
    assert min(copy.late_ms for copy in redelivered) >= 0
    assert audit(stage.layout, stage.bootstrap_servers).lost == set()


@pytest.mark.slow
def test_markers_of_one_queue_partition_lie_in_several_markers_partitions(stage: Stage) -> None:
    """Go workers choose the markers partition by key: each message is still redelivered once and ended once."""
    # Fixed names, since a hash of the name chooses the partition: of these, three go to each.
    ids = [f"several-{letter}" for letter in "abcdef"]
    workers = [GoWorker(stage.bootstrap_servers, stage.queue, each) for each in ids]
    with stage.tracking():
        for worker in workers:
            worker.send(b"done", partition=0)
            worker.send(b"dropped", partition=0)
        for worker in workers:
            done, dropped = worker.receive(), worker.receive()
            assert done is not None
            assert dropped is not None
            worker.ack(done)
        for worker in workers:
            again = worker.receive()
            assert again is not None
            assert again.payload == b"dropped"
            worker.ack(again)
            worker.__exit__(None, None, None)
        time.sleep(GO_LEASE_MS / 1_000 + 1.0)  # nothing that was ended comes again
    markers = read_all(stage.bootstrap_servers, f"{stage.queue}.markers")
    go_markers = [each for each in markers if each.key() is not None]
    assert {0} == {decode_marker(each.value()).queue_partition for each in go_markers}
    assert {0, 1} == {each.partition() for each in go_markers}
    assert sorted(each.encode() for each in ids) == sorted(copy.record.key() or b"" for copy in copies(stage))
    assert audit(stage.layout, stage.bootstrap_servers).lost == set()


@contextmanager
def worker_process(stage: Stage, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker that holds one message under its keep-alive; it is dead at the end of the block."""
    command = [sys.executable, "-m", "tests.kafka.go_worker", stage.bootstrap_servers, stage.queue, name]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline().startswith(b"holding ")
        yield worker
    finally:
        worker.kill()
        worker.communicate()


@pytest.mark.slow
def test_killed_go_workers_message_comes_again_once_and_its_keep_alive_held_it_till_then(stage: Stage) -> None:
    """`kill -9` of a worker that held a message for several leases: redelivered once, after the last KEEPALIVE."""
    held = queue_id("held")
    with stage.tracking():
        with GoWorker(stage.bootstrap_servers, stage.queue, held) as sender:
            sender.send(b"hold me")
        with worker_process(stage, held) as worker:
            time.sleep(3 * GO_LEASE_MS / 1_000)
            assert copies(stage) == []
            worker.kill()
            worker.wait()
            # The group waits for the dead one's session; the tracker does not.
            assert wait_until(lambda: len(copies(stage)) == 1)
        with GoWorker(stage.bootstrap_servers, stage.queue, held) as successor:
            again = successor.receive()
            assert again is not None
            successor.ack(again)
            time.sleep(GO_LEASE_MS / 1_000 + 1.0)
    (copy,) = copies(stage)
    assert (held.encode(), b"hold me") == (copy.record.key(), copy.record.value())
    assert copy.late_ms >= 0
    assert audit(stage.layout, stage.bootstrap_servers).lost == set()


def test_go_worker_and_our_consumer_share_a_group(stage: Stage) -> None:
    """Each message is finished by one of them although the Go worker drops some; both take part."""
    mixed = queue_id("mixed")
    sent: set[bytes] = set()
    ours: set[bytes] = set()
    theirs: set[bytes] = set()
    dropped: set[bytes] = set()
    with stage.tracking(), GoWorker(stage.bootstrap_servers, stage.queue, mixed) as worker, our_member(
        stage, mixed, ours
    ):  # fmt: skip
        until_s = time.monotonic() + COMES_S
        while time.monotonic() < until_s and not (ours and theirs and ours | theirs == sent):
            if ours | theirs == sent:
                # Once more, until the group has shared its partitions out and each has done some.
                for number in range(len(sent), len(sent) + 20):
                    worker.send(f"m{number}".encode())
                    sent.add(f"m{number}".encode())
            message = worker.receive(0.5)
            if message is not None and len(dropped) < 3 and message.payload not in dropped:
                dropped.add(message.payload)
            elif message is not None:
                worker.ack(message)
                theirs.add(message.payload)
    assert ours
    assert theirs
    assert sent == ours | theirs
    assert dropped <= ours | theirs
    assert audit(stage.layout, stage.bootstrap_servers).lost == set()


@contextmanager
def our_member(stage: Stage, name: str, done: set[bytes]) -> Iterator[None]:
    """Run one of our consumers in the group of a Go worker; it acknowledges what it is given."""
    ended = threading.Event()

    def consume() -> None:
        extra = {"group.id": group_of(name), "partition.assignment.strategy": "range,roundrobin"}
        with stage.consumer(lease=LEASE_MS / 1000, extra=extra) as consumer:
            while not ended.is_set():
                for message in consumer.receive(5, timeout=0.3):
                    assert message.key == name.encode()
                    message.ack()
                    done.add(message.value or b"")

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(COMES_S)
