"""Queues on three brokers: an acknowledged record must be on two of them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ConfigResource
from typer.testing import CliRunner

from faults.three_brokers import ThreeBrokers
from kmq_spark.cli.main import app
from kmq_spark.errors import TopicError
from kmq_spark.kafka.topics import check_queue, create_queue_topics
from kmq_spark.local.broker import EmbeddedBroker
from tests.brokers import quick_java
from tests.kafka.conftest import read_all, set_topic, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


@pytest.fixture(scope="module")
def brokers() -> Iterator[ThreeBrokers]:
    """Three brokers whose default is three replicas, and one of them in sync."""
    made = ThreeBrokers({"min.insync.replicas": "1"}, quick_java())
    try:
        yield made
    finally:
        made.close()


def setting(bootstrap_servers: str, topic: str, key: str) -> str:
    """Return a setting of a topic, as a client that starts at this broker sees it."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    (future,) = admin.describe_configs([ConfigResource("topic", topic)]).values()
    return str(future.result(20)[key].value)


def has_setting(brokers: ThreeBrokers, topic: str, key: str, value: str) -> bool:
    """Wait until every broker reports it: brokers receive a change at different times."""
    found = AdminClient({"bootstrap.servers": brokers.bootstrap_servers}).list_topics(timeout=10).brokers.values()
    return all(
        wait_until(lambda at=f"{each.host}:{each.port}": setting(at, topic, key) == value)  # type: ignore[misc]
        for each in found
    )


@pytest.mark.parametrize("replication_factor", [-1, 3])
def test_queue_with_three_replicas_needs_two_of_them_for_a_write(
    brokers: ThreeBrokers, replication_factor: int
) -> None:
    """With an explicit replication factor and with the broker's default."""
    name = f"made{replication_factor}"
    layout = create_queue_topics(
        name, bootstrap_servers=brokers.bootstrap_servers, partitions=1, replication_factor=replication_factor
    )
    for topic in (*layout.topics.all_topics, layout.topics.redrive_topic):
        assert has_setting(brokers, topic, "min.insync.replicas", "2"), topic
        assert has_setting(brokers, topic, "unclean.leader.election.enable", "false"), topic


@pytest.mark.parametrize(
    ("topic", "key", "value", "repair"),
    [
        ("{}", "min.insync.replicas", "1", "--entity-name {} --add-config min.insync.replicas=2"),
        ("{}.markers", "min.insync.replicas", "1", "--entity-name {}.markers --add-config min.insync.replicas=2"),
        (
            "{}.markers", "unclean.leader.election.enable", "true",
            "--entity-name {}.markers --add-config unclean.leader.election.enable=false",
        ),
    ],
)  # fmt: skip
def test_setting_that_loses_acknowledged_records_is_found_with_its_repair(
    brokers: ThreeBrokers, topic: str, key: str, value: str, repair: str
) -> None:
    """The start check of every tracker and the doctor find it."""
    name = f"weak-{topic.partition('.')[2]}-{key}"
    create_queue_topics(name, bootstrap_servers=brokers.bootstrap_servers, partitions=1)
    set_topic(brokers.bootstrap_servers, topic.format(name), key, value)
    assert has_setting(brokers, topic.format(name), key, value)
    with pytest.raises(TopicError) as raised:
        check_queue(name, bootstrap_servers=brokers.bootstrap_servers)
    assert f"has {key}={value}" in str(raised.value)
    assert repair.format(name) in str(raised.value)

    result = CliRunner().invoke(app, ["doctor", name, "-o", "json", "--bootstrap-server", brokers.bootstrap_servers])
    assert result.exit_code == 3
    (found,) = [finding for finding in json.loads(result.stdout) if finding["level"] == "unhealthy"]
    assert f"has {key}={value}" in found["what"]
    assert repair.format(name) in found["repair"]


def is_acknowledged(brokers: ThreeBrokers, topic: str, value: bytes) -> bool:
    """Return whether the replicas that must have a record have it."""
    errors: list[object] = []
    client = {"bootstrap.servers": brokers.bootstrap_servers, "acks": "all", "delivery.timeout.ms": 10_000}
    producer = Producer(client | {"log_level": 0})
    producer.produce(topic, value, on_delivery=lambda error, _: errors.append(error))
    producer.flush(30)
    return errors == [None]


def test_acknowledged_record_is_lost_only_without_the_settings_that_create_makes(brokers: ThreeBrokers) -> None:
    """A leader whose followers are away takes a record and dies; then they come back without it."""
    servers = brokers.bootstrap_servers
    # Otherwise the groups have no coordinator when their last replica in sync is dead, and no broker becomes ready.
    set_topic(servers, "__consumer_offsets", "min.insync.replicas", 2)
    for name in ("weakened", "made"):
        create_queue_topics(name, bootstrap_servers=servers, partitions=1)
        assert is_acknowledged(brokers, name, b"on three")
    set_topic(servers, "weakened", "min.insync.replicas", 1)
    set_topic(servers, "weakened", "unclean.leader.election.enable", "true")
    assert has_setting(brokers, "weakened", "unclean.leader.election.enable", "true")
    assert CliRunner().invoke(app, ["doctor", "weakened", "--bootstrap-server", servers]).exit_code == 3
    leader = brokers.leading("weakened")
    followers = [broker for broker in brokers.brokers if broker is not leader]
    for follower in followers:
        follower.stop()

    assert is_acknowledged(brokers, "weakened", b"on one")
    assert not is_acknowledged(brokers, "made", b"on one")

    leader.kill()
    with ThreadPoolExecutor() as pool:
        list(pool.map(EmbeddedBroker.start, followers))
    for name in ("weakened", "made"):
        brokers.wait_deposed(leader, name)
    leader.start()
    brokers.wait_in_sync()
    assert [record.value() for record in read_all(servers, "weakened")] == [b"on three"]
    assert [record.value() for record in read_all(servers, "made")] == [b"on three"]
