"""The soak's verdict: a measure that grows fails it, one that only moves does not, a short run proves nothing."""

from __future__ import annotations

import pytest

from faults.soak import BOUNDS, Bound, grown, growth

TIMES_S = [30.0 * number for number in range(60)]
MEMORY = Bound(an_hour=60, noise=10)
SAW = [200 + 10 * (number % 10) for number in range(60)]


def test_growing_series_fails() -> None:
    """2 MiB a minute, twice the bound."""
    found = growth(TIMES_S, [200 + number for number in range(60)], MEMORY)
    assert (found.is_too_much, found.an_hour) == (True, 120)  # 1 MiB each 30 s


@pytest.mark.parametrize(
    "values",
    [
        [200.0] * 60,
        [min(200 + 10 * number, 400) for number in range(60)],  # in the warm-up, and no further
        SAW,  # garbage that is collected every five minutes
        [200.0] * 55 + [2_000.0] + [200.0] * 4,
    ],
    ids=["flat", "warm-up", "saw-tooth", "spike"],
)
def test_series_that_does_not_grow_passes(values: list[float]) -> None:
    assert not growth(TIMES_S, values, MEMORY).is_too_much


def test_growth_that_begins_late_or_hides_in_a_saw_tooth_fails() -> None:
    """Flat for a quarter of an hour, then 4 MiB a minute; and 15 MiB more in each tooth."""
    assert growth(TIMES_S, [200 + 2 * max(0, number - 30) for number in range(60)], MEMORY).is_too_much
    assert growth(TIMES_S, [value + 15 * (number // 10) for number, value in enumerate(SAW)], MEMORY).is_too_much


def test_slope_below_the_noise_passes() -> None:
    """A few files more at the end of ten minutes are a steep slope an hour, and nothing."""
    times_s = [15.0 * number for number in range(40)]
    assert not growth(times_s, [100 + number // 10 for number in range(40)], Bound(an_hour=10, noise=8)).is_too_much


def test_too_few_samples_are_no_pass() -> None:
    sample = dict.fromkeys(BOUNDS, 1.0)
    for count in (0, 9):
        _, (reason,) = grown(TIMES_S[:count], [sample] * count)
        assert reason.startswith("too few samples")
    assert grown(TIMES_S, [sample] * 60)[1] == []
