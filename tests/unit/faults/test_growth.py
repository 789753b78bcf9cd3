"""The soak's verdict: a measure that grows fails it, one that only moves does not, a short run proves nothing."""

from __future__ import annotations

import pytest

from faults.growth import Bound, grown, growth

TIMES_S = [30.0 * number for number in range(60)]
MEMORY = Bound(an_hour=60, noise=10)


def test_growing_series_fails() -> None:
    """2 MiB a minute, twice the bound."""
    found = growth(TIMES_S, [200 + number for number in range(60)], MEMORY)
    assert found.is_too_much
    assert found.an_hour == 120  # 1 MiB each 30 s


def test_flat_series_passes() -> None:
    found = growth(TIMES_S, [200.0] * 60, MEMORY)
    assert not found.is_too_much
    assert (found.an_hour, found.first, found.last) == (0, 200, 200)


def test_growth_of_the_warm_up_does_not_count() -> None:
    """Up to 400 MiB in the first ten minutes, and no further."""
    assert not growth(TIMES_S, [min(200 + 10 * number, 400) for number in range(60)], MEMORY).is_too_much


def test_growth_that_begins_after_the_warm_up_is_seen() -> None:
    """Flat for a quarter of an hour, then 4 MiB a minute."""
    assert growth(TIMES_S, [200 + 2 * max(0, number - 30) for number in range(60)], MEMORY).is_too_much


def test_saw_tooth_passes_and_one_that_climbs_fails() -> None:
    """Garbage that is collected every five minutes; the second one leaves 15 MiB behind each time."""
    saw = [200 + 10 * (number % 10) for number in range(60)]
    assert not growth(TIMES_S, saw, MEMORY).is_too_much
    climbing = [value + 15 * (number // 10) for number, value in enumerate(saw)]
    assert growth(TIMES_S, climbing, MEMORY).is_too_much


def test_single_spike_passes() -> None:
    values = [200.0] * 60
    values[55] = 2_000
    assert not growth(TIMES_S, values, MEMORY).is_too_much


def test_slope_below_the_noise_passes() -> None:
    """A few files more at the end of ten minutes are a steep slope an hour, and nothing."""
    times_s = [15.0 * number for number in range(40)]
    assert not growth(times_s, [100 + number // 10 for number in range(40)], Bound(an_hour=10, noise=8)).is_too_much


def test_too_few_samples_are_no_pass() -> None:
    with pytest.raises(ValueError, match="too few samples"):
        growth(TIMES_S[:9], [200.0] * 9, MEMORY)
    with pytest.raises(ValueError, match="too few samples"):
        growth([], [], MEMORY)


def test_measure_without_a_bound_is_an_error() -> None:
    """Else a new measure would be watched by nothing."""
    with pytest.raises(KeyError):
        grown(TIMES_S, {"memory": [1.0] * 60}, {})
