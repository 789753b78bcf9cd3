"""Faults of brokers, topics and networks: killed, paused, cut off, records removed, partitions added, clocks moved."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, ResourceType

from faults.clocks import HOUR_MS, MovableClock, is_available
from faults.events import read_events
from faults.evidence import WORKER
from faults.load import write
from faults.on_consumers import STALL_MS
from faults.on_trackers import BUSY
from faults.proxy import TRANSACTIONAL, ProxiedBroker
from faults.stage import CALM, WAYS, Judged, Stage
from kmq_spark.errors import KmqError
from kmq_spark.failpoints import EXIT_CODE
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.producer.producer import QueueProducer

if TYPE_CHECKING:
    from faults.campaign import Campaign
    from faults.evidence import Verdict

BROKER_STALL_MS = 20_000
"""I9: after the broker's return, messages of a partition do not wait longer than this without any being taken."""

CLEAN_STOP_EACH = 3
"""One stop in this many is a clean one; the others are kills."""

HOLDS: dict[str, Any] = {"mode": "receive", "keep_alive": False, "forgotten": 1.0, "max_in_flight": 500}
"""A consumer that takes messages and settles none."""

WAIT_S = 30.0
LARGE_BYTES, REFUSED_BYTES, ROOMY_BYTES = 950_000, 900_000, 4_000_000
"""Of a message sent while the topic takes a MiB; `max.message.bytes` below that, and above everything."""

AT_ONCE_S, LETTERS_TIMEOUT_S = 10.0, 60.0
"""For a send to be refused, where a producer waits two minutes for the broker; for dead letters of leases of 8 s."""

CUT_S, SHORT_CUT_S, REJOIN_S, LATENCY_S = 30.0, 8.0, 5.0, 0.1
"""The latency is in each direction."""

SLOW_P99_MS = 12_000
"""I8 while each request of the tracker takes 0.2 s: a batch makes about twenty of them, and a message waits for two."""

AWAY_S, ANEW_S = 60.0, 90.0
"""How long topics are away, and after which time all messages of the new ones are handled."""

CHANGED_SETTINGS = (
    (".markers", "message.timestamp.type", "CreateTime", "LogAppendTime"),
    (".markers", "retention.bytes", "1073741824", "-1"),
    ("", "cleanup.policy", "compact", "delete"),
    (".dlq", "cleanup.policy", "compact", "delete"),
)
NOTICED_S, LONGEST_RESTART_S = 50.0, 35.0
"""A tracker looks at its topics each half a minute; its longest pause before it tries again."""

FORGET_S = 60.0
"""`offsets.retention.minutes=1`, its smallest value."""

REPLAY_LOGGED = re.compile("expired|no committed (offset|position)|again", re.IGNORECASE)
"""What the log of a consumer must say where it hands out finished messages again."""


def _crew(stage: Stage, **profile: Any) -> None:
    for _ in range(2):
        stage.worker("crew", **profile).wait_working()


def killed(campaign: Campaign) -> Stage:
    """F3: the broker killed, and stopped cleanly, under load."""
    stage = Stage(campaign, "f3")
    stage.judge(stall_ms=BROKER_STALL_MS)
    stage.tracked()
    stage.send(rate=campaign.rate(150))
    _crew(stage)
    for number in range(campaign.times(3)):
        time.sleep(3 + number * 0.37)
        is_clean = number % CLEAN_STOP_EACH == CLEAN_STOP_EACH - 1
        with stage.away():
            (campaign.broker.stop if is_clean else campaign.broker.kill)()
            campaign.broker.start()
        stage.injected("clean stop" if is_clean else "kill -9")
    stage.drain()
    return stage


def killed_in_a_transaction(campaign: Campaign) -> Stage:
    """F11: tracker and broker killed together, with a transaction open and with one just committed."""
    stage = Stage(campaign, "f11", **BUSY)
    stage.send(rate=campaign.rate(60))
    stage.worker("busy")
    points = ("tracker.before-commit:3", "tracker.end-sent:2", "tracker.committed:3")
    for point in points[: campaign.times(len(points))]:
        tracker = stage.tracker(failpoint=point)
        if tracker.wait(60 * stage.patience) != EXIT_CODE:
            stage.notes.append(f"{point} was not passed in time")
        tracker.end()
        campaign.broker.kill()
        campaign.broker.start()
        stage.injected("kill -9 of tracker and broker", point=point)
    stage.recovery_s.append(stage.tracker().wait_ready())
    stage.drain()
    return stage


def payloads_removed(campaign: Campaign) -> Stage:
    """F12: records of the queue topic removed while their messages are in flight."""
    stage = Stage(campaign, "f12", lease_ms=3_000, **HOLDS)
    stage.tracked()
    for _ in range(campaign.times(2)):
        stage.send(rate=0, count=200).join()
        holder = stage.worker("holder")
        holder.wait_working(200, WAIT_S * stage.patience)
        holder.end()
        stage.remember()
        every = [TopicPartition(stage.queue, partition, -1) for partition in range(stage.partitions)]
        stage.done(stage.admin.delete_records(every))
        stage.injected("records of the queue topic removed")
        time.sleep(4)
    stage.drain()
    return stage


def set_topic(stage: Stage, topic: str, name: str, value: object) -> None:
    """Change a setting of a topic."""
    entry = ConfigEntry(name, str(value), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    stage.done(stage.admin.incremental_alter_configs([resource]))


def grown_too_large(campaign: Campaign) -> Stage:
    """F15: messages that are too large to send, then to redeliver, then for the dead-letter topic too."""
    stage, count = Stage(campaign, "f15", lease_ms=8_000, **HOLDS), campaign.times(15, least=4)
    tracker = stage.tracked()
    for number, topics in enumerate(((stage.queue,), (stage.queue, f"{stage.queue}.dlq"))):
        _must_refuse_at_once(stage)
        stage.send(rate=0, count=count, least_bytes=LARGE_BYTES).join()
        holder = stage.worker("holder")
        holder.wait_working(count, WAIT_S * stage.patience)
        holder.end()
        for topic in topics:
            set_topic(stage, topic, "max.message.bytes", REFUSED_BYTES)
        stage.injected("max.message.bytes below messages in flight", topics=topics)
        # Only then: a limit that is raised before the redelivery refuses nothing.
        give_up_s = time.monotonic() + LETTERS_TIMEOUT_S * stage.patience
        while len(stage.dump().dead_letters) < (number + 1) * count and time.monotonic() < give_up_s:
            time.sleep(0.5)
        for topic in topics:
            set_topic(stage, topic, "max.message.bytes", ROOMY_BYTES)
    stage.drain()
    if restarts := tracker.restarts():
        stage.fail(f"F15: the query was restarted {restarts} times")
    letters = stage.dump().dead_letters
    found = len(letters), sum(letter.value is None for letter in letters)
    if found != (2 * count, count):
        stage.fail(f"F15: dead letters, and those without payload: got {found}, expected {2 * count}, {count}")
    return stage


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


def grown(campaign: Campaign) -> Stage:
    """F13: partitions added to queue and markers topic under load, unreadable records in the new ones."""
    stage = Stage(campaign, "f13", partitions=2)
    stage.tracked()
    stage.send(rate=campaign.rate(150))
    _crew(stage)
    for count in (4, 6)[: campaign.times(2)]:
        # Markers first: a message of a partition that has no markers partition cannot be started.
        for topic in (f"{stage.queue}.markers", stage.queue):
            stage.done(stage.admin.create_partitions([NewPartitions(topic, count)]))
            stage.injected("partitions added", topic=topic, count=count)
            time.sleep(2)
        stage.markers.list_topics(f"{stage.queue}.markers", timeout=30)  # the client learns of the new partitions
        write(stage, b"\xff no marker", count - 1)
        # A second producer and a second crew see the new partitions at once; the first ones when they look again.
        stage.send(rate=campaign.rate(50))
        stage.worker("new").wait_working()
        time.sleep(3)
    stage.drain()
    return stage


def cut(campaign: Campaign) -> Stage:
    """F18: the network cut for 30 s between consumers and broker, tracker and broker, all; then 200 ms slower."""
    broker, workers, trackers = ProxiedBroker.start(campaign.folder, campaign.broker_environment)
    stage = Stage(campaign, "f18", broker=broker)
    stage.judge(stall_ms=BROKER_STALL_MS, quiet_p99_ms=SLOW_P99_MS)
    # The stage's processes end first: without a network they would not end by themselves.
    stage.on_close(workers.close)
    stage.on_close(trackers.close)
    stage.tracked(bootstrap_servers=trackers.address)
    stage.send(rate=campaign.rate(100))
    _crew(stage, bootstrap_servers=workers.address)
    seconds = SHORT_CUT_S + (CUT_S - SHORT_CUT_S) * min(1.0, campaign.scale)
    for what, proxies in {"consumers": (workers,), "tracker": (trackers,), "all": (workers, trackers)}.items():
        time.sleep(3)
        # A consumer that has lost its place in the group may write STARTs before it learns of that.
        with stage.away(after_s=REJOIN_S):
            for proxy in proxies:
                proxy.cut()
            time.sleep(seconds)
            for proxy in proxies:
                proxy.heal()
        stage.injected("network cut", between=what, seconds=seconds)
    for proxy in (workers, trackers):
        proxy.delay(LATENCY_S)
    stage.injected("network slow", seconds=LATENCY_S)
    time.sleep(seconds)
    stage.drain()
    return stage


def answers_lost(campaign: Campaign) -> Stage:
    """F29: the answers to each kind of transactional call of trackers and consumers lost, what was asked for done."""
    broker, workers, trackers = ProxiedBroker.start(campaign.folder, campaign.broker_environment)
    stage = Stage(campaign, "f29", broker=broker, is_mixed=True, **BUSY)
    stage.on_close(workers.close)
    stage.on_close(trackers.close)
    stage.tracked(bootstrap_servers=trackers.address)
    stage.send(rate=campaign.rate(60))
    for _ in range(2):
        stage.worker("transacts", bootstrap_servers=workers.address, **WAYS["transaction"]).wait_working()
    kinds = [*TRANSACTIONAL] * campaign.times(3)
    stage.random.shuffle(kinds)
    for kind in kinds:
        for proxy in (workers, trackers):
            proxy.lose_answer(kind)
        time.sleep(stage.random.uniform(1.0, 3.0))
    lost = workers.lost_count, trackers.lost_count
    stage.notes.append(f"{lost[0]} answers to consumers and {lost[1]} to the tracker lost")
    for _ in range(sum(lost)):
        stage.injected("answer lost")
    stage.drain()
    return stage


def clock_stepped(campaign: Campaign) -> Stage | None:
    """F25: the clock of the broker a minute and an hour back, an hour ahead, and right again each time, under load."""
    if not is_available():
        return None
    clock = MovableClock(campaign.folder)
    broker = campaign.new_broker(environment=clock.environment())
    stage = Stage(campaign, "f25", broker=broker, clock=clock, poison=0.0, max_deliveries=5)
    stage.judge(stall_ms=STALL_MS, letters_need_a_cause=True)
    stage.tracked()
    stage.send(rate=campaign.rate(150))
    _crew(stage, raised=0.1)
    for ahead_ms in (-60_000, -HOUR_MS, HOUR_MS):
        for moved_ms in (ahead_ms, 0):
            time.sleep(5)
            clock.move(moved_ms)
            stage.injected("clock of the broker", ahead_ms=moved_ms)
    time.sleep(8)
    stage.drain()
    return stage


class NewTopics(Stage):
    """A queue whose topics are made anew. What the processes said of the old ones does not fit the new ones."""

    def make_anew(self, pause_s: float) -> None:
        """Delete the topics of the queue, and create them again."""
        topics = QueueTopics(self.queue).all_topics
        self.done(self.admin.delete_topics(list(topics)))
        time.sleep(pause_s)
        give_up_s = time.monotonic() + WAIT_S * self.patience
        while True:
            try:
                create_queue_topics(self.queue, bootstrap_servers=self.bootstrap_servers, partitions=self.partitions)
            except KmqError:  # the broker still deletes them
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(0.2)
            else:
                return

    def is_handled(self, count: int) -> bool:
        """Return whether so many messages were handled."""
        children = [child for child in self.children if child.kind == WORKER]
        return len({event["id"] for child in children for event in child.events("handled")}) >= count

    def verdict(self) -> Verdict:
        """Return what the scenario has judged itself."""
        return Judged.verdict(self)


def made_anew(campaign: Campaign) -> list[Stage]:
    """F30: all topics of a queue deleted and created again under its workers and its tracker, at once and later."""
    stages: list[Stage] = []
    before, after = 100, 200
    for pause_s in (0.0, AWAY_S, 2.0)[: campaign.times(3)]:
        stage = NewTopics(campaign, "f30", partitions=2, lease_ms=5_000, **CALM)
        stages.append(stage)
        parts = [stage.tracked(), *stage.crew("crew"), *stage.crew("crew")]
        stage.send(rate=0, count=before).join()
        parts[1].until(partial(stage.is_handled, before), WAIT_S * stage.patience)
        stage.make_anew(pause_s)
        stage.injected("topics made anew", pause_s=pause_s)
        stage.send(rate=0, count=after).join()
        give_up_s, ends = time.monotonic() + ANEW_S * stage.patience, 0
        while not stage.is_handled(before + after) and time.monotonic() < give_up_s:
            for index, part in enumerate(parts):
                if not part.is_running:  # a supervisor starts it again
                    ends += 1
                    parts[index] = stage.worker("again") if index else stage.tracker()
            time.sleep(0.5)
        if not stage.is_handled(before + after):
            stage.fail(f"I9: not all of {after} messages of the new topics were handled in {ANEW_S:g} s")
        stage.notes.append(f"topics made anew after {pause_s:g} s: {ends} processes ended and were started again")
        stage.end_all()
    return stages


def settings_changed(campaign: Campaign) -> Stage:
    """F31: settings on which a guarantee rests changed under a tracker: it stops, says which, and goes on by itself."""
    stage = Stage(campaign, "f31", **CALM)
    tracker = stage.tracked()
    stage.send(rate=campaign.rate(60))
    _crew(stage)
    for suffix, name, wrong, right in CHANGED_SETTINGS[: campaign.times(len(CHANGED_SETTINGS))]:
        topic = f"{stage.queue}{suffix}"
        set_topic(stage, topic, name, wrong)
        stage.injected("setting changed", topic=topic, setting=name, value=wrong)
        with stage.away(after_s=LONGEST_RESTART_S):
            give_up_s = time.monotonic() + NOTICED_S * stage.patience
            while (is_silent := not tracker.has_said(f"{name}={wrong}")) and time.monotonic() < give_up_s:
                time.sleep(0.5)
            if is_silent:
                stage.fail(f"I9: the tracker says nothing of {name}={wrong}: {tracker.last_words()}")
            set_topic(stage, topic, name, right)
        time.sleep(LONGEST_RESTART_S)
    stage.drain()
    return stage


def offsets_expired(campaign: Campaign) -> list[Stage]:
    """F27: the broker forgets the offsets of groups, because everything was off, or idle, for too long."""
    extra = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "1000"}
    broker = campaign.new_broker(extra)
    profile: dict[str, Any] = {"mode": "receive", "keep_alive": False, "max_deliveries": 0}
    idle = Stage(campaign, "f27-idle", broker=broker, **profile)
    off = Stage(campaign, "f27-off", broker=broker, forgotten=0.1, **profile)
    off.leave_broker()
    for stage in (idle, off):
        # Longer than the retention: what is forgotten falls due behind the expiry.
        stage.profile = replace(stage.profile, lease_ms=round(1000 * (FORGET_S + 20)))
    trackers = {stage.name: stage.tracker() for stage in (idle, off)}
    workers = {stage.name: stage.worker("before") for stage in (idle, off)}
    for stage in (idle, off):
        trackers[stage.name].wait_ready()
        stage.send(rate=0, count=500).join()
        workers[stage.name].wait_working(500)
    time.sleep(3)
    workers[idle.name].stop()
    # What it has forgotten stays in flight: a clean stop would give it back.
    workers[off.name].kill()
    trackers[off.name].stop()
    # What comes meanwhile is not to be lost either.
    off.send(rate=0, count=100).join()
    time.sleep(FORGET_S + 10)
    trackers[idle.name].kill()
    for stage in (idle, off):
        stage.injected("offsets expired")
        stage.send(rate=0, count=100).join()
        tracker = stage.tracker()
        stage.worker("after", forgotten=0.0)
        tracker.wait_ready()
    for stage in (idle, off):
        stage.drain(timeout_s=FORGET_S + 60)
        _must_not_replay(stage, unless_said=stage is off)
    return [idle, off]


def _must_not_replay(stage: Stage, *, unless_said: bool) -> None:
    """I15: what was acked is not handed out again, or only where the worker's log says so and no tracker was there."""
    acked: set[tuple[int, ...]] = set()
    replayed = 0
    for event in sorted(read_events(stage.folder), key=lambda event: event["monotonic"]):
        place = tuple(event.get("copy", ()))
        replayed += event["event"] == "delivered" and place in acked
        if event["event"] == "handled":
            acked.add(place)
    is_said = any(REPLAY_LOGGED.search(log.read_text(errors="replace")) for log in stage.folder.glob("after*.log"))
    stage.notes.append(f"{replayed} messages handed out again after the expiry, {'' if is_said else 'not '}said")
    if replayed and not (unless_said and is_said):
        stage.fail(f"I15: {replayed} finished messages were handed out again")
