"""Whether T is long enough: the fastest of several heartbeats decides."""

from __future__ import annotations

import math

import pytest

from kmq_spark.coordination.round_trip import FEWEST_ROUND_TRIPS, ROUND_TRIPS, require_round_trip
from kmq_spark.errors import ConfigError, KafkaClientError

LATER = 60.0


class Way:
    """
    A way to the broker whose heartbeats take what a test says; the last one repeats.

    Attributes:
        measured: Number of heartbeats.
        now_s: Clock; heartbeats and pauses move it.
    """

    def __init__(self, *taken_ms: float) -> None:
        """Begin at zero."""
        self.measured, self.now_s = 0, 0.0
        self._taken_ms = taken_ms

    def require(self, heartbeat_ms: int, until_s: float = LATER) -> None:
        """Ask whether T is long enough."""
        require_round_trip(heartbeat_ms, self._measure, until_s, clock_s=lambda: self.now_s, pause=self._pause)

    def _measure(self) -> float:
        taken_ms = self._taken_ms[min(self.measured, len(self._taken_ms) - 1)]
        self.measured += 1
        self.now_s += 10.0 if math.isinf(taken_ms) else taken_ms / 1000
        return taken_ms

    def _pause(self, paused_s: float) -> None:
        self.now_s += paused_s


@pytest.mark.parametrize(
    ("heartbeat_ms", "taken_ms"),
    [
        (2_000, (8.0,)),
        (2_000, (666.0,)),
        (1_000, (612.0, 498.0, 733.0, 21.0)),  # three slow ones: this was refused
        (1_000, (math.inf, 402.0, 377.0, 350.0, 341.0, 12.0)),
        (100, (88.0,) * 11 + (33.0,)),
    ],
)
def test_one_fast_heartbeat_shows_that_t_is_long_enough(heartbeat_ms: int, taken_ms: tuple[float, ...]) -> None:
    """A busy host delays some of them; no more are written than needed."""
    way = Way(*taken_ms)
    way.require(heartbeat_ms)
    assert way.measured == len(taken_ms)


def test_t_below_each_round_trip_is_refused() -> None:
    """With the fastest one, and what T allows."""
    way = Way(140.0, 350.0, 101.0, 260.0)
    with pytest.raises(ConfigError, match=r"got 300, and the fastest of 12 heartbeats takes 101 ms .*, maximum 100;"):
        way.require(300)
    assert way.measured == ROUND_TRIPS


def test_short_t_is_not_judged_within_one_slow_moment() -> None:
    """The heartbeats are spread over more than their round trips: 12 x 34 ms alone would be 0.4 s."""
    way = Way(34.0)
    with pytest.raises(ConfigError):
        way.require(100)
    assert way.now_s == pytest.approx(12 * 0.034 + 11 * 0.1 / 3)


def test_no_more_is_measured_when_the_time_of_the_join_is_over() -> None:
    """But three heartbeats at least."""
    late, long = Way(500.0), Way(500.0)
    with pytest.raises(ConfigError, match="the fastest of 3 heartbeats"):
        late.require(1_000, until_s=0.0)
    with pytest.raises(ConfigError, match="the fastest of 6 heartbeats"):
        long.require(1_000, until_s=4.0)  # 0.5 s each, and pauses of 0.25 s: the seventh would begin after 4.25 s
    assert (late.measured, long.measured) == (FEWEST_ROUND_TRIPS, 6)


def test_heartbeats_that_are_never_read_back_say_nothing_about_t() -> None:
    """The error is about the broker."""
    with pytest.raises(KafkaClientError, match="none of 3 heartbeats was read back in time; check the broker") as found:
        Way(math.inf).require(60_000, until_s=20.0)
    assert found.value.retriable
