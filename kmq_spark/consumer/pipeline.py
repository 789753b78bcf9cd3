"""
The steps of a message: fetch, START, durable, commit, hand out.

Rule 1: a message is handed out, and its offset committed, only after its START is durable.
Rule 2: a call that fails or is interrupted before the hand-out is undone, by `undo` only: committed messages are
released without counting the delivery, all others are fetched again.
Rule 3: one batch is fetched ahead for a caller that comes back quickly. It is released if the caller stays away, and
dropped when its lease ends or its partitions are revoked.

Source: kmq README, "How does kmq work"; kafka-mq-go does these steps for each message, and waits for each. KIP-1206 for
the strict limit. RabbitMQ's prefetch, and its warning about the prefetched messages of a dead consumer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import Message as KafkaMessage

from kmq_spark.consumer.admission import (
    Admission,
    AdmissionPolicy,
    BatchPlan,
    Room,
    SuspectSchedule,
    count_that_fits,
    deferrals,
    plan_batch,
)
from kmq_spark.consumer.batch import Batch
from kmq_spark.consumer.leases import Lease
from kmq_spark.consumer.offsets import COMMIT_SKIPPED_S, GATHER_COMMITS_S, GATHER_FROM
from kmq_spark.consumer.started import Columns, StartedBatch, columns_of, create_leases
from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.core.ranges import ranges_of_fetched
from kmq_spark.errors import KafkaClientError, KmqError, TopicError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.clock import now_s
from kmq_spark.kafka.records import sizes_of
from kmq_spark.pauses import RateLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Sized

    from kmq_spark.consumer.checks import Limits
    from kmq_spark.consumer.fetcher import Fetcher
    from kmq_spark.consumer.history import History
    from kmq_spark.consumer.leases import LeaseTable
    from kmq_spark.consumer.marker_producer import MarkerProducer

Result = TypeVar("Result", bound="Sized")

logger = logging.getLogger(__name__)

QUICK_S = 0.1
QUICK_CALLS = 3
"""A caller is quick that has come back this often in a row, within `QUICK_S` of the last hand-out each time."""

AWAY_S = 1.0
"""If a caller does not come back for this time, what is ahead is released: others can process it."""

GIVE_BACK_S = 5.0
"""Longest wait for the commit of what is given back. If it fails, what is ahead stays for the caller."""

MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024
"""Maximum bytes of values, keys and headers held at once. A single message may be larger."""

REPORT_GRACE_S = 2.0
"""Longest delay of the report of a failed START: librdkafka checks for timed-out records once a second."""

LEAVE_S = 15.0
"""
Longest wait for leaving the consumer group. A rebalance that waits for a dead member ends earlier. A rebalance that
waits for another consumer of the closing thread does not.
"""

MAX_SKIPPED = 1_000
"""Maximum number of records checked at once after records of other logical queues or subscriptions."""

LOG_S = 60.0
"""Shortest time between two warnings that there is no room, or that the broker is away."""

RETRY_PAUSE_S = 0.5
"""Longest pause after a retriable error."""

CONFIRM_PAUSE_S = 0.01
"""Longest pause before a transaction looks again whether its offsets are confirmed."""

FULL_PAUSE_S = 0.002
"""Interval at which a receiver without room checks for room."""

_HEADERS = KafkaMessage.headers


class Pipeline:
    """
    The messages of a consumer until they are handed out. One thread at a time uses it.

    *write_settled* waits until the markers of all settled messages are durable, at most the given seconds.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        topic: str,
        policy: AdmissionPolicy,
        history: History,
        leases: LeaseTable,
        markers: MarkerProducer,
        consumer_id: str,
        limits: Limits,
        write_settled: Callable[[float], object],
    ) -> None:
        self._topic = topic
        self._policy = policy
        self._history = history
        self._leases = leases
        self._markers = markers
        self._consumer_id = consumer_id
        self._limits = limits
        self._write_settled = write_settled
        self._fetcher = fetcher
        self._suspects = SuspectSchedule()
        # Started and not handed out, in fetch order. Reentrant lock: a signal handler may call.
        self._ahead: deque[StartedBatch] = deque()
        self._lock = threading.RLock()
        self._watcher: threading.Thread | None = None
        self._returning = Batch()
        self._returned_at = self._quick_until = float("-inf")
        self._quick_calls = 0
        self._lookahead = 1
        self._short_since: float | None = None
        self._needs_undo = self._needs_reseek = self._is_blocked = self._is_closed = self._is_confirming = False
        self._fetch_error: KmqError | None = None
        self._full_log_limit, self._retry_log_limit = RateLimit(LOG_S), RateLimit(LOG_S)

    @property
    def owned(self) -> set[int]:
        """Partitions that the group has assigned to this consumer."""
        return self._fetcher.owned

    def receive(
        self,
        max_messages: int,
        timeout: float,
        result_of: Callable[[Batch], Result],
        *,
        lease_s: float | None = None,
        gather_s: float = 0.0,
    ) -> Result:
        """
        Return *result_of* a batch, empty if no message arrived in time, there was no room, or the broker is away.

        *result_of* is called here, so that an exception in it loses no message. *gather_s*: longest time to collect
        *max_messages* after the first has arrived. After an error the messages are fetched again.

        Raises:
            KmqError: An error that is not retriable.
        """
        with self._lock:
            until = now_s() + timeout
            while True:
                try:
                    return self._receive_until(until, max_messages, result_of, lease_s, gather_s)
                except KmqError as error:
                    if not error.retriable:
                        raise
                    level = logging.WARNING if self._retry_log_limit.allows() else logging.DEBUG
                    logger.log(level, "cannot receive, trying again: %s", error, extra={"action": "receive_failed"})
                if now_s() >= until:
                    return result_of(Batch())
                time.sleep(min(RETRY_PAUSE_S, max(0.0, until - now_s())))

    def _receive_until(
        self,
        until: float,
        max_messages: int,
        result_of: Callable[[Batch], Result],
        lease_s: float | None,
        gather_s: float,
    ) -> Result:
        if self._needs_undo:
            self.undo()
        # The caller has the messages of the last call, so `undo` must not release them.
        self._returning = Batch()
        self._quick_calls = self._quick_calls + 1 if now_s() <= self._quick_until else 0
        try:
            self._needs_undo = True
            while True:
                found = result_of(self._next(max_messages, until, lease_s, gather_s))
                # A batch may have no messages: its records were skipped, deferred or expired.
                if found or now_s() >= until:
                    self._returned_at = now_s()
                    self._quick_until = self._returned_at + QUICK_S if found else float("-inf")
                    self._needs_undo = False
                    return found
                if self._is_blocked:
                    time.sleep(min(FULL_PAUSE_S, max(0.0, until - now_s())))
        except BaseException:
            with contextlib.suppress(KmqError):  # the next attempt begins with it
                self.undo()
            raise

    def undo(self) -> None:
        """Undo the fetch of every message that was not returned. After an error the next call tries again."""
        self._needs_undo = self._needs_reseek = True
        self._reseek(self._fetcher.drop_started())
        for content in (self._returning, *[batch.content for batch in self._ahead]):
            content._release_uncounted()  # noqa: SLF001  # private to the package: not for handlers
        self._returning = Batch()
        self._ahead.clear()
        self._needs_undo = False

    def give_back(self) -> int:
        """
        Release what is ahead, without counting the delivery. Return how many messages.

        After an error, of a START that failed, the next call undoes the fetch.
        """
        count = 0
        with self._lock:
            self._quick_calls = 0
            while self._ahead:
                batch = self._ahead[0]
                if not batch.is_committed:
                    self._wait_until_durable(batch)
                    # Otherwise the next owner would fetch a message of which the tracker sends a copy.
                    if not self._fetcher.commit_confirmed(batch, GIVE_BACK_S):
                        break
                    batch.is_committed = True
                count += batch.content._release_uncounted()  # noqa: SLF001  # private to the package: not for handlers
                self._ahead.popleft()
        return count

    def confirm(self, positions: Mapping[int, int], timeout: float, check: Callable[[], None]) -> None:
        """
        Wait until the group has these offsets after messages that were handed out. For transactions, in any thread.

        *check* is called while waiting, and raises if the wait is in vain.
        """
        offsets, until = self._fetcher.offsets, now_s() + timeout
        if not offsets.are_confirmed(positions):
            offsets.send(self._fetcher.client)
        self._is_confirming = True
        try:
            while not offsets.are_confirmed(positions):
                if now_s() > until:
                    message = (
                        f"cannot commit offsets of {self._topic}: got no confirmation within {timeout:g} s; check the "
                        "broker"
                    )
                    raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)
                check()
                offsets.send_if_due(self._fetcher.client)
                if self._lock.acquire(blocking=False):
                    try:
                        self._fetcher.serve_answers()
                    finally:
                        self._lock.release()
                else:
                    # The thread that receives polls the client.
                    offsets.wait(CONFIRM_PAUSE_S)
        finally:
            self._is_confirming = False

    def serve_group_if_due(self) -> None:
        """Serve the consumer group without fetching, if it was not served for a second."""
        with self._lock:
            self._fetcher.serve_group_if_due()

    def close(self, timeout: float) -> None:
        """Commit the offsets, leave the group, and release what is ahead, without counting the delivery."""
        self._is_closed = True
        is_alone = self._lock.acquire(timeout=timeout)
        try:
            if self._needs_undo:
                # The last call was interrupted, and none followed.
                with contextlib.suppress(KmqError):
                    self.undo()
            try:
                # It gives back what is durable and not committed.
                self._fetcher.close(min(timeout, LEAVE_S))
            finally:
                self._fetcher.drop_started()
                for batch in self._ahead:
                    batch.content._release_uncounted()  # noqa: SLF001  # private to the package: not for handlers
                self._ahead.clear()
        finally:
            if is_alone:
                self._lock.release()

    def _next(self, max_messages: int, until: float, lease_s: float | None, gather_s: float) -> Batch:
        """Return messages to hand out. They stay in `_returning` until the next call: the caller may miss them."""
        ahead = self._ahead
        if ahead and lease_s is not None:
            self.give_back()
        if not ahead:
            if self._fetch_error is not None:
                error, self._fetch_error = self._fetch_error, None
                raise error
            if not self._wait_for_room(max_messages, until, gather_s):
                return Batch()
            self._take(max_messages, max(0.0, until - now_s()), lease_s, gather_s)
        else:
            self._fetcher.serve_group_if_due()
        if len(ahead) == 1 and self._quick_calls >= QUICK_CALLS and lease_s is None:
            self._take_ahead(max_messages, gather_s)
        if not ahead:
            return Batch()
        batch = ahead[0]
        if not batch.is_committed:
            self._wait_until_durable(batch)
            if batch.expiring:
                batch.drop_expired()
            self._commit(batch)
        content = batch.content._leased(now_s())  # noqa: SLF001  # private to the package: not for handlers
        self._returning, rest = content._split(max_messages)  # noqa: SLF001  # as above
        if rest:
            batch.content = rest
        else:
            ahead.popleft()
        return self._returning

    def _take_ahead(self, max_messages: int, gather_s: float) -> None:
        try:
            is_taken = self._take(max_messages, 0.0, None, gather_s)
        except KmqError as error:
            # What is started is handed out first: fetching may fail for longer than a lease.
            self._fetch_error = error
            return
        if is_taken and self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name=f"kmq-ahead-{self._topic}", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        """Release what is ahead if the caller stays away. Ends when nothing is ahead."""
        while True:
            time.sleep(AWAY_S / 4)
            with self._lock:
                if not self._ahead or self._is_closed:
                    self._watcher = None
                    return
                if not self._needs_undo and now_s() - self._returned_at >= AWAY_S:
                    try:
                        self.give_back()
                    except KmqError as error:
                        logger.warning("%s", error, extra={"action": "start_given_up"})

    def _wait_until_durable(self, batch: StartedBatch) -> None:
        """Wait for the STARTs of the first batch that is ahead. After an error, `undo` must follow."""
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
            self._needs_undo = True
            raise batch.error
        if batch.is_marked:
            failpoint("consumer.start-durable")

    def _commit(self, batch: StartedBatch) -> None:
        within_s = COMMIT_SKIPPED_S
        if batch.is_marked:
            within_s = GATHER_COMMITS_S if len(batch.content) >= GATHER_FROM else 0.0
        self._fetcher.commit(batch, within_s=within_s)
        batch.is_committed = True

    def _reseek(self, dropped: Mapping[int, int]) -> None:
        """Fetch the records again that are in no batch. *dropped*: first offset of dropped batches, by partition."""
        self._history.reopen()
        self._fetcher.reseek(dropped)
        self._needs_reseek = False

    def _room(self) -> Room:
        """Return what may be started now: nothing while a suspect is held or waits."""
        # In this order: a batch that is reported in between counts twice, and not never.
        waiting = [batch for batch in self._ahead if batch.waiting_count]
        waiting_bytes = sum([batch.byte_count for batch in waiting])
        now = now_s()
        held_count = sum([len(batch.content) for batch in waiting]) + self._leases.held_count(now)
        max_bytes = MAX_IN_FLIGHT_BYTES - waiting_bytes - self._leases.held_bytes_bound(now)
        if max_bytes <= 0:
            max_bytes = MAX_IN_FLIGHT_BYTES - waiting_bytes - self._leases.held_bytes(now)
        is_full = held_count > 0 and (max_bytes <= 0 or self._suspects.is_draining(now))
        if is_full or self._suspects.is_held:
            return Room(0, 0, is_empty=False)
        return Room(self._limits.max_in_flight - held_count, max(0, max_bytes), is_empty=not held_count)

    def _with_exact_bytes(self, room: Room, sizes: Sequence[int]) -> Room:
        """Return the room. If the upper bound of the held bytes leaves too little, count the held bytes exactly."""
        if sum(sizes) <= room.max_bytes:
            return room
        waiting_bytes = sum([batch.byte_count for batch in self._ahead if batch.waiting_count])
        max_bytes = MAX_IN_FLIGHT_BYTES - waiting_bytes - self._leases.held_bytes(now_s())
        return room._replace(max_bytes=max(0, max_bytes))

    def _wait_for_room(self, max_messages: int, until: float, gather_s: float) -> bool:
        """Wait until there is room for a message; with *gather_s*, so long at most for *max_messages*."""
        while True:
            room, now = self._room().max_messages, now_s()
            if room >= max_messages or (room >= 1 and not gather_s):
                self._short_since = None
                return True
            if room >= 1:
                # A batch is settled in steps: wait for the room of a whole one.
                self._short_since = self._short_since or now
                if now - self._short_since >= gather_s:
                    return True
            else:
                self._short_since = None
            # Serves the group at most once a second, even if `receive` is called often.
            self._fetcher.serve_group_if_due()
            if self._is_confirming:
                self._fetcher.serve_answers()
            if now >= until:
                self._log_full(now, room)
                return False
            time.sleep(min(FULL_PAUSE_S, until - now))

    def _log_full(self, now: float, room: int) -> None:
        held_count = self._leases.held_count(now)
        if held_count and room < 1 and self._full_log_limit.allows():
            logger.warning(
                "fetching paused: %d messages held, max_in_flight is %d (with fewer messages: they have %d bytes, or a "
                "suspect is delivered separately); settle messages or raise the limit",
                held_count, self._limits.max_in_flight, MAX_IN_FLIGHT_BYTES, extra={"action": "in_flight_full"},
            )  # fmt: skip

    def _take(self, max_messages: int, timeout: float, lease_s: float | None, gather_s: float) -> bool:
        """Fetch the records that are available, and start those to deliver now or later. Return whether any came."""
        room = self._room()
        room = room._replace(max_messages=min(room.max_messages, max_messages))
        if room.max_messages < 1:
            return False
        if self._needs_reseek:
            self._reseek({})
        # True until all records of this fetch are in a batch or in the buffer. An exception in between leaves it true.
        self._needs_reseek = True
        batch = self._fetch_and_start(room, timeout, lease_s, gather_s)
        self._needs_reseek = False
        return batch is not None

    def _fetch_and_start(
        self, room: Room, timeout: float, lease_s: float | None, gather_s: float
    ) -> StartedBatch | None:
        self._is_blocked = False
        max_records = max(room.max_messages, self._lookahead)
        records = self._fetcher.fetch(max_records, timeout, gather_s=gather_s)
        if self._fetcher.unchecked and (first := self._look()):
            self._fetcher.reseek(first)
            return None
        if records:
            records = self._fetcher.of_member(records)
        if self._fetcher.unchecked:  # assigned meanwhile
            self._fetcher.return_to_buffer(records)
            return None
        if not records:
            return None
        # Leases may have ended while the fetch waited.
        room = room._replace(is_empty=self._room().is_empty)
        if any(map(_HEADERS, records)) or not self._policy.accepts_plain_records or self._history.concerns(records):
            return self._start_by_headers(records, room, lease_s)
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
        columns = columns_of(records, sizes)
        return self._start(columns, columns, None, lease_s)

    def _look(self) -> dict[int, int]:
        try:
            return self._history.look(self._fetcher)
        except TopicError as error:
            self._markers.give_up(error)
            raise

    def _start_by_headers(self, records: list[KafkaMessage], room: Room, lease_s: float | None) -> StartedBatch | None:
        """Start records whose headers decide how they are handled."""
        now = now_s()
        # The client's type stub describes headers to send, which may be None or text. Received ones are always bytes.
        headers: list[Any] = list(map(_HEADERS, records))
        admissions = [self._policy.admit(*each) for each in zip(headers, records, strict=True)]
        if self._history.concerns(records):
            admissions = self._history.without_started(records, admissions)
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
        self._is_blocked = not plan.prefix_length
        if not plan.prefix_length:
            return None
        batch = self._start(
            columns_of(records[: plan.prefix_length], sizes),
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
        records: Columns,
        to_deliver: Columns,
        counts: Sequence[int] | None,
        lease_s: float | None,
        deferred: Sequence[Marker] = (),
    ) -> StartedBatch:
        """Lease the records *to_deliver*, and send their STARTs: one for each queue partition and delivery count."""
        duration_s = self._limits.lease_s if lease_s is None else lease_s
        now = now_s()  # read before the START is sent; see `leases.py`

        def new_lease(queue_partition: int, delivery_count: int, offsets: Sequence[int], sizes: list[int]) -> Lease:
            return Lease(
                outbox=self._leases.outbox(queue_partition),
                delivery_count=delivery_count,
                held=set(),
                renewed_at=now,
                ends_at=now + duration_s,
                limit_at=now + self._limits.max_lease_s,
                duration_s=duration_s,
                offsets=offsets,
                sizes=sizes,
                byte_count=sum(sizes),
                is_whole=True,
            )

        content, leases = create_leases(to_deliver, counts, new_lease)
        batch = StartedBatch(records, content, leases, self._leases)
        batch.starts_from = self._history.starts_from(batch.next_offsets)
        for partition in self._history.unproven & batch.next_offsets.keys():
            # A consumer that begins in the middle of what was started could not tell it from the rest.
            del batch.next_offsets[partition]
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
            for lease in leases
            for ranges in ranges_of_fetched(lease.offsets)
        ]
        batch.expect(len(starts) + len(deferred))
        # Before the first START is sent, whose report opens leases: `undo` must know the batch.
        self._fetcher.started.append(batch)
        self._ahead.append(batch)
        for marker, on_report in [*((marker, batch.on_report_of(None)) for marker in deferred), *starts]:
            self._markers.send(marker, on_report)
        if deferred:
            failpoint("consumer.deferral-sent")
        if batch.is_marked:
            failpoint("consumer.start-sent")
        return batch

    @staticmethod
    def _next_lookahead(admissions: Sequence[Admission], plan: BatchPlan) -> int:
        """Return how many records to check next: more each time that none was to be delivered."""
        return 1 if plan.to_deliver or not plan.prefix_length else min(2 * len(admissions), MAX_SKIPPED)
