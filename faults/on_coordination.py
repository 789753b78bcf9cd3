"""Faults of coordination groups and of tracker fleets: members and brokers killed, paused and restarted."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from faults.checker import Verdict
from faults.claims import (
    Disturbance,
    Kill,
    bad_grants,
    holdings_of,
    late_repeats,
    missing,
    orphans,
    overlaps,
    read_lines,
    read_log,
    repeats,
    summary,
    takeovers_ms,
    undisturbed,
)
from faults.judged_stage import JudgedStage
from faults.member import ACT_S, now_ms
from faults.processes import Child
from faults.three_brokers import ThreeBrokers
from kmq_spark.coordination import create_coordination_topic

if TYPE_CHECKING:
    from pathlib import Path

    from faults.campaign import Campaign
    from kmq_spark.local.broker import EmbeddedBroker

Group = TypeVar("Group", bound="GroupStage")

BEGIN_TIMEOUT_S = 60.0
OWNED_S = 60.0
T_MS = 1_000
SETTLE_S = 3.0
CLICKS_PARTITIONS = 6
MAX_MESSAGES = 20
MARGIN_MS = 1_000
"""Time above 2T within which an orphan must be taken."""


class MemberChild(Child):
    """A process of `faults.member`."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        """Start it."""
        self.has_joined = False
        super().__init__([sys.executable, "-m", "faults.member", json.dumps(settings)], log, None)

    def wait_joined(self, timeout_s: float = BEGIN_TIMEOUT_S) -> bool:
        """Wait until it is a member; return whether it is."""
        give_up_s = time.monotonic() + timeout_s
        while not self.has_joined and self.is_running and time.monotonic() < give_up_s:
            time.sleep(0.02)
        return self.has_joined

    def _saw(self, line: str) -> None:
        self.has_joined = self.has_joined or line.startswith("joined")


class GroupStage(JudgedStage):
    """
    A group of processes, and the verdict on it.

    Args:
        broker: Running.
        folder: Folder of the campaign; the group gets one inside.
        group: Name; also that of its coordination topic.
        seed: Seed of everything that is chosen.
        processes: Number of processes of the group.
        options: Options of each process, see `faults.member`.
    """

    def __init__(
        self, broker: EmbeddedBroker, folder: Path, group: str, *, seed: int, processes: int, **options: Any
    ) -> None:
        """Start the processes."""
        super().__init__()
        self.broker, self.group, self.topic = broker, group, group
        self.folder = folder / group
        self.folder.mkdir(parents=True)
        self.chance = random.Random(seed)  # noqa: S311  # repeatable
        self.kills: list[Kill] = []
        self.disturbances: list[Disturbance] = []
        self.back_s: list[float] = []
        self._options = options
        self._started = 0
        self._create_topic()
        self.members: dict[str, tuple[str, MemberChild]] = {}
        for number in range(processes):
            self.start(f"p{number}")
        for name, child in self.members.values():
            if not child.wait_joined():
                self.fail(f"{name} did not join: {child.last_words()}")

    def _create_topic(self) -> None:
        create_coordination_topic(self.broker.bootstrap_servers, topic=self.topic, partitions=1, replication_factor=1)

    def start(self, client_id: str) -> MemberChild:
        """Start a process under a client id."""
        self._started += 1
        name = f"{client_id}-{self._started}"
        settings = {
            "bootstrap_servers": self.broker.bootstrap_servers, "topic": self.topic, "group": self.group,
            "client_id": client_id, "heartbeat_ms": T_MS, "file": str(self.folder / f"{name}.acts"), **self._options,
        }  # fmt: skip
        child = MemberChild(settings, self.folder / f"{name}.log")
        self.members[client_id] = (name, child)
        return child

    def kill(self, client_id: str) -> None:
        """Kill a member, and start it again after 0 to 3 T."""
        name, child = self.members[client_id]
        child.kill()
        self.kills.append(Kill(now_ms(), name))
        self.injections += 1
        time.sleep(self.chance.uniform(0, 3) * T_MS / 1000)
        self.start(client_id)

    def suspend(self, client_id: str) -> None:
        """Suspend a member for 0.5 T to 5 T."""
        _, child = self.members[client_id]
        child.pause()
        time.sleep(self.chance.uniform(0.5, 5) * T_MS / 1000)
        child.resume()
        self.injections += 1

    def disturb_broker(self, *, is_clean: bool) -> None:
        """Kill or stop the broker, and start it again."""
        begin_ms = now_ms()
        (self.broker.stop if is_clean else self.broker.kill)()
        self.broker.start()
        self.injections += 1
        self.disturbances.append(Disturbance(begin_ms, now_ms()))

    def leader(self) -> str:
        """Return the client id of the leader: of the members of this group, the one that joined first."""
        running = {client_id for client_id, (_, child) in self.members.items() if child.is_running}
        log = read_log(self.broker.bootstrap_servers, self.topic, self.group)
        joined = {record.client_id: offset for offset, record in sorted(log.items()) if record.type == 1}
        return min(running & joined.keys(), key=lambda client_id: joined[client_id])

    def victim(self, number: int) -> str:
        """Return the client id of the leader for every third *number*, and of any member for the others."""
        return self.leader() if number % 3 == 0 else self.any_member()

    def any_member(self) -> str:
        """Return the client id of any member."""
        return self.chance.choice(sorted(self.members))

    def wait_owned(self) -> None:
        """Wait until every resource has an owner that acts, and note for how long."""
        since_ms, unowned = now_ms(), self._options["resources"]
        while unowned and now_ms() < since_ms + OWNED_S * 1000:
            time.sleep(0.1)
            acts, _ = read_lines(self.folder)
            unowned = self._options["resources"] - len({act.resource for act in acts if act.at_ms > since_ms})
        if unowned:
            self.fail(f"{unowned} resources had no owner for {OWNED_S:g} s, though the broker was back")
        self.back_s.append((now_ms() - since_ms) / 1000)

    def rest(self) -> None:
        """Let the group work for some seconds."""
        time.sleep(self.chance.uniform(2, 4) * T_MS / 1000)

    def verdict(self, *, is_drained: bool = True) -> Verdict:
        """Read the files and the log, and check them."""
        del is_drained
        time.sleep(3 * T_MS / 1000)
        self.end_members()
        found = Verdict()
        for what in self.failures:
            found.add("harness", what)
        acts, handed = read_lines(self.folder)
        holdings = holdings_of(acts)
        log = read_log(self.broker.bootstrap_servers, self.topic, self.group)
        found.counts["overlaps"] += 0  # shown where there is none, too
        for what in overlaps(holdings):
            found.counts["overlaps"] += 1
            found.add("C1", what)
        for what in bad_grants(holdings, log, T_MS):
            invariant, _, text = what.partition(": ")
            found.add(invariant, text)
        held_within_ms, bound_ms = 10 * ACT_S * 1000, 2 * T_MS + MARGIN_MS
        times_ms = takeovers_ms(holdings, self.kills, held_within_ms)
        self.recovery_s += [time_ms / 1000 for time_ms in times_ms]
        judged = undisturbed(self.kills, self.disturbances, bound_ms)
        found.counts["takeovers_judged"] += 0
        for time_ms in takeovers_ms(holdings, judged, held_within_ms):
            found.counts["takeovers_judged"] += 1
            if time_ms > bound_ms:
                found.add("C4", f"a resource had no owner for {time_ms:.0f} ms after a kill, bound {bound_ms} ms")
        for what in orphans(holdings, self.kills, held_within_ms):
            found.add("C4", what)
        if self.back_s:
            self.notes.append(
                f"{self.group.partition('.')[0]}: with a leader again, every resource had an owner after p50 "
                f"{statistics.median(self.back_s):.1f} s, max {max(self.back_s):.1f} s"
            )
        if acts and self.kills:
            self.notes.append(f"{self.group.partition('.')[0]}: {summary(times_ms)}")
        found.counts["claims"] += len(holdings)
        found.counts["acts"] += len(acts)
        found.counts["takeovers"] += len(times_ms)
        found.counts["handed_out"] += len(handed)
        return found

    def close(self) -> None:
        """End whatever still runs."""
        self.end_members()

    def end_members(self) -> None:
        """End the processes, so that their files are complete."""
        for _, child in self.members.values():
            if child.is_running:
                child.resume()
                child.kill()


class ReplicatedStage(GroupStage):
    """
    A group whose partition has a copy on each of three brokers.

    Args:
        broker: The campaign's; not used.
        folder: Folder of the campaign.
        group: Name.
        options: Options of `GroupStage`.
    """

    def __init__(self, broker: EmbeddedBroker, folder: Path, group: str, **options: Any) -> None:
        """Start the brokers and the processes."""
        del broker
        files = folder / f"{group}-brokers"
        files.mkdir(parents=True)
        self.brokers = ThreeBrokers(files)
        try:
            super().__init__(self.brokers.first, folder, group, **options)
        except BaseException:
            self.brokers.close()
            raise

    def _create_topic(self) -> None:
        self.topic = self.brokers.coordination_topic(self.group)

    def move_leader(self) -> int:
        """Kill the broker that leads the group's partition; return its number."""
        begin_ms = now_ms()
        node = self.brokers.kill_leader(self.topic)
        self.injections += 1
        self.disturbances.append(Disturbance(begin_ms, now_ms()))
        return node

    def move_leader_back(self, node: int) -> None:
        """Start the broker again, and let it lead: all brokers live while the leader moves."""
        begin_ms = now_ms()
        self.brokers.bring_back(node, self.topic)
        self.injections += 1
        self.disturbances.append(Disturbance(begin_ms, now_ms()))

    def close(self) -> None:
        """End the processes and the brokers."""
        super().close()
        self.brokers.close()


class ConsumingStage(GroupStage):
    """
    A group that consumes a topic of numbered messages.

    Args:
        broker: Running.
        folder: Folder of the campaign.
        group: Name.
        messages: Messages of the topic.
        delivery: `at-least-once` or `at-most-once`.
        options: Options of `GroupStage`.
    """

    def __init__(
        self, broker: EmbeddedBroker, folder: Path, group: str, *, messages: int, delivery: str, **options: Any
    ) -> None:
        """Write the messages, and start the processes."""
        self._delivery, self._clicks = delivery, f"{group}.clicks"
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        (made,) = admin.create_topics([NewTopic(self._clicks, CLICKS_PARTITIONS, 1)]).values()
        made.result()
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
        for number in range(messages):
            producer.produce(self._clicks, str(number), partition=number % CLICKS_PARTITIONS)
            producer.poll(0)
        producer.flush(60)
        self._ends = {
            partition: len(range(partition, messages, CLICKS_PARTITIONS)) for partition in range(CLICKS_PARTITIONS)
        }
        super().__init__(
            broker, folder, group, mode="consume", clicks=self._clicks, delivery=delivery, max_messages=MAX_MESSAGES,
            **options,
        )  # fmt: skip

    @property
    def left(self) -> int:
        """How many messages no process has handed out yet."""
        return missing(read_lines(self.folder)[1], self._ends)

    def work_off(self, timeout_s: float = 120.0) -> None:
        """Wait until the rest is handed out; at most once, what the kills lost never is."""
        give_up_s, before = time.monotonic() + timeout_s, -1
        while time.monotonic() < give_up_s and (left := self.left) not in {0, before}:
            before = left
            time.sleep(4 * T_MS / 1000)

    def verdict(self, *, is_drained: bool = True) -> Verdict:
        """Read the files and the log, and check them; C5 or C6 in addition."""
        found = super().verdict(is_drained=is_drained)
        _, handed = read_lines(self.folder)
        lost, again = missing(handed, self._ends), repeats(handed)
        found.counts[f"{self._delivery.replace('-', '_')}_lost"] += lost
        found.counts[f"{self._delivery.replace('-', '_')}_repeats"] += len(again)
        if self._delivery == "at-most-once":
            for (partition, offset), each in again.items():
                owners = " and ".join(one.process for one in each)
                found.add("C5", f"message {partition}:{offset} was handed out by {owners}")
            # A member hands out one batch at a time.
            if lost > len(self.kills) * MAX_MESSAGES:
                found.add("C5", f"{lost} messages are lost, after {len(self.kills)} kills with {MAX_MESSAGES} each")
        else:
            if lost:
                found.add("C6", f"{lost} messages were never handed out")
            for what in late_repeats(handed, T_MS):
                found.add("C6", what)
        self.notes.append(
            f"{self._delivery}: {lost} lost, {len(again)} handed out again, of {sum(self._ends.values())}"
        )
        return found


def _holding(campaign: Campaign, name: str, kind: type[Group], *, processes: int = 10, resources: int = 50) -> Group:
    """Return processes that hold resources, each at most three more than its share."""
    most = math.ceil(resources / processes) + 3
    stage = campaign.group_stage(kind, name, processes=processes, mode="claims", resources=resources, most=most)
    time.sleep(SETTLE_S)
    return stage


def killed(campaign: Campaign) -> GroupStage:
    """G1: `kill -9` of members that hold resources, every third time the leader; started again under the same name."""
    stage = _holding(campaign, "g1", GroupStage)
    for number in range(campaign.scaled(40, least=3)):
        stage.kill(stage.victim(number))
        stage.rest()
    return stage


def paused(campaign: Campaign) -> GroupStage:
    """G2: SIGSTOP of members that hold resources, for 0.5 T to 5 T, every third time the leader."""
    stage = _holding(campaign, "g2", GroupStage)
    for number in range(campaign.scaled(30, least=3)):
        stage.suspend(stage.victim(number))
        stage.rest()
    return stage


def broker_restarted(campaign: Campaign) -> GroupStage:
    """G3: the broker killed and stopped while members hold resources, a member killed each time."""
    stage = _holding(campaign, "g3", GroupStage, processes=5, resources=20)
    for number in range(campaign.scaled(6, least=1)):
        stage.disturb_broker(is_clean=number % 2 == 1)
        stage.wait_owned()
        stage.kill(stage.any_member())
        stage.rest()
    return stage


def partition_moved(campaign: Campaign) -> GroupStage:
    """G8: the broker that leads the group's partition killed, another leads, then it leads again; members killed."""
    stage = _holding(campaign, "g8", ReplicatedStage, processes=5, resources=20)
    for _ in range(campaign.scaled(5, least=1)):
        node = stage.move_leader()
        stage.wait_owned()
        stage.kill(stage.any_member())
        stage.move_leader_back(node)
        stage.wait_owned()
    return stage


def leader_killed(campaign: Campaign) -> GroupStage:
    """G4: `kill -9` of the leader of a group that runs ten tasks over three processes."""
    stage = campaign.group_stage(GroupStage, "g4", processes=3, mode="tasks", tasks=10)
    time.sleep(SETTLE_S)
    for _ in range(campaign.scaled(20, least=2)):
        stage.kill(stage.leader())
        stage.rest()
    return stage


def consumers_killed(campaign: Campaign) -> list[GroupStage]:
    """G5: `kill -9` of members that consume a topic at most once, and of members that consume it at least once."""
    stages: list[GroupStage] = []
    for delivery in ("at-most-once", "at-least-once"):
        stage = campaign.group_stage(
            ConsumingStage, f"g5-{delivery}", processes=3, messages=campaign.scaled(40_000, least=6_000),
            delivery=delivery,
        )  # fmt: skip
        for _ in range(campaign.scaled(10, least=2)):
            stage.rest()
            stage.kill(stage.any_member())
        stage.work_off()
        stages.append(stage)
    return stages
