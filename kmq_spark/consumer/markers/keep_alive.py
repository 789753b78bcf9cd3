"""
Decide which leases are to be renewed, and which have had their time.

Rule 1: a lease is renewed when a third of it has passed, so that two attempts may fail.
Rule 2: one KEEPALIVE covers all leases of one length on a queue partition, as soon as one of them is due.
Rule 3: no lease is renewed beyond its limit, so that a handler that hangs does not hold its message for ever.
Rule 4: a renewal counts from when it was sent, and only once it is durable.

Source: SQS `ChangeMessageVisibility` with its bound of 12 hours; kafka-mq-go renews one message a marker, unbounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kmq_spark.consumer.leases import Lease

RENEW_AFTER = 1 / 3
"""Share of the lease after which it is renewed."""


class Renewal(NamedTuple):
    """One KEEPALIVE to be written."""

    queue_partition: int
    leases: tuple[Lease, ...]
    sent_at: float
    duration: float

    def offsets(self) -> list[int]:
        """Return what is held now; a settled message does not come back by a KEEPALIVE after its END."""
        return [offset for lease in self.leases for offset in list(lease.held)]

    def durable(self, now: float) -> None:
        """
        Extend the leases that are still ours.

        Args:
            now: Monotonic seconds. After the end of a lease its messages may have been decided before the renewal was
                written, so it does not count.
        """
        for lease in self.leases:
            if not lease.fate and now <= lease.expires_at:
                lease.expires_at = max(lease.expires_at, self.sent_at + self.duration)


def renewals(leases: Iterable[Lease], now: float) -> Iterator[Renewal]:
    """
    Yield the KEEPALIVEs that are due.

    Args:
        leases: The open leases.
        now: Monotonic seconds.

    Yields:
        At most one a queue partition and length of lease; its leases are marked as renewed at *now*, whether it
        succeeds or not: a failed one is tried again after another third.
    """
    alike: dict[tuple[int, float], list[Lease]] = {}
    for lease in leases:
        if now + lease.duration_s <= lease.limit_at and now <= lease.expires_at:
            alike.setdefault((lease.queue_partition, lease.duration_s), []).append(lease)
    for (queue_partition, duration), found in alike.items():
        if any(now - lease.renewed_at >= duration * RENEW_AFTER for lease in found):
            for lease in found:
                lease.renewed_at = now
            yield Renewal(queue_partition, tuple(found), now, duration)
