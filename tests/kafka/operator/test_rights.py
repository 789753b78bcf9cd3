"""`kmq acls` against Kafka's own authorizer: what it lists is enough for each part's work, and for nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
)

from kmq_spark.client_properties import read_client_properties
from kmq_spark.config import load_settings
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.coordination import Coordinator
from kmq_spark.errors import KmqError
from kmq_spark.inspection.inspector import QueueInspector
from kmq_spark.kafka.queue_rules import RULES_TOPIC
from kmq_spark.local.cluster import OPERATOR
from kmq_spark.producer.async_producer import AsyncQueueProducer
from kmq_spark.producer.producer import QueueProducer
from kmq_spark.producer.resuming import ResumingProducer
from tests.kafka.conftest import receive_all, wait_until
from tests.kafka.secured import SecuredBroker
from tests.kafka.tracker.noting_fleet import NotingTracker, Process
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.slow]

LEASE_MS = 3_000
QUEUE, FLEET, GROUP = "orders", "production", "g"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """A broker with a queue that was made by who may make it, and messages sent by who may send."""
    folder = tmp_path_factory.mktemp("secured")
    with SecuredBroker.with_queue(
        folder, QUEUE, "producer", "resuming-producer", "transactional-consumer", "tracker", "dlq-operator", "viewer",
        "ledger",
    ) as broker:  # fmt: skip
        broker.grant_by_kafka_acls(QUEUE, "consumer")
        yield broker


def consumer(secured: SecuredBroker, part: str = "consumer", lease: float = 30, queue: str = QUEUE) -> QueueConsumer:
    """Return a consumer that lets its leases run out."""
    return QueueConsumer(
        queue, bootstrap_servers=secured.bootstrap_servers, extra=secured.credentials(part), lease=lease,
        max_lease=lease, isolate_after=0,
    )  # fmt: skip


def send(
    secured: SecuredBroker, *values: str, part: str = "producer", delay: float | None = None, queue: str = QUEUE
) -> None:
    """Send messages and wait for them."""
    connection = {"bootstrap_servers": secured.bootstrap_servers, "extra": secured.credentials(part)}
    with QueueProducer(queue, **connection) as producer:  # type: ignore[arg-type]  # one dict for both
        for value in values:
            producer.send(value, delay=delay)


def in_its_own_process(secured: SecuredBroker, part: str, *arguments: str, **environment: str) -> str:
    """Run a command that starts Spark, and return what it said on stderr."""
    command = [
        *(sys.executable, "-m", "kmq_spark.cli.main", *arguments),
        *("--command-config", str(secured.properties(part))),
    ]
    env = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENDS_S, env=env)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_each_part_does_its_work_with_what_kmq_acls_lists(secured: SecuredBroker) -> None:
    """Send; take, acknowledge, reject, forget; redeliver; look; redrive; write the ledger."""
    send(secured, "acked", "rejected", "forgotten")
    send(secured, "later", delay=3_600)
    with consumer(secured, lease=LEASE_MS / 1000) as worker:
        for message in receive_all(worker, 3):
            if message.value == b"acked":
                message.ack()
            elif message.value == b"rejected":
                message.reject("no such customer")
    time.sleep(LEASE_MS / 1000)
    checkpoint = str(secured.folder / "checkpoint")
    in_its_own_process(
        secured,
        "tracker",
        "tracker",
        "run",
        QUEUE,
        KMQ_TRACKER__CHECKPOINT_DIR=checkpoint,
        KMQ_TRACKER__TRIGGER="available-now",
    )
    with consumer(secured, "transactional-consumer") as worker:
        (message,) = receive_all(worker, 1)
        assert (message.value, message.delivery_count) == (b"forgotten", 2)
        with worker.transaction() as transaction:
            transaction.ack(message)
    once = secured.kmq("tracker", "tracker", "once", QUEUE)
    assert once.exit_code == 0, once.output

    look_at_everything(secured)
    assert counted_by_the_tracker(secured) == 1
    redrive(secured)
    assert counted_by_the_tracker(secured) == 0
    output = in_its_own_process(
        secured, "ledger", "ledger", "run", QUEUE, "--once", KMQ_LEDGER__DIR=str(secured.folder / "ledger")
    )
    assert "rows of messages" in output


def counted_by_the_tracker(secured: SecuredBroker) -> int:
    """Return how many dead letters its metrics count."""
    connection = {"bootstrap_servers": secured.bootstrap_servers, "extra": secured.credentials("tracker")}
    with QueueInspector(QUEUE, **connection) as inspector:  # type: ignore[arg-type]  # one dict for both
        return inspector.look(with_markers=False).dead_letters.count


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


def test_who_may_write_nowhere_is_told_so_at_once(secured: SecuredBroker) -> None:
    """Kafka then refuses the client as a whole, which ends it, and no message has an answer."""
    connection = read_client_properties(secured.properties("viewer"))
    refused = "Cluster authorization failed .*; grant the access that `kmq acls` lists"

    async def send_one() -> None:
        async with AsyncQueueProducer(QUEUE, **connection) as producer:
            with pytest.raises(KmqError, match=refused):
                await asyncio.wait_for(producer.send("a"), COMES_S)

    asyncio.run(send_one())
    # The client ends before this call or after it: `send` says it, or the end of the block does.
    with pytest.raises(KmqError, match=refused), QueueProducer(QUEUE, **connection) as producer:
        producer.send("a")


FOREIGN_GROUPS = (
    "kmq.orders.tracker", "kmq.orders.tracker.source-1", "kmq.orders.redrive", "kmq.orders.ledger-1",
    "kmq.orders.queue-vip", "kmq.orders.subscription-billing", "kmq.orders.subscription-billing.tracker", "kmq.orders2",
    "kmq.orders2.tracker", "kmq.orders.backend",
)  # fmt: skip
"""Consumer groups that belong to the tracker, the ledger, the redrive, a logical queue, a named group, other queues."""

FOREIGN_TRANSACTIONAL_IDS = (
    "kmq.orders.tracker", "kmq.orders.redrive", "kmq.orders.subscription-billing.tracker", "kmq.orders2.tracker",
    "kmq.orders.consumers.tracker",
)  # fmt: skip


def code_of(call: Callable[[], object]) -> str:
    """Return the name of the error that a client's call ends with; empty where it succeeds."""
    try:
        call()
    except KafkaException as error:
        found: KafkaError = error.args[0]
        return str(found.name())
    return ""


def commit_as(secured: SecuredBroker, part: str, group: str) -> str:
    """Commit an offset of the queue topic for a group; return the error code."""
    admin = AdminClient({"bootstrap.servers": secured.bootstrap_servers, **secured.credentials(part)})
    wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(QUEUE, 0, 1)])
    (future,) = admin.alter_consumer_group_offsets([wanted], request_timeout=20).values()

    def call() -> None:
        for place in future.result(20).topic_partitions:
            if place.error is not None:
                raise KafkaException(place.error)

    return code_of(call)


def read_committed_as(secured: SecuredBroker, part: str, group: str) -> str:
    """Read the committed offset of the queue topic of a group; return the error code."""
    admin = AdminClient({"bootstrap.servers": secured.bootstrap_servers, **secured.credentials(part)})
    wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(QUEUE, 0)])
    (future,) = admin.list_consumer_group_offsets([wanted], request_timeout=20).values()
    return code_of(lambda: future.result(20))


def producer_of(secured: SecuredBroker, part: str, transactional_id: str) -> Producer:
    """Return a transactional producer that has not been initialized."""
    return Producer({
        "bootstrap.servers": secured.bootstrap_servers, **secured.credentials(part),
        "transactional.id": transactional_id, "transaction.timeout.ms": 10_000,
    })  # fmt: skip


def commit_in_transaction_as(secured: SecuredBroker, part: str, transactional_id: str, group: str) -> str:
    """Commit an offset of the queue topic for a group within a transaction; return the error code."""
    credentials = {"bootstrap.servers": secured.bootstrap_servers, **secured.credentials(part)}
    membership = Consumer({**credentials, "group.id": group}).consumer_group_metadata()
    producer = producer_of(secured, part, transactional_id)
    producer.init_transactions(20)
    producer.begin_transaction()
    code = code_of(lambda: producer.send_offsets_to_transaction([TopicPartition(QUEUE, 0, 1)], membership, 20))
    producer.abort_transaction(20)
    return code


@pytest.mark.parametrize("part", ["consumer", "transactional-consumer"])
def test_consumer_can_use_its_own_group_and_no_other(secured: SecuredBroker, part: str) -> None:
    """The tracker's group, a named group, a logical queue's, another queue's: neither committed nor read."""
    assert (commit_as(secured, part, "kmq.orders"), read_committed_as(secured, part, "kmq.orders")) == ("", "")
    committed = {group: commit_as(secured, part, group) for group in FOREIGN_GROUPS}
    assert committed == dict.fromkeys(FOREIGN_GROUPS, "GROUP_AUTHORIZATION_FAILED")
    read = {group: read_committed_as(secured, part, group) for group in FOREIGN_GROUPS}
    assert read == dict.fromkeys(FOREIGN_GROUPS, "GROUP_AUTHORIZATION_FAILED")


def test_transactional_consumer_cannot_commit_for_another_group_in_a_transaction(secured: SecuredBroker) -> None:
    """The tracker's offsets, with forged metadata, would move where the tracker reads."""
    part, own = "transactional-consumer", "kmq.orders.consumer.worker-1"
    assert commit_in_transaction_as(secured, part, own, "kmq.orders") == ""
    for group in FOREIGN_GROUPS:
        assert commit_in_transaction_as(secured, part, own, group) == "GROUP_AUTHORIZATION_FAILED", group


def test_transactional_consumer_cannot_fence_tracker_or_redrive(secured: SecuredBroker) -> None:
    """A transactional id belongs to one part of one queue; a client that may use it can fence its owner."""
    for transactional_id in FOREIGN_TRANSACTIONAL_IDS:
        producer = producer_of(secured, "transactional-consumer", transactional_id)
        code = code_of(lambda producer=producer: producer.init_transactions(20))  # type: ignore[misc]  # bound now
        assert code == "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", transactional_id


def test_tracker_viewer_and_ledger_reach_no_foreign_group(secured: SecuredBroker) -> None:
    """Groups whose names begin alike belong to other queues."""
    groups_of_others = ("kmq.orders.trackers", "kmq.orders.tracker.other", "kmq.orders2", "kmq.orders.queue-vip")
    for part, own, foreign in (
        ("tracker", ("kmq.orders.tracker",), ("kmq.orders", *groups_of_others)),
        ("ledger", ("kmq.orders.ledger-1",), ("kmq.orders", "kmq.orders.ledgers", "kmq.orders.tracker")),
    ):
        assert [commit_as(secured, part, group) for group in own] == [""] * len(own), part
        for group in foreign:
            assert commit_as(secured, part, group) == "GROUP_AUTHORIZATION_FAILED", (part, group)
    for group in ("kmq.orders2", "kmq.orders2.tracker", "kmq.orders.subscription-billing", "kmq.orders.queue-vip"):
        assert read_committed_as(secured, "viewer", group) == "GROUP_AUTHORIZATION_FAILED", group
    assert commit_as(secured, "viewer", "kmq.orders") == "GROUP_AUTHORIZATION_FAILED"


def write_as(secured: SecuredBroker, part: str, topic: str) -> str:
    """Write a record; return the error code."""
    codes: list[str] = []
    producer = Producer({
        "bootstrap.servers": secured.bootstrap_servers, **secured.credentials(part), "message.timeout.ms": 20_000,
    })  # fmt: skip
    producer.produce(topic, b"?", on_delivery=lambda error, _: codes.append(str(error.name()) if error else ""))
    producer.flush(30)
    return codes[0]


def test_part_cannot_write_to_a_topic_that_is_not_its_own(secured: SecuredBroker) -> None:
    """A client that may write markers decides about all messages of the queue."""
    for part, topic in (
        ("producer", "orders.markers"), ("producer", "orders.dlq"), ("consumer", "orders"), ("consumer", "orders.dlq"),
        ("consumer", "orders.dlq.markers"), ("tracker", "orders.dlq.markers"), ("dlq-operator", "orders.markers"),
        ("viewer", "orders"), ("viewer", "orders.markers"), ("ledger", "orders.markers"), ("creator", "orders"),
    ):  # fmt: skip
        assert write_as(secured, part, topic) == "TOPIC_AUTHORIZATION_FAILED", (part, topic)


def test_parts_of_one_tenant_reach_nothing_of_another(secured: SecuredBroker) -> None:
    """
    With rights for queues of their own they neither read the other's topics nor write there, nor change its rules.

    Only who creates queues may write rules, and then those of all queues.
    """
    other = "b-orders"
    secured.grant(other, "creator")
    secured.create("queue", "create", other)
    topics = (other, f"{other}.markers", f"{other}.dlq")
    for part in ("producer", "transactional-consumer", "tracker", "dlq-operator", "viewer", "ledger"):
        client = AdminClient({"bootstrap.servers": secured.bootstrap_servers, **secured.credentials(part)})
        for topic in topics:  # without Describe there is no Read
            error = client.list_topics(topic, COMES_S).topics[topic].error
            assert error is not None, (part, topic)
            assert error.name() == "TOPIC_AUTHORIZATION_FAILED", (part, topic)
        for topic in (*topics, RULES_TOPIC):
            assert write_as(secured, part, topic) == "TOPIC_AUTHORIZATION_FAILED", (part, topic)
        assert secured.kmq(part, "queue", "alter", other, "--max-deliveries", "1").exit_code == 1
    (row,) = [each for each in listed(secured, OPERATOR) if each["queue"] == other]
    assert row["rules_version"] == 1


def listed(secured: SecuredBroker, user: str) -> list[dict[str, object]]:
    """Return the queues that a user sees."""
    rows: list[dict[str, object]] = json.loads(secured.kmq(user, "queue", "list", "-o", "json").stdout)
    return rows


def test_consumer_of_a_logical_queue_needs_a_grant_for_it(secured: SecuredBroker) -> None:
    """`--logical-queue` adds the group of one logical queue, and of no other."""
    secured.grant(QUEUE, "consumer", options=("--logical-queue", "express"))
    assert commit_as(secured, "consumer", "kmq.orders.queue-express") == ""
    assert commit_as(secured, "consumer", "kmq.orders.queue-express2") == "GROUP_AUTHORIZATION_FAILED"


def resuming_as(secured: SecuredBroker, part: str = "resuming-producer") -> ResumingProducer:
    """Return a resuming producer, as the user of a part."""
    return ResumingProducer(
        QUEUE, "copier", bootstrap_servers=secured.bootstrap_servers, extra=secured.credentials(part)
    )


def test_producer_with_an_id_does_its_work_with_what_kmq_acls_lists(secured: SecuredBroker) -> None:
    for number in (1, 2):
        with resuming_as(secured) as producer:
            assert (producer.position, producer.sequence) == (number - 1 or None, number - 1)
            producer.send("x")
            producer.commit(number)
    listed = secured.kmq("viewer", "producer", "list", QUEUE, "-o", "json")
    assert [each["position"] for each in json.loads(listed.stdout)] == [2]
    doctor = secured.kmq("viewer", "doctor", QUEUE, "-o", "json")
    (finding,) = [each for each in json.loads(doctor.stdout) if each["check"] == "producers"]
    assert finding["level"] == "ok"


def test_error_of_a_producer_without_the_rights_for_an_id_names_where_they_are_listed(secured: SecuredBroker) -> None:
    with pytest.raises(KmqError, match="kmq acls orders"):
        resuming_as(secured, "producer")


def test_producer_cannot_fence_other_parts_of_the_queue(secured: SecuredBroker) -> None:
    for transactional_id in ("kmq.orders.tracker", "kmq.orders.consumer.x", "kmq.orders2.producer.x"):
        client = Producer({
            "bootstrap.servers": secured.bootstrap_servers, **secured.credentials("resuming-producer"),
            "transactional.id": transactional_id,
        })  # fmt: skip
        with pytest.raises(KafkaException) as raised:
            client.init_transactions(20)
        assert raised.value.args[0].name() == "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"


@pytest.fixture(scope="module")
def grouped(secured: SecuredBroker) -> SecuredBroker:
    """The broker with a coordination topic, and what a fleet and a group may do there."""
    parts = ("creator", "tracker", "member", "viewer")
    secured.grant(QUEUE, *parts, options=("--fleet", FLEET, "--group", GROUP))
    secured.create("group", "init")
    return secured


def test_process_of_a_fleet_does_its_work_with_what_kmq_acls_lists(grouped: SecuredBroker) -> None:
    """It joins, adds its queue, gets it assigned and tracks it; the viewer sees that."""
    settings = load_settings(
        None,
        {
            "kafka": {"bootstrap_servers": grouped.bootstrap_servers, "extra": grouped.credentials("tracker")},
            "tracker": {"queues": (QUEUE,), "fleet": FLEET, "fleet_member": "a"},
        },
    )
    process = Process(settings, FLEET, NotingTracker)
    assert wait_until(lambda: process.running() == [QUEUE] or process.failure is not None)
    assert process.failure is None
    shown = grouped.kmq("viewer", "tracker", "fleet", FLEET, "-o", "json")
    assert (shown.exit_code, json.loads(shown.stdout)["queues"][0]["tracked_by"]) == (0, "a"), shown.output
    doctor = grouped.kmq("viewer", "doctor", QUEUE, "-o", "json")
    (finding,) = [each for each in json.loads(doctor.stdout) if each["check"] == "fleet"]
    assert "has one process" in finding["what"]
    process.end()
    assert process.failure is None


def test_member_of_a_group_does_its_work_with_what_kmq_acls_lists(grouped: SecuredBroker) -> None:
    with Coordinator(
        GROUP, bootstrap_servers=grouped.bootstrap_servers, extra=grouped.credentials("member"), client_id="a"
    ) as me:
        claim = me.claim("r", COMES_S)
        assert claim is not None
        claim.commit(7, timeout=COMES_S)
        listed = grouped.kmq("viewer", "group", "list", "-o", "json")
        assert GROUP in [row["group"] for row in json.loads(listed.stdout)], listed.output


def test_viewer_cannot_pause_a_group(grouped: SecuredBroker) -> None:
    """It may read and not write: it follows the group, nothing changes, and the error names what is refused."""
    operator = Coordinator(GROUP, bootstrap_servers=grouped.bootstrap_servers, extra=grouped.credentials("viewer"))
    operator.watch()
    try:
        with pytest.raises(KmqError, match="AUTHORIZATION_FAILED"):
            operator.pause(60)
        assert not operator.view().paused_until_ms
    finally:
        operator.close()
