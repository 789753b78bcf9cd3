"""
The leases that this process holds, and the settled messages whose marker is not written yet.

Rule 1: lease times use a monotonic clock that runs while the host sleeps, read before the START is sent. So a lease
ends locally before it ends on the broker. What must not be done twice is judged by the broker's clock: `ends_at_ms`.
Rule 2: settling a message is one atomic `set.remove`. Only the thread that removes the offset has settled the message.
The set is filled when a message is asked for. Until then the lease is *whole*: its messages can be settled together.
Rule 3: an offset is added to an outbox after this removal. Only the marker writer's thread takes it out.

Source: kafka-mq-go `queue/consumer.go`, which has one timer per message. Here the messages of one partition in a batch
share a lease.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass, field
from enum import Enum
from itertools import compress, repeat
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kmq_spark.core.markers import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kmq_spark.kafka.serializers import Deserializer

Item = TypeVar("Item")

ENDED = float("-inf")
"""A lease end that is always in the past: this process may no longer settle the messages of the lease."""


class Verb(Enum):
    """How a message was settled."""

    ACK = "ack"
    RELEASE = "release"
    REJECT = "reject"
    EXPIRE = "expire"
    """Its TTL expired before it could be delivered."""


class Settled(NamedTuple):
    """A message that was settled in another way than by `ack` and has no marker yet."""

    verb: Verb
    message_offset: int
    delay_ms: int = 0
    reason: str = ""
    never_handed_out: bool = False
    has_failed: bool = False


class Outbox:
    """
    Settled messages of one queue partition whose marker is not written yet.

    `acked`: one by one; separate from `others`, because nearly all messages are acknowledged. `acked_ranges`: together,
    without gaps. `extended`: leases that `extend` gave another length.
    """

    __slots__ = ("acked", "acked_ranges", "extended", "others", "queue_partition", "table")

    def __init__(self, queue_partition: int, table: LeaseTable | None = None) -> None:
        self.queue_partition = queue_partition
        self.table = table
        self.acked: list[int] = []
        self.acked_ranges: list[OffsetRange] = []
        self.others: list[Settled] = []
        self.extended: list[Lease] = []

    def ack_together(self, offsets: Sequence[int]) -> None:
        """Add acknowledged offsets, ascending, as one range if there is no gap."""
        if offsets and offsets[-1] - offsets[0] + 1 == len(offsets):
            self.acked_ranges.append(OffsetRange(offsets[0], len(offsets)))
        else:
            self.acked.extend(offsets)

    @staticmethod
    def take(items: list[Item]) -> list[Item]:
        """Take out what one of the lists has now. Other threads may append at the same time; their items stay."""
        taken = items[:]
        del items[: len(taken)]
        return taken


@dataclass(slots=True, eq=False, weakref_slot=True)
class Lease:
    """
    Lease on the messages of one queue partition that were started together.

    Attributes:
        held: Offsets that are not settled yet; empty while the lease is whole.
        is_whole: Whether all of *offsets* are held, and none was asked for as a single message.
        renewed_at: When the START or the last KEEPALIVE was sent, monotonic seconds.
        ends_at: When the lease ends locally, monotonic seconds; `ENDED` if it has ended for another reason.
        limit_at: Keep-alive does not renew the lease beyond this time, monotonic seconds.
        sizes: Bytes of value, key and headers of each message; *byte_count* is their sum.
        started_at_ms: Append time of its START, epoch milliseconds, broker clock; 0 if unknown.
        ends_at_ms: When it ends by the append times of its START and KEEPALIVEs: what stands in the log before has not
            been redelivered.
        is_unconfirmed: Whether its partition went to another consumer, without an offset after its messages.
    """

    outbox: Outbox
    delivery_count: int
    held: set[int]
    renewed_at: float
    ends_at: float
    limit_at: float
    duration_s: float = 30.0
    offsets: Sequence[int] = ()
    sizes: Sequence[int] = ()
    byte_count: int = 0
    started_at_ms: int = 0
    ends_at_ms: int = 0
    end_reason: str = ""
    is_whole: bool = False
    is_unconfirmed: bool = False
    # Reentrant: a signal handler may settle messages while its thread is in a method of the lease.
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)

    @property
    def held_count(self) -> int:
        """Count of messages that are not settled yet."""
        return len(self.offsets) if self.is_whole else len(self.held)

    @property
    def queue_partition(self) -> int:
        """Queue partition of every message of the lease."""
        return self.outbox.queue_partition

    @property
    def held_bytes(self) -> int:
        """Bytes of the messages that are still held."""
        held = set(self.held_offsets())
        if len(held) == len(self.offsets):
            return self.byte_count
        return sum(compress(self.sizes, map(held.__contains__, self.offsets)))

    def held_offsets(self) -> list[int]:
        """Return the offsets that are not settled yet, in any order."""
        return list(self.offsets) if self.is_whole else list(self.held)

    def split(self) -> None:
        """Fill `held`, so that messages can be settled one by one. Does nothing if the lease is not whole."""
        if self.is_whole:
            with self._lock:
                if self.is_whole:
                    # In this order: another thread never sees a lease that is neither whole nor holds its messages.
                    self.held.update(self.offsets)
                    if not self.is_whole:
                        self.held.clear()  # a signal handler has taken them
                    self.is_whole = False

    def for_one(self, message_offset: int, duration_s: float, now: float) -> Lease:
        """
        Return a new, open lease of another length for one of the messages.

        Both leases hold the message until the caller removes it from this one. Until its KEEPALIVE is durable, the new
        one ends no later than this one.
        """
        size = self.sizes[self.offsets.index(message_offset)]
        extended = Lease(
            outbox=self.outbox,
            delivery_count=self.delivery_count,
            held={message_offset},
            renewed_at=now,
            ends_at=min(self.ends_at, now + duration_s),
            limit_at=self.limit_at,
            duration_s=duration_s,
            offsets=(message_offset,),
            sizes=(size,),
            byte_count=size,
            started_at_ms=self.started_at_ms,
            ends_at_ms=self.ends_at_ms,
            is_unconfirmed=self.is_unconfirmed,
        )
        if self.outbox.table is not None:
            self.outbox.table.open([extended])
        return extended

    def end(self, reason: str) -> None:
        """End the lease. A later settlement of its messages raises an error that contains *reason*."""
        # Set the reason first: another thread reads it as soon as it sees the end.
        self.end_reason = reason
        self.ends_at = ENDED

    def take_held(self) -> Sequence[int]:
        """Remove all held offsets and return them, ascending. No other thread can settle these messages afterwards."""
        with self._lock:
            if self.is_whole:
                self.is_whole = False
                self.held.clear()  # if this is a signal handler during `split`
                return self.offsets
        taken: list[int] = []
        held = self.held
        while held:
            # No Python code per message. An exception in `extend` keeps what was taken before.
            with contextlib.suppress(KeyError):  # another thread has settled the last one
                taken.extend(map(set.pop, repeat(held, len(held))))
        return sorted(taken)

    def take(self, offsets: Sequence[int]) -> Sequence[int]:
        """Remove and return those of *offsets* that are held. No other thread can settle these messages afterwards."""
        if len(offsets) == len(self.offsets):
            return self.take_held()
        self.split()
        taken = []
        for offset in offsets:
            try:
                self.held.remove(offset)
            except KeyError:
                continue
            taken.append(offset)
        return taken


class LeaseTable:
    """
    The open leases and the outboxes of one consumer. Thread-safe. *now* is in monotonic seconds.

    *deserializer* reads the values of its messages; None if it has none.
    """

    def __init__(self, deserializer: Deserializer | None = None) -> None:
        self.deserializer = deserializer
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self._outboxes: dict[int, Outbox] = {}
        # Those that ended while messages were held, as long as somebody has one of these.
        self._over: weakref.WeakSet[Lease] = weakref.WeakSet()

    def outbox(self, queue_partition: int) -> Outbox:
        """Return the outbox of a queue partition. It is never removed, so that late settlements can use it."""
        with self._lock:
            found = self._outboxes.get(queue_partition)
            if found is None:
                found = self._outboxes[queue_partition] = Outbox(queue_partition, self)
            return found

    def outboxes(self) -> list[Outbox]:
        """Return all outboxes."""
        with self._lock:
            return list(self._outboxes.values())

    def note_unconfirmed(self, confirmed: Mapping[int, int]) -> None:
        """Note the leases on messages that another consumer fetches again: from the offset on, by partition."""
        with self._lock:
            for lease in self._leases.values():
                if lease.offsets[-1] >= confirmed.get(lease.queue_partition, lease.offsets[-1] + 1):
                    lease.is_unconfirmed = True

    def open(self, leases: Iterable[Lease]) -> None:
        """Add leases whose START is durable."""
        with self._lock:
            self._leases.update({id(lease): lease for lease in leases})

    def held_count(self, now: float) -> int:
        """Return how many messages are held. A lease that has ended holds no message."""
        return sum([lease.held_count for lease in self._held(now)])

    def held_bytes_bound(self, now: float) -> int:
        """Return the bytes of all messages of the leases that hold one; `held_bytes` costs more."""
        return sum([lease.byte_count for lease in self._held(now)])

    def held_bytes(self, now: float) -> int:
        """Return the bytes of the held messages: values, keys and headers."""
        return sum([lease.held_bytes for lease in self._held(now)])

    def open_leases(self) -> list[Lease]:
        """Return the leases that still hold messages, and remove the others from the table."""
        with self._lock:
            for key in [key for key, lease in self._leases.items() if not lease.held_count]:
                del self._leases[key]
            return list(self._leases.values())

    def remove_ended(self, now: float) -> list[Lease]:
        """
        Remove every lease that has ended, and return those that ended while messages were held.

        A later `ack` of such a message still writes its END, which takes effect if the tracker has not decided the
        message yet.
        """
        ended = [lease for lease in self.open_leases() if lease.ends_at < now]
        with self._lock:
            for lease in ended:
                self._leases.pop(id(lease), None)
                self._over.add(lease)
        return ended

    def hung_count(self, now: float) -> int:
        """Return how many messages were not settled before the limit of their lease, and are not settled yet."""
        with self._lock:
            return sum([lease.held_count for lease in self._over if lease.limit_at < now and not lease.end_reason])

    def end_all(self, reason: str) -> list[Lease]:
        """End every open lease and return them. Their messages stay held."""
        with self._lock:
            ended = list(self._leases.values())
            self._leases.clear()
        for lease in ended:
            lease.end(reason)
        return ended

    def _held(self, now: float) -> list[Lease]:
        with self._lock:
            # Ended leases stay in the table until the next `remove_ended`, which the marker writer may call late.
            return [lease for lease in self._leases.values() if lease.held_count and lease.ends_at >= now]
