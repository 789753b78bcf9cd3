"""Faults of the topics' settings: retention that passes messages in flight."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from faults.stage import BROKER_SETTINGS
from kmq_spark.kafka.settings import admin_config
from kmq_spark.local.broker import EmbeddedBroker

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


def retention_passed(campaign: Campaign) -> Stage:
    """F12: `retention.ms` removes records of the queue topic while their messages are in flight."""
    # The lease outlasts the removal: a copy that retention took, too, would be a message that is lost.
    broker = EmbeddedBroker(extra=QUICK_RETENTION).start()
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
