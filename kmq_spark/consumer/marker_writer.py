"""
Write the markers of settled messages and renew the leases of held messages, in a background thread.

Rule 1: settlements are collected for a few milliseconds and written as one marker per queue partition and kind.
Rule 2: this one thread sends all renewals, releases and ENDs, so that no renewal overtakes the release of its message.
Rule 3: while an END or a release of a queue partition is not confirmed yet, further ones are collected, unless a thread
waits for a flush. The broker processes a client's requests one after the other, so this costs less than a round trip.
With five markers of a partition in flight, the limit of an idempotent producer, librdkafka's thread would use a whole
core until the broker answers (`linger.ms=0`: `rd_kafka_toppar_producer_serve` asks to be called again at once).

Source: kafka-mq-go `queue/consumer.go` writes one marker per message and waits for each, which makes it slow. SQS
`ChangeMessageVisibility`, with its bound of 12 hours, for keep-alive.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.consumer.leases import Verb
from kmq_spark.core.markers import Marker, MarkerType, Outcome, Release
from kmq_spark.core.ranges import cut_ranges, join_ranges
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.clock import now_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kmq_spark.consumer.leases import Lease, LeaseTable, Outbox, Settled
    from kmq_spark.consumer.marker_producer import MarkerProducer
    from kmq_spark.core.markers import OffsetRange
    from kmq_spark.errors import KmqError

logger = logging.getLogger(__name__)

IDLE_S = 0.02
"""Longest wait between two rounds while no message is held."""

FLUSH_S = 0.001
"""Longest wait between two rounds while a thread waits for a flush."""

POLL_UNIT_S = 0.001
"""Shortest wait for reports. The client waits whole milliseconds, and not at all for less: the thread would spin."""

EXPIRED = "expired"
"""Reason in the END of an expired message."""

SWEEP_S = 0.1
"""Interval at which leases are checked for renewal and for their end. The shortest lease is ten times as long."""

LINGER_S = 0.005
"""Time that settled messages are collected before their marker is sent."""

RENEW_AFTER = 1 / 3
"""Share of the lease length after which a lease is renewed, so that two attempts may fail."""


class Renewal(NamedTuple):
    """One KEEPALIVE to write."""

    queue_partition: int
    leases: tuple[Lease, ...]
    sent_at: float
    duration: float

    def offsets(self) -> list[int]:
        """Return the offsets held now. If one is settled meanwhile: a KEEPALIVE after an END has no effect."""
        return [offset for lease in self.leases for offset in lease.held_offsets()]

    def durable(self, now: float, appended_at_ms: Sequence[int]) -> None:
        """
        Extend the leases that have not ended: the renewal counts from the time when it was sent.

        The tracker may have decided the messages of the others before the renewal was written: *appended_at_ms*, by the
        broker's clock.
        """
        ends_at_ms = min(appended_at_ms) + round(self.duration * 1000)
        for lease in self.leases:
            if not lease.end_reason and now <= lease.ends_at:
                lease.ends_at = max(lease.ends_at, self.sent_at + self.duration)
                if max(appended_at_ms) < lease.ends_at_ms:
                    lease.ends_at_ms = ends_at_ms


def renewals(leases: Iterable[Lease], now: float) -> Iterator[Renewal]:
    """
    Yield the renewals that are due, at most one per queue partition and lease length.

    As soon as one lease is due, all of the same length on that queue partition are renewed. No lease is renewed beyond
    its limit, so that a handler that hangs does not hold its message forever. A renewal that fails is tried again after
    another third.
    """
    alike: dict[tuple[int, float], list[Lease]] = {}
    for lease in leases:
        if now + lease.duration_s <= lease.limit_at and now <= lease.ends_at:
            alike.setdefault((lease.queue_partition, lease.duration_s), []).append(lease)
    for (queue_partition, duration), found in alike.items():
        if any(now - lease.renewed_at >= duration * RENEW_AFTER for lease in found):
            for lease in found:
                lease.renewed_at = now
            yield Renewal(queue_partition, tuple(found), now, duration)


class MarkerWriter:
    """The thread that writes the ENDs, releases and renewals of one consumer, and serves the reports of *producer*."""

    def __init__(self, producer: MarkerProducer, leases: LeaseTable, consumer_id: str) -> None:
        self._producer = producer
        self._leases = leases
        self._consumer_id = consumer_id
        self._swept_at = 0.0
        self._rounds = 0
        self._flushing = 0
        self._round_done = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kmq-markers-{consumer_id}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def flush(self, timeout: float) -> None:
        """Wait until the markers of all messages settled before this call are durable; raise the first error."""
        self._producer.wait(self._wait_for_round(timeout))

    def write_out(self, timeout: float) -> None:
        """Wait as `flush` does, which raises the errors."""
        self._producer.wait_for_reports(self._wait_for_round(timeout))

    def _wait_for_round(self, timeout: float) -> float:
        """Wait until all that is settled is sent; return the rest of the time."""
        until = now_s() + timeout
        with self._round_done:
            # The round that runs now may have processed a partition already. The next round processes all.
            wanted = self._rounds + 2
            self._flushing += 1
            try:
                self._round_done.wait_for(lambda: self._rounds >= wanted, timeout)
            finally:
                self._flushing -= 1
        return max(0.0, until - now_s())

    def close(self, timeout: float) -> None:
        """Write the remaining markers, as `flush`, and end the thread."""
        try:
            self.flush(timeout)
        finally:
            self._stopping.set()
            self._thread.join()
            self._producer.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            began_at = now_s()
            for step in (self._round, self._count_round, self._serve_until_next_round):
                try:
                    step(began_at)
                except Exception:
                    # The thread must not end: without it no END is written, and every message is redelivered.
                    logger.exception("cannot write markers", extra={"action": "marker_round_failed"})

    def _count_round(self, _began_at: float) -> None:
        with self._round_done:
            self._rounds += 1
            self._round_done.notify_all()

    def _round(self, now: float) -> None:
        waiting = set() if self._flushing else self._producer.waiting_partitions()
        for outbox in self._leases.outboxes():
            if outbox.queue_partition not in waiting:
                self._write_settled(outbox)
            if outbox.extended:
                self._write_extensions(outbox.queue_partition, outbox.take(outbox.extended))
        if now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            self._sweep(now)

    def _serve_until_next_round(self, began_at: float) -> None:
        is_idle = not self._producer.is_waiting and not self._leases.open_leases()
        until = began_at + (IDLE_S if is_idle else LINGER_S)
        while True:
            left = FLUSH_S if self._flushing else until - now_s()
            self._producer.serve(max(POLL_UNIT_S, left))
            if self._flushing or now_s() >= until:
                return

    def _write_settled(self, outbox: Outbox) -> None:
        if outbox.acked or outbox.acked_ranges:
            self._write_acked(outbox)
        if outbox.others:
            self._write_others(outbox.queue_partition, outbox.take(outbox.others))

    def _write_acked(self, outbox: Outbox) -> None:
        offsets, together = outbox.take(outbox.acked), outbox.take(outbox.acked_ranges)
        if offsets and together:
            offsets += [offset for first, count in together for offset in range(first, first + count)]
        markers = cut_ranges(offsets) if offsets else join_ranges(together)
        self._write_ends(outbox.queue_partition, markers)

    def _write_ends(
        self,
        queue_partition: int,
        markers: Iterable[tuple[OffsetRange, ...]],
        outcome: Outcome = Outcome.ACKED,
        reason: str = "",
    ) -> None:
        for ranges in markers:
            self._producer.send_until_durable(
                Marker(
                    MarkerType.END,
                    queue_partition,
                    ranges,
                    outcome=outcome,
                    reason=reason,
                    consumer_id=self._consumer_id,
                )
            )
            failpoint("consumer.end-sent")

    def _write_others(self, queue_partition: int, settled: Sequence[Settled]) -> None:
        groups: dict[Settled, list[int]] = {}
        for one in settled:
            groups.setdefault(one._replace(message_offset=-1), []).append(one.message_offset)
        for kind, offsets in groups.items():
            if kind.verb is Verb.REJECT:
                self._write_ends(queue_partition, cut_ranges(offsets), Outcome.REJECTED, kind.reason)
            elif kind.verb is Verb.EXPIRE:
                self._write_ends(queue_partition, cut_ranges(offsets), Outcome.EXPIRED, EXPIRED)
            else:
                self._write_releases(queue_partition, offsets, kind)

    def _write_releases(self, queue_partition: int, offsets: Sequence[int], kind: Settled) -> None:
        for ranges in cut_ranges(offsets):
            self._producer.send_until_durable(
                Marker(
                    MarkerType.KEEPALIVE,
                    queue_partition,
                    ranges,
                    redeliver_after_ms=kind.delay_ms,
                    reason=kind.reason,
                    consumer_id=self._consumer_id,
                    never_handed_out=kind.never_handed_out,
                    release=Release.FAILED if kind.has_failed else Release.GIVEN_BACK,
                )
            )
            failpoint("consumer.release-sent")

    def _sweep(self, now: float) -> None:
        """Remove ended leases, and renew the leases that are due."""
        for lease in self._leases.remove_ended(now):
            _log_lost(lease)
        for renewal in renewals(self._leases.open_leases(), now):
            self._renew(renewal)
            failpoint("consumer.renewal-sent")

    def _write_extensions(self, queue_partition: int, leases: Sequence[Lease]) -> None:
        alike: dict[float, list[Lease]] = {}
        for lease in leases:
            alike.setdefault(lease.duration_s, []).append(lease)
        for duration_s, found in alike.items():
            # Counted from the earliest request: the lease must not end locally after it ends on the broker.
            sent_at = min([lease.renewed_at for lease in found])
            self._renew(Renewal(queue_partition, tuple(found), sent_at, duration_s), is_extension=True)
            failpoint("consumer.extension-sent")

    def _renew(self, renewal: Renewal, *, is_extension: bool = False) -> None:
        parts = list(cut_ranges(renewal.offsets()))
        left = len(parts)

        appended_at_ms: list[int] = []

        def on_report(error: KmqError | None, at_ms: int) -> None:
            # Only the writer's thread serves reports, so the count needs no lock.
            nonlocal left
            left -= 1
            appended_at_ms.append(at_ms)
            if error is not None:
                logger.warning("keep-alive failed: %s", error, extra={"action": "keep_alive_failed"})
                if is_extension and left >= 0 and error.retriable:
                    # Until then the old lease end applies.
                    self._leases.outbox(renewal.queue_partition).extended.extend(
                        [lease for lease in renewal.leases if lease.held_count and lease.ends_at > now_s()]
                    )
                left = -1
            elif left == 0:
                renewal.durable(now_s(), appended_at_ms)

        for ranges in parts:
            marker = Marker(
                MarkerType.KEEPALIVE,
                renewal.queue_partition,
                ranges,
                redeliver_after_ms=round(renewal.duration * 1000),
                consumer_id=self._consumer_id,
            )
            self._producer.send(marker, on_report)


def _log_lost(lease: Lease) -> None:
    offsets = sorted(lease.held_offsets())
    if offsets:
        logger.warning(
            "lease lost: %d message(s) of queue partition %d, the first at offset %d, were held too long; "
            "they will be redelivered",
            len(offsets),
            lease.queue_partition,
            offsets[0],
            extra={"action": "lease_lost", "partition": lease.queue_partition},
        )
