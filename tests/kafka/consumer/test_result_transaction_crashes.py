"""Processes killed around a transaction: with the tracker's redeliveries each message has its result exactly once."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kmq_spark.demo.audit import audit
from kmq_spark.failpoints import EXIT_CODE, VARIABLE
from kmq_spark.kafka.topics import create_queue
from tests.kafka.conftest import read_all
from tests.kafka.stage import Stage, wait_until
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]

POINTS = ("consumer.tx-sent", "consumer.tx-before-commit", "consumer.tx-committed")

WORKER = """
import sys
from kmq_spark.consumer.consumer import QueueConsumer
servers, queue, results, consumer_id = sys.argv[1:]
consumer = QueueConsumer(queue, bootstrap_servers=servers, lease=3,
                         extra={"session.timeout.ms": "6000", "client.id": consumer_id})
print("ready", flush=True)
while True:
    for message in consumer.receive(3, timeout=0.5):
        with consumer.transaction() as tx:
            tx.send(results, message.value, key=str(message.delivery_count))
            tx.ack(message)
"""


@pytest.fixture
def results(stage: Stage) -> str:
    """A topic that takes the results."""
    name = f"{stage.queue}.results"
    create_queue(name, bootstrap_servers=stage.bootstrap_servers, partitions=1)
    return name


def worker(stage: Stage, results: str, number: int, point: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker that ends at a crash point, or lives for none; it is dead in the end."""
    environment = {**os.environ, VARIABLE: point} if point else None
    command = [sys.executable, "-c", WORKER, stage.bootstrap_servers, stage.queue, results, f"worker-{number}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_each_message_has_its_result_exactly_once_whatever_dies_around_the_commit(stage: Stage, results: str) -> None:
    """Three workers: `kill -9` when everything was sent, when everything was durable, and right after the commit."""
    names = sorted(f"m{number}".encode() for number in range(12))
    with stage.tracking():
        stage.send(*(name.decode() for name in names))
        for number, point in enumerate(POINTS):
            # At its second transaction, with a message behind it under the same lease.
            for process in worker(stage, results, number, f"{point}:2"):
                assert process.wait(ENDS_S) == EXIT_CODE
        for _ in worker(stage, results, len(POINTS), ""):
            assert wait_until(lambda: len(values(stage, results)) >= len(names))
            assert wait_until(lambda: not audit(stage.layout, stage.bootstrap_servers).lost)
    assert sorted(values(stage, results)) == names
    story = audit(stage.layout, stage.bootstrap_servers)
    assert (story.early, story.lost) == (0, set())
    # What was held at the first two crashes came again; what was committed at the third did not.
    assert story.redelivered >= 2


def values(stage: Stage, topic: str) -> list[bytes]:
    """Return the results that a reader of committed records sees."""
    return [record.value() for record in read_all(stage.bootstrap_servers, topic)]
