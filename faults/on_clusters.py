"""Faults of three brokers under a queue: leaders killed, and suspended until others lead in their place."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from faults.campaign import BROKER_SETTINGS
from faults.on_trackers import BUSY, PASS_TIMEOUT_S, must_end_fenced
from faults.stage import WAYS, Stage
from faults.three_brokers import ThreeBrokers
from kmq_spark.kafka.queue_topics import QueueTopics

if TYPE_CHECKING:
    from faults.campaign import Campaign
    from faults.processes import Tracker
    from kmq_spark.local.broker import EmbeddedBroker

STALL_MS = 20_000
"""I9: an election takes three seconds, in which clients of the dead leader wait too."""

RATE = 60
"""Messages a second."""

DEPOSED_AFTER_S, LONGEST_S = 9.0, 14.0
"""How long a leader is suspended: another one leads after three seconds, and its own clients still wait for it."""

COMMIT_POINTS = ("tracker.before-commit", "tracker.end-sent", "tracker.message-sent")
COMMIT_S = 0.05
"""About what a commit takes."""


class ClusterStage(Stage):
    """A queue on three brokers of its own, whose workers forget much, and one of which acks in transactions."""

    def __init__(self, campaign: Campaign, name: str) -> None:
        self.cluster = ThreeBrokers(BROKER_SETTINGS, campaign.broker_environment)
        self.broker_count = len(self.cluster.brokers)
        super().__init__(campaign, name, broker=self.cluster, **BUSY)
        self.judge(stall_ms=STALL_MS)
        self.send(rate=campaign.rate(RATE))
        self.worker("busy")
        self.worker("transacts", **WAYS["transaction"])

    def leader(self, partition: int) -> EmbeddedBroker:
        """Return the broker that leads a markers partition, when no other one is behind."""
        self.cluster.wait_in_sync()
        return self.cluster.leading(f"{self.queue}.markers", partition % self.partitions)

    def kill(self, leader: EmbeddedBroker, topic: str, partition: int) -> None:
        """Kill the leader of a partition, and start it again when another one leads."""
        leader.kill()
        self.cluster.wait_deposed(leader, topic, partition)
        self.injected("kill -9 of a leader", topic=topic, partition=partition)
        time.sleep(self.random.uniform(0.0, 3.0))
        leader.start()


def killed(campaign: Campaign) -> Stage:
    """K1: the leader of a markers partition killed under load, back when another one leads."""
    stage = ClusterStage(campaign, "k1")
    stage.tracked()
    for number in range(campaign.times(40)):
        time.sleep(stage.random.uniform(1.0, 3.0))
        partition = number % stage.partitions
        with stage.away():
            stage.kill(stage.leader(partition), f"{stage.queue}.markers", partition)
    stage.drain()
    return stage


def suspended(campaign: Campaign) -> Stage:
    """K2: the leader of a markers partition suspended for 9 to 14 s while a tracker opens, and woken when deposed."""
    stage = ClusterStage(campaign, "k2")
    older = stage.tracked(checkpoint="checkpoint-0")
    points = ("tracker.fenced-older", "tracker.positions-read", "tracker.term-begun", "tracker.opening")
    for number in range(campaign.times(30)):
        point, partition = points[number % len(points)], number % stage.partitions
        newer = stage.tracker(f"checkpoint-{number + 1}", failpoint=f"{point}:1:stop")
        if not newer.suspended(PASS_TIMEOUT_S * stage.patience):
            stage.fail(f"crash point {point} suspended no process: {newer.last_words()}")
            break
        leader = stage.leader(partition)
        with stage.away():
            # The tracker knows this leader, and asks it while it is suspended.
            leader.pause()
            newer.resume()
            seconds = stage.random.uniform(DEPOSED_AFTER_S, LONGEST_S)
            time.sleep(seconds)
            if stage.cluster.leading(f"{stage.queue}.markers", partition) is leader:
                stage.fail(f"no other broker led partition {partition} after {seconds:.1f} s")
            leader.resume()
            stage.injected("SIGSTOP of a leader", point=point, partition=partition, seconds=seconds)
            older = _taken_over(stage, older, newer, f"checkpoint-{number + 1}-again")
    stage.drain()
    return stage


def _taken_over(stage: Stage, older: Tracker, newer: Tracker, again: str) -> Tracker:
    if newer.wait_ready() < 0:
        stage.notes.append(f"the tracker that opened ended: {newer.last_words()}")
        newer = stage.tracked(checkpoint=again)
    must_end_fenced(stage, older)
    return newer


def killed_in_a_commit(campaign: Campaign) -> Stage:
    """K3: the leader of the transaction state of a tracker killed while the tracker commits."""
    stage = ClusterStage(campaign, "k3")
    topic, partition = "__transaction_state", _state_partition(QueueTopics(stage.queue).tracker_group)
    for number in range(campaign.times(40)):
        point = COMMIT_POINTS[number % len(COMMIT_POINTS)]
        tracker = stage.tracker(failpoint=f"{point}:{stage.random.randint(1, 4)}:stop")
        if not tracker.suspended(PASS_TIMEOUT_S * stage.patience):
            stage.notes.append(f"{point} was not passed in time")
            tracker.kill()
            continue
        stage.cluster.wait_in_sync()
        leader = stage.cluster.leading(topic, partition)
        with stage.away():
            tracker.resume()
            time.sleep(stage.random.uniform(0.0, COMMIT_S))
            stage.kill(leader, topic, partition)
        if tracker.wait_ready() < 0:
            stage.fail(f"I9: the tracker ended: {tracker.last_words()}")
        tracker.stop()
    stage.tracked()
    stage.drain()
    return stage


def _state_partition(transactional_id: str) -> int:
    """Return in which partition Kafka keeps the state of a transactional id: Java's hash of the string."""
    found = 0
    for character in transactional_id:
        found = (31 * found + ord(character)) & 0xFFFF_FFFF
    return (found & 0x7FFF_FFFF) % 4  # transaction.state.log.num.partitions of embedded brokers
