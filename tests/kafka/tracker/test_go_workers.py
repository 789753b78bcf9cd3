"""kafka-mq-go's producers and workers with our tracker and our consumers: the same topics and wire format."""

from __future__ import annotations

import os
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
from tests.kafka.stage import LEASE_MS
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka import Message

    from tests.kafka.stage import Stage

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


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
