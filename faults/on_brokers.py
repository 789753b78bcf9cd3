"""Faults of the broker and of the log: killed, paused, in mid-transaction, records removed, partitions added."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from faults.load import write_record
from kmq_spark.failpoints import EXIT_CODE
from kmq_spark.kafka.settings import admin_config

if TYPE_CHECKING:
    from faults.campaign import Campaign
    from faults.stage import Stage

CLEAN_STOP_EACH = 3
"""One in so many is asked to stop, the others are killed."""


def killed(campaign: Campaign) -> Stage:
    """F3: the broker killed, and stopped cleanly, under load."""
    stage = campaign.stage("f3")
    with stage.tracking():
        stage.send(rate=150)
        for number in range(2):
            stage.worker(f"crew-{number}").wait_working()
        for number in range(campaign.scaled(6, least=1)):
            time.sleep(3 + number * 0.37)
            is_clean = number % CLEAN_STOP_EACH == CLEAN_STOP_EACH - 1
            (campaign.broker.stop if is_clean else campaign.broker.kill)()
            began_s = time.monotonic()
            campaign.broker.start()
            stage.injected("clean stop" if is_clean else "kill -9", back_s=time.monotonic() - began_s)
        stage.drain()
    return stage


def paused(campaign: Campaign) -> Stage:
    """F4: SIGSTOP of the broker, for longer than a lease."""
    stage = campaign.stage("f4-broker")
    with stage.tracking():
        stage.send(rate=150)
        for number in range(2):
            stage.worker(f"crew-{number}").wait_working()
        for seconds in campaign.picked((1.0, 3.0, 6.0, 2.0, 10.0), 5, least=1):
            time.sleep(2)
            campaign.broker.pause()
            time.sleep(seconds)
            campaign.broker.resume()
            stage.injected("SIGSTOP", seconds=seconds)
        stage.drain()
    return stage


def killed_in_a_transaction(campaign: Campaign) -> Stage:
    """F11: tracker and broker killed together, with a transaction open and with one just committed."""
    stage = campaign.stage("f11", mode="receive", forgotten=0.3, keep_alive=False, max_in_flight=400, work_ms=300)
    stage.send(rate=60)
    stage.worker("busy")
    points = ("tracker.before-commit:3", "tracker.end-sent:2", "tracker.committed:3")
    for point in campaign.picked(points, 3, least=1):
        tracker = stage.tracker(failpoint=point)
        if tracker.wait(60) != EXIT_CODE:
            stage.notes.append(f"{point} was not passed in 60 s")
            tracker.kill()
        campaign.broker.kill()
        campaign.broker.start()
        stage.injected("kill -9 of tracker and broker", point=point)
    stage.recovery_s.append(stage.tracker().wait_ready())
    stage.drain()
    return stage


def payloads_removed(campaign: Campaign) -> Stage:
    """F12: records of the queue topic removed while their messages are in flight."""
    stage = campaign.stage("f12", mode="receive", keep_alive=False, forgotten=1.0, max_in_flight=500, lease_ms=3_000)
    with stage.tracking():
        for number in range(campaign.scaled(3, least=1)):
            stage.send(rate=0, count=200).join()
            holder = stage.worker(f"holder-{number}")
            holder.wait_working(200)
            holder.kill()
            stage.remember()
            remove_records(stage, stage.layout.topics.queue_topic)
            stage.injected("delete-records of the queue topic")
            time.sleep(4)
        stage.drain()
    return stage


def remove_records(stage: Stage, topic: str) -> None:
    """Remove everything that a topic holds now."""
    admin = AdminClient(admin_config(stage.bootstrap_servers))
    every = [TopicPartition(topic, partition, -1) for partition in range(stage.layout.partition_count)]
    for future in admin.delete_records(every).values():
        future.result()


def grown(campaign: Campaign) -> Stage:
    """F13: partitions added to queue and markers topic under load, unreadable records in the new ones."""
    stage = campaign.stage("f13", partitions=2)
    admin = AdminClient(admin_config(stage.bootstrap_servers))
    topics = stage.layout.topics
    with stage.tracking():
        stage.send(rate=150)
        for number in range(2):
            stage.worker(f"crew-{number}").wait_working()
        for count in campaign.picked((4, 6), 2, least=1):
            # Markers first: a message of a partition that has no markers partition cannot be started.
            for topic in (topics.markers_topic, topics.queue_topic):
                for future in admin.create_partitions([NewPartitions(topic, count)]).values():
                    future.result()
                stage.injected("partitions added", topic=topic, count=count)
                time.sleep(2)
            write_record(stage, b"\xff no marker", count - 1)
            # A second producer and a second crew see the new partitions at once; the first ones when they look again.
            stage.send(rate=50)
            stage.worker(f"new-{count}").wait_working()
            time.sleep(3)
        stage.drain()
    return stage
