"""The pause before a failed streaming query is started again: of the tracker, of the ledger, of `kmq enqueue`."""

from __future__ import annotations

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0


def restart_backoff_s(failures_in_a_row: int) -> float:
    """
    Return how long to wait before the next start, seconds: exponential backoff with a limit.

    Args:
        failures_in_a_row: At least 1.
    """
    return min(FIRST_BACKOFF_S * 2.0 ** min(failures_in_a_row - 1, 10), LONGEST_BACKOFF_S)
