"""A limit on how often something is done, for log lines and periodic work."""

from __future__ import annotations

import time


class RateLimit:
    """
    Allows something once in an interval.

    Args:
        interval_s: Seconds between two times.

    A thread uses it alone, or holds a lock.
    """

    def __init__(self, interval_s: float) -> None:
        """Allow the first time at once."""
        self._interval_s = interval_s
        self._allowed_at_s = float("-inf")

    def allows(self) -> bool:
        """Return whether the interval since the last allowed time is over. If so, it begins again."""
        now_s = time.monotonic()
        if now_s - self._allowed_at_s < self._interval_s:
            return False
        self._allowed_at_s = now_s
        return True
