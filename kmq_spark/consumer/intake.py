"""
Fetch messages, write their STARTs, wait until these are durable, and commit offsets; undo these steps on failure.

Rule 1: a message is delivered, and its offset committed, only after its START is durable.
Rule 2: if a START does not become durable in time, the consumer seeks back and its messages are fetched again.
Rule 3: one thread at a time may use an `Intake`. Rebalance callbacks run inside its calls.
Rule 4: markers need no partition ownership. Held messages stay held when their partition moves to another consumer.
Rule 5: a message that is not delivered now is deferred by its own START, so the committed offset can pass it. A message
of another logical queue or group is skipped without a marker.

Source: kmq README, "How does kmq work". kafka-mq-go does these steps for each message, and waits for each.
"""

from __future__ import annotations

import contextlib
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from confluent_kafka import Message as KafkaMessage

from kmq_spark.consumer.admission import BatchPlan, Room, count_that_fits, plan_batch
from kmq_spark.consumer.deferrals import deferrals
from kmq_spark.consumer.fetcher import Fetcher
from kmq_spark.consumer.offsets import COMMIT_SKIPPED_S, GATHER_COMMITS_S, GATHER_FROM
from kmq_spark.consumer.started import (
    Columns,
    LeaseParameters,
    Limits,
    StartedBatch,
    columns_of,
    create_leases,
    offset_bounds,
)
from kmq_spark.consumer.suspects import SuspectSchedule
from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.core.ranges import ranges_of_fetched
from kmq_spark.errors import KafkaClientError, KmqError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.records import sizes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kmq_spark.consumer.admission import Admission, AdmissionPolicy
    from kmq_spark.consumer.leases import LeaseTable
    from kmq_spark.consumer.marker_producer import MarkerProducer
    from kmq_spark.consumer.missing_offsets import MissingOffsets

_HEADERS = KafkaMessage.headers

REPORT_GRACE_S = 2.0
"""Longest delay of the report of a failed START: librdkafka checks for timed-out records once a second."""

LEAVE_S = 15.0
"""
Longest wait for leaving the consumer group. A rebalance that waits for a dead member ends earlier. A rebalance that
waits for another consumer of the closing thread does not.
"""

MAX_SKIPPED = 1_000
"""Maximum number of records checked at once after records of other logical queues or groups. Skipping costs little."""


class Intake:
    """
    Fetch messages of a queue and start them.

    Args:
        config: librdkafka settings of the consumer.
        topic: Queue topic.
        admission_policy: Decides which records are taken, and how.
        leases: Receives the leases whose START is durable.
        markers: Sends the STARTs.
        consumer_id: Name written into the STARTs.
        limits: Limits of the leases and of the held messages.
        write_settled: Waits until the markers of all settled messages are durable, at most the given seconds.
        missing_offsets: Checks whether assigned partitions have committed offsets; None for no check.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        topic: str,
        admission_policy: AdmissionPolicy,
        leases: LeaseTable,
        markers: MarkerProducer,
        consumer_id: str,
        limits: Limits,
        write_settled: Callable[[float], object],
        missing_offsets: MissingOffsets | None = None,
    ) -> None:
        """Subscribe to the topic. Partitions are assigned during the first `take`."""
        self._topic = topic
        self._admission_policy = admission_policy
        self._leases = leases
        self._consumer_id = consumer_id
        self._limits = limits
        self._write_settled = write_settled
        self._suspects = SuspectSchedule()
        self._started: list[StartedBatch] = []
        self._lookahead = 1
        self._is_blocked = self._needs_reseek = False
        self._fetcher = Fetcher(config, topic, self._started_positions, missing_offsets)
        self._markers = markers

    @property
    def max_in_flight(self) -> int:
        """Maximum number of messages held at once."""
        return self._limits.max_in_flight

    @property
    def owned(self) -> set[int]:
        """Partitions that the group has assigned to this consumer."""
        return self._fetcher.owned

    @property
    def is_blocked(self) -> bool:
        """Whether the last `take` found a record that must wait until fewer messages are held."""
        return self._is_blocked

    def room(self) -> Room:
        """Return what may be delivered now: nothing while a suspect is held or waits."""
        now = time.monotonic()
        held_count = self._held_count(now)
        pending_bytes = sum([batch.byte_count for batch in self._started])
        max_bytes = self._limits.max_in_flight_bytes - pending_bytes - self._leases.held_bytes_bound(now)
        if max_bytes <= 0:
            max_bytes = self._limits.max_in_flight_bytes - pending_bytes - self._leases.held_bytes(now)
        is_full = held_count > 0 and (max_bytes <= 0 or self._suspects.is_draining(now))
        if is_full or self._suspects.is_held:
            return Room(0, 0, is_empty=False)
        return Room(self._limits.max_in_flight - held_count, max(0, max_bytes), is_empty=not held_count)

    def take(
        self, max_messages: int, timeout: float, *, lease_s: float | None = None, gather_s: float = 0.0
    ) -> StartedBatch | None:
        """
        Fetch the records that are available, and send STARTs for those to deliver now or later.

        Args:
            max_messages: Maximum number of messages to deliver; `room` limits them further.
            timeout: Seconds to wait for the first record.
            lease_s: Length of the leases, seconds; None for the consumer's default.
            gather_s: See `Fetcher.fetch`.

        Returns:
            A batch whose STARTs are sent. It has no messages if none of its records is to be delivered now. None if no
            record arrived, or if the records that arrived must wait.

        Raises:
            KmqError: The client reported an error that needs action.
        """
        room = self.room()
        room = room._replace(max_messages=min(room.max_messages, max_messages))
        if room.max_messages < 1:
            return None
        if self._needs_reseek:
            self._reseek()
        # True until all records of this fetch are in a batch or in the buffer. An exception in between leaves it true.
        self._needs_reseek = True
        batch = self._take(room, timeout, lease_s, gather_s)
        self._needs_reseek = False
        return batch

    def wait_until_durable(self, batch: StartedBatch) -> None:
        """
        Wait for the STARTs of a batch. If a START fails, seek back so that the messages are fetched again.

        Messages that have expired by then are ended and removed from the batch.

        Args:
            batch: A result of `take`. Wait for batches in the order in which `take` returned them.

        Raises:
            KmqError: A START failed or took too long. Do not deliver messages of this batch or of a later one; they are
                fetched again.
        """
        start_timeout_s = self._limits.start_timeout_s
        if batch.is_suspect:
            # The suspect may kill this process. If earlier settlements were not durable by then, each such crash would
            # undo them. This wait comes before the wait for the START, whose report wakes the marker thread.
            self._write_settled(start_timeout_s)
        if not batch.wait(start_timeout_s + REPORT_GRACE_S):
            batch.error = KafkaClientError(
                f"cannot start messages of {self._topic}: got no response within {start_timeout_s:g} s; "
                "check the broker, the messages are fetched again",
                code="_TIMED_OUT",
                retriable=True,
            )
        if batch.error is not None:
            with contextlib.suppress(KmqError):  # the next `take` tries again
                self.undo_fetch()
            raise batch.error
        if batch.is_marked:
            failpoint("consumer.start-durable")
        self._leases.open(batch.leases)
        if batch.expiring:
            batch.drop_expired()

    def commit(self, batch: StartedBatch) -> None:
        """Commit the offset after a batch whose START is durable, at once or with later ones."""
        within_s = COMMIT_SKIPPED_S
        if batch.is_marked:
            within_s = GATHER_COMMITS_S if len(batch.content) >= GATHER_FROM else 0.0
        self._fetcher.commit(batch.next_offsets, within_s=within_s)
        if batch in self._started:
            self._started.remove(batch)

    def serve_group(self) -> None:
        """Serve the consumer group without fetching."""
        self._fetcher.serve_group(0)

    def serve_group_if_due(self) -> None:
        """Serve the consumer group without fetching, if it was not served for a second."""
        self._fetcher.serve_group_if_due()

    def close(self, timeout: float) -> None:
        """Commit the offsets of delivered messages and leave the group. Other consumers fetch the pending batches."""
        # Before the last commit, which must not cover the pending batches.
        self._drop_started()
        self._fetcher.close(min(timeout, LEAVE_S))

    def undo_fetch(self) -> None:
        """
        Drop every batch whose offset is not committed yet, and seek back. Its messages are fetched again.

        Call it at any time, also after an exception inside any other method of this class. If this method is
        interrupted itself, call it again.

        Raises:
            KmqError: Seeking back failed; the next `take` tries again.
        """
        self._needs_reseek = True
        self._reseek(self._drop_started())

    def _drop_started(self) -> dict[int, int]:
        """
        Drop the pending batches. A lease whose offset is already to be committed stays held; the caller releases it.

        Returns:
            First offset of the dropped batches, by partition.
        """
        first: dict[int, int] = {}
        for batch in self._started:
            for partition, offset in batch.first_offsets.items():
                first.setdefault(partition, offset)
            for lease in batch.leases:
                next_offset = batch.next_offsets[lease.queue_partition]
                if not self._fetcher.is_position_at_least(lease.queue_partition, next_offset):
                    lease.end("it was never delivered")
                    lease.take_held()
        self._started.clear()
        return first

    def _reseek(self, dropped: Mapping[int, int] = MappingProxyType({})) -> None:
        """Fetch the records again that are in no batch. *dropped*: first offset of dropped batches, by partition."""
        taken = {partition: offset for batch in self._started for partition, offset in batch.next_offsets.items()}
        self._fetcher.reseek(taken, dropped)
        self._needs_reseek = False

    def _take(self, room: Room, timeout: float, lease_s: float | None, gather_s: float) -> StartedBatch | None:
        self._is_blocked = False
        max_records = max(room.max_messages, self._lookahead)
        records = self._fetcher.fetch(max_records, timeout, at_least=self._lookahead, gather_s=gather_s)
        if not records:
            return None
        # Leases may have ended while the fetch waited.
        room = room._replace(is_empty=not self._held_count(time.monotonic()))
        if any(map(_HEADERS, records)) or not self._admission_policy.accepts_plain_records:
            return self._take_by_headers(records, room, lease_s)
        self._lookahead = 1
        self._suspects.took(None)  # a suspect that waited for its turn was revoked with its partition
        sizes = sizes_of(records, ())
        count = count_that_fits(sizes, self._with_exact_bytes(room, sizes))
        self._is_blocked = not count
        if count < len(records):
            self._fetcher.return_to_buffer(records[count:])
            records, sizes = records[:count], sizes[:count]
        if not count:
            return None
        to_deliver = columns_of(records, sizes)
        return self._start(StartedBatch(*offset_bounds(to_deliver)), to_deliver, None, lease_s)

    def _take_by_headers(self, records: list[KafkaMessage], room: Room, lease_s: float | None) -> StartedBatch | None:
        """Take records whose headers decide how they are handled."""
        now = time.monotonic()
        # The client's type stub describes headers to send, which may be None or text. Received ones are always bytes.
        headers: list[Any] = list(map(_HEADERS, records))
        admissions = [self._admission_policy.admit(*each) for each in zip(headers, records, strict=True)]
        sizes = sizes_of(records, headers)
        turn = self._suspects.turn(now, is_empty=room.is_empty)
        plan = plan_batch(admissions, sizes, self._with_exact_bytes(room, sizes), turn)
        if plan.is_waiting:
            self._suspects.drain(now)
        elif plan.prefix_length and not plan.is_suspect:
            self._suspects.took(None)
        self._lookahead = self._next_lookahead(admissions, plan)
        if plan.prefix_length < len(records):
            self._fetcher.return_to_buffer(records[plan.prefix_length :])
        self._is_blocked = bool(records) and not plan.prefix_length
        if not plan.prefix_length:
            return None
        batch = self._start(
            StartedBatch(*offset_bounds(columns_of(records[: plan.prefix_length], sizes))),
            columns_of([records[index] for index in plan.to_deliver], [sizes[index] for index in plan.to_deliver]),
            [admissions[index].delivery_count for index in plan.to_deliver],
            lease_s,
            deferrals(records, admissions, plan, self._consumer_id),
        )
        if plan.is_suspect:
            batch.is_suspect = True
            self._suspects.took(batch.content[0])
        batch.expiring = [
            position for position, index in enumerate(plan.to_deliver) if admissions[index].expires_at_ms is not None
        ]
        return batch

    def _start(
        self,
        batch: StartedBatch,
        to_deliver: Columns,
        counts: Sequence[int] | None,
        lease_s: float | None,
        deferrals: Sequence[Marker] = (),
    ) -> StartedBatch:
        """Lease records and send their STARTs: one for each queue partition and delivery count."""
        duration_s = self._limits.lease_s if lease_s is None else lease_s
        parameters = LeaseParameters(self._leases, time.monotonic(), duration_s, self._limits.max_lease_s)
        batch.content, batch.leases = create_leases(to_deliver, counts, parameters)
        batch.byte_count = sum([lease.byte_count for lease in batch.leases])
        starts = [
            (
                Marker(
                    MarkerType.START,
                    lease.queue_partition,
                    ranges,
                    redeliver_after_ms=round(duration_s * 1000),
                    delivery_count=lease.delivery_count,
                    consumer_id=self._consumer_id,
                ),
                batch.on_report_of(lease),
            )
            for lease in batch.leases
            for ranges in ranges_of_fetched(lease.offsets)
        ]
        batch.expect(len(starts) + len(deferrals))
        for marker, on_report in [*((marker, batch.on_report) for marker in deferrals), *starts]:
            self._markers.send(marker, on_report)
        self._started.append(batch)
        if deferrals:
            failpoint("consumer.deferral-sent")
        if batch.is_marked:
            failpoint("consumer.start-sent")
        return batch

    @staticmethod
    def _next_lookahead(admissions: Sequence[Admission], plan: BatchPlan) -> int:
        """Return how many records to check next: more each time that none was to be delivered."""
        return 1 if plan.to_deliver or not plan.prefix_length else min(2 * len(admissions), MAX_SKIPPED)

    def _with_exact_bytes(self, room: Room, sizes: Sequence[int]) -> Room:
        """Return the room. If the upper bound of the held bytes leaves too little, count the held bytes exactly."""
        if sum(sizes) <= room.max_bytes:
            return room
        pending_bytes = sum([batch.byte_count for batch in self._started])
        max_bytes = self._limits.max_in_flight_bytes - pending_bytes - self._leases.held_bytes(time.monotonic())
        return room._replace(max_bytes=max(0, max_bytes))

    def _held_count(self, now: float) -> int:
        return self._leases.held_count(now) + sum([len(batch.content) for batch in self._started])

    def _started_positions(self, revoked: set[int]) -> dict[int, int]:
        """Wait for the STARTs on revoked partitions. Return the offset after the durable ones, by partition."""
        positions: dict[int, int] = {}
        for batch in self._started:
            if not revoked & batch.next_offsets.keys():
                continue
            if not batch.wait(self._limits.start_timeout_s) or batch.error is not None:
                break  # a later batch has higher offsets; committing those would cover this batch too
            positions.update(batch.next_offsets)
        return positions
