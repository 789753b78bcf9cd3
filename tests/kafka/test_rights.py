"""`kmq acls` against Kafka's own authorizer: with what it lists each part does its work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from kmq_spark.kafka.consumer import QueueConsumer
from kmq_spark.kafka.producer import QueueProducer
from tests.kafka.conftest import receive_all
from tests.kafka.secured import SecuredBroker

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400)]

LEASE_MS = 3_000
QUEUE = "orders"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """A broker with a queue that was made by who may make it, and messages sent by who may send."""
    broker = SecuredBroker(tmp_path_factory.mktemp("secured"))
    try:
        broker.grant(
            QUEUE, "creator", "producer", "transactional-consumer", "tracker", "dlq-operator", "viewer", "ledger"
        )
        broker.grant_by_kafka_acls(QUEUE, "consumer")
        made = broker.kmq("creator", "queue", "create", QUEUE, "--partitions", "1")
        assert made.exit_code == 0, made.output
        yield broker
    finally:
        broker.close()


def consumer(secured: SecuredBroker, part: str = "consumer", lease_ms: int = 30_000) -> QueueConsumer:
    """Return a consumer that lets its leases run out."""
    return QueueConsumer(
        QUEUE, bootstrap_servers=secured.bootstrap_servers, extra=secured.credentials(part), lease_ms=lease_ms,
        keep_alive=False, isolate_after=0,
    )  # fmt: skip


def send(secured: SecuredBroker, *values: str, part: str = "producer", delay: float | None = None) -> None:
    """Send messages and wait for them."""
    connection = {"bootstrap_servers": secured.bootstrap_servers, "extra": secured.credentials(part)}
    with QueueProducer(QUEUE, **connection) as producer:  # type: ignore[arg-type]  # one dict for both
        for value in values:
            producer.send(value, delay=delay)


def in_its_own_process(secured: SecuredBroker, part: str, *arguments: str) -> str:
    """Run a command that starts Spark, and return what it said on stderr."""
    command = [
        *(sys.executable, "-m", "kmq_spark.cli.main", *arguments, "--bootstrap-server", secured.bootstrap_servers),
        *("--command-config", str(secured.properties(part)), "--trigger", "available-now"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_each_part_does_its_work_with_what_kmq_acls_lists(secured: SecuredBroker) -> None:
    """Send; take, acknowledge, reject, forget; redeliver; look; redrive; write the ledger."""
    send(secured, "acked", "rejected", "forgotten")
    send(secured, "later", delay=3_600)
    with consumer(secured, lease_ms=LEASE_MS) as worker:
        for message in receive_all(worker, 3):
            if message.value == b"acked":
                message.ack()
            elif message.value == b"rejected":
                message.reject("no such customer")
    time.sleep(LEASE_MS / 1000)
    checkpoint = str(secured.folder / "checkpoint")
    in_its_own_process(secured, "tracker", "tracker", "run", QUEUE, "--checkpoint-dir", checkpoint)
    with consumer(secured, "transactional-consumer") as worker:
        (message,) = receive_all(worker, 1)
        assert (message.value, message.delivery_count) == (b"forgotten", 2)
        with worker.transaction() as transaction:
            transaction.ack(message)
    once = secured.kmq("tracker", "tracker", "once", QUEUE)
    assert once.exit_code == 0, once.output

    look_at_everything(secured)
    redrive(secured)
    told = in_its_own_process(secured, "ledger", "ledger", "run", QUEUE, "--ledger-dir", str(secured.folder / "ledger"))
    assert "rows of messages" in told


def look_at_everything(secured: SecuredBroker) -> None:
    """The viewer's commands, which all say what there is."""
    for arguments in (
        ("top", QUEUE, "--once"), ("queue", "list"), ("queue", "describe", QUEUE), ("queue", "peek", QUEUE),
        ("message", "show", QUEUE, "0:0"), ("tracker", "status", QUEUE), ("dlq", "list", QUEUE),
    ):  # fmt: skip
        seen = secured.kmq("viewer", *arguments)
        assert seen.exit_code == 0, (arguments, seen.output)
    findings = json.loads(secured.kmq("viewer", "doctor", QUEUE, "-o", "json").stdout)
    levels = {finding["check"]: finding["level"] for finding in findings}
    assert set(levels.values()) <= {"ok", "warning"}, findings


def redrive(secured: SecuredBroker) -> None:
    """The operator sends the dead letter back."""
    listed = json.loads(secured.kmq("dlq-operator", "dlq", "list", QUEUE, "-o", "json").stdout)
    assert [letter["reason"] for letter in listed] == ["no such customer"]
    done = secured.kmq("dlq-operator", "dlq", "redrive", QUEUE, "--all", "--execute")
    assert done.exit_code == 0, done.output
    with consumer(secured) as worker:
        (message,) = receive_all(worker, 1)
        assert message.value == b"rejected"
        message.ack()
