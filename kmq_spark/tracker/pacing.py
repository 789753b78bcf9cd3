"""How long a tracker rests between two batches while nothing is due."""

from __future__ import annotations

BEHIND_S = 3.0
"""A batch that took longer has more to read behind it, most likely, and is not followed by a rest."""

REST_SHARE = 2.0
LONGEST_REST_S = 1.0
"""
A rest is so many times as long as the batch before it, up to this, where `rest_ms` is shorter: a tracker with nothing
to decide leaves two thirds of a processor to others, however slow the machine or however cold the JVM.
"""


def rest_s(worked_s: float, rest_ms: int) -> float:
    """
    Return how long to rest at most, seconds; the TICK of the next deadline ends a rest (`Ticker.rest`).

    Args:
        worked_s: How long the batch took, seconds.
        rest_ms: The setting; 0 for no rests.
    """
    if not rest_ms or worked_s > BEHIND_S:
        return 0.0
    return max(rest_ms / 1000, min(worked_s * REST_SHARE, LONGEST_REST_S))
