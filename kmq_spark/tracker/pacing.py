"""The length of a tracker's pause between two batches while nothing is due."""

from __future__ import annotations

BEHIND_S = 3.0
"""No pause follows a batch that took longer: most likely more markers are already waiting."""

PAUSE_SHARE = 2.0
LONGEST_PAUSE_S = 1.0
"""
Pause = `PAUSE_SHARE` x duration of the batch before it, at most `LONGEST_PAUSE_S` and at least `rest_ms`.

So a tracker with nothing to decide leaves two thirds of a processor free, also on a slow machine or with a cold JVM.
"""


def pause_s(worked_s: float, rest_ms: int) -> float:
    """
    Return the longest pause after a batch, seconds. The TICK of the next deadline ends a pause early (`Ticker.pause`).

    Args:
        worked_s: Duration of the batch, seconds.
        rest_ms: The setting `rest_ms`, milliseconds; 0 for no pauses.
    """
    if not rest_ms or worked_s > BEHIND_S:
        return 0.0
    return max(rest_ms / 1000, min(worked_s * PAUSE_SHARE, LONGEST_PAUSE_S))
