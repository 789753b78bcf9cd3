"""The pause before something that failed is tried again."""

from __future__ import annotations


def retry_pause_s(failures_in_a_row: int, first_s: float, longest_s: float) -> float:
    """
    Return how long to wait before the next attempt, seconds: twice as long after each failure, up to a limit.

    Args:
        failures_in_a_row: At least 1.
        first_s: Pause after the first failure, seconds.
        longest_s: Limit, seconds.
    """
    # Past 2^30 every limit is reached, and a float overflows at 2^1024.
    return min(first_s * 2.0 ** min(failures_in_a_row - 1, 30), longest_s)
