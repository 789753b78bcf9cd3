"""
Find out whether T is long enough for the way through the log and back.

Rule 1: the fastest of several heartbeats decides. What makes a single one slow (a process that starts beside this one,
a garbage collection of the broker, a full disk for a moment) is over soon, and a hold outlasts it: T has three
heartbeats. A way that is too long is too long for each of them.
Rule 2: the first heartbeat that is fast enough ends the measurement: a sound T costs one round trip.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from kmq_spark.coordination.session import BEATS_PER_INTERVAL
from kmq_spark.core.coordination.records import MAX_HEARTBEAT_MS, MIN_HEARTBEAT_MS
from kmq_spark.errors import ConfigError, KafkaClientError

if TYPE_CHECKING:
    from collections.abc import Callable

ROUND_TRIPS = 12
"""Most heartbeats by which a new member measures: three may fall into one slow moment of a busy host, all of them."""

FEWEST_ROUND_TRIPS = 3
"""As many are measured even where the time of the join is over."""

PAUSE_MS = 250.0
"""
Longest pause between two of them. Without it a short T would be measured within one slow moment: with T = 100 ms a slow
round trip takes 34 ms or more, twelve of them less than half a second.
"""


def require_round_trip(
    heartbeat_ms: int,
    measure: Callable[[], float],
    until_s: float,
    *,
    clock_s: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """
    Return if T allows the way to the broker: a third of T until a heartbeat is read back.

    Args:
        heartbeat_ms: T.
        measure: Writes a heartbeat and returns how long it took to be read back, milliseconds; infinity where it was
            not.
        until_s: When the join should be over, by *clock_s*.
        clock_s: Monotonic clock, seconds.
        pause: Sleeps for seconds.

    Raises:
        ConfigError: T is too short.
        KafkaClientError: No heartbeat was read back.
    """
    allowed_ms = heartbeat_ms / BEATS_PER_INTERVAL
    taken_ms: list[float] = []
    while len(taken_ms) < ROUND_TRIPS and (len(taken_ms) < FEWEST_ROUND_TRIPS or clock_s() < until_s):
        if taken_ms:
            pause(min(allowed_ms, PAUSE_MS) / 1000)
        taken_ms.append(measure())
        if taken_ms[-1] <= allowed_ms:
            return
    fastest_ms = min(taken_ms)
    if math.isinf(fastest_ms):
        message = f"none of {len(taken_ms)} heartbeats was read back in time; check the broker"
        raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)
    message = (
        f"heartbeat_ms is too short for this broker: got {heartbeat_ms}, and the fastest of {len(taken_ms)} heartbeats "
        f"takes {fastest_ms:.0f} ms to be read back, maximum {allowed_ms:.0f}; allowed are {MIN_HEARTBEAT_MS} to "
        f"{MAX_HEARTBEAT_MS}: use a longer one in all members"
    )
    raise ConfigError(message)
