"""The pause before a failed streaming query is started again: of the tracker, of the ledger."""

from __future__ import annotations

from kmq_spark.pauses import retry_pause_s

FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 30.0


def restart_backoff_s(failures_in_a_row: int) -> float:
    """Return the pause after this many failures, seconds."""
    return retry_pause_s(failures_in_a_row, FIRST_BACKOFF_S, LONGEST_BACKOFF_S)
