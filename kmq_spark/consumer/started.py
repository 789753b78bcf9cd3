"""
A batch of records that were fetched and started together, from its STARTs to their delivery reports.

Rule 1: any thread may serve the reports. The receiving thread waits for all of them.
Rule 2: the leases are open from the last report on, whether the batch is handed out or waits.
Rule 3: leasing the records of one partition needs no Python code per message.
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import compress, count, islice, pairwise
from operator import ne
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Message as KafkaMessage

from kmq_spark.consumer.batch import Batch, Part
from kmq_spark.consumer.leases import Lease, Settled, Verb

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kmq_spark.consumer.leases import LeaseTable
    from kmq_spark.errors import KmqError

NOT_HANDED_OUT = "it was never handed out"

_PARTITION, _OFFSET = KafkaMessage.partition, KafkaMessage.offset


class Columns(NamedTuple):
    """Records as columns: partition, offset and size of each, and the runs of records of one partition."""

    records: list[KafkaMessage]
    partitions: list[Any]
    offsets: Sequence[int]
    sizes: list[int]
    runs: list[KeyRun]


class KeyRun(NamedTuple):
    """Consecutive records `[begin, end)` of a batch that have the same key."""

    key: int
    begin: int
    end: int


class StartedBatch:
    """
    Records that were fetched and started together.

    `first_offsets`, `next_offsets`: the first offset, and the offset after the last, by partition. `starts_from`: the
    marker from which on lies what is started after it. `content`: the messages to hand out, under `leases`. `expiring`:
    indices of those with a TTL. `is_marked`: whether a marker was written; False if every record was skipped. `error`:
    of a START that failed.
    """

    __slots__ = (
        "_lock",
        "_reported",
        "_table",
        "_unreported_count",
        "byte_count",
        "content",
        "error",
        "expiring",
        "first_offsets",
        "is_committed",
        "is_marked",
        "is_suspect",
        "leases",
        "next_offsets",
        "starts_from",
    )

    def __init__(self, records: Columns, content: Batch, leases: list[Lease], table: LeaseTable) -> None:
        self.first_offsets: dict[int, int] = {}
        self.next_offsets: dict[int, int] = {}
        for partition, begin, end in records.runs:
            self.first_offsets.setdefault(partition, records.offsets[begin])
            self.next_offsets[partition] = records.offsets[end - 1] + 1
        self.starts_from: dict[int, int] = {}
        self.content = content
        self.leases = leases
        self.byte_count = sum([lease.byte_count for lease in leases])
        self.expiring: list[int] = []
        self.is_marked = self.is_suspect = self.is_committed = False
        self.error: KmqError | None = None
        self._table = table
        self._unreported_count = 0
        self._lock = threading.Lock()
        self._reported = threading.Event()

    def expect(self, count: int) -> None:
        """Set the count of STARTs that will be sent."""
        self._unreported_count = count
        self.is_marked = count > 0
        if not count:
            self._reported.set()

    def on_report_of(self, lease: Lease | None) -> Callable[[KmqError | None, int], None]:
        """Return what takes the delivery report of a START: of messages of *lease*, or of deferred ones."""
        return partial(self._on_report, lease)

    def _on_report(self, lease: Lease | None, error: KmqError | None, appended_at_ms: int) -> None:
        with self._lock:
            if lease is not None:
                lease.started_at_ms = max(lease.started_at_ms, appended_at_ms)
                ends_at_ms = appended_at_ms + round(lease.duration_s * 1000)
                lease.ends_at_ms = min(lease.ends_at_ms or ends_at_ms, ends_at_ms)
            self._unreported_count -= 1
            self.error = self.error or error
            if self._unreported_count:
                return
        if self.error is None:
            self._table.open(self.leases)
        self._reported.set()

    @property
    def waiting_count(self) -> int:
        """Count of messages whose leases are not open yet."""
        return 0 if self._reported.is_set() else len(self.content)

    def wait(self, timeout: float) -> bool:
        """Wait for the reports, at most *timeout* seconds; return False on timeout."""
        return self._reported.wait(timeout)

    def drop(self, partitions: Collection[int], *, is_given_back: bool = False) -> None:
        """
        Forget what is of these partitions: nothing of it is handed out, committed or renewed.

        *is_given_back*: it is committed, so it is released, without counting the delivery. Otherwise it is fetched
        again.
        """
        for lease in self.leases:
            if lease.queue_partition in partitions:
                offsets = lease.take_held()
                lease.end(NOT_HANDED_OUT)
                if is_given_back:
                    lease.outbox.others.extend(
                        [Settled(Verb.RELEASE, offset, never_handed_out=True) for offset in offsets]
                    )
        for partition in partitions:
            self.first_offsets.pop(partition, None)
            self.next_offsets.pop(partition, None)

    def drop_expired(self) -> None:
        """Remove and end the messages that had expired when the broker appended their START."""
        expired = {index for index in self.expiring if self.content[index]._expire()}  # noqa: SLF001  # not for handlers
        if expired:
            self.content = self.content._drop(expired)  # noqa: SLF001  # as above


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
    begins = [0, *compress(count(1), map(ne, keys, islice(keys, 1, None))), len(keys)]
    return [KeyRun(keys[begin], begin, end) for begin, end in pairwise(begins)]


def create_leases(
    columns: Columns, counts: Sequence[int] | None, new_lease: Callable[[int, int, Sequence[int], list[int]], Lease]
) -> tuple[Batch, list[Lease]]:
    """
    Return the batch of messages, in fetch order, and their leases: one per queue partition and delivery count.

    *counts*: delivery count of each record; None if all are first deliveries. *new_lease* makes a lease of a queue
    partition, a delivery count, offsets and sizes.
    """
    records, partitions, offsets, sizes, runs = columns
    if counts is not None:
        # Pack both into one key: the partition into the low 16 bits (it has at most 15), the count above them.
        runs = runs_of([(c << 16) | p for p, c in zip(partitions, counts, strict=True)])
    if len(runs) == 1:
        key = runs[0].key
        lease = new_lease(key & 0xFFFF, max(1, key >> 16), offsets, sizes)
        return Batch(records, offsets, [Part(lease, 0, len(records))]), [lease]
    parts: dict[int, tuple[list[int], list[int]]] = {}
    for key, begin, end in runs:
        covered, their_sizes = parts.setdefault(key, ([], []))
        covered += offsets[begin:end]
        their_sizes += sizes[begin:end]
    leases = {
        key: new_lease(key & 0xFFFF, max(1, key >> 16), covered, their_sizes)
        for key, (covered, their_sizes) in parts.items()
    }
    return Batch(records, offsets, [Part(leases[key], begin, end) for key, begin, end in runs]), list(leases.values())
