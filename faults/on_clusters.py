"""Faults of three brokers under a queue: leaders killed, moved and suspended, replicas lost and slow."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from faults.campaign import BROKER_SETTINGS
from faults.clocks import LeadersClock, is_available
from faults.on_brokers import CUT_S, REJOIN_S, SHORT_CUT_S, set_topic
from faults.on_fleets import pair
from faults.on_letters import LIMIT, REDRIVE_POINTS, REJECTS, TIMEOUT_S, all_back, all_rejected, redrive
from faults.on_producers import PARTITIONS, CopyStage
from faults.on_sinks import END_TIMEOUT_S, SPARK_TIMEOUT_S, SinkStage
from faults.on_trackers import BUSY, PASS_TIMEOUT_S, fill, has_small_disk, must_end_fenced
from faults.stage import WAYS, Judged, Stage
from faults.three_brokers import ProxiedBrokers, ThreeBrokers
from kmq_spark.kafka.queue_topics import QueueTopics

if TYPE_CHECKING:
    from collections.abc import Callable

    from faults.campaign import Campaign
    from faults.processes import Tracker
    from kmq_spark.local.broker import EmbeddedBroker

STALL_MS = 20_000
"""I9: an election takes three seconds, in which clients of the dead leader wait too."""

RATE = 60
"""Messages a second."""

DEPOSED_AFTER_S, LONGEST_S = 9.0, 14.0
"""How long a leader is suspended: another one leads after three seconds, and its own clients still wait for it."""

DELIVERY_S = 5.0
"""After a refusal, clients try again less and less often."""

AHEAD_MS = (0, 5_000, 60_000)
"""How far the clock of each broker is ahead."""

COMMIT_POINTS = ("tracker.before-commit", "tracker.end-sent", "tracker.message-sent")
COMMIT_S = 0.05
"""About what a commit takes."""

SINK_ROWS = 100_000
"""Ten batches: the query must still write when the last leader dies."""

DISK_MIB, HALT_S = 64, 60.0
"""A broker halts at its next write."""


class ClusterStage(Stage):
    """A queue on three brokers of its own, whose workers forget much, and one of which acks in transactions."""

    def __init__(
        self,
        campaign: Campaign,
        name: str,
        cluster: ThreeBrokers | None = None,
        clock: LeadersClock | None = None,
        **options: Any,
    ) -> None:
        self.cluster = cluster or ThreeBrokers(BROKER_SETTINGS, campaign.broker_environment)
        self.broker_count = len(self.cluster.brokers)
        super().__init__(campaign, name, broker=self.cluster, clock=clock, **BUSY, **options)
        self.judge(stall_ms=STALL_MS)
        self.send(rate=campaign.rate(RATE))
        self.worker("busy")
        self.worker("transacts", **WAYS["transaction"])

    def leader(self, partition: int) -> EmbeddedBroker:
        """Return the broker that leads a markers partition, when no other one is behind."""
        self.cluster.wait_in_sync()
        return self.cluster.leading(f"{self.queue}.markers", partition % self.partitions)

    def sleep(self, least_s: float, most_s: float) -> None:
        """Let some time pass."""
        time.sleep(self.random.uniform(least_s, most_s))

    def kill(self, leader: EmbeddedBroker, topic: str, partition: int) -> None:
        """Kill the leader of a partition, and start it again when another one leads."""
        _kill(self, self.cluster, leader, topic, partition)
        self.injected("kill -9 of a leader", topic=topic, partition=partition)


def killed(campaign: Campaign) -> Stage:
    """K1: the leader of a markers partition killed under load, back when another one leads."""
    stage = ClusterStage(campaign, "k1")
    stage.tracked()
    for number in range(campaign.times(40)):
        stage.sleep(1.0, 3.0)
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
        stage.cluster.wait_in_sync()
        with stage.away():
            # The tracker knows this leader, and asks it while it is suspended.
            seconds = _suspended(stage, stage.cluster, f"{stage.queue}.markers", partition, newer.resume)
            stage.injected("SIGSTOP of a leader", point=point, partition=partition, seconds=seconds)
            older = _taken_over(stage, older, newer, f"checkpoint-{number + 1}-again")
    stage.drain()
    return stage


def _suspended(
    stage: Judged, cluster: ThreeBrokers, topic: str, partition: int, then: Callable[[], object] | None = None
) -> float:
    """Suspend the leader of a partition, and wake it when another one leads in its place; return how long it slept."""
    leader, seconds = cluster.leading(topic, partition), stage.random.uniform(DEPOSED_AFTER_S, LONGEST_S)
    leader.pause()
    if then is not None:
        then()
    time.sleep(seconds)
    if cluster.leading(topic, partition) is leader:
        stage.fail(f"no other broker led {topic}[{partition}] after {seconds:.1f} s")
    leader.resume()
    return seconds


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
            stage.sleep(0.0, COMMIT_S)
            stage.kill(leader, topic, partition)
        if tracker.wait_ready() < 0:
            stage.fail(f"I9: the tracker ended: {tracker.last_words()}")
        tracker.stop()
    stage.tracked()
    stage.drain()
    return stage


def restarted(campaign: Campaign) -> Stage:
    """K4: each of three brokers stopped cleanly and started again under load, the next one when it is in sync."""
    stage = ClusterStage(campaign, "k4")
    stage.tracked()
    for number in range(3 * campaign.times(10)):
        stage.cluster.wait_in_sync()
        with stage.away():
            stage.cluster.brokers[number % 3].restart()
        stage.injected("clean stop of a broker", broker=number % 3 + 1)
    stage.drain()
    return stage


def controller_killed(campaign: Campaign) -> Stage:
    """K5: the active controller, which is a broker too, killed under load, back when another one is active."""
    stage = ClusterStage(campaign, "k5")
    stage.tracked()
    for _ in range(campaign.times(30)):
        stage.sleep(1.0, 3.0)
        stage.cluster.wait_in_sync()
        active = stage.cluster.controller()
        with stage.away():
            active.kill()
            stage.cluster.wait_other_controller(active)
            stage.injected("kill -9 of the active controller")
            stage.sleep(0.0, 3.0)
            active.start()
    stage.drain()
    return stage


def elected(campaign: Campaign) -> Stage:
    """K6: leaders moved by stops and kills, and back by an election of the preferred ones every few seconds."""
    stage = ClusterStage(campaign, "k6")
    stage.tracked()
    for number in range(campaign.times(20)):
        leader = stage.leader(number)
        with stage.away(), ThreadPoolExecutor(1) as pool:
            (leader.kill if number % 2 else leader.stop)()
            started = pool.submit(leader.start)
            while not started.done():
                _elect(stage)
        for _ in range(2):
            _elect(stage)
    stage.drain()
    return stage


def _elect(stage: ClusterStage) -> None:
    stage.sleep(1.0, 3.0)
    stage.cluster.elect_preferred()
    stage.injected("election of the preferred leaders")


def coordinator_suspended(campaign: Campaign) -> Stage:
    """K7: the coordinator of the consumers' group suspended for 9 to 14 s under transactions, woken when deposed."""
    stage = ClusterStage(campaign, "k7")
    stage.worker("transacts", **WAYS["transaction"])
    stage.tracked()
    topic, partition = "__consumer_offsets", _state_partition(QueueTopics(stage.queue).consumer_group)
    for _ in range(campaign.times(20)):
        stage.sleep(1.0, 3.0)
        stage.cluster.wait_in_sync()
        with stage.away():
            seconds = _suspended(stage, stage.cluster, topic, partition)
        stage.injected("SIGSTOP of a coordinator", partition=partition, seconds=seconds)
    stage.drain()
    return stage


def producer_suspended(campaign: Campaign) -> CopyStage:
    """K8: the coordinator of a resuming producer's transactions suspended for 9 to 14 s, woken when deposed."""
    cluster, count = ThreeBrokers(BROKER_SETTINGS, campaign.broker_environment), campaign.times(15)
    stage = CopyStage(campaign, "k8-producer", lines=20_000 * count, rate=200, broker=cluster)
    stage.broker_count = len(cluster.brokers)
    stage.on_close(cluster.close)
    copier = stage.copier()
    stage.begun(copier)
    partition = _state_partition(QueueTopics(stage.queue).producer_transactional_id("copier"))
    for _ in range(count):
        copier.wait_for("copied", stage.random.uniform(0.5, 2.0))
        cluster.wait_in_sync()
        _suspended(stage, cluster, "__transaction_state", partition)
        stage.injections += 1
        if not copier.is_running:
            stage.fail(f"S: the copier ended with {copier.exit_code}: {copier.last_words()}")
            break
    copier.end()
    return stage.finish()


def redrive_suspended(campaign: Campaign) -> Stage:
    """K8: the same of a redrive, which goes on from each of its crash points while it is suspended."""
    cluster = ThreeBrokers(BROKER_SETTINGS, campaign.broker_environment)
    stage = Stage(campaign, "k8-redrive", broker=cluster, **REJECTS)
    stage.broker_count = len(cluster.brokers)
    all_rejected(stage)
    partition = _state_partition(QueueTopics(stage.queue).redrive_id)
    for point in REDRIVE_POINTS * campaign.times(3):
        # Before it has a transaction: the broker ends one that is suspended for a minute.
        cluster.wait_in_sync()
        child = redrive(stage, f"{point}:1:stop", "--limit", LIMIT)
        if not child.suspended(TIMEOUT_S * stage.patience):
            stage.fail(f"crash point {point} suspended no redrive: {child.last_words()}")
            break
        with stage.away():
            _suspended(stage, cluster, "__transaction_state", partition, child.resume)
        stage.injected("SIGSTOP of a coordinator", point=point)
        if (code := child.wait(TIMEOUT_S * stage.patience)) != 0:
            # Its documentation says: run it again.
            child.is_ended_by_us = True
            stage.notes.append(f"after {point} the redrive ended with {code}: {child.last_words()}")
    all_back(stage)
    return stage


def replicas_lost(campaign: Campaign) -> Stage:
    """K9: one broker killed where writes need all three, so that they are refused; two killed; and all back."""
    stage = ClusterStage(campaign, "k9")
    stage.tracked()
    topics = stage.queue, f"{stage.queue}.markers"
    for number in range(campaign.times(20, least=2)):
        stage.sleep(1.0, 3.0)
        stage.cluster.wait_in_sync()
        first, second = stage.random.sample(stage.cluster.brokers, 2)
        with stage.away(after_s=DELIVERY_S):
            for topic in topics:
                set_topic(stage, topic, "min.insync.replicas", 2 if number % 2 else 3)
            first.kill()
            if number % 2:
                # Two of three controllers are dead, so no leader is elected: writes wait until they are back.
                second.kill()
            stage.sleep(5.0, 20.0)
            stage.cluster.start()
        stage.injected("kill -9 of replicas", count=1 + number % 2)
    stage.drain()
    return stage


def slow_follower(campaign: Campaign) -> Stage:
    """K10: a broker that leads nothing suspended and woken in short turns, so that it follows slowly."""
    stage = ClusterStage(campaign, "k10")
    stage.tracked()
    slow = stage.random.choice(stage.cluster.brokers)
    slow.restart()
    stage.cluster.wait_in_sync()
    for _ in range(campaign.times(100)):
        _lag(stage, slow)
    stage.drain()
    return stage


def _lag(stage: ClusterStage, follower: EmbeddedBroker) -> None:
    # Writes wait for it, longer than a START may take.
    with stage.away():
        follower.pause()
        stage.sleep(0.5, 2.5)
        follower.resume()
    stage.sleep(0.2, 1.0)
    stage.injected("SIGSTOP of a follower")


def skewed(campaign: Campaign) -> Stage | None:
    """K11: brokers whose clocks differ by 5 s and by 60 s, and leaders that move between them."""
    if not is_available():
        return None
    cluster, clock = ThreeBrokers(BROKER_SETTINGS, campaign.broker_environment, AHEAD_MS), LeadersClock(campaign.folder)
    stage = ClusterStage(campaign, "k11", cluster, clock)
    threading.Thread(target=_note_leaders, args=(stage, clock), daemon=True).start()
    stage.tracked()
    for number in range(3 * campaign.times(5)):
        stage.sleep(3.0, 8.0)
        cluster.wait_in_sync()
        with stage.away():
            cluster.brokers[number % 3].restart()
        stage.sleep(3.0, 8.0)
        cluster.wait_in_sync()
        cluster.elect_preferred()
        stage.injected("leaders moved and back", broker=number % 3 + 1)
    stage.drain()
    return stage


def _note_leaders(stage: ClusterStage, clock: LeadersClock) -> None:
    while stage.cluster.is_running:
        for topic in (stage.queue, f"{stage.queue}.markers"):
            for partition in range(stage.partitions):
                if (leader := stage.cluster.leader(topic, partition)) != -1:
                    clock.leads(topic, partition, AHEAD_MS[leader - 1])
        time.sleep(0.1)


def cut_off(campaign: Campaign) -> Stage:
    """K12: a leader cut off from its clients, and not from other brokers, for 8 to 30 s: it goes on leading."""
    cluster = ProxiedBrokers(BROKER_SETTINGS, campaign.broker_environment)
    stage = ClusterStage(campaign, "k12", cluster)
    stage.tracked()
    for number in range(campaign.times(15)):
        stage.sleep(1.0, 3.0)
        proxy = cluster.proxies[cluster.brokers.index(stage.leader(number))]
        with stage.away(after_s=REJOIN_S):
            proxy.cut()
            stage.sleep(SHORT_CUT_S, CUT_S)
            proxy.heal()
        stage.injected("leader cut off from clients")
    stage.drain()
    return stage


def near_follower(campaign: Campaign) -> Stage:
    """K13: a follower that the tracker and half the workers read from suspended in short turns, and killed at times."""
    # librdkafka 2.16 forgets an assignment of the `consumer` protocol whose answer came too late (docs/consuming.md).
    stage = ClusterStage(campaign, "k13", protocols=["classic"])
    slow = stage.random.choice(stage.cluster.brokers)
    rack = {"client.rack": str(stage.cluster.brokers.index(slow) + 1)}
    for way in ({}, WAYS["transaction"]):
        stage.worker("near", **way, extra=stage.profile.extra | rack)
    stage.tracked(extra=rack)
    for _ in range(campaign.times(15)):
        with stage.away(after_s=REJOIN_S):
            slow.kill()
            stage.sleep(DEPOSED_AFTER_S, LONGEST_S)
            slow.start()
            stage.cluster.wait_in_sync()
        stage.injected("kill -9 of a follower")
        # It led until its first death, and leads nothing now.
        for _ in range(5):
            _lag(stage, slow)
    stage.drain()
    return stage


def full_disk(campaign: Campaign) -> Stage | None:
    """K14: the file system of a broker that leads filled under load until the broker halts, then freed."""
    stage = ClusterStage(campaign, "k14")
    full, disk = stage.random.choice(stage.cluster.brokers), stage.cluster.folder / "disk"
    if not has_small_disk(stage, disk, DISK_MIB):
        return None
    full.stop()
    log = full.data_dir / "log"
    shutil.copytree(log, disk, dirs_exist_ok=True)
    shutil.rmtree(log)
    log.symlink_to(disk)
    full.start()
    stage.tracked()
    for _ in range(campaign.times(15)):
        stage.cluster.wait_in_sync()
        stage.cluster.elect_preferred()
        stage.sleep(1.0, 3.0)
        give_up_s = time.monotonic() + HALT_S * stage.patience
        with stage.away():
            while full.is_running and time.monotonic() < give_up_s:
                fill(disk / "ballast")
                time.sleep(0.1)
            if full.is_running:
                stage.fail(f"a broker with a full disk did not halt in {HALT_S:g} s")
            stage.sleep(0.0, 3.0)
            (disk / "ballast").unlink()
            full.start()
        stage.injected("disk full", broker=stage.cluster.brokers.index(full) + 1)
    stage.drain()
    return stage


def fleet_leaders_killed(campaign: Campaign) -> list[Stage]:
    """K15: under a fleet of two, leaders of its coordination topic and of markers partitions killed, and back."""
    cluster = ThreeBrokers(BROKER_SETTINGS, campaign.broker_environment)
    fleet = pair(campaign, "k15", cluster)
    first, *others = fleet.stages
    for stage in fleet.stages:
        stage.broker_count = len(cluster.brokers)
        stage.judge(stall_ms=STALL_MS)
    for number in range(campaign.times(20, least=2)):
        topic, partition = (f"{others[0].queue}.markers", 0) if number % 2 else (fleet.topic, fleet.partition)
        cluster.wait_in_sync()
        leader = cluster.leading(topic, partition)
        with ExitStack() as away:
            for stage in fleet.stages:
                away.enter_context(stage.away(after_s=REJOIN_S))
            _kill(first, cluster, leader, topic, partition)
        first.injected("kill -9 of a leader", topic=topic)
        for stage in others:
            stage.injected_beside += 1
        fleet.wait_tracked()
    for stage in fleet.stages[::-1]:
        stage.drain()
    return fleet.stages


def sink_leaders_killed(campaign: Campaign) -> SinkStage:
    """K16: leaders of the queue and of the transaction state killed while an exactly-once sink writes, and back."""
    cluster = ThreeBrokers(BROKER_SETTINGS, campaign.broker_environment)
    stage = SinkStage(campaign, "k16", SINK_ROWS, cluster)
    stage.broker_count = len(cluster.brokers)
    stage.on_close(cluster.close)
    writer = stage.writer()
    stage.begun(writer, SPARK_TIMEOUT_S)
    for number in range(campaign.times(15, least=2)):
        if not writer.until(partial(stage.has_more_than, stage.appended()), SPARK_TIMEOUT_S):
            stage.notes.append(f"{number} kills: the query wrote nothing more")
            break
        topic, partition = "__transaction_state" if number % 2 else stage.queue, stage.random.randrange(PARTITIONS)
        cluster.wait_in_sync()
        _kill(stage, cluster, cluster.leading(topic, partition), topic, partition)
        stage.injections += 1
    stage.finished(writer, END_TIMEOUT_S)
    return stage


def _kill(stage: Judged, cluster: ThreeBrokers, leader: EmbeddedBroker, topic: str, partition: int) -> None:
    leader.kill()
    cluster.wait_deposed(leader, topic, partition)
    time.sleep(stage.random.uniform(0.0, 3.0))
    leader.start()


def _state_partition(name: str) -> int:
    """Return in which partition Kafka keeps the state of a transactional id or a group: Java's hash of the string."""
    found = 0
    for character in name:
        found = (31 * found + ord(character)) & 0xFFFF_FFFF
    # transaction.state.log.num.partitions and offsets.topic.num.partitions of embedded brokers
    return (found & 0x7FFF_FFFF) % 4
