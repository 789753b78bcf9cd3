"""
The backoff of a queue: the extra delay before a message is redelivered. `core/delays.py` computes it.

Source: Spring's and Celery's retry policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class BackoffKind(IntEnum):
    """How the delay grows with the delivery count."""

    NONE = 0
    CONSTANT = 1
    LINEAR = 2
    EXPONENTIAL = 3


@dataclass(frozen=True, slots=True)
class Backoff:
    """
    The backoff of one queue.

    Attributes:
        kind: How the delay grows.
        initial_ms: Delay after the first delivery, milliseconds.
        max_ms: Longest delay, milliseconds.
        jitter: Largest share of a delay that the hash may subtract, 0 to 1. With 0 there is no jitter; with 1 the delay
            is between 0 and its full length.
    """

    kind: BackoffKind = BackoffKind.NONE
    initial_ms: int = 1_000
    max_ms: int = 60_000
    jitter: float = 0.0
