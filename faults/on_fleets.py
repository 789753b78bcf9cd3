"""Faults of a tracker fleet: how long is redelivery away?"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.load import messages_in_flight
from faults.processes import Tracker, now_ms
from faults.stage import Stage
from kmq_spark.coordination.topic import DEFAULT_PARTITIONS, create_coordination_topic, partition_of
from kmq_spark.core.coordination.records import FLEET_PREFIX

if TYPE_CHECKING:
    from faults.campaign import Campaign
    from faults.three_brokers import ThreeBrokers

QUEUES = 3
IN_FLIGHT = 3_334
"""Messages in flight in each queue when a tracker is killed: 10,000 together."""

LEASE_MS = 20_000
"""Of these messages: they fall due after the takeover."""

FAILOVER_BOUND_S = 8.0
"""From the kill to the next redelivery, with T = 2 s."""

HAND_OVER_BOUND_S = 4.0
"""Longest time without a redelivery while a process that was stopped hands its queues over."""

READY_TIMEOUT_S, STEADY_S, RATE = 180.0, 3.0, 30

# A few messages are forgotten all the time, so that something is always due.
BUSY: dict[str, Any] = {"mode": "receive", "forgotten": 0.2, "keep_alive": False, "max_in_flight": 400, "work_ms": 5}


class QueuesTracker(Tracker):
    """A tracker of several queues: no single one judges its presence or its memory."""

    kind = "trackers"


class Ending(NamedTuple):
    """A tracker process that was killed or stopped: when, what it tracked, when all had a tracker again, how slow."""

    at_ms: int
    queues: frozenset[str]
    until_ms: int
    patience: float


class Fleet:
    """Three queues under load, and the fleet that tracks them."""

    def __init__(self, campaign: Campaign, name: str, cluster: ThreeBrokers | None = None) -> None:
        options = {**BUSY, "partitions": 2, "broker": cluster}
        self.stages = [Stage(campaign, f"{name}-{letter}", **options) for letter in "abc"[:QUEUES]]
        self._first, self._queues = self.stages[0], frozenset(stage.queue for stage in self.stages)
        for stage in self.stages[1:]:
            # The first one is closed last.
            stage.leave_broker()
        self.processes: dict[str, QueuesTracker] = {}
        self.endings: list[Ending] = []
        self.topic, replicas = f"{self._first.name}.coordination", 3 if cluster else 1
        create_coordination_topic(self._first.bootstrap_servers, topic=self.topic, replication_factor=replicas)
        self.partition = partition_of(f"{FLEET_PREFIX}{self._first.name}", DEFAULT_PARTITIONS)
        for stage in self.stages:
            stage.send(rate=RATE)
            stage.worker("busy")

    def start(self, member: str) -> None:
        """Start a process, and wait until the queues have been spread again."""
        folder, queues = self._first.folder, [stage.queue for stage in self.stages]
        child = QueuesTracker(
            queues, self._first.bootstrap_servers, folder, f"{member}-{len(self.endings)}",
            checkpoint=folder / f"checkpoint-{member}", max_transaction_messages=None,
            fleet=(self._first.name, member),
        )  # fmt: skip
        self.processes[member] = child
        self._first.children.append(child)
        for stage in self.stages[1:]:
            # A stage learns from the logs in its folder which trackers took its queue over.
            (stage.folder / child.log.name).symlink_to(child.log)
        child.until(lambda: bool(_tracked(child)), READY_TIMEOUT_S)

    def wait_tracked(self) -> bool:
        """Wait until each queue is tracked, by one process or another; return whether it is."""
        give_up_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < give_up_s:
            running = [child for child in self.processes.values() if child.is_running]
            if frozenset().union(*map(_tracked, running)) == self._queues:
                return True
            time.sleep(0.05)
        self._first.fail(f"not every queue was tracked within {READY_TIMEOUT_S:g} s")
        return False

    def end_one(self, *, is_clean: bool = False) -> str:
        """Kill or stop a process that tracks with 10,000 messages in flight; return its name, empty if all failed."""
        for stage in self.stages:
            messages_in_flight(stage, IN_FLIGHT, LEASE_MS)
        time.sleep(STEADY_S)
        busiest = max(len(_tracked(child)) for child in self.processes.values())
        names = sorted(name for name, child in self.processes.items() if len(_tracked(child)) == busiest)
        member = self._first.random.choice(names)
        child, at_ms, at_s = self.processes[member], now_ms(), time.monotonic()
        tracked = _tracked(child)
        if not is_clean:
            child.kill()
        elif child.stop() != 0:
            self._first.fail(f"I9: a process that was stopped ended with {child.exit_code}: {child.last_words()}")
        self._first.injected("SIGTERM" if is_clean else "kill -9", member=member, queues=sorted(tracked))
        for stage in self.stages[1:]:
            stage.injected_beside += 1  # the fleet of all three queues has lost a process
        if not self.wait_tracked():
            return ""
        self.endings.append(Ending(at_ms, tracked, now_ms(), self._first.pace.since(at_s)))
        # The expiry of those in flight must not fall into the next ending.
        time.sleep(LEASE_MS / 1000 / 2)
        return member

    def finished(self, what: str, bound_s: float, *, is_clean: bool = False) -> list[Stage]:
        """Let everything be worked off, note for how long redelivery was away after each ending, and bound it (I8)."""
        for stage in self.stages[::-1]:
            stage.drain(timeout_s=180.0)
        self._judge(what, bound_s, is_clean=is_clean)
        return self.stages

    def _judge(self, what: str, bound_s: float, *, is_clean: bool) -> None:
        away_s: list[float] = []
        for stage in self.stages:
            copies_ms = sorted(record.at_ms for record in stage.dump().messages if record.previous is not None)
            for ending in self.endings:
                if stage.queue in ending.queues:
                    away_s.append(_away_s(copies_ms, ending, is_clean=is_clean))
                    if away_s[-1] > bound_s * ending.patience:
                        bound = f"bound {bound_s * ending.patience:.2f} s"
                        self._first.fail(f"I8: redelivery was away {what} for {away_s[-1]:.1f} s, {bound}")
        if not away_s:
            self._first.fail("no kill hit a process that tracked")
            return
        self._first.recovery_s += away_s
        spread = f"p50 {statistics.median(away_s):.1f} s, max {max(away_s):.1f} s"
        patience = [ending.patience for ending in self.endings]
        self._first.notes.append(
            f"redelivery was away {what}: {len(self.endings)} processes with {len(away_s)} queues, {spread}, "
            f"patience {min(patience):g} to {max(patience):g}"
        )


def _tracked(child: Tracker) -> frozenset[str]:
    """Return the queues that a process tracks, each after its first batch."""
    found: set[str] = set()
    said = [*child.events("ready"), *child.events("stopped")]
    for event in sorted(said, key=lambda event: (event["seen_ms"], event["event"] == "stopped")):
        named = set(event.get("queues") or [event["queue"]])
        found = found | named if event["event"] == "ready" else found - named
    return frozenset(found)


def _away_s(copies_ms: list[int], ending: Ending, *, is_clean: bool) -> float:
    """
    Return for how long redelivery of a queue was away after an ending; infinity where it did not come back.

    From a kill to the next redelivery. A process that is stopped redelivers for a moment more: for it, the longest time
    without a redelivery until all queues had a tracker again.
    """
    # A transaction that the killed process had committed may be stamped a moment later.
    later = [at_ms for at_ms in copies_ms if at_ms > ending.at_ms + (0 if is_clean else 100)]
    if not later:
        return float("inf")
    if not is_clean:
        return (later[0] - ending.at_ms) / 1000
    behind = [at_ms for at_ms in later if at_ms <= ending.until_ms + 1_000] or later[:1]
    return max(other - one for one, other in pairwise([ending.at_ms, *behind])) / 1000


def pair(campaign: Campaign, name: str, cluster: ThreeBrokers | None = None) -> Fleet:
    """Return a fleet of two processes that track."""
    fleet = Fleet(campaign, name, cluster)
    for member in ("m0", "m1"):
        fleet.start(member)
    fleet.wait_tracked()
    return fleet


def killed(campaign: Campaign) -> list[Stage]:
    """G6: `kill -9` of a process of a fleet of two that tracks three queues with 10,000 messages in flight."""
    fleet = pair(campaign, "g6")
    for _ in range(campaign.times(5, least=2)):
        if not (member := fleet.end_one()):
            break
        fleet.start(member)
        fleet.wait_tracked()
    return fleet.finished("after a kill in a fleet", FAILOVER_BOUND_S)


def upgraded(campaign: Campaign) -> list[Stage]:
    """G6: SIGTERM of one process of that fleet after the other, each started again, as in a rolling upgrade."""
    fleet = pair(campaign, "g6-upgrade")
    for _ in range(campaign.times(2)):
        if not (member := fleet.end_one(is_clean=True)):
            break
        fleet.start(member)
        fleet.wait_tracked()
    return fleet.finished("while a process of a fleet was stopped", HAND_OVER_BOUND_S, is_clean=True)
