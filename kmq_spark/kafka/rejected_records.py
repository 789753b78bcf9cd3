"""
Track which records of one transaction the broker rejected as too large, and what to write instead.

Rule 1: A message that was rejected once becomes a dead letter. A message that was rejected twice becomes a dead letter
without payload. There is no third time, so the attempts end.
Rule 2: A message at least as large as a rejected one counts as rejected without an attempt: librdkafka reports about
three rejections per attempt, and a batch may contain thousands of such messages.
"""

from __future__ import annotations

from collections import Counter

MAX_REJECTIONS = 2
"""Rejections after which the payload is left out, so that nothing remains that the broker could reject."""


class RejectedRecords:
    """
    The rejections in one transaction, over all its attempts.

    Attributes:
        total_count: Number of rejections, of known and of unknown messages.
    """

    def __init__(self) -> None:
        """Start without rejections."""
        self._by_index: Counter[int] = Counter()
        self._smallest_bytes: dict[int, int] = {}
        self.total_count = 0

    def rejection_count(self, index: int, size_bytes: int) -> int:
        """
        Return how often a message was rejected, or would be.

        Args:
            index: Index of the message in the transaction.
            size_bytes: Size of its key, value and headers.

        Returns:
            0: redeliver it as decided. 1: it is too large for the queue topic. 2: it is too large for the dead-letter
            topic too.
        """
        count = self._by_index[index]
        while count < MAX_REJECTIONS and size_bytes >= self._smallest_bytes.get(count, size_bytes + 1):
            count += 1
        return count

    def note_unknown(self) -> None:
        """Record that the broker rejected one of several messages that share a callback: the next attempt finds it."""
        self.total_count += 1

    def note(self, index: int, size_bytes: int, before: int) -> None:
        """Record that the broker rejected a message that had been rejected *before* times."""
        self._by_index[index] = before + 1
        self._smallest_bytes[before] = min(size_bytes, self._smallest_bytes.get(before, size_bytes))
        self.total_count += 1
