"""Faults of coordination groups: members, leaders and brokers killed, paused and moved."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from faults.claims import (
    Disturbance,
    Kill,
    bad_grants,
    holdings_of,
    late_repeats,
    missing,
    orphans,
    overlaps,
    read_log,
    repeats,
    said,
    takeovers_ms,
    undisturbed,
)
from faults.events import read_events
from faults.evidence import Violation
from faults.member import ACT_S, now_ms
from faults.processes import BEGIN_TIMEOUT_S, Child
from faults.stage import Judged
from faults.three_brokers import ThreeBrokers
from kmq_spark.coordination import create_coordination_topic
from kmq_spark.core.coordination.records import RecordType

if TYPE_CHECKING:
    from faults.campaign import Campaign
    from faults.claims import Handed
    from faults.evidence import Verdict

OWNED_S, T_MS, SETTLE_S = 60.0, 1_000, 3.0
CLICKS_PARTITIONS, MAX_MESSAGES = 6, 20
MARGIN_MS = 1_000
"""Time above 2T within which an orphan must be taken."""


class GroupStage(Judged):
    """A group of processes, and the verdict on it: on three brokers of its own, or on the campaign's one."""

    def __init__(
        self, campaign: Campaign, name: str, *, processes: int, brokers: ThreeBrokers | None = None, **options: Any
    ) -> None:
        super().__init__(campaign, name)
        self.group, self.brokers, self._options = self.name, brokers, options
        self.broker = campaign.broker if brokers is None else brokers
        self.broker_count = 1 if brokers is None else len(brokers.brokers)
        self.kills: list[Kill] = []
        self.disturbances: list[Disturbance] = []
        self.back_s: list[float] = []
        self.topic = self.group
        create_coordination_topic(
            self.broker.bootstrap_servers, topic=self.topic, partitions=1, replication_factor=3 if brokers else 1
        )
        self.members = {
            client_id: self._start(client_id) for client_id in (f"p{number}" for number in range(processes))
        }
        for child in self.members.values():
            if not child.wait_for("began", BEGIN_TIMEOUT_S):
                self.fail(f"{child.name} did not join: {child.last_words()}")
        time.sleep(SETTLE_S)

    def _start(self, client_id: str) -> Child:
        settings = {
            "bootstrap_servers": self.broker.bootstrap_servers, "topic": self.topic, "group": self.group,
            "client_id": client_id, "heartbeat_ms": T_MS, **self._options,
        }  # fmt: skip
        command = [sys.executable, "-m", "faults.member", json.dumps(settings)]
        child = Child(command, self.folder, f"{client_id}-{next(self._numbers)}")
        self.children.append(child)
        return child

    def kill(self, client_id: str) -> None:
        """Kill a member, and start it again after 0 to 3 T, under the same name."""
        child = self.members[client_id]
        child.end()
        self.kills.append(Kill(now_ms(), child.name))
        self.injections += 1
        time.sleep(self.random.uniform(0, 3) * T_MS / 1000)
        self.members[client_id] = self._start(client_id)

    def suspend(self, client_id: str) -> None:
        """Suspend a member for 0.5 T to 5 T."""
        child = self.members[client_id]
        child.pause()
        time.sleep(self.random.uniform(0.5, 5) * T_MS / 1000)
        child.resume()
        self.injections += 1

    def disturbed(self, begin_ms: float) -> None:
        """Note that the broker that leads the group's partition was away, or another one leads, from then to now."""
        self.injections += 1
        self.disturbances.append(Disturbance(begin_ms, now_ms()))

    def leader(self) -> str:
        """Return the client id of the leader: of the members of this group, the one that joined first."""
        running = {client_id for client_id, child in self.members.items() if child.is_running}
        log = read_log(self.broker.bootstrap_servers, self.topic, self.group)
        joins = [each for _, each in sorted(log.items()) if each.record.type is RecordType.JOIN]
        joined = {each.record.client_id: each.offset for each in joins}
        return min(running & joined.keys(), key=lambda client_id: joined[client_id])

    def any_member(self) -> str:
        """Return the client id of any member."""
        return self.random.choice(sorted(self.members))

    def victim(self, number: int) -> str:
        """Return the client id of the leader for every third *number*, and of any member for the others."""
        return self.leader() if number % 3 == 0 else self.any_member()

    def wait_owned(self) -> None:
        """Wait until every resource has an owner that acts, and note for how long."""
        since_ms, wanted = now_ms(), self._options["resources"]
        owned: set[str] = set()
        while len(owned) < wanted and now_ms() < since_ms + OWNED_S * 1000:
            time.sleep(0.1)
            for child in self.members.values():
                owned |= {act["resource"] for act in child.events("act")[-wanted:] if act["at_ms"] > since_ms}
        if len(owned) < wanted:
            self.fail(f"{wanted - len(owned)} resources had no owner for {OWNED_S:g} s, though the broker was back")
        self.back_s.append((now_ms() - since_ms) / 1000)

    def rest(self) -> None:
        """Let the group work for some seconds."""
        time.sleep(self.random.uniform(2, 4) * T_MS / 1000)

    def verdict(self) -> Verdict:
        """Read the event files and the log, and check them."""
        time.sleep(3 * T_MS / 1000)
        for child in self.children:
            child.end()
        found = super().verdict()
        acts, handed = said(read_events(self.folder))
        holdings = holdings_of(acts)
        log = read_log(self.broker.bootstrap_servers, self.topic, self.group)
        found.add_all(overlaps(holdings))
        found.add_all(bad_grants(holdings, log, T_MS))
        held_within_ms, bound_ms = 10 * ACT_S * 1000, 2 * T_MS + MARGIN_MS
        found.add_all(orphans(holdings, self.kills, held_within_ms))
        times_ms = takeovers_ms(holdings, self.kills, held_within_ms)
        self.recovery_s += [time_ms / 1000 for time_ms in times_ms]
        judged = takeovers_ms(holdings, undisturbed(self.kills, self.disturbances, bound_ms), held_within_ms)
        for time_ms in judged:
            if time_ms > bound_ms:
                found.add("C4", f"a resource had no owner for {time_ms:.0f} ms after a kill, bound {bound_ms} ms")
        self._note("with a leader again, every resource had an owner after", self.back_s)
        self._note("takeovers", [time_ms / 1000 for time_ms in times_ms])
        found.counts.update(claims=len(holdings), acts=len(acts), takeovers=len(times_ms), handed=len(handed))
        if "clicks" in self._options:
            self._judge_handed(handed, found)
        return found

    def _note(self, what: str, seconds: list[float]) -> None:
        if seconds:
            spread = f"p50 {statistics.median(seconds):.1f} s, max {max(seconds):.1f} s"
            self.notes.append(f"{self.group.partition('.')[0]}: {len(seconds)} {what} {spread}")

    def _judge_handed(self, handed: list[Handed], found: Verdict) -> None:
        """C5, C6."""
        messages, delivery = self._options["messages"], self._options["delivery"]
        lost, again = missing(handed, _ends(messages)), repeats(handed)
        if delivery == "at-most-once":
            found.add_all(Violation("C5", f"{place} was handed out {len(each)} times") for place, each in again.items())
            if lost > len(self.kills) * MAX_MESSAGES:
                found.add("C5", f"{lost} messages are lost, after {len(self.kills)} kills with {MAX_MESSAGES} each")
        else:
            found.add_all(late_repeats(handed, T_MS))
            if lost:
                found.add("C6", f"{lost} messages were never handed out")
        self.notes.append(f"{delivery}: {lost} lost, {len(again)} handed out again, of {messages}")

    def close(self) -> None:
        """End the processes, and brokers of its own."""
        super().close()
        if self.brokers is not None:
            self.brokers.close()


def _ends(messages: int) -> dict[int, int]:
    return {partition: len(range(partition, messages, CLICKS_PARTITIONS)) for partition in range(CLICKS_PARTITIONS)}


def _holding(campaign: Campaign, name: str, processes: int, resources: int, **options: Any) -> GroupStage:
    """Return processes that hold resources, each at most three more than its share."""
    most = math.ceil(resources / processes) + 3
    return GroupStage(campaign, name, processes=processes, mode="claims", resources=resources, most=most, **options)


def killed(campaign: Campaign) -> GroupStage:
    """G1: `kill -9` of members that hold resources, every third time the leader; started again under the same name."""
    stage = _holding(campaign, "g1", 10, 50)
    for number in range(campaign.times(20, least=3)):
        stage.kill(stage.victim(number))
        stage.rest()
    return stage


def paused(campaign: Campaign) -> GroupStage:
    """G2: SIGSTOP of members that hold resources, for 0.5 T to 5 T, every third time the leader."""
    stage = _holding(campaign, "g2", 10, 50)
    for number in range(campaign.times(15, least=3)):
        stage.suspend(stage.victim(number))
        stage.rest()
    return stage


def partition_moved(campaign: Campaign) -> GroupStage:
    """G8: the broker that leads the group's partition killed, another leads, then it leads again; members killed."""
    brokers = ThreeBrokers()
    stage = _holding(campaign, "g8", 5, 20, brokers=brokers)
    for _ in range(campaign.times(3)):
        begin_ms, leader = now_ms(), brokers.leading(stage.topic)
        leader.kill()
        brokers.wait_deposed(leader, stage.topic)
        stage.disturbed(begin_ms)
        stage.wait_owned()
        stage.kill(stage.any_member())
        # All brokers live while the leader moves back.
        begin_ms = now_ms()
        brokers.bring_back(leader, stage.topic)
        stage.disturbed(begin_ms)
        stage.wait_owned()
    return stage


def consumers_killed(campaign: Campaign) -> list[GroupStage]:
    """G5: `kill -9` of members that consume a topic at most once, and of members that consume it at least once."""
    return [_consumers_killed(campaign, delivery) for delivery in ("at-most-once", "at-least-once")]


def _consumers_killed(campaign: Campaign, delivery: str) -> GroupStage:
    messages, clicks = campaign.times(20_000, least=6_000), f"clicks.{time.time_ns()}"
    servers: dict[str, Any] = {"bootstrap.servers": campaign.broker.bootstrap_servers}
    admin = AdminClient(servers)
    (made,) = admin.create_topics([NewTopic(clicks, CLICKS_PARTITIONS, 1)]).values()
    made.result()
    producer = Producer(servers)
    for number in range(messages):
        producer.produce(clicks, str(number), partition=number % CLICKS_PARTITIONS)
        producer.poll(0)
    producer.flush(60)
    options: dict[str, Any] = {
        "clicks": clicks,
        "messages": messages,
        "delivery": delivery,
        "max_messages": MAX_MESSAGES,
    }
    stage = GroupStage(campaign, f"g5-{delivery}", processes=3, mode="consume", **options)
    for _ in range(campaign.times(5, least=2)):
        stage.rest()
        stage.kill(stage.any_member())
    # Until the rest is handed out; at most once, what the kills lost never is.
    before = -1
    for _ in range(30):
        left = missing(said(read_events(stage.folder))[1], _ends(messages))
        if left in {0, before}:
            break
        before = left
        time.sleep(4 * T_MS / 1000)
    return stage
