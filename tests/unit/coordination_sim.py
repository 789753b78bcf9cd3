"""
Members of one group with clocks, delays, pauses and crashes, around one log: who acts on what, at any instant.

Rule 1: true time is the simulation's. Members see their own monotonic clocks, records the broker's clock, and the two
have nothing in common.
Rule 2: a record is sent, appended some time later, and read by each member some time after that, in order. What a
member has sent may be appended while it is suspended, or after it was killed.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kmq_spark.core.coordination.effects import Change
from kmq_spark.core.coordination.fold import apply
from kmq_spark.core.coordination.holds import Holds
from kmq_spark.core.coordination.records import Record, RecordType
from kmq_spark.core.coordination.world import World
from tests.unit.coordination_story import facts

T = 1_000


class Process:
    """One instance of a member; *world* is as far as it has read, *on_the_way* is sent and not appended."""

    def __init__(self, client_id: str, number: int, clock_ahead_ms: float) -> None:
        self.client_id, self.instance = client_id, f"{client_id}{number}"
        self.clock_ahead_ms = clock_ahead_ms
        self.world, self.sequence = World(), 0
        self.holds = Holds()
        self.on_the_way: deque[Record] = deque()
        self.is_dead = False

    def claimed(self, resource: str) -> int | None:
        """Return the epoch under which this instance holds a resource, as far as it has read."""
        member, claim = self.world.members.get(self.client_id), self.world.resources.get(resource)
        is_known = member is not None and member.instance == self.instance
        return claim.epoch if is_known and claim is not None and claim.holder == self.client_id else None

    def epoch_of(self, resource: str, now_ms: float) -> int | None:
        """Return the epoch under which it may act on a resource, by its own clock; None where it may not."""
        return self.claimed(resource) if now_ms < self.holds.until_ms(self.world.heartbeat_ms) else None


class Simulation:
    """The group; *now_ms* is true time, *world* that of a reader that is always up to date."""

    def __init__(self) -> None:
        self.now_ms, self.broker_ahead_ms = 0.0, 1_000_000
        self.log: list[tuple[int, Record | None]] = []
        self.world = World()
        self.running: dict[str, Process] = {}
        self.gone: list[Process] = []
        self.epochs: dict[str, int] = {}
        self.instances = 0

    def start(self, client_id: str, *, fast_reclaim: bool = False) -> Process:
        """Start an instance of a client id; it sends a JOIN. The one before must be dead."""
        before = self.running.get(client_id)
        if before is not None:
            assert before.is_dead
            self.gone.append(before)
        self.instances += 1
        process = self.running[client_id] = Process(client_id, self.instances, 7_000.0 * self.instances)
        self.send(process, RecordType.JOIN, heartbeat_ms=T, fast_reclaim=fast_reclaim)
        return process

    def send(self, process: Process, kind: RecordType, **fields: Any) -> None:
        """Let a process send a record."""
        process.sequence += 1
        process.holds.note_sent(process.sequence, self.now_ms + process.clock_ahead_ms)
        process.on_the_way.append(Record(kind, process.client_id, process.instance, process.sequence, **fields))

    def append(self, record: Record | None) -> None:
        """Append a record to the log."""
        append_time_ms = max(0, int(self.now_ms + self.broker_ahead_ms))
        for effect in apply(self.world, len(self.log), append_time_ms, record).effects:
            if effect.change is Change.CLAIMED:
                assert effect.epoch > self.epochs.get(effect.resource, -1)
                self.epochs[effect.resource] = effect.epoch
        self.log.append((append_time_ms, record))

    def deliver(self, process: Process, count: int = 1) -> None:
        """Append the oldest records that a process has sent, alive or not."""
        for _ in range(min(count, len(process.on_the_way))):
            self.append(process.on_the_way.popleft())

    def read(self, process: Process, count: int = 1_000_000) -> None:
        """Let a process read on."""
        start = process.world.next_offset
        for offset in range(start, min(len(self.log), start + count)):
            append_time_ms, record = self.log[offset]
            applied = apply(process.world, offset, append_time_ms, record)
            if record is not None and record.instance == process.instance:
                process.holds.note_read(record.sequence, refreshed=applied.refreshed)
        if process.world.next_offset == len(self.log):
            assert facts(process.world) == facts(self.world)

    def settle(self, process: Process) -> None:
        """Deliver and read everything of a process."""
        self.deliver(process, len(process.on_the_way))
        self.read(process)

    def claim(self, process: Process, resource: str = "r") -> None:
        """Send a CLAIM and read the answer."""
        self.send(process, RecordType.CLAIM, resource=resource)
        self.settle(process)

    def live(self, process: Process, rounds: int, passed_ms: int = T // 3) -> None:
        """Let a process heartbeat every T/3, without delay."""
        for _ in range(rounds):
            self.now_ms += passed_ms
            self.send(process, RecordType.HEARTBEAT)
            self.settle(process)

    def owners(self, resource: str) -> list[tuple[str, int]]:
        """Return instance and epoch of every process that acts on a resource now, by its own clock and world."""
        found = []
        for process in [*self.running.values(), *self.gone]:
            now_ms = self.now_ms + process.clock_ahead_ms
            epoch = None if process.is_dead else process.epoch_of(resource, now_ms)
            if epoch is not None:
                found.append((process.instance, epoch))
        return found

    def state(self) -> tuple[object, ...]:
        """Return what all further steps depend on."""
        records = [record and (record.type, record.instance, record.sequence) for _, record in self.log]
        processes = [
            (
                process.instance,
                process.sequence,
                process.world.next_offset,
                [record.sequence for record in process.on_the_way],
                process.holds.until_ms(T),
                list(process.holds._sent),
            )
            for process in self.running.values()
        ]
        return (self.now_ms, str([at_ms for at_ms, _ in self.log]), str(records), str(processes))
