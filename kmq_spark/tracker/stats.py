"""
What a tracker has done, in numbers.

Rule 1: counted where a batch is carried out, read by the command line and by tests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.core.state import Status
    from kmq_spark.tracker.sender.redelivery import Sent

LATENESS_KEPT = 100_000


@dataclass(slots=True)
class TrackerStats:
    """
    What one queue's tracker has done since this process began; read by the command line and by tests.

    Attributes:
        batches: Batches carried out.
        redelivered: Messages sent again.
        expired: Messages dropped, since their time to live was over.
        dead_lettered: Messages sent to the dead-letter topic.
        set_aside: Records of the markers topic that were no markers.
        restarts: How often the query was started again.
        lateness_ms: The newest redeliveries: append time less deadline, broker clock.
        statuses: Newest status by markers partition.
    """

    batches: int = 0
    redelivered: int = 0
    expired: int = 0
    dead_lettered: int = 0
    set_aside: int = 0
    restarts: int = 0
    lateness_ms: deque[int] = field(default_factory=lambda: deque(maxlen=LATENESS_KEPT))
    statuses: dict[int, Status] = field(default_factory=dict)

    def add(self, outcomes: Sequence[PartitionOutcome], sent: Sent) -> None:
        """Count one batch."""
        self.batches += 1
        self.redelivered += sent.redelivered
        self.expired += sent.expired
        self.dead_lettered += sent.dead_lettered
        self.set_aside += sent.set_aside
        self.lateness_ms.extend(sent.lateness_ms)
        self.statuses |= {outcome.marker_partition: outcome.status for outcome in outcomes}
