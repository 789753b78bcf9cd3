"""Durations as callers give them."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from kmq_spark.core.durations import milliseconds, seconds
from kmq_spark.core.markers import MAX_DUE_AT_MS
from kmq_spark.errors import ConfigError


@pytest.mark.parametrize(
    ("duration", "expected_ms"),
    [(0, 0), (0.001, 1), (0.0011, 2), (4.35, 4_350), (timedelta(milliseconds=5), 5), (timedelta(hours=12), 43_200_000)],
)
def test_duration_is_rounded_up_to_whole_milliseconds(duration: Any, expected_ms: int) -> None:  # noqa: ANN401  # a number or a timedelta
    """Never shorter than asked for, and not longer by what a float adds."""
    assert milliseconds("delay", duration) == expected_ms


@pytest.mark.parametrize("duration", [-1, True, False, "5", None, math.nan, math.inf, 43_200.001, timedelta(days=1)])
def test_duration_out_of_bounds_or_no_number_is_reported(duration: Any) -> None:  # noqa: ANN401  # mistakes of every type
    """`release(delay=True)` was taken for a second."""
    with pytest.raises(ConfigError, match=r"delay is out of bounds: got .*, 0 to 43200 seconds; give seconds or"):
        milliseconds("delay", duration)


def test_longest_of_all_has_no_number_in_the_message() -> None:
    assert milliseconds("ttl", timedelta(days=365), most_ms=MAX_DUE_AT_MS) == 31_536_000_000
    with pytest.raises(ConfigError, match="ttl is out of bounds: got -1, at least 0 seconds"):
        milliseconds("ttl", -1, most_ms=MAX_DUE_AT_MS)


def test_time_out_is_a_number_of_seconds_or_a_timedelta() -> None:
    assert (seconds("timeout", 2), seconds("timeout", timedelta(milliseconds=500))) == (2, 0.5)
    for wrong in (0, -1, True, math.nan, math.inf, None):
        with pytest.raises(ConfigError, match=r"timeout is out of bounds: got .*; expected more than 0 seconds"):
            seconds("timeout", wrong)  # type: ignore[arg-type]  # mistakes
