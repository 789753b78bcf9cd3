"""
Messages that were fetched together, from their START to its report.

Rule 1: reports may come from any thread; the receiving thread waits for all of them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmq_spark.errors import KmqError
    from kmq_spark.kafka.leases import Lease
    from kmq_spark.kafka.message import Message


class Batch:
    """
    Messages that were fetched together, from their START on.

    Attributes:
        messages: In the order in which they were fetched.
        leases: One for each queue partition and delivery count.
        first_offsets: By partition, where to seek back to.
        next_offsets: By partition, what to commit.
        error: Why the START failed.
    """

    __slots__ = ("_left", "_lock", "_reported", "error", "first_offsets", "leases", "messages", "next_offsets")

    def __init__(self, messages: list[Message], leases: list[Lease]) -> None:
        """Take the messages; nothing is sent yet."""
        self.messages = messages
        self.leases = leases
        self.first_offsets: dict[int, int] = {}
        self.next_offsets: dict[int, int] = {}
        self.error: KmqError | None = None
        self._left = 0
        self._lock = threading.Lock()
        self._reported = threading.Event()
        for lease in leases:
            partition, first, last = lease.queue_partition, min(lease.held), max(lease.held)
            self.first_offsets[partition] = min(first, self.first_offsets.get(partition, first))
            self.next_offsets[partition] = max(last + 1, self.next_offsets.get(partition, 0))

    def expect(self, count: int) -> None:
        """Say how many STARTs are about to be sent."""
        self._left = count

    def on_report(self, error: KmqError | None) -> None:
        """Take the report of one START."""
        with self._lock:
            self._left -= 1
            self.error = self.error or error
            if self._left == 0:
                self._reported.set()

    @property
    def is_reported(self) -> bool:
        """Whether every START has its report."""
        return self._reported.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait for the reports; False where they did not come in time."""
        return self._reported.wait(timeout)
