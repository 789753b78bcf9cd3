"""
Compute the backoff: the extra delay before a message is redelivered.

Rule 1: backoff is a function of the message and its delivery count. Jitter comes from a hash of both, never from a
random source, so decisions remain a function of the log.
Rule 2: jitter only shortens a delay, so no delay exceeds `max_ms`.

Source: for the kinds, Spring's and Celery's retry policies; for jitter, AWS, "Exponential Backoff And Jitter" (2015);
for the hash, SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LARGEST_SHIFT = 62
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


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

    @property
    def has_jitter(self) -> bool:
        """Whether two messages with the same delivery count may have different delays."""
        return self.kind is not BackoffKind.NONE and self.jitter > 0

    def delays_ms(self, key: NDArray[np.int64], delivery_count: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the backoff of each message, which is added to its lease or to the delay of its release."""
        if self.kind is BackoffKind.NONE:
            return np.zeros(len(key), dtype=np.int64)
        count = np.maximum(delivery_count, 1)
        delay = np.full(len(key), float(self.initial_ms))
        if self.kind is BackoffKind.LINEAR:
            delay *= count
        elif self.kind is BackoffKind.EXPONENTIAL:
            delay *= np.ldexp(1.0, np.minimum(count - 1, _LARGEST_SHIFT).astype(np.int32))
        np.minimum(delay, self.max_ms, out=delay)
        if self.jitter:
            delay -= delay * self.jitter * _share(key, count)
        # Round up: a message must not fall due before its delay has passed.
        whole: NDArray[np.int64] = np.ceil(delay).astype(np.int64)
        return whole


def _share(key: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each message and delivery."""
    mixed = _splitmix64(_splitmix64(key.astype(np.uint64)) + count.astype(np.uint64))
    share: NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return share


def _splitmix64(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _FIRST_FACTOR
    value = (value ^ (value >> np.uint64(27))) * _SECOND_FACTOR
    return value ^ (value >> np.uint64(31))
