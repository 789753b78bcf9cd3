"""A partition of the coordination topic in memory, with a clock that a test moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.coordination import session as session_module
from kmq_spark.coordination.channel import LoggedBytes
from kmq_spark.coordination.session import Session
from kmq_spark.core.coordination.leader import Duties, sticky_balanced
from kmq_spark.core.coordination.records import RecordType
from kmq_spark.errors import KafkaClientError
from kmq_spark.wire.coordination_log import GroupLog

if TYPE_CHECKING:
    from kmq_spark.coordination.claim import Claim
    from kmq_spark.core.coordination.effects import Applied
    from kmq_spark.errors import KmqError

JOIN = session_module._JOIN
T = 1_000
GROUP = "fleet"


class Partition:
    """The log; *now_ms* is the clock of every member, and the broker's clock is *ahead_ms* of it."""

    def __init__(self) -> None:
        self.now_ms, self.ahead_ms = 10_000_000.0, 0
        self.records: list[LoggedBytes] = []

    def append(self, value: bytes, key: bytes = GROUP.encode()) -> None:
        """Append a record."""
        self.records.append(LoggedBytes(len(self.records), int(self.now_ms) + self.ahead_ms, key, value))


class MemoryChannel:
    """The way of one member to the log; what is written while *can_write* is False is kept."""

    def __init__(self, partition: Partition) -> None:
        self.failure: KmqError | None = None
        self.trouble = ""
        self.can_read = self.can_write = True
        self._partition, self._next = partition, 0
        self._kept: list[bytes] = []

    def read(self, timeout_s: float) -> list[LoggedBytes]:
        """Return what was not read yet; never waits."""
        del timeout_s
        if not self.can_read:
            return []
        found = self._partition.records[self._next :]
        self._next += len(found)
        return found

    def write(self, value: bytes) -> None:
        """Append, now or later."""
        self._kept.append(value)
        self.serve()

    def serve(self) -> None:
        """Append what was kept."""
        while self.can_write and self._kept:
            self._partition.append(self._kept.pop(0))

    @property
    def has_kept(self) -> bool:
        """Whether something was written and not appended."""
        return bool(self._kept)

    def lose(self) -> None:
        """Give up what was kept, as Kafka's client does after its time-out."""
        self._kept.clear()


class Process:
    """A session, and what it has reported."""

    def __init__(self, partition: Partition, client_id: str, number: int = 1, **join_fields: Any) -> None:
        self.channel = MemoryChannel(partition)
        self.duties = Duties(sticky_balanced, 60 * T)
        self.session = Session(
            self.channel,
            GroupLog(GROUP),
            client_id,
            instance=f"{client_id}{number}",
            join_fields={"heartbeat_ms": T, **join_fields},
            duties=self.duties,
            clock_ms=lambda: partition.now_ms,
        )

    def send_join(self) -> None:
        """Send a JOIN; nobody reads the answer yet."""
        with pytest.raises(KafkaClientError, match="JOIN was not read back"):
            self.session.join(0)

    def join(self) -> Applied:
        """Join, and read the answer."""
        self.send_join()
        return self.said(JOIN)

    def said(self, sequence: int) -> Applied:
        """Read on, and return the answer to a record that was sent."""
        self.session._given_up.clear()
        self.session._answers[sequence] = None
        self.session.turn()
        applied = self.session._answers.pop(sequence)
        assert applied is not None
        return applied

    def claim(self, resource: str = "r") -> Claim | None:
        """Claim, and read the answer."""
        self.said(self.session.send(RecordType.CLAIM, resource=resource))
        return self.session.claims.get(resource)

    def held(self, resource: str = "r") -> Claim:
        """Claim what is free, and return the claim."""
        claim = self.claim(resource)
        assert claim is not None
        return claim


def pass_time(partition: Partition, passed_ms: float, *processes: Process) -> None:
    """Let time pass in steps of T/20, with turns of those that are alive."""
    until_ms = partition.now_ms + passed_ms
    while partition.now_ms < until_ms:
        partition.now_ms = min(until_ms, partition.now_ms + T / 20)
        for process in processes:
            process.session.turn()
            process.session.assign_tasks(0)
