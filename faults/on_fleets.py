"""Faults of a tracker fleet, beside those of a tracker that is restarted: how long is redelivery away?"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.calibration import SpeedWatch
from faults.load import messages_in_flight
from faults.processes import Child
from faults.topics import read_dump
from kmq_spark.coordination import create_coordination_topic

if TYPE_CHECKING:
    from pathlib import Path

    from faults.campaign import Campaign
    from faults.stage import Stage

QUEUES = 3
IN_FLIGHT = 3_334
"""Messages in flight in each queue when a tracker is killed: 10,000 together."""

LEASE_MS = 20_000
"""Of these messages: they fall due after the takeover."""

FAILOVER_BOUND_S = 8.0
"""From the kill to the next redelivery, with T = 2 s."""

HAND_OVER_BOUND_S = 3.0
"""Longest time without a redelivery while a process that was stopped hands its queues over."""

READY_TIMEOUT_S = 180.0
STEADY_S = 3.0

# A few messages are forgotten all the time, so that something is always due.
BUSY: dict[str, Any] = {"mode": "receive", "forgotten": 0.2, "keep_alive": False, "max_in_flight": 400, "work_ms": 5}
RATE = 30


class Ending(NamedTuple):
    """
    A tracker process that was killed or stopped.

    Attributes:
        at_ms: When, epoch milliseconds.
        queues: Those that it tracked.
        until_ms: When all of them had a tracker again.
    """

    at_ms: int
    queues: frozenset[str]
    until_ms: int


class Away(NamedTuple):
    """
    How long redelivery of a queue was away after an ending.

    Attributes:
        seconds: The time; infinity where it did not come back.
        patience: How many times slower than the reference the machine was then.
    """

    seconds: float
    patience: float

    def is_longer_than(self, bound_s: float) -> bool:
        """Return whether it took longer than a bound that holds on the reference, seconds."""
        return self.seconds > bound_s * self.patience


class TrackersChild(Child):
    """
    `kmq tracker run` of several queues, alone or in a fleet.

    Args:
        stages: The queues.
        folder: Logs and checkpoints.
        member: Name of the process.
        fleet: Name of the fleet; empty for a process that is alone.
    """

    def __init__(self, stages: list[Stage], folder: Path, member: str, fleet: str) -> None:
        """Start it."""
        self.member = member
        self._ready: set[str] = set()
        self.has_joined = False
        command = [
            *(sys.executable, "-m", "kmq_spark.cli.main", "tracker", "run", *(stage.queue for stage in stages)),
            *("--events", "--bootstrap-server", stages[0].bootstrap_servers, "--max-deliveries", "3"),
            *("--driver-memory", "1g", "--checkpoint-dir", str(folder / f"checkpoint-{member}")),
        ]
        if fleet:
            command += ["--fleet", fleet, "--fleet-member", member]
        log = folder / f"tracker-{member}-{time.time_ns()}.log"
        settings = {"KMQ_TRACKER__STATE_PARTITIONS": "2", "KMQ_TRACKER__COORDINATION_TOPIC": f"{fleet}.coordination"}
        super().__init__(command, log, settings)
        for stage in stages:
            # A stage learns from the logs in its folder which trackers took its queue over.
            (stage.folder / log.name).symlink_to(log)

    @property
    def ready(self) -> frozenset[str]:
        """Queues that it tracks, each after its first batch."""
        return frozenset(self._ready)

    def _saw(self, line: str) -> None:
        if not line.startswith("{"):
            return
        event = json.loads(line)
        self.has_joined = self.has_joined or event["event"] == "joined"
        if event["event"] == "ready":
            self._ready |= set(event.get("queues") or [event["queue"]])
        elif event["event"] == "stopped":
            self._ready.discard(event["queue"])


class FleetStage:
    """
    Three queues under load, and the processes that track them.

    Args:
        campaign: The run.
        name: Name of the fault.
        is_fleet: Whether the processes are a fleet.
    """

    def __init__(self, campaign: Campaign, name: str, *, is_fleet: bool) -> None:
        """Start the load."""
        self.stages = [campaign.stage(f"{name}-{letter}", partitions=2, **BUSY) for letter in "abc"[:QUEUES]]
        self._folder = campaign.folder / f"{name}-{time.time_ns()}"
        self._folder.mkdir()
        self._fleet = f"{name}-{time.time_ns()}" if is_fleet else ""
        self._generator = random.Random(campaign.seed)  # noqa: S311  # repeatable
        self.processes: dict[str, TrackersChild] = {}
        self.endings: list[Ending] = []
        self._speed = SpeedWatch()
        if is_fleet:
            create_coordination_topic(
                self.stages[0].bootstrap_servers, topic=f"{self._fleet}.coordination", replication_factor=1
            )
        for stage in self.stages:
            stage.send(rate=RATE)
            stage.worker("busy")

    @property
    def queues(self) -> frozenset[str]:
        """The names of the queues."""
        return frozenset(stage.queue for stage in self.stages)

    def start(self, member: str) -> TrackersChild:
        """Start a process."""
        self.processes[member] = TrackersChild(self.stages, self._folder, member, self._fleet)
        return self.processes[member]

    def wait_tracked(self) -> bool:
        """Wait until each queue is tracked, by one process or another; return whether it is."""
        give_up_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < give_up_s:
            tracked: set[str] = set()
            for child in self.processes.values():
                tracked |= child.ready if child.is_running else set()
            if tracked == self.queues:
                return True
            time.sleep(0.05)
        self.stages[0].fail(f"not every queue was tracked within {READY_TIMEOUT_S:g} s")
        return False

    def wait_joined(self, child: TrackersChild) -> None:
        """Wait until a process has joined the fleet and the queues have been spread again."""
        give_up_s = time.monotonic() + READY_TIMEOUT_S
        while not (child.has_joined and child.ready) and child.is_running and time.monotonic() < give_up_s:
            time.sleep(0.05)
        self.wait_tracked()

    def end_one(self, *, is_clean: bool = False) -> str:
        """Kill or stop a process that tracks with 10,000 messages in flight; return its name, empty if all failed."""
        for stage in self.stages:
            messages_in_flight(stage, IN_FLIGHT, LEASE_MS)
        time.sleep(STEADY_S)
        busiest = max(len(child.ready) for child in self.processes.values())
        names = sorted(name for name, child in self.processes.items() if len(child.ready) == busiest)
        child = self.processes[self._generator.choice(names)]
        tracked = child.ready
        at_ms = time.time_ns() // 1_000_000
        if not is_clean:
            child.kill()
        elif child.stop() != 0:
            self.stages[0].fail(f"I9: a process that was stopped ended with {child.exit_code}: {child.last_words()}")
        what = "SIGTERM" if is_clean else "kill -9"
        for number, stage in enumerate(self.stages):
            write = stage.shares_injection if number else stage.injected
            write(what, member=child.member, queues=sorted(tracked))
        if self._fleet and not self.wait_tracked():
            return ""
        self.endings.append(Ending(at_ms, tracked, time.time_ns() // 1_000_000))
        return child.member

    def finish(self) -> list[Stage]:
        """Let everything be worked off, and note how long redelivery was away after each kill."""
        for stage in self.stages:
            stage.drain(timeout_s=180.0)
        for child in self.processes.values():
            if child.is_running:
                child.stop()
        self._speed.close()
        return self.stages

    def aways(self, *, is_clean: bool = False) -> list[Away]:
        """
        Return for how long redelivery was away after each ending, for each queue of the process.

        From a kill to the next redelivery. A process that is stopped redelivers for a moment more: for it, the longest
        time without a redelivery until all queues had a tracker again.
        """
        found = []
        for stage in self.stages:
            dump = read_dump(stage.queue, stage.bootstrap_servers)
            copies_ms = sorted(record.appended_at_ms for record in dump.messages if record.previous is not None)
            for ending in self.endings:
                if stage.queue not in ending.queues:
                    continue
                # A transaction that the killed process had committed may be stamped a moment later.
                later = [at_ms for at_ms in copies_ms if at_ms > ending.at_ms + (0 if is_clean else 100)]
                if not later:
                    away_s = float("inf")
                elif is_clean:
                    behind = [at_ms for at_ms in later if at_ms <= ending.until_ms + 1_000] or later[:1]
                    away_s = max(b - a for a, b in pairwise([ending.at_ms, *behind])) / 1000
                else:
                    away_s = (later[0] - ending.at_ms) / 1000
                found.append(Away(away_s, self._speed.slowness(ending.at_ms, ending.until_ms + 1_000)))
        return found


def killed(campaign: Campaign) -> list[Stage]:
    """G6: `kill -9` of a process of a fleet of two that tracks three queues with 10,000 messages in flight."""
    fleet = FleetStage(campaign, "g6", is_fleet=True)
    for member in ("m0", "m1"):
        fleet.start(member)
    for child in fleet.processes.values():
        fleet.wait_joined(child)
    for _ in range(campaign.scaled(20, least=2)):
        if not (member := fleet.end_one()):
            break
        time.sleep(LEASE_MS / 1000 / 2)
        fleet.wait_joined(fleet.start(member))
    stages = fleet.finish()
    _note(fleet, stages, "redelivery was away after a kill in a fleet", FAILOVER_BOUND_S)
    return stages


def upgraded(campaign: Campaign) -> list[Stage]:
    """G6: SIGTERM of one process of that fleet after the other, each started again, as in a rolling upgrade."""
    fleet = FleetStage(campaign, "g6-upgrade", is_fleet=True)
    for member in ("m0", "m1"):
        fleet.start(member)
    for child in fleet.processes.values():
        fleet.wait_joined(child)
    for _ in range(campaign.scaled(6, least=1)):
        if not (member := fleet.end_one(is_clean=True)):
            break
        # As after a kill: the expiry of those in flight must not fall into the next hand-over.
        time.sleep(LEASE_MS / 1000 / 2)
        fleet.wait_joined(fleet.start(member))
    stages = fleet.finish()
    what = "redelivery was away while a process of a fleet was stopped"
    _note(fleet, stages, what, HAND_OVER_BOUND_S, is_clean=True)
    return stages


def restarted(campaign: Campaign) -> list[Stage]:
    """G7: the same with one tracker process that is started again at once, without a fleet: for comparison."""
    single = FleetStage(campaign, "g7", is_fleet=False)
    single.start("m0")
    single.wait_tracked()
    for _ in range(campaign.scaled(5, least=1)):
        single.start(single.end_one())
        if not single.wait_tracked():
            break
        time.sleep(LEASE_MS / 1000 / 2)
    stages = single.finish()
    _note(single, stages, "redelivery was away after a kill, with a restart", None)
    return stages


def _note(fleet: FleetStage, stages: list[Stage], what: str, bound_s: float | None, *, is_clean: bool = False) -> None:
    """Note median and maximum, and fail where the bound is exceeded."""
    aways = fleet.aways(is_clean=is_clean)
    if not aways:
        stages[0].fail("no kill hit a process that tracked")
        return
    away_s, patience = [away.seconds for away in aways], [away.patience for away in aways]
    stages[0].recovery_s += away_s
    stages[0].notes.append(
        f"{what}: {len(fleet.endings)} processes with {len(away_s)} queues, p50 {statistics.median(away_s):.1f} s, "
        f"max {max(away_s):.1f} s, patience {min(patience):g} to {max(patience):g}"
    )
    if bound_s is None:
        return
    for away in aways:
        if away.is_longer_than(bound_s):
            stages[0].fail(f"I8: {what} for {away.seconds:.1f} s, bound {bound_s * away.patience:.2f} s")
