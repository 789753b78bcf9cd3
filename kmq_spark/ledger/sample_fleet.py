"""
Generate the coordination records of the simulated hour: the tracker fleet `production` with two processes.

Rule 1: Both processes are real sessions of the group, on a log in memory and a simulated clock. So they write what a
fleet writes: JOIN, ADD_TASK, ASSIGN, CLAIM, and a heartbeat every T/3. Metadata and snapshots are left out because
they contain instants as epoch milliseconds.
Rule 2: T has its maximum. So 2T, the time after which the other process may claim, is two minutes.
"""

from __future__ import annotations

import contextlib
from math import inf
from typing import TYPE_CHECKING

from kmq_spark.coordination.channel import LoggedBytes
from kmq_spark.coordination.session import Session
from kmq_spark.core.coordination.leader import Duties, sticky_balanced
from kmq_spark.core.coordination.records import MAX_HEARTBEAT_MS, RecordType, fleet_group
from kmq_spark.errors import KafkaClientError
from kmq_spark.wire.coordination_log import GroupLog

if TYPE_CHECKING:
    from kmq_spark.errors import KmqError

FLEET_GROUP = fleet_group("production")
HEARTBEAT_MS = MAX_HEARTBEAT_MS
JOINS_MS = {"host-1": 0, "host-2": 12_000}
"""When each process joins, milliseconds since the beginning of the hour."""

_TURN_MS = 211
"""Time between two turns of a process; a record is read back at the next turn."""


class _Log:
    """The group's partition, and the clock of the broker and of all processes."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.records: list[LoggedBytes] = []


class _Channel:
    """The way of one process to the log."""

    def __init__(self, log: _Log) -> None:
        self.failure: KmqError | None = None
        self.trouble = ""
        self._log, self._next = log, 0

    def read(self, _timeout_s: float) -> list[LoggedBytes]:
        found = self._log.records[self._next :]
        self._next += len(found)
        return found

    def write(self, value: bytes) -> None:
        log = self._log
        log.records.append(LoggedBytes(len(log.records), log.now_ms, FLEET_GROUP.encode(), value))

    def serve(self) -> None:
        pass


class _Process:
    """A process of the fleet: the part of `TrackerFleet` that writes records."""

    def __init__(self, log: _Log, name: str, queue: str) -> None:
        self._queue = queue
        self._session = Session(
            _Channel(log),
            GroupLog(FLEET_GROUP),
            name,
            instance=f"instance-of-{name}",
            join_fields={"heartbeat_ms": HEARTBEAT_MS},
            duties=Duties(sticky_balanced, inf, 0),
            clock_ms=lambda: log.now_ms,
        )
        with contextlib.suppress(KafkaClientError):
            self._session.join(0)

    def turn(self) -> None:
        """Add the queue if the fleet does not have it, claim it if it is assigned to this process."""
        session, queue = self._session, self._queue
        session.turn()
        task = session.world.tasks.get(queue)
        if not session.is_member:
            return
        if task is None:
            session.send(RecordType.ADD_TASK, resource=queue)
        elif task.client_id == session.client_id and queue not in session.claims:
            session.send(RecordType.CLAIM, resource=queue)


def fleet_records(queue: str, *, dies_at_ms: int, end_at_ms: int) -> list[LoggedBytes]:
    """
    Return the records of the fleet's group: one process tracks a queue until it dies, then the other one does.

    Args:
        queue: The only queue of the fleet.
        dies_at_ms: When the first process dies; its claim lapses 2T after its last heartbeat.
        end_at_ms: End of the simulation.

    Returns:
        Records from offset 0 on. All instants are milliseconds since the beginning of the hour.
    """
    log = _Log()
    first, second = JOINS_MS
    processes: dict[str, _Process] = {}
    for log.now_ms in range(0, end_at_ms, _TURN_MS):
        for name, joins_at_ms in JOINS_MS.items():
            if name not in processes and joins_at_ms <= log.now_ms:
                processes[name] = _Process(log, name, queue)
        if log.now_ms < dies_at_ms:
            processes[first].turn()
        if second in processes:
            processes[second].turn()
    return log.records
