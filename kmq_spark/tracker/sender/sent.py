"""Count what the sender did for one batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmq_spark.tracker.sender.attempts import Attempt


@dataclass(slots=True)
class Sent:
    """
    What the sender has done for a batch.

    Attributes:
        nonexistent: Messages dropped because a marker named an offset at or past the end of the queue topic.
        lateness_ms: For each redelivered message: append time minus deadline, milliseconds, broker clock.
    """

    redelivered: int = 0
    expired: int = 0
    nonexistent: int = 0
    dead_lettered: int = 0
    lateness_ms: list[int] = field(default_factory=list)

    def add(self, done: Attempt) -> None:
        """Add what a committed transaction has done."""
        self.redelivered += done.redelivered
        self.expired += done.expired
        self.nonexistent += done.nonexistent
        self.dead_lettered += done.dead_lettered
        self.lateness_ms += done.lateness_ms
