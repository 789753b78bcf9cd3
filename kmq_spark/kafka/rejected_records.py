"""
Track which records of one transaction the broker rejected as too large, and what to write instead.

Rule 1: An item that was rejected once becomes a dead letter. An item that was rejected twice becomes a dead letter
without payload. There is no third time, so the attempts end.
Rule 2: An item at least as large as a rejected one counts as rejected without an attempt: librdkafka reports about
three rejections per attempt, and a batch may contain thousands of such items.
"""

from __future__ import annotations

from collections import Counter

MOST = 2
"""Rejections after which the payload is left out, so that nothing remains that the broker could reject."""


class Refusals:
    """The rejections in one transaction, over all its attempts."""

    def __init__(self) -> None:
        """Start without rejections."""
        self._by_item: Counter[int] = Counter()
        self._smallest_bytes: dict[int, int] = {}
        self.count = 0

    def of(self, index: int, size_bytes: int) -> int:
        """
        Return how often an item was rejected, or would be.

        Args:
            index: Index of the item in the transaction.
            size_bytes: Size of its key, value and headers.

        Returns:
            0: redeliver it as decided. 1: it is too large for the queue topic. 2: it is too large for the dead-letter
            topic too.
        """
        refused = self._by_item[index]
        while refused < MOST and size_bytes >= self._smallest_bytes.get(refused, size_bytes + 1):
            refused += 1
        return refused

    def note(self, index: int, size_bytes: int, before: int) -> None:
        """Record that the broker rejected an item that had been rejected *before* times."""
        self._by_item[index] = before + 1
        self._smallest_bytes[before] = min(size_bytes, self._smallest_bytes.get(before, size_bytes))
        self.count += 1
