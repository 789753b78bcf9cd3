"""Faults of the broker and of the log: killed, paused, in mid-transaction, records removed, partitions added."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from faults.clocks import MovableClock, is_available
from faults.events import read_events
from faults.load import write_record
from faults.on_consumers import FEW, HOUR_MS, STALL_MS
from faults.stage import BROKER_SETTINGS
from kmq_spark.failpoints import EXIT_CODE
from kmq_spark.kafka.settings import admin_config

if TYPE_CHECKING:
    from faults.campaign import Campaign
    from faults.stage import Stage

TRANSACTION_S = 10.0
"""After which the broker gives up a tracker's transaction: `[tracker] transaction_timeout_ms`."""

BROKER_STALL_MS = 20_000
"""I9: after the broker's return, messages of a partition do not wait longer than this without any being taken."""

RETENTION_S = 60.0
"""`offsets.retention.minutes=1`, its smallest value."""

REPLAY_LOGGED = re.compile("expired|no committed (offset|position)|again", re.IGNORECASE)
"""What the log of a consumer must say where it hands out finished messages again."""

CLEAN_STOP_EACH = 3
"""One stop in this many is a clean one; the others are kills."""


def killed(campaign: Campaign) -> Stage:
    """F3: the broker killed, and stopped cleanly, under load."""
    stage = campaign.stage("f3")
    stage.judge(stall_ms=BROKER_STALL_MS)
    with stage.tracking():
        stage.send(rate=campaign.rate(150))
        for number in range(2):
            stage.worker(f"crew-{number}").wait_working()
        for number in range(campaign.scaled(6, least=1)):
            time.sleep(3 + number * 0.37)
            is_clean = number % CLEAN_STOP_EACH == CLEAN_STOP_EACH - 1
            with stage.away():
                (campaign.broker.stop if is_clean else campaign.broker.kill)()
                began_s = time.monotonic()
                campaign.broker.start()
            stage.injected("clean stop" if is_clean else "kill -9", back_s=time.monotonic() - began_s)
        stage.drain()
    return stage


def paused(campaign: Campaign) -> Stage:
    """F4: SIGSTOP of the broker, for longer than a lease and than a transaction may take."""
    stage = campaign.stage("f4-broker")
    stage.judge(stall_ms=BROKER_STALL_MS)
    with stage.tracking():
        stage.send(rate=campaign.rate(150))
        for number in range(2):
            stage.worker(f"crew-{number}", max_in_flight=FEW).wait_working()
        for seconds in campaign.picked((TRANSACTION_S + 5.0, 1.0, 3.0, 6.0, 2.0), 5, least=1):
            time.sleep(2)
            with stage.away():
                campaign.broker.pause()
                time.sleep(seconds)
                campaign.broker.resume()
            stage.injected("SIGSTOP", seconds=seconds)
        stage.send(rate=campaign.rate(150))
        # The survivors must go on by themselves, before anything else happens to them.
        time.sleep(BROKER_STALL_MS / 1000)
        stage.drain()
    return stage


def killed_in_a_transaction(campaign: Campaign) -> Stage:
    """F11: tracker and broker killed together, with a transaction open and with one just committed."""
    stage = campaign.stage("f11", mode="receive", forgotten=0.3, keep_alive=False, max_in_flight=400, work_ms=300)
    stage.send(rate=campaign.rate(60))
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
        stage.send(rate=campaign.rate(150))
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
            stage.send(rate=campaign.rate(50))
            stage.worker(f"new-{count}").wait_working()
            time.sleep(3)
        stage.drain()
    return stage


def clock_stepped(campaign: Campaign) -> Stage | None:
    """F25: the clock of the broker a minute and an hour back, an hour ahead, and right again each time, under load."""
    if not is_available():
        return None
    clock = MovableClock(campaign.folder)
    broker = campaign.new_broker(BROKER_SETTINGS, clock.environment())
    stage = campaign.stage("f25", broker, clock=clock, poison=0.0, max_deliveries=5)
    stage.judge(stall_ms=STALL_MS, letters_need_a_cause=True)
    with stage.tracking():
        stage.send(rate=campaign.rate(150))
        for number in range(2):
            stage.worker(f"crew-{number}", raised=0.1).wait_working()
        for ahead_ms in campaign.picked((-60_000, -HOUR_MS, HOUR_MS, -60_000, -HOUR_MS, HOUR_MS), 6, least=3):
            for moved_ms in (ahead_ms, 0):
                time.sleep(5)
                clock.move(moved_ms)
                stage.injected("clock of the broker", ahead_ms=moved_ms)
        time.sleep(8)
        stage.drain()
    return stage


def offsets_expired(campaign: Campaign) -> list[Stage]:
    """F27: the broker forgets the offsets of groups: everything was off for too long; a tracker idled for too long."""
    extra = {**BROKER_SETTINGS, "offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "1000"}
    broker = campaign.new_broker(extra)
    idle = campaign.stage("f27-idle", broker, mode="receive", keep_alive=False, max_deliveries=0)
    off = campaign.stage("f27-off", broker, mode="receive", keep_alive=False, max_deliveries=0, forgotten=0.1)
    off.keeps_broker()
    for stage in (idle, off):
        # Longer than the retention: what is forgotten falls due behind the expiry.
        stage.profile = replace(stage.profile, lease_ms=round(1000 * (RETENTION_S + 20)))
    trackers = {stage: stage.tracker() for stage in (idle, off)}
    workers = {stage: stage.worker("before") for stage in (idle, off)}
    for stage in (idle, off):
        stage.must_get_ready(trackers[stage])
        stage.send(rate=0, count=500).join()
        workers[stage].wait_working(500)
    time.sleep(3)
    workers[idle].stop()
    # What it has forgotten stays in flight: a clean stop would give it back.
    workers[off].kill()
    trackers[off].stop()
    # What comes meanwhile is not to be lost either.
    off.send(rate=0, count=100).join()
    time.sleep(RETENTION_S + 10)
    trackers[idle].kill()
    for stage in (idle, off):
        stage.injected("offsets expired")
        stage.send(rate=0, count=100).join()
        tracker = stage.tracker()
        stage.worker("after", forgotten=0.0)
        stage.must_get_ready(tracker)
    for stage in (idle, off):
        stage.drain(timeout_s=RETENTION_S + 60)
        _must_not_replay(stage, unless_said=stage is off)
    return [idle, off]


def _must_not_replay(stage: Stage, *, unless_said: bool) -> None:
    """
    I15: what was acked before is not handed out again.

    Args:
        stage: After its drain.
        unless_said: Whether a replay is allowed if the worker's log reports it: no tracker kept the offsets.
    """
    acked: set[tuple[int, ...]] = set()
    replayed = 0
    for event in sorted(read_events(stage.folder), key=lambda event: event["monotonic"]):
        place = tuple(event.get("copy", ()))
        replayed += event["event"] == "delivered" and place in acked
        if event["event"] == "handled":
            acked.add(place)
    said = [
        log.name for log in stage.folder.glob("after*.log") if REPLAY_LOGGED.search(log.read_text(errors="replace"))
    ]
    stage.notes.append(f"{replayed} messages handed out again after the expiry, {'said' if said else 'not said'}")
    if replayed and not unless_said:
        stage.fail(f"I15: {replayed} finished messages were handed out again under a tracker that ran")
    elif replayed and not said:
        stage.fail(f"I15: {replayed} finished messages were handed out again, and no log reports it")
