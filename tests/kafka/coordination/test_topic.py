"""The coordination topic on a real broker: made, checked and refused, and one that changes under its members."""

from __future__ import annotations

import time

import pytest
from confluent_kafka.admin import (
    AdminClient,
    NewTopic,
)

from kmq_spark.coordination import Coordinator, channel, create_coordination_topic
from kmq_spark.errors import TopicError
from tests.kafka.conftest import add_partitions, set_topic, wait_until
from tests.kafka.coordination.conftest import T, held

pytestmark = pytest.mark.kafka


def test_topic_that_is_there_is_checked_and_left_alone(bootstrap_servers: str, topic: str) -> None:
    """A second creation changes nothing."""
    create_coordination_topic(bootstrap_servers, topic=topic, partitions=7)
    found = AdminClient({"bootstrap.servers": bootstrap_servers}).list_topics(topic, timeout=10)
    assert len(found.topics[topic].partitions) == 2


def test_topic_with_the_clocks_of_hosts_is_refused(bootstrap_servers: str) -> None:
    """CreateTime: a host's clock would decide who is stale. The error names the repair."""
    name = f"coordination-{time.time_ns()}"
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    (made,) = admin.create_topics([NewTopic(name, 1, 1, config={"message.timestamp.type": "CreateTime"})]).values()
    made.result()
    with pytest.raises(
        TopicError, match=r"has message.timestamp.type=CreateTime, must be LogAppendTime; run `kafka-con"
    ):
        Coordinator("g", bootstrap_servers=bootstrap_servers, topic=name).join()


def test_topic_that_does_not_exist_is_refused(bootstrap_servers: str) -> None:
    """It is not made by accident."""
    with pytest.raises(TopicError, match="coordination topic 'no-such-topic' does not exist"):
        Coordinator("g", bootstrap_servers=bootstrap_servers, topic="no-such-topic").join()


def test_members_stop_when_the_topic_grows(bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New members would look for the group in another partition: two worlds, two holders."""
    monkeypatch.setattr(channel, "_CHECK_EVERY_S", 0.2)
    name = f"coordination-{time.time_ns()}"
    create_coordination_topic(bootstrap_servers, topic=name, partitions=1, replication_factor=1)
    with Coordinator("g", bootstrap_servers=bootstrap_servers, topic=name, heartbeat=T / 1000) as member:
        claim = held(member.claim("r"))
        add_partitions(bootstrap_servers, 2, name)
        assert wait_until(lambda: member.failure is not None)
        with pytest.raises(TopicError, match="has another number of partitions: got 2, it had 1; stop all members"):
            member.claim("s")
        assert not claim.is_held


def test_members_stop_when_the_topic_takes_the_clocks_of_hosts(bootstrap_servers: str) -> None:
    """At the first record with a host's time: it must not decide who is stale."""
    name = f"coordination-{time.time_ns()}"
    create_coordination_topic(bootstrap_servers, topic=name, partitions=1, replication_factor=1)
    with Coordinator("g", bootstrap_servers=bootstrap_servers, topic=name, heartbeat=T / 1000) as member:
        claim = held(member.claim("r"))
        set_topic(bootstrap_servers, name, "message.timestamp.type", "CreateTime")
        assert wait_until(lambda: member.failure is not None)
        with pytest.raises(TopicError, match=r"message.timestamp.type=CreateTime at offset \d+, must be LogAppendTime"):
            member.claim("s")
        assert not claim.is_held
