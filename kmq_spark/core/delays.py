"""
Compute backoff.

Rule 1: backoff is a function of the message and its delivery count. Jitter comes from a hash of both, never from a
random source, so decisions remain a function of the log.
Rule 2: jitter only shortens a delay, so no delay exceeds `max_ms`.
Rule 3: a run of messages has one shortest delay. What jitter adds is computed only for messages that may be due.

Source: for jitter, AWS, "Exponential Backoff And Jitter" (2015); for the hash, SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kmq_spark.core.backoff import Backoff, BackoffKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LARGEST_SHIFT = 62
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def shortest_delays_ms(
    backoff: Backoff, delivery_count: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the shortest backoff after each number of deliveries, and the most that jitter adds to it."""
    count = np.maximum(delivery_count, 1)
    delay = np.full(len(count), float(backoff.initial_ms if backoff.kind else 0))
    if backoff.kind is BackoffKind.LINEAR:
        delay *= count
    elif backoff.kind is BackoffKind.EXPONENTIAL:
        delay *= np.ldexp(1.0, np.minimum(count - 1, _LARGEST_SHIFT).astype(np.int32))
    np.minimum(delay, backoff.max_ms, out=delay)
    jitter_ms = delay * backoff.jitter
    return (delay - np.floor(jitter_ms)).astype(np.int64), jitter_ms


def added_by_jitter_ms(
    key: NDArray[np.int64], delivery_count: NDArray[np.int64], jitter_ms: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return what jitter adds to the shortest backoff of each message: a hash of message and delivery decides."""
    mixed = _splitmix64(_splitmix64(key.astype(np.uint64)) + np.maximum(delivery_count, 1).astype(np.uint64))
    share = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    # Whole milliseconds are subtracted: a message must not fall due before its delay has passed.
    added: NDArray[np.int64] = (np.floor(jitter_ms) - np.floor(jitter_ms * share)).astype(np.int64)
    return added


def _splitmix64(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _FIRST_FACTOR
    value = (value ^ (value >> np.uint64(27))) * _SECOND_FACTOR
    return value ^ (value >> np.uint64(31))
