"""
Log the progress of a starting tracker through the part of the markers topic that it reads before it decides anything.

Rule 1: One log line every `LOG_INTERVAL_S` while markers are left to read, and one when the tracker is ready.
Rule 2: A warning where no more of them can be read: they are behind a transaction that is open, or that Kafka ended
without an end marker (KAFKA-20734). No consumer can read on there, and the tracker decides nothing.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kmq_spark.pauses import RateLimit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kmq_spark.core.outcome import PartitionOutcome

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 2.0

BLOCKED_AFTER_S = 30.0
"""After this time without a marker read there is a warning. Transactions of kmq-spark are shorter, or time out."""

BLOCKED_INTERVAL_S = 60.0
"""Time between two such warnings."""


class CatchUp:
    """
    The progress of one start of a tracker.

    Args:
        queue: Name for the log lines.
        decide_from: End offset of each markers partition when the tracker started.
        began_s: When the start began, monotonic seconds; None: now.

    Attributes:
        is_over: Whether every partition is read up to *decide_from*.
    """

    def __init__(self, queue: str, decide_from: Mapping[int, int], began_s: float | None = None) -> None:
        """Begin with no marker read."""
        self._began_s = time.monotonic() if began_s is None else began_s
        self._queue = queue
        self._decide_from = decide_from
        self._read_to: dict[int, int] = {}
        self._in_flight: dict[int, int] = {}
        self._unread = self._unread_places()
        self._unread_since_s = self._observed_s = time.monotonic()
        self._blocked_limit = RateLimit(BLOCKED_INTERVAL_S)
        self._log_limit = RateLimit(LOG_INTERVAL_S)
        self._log_limit.allows()  # the first line comes an interval after the start
        self.is_over = False

    def observe(self, outcomes: Iterable[PartitionOutcome]) -> None:
        """Update the progress from the outcomes of a batch, and log it when that is due."""
        if self.is_over:
            return
        for outcome in outcomes:
            self._read_to[outcome.marker_partition] = outcome.status.next_marker_offset
            self._in_flight[outcome.marker_partition] = outcome.status.in_flight
        self._observed_s = time.monotonic()
        if (unread := self._unread_places()) != self._unread:
            self._unread, self._unread_since_s = unread, self._observed_s
        left = sum(
            self._decide_from[partition] - read_to
            for partition, read_to in self._read_to.items()
            if read_to < self._decide_from.get(partition, 0)
        )
        if left and self._log_limit.allows():
            self._log_progress(left)
        elif not left and self._decide_from.keys() <= self._read_to.keys():
            self.is_over = True
            count, in_flight = len(self._decide_from), sum(self._in_flight.values())
            logger.info(
                "tracker of %s is ready: %d partition%s, %s in flight, took %.1f s",
                self._queue, count, "" if count == 1 else "s", f"{in_flight:,}", time.monotonic() - self._began_s,
                extra={"action": "ready", "queue": self._queue},
            )  # fmt: skip

    def warn_if_blocked(self, *, is_idle: bool) -> None:
        """
        Warn if no marker was read for a long time. Another thread may call this than `observe`.

        Args:
            is_idle: Whether no batch runs. One that runs may take long because it reads much.
        """
        waited_s = time.monotonic() - self._unread_since_s
        is_in_first_batch_since = not is_idle and self._observed_s <= self._unread_since_s
        if self.is_over or waited_s < BLOCKED_AFTER_S or is_in_first_batch_since or not self._blocked_limit.allows():
            return
        places = ", ".join(f"partition {number} to offset {self._decide_from[number]}" for number in self._unread)
        logger.warning(
            "tracker of %s decides nothing: it has to read markers %s, and has read nothing for %d s; a transaction is "
            "open there, or Kafka wrote no end marker for it; see docs/operations.md, 'A transaction hangs'",
            self._queue, places, waited_s, extra={"action": "blocked", "queue": self._queue},
        )  # fmt: skip

    def _unread_places(self) -> dict[int, int]:
        """Return how far the partitions are read that are not read to their end."""
        return {
            number: read_to
            for number, end in self._decide_from.items()
            if (read_to := self._read_to.get(number, 0)) < end
        }

    def _log_progress(self, left: int) -> None:
        in_flight = sum(self._in_flight.values())
        logger.info(
            "tracker of %s is catching up: %s markers left to read before it decides anything, %s messages in flight",
            self._queue, f"{left:,}", f"{in_flight:,}",
            extra={"action": "catching_up", "queue": self._queue},
        )  # fmt: skip
