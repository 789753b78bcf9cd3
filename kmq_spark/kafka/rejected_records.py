"""
What the broker has refused as too large among the records of one transaction, and what follows for the others.

Rule 1: an item that was refused once becomes a dead letter, twice one without its payload; never a third time, so the
attempts end.
Rule 2: an item at least as large as a refused one is not tried first: librdkafka finds about three refusals an attempt,
and a batch may hold thousands.
"""

from __future__ import annotations

from collections import Counter

MOST = 2
"""Refusals after which nothing is left that could be refused: the payload stays where it is."""


class Refusals:
    """The refusals of one transaction, over its attempts."""

    def __init__(self) -> None:
        """Start with none."""
        self._by_item: Counter[int] = Counter()
        self._smallest_bytes: dict[int, int] = {}
        self.count = 0

    def of(self, index: int, size_bytes: int) -> int:
        """
        Return how often an item was refused, or would be.

        Args:
            index: Which item of the transaction.
            size_bytes: Its key, value and headers.

        Returns:
            0: redeliver it as decided; 1: the queue topic does not take it; 2: the dead-letter topic does not either.
        """
        refused = self._by_item[index]
        while refused < MOST and size_bytes >= self._smallest_bytes.get(refused, size_bytes + 1):
            refused += 1
        return refused

    def note(self, index: int, size_bytes: int, before: int) -> None:
        """Take in that the broker refused an item that had been refused *before* times."""
        self._by_item[index] = before + 1
        self._smallest_bytes[before] = min(size_bytes, self._smallest_bytes.get(before, size_bytes))
        self.count += 1
