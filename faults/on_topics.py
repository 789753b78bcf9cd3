"""Faults of the topics' settings: retention that passes messages in flight, messages that became too large."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from faults.stage import BROKER_SETTINGS
from faults.topics import read_dump
from kmq_spark.errors import KmqError
from kmq_spark.kafka.settings import admin_config
from kmq_spark.producer.producer import QueueProducer

if TYPE_CHECKING:
    from faults.campaign import Campaign
    from faults.stage import Stage

QUICK_RETENTION = {
    **BROKER_SETTINGS,
    # Kafka looks every five minutes otherwise, and for the first time after half a minute.
    "log.retention.check.interval.ms": "500",
    "log.initial.task.delay.ms": "500",
}
RETENTION_MS, WEEK_MS = 1_000, 604_800_000
HOLD_TIMEOUT_S, REMOVED_TIMEOUT_S = 30.0, 30.0

LARGE_BYTES = 950_000
"""Of a message that is sent while the topic takes a MiB."""

REFUSED_BYTES = 900_000
ROOMY_BYTES = 4_000_000
"""`max.message.bytes` below what is in flight, and above everything."""

AT_ONCE_S = 10.0
"""A producer waits two minutes for the broker."""

LETTERS_TIMEOUT_S = 60.0
"""For the dead letters of leases that end after eight seconds."""


def retention_passed(campaign: Campaign) -> Stage:
    """F12: `retention.ms` removes records of the queue topic while their messages are in flight."""
    # The lease outlasts the removal: a copy that retention took, too, would be a message that is lost.
    broker = campaign.new_broker(QUICK_RETENTION)
    stage = campaign.stage(
        "f12-retention", broker, mode="receive", keep_alive=False, forgotten=1.0, max_in_flight=500, lease_ms=20_000
    )
    topic = stage.layout.topics.queue_topic
    with stage.tracking():
        for number in range(campaign.scaled(3, least=1)):
            stage.send(rate=0, count=200).join()
            holder = stage.worker(f"holder-{number}")
            holder.wait_working(200, HOLD_TIMEOUT_S * stage.patience)
            holder.kill()
            stage.remember()
            set_topic(stage, topic, "retention.ms", RETENTION_MS)
            if not _wait_empty(stage, topic):
                stage.fail(f"retention did not empty {topic} in time")
            set_topic(stage, topic, "retention.ms", WEEK_MS)
            stage.injected("retention of the queue topic")
            time.sleep(2)
        stage.drain()
    return stage


def _wait_empty(stage: Stage, topic: str) -> bool:
    """Wait until the first offset of each partition is its end; return whether it is."""
    consumer = Consumer({"bootstrap.servers": stage.bootstrap_servers, "group.id": f"{topic}.watermarks"})
    give_up_s = time.monotonic() + REMOVED_TIMEOUT_S * stage.patience
    try:
        while time.monotonic() < give_up_s:
            places = [TopicPartition(topic, partition) for partition in range(stage.layout.partition_count)]
            if all(first == end for first, end in map(consumer.get_watermark_offsets, places)):
                return True
            time.sleep(0.2)
        return False
    finally:
        consumer.close()


def set_topic(stage: Stage, topic: str, name: str, value: int) -> None:
    """Change a setting of a topic."""
    entry = ConfigEntry(name, str(value), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    # The client must live until it has answered.
    admin = AdminClient(admin_config(stage.bootstrap_servers))
    for future in admin.incremental_alter_configs([resource]).values():
        future.result()


def grown_too_large(campaign: Campaign) -> Stage:
    """F15: messages that are too large to send, then to redeliver, then for the dead-letter topic too."""
    stage = campaign.stage("f15", mode="receive", keep_alive=False, forgotten=1.0, lease_ms=8_000)
    topics, count = stage.layout.topics, campaign.scaled(30, least=4)
    with stage.tracking() as tracker:
        for number, limited in enumerate(((topics.queue_topic,), (topics.queue_topic, topics.dead_letter_topic))):
            _must_refuse_at_once(stage)
            stage.send(rate=0, count=count, least_bytes=LARGE_BYTES).join()
            holder = stage.worker(f"holder-{number}")
            holder.wait_working(count, HOLD_TIMEOUT_S * stage.patience)
            holder.kill()
            for topic in limited:
                set_topic(stage, topic, "max.message.bytes", REFUSED_BYTES)
            stage.injected("max.message.bytes below messages in flight", topics=limited)
            # Only then: a limit that is raised before the redelivery refuses nothing.
            if not _wait_letters(stage, (number + 1) * count):
                stage.fail("F15: messages that are too large to redeliver are no dead letters in time")
            for topic in limited:
                set_topic(stage, topic, "max.message.bytes", ROOMY_BYTES)
        stage.drain()
        if tracker.stats.restarts:
            stage.fail(f"F15: the query was restarted {tracker.stats.restarts} times")
    letters = read_dump(stage.queue, stage.bootstrap_servers).dead_letters
    emptied = sum(letter.value is None for letter in letters)
    if (len(letters), emptied) != (2 * count, count):
        stage.fail(
            f"F15: {len(letters)} dead letters, {emptied} of them without payload, expected {2 * count}, {count}"
        )
    return stage


def _wait_letters(stage: Stage, count: int) -> bool:
    """Wait until the dead-letter topic has *count* records; return whether it does."""
    give_up_s = time.monotonic() + LETTERS_TIMEOUT_S * stage.patience
    while time.monotonic() < give_up_s:
        if len(read_dump(stage.queue, stage.bootstrap_servers).dead_letters) >= count:
            return True
        time.sleep(0.5)
    return False


def _must_refuse_at_once(stage: Stage) -> None:
    """A message that no topic of the queue takes is an error of `send`, at once."""
    began_s = time.monotonic()
    try:
        with QueueProducer(stage.queue, bootstrap_servers=stage.bootstrap_servers) as producer:
            began_s = time.monotonic()
            producer.send(bytes(2 * LARGE_BYTES))
    except KmqError:
        if (took_s := time.monotonic() - began_s) > AT_ONCE_S * stage.patience:
            stage.fail(f"F15: a message of two MiB was refused after {took_s:.1f} s")
    else:
        stage.fail("F15: a message of two MiB was sent")
    stage.injected("too large to send")
