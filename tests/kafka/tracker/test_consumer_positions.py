"""
Committed offsets of a queue's consumers that the broker has deleted: the tracker restores them.

Most tests delete the group, which has the same effect as expiry without a minute of waiting; the slow test has real
expiry.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.config import Settings, load_settings
from kmq_spark.inspection.facts import TopicFacts
from kmq_spark.inspection.inspector import QueueInspector
from kmq_spark.kafka.settings import reader_config
from kmq_spark.kafka.topics import create_queue
from kmq_spark.tracker.once import track_once
from tests.brokers import quick_broker
from tests.kafka.conftest import Queue, consumer_of, receive_all, wait_until
from tests.kafka.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.kafka

FORGETFUL = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "1000"}
EXPIRED_S = 80.0


def settings_of(queue: Queue) -> Settings:
    """Return the settings of a tracker of this queue."""
    return load_settings(None, {"kafka": {"bootstrap_servers": queue.bootstrap_servers}})


def finish(queue: Queue, count: int, /, **options: object) -> None:
    """Receive and acknowledge messages, and leave the group."""
    with consumer_of(queue, **options) as consumer:
        for message in receive_all(consumer, count):
            message.ack()


def leftover(queue: Queue, /, **options: object) -> list[bytes | None]:
    """Return what a consumer that comes now receives within some seconds."""
    with consumer_of(queue, **options) as consumer:
        return [message.value for _ in range(5) for message in consumer.receive(100, timeout=1.0)]


def delete_group(queue: Queue, suffix: str = "") -> None:
    """Delete a consumer group, and with it its offsets."""
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    group = f"kmq.{queue.name}{suffix}"
    admin.delete_consumer_groups([group])[group].result(10)


def commit(queue: Queue, offset: int) -> None:
    """Commit an offset for the consumer group from outside, as kafka-consumer-groups.sh does."""
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    wanted = ConsumerGroupTopicPartitions(f"kmq.{queue.name}", [TopicPartition(queue.name, 0, offset)])
    (future,) = admin.alter_consumer_group_offsets([wanted]).values()
    assert [place.error for place in future.result(10).topic_partitions] == [None]


def test_lost_positions_are_restored_by_the_next_tracker(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """The queue's own group and those of logical queues, from the copy in the metadata of the tracker's commits."""
    queue.send(*"abc")
    queue.send("vip", queue="vip")
    finish(queue, 3)
    finish(queue, 1, queue="vip")
    before = queue.committed(), queue.committed(f"kmq.{queue.name}.queue-vip")
    track_once(queue.name, settings_of(queue))
    for suffix in ("", ".queue-vip"):
        delete_group(queue, suffix)
    queue.send("new")
    track_once(queue.name, settings_of(queue))
    assert (queue.committed(), queue.committed(f"kmq.{queue.name}.queue-vip")) == before
    assert "committed them again" in caplog.text
    assert leftover(queue) == [b"new"]
    assert leftover(queue, queue="vip") == []


def test_positions_that_an_operator_set_back_stay(queue: Queue) -> None:
    queue.send(*"abc")
    finish(queue, 3)
    track_once(queue.name, settings_of(queue))
    commit(queue, 1)
    track_once(queue.name, settings_of(queue))
    assert queue.committed() == {0: 1}
    delete_group(queue)
    track_once(queue.name, settings_of(queue))
    assert queue.committed() == {0: 1}


def test_positions_of_a_deleted_topic_are_not_restored(queue: Queue) -> None:
    """The messages of the new topic have smaller offsets."""
    queue.send(*"abc")
    finish(queue, 3)
    track_once(queue.name, settings_of(queue))
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    admin.delete_topics([queue.name])[queue.name].result(10)
    assert wait_until(lambda: queue.name not in admin.list_topics(timeout=10).topics)
    create_queue(queue.name, bootstrap_servers=queue.bootstrap_servers, partitions=1)
    assert wait_until(lambda: not queue.committed())
    queue.send(*"defg")
    track_once(queue.name, settings_of(queue))
    assert queue.committed() == {}
    assert leftover(queue) == [b"d", b"e", b"f", b"g"]


def test_live_group_is_left_alone(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """Its members may have started at the earliest message already; their commits are kept."""
    queue.send(*"abc")
    finish(queue, 3)
    track_once(queue.name, settings_of(queue))
    delete_group(queue)
    client = Consumer({**reader_config(queue.bootstrap_servers, f"kmq.{queue.name}"), "auto.offset.reset": "latest"})
    client.subscribe([queue.name])
    assert wait_until(lambda: client.poll(0.1) is None and bool(client.assignment()))
    with caplog.at_level(logging.INFO):
        track_once(queue.name, settings_of(queue))
    client.close()
    assert "did not restore" in caplog.text
    assert queue.committed() == {}


def test_positions_below_which_everything_was_removed_are_dropped(queue: Queue) -> None:
    """No message below them can be delivered again, so that offsets of unused groups are not kept indefinitely."""
    queue.send(*"abc")
    finish(queue, 3)
    track_once(queue.name, settings_of(queue))
    delete_group(queue)
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(queue.name, 0, -1)]).values():
        future.result(10)
    track_once(queue.name, settings_of(queue))
    assert queue.committed() == {}
    assert kept(queue) == {}


def kept(queue: Queue) -> dict[str, int]:
    """Return what the tracker's last commit keeps of the consumers' positions."""
    client = Consumer(reader_config(queue.bootstrap_servers, f"kmq.{queue.name}.tracker"))
    (place,) = client.committed([TopicPartition(f"{queue.name}.markers", 0)], timeout=10)
    client.close()
    found: dict[str, int] = json.loads(place.metadata or "{}")["consumers"]
    return found


def test_doctor_sees_that_positions_are_kept(queue: Queue) -> None:
    queue.send("a")
    finish(queue, 1)
    with QueueInspector(queue.name, bootstrap_servers=queue.bootstrap_servers) as inspector:
        markers = TopicFacts(f"{queue.name}.markers", 1, first={0: 0}, end={0: 0})
        assert inspector.tracker(markers).keeps_offsets is None
        track_once(queue.name, settings_of(queue))
        assert inspector.tracker(markers).keeps_offsets is True
    assert kept(queue) == {"": 1}


NO_OFFSETS = "no_committed_offsets"


def lines(caplog: pytest.LogCaptureFixture, action: str) -> list[tuple[str, str]]:
    """Return level and text of the lines of an action."""
    return [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if getattr(record, "action", "") == action
    ]  # fmt: skip


def test_first_consumer_of_a_queue_logs_no_warning(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    queue.send(*"abc")
    with caplog.at_level(logging.INFO):
        finish(queue, 3)
        (line,) = lines(caplog, NO_OFFSETS)
        assert line[0] == "INFO"
        assert f"consumer group kmq.{queue.name} has no committed offsets" in line[1]
        assert "it starts at [0] 0 and receives 3 messages" in line[1]
        queue.send("d")
        finish(queue, 1)
    assert len(lines(caplog, NO_OFFSETS)) == 1


def test_consumer_that_may_receive_finished_messages_again_logs_a_warning(
    make_queue: Callable[..., Queue], caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest message is older than the retention of the group's offsets: the group may have finished it before."""
    queue = make_queue(2)
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    set_create_time(admin, queue.name)
    client = Producer({"bootstrap.servers": queue.bootstrap_servers})
    eight_days_ago_ms = int(time.time() * 1000) - 8 * 24 * 3_600_000
    client.produce(queue.name, b"old", partition=1, timestamp=eight_days_ago_ms)
    client.produce(queue.name, b"new", partition=1)
    client.flush(10)
    finish(queue, 2)
    (line,) = lines(caplog, NO_OFFSETS)
    assert line[0] == "WARNING"
    assert "starts at [1] 0 and receives all 2 messages there" in line[1]
    assert "--reset-offsets" in line[1]


def set_create_time(admin: AdminClient, topic: str) -> None:
    """Let producers say when a message was sent."""
    from confluent_kafka.admin import (  # noqa: PLC0415  # only here
        AlterConfigOpType,
        ConfigEntry,
        ConfigResource,
        ResourceType,
    )

    entry = ConfigEntry("message.timestamp.type", "CreateTime", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(10)


@pytest.mark.slow
@pytest.mark.spark
def test_consumers_that_were_away_for_too_long_receive_no_finished_message_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Both group protocols, with a running tracker, on a broker that keeps offsets for a minute."""
    with quick_broker(extra=FORGETFUL) as broker:
        stage = Stage(spark, broker.bootstrap_servers, tmp_path, "away")
        queue = Queue("away", broker.bootstrap_servers)
        with stage.tracking():
            queue.send(*"abcdef")
            finish(queue, 6)
            queue.send("vip", queue="vip")
            finish(queue, 1, queue="vip", group_protocol="consumer")
            time.sleep(EXPIRED_S)
            queue.send("new")
            assert leftover(queue) == [b"new"]
            assert leftover(queue, queue="vip", group_protocol="consumer") == []
