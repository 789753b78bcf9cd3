"""Three brokers with TLS that deny by default: every part with its own user and one kind of file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kmq_spark import QueueProducer, read_client_properties
from tests.kafka.commands import no_process_outlives_its_test, start
from tests.kafka.conftest import wait_until
from tests.kafka.secured import SecuredBroker
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["no_process_outlives_its_test"]  # a fixture of this module

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.slow, pytest.mark.long]

QUEUE = "orders"
HOLDS = """
import sys, time
from kmq_spark import KafkaClientError, QueueConsumer, read_client_properties

with QueueConsumer(sys.argv[1], **read_client_properties(sys.argv[2]), lease=3, max_lease=3) as consumer:
    messages = []
    while not messages:
        try:
            messages = consumer.receive(1, timeout=5)
        except KafkaClientError as error:
            if not error.retriable:
                raise
    print(messages[0].value.decode(), messages[0].delivery_count, flush=True)
    time.sleep(3_600)
"""


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[SecuredBroker]:
    """Three brokers and a queue whose messages are delivered twice at most."""
    broker = SecuredBroker(tmp_path, brokers=3)
    try:
        broker.grant(QUEUE, "creator", "producer", "consumer", "tracker", "viewer", "dlq-operator")
        broker.create("queue", "create", QUEUE, "--max-deliveries", "2", "--backoff", "none")
        yield broker
    finally:
        broker.close()


def killed_holding(secured: SecuredBroker) -> str:
    """Kill a consumer that holds a message; return the message and its count."""
    command = [sys.executable, "-c", HOLDS, QUEUE, str(secured.properties("consumer"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        held = process.stdout.readline().strip()
        process.kill()
    return held


def test_message_of_killed_consumers_becomes_a_dead_letter(secured: SecuredBroker) -> None:
    """Also without one of the brokers, which is killed in between."""
    with QueueProducer(QUEUE, **read_client_properties(secured.properties("producer"))) as producer:
        producer.send("deadly")
    assert killed_holding(secured) == "deadly 1"
    environment = {**os.environ, "KMQ_TRACKER__CHECKPOINT_DIR": str(secured.folder / "checkpoint")}
    file = str(secured.properties("tracker"))
    tracker = start(
        secured.bootstrap_servers, "tracker", "run", QUEUE, "--events", "--command-config", file, env=environment,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert tracker.stdout is not None
    with tracker.stdout:
        assert b'"ready"' in tracker.stdout.readline()
        secured.cluster.brokers[0].kill()
        assert killed_holding(secured) == "deadly 2"
        assert wait_until(lambda: len(letters(secured)) == 1)
        assert letters(secured)[0]["value"] == "deadly"
        tracker.terminate()
        assert tracker.wait(ENDS_S) == 0
    redriven = secured.kmq("dlq-operator", "dlq", "redrive", QUEUE, "--all", "--execute")
    assert redriven.exit_code == 0, redriven.output
    assert letters(secured) == []


def letters(secured: SecuredBroker) -> list[dict[str, object]]:
    """Return the dead letters as the viewer sees them."""
    listed = secured.kmq("viewer", "dlq", "list", QUEUE, "-o", "json")
    assert listed.exit_code == 0, listed.output
    found: list[dict[str, object]] = json.loads(listed.stdout)
    return found
