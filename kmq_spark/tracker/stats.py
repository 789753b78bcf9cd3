"""
Count what a tracker has done.

Rule 1: The counters change only when a batch is carried out. The command line and tests read them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.core.state import Status
    from kmq_spark.tracker.sender.sent import Sent

LATENESS_KEPT = 100_000


@dataclass(slots=True)
class TrackerStats:
    """
    What the tracker of one queue has done since the process started.

    Attributes:
        batches: Batches carried out.
        redelivered: Messages sent to the queue topic again.
        expired: Messages dropped because their TTL had expired.
        dead_lettered: Messages sent to the dead-letter topic.
        lateness_ms: Lateness of the newest redeliveries, milliseconds: append time minus deadline, broker clock.
        statuses: Newest status by markers partition.
    """

    batches: int = 0
    redelivered: int = 0
    expired: int = 0
    dead_lettered: int = 0
    lateness_ms: deque[int] = field(default_factory=lambda: deque(maxlen=LATENESS_KEPT))
    statuses: dict[int, Status] = field(default_factory=dict)

    def add(self, outcomes: Sequence[PartitionOutcome], sent: Sent) -> None:
        """Add the results of one batch."""
        self.batches += 1
        self.redelivered += sent.redelivered
        self.expired += sent.expired
        self.dead_lettered += sent.dead_lettered
        self.lateness_ms.extend(sent.lateness_ms)
        self.statuses |= {outcome.marker_partition: outcome.status for outcome in outcomes}
