"""
Judge whether the holder of a partition keeps up with it.

Rule 1: who catches up keeps up, however much waits: its lag reaches a new minimum from time to time.
Rule 2: no more than one batch is no lag, and neither is a partition on which nobody works: transactions end with
records of the broker's that no consumer gets.

Source: Marshal `claim.go`, `healthCheck`, which compares averages of two rates.
"""

from __future__ import annotations


class Pace:
    """
    Of one partition under one claim.

    Args:
        limit_s: How long the holder may be behind, seconds.
        enough: Lag that counts as none, messages.
        now_s: Any clock that never runs backwards, seconds.
    """

    def __init__(self, limit_s: float, enough: int, now_s: float) -> None:
        """Begin with a holder that keeps up."""
        self._limit_s, self._enough, self._since_s = limit_s, enough, now_s
        self._position = -1
        self._lowest: int | None = None

    def is_behind(self, now_s: float, position: int, end: int, *, is_working: bool) -> bool:
        """
        Look at the partition; return whether its holder has been behind for `limit_s`.

        Args:
            now_s: When, seconds.
            position: Next message to process.
            end: Offset behind the last message in the topic.
            is_working: Whether a message was handed out that is not processed yet.
        """
        lag = end - position
        has_moved, self._position = position > self._position, position
        is_small = lag <= self._enough
        is_lowest = self._lowest is None or lag < self._lowest
        if (has_moved and (is_small or is_lowest)) or (is_small and not is_working):
            self._since_s, self._lowest = now_s, lag
        return now_s - self._since_s >= self._limit_s
