"""How often something is done: a limit for log lines and periodic work, and the pause before another attempt."""

from __future__ import annotations

import time


class RateLimit:
    """Allows something once in an interval. One thread uses it, or the callers hold a lock."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._allowed_at_s = float("-inf")

    def allows(self) -> bool:
        """Return whether the interval since the last allowed time is over. If so, it begins again."""
        now_s = time.monotonic()
        if now_s - self._allowed_at_s < self._interval_s:
            return False
        self._allowed_at_s = now_s
        return True


def retry_pause_s(failures_in_a_row: int, first_s: float, longest_s: float) -> float:
    """Return the pause before the next attempt, seconds: twice as long after each failure, up to a limit."""
    # Past 2^30 every limit is reached, and a float overflows at 2^1024.
    return min(first_s * 2.0 ** min(failures_in_a_row - 1, 30), longest_s)
