"""The topics of a queue: created once, checked with every finding named."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource
from confluent_kafka.cimpl import NewTopic

from kmq_spark.coordination import create_coordination_topic
from kmq_spark.errors import ConfigError, TopicError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.topics import check_queue, create_queue_topics, partition_count
from tests.kafka.conftest import Queue, set_topic, wait_until

pytestmark = pytest.mark.kafka


@pytest.fixture
def name() -> str:
    """A queue's name that no other test has."""
    return f"topics-{time.time_ns()}"


def test_names_of_two_queues_never_meet() -> None:
    topics = QueueTopics("orders")
    assert topics.all_topics == ("orders", "orders.markers", "orders.dlq")
    assert (topics.consumer_group, topics.tracker_group) == ("kmq.orders", "kmq.orders.tracker")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("orders.tracker", ".tracker"), ("orders.consumer.x", ".consumer."), ("orders.queue-vip", ".queue-"),
        ("orders.subscription-b", ".subscription-"), ("orders.ledger-1", ".ledger-"), ("orders.markers", ".markers"),
        ("orders@billing.tracker", ".tracker"),
    ],
)  # fmt: skip
def test_new_queue_whose_names_would_meet_another_queue_s_is_refused(
    bootstrap_servers: str, name: str, part: str
) -> None:
    """The consumers of a queue orders.tracker would use the consumer group of the tracker of orders."""
    with pytest.raises(ConfigError, match=f"name is reserved: got .*, a name without '{re.escape(part)}'"):
        create_queue_topics(name, bootstrap_servers=bootstrap_servers)


def test_create_twice_changes_nothing(make_queue: Callable[..., Queue]) -> None:
    queue = make_queue(partitions=3)
    layout = create_queue_topics(queue.name, bootstrap_servers=queue.bootstrap_servers, partitions=5)
    assert layout.partition_count == 3
    assert layout.dead_letter_partition_count == 3
    assert layout.retention_ms == 7 * 24 * 60 * 60 * 1000


def test_dead_letter_topic_takes_larger_records_than_the_queue(queue: Queue) -> None:
    settings = topic_settings(queue.bootstrap_servers, queue.name, f"{queue.name}.dlq")
    assert int(settings[1]["max.message.bytes"]) > int(settings[0]["max.message.bytes"]) > 1_048_576
    assert settings[1]["retention.ms"] == "-1"


def test_topics_do_not_depend_on_the_defaults_of_the_cluster(queue: Queue) -> None:
    """With a smaller `message.max.bytes` of a cluster, STARTs and ENDs of a busy consumer would be refused."""
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    topics = [f"{queue.name}{suffix}" for suffix in ("", ".markers", ".dlq", ".dlq.markers", ".producers")]
    topics.append(f"coordination-{queue.name}")
    create_coordination_topic(queue.bootstrap_servers, topic=topics[-1], partitions=1, replication_factor=1)
    futures = admin.describe_configs([ConfigResource("topic", topic) for topic in topics])
    found = {resource.name: future.result(10) for resource, future in futures.items()}
    for topic, entries in found.items():
        size, limit = entries["max.message.bytes"], entries["retention.bytes"]
        assert (int(size.value) >= 1_048_588, size.is_default) == (True, False)
        assert topic not in topics[:4] or (limit.value, limit.is_default) == ("-1", False)


def test_missing_queue_is_reported_with_every_topic_and_the_command(bootstrap_servers: str) -> None:
    with pytest.raises(TopicError) as raised:
        check_queue("not-there", bootstrap_servers=bootstrap_servers)
    for topic in ("'not-there'", "'not-there.markers'", "'not-there.dlq'"):
        assert f"topic {topic} does not exist" in str(raised.value)
    assert "kmq queue create not-there" in str(raised.value)


def test_every_wrong_setting_is_found_at_once(queue: Queue) -> None:
    """Dead letters whose redrive record is removed would be sent again, messages without their STARTs be lost."""
    wrong = [
        (".markers", "message.timestamp.type", "CreateTime", "LogAppendTime"),
        (".markers", "cleanup.policy", "compact", "delete"),
        (".markers", "retention.bytes", "1000000", "-1"),
        (".dlq", "retention.bytes", "1000000", "-1"),
        (".dlq.markers", "retention.bytes", "1000000", "-1"),
        (".dlq.markers", "retention.ms", "1000", "-1"),
    ]
    for suffix, key, value, _ in wrong:
        set_topic(queue.bootstrap_servers, f"{queue.name}{suffix}", key, value)
    with pytest.raises(TopicError) as raised:
        check_queue(queue.name, bootstrap_servers=queue.bootstrap_servers)
    for suffix, key, value, expected in wrong:
        what = f"topic '{queue.name}{suffix}' has {key}={value}, must be {expected}; run `kafka-configs.sh"
        assert what in str(raised.value)


def test_queue_is_made_of_a_topic_that_exists(bootstrap_servers: str, name: str) -> None:
    """The other topics get as many partitions as it has."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for future in admin.create_topics([NewTopic(name, 4, 1)]).values():
        future.result(10)
    assert wait_until(lambda: partition_count(admin, name, bootstrap_servers, 10) == 4)
    layout = create_queue_topics(name, bootstrap_servers=bootstrap_servers, partitions=2)
    assert (layout.partition_count, layout.dead_letter_partition_count) == (4, 4)


def test_group_shares_the_queue_topic_and_its_size(bootstrap_servers: str, name: str) -> None:
    """Its markers topic has as many partitions as the queue's, whatever its own command asks for."""
    create_queue_topics(name, bootstrap_servers=bootstrap_servers, partitions=3, max_message_bytes=2_000_000)
    layout = create_queue_topics(f"{name}@billing", bootstrap_servers=bootstrap_servers, partitions=1)
    assert layout.topics == QueueTopics(name, "billing")
    assert (layout.partition_count, layout.dead_letter_partition_count, layout.redrive_partition_count) == (3, 3, 3)
    queue, dead_letters = topic_settings(bootstrap_servers, name, f"{name}.subscription-billing.dlq")
    assert int(dead_letters["max.message.bytes"]) > int(queue["max.message.bytes"]) > 2_000_000


def test_group_that_does_not_fit_is_reported_with_its_own_command(bootstrap_servers: str, name: str) -> None:
    create_queue_topics(name, bootstrap_servers=bootstrap_servers, partitions=2)
    with pytest.raises(TopicError, match=rf"subscription-a.markers' does not exist; run `kmq queue create {name}@a`"):
        check_queue(f"{name}@a", bootstrap_servers=bootstrap_servers)
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for future in admin.create_topics([NewTopic(f"{name}.subscription-a.markers", 1, 1)]).values():
        future.result(10)
    with pytest.raises(TopicError, match=rf"--alter --topic {name}.subscription-a.markers --partitions 2"):
        create_queue_topics(f"{name}@a", bootstrap_servers=bootstrap_servers)


@pytest.mark.parametrize("partitions", [0, -1, 32_769])
def test_partition_count_out_of_bounds_is_refused(partitions: int) -> None:
    with pytest.raises(ConfigError, match="partitions is out of bounds"):
        create_queue_topics("orders", bootstrap_servers="127.0.0.1:1", partitions=partitions)


def topic_settings(bootstrap_servers: str, *topics: str) -> list[dict[str, str]]:
    """Return the settings of topics, in their order."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    futures = admin.describe_configs([ConfigResource("topic", topic) for topic in topics])
    found = {resource.name: future.result(10) for resource, future in futures.items()}
    return [{key: str(entry.value) for key, entry in found[topic].items()} for topic in topics]
