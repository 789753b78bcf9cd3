"""
Keep book of the leases that this process holds, and of what was settled and waits for its marker.

Rule 1: monotonic clock, counted from before the START was sent: a lease ends here before it ends on the broker.
Rule 2: settling is one atomic `set.remove`: whoever removes the offset has settled the message, nobody else.
Rule 3: an offset is put into an outbox after its removal and taken out by the marker writer's thread alone.
Rule 4: no Kafka, no logging.

Source: kafka-mq-go `queue/consumer.go`, which keeps one timer a message; here a batch of one partition shares a lease.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

NEVER = float("-inf")
"""An end that is always past: the lease of a message that this process may not settle any more."""


class Verb(Enum):
    """How a message was settled."""

    ACK = "ack"
    RELEASE = "release"
    REJECT = "reject"


class Settled(NamedTuple):
    """A message that was released or rejected and has no marker yet."""

    verb: Verb
    message_offset: int
    delay_ms: int = 0
    reason: str = ""
    never_handed_out: bool = False


class Outbox:
    """
    What was settled on one queue partition and waits for its marker.

    Attributes:
        queue_partition: Queue partition of every offset in it.
        acked: Offsets acknowledged; apart from the others because they are nearly all.
        others: Releases and rejections.
    """

    __slots__ = ("acked", "others", "queue_partition")

    def __init__(self, queue_partition: int) -> None:
        """Start empty."""
        self.queue_partition = queue_partition
        self.acked: list[int] = []
        self.others: list[Settled] = []

    def take_acked(self) -> list[int]:
        """Take the offsets acknowledged so far; threads that append meanwhile append behind them."""
        taken = self.acked[:]
        del self.acked[: len(taken)]
        return taken

    def take_others(self) -> list[Settled]:
        """Take the releases and rejections so far."""
        taken = self.others[:]
        del self.others[: len(taken)]
        return taken


@dataclass(slots=True, eq=False)
class Lease:
    """
    The hold on the messages of one queue partition that were started together.

    Attributes:
        outbox: Where settled messages of this partition go.
        delivery_count: Deliveries of every message, this one included.
        held: Offsets that nobody has settled yet.
        renewed_at: When the START or the last KEEPALIVE was sent, monotonic seconds.
        expires_at: When the lease ends here, monotonic seconds; `NEVER` when it has ended for another reason.
        limit_at: Beyond this it is not renewed, monotonic seconds.
        fate: Why it ended, empty while it is held.
    """

    outbox: Outbox
    delivery_count: int
    held: set[int]
    renewed_at: float
    expires_at: float
    limit_at: float
    fate: str = ""

    @property
    def queue_partition(self) -> int:
        """Queue partition of every message covered."""
        return self.outbox.queue_partition

    def end(self, fate: str) -> None:
        """Say that the lease is over, and why; messages settled later are told so."""
        # The reason first: a thread that sees the end reads it.
        self.fate = fate
        self.expires_at = NEVER

    def take_held(self) -> list[int]:
        """Settle everything that is still held and return it, so that nobody else can."""
        taken = []
        while self.held:
            try:
                taken.append(self.held.pop())
            except KeyError:
                break  # another thread has settled the last one
        return sorted(taken)


class LeaseTable:
    """The open leases and the outboxes of one consumer; safe for many threads."""

    def __init__(self) -> None:
        """Start with nothing held."""
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self._outboxes: dict[int, Outbox] = {}

    def outbox(self, queue_partition: int) -> Outbox:
        """Return the outbox of a queue partition; there is one for ever, so that late settlements find it."""
        with self._lock:
            found = self._outboxes.get(queue_partition)
            if found is None:
                found = self._outboxes[queue_partition] = Outbox(queue_partition)
            return found

    def outboxes(self) -> list[Outbox]:
        """Return all outboxes."""
        with self._lock:
            return list(self._outboxes.values())

    def open(self, leases: Iterable[Lease]) -> None:
        """Take in leases whose START is durable."""
        with self._lock:
            self._leases.update({id(lease): lease for lease in leases})

    def held_count(self) -> int:
        """Return how many messages are held."""
        with self._lock:
            return sum([len(lease.held) for lease in self._leases.values()])

    def open_leases(self) -> list[Lease]:
        """Return the leases that still hold something, and forget the others."""
        with self._lock:
            for key in [key for key, lease in self._leases.items() if not lease.held]:
                del self._leases[key]
            return list(self._leases.values())

    def expire(self, now: float) -> list[Lease]:
        """
        Let go of every lease that has ended.

        Args:
            now: Monotonic seconds.

        Returns:
            The leases that ended while messages were held; a later `ack` of these still writes its END, which wins
            if the tracker has not decided yet.
        """
        ended = [lease for lease in self.open_leases() if lease.expires_at < now]
        with self._lock:
            for lease in ended:
                self._leases.pop(id(lease), None)
        return ended

    def end_all(self, fate: str) -> list[Lease]:
        """End every open lease and return them; their messages are not taken from `held`."""
        with self._lock:
            ended = list(self._leases.values())
            self._leases.clear()
        for lease in ended:
            lease.end(fate)
        return ended

    def after_fork(self) -> None:
        """End every lease in a child process: the thread that writes markers lives in the parent."""
        # A lock that another thread held at the fork would never be free again.
        self._lock = threading.Lock()
        self.end_all("this process is a fork of the one that received it")
