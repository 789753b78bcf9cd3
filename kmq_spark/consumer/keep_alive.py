"""
Decide which leases to renew, and which have reached their limit.

Rule 1: a lease is renewed after a third of its length, so that two attempts may fail.
Rule 2: as soon as one lease is due, one KEEPALIVE renews all leases of the same length on that queue partition.
Rule 3: no lease is renewed beyond its limit, so that a handler that hangs does not hold its message forever.
Rule 4: a renewal counts from the time when it was sent, and only after it is durable.

Source: SQS `ChangeMessageVisibility` with its bound of 12 hours. kafka-mq-go writes one KEEPALIVE per message, without
a bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kmq_spark.consumer.leases import Lease

RENEW_AFTER = 1 / 3
"""Share of the lease length after which a lease is renewed."""


class Renewal(NamedTuple):
    """One KEEPALIVE to write."""

    queue_partition: int
    leases: tuple[Lease, ...]
    sent_at: float
    duration: float

    def offsets(self) -> list[int]:
        """Return the offsets held now. If one is settled meanwhile: a KEEPALIVE after an END has no effect."""
        return [offset for lease in self.leases for offset in lease.held_offsets()]

    def durable(self, now: float) -> None:
        """
        Extend the leases that have not ended.

        Args:
            now: Monotonic seconds. A lease that has ended is not extended: the tracker may have decided its messages
                before the renewal was written.
        """
        for lease in self.leases:
            if not lease.end_reason and now <= lease.ends_at:
                lease.ends_at = max(lease.ends_at, self.sent_at + self.duration)


def renewals(leases: Iterable[Lease], now: float) -> Iterator[Renewal]:
    """
    Yield the renewals that are due.

    Args:
        leases: The open leases.
        now: Monotonic seconds.

    Yields:
        At most one renewal per queue partition and lease length. Its leases get `renewed_at` = *now*, even if it fails
        later: a failed renewal is tried again after another third.
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
