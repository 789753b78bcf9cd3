"""
Track a batch of fetched records from its STARTs to their delivery reports.

Rule 1: any thread may serve the reports. The receiving thread waits for all of them.
Rule 2: leasing the records of one partition needs no Python code per message.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from confluent_kafka import Message as KafkaMessage

from kmq_spark.consumer.batch import Batch, Part
from kmq_spark.consumer.leases import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kmq_spark.consumer.leases import LeaseTable
    from kmq_spark.errors import KmqError


_PARTITION, _OFFSET = KafkaMessage.partition, KafkaMessage.offset


class StartedBatch:
    """
    Records that were fetched and started together.

    Attributes:
        content: The messages to deliver, in fetch order.
        leases: One lease per queue partition and delivery count.
        first_offsets: First offset by partition; the fetch position returns to it if the START fails.
        next_offsets: Offset after the last record, by partition; the offset to commit.
        byte_count: Bytes of the messages, see `kafka.records.sizes_of`.
        expiring: Indices of the messages in *content* that have a TTL.
        is_suspect: Whether the messages are suspects.
        is_marked: Whether a marker was written for the batch. False if every record was skipped.
        error: The error of a failed START; None if there is none.
    """

    __slots__ = (
        "_lock",
        "_reported",
        "_unreported_count",
        "byte_count",
        "content",
        "error",
        "expiring",
        "first_offsets",
        "is_marked",
        "is_suspect",
        "leases",
        "next_offsets",
    )

    def __init__(self, first_offsets: Mapping[int, int], next_offsets: Mapping[int, int]) -> None:
        """Store the offsets that the batch covers; send nothing."""
        self.content = Batch()
        self.leases: list[Lease] = []
        self.first_offsets = first_offsets
        self.next_offsets = next_offsets
        self.byte_count = 0
        self.expiring: list[int] = []
        self.is_marked = self.is_suspect = False
        self.error: KmqError | None = None
        self._unreported_count = 0
        self._lock = threading.Lock()
        self._reported = threading.Event()

    def expect(self, count: int) -> None:
        """Set the count of STARTs that will be sent."""
        self._unreported_count = count
        self.is_marked = count > 0
        if not count:
            self._reported.set()

    def on_report(self, error: KmqError | None, _appended_at_ms: int = 0) -> None:
        """Handle the delivery report of one START."""
        with self._lock:
            self._unreported_count -= 1
            self.error = self.error or error
            if self._unreported_count == 0:
                self._reported.set()

    def on_report_of(self, lease: Lease) -> Callable[[KmqError | None, int], None]:
        """Return the report callback of a START that covers messages of *lease*."""

        def on_report(error: KmqError | None, appended_at_ms: int) -> None:
            lease.started_at_ms = max(lease.started_at_ms, appended_at_ms)
            self.on_report(error)

        return on_report

    @property
    def is_reported(self) -> bool:
        """Whether the report of every START has arrived."""
        return self._reported.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait for the reports, at most *timeout* seconds; return False on timeout."""
        return self._reported.wait(timeout)

    def drop_expired(self) -> None:
        """Remove and end the messages that had expired when the broker appended their START."""
        expired = {index for index in self.expiring if self.content[index]._expire()}  # noqa: SLF001  # private to the package: not for handlers
        if expired:
            self.content = self.content._drop(expired)  # noqa: SLF001  # as above


class Limits(NamedTuple):
    """
    Limits of one consumer.

    Attributes:
        lease_s: Length of a lease, seconds.
        max_lease_s: Longest total time that keep-alive holds a message, seconds.
        start_timeout_s: Longest time for a START to become durable, seconds.
        max_in_flight: Maximum number of messages held at once.
        max_in_flight_bytes: Maximum bytes of their values, keys and headers. A single message is always allowed.
    """

    lease_s: float
    max_lease_s: float
    start_timeout_s: float
    max_in_flight: int
    max_in_flight_bytes: int


class LeaseParameters:
    """
    Common parameters of leases that begin at the same time.

    Args:
        table: Provides the outboxes.
        now: Monotonic seconds, read before the START is sent. So the lease ends locally before it ends on the broker.
        duration_s: Length of a lease, seconds.
        max_lease_s: Longest total time that keep-alive holds a message, seconds.
    """

    __slots__ = ("duration_s", "max_lease_s", "now", "table")

    def __init__(self, table: LeaseTable, now: float, duration_s: float, max_lease_s: float) -> None:
        """Store the values."""
        self.table = table
        self.now = now
        self.duration_s = duration_s
        self.max_lease_s = max_lease_s

    def lease(self, queue_partition: int, delivery_count: int, offsets: Sequence[int], sizes: list[int]) -> Lease:
        """Return a lease for messages of one queue partition and delivery count. It keeps both."""
        return Lease(
            outbox=self.table.outbox(queue_partition),
            delivery_count=delivery_count,
            held=set(),
            renewed_at=self.now,
            ends_at=self.now + self.duration_s,
            limit_at=self.now + self.max_lease_s,
            duration_s=self.duration_s,
            offsets=offsets,
            sizes=sizes,
            byte_count=sum(sizes),
            is_whole=True,
        )


class KeyRun(NamedTuple):
    """Consecutive records `[begin, end)` of a batch that have the same key."""

    key: int
    begin: int
    end: int


class Columns(NamedTuple):
    """Records as columns: partition, offset and size of each, and the runs of records of one partition."""

    records: list[KafkaMessage]
    partitions: list[Any]
    offsets: Sequence[int]
    sizes: list[int]
    runs: list[KeyRun]


def columns_of(records: list[KafkaMessage], sizes: list[int]) -> Columns:
    """Return the columns of *records*. For *sizes* see `kafka.records.sizes_of`."""
    # `map` with unbound methods of the client costs half as much as a comprehension.
    partitions: list[Any] = list(map(_PARTITION, records))
    runs = runs_of(partitions)
    return Columns(records, partitions, _offsets_of(records, is_one_partition=len(runs) == 1), sizes, runs)


def _offsets_of(records: list[KafkaMessage], *, is_one_partition: bool) -> Sequence[int]:
    """Return the offset of each record. In the common case, one partition without a gap, this is a range."""
    if is_one_partition:
        first: Any = records[0].offset()
        last: Any = records[-1].offset()
        # Offsets ascend within a partition.
        if last - first + 1 == len(records):
            return range(first, last + 1)
    offsets: list[Any] = list(map(_OFFSET, records))
    return offsets


def runs_of(keys: Sequence[int]) -> list[KeyRun]:
    """Return the runs of equal keys, in order. The client returns records grouped by partition, so runs are long."""
    if not keys:
        return []
    if keys.count(keys[0]) == len(keys):
        return [KeyRun(keys[0], 0, len(keys))]
    column = np.asarray(keys)
    begins = [0, *(np.flatnonzero(column[1:] != column[:-1]) + 1).tolist()]
    return [KeyRun(keys[begin], begin, end) for begin, end in pairwise([*begins, len(keys)])]


def offset_bounds(columns: Columns) -> tuple[dict[int, int], dict[int, int]]:
    """Return the first offset and the offset after the last, each by partition. Offsets ascend within a partition."""
    first: dict[int, int] = {}
    next_offsets: dict[int, int] = {}
    for partition, begin, end in columns.runs:
        first.setdefault(partition, columns.offsets[begin])
        next_offsets[partition] = columns.offsets[end - 1] + 1
    return first, next_offsets


def create_leases(
    columns: Columns, counts: Sequence[int] | None, parameters: LeaseParameters
) -> tuple[Batch, list[Lease]]:
    """
    Create leases for records: one per queue partition and delivery count.

    Args:
        columns: Records to deliver.
        counts: Delivery count of each record; None if all are first deliveries.
        parameters: Parameters of the leases.

    Returns:
        The batch of messages, in fetch order, and the leases.
    """
    records, partitions, offsets, sizes, runs = columns
    if counts is not None:
        # Pack both into one key: the partition into the low 16 bits (it has at most 15), the count above them.
        runs = runs_of([(c << 16) | p for p, c in zip(partitions, counts, strict=True)])
    if len(runs) == 1:
        key = runs[0].key
        lease = parameters.lease(key & 0xFFFF, max(1, key >> 16), offsets, sizes)
        return Batch(records, offsets, [Part(lease, 0, len(records))]), [lease]
    parts: dict[int, tuple[list[int], list[int]]] = {}
    for key, begin, end in runs:
        covered, their_sizes = parts.setdefault(key, ([], []))
        covered += offsets[begin:end]
        their_sizes += sizes[begin:end]
    leases = {
        key: parameters.lease(key & 0xFFFF, max(1, key >> 16), covered, their_sizes)
        for key, (covered, their_sizes) in parts.items()
    }
    return Batch(records, offsets, [Part(leases[key], begin, end) for key, begin, end in runs]), list(leases.values())
