"""Several embedded brokers: one of three may be away, and a secure cluster denies what no ACL allows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from typer.testing import CliRunner

from kmq_spark.cli.main import app
from kmq_spark.client_properties import read_client_properties
from kmq_spark.errors import SetupError
from kmq_spark.local.cluster import EmbeddedCluster
from tests.brokers import quick_java
from tests.kafka.conftest import wait_until
from tests.kafka.local.test_broker import up
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.local.broker import EmbeddedBroker

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

TOPIC = "t"

COORDINATOR_S = 30.0
"""Longer than a broker of the cluster may be away before another one does its work."""


def settings(cluster: EmbeddedCluster, user: str = "") -> dict[str, str | int | float | bool]:
    """Return the settings of a client."""
    own = read_client_properties(cluster.properties(user))["extra"] if user else {}
    return {"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, **own}


def create(cluster: EmbeddedCluster, user: str = "") -> None:
    """Create the topic with the brokers' own defaults."""
    admin = AdminClient(settings(cluster, user))
    admin.create_topics([NewTopic(TOPIC, 1)])[TOPIC].result(COMES_S)


def transactional(config: dict[str, str | int | float | bool]) -> Producer:
    """Return a client that has found the transaction coordinator: one that met a suspended broker may never find it."""
    until = time.monotonic() + COMES_S
    while True:
        producer = Producer(config)
        try:
            producer.init_transactions(COORDINATOR_S)
        except KafkaException:
            if time.monotonic() > until:
                raise
        else:
            return producer


def send_and_read(cluster: EmbeddedCluster, value: bytes, user: str = "") -> bytes | None:
    """Send a value in a transaction, so that two internal topics are used too; return what is read at its offset."""
    producer = transactional(settings(cluster, user) | {"transactional.id": "x", "acks": "all"})
    producer.begin_transaction()
    offsets: list[int | None] = []
    producer.produce(TOPIC, value, on_delivery=lambda _, message: offsets.append(message.offset()))
    producer.commit_transaction(COMES_S)
    reader = Consumer(settings(cluster, user) | {"group.id": "g", "isolation.level": "read_committed"})
    try:
        assert isinstance(offsets[0], int)
        reader.assign([TopicPartition(TOPIC, 0, offsets[0])])
        message = reader.poll(COMES_S)
        assert message is not None
        assert wait_until(lambda: commits(reader, message.offset() or 0))
        return message.value()
    finally:
        reader.close()


def commits(reader: Consumer, offset: int) -> bool:
    """Commit past an offset; return whether the group's coordinator, which may just be elected, took it."""
    try:
        reader.commit(offsets=[TopicPartition(TOPIC, 0, offset + 1)], asynchronous=False)
    except KafkaException:
        return False
    return True


def test_cluster_works_while_each_broker_in_turn_is_away() -> None:
    """Killed or suspended; what it missed it has again when it is back, since two replicas must acknowledge."""
    away: tuple[tuple[Callable[[EmbeddedBroker], None], Callable[[EmbeddedBroker], object]], ...] = (
        (lambda broker: broker.kill(), lambda broker: broker.start()),
        (lambda broker: broker.pause(), lambda broker: broker.resume()),
        (lambda broker: broker.kill(), lambda broker: broker.start()),
    )
    with EmbeddedCluster(environment=quick_java()) as cluster:
        create(cluster)
        for number, ((leave, come_back), broker) in enumerate(zip(away, cluster.brokers, strict=True)):
            leave(broker)
            assert send_and_read(cluster, b"%d" % number) == b"%d" % number
            come_back(broker)
        assert [broker.is_running for broker in cluster.brokers] == [True] * 3


def test_secure_cluster_knows_its_users_and_allows_only_the_operator(tmp_path: Path) -> None:
    """
    The second start has the data of the first one, which keep users and passwords.

    Of the operator's settings, all but one right, a client that waits for an answer gets none.
    """
    for start in range(2):
        with EmbeddedCluster(1, tmp_path / "data", users=["viewer"], environment=quick_java()) as cluster:
            if not start:
                create(cluster, "admin")
            else:
                for key, value in (("sasl.password", "wrong"), ("security.protocol", "PLAINTEXT")):
                    with pytest.raises(KafkaException):
                        AdminClient(settings(cluster, "admin") | {key: value}).list_topics(timeout=3)
            assert send_and_read(cluster, b"value", "admin") == b"value"
            assert TOPIC not in AdminClient(settings(cluster, "viewer")).list_topics(timeout=COMES_S).topics
    with pytest.raises(SetupError, match="they are of 1 brokers, with users; give the same options, or a new folder"):
        EmbeddedCluster(3, tmp_path / "data")


def test_up_makes_a_secure_cluster_that_dies_with_it() -> None:
    """`kmq up --secure` prints the operator's file, with which every command works."""
    process = up("--brokers", "2", "--secure")
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        words = process.stdout.readline().split()
        file = Path(words[words.index("--command-config") + 1])
        created = CliRunner().invoke(app, ["queue", "create", "orders", "--command-config", str(file)])
        assert created.exit_code == 0, created.output
        assert (file.parent / "kmq-producer.properties").stat().st_mode & 0o077 == 0
        process.kill()
        process.wait()
    assert wait_until(lambda: not file.parent.exists(), COMES_S)
