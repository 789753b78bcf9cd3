"""
Messages that were fetched together, from their START to its report.

Rule 1: reports may come from any thread; the receiving thread waits for all of them.
Rule 2: putting records of one partition under a lease costs no Python step a message beyond the message itself.
"""

from __future__ import annotations

import threading
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from confluent_kafka import Message as KafkaMessage

from kmq_spark.consumer.leases import Lease
from kmq_spark.consumer.message import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kmq_spark.consumer.leases import LeaseTable
    from kmq_spark.errors import KmqError


_PARTITION, _OFFSET, _KEY = KafkaMessage.partition, KafkaMessage.offset, KafkaMessage.key


class Batch:
    """
    Records that were fetched together, from their START on.

    Attributes:
        messages: Those to be handed out, in the order in which they were fetched.
        leases: One for each queue partition and delivery count.
        first_offsets: By partition, where to seek back to.
        next_offsets: By partition, what to commit.
        byte_count: Bytes of the messages, see `sizes_of`.
        expiring: Those of the messages that have a time to live.
        is_suspect: Whether its messages are suspects.
        is_marked: Whether anything was written for it; nothing is where every record was passed over.
        error: Why the START failed.
    """

    __slots__ = (
        "_left",
        "_lock",
        "_reported",
        "byte_count",
        "error",
        "expiring",
        "first_offsets",
        "is_marked",
        "is_suspect",
        "leases",
        "messages",
        "next_offsets",
    )

    def __init__(self, first_offsets: Mapping[int, int], next_offsets: Mapping[int, int]) -> None:
        """Take the place that it covers; nothing is sent yet."""
        self.messages: list[Message] = []
        self.leases: list[Lease] = []
        self.first_offsets = first_offsets
        self.next_offsets = next_offsets
        self.byte_count = 0
        self.expiring: list[Message] = []
        self.is_marked = self.is_suspect = False
        self.error: KmqError | None = None
        self._left = 0
        self._lock = threading.Lock()
        self._reported = threading.Event()

    def expect(self, count: int) -> None:
        """Say how many STARTs are about to be sent."""
        self._left = count
        self.is_marked = count > 0
        if not count:
            self._reported.set()

    def on_report(self, error: KmqError | None, _appended_at_ms: int = 0) -> None:
        """Take the report of one START."""
        with self._lock:
            self._left -= 1
            self.error = self.error or error
            if self._left == 0:
                self._reported.set()

    def on_report_of(self, lease: Lease) -> Callable[[KmqError | None, int], None]:
        """Return what takes the report of a START that covers messages of a lease."""

        def on_report(error: KmqError | None, appended_at_ms: int) -> None:
            lease.started_at_ms = max(lease.started_at_ms, appended_at_ms)
            self.on_report(error)

        return on_report

    @property
    def is_reported(self) -> bool:
        """Whether every START has its report."""
        return self._reported.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait for the reports; False where they did not come in time."""
        return self._reported.wait(timeout)

    def drop_expired(self) -> None:
        """End the messages whose time was over when the broker appended their START; they are not handed out."""
        expired = {id(message) for message in self.expiring if message._expire()}  # noqa: SLF001  # private to the package: not for handlers
        if expired:
            self.messages = [message for message in self.messages if id(message) not in expired]


class Limits(NamedTuple):
    """
    What holds for all that an intake hands out.

    Attributes:
        lease_s: Length of a lease, seconds.
        max_lease_s: How long a message may be held altogether, seconds.
        start_timeout_s: How long a START may take, seconds.
        max_in_flight: Most messages held.
        max_in_flight_bytes: Most bytes of their values, keys and headers; one message may always be held.
    """

    lease_s: float
    max_lease_s: float
    start_timeout_s: float
    max_in_flight: int
    max_in_flight_bytes: int


class Terms:
    """
    What holds for leases that begin now.

    Args:
        table: Where their outboxes are.
        now: Monotonic seconds; before the START is sent, so that the lease ends here before it ends on the broker.
        duration_s: Length of a lease, seconds.
        max_lease_s: How long a message may be held altogether, seconds.
    """

    __slots__ = ("duration_s", "max_lease_s", "now", "table")

    def __init__(self, table: LeaseTable, now: float, duration_s: float, max_lease_s: float) -> None:
        """Take the values."""
        self.table = table
        self.now = now
        self.duration_s = duration_s
        self.max_lease_s = max_lease_s

    def lease(self, queue_partition: int, delivery_count: int, offsets: list[int], sizes: list[int]) -> Lease:
        """Return a lease on messages of one queue partition and delivery count."""
        return Lease(
            outbox=self.table.outbox(queue_partition),
            delivery_count=delivery_count,
            held=set(offsets),
            renewed_at=self.now,
            expires_at=self.now + self.duration_s,
            limit_at=self.now + self.max_lease_s,
            duration_s=self.duration_s,
            offsets=offsets,
            sizes=sizes,
            byte_count=sum(sizes),
        )


class Run(NamedTuple):
    """Neighbours `[begin, end)` among the records of a batch that have a key in common."""

    key: int
    begin: int
    end: int


def sizes_of(records: list[KafkaMessage], headers: Sequence[Any]) -> list[int]:
    """
    Return how many bytes records hold in memory: of their values, keys and headers.

    Args:
        records: As they were fetched.
        headers: Of each of them, None for none.
    """
    sizes = list(map(len, records))
    # Looked at only where there are any: this is done for each message.
    keys: list[Any] = list(map(_KEY, records))
    if any(keys):
        sizes = [size + len(key or b"") for size, key in zip(sizes, keys, strict=True)]
    if any(headers):
        sizes = [size + _header_bytes(each) for size, each in zip(sizes, headers, strict=True)]
    return sizes


def _header_bytes(headers: Sequence[tuple[str, bytes | None]] | None) -> int:
    return sum([len(name) + len(value or b"") for name, value in headers or ()])


class Columns(NamedTuple):
    """Records, what is asked of each of them, and where their partition changes."""

    records: list[KafkaMessage]
    partitions: list[Any]
    offsets: list[Any]
    sizes: list[int]
    runs: list[Run]


def columns_of(records: list[KafkaMessage], sizes: list[int]) -> Columns:
    """Return records with their partitions, their offsets and their sizes, see `sizes_of`."""
    # `map` over the client's own methods: half of what a comprehension with a call costs.
    partitions: list[Any] = list(map(_PARTITION, records))
    return Columns(records, partitions, list(map(_OFFSET, records)), sizes, runs_of(partitions))


def runs_of(keys: Sequence[int]) -> list[Run]:
    """Return the neighbours of one key, in their order: a client gives what it fetched partition by partition."""
    if not keys:
        return []
    if len(set(keys)) == 1:
        return [Run(keys[0], 0, len(keys))]
    column = np.asarray(keys)
    begins = [0, *(np.flatnonzero(column[1:] != column[:-1]) + 1).tolist()]
    return [Run(keys[begin], begin, end) for begin, end in pairwise([*begins, len(keys)])]


def place_of(columns: Columns) -> tuple[dict[int, int], dict[int, int]]:
    """Return the first offset of records, in order within each partition, and the one behind the last, by partition."""
    first: dict[int, int] = {}
    following: dict[int, int] = {}
    for partition, begin, end in columns.runs:
        first.setdefault(partition, columns.offsets[begin])
        following[partition] = columns.offsets[end - 1] + 1
    return first, following


def lease_out(columns: Columns, counts: Sequence[int] | None, terms: Terms) -> tuple[list[Message], list[Lease]]:
    """
    Put records under leases, one for each queue partition and delivery count.

    Args:
        columns: Records to be handed out.
        counts: Delivery count of each; None where all are first deliveries.
        terms: Of the leases.

    Returns:
        The messages, in the order in which they were fetched, and the leases.
    """
    records, partitions, offsets, sizes, runs = columns
    if counts is not None:
        # One number for both: a partition takes 15 bits, a count the rest.
        runs = runs_of([(c << 16) | p for p, c in zip(partitions, counts, strict=True)])
    parts: dict[int, tuple[list[int], list[int]]] = {}
    for key, begin, end in runs:
        covered, their_sizes = parts.setdefault(key, ([], []))
        covered += offsets[begin:end]
        their_sizes += sizes[begin:end]
    leases = {
        key: terms.lease(key & 0xFFFF, max(1, key >> 16), covered, their_sizes)
        for key, (covered, their_sizes) in parts.items()
    }
    messages: list[Message] = []
    for key, begin, end in runs:
        messages += map(Message, records[begin:end], offsets[begin:end], repeat(leases[key]))
    return messages, list(leases.values())
