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

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NEVER = float("-inf")
"""An end that is always past: the lease of a message that this process may not settle any more."""


class Verb(Enum):
    """How a message was settled."""

    ACK = "ack"
    RELEASE = "release"
    REJECT = "reject"
    EXPIRE = "expire"
    """Its time to live was over before it could be handed out."""


class Settled(NamedTuple):
    """A message that was settled otherwise than by `ack` and has no marker yet."""

    verb: Verb
    message_offset: int
    delay_ms: int = 0
    reason: str = ""
    never_handed_out: bool = False
    has_failed: bool = False


class Outbox:
    """
    What was settled on one queue partition and waits for its marker.

    Attributes:
        queue_partition: Queue partition of every offset in it.
        acked: Offsets acknowledged; apart from the others because they are nearly all.
        others: Releases, rejections, expiries.
        extended: Leases of one message that was given another length, and whose KEEPALIVE is not written.
    """

    __slots__ = ("acked", "extended", "others", "queue_partition", "table")

    def __init__(self, queue_partition: int, table: LeaseTable | None = None) -> None:
        """Start empty."""
        self.queue_partition = queue_partition
        self.table = table
        self.acked: list[int] = []
        self.others: list[Settled] = []
        self.extended: list[Lease] = []

    def take_acked(self) -> list[int]:
        """Take the offsets acknowledged so far; threads that append meanwhile append behind them."""
        taken = self.acked[:]
        del self.acked[: len(taken)]
        return taken

    def take_others(self) -> list[Settled]:
        """Take the releases, rejections and expiries so far."""
        taken = self.others[:]
        del self.others[: len(taken)]
        return taken

    def take_extended(self) -> list[Lease]:
        """Take the leases extended so far."""
        taken = self.extended[:]
        del self.extended[: len(taken)]
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
        duration_s: How long it holds from its START or a KEEPALIVE on, seconds.
        offsets: Offsets of every message started with it.
        sizes: Bytes of each, of its value, key and headers.
        byte_count: The sum of these.
        started_at_ms: Append time of its START, epoch milliseconds, broker clock; 0 where it is not known.
        fate: Why it ended, empty while it is held.
    """

    outbox: Outbox
    delivery_count: int
    held: set[int]
    renewed_at: float
    expires_at: float
    limit_at: float
    duration_s: float = 30.0
    offsets: Sequence[int] = ()
    sizes: Sequence[int] = ()
    byte_count: int = 0
    started_at_ms: int = 0
    fate: str = ""

    @property
    def queue_partition(self) -> int:
        """Queue partition of every message covered."""
        return self.outbox.queue_partition

    @property
    def held_bytes(self) -> int:
        """Bytes of the messages that are held."""
        held = list(self.held)
        if len(held) == len(self.offsets):
            return self.byte_count
        return int(np.asarray(self.sizes, np.int64)[np.isin(self.offsets, held)].sum())

    def for_one(self, message_offset: int, duration_s: float, now: float) -> Lease:
        """
        Return a lease of another length on one of the messages, held by both until it is taken out of this one.

        Args:
            message_offset: The message.
            duration_s: Length of the new lease, seconds.
            now: When it begins, monotonic seconds; until its KEEPALIVE is durable it ends with the old one.
        """
        size = self.sizes[self.offsets.index(message_offset)]
        extended = Lease(
            outbox=self.outbox,
            delivery_count=self.delivery_count,
            held={message_offset},
            renewed_at=now,
            expires_at=min(self.expires_at, now + duration_s),
            limit_at=self.limit_at,
            duration_s=duration_s,
            offsets=(message_offset,),
            sizes=(size,),
            byte_count=size,
            started_at_ms=self.started_at_ms,
        )
        if self.outbox.table is not None:
            self.outbox.table.open([extended])
        return extended

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
                found = self._outboxes[queue_partition] = Outbox(queue_partition, self)
            return found

    def outboxes(self) -> list[Outbox]:
        """Return all outboxes."""
        with self._lock:
            return list(self._outboxes.values())

    def open(self, leases: Iterable[Lease]) -> None:
        """Take in leases whose START is durable."""
        with self._lock:
            self._leases.update({id(lease): lease for lease in leases})

    def held_count(self, now: float) -> int:
        """Return how many messages are held *now*, monotonic seconds; a lease that has ended holds nothing."""
        return sum([len(lease.held) for lease in self._held(now)])

    def held_bytes_bound(self, now: float) -> int:
        """Return an upper bound of `held_bytes` that costs nothing a message."""
        return sum([lease.byte_count for lease in self._held(now)])

    def held_bytes(self, now: float) -> int:
        """Return how many bytes the messages have that are held *now*, monotonic seconds."""
        return sum([lease.held_bytes for lease in self._held(now)])

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

    def _held(self, now: float) -> list[Lease]:
        with self._lock:
            # Ended ones stay in the table until the next `expire`, which is a sweep's business and may be late.
            return [lease for lease in self._leases.values() if lease.held and lease.expires_at >= now]

    def after_fork(self) -> None:
        """End every lease in a child process: the thread that writes markers lives in the parent."""
        # A lock that another thread held at the fork would never be free again.
        self._lock = threading.Lock()
        self.end_all("this process is a fork of the one that received it")
