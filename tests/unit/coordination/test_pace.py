"""Whether the holder of a partition keeps up: the looks of a minute, one a second, with a limit of ten seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.coordination.consumption import Pace

LIMIT_S = 10
ENOUGH = 100


def behind_at(looks: list[tuple[int, int]], *, is_working: bool = True) -> int | None:
    """Return the first second in which the holder is behind, by position and end of each second."""
    pace = Pace(LIMIT_S, ENOUGH, 0)
    for second, (position, end) in enumerate(looks):
        if pace.is_behind(second, position, end, is_working=is_working):
            return second
    return None


SECONDS = range(60)


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        pytest.param([(50 * s, 100_000) for s in SECONDS], None, id="catches up from far behind"),
        pytest.param([(100 * s, 100 * s + 90) for s in SECONDS], None, id="as fast as the senders, within a batch"),
        pytest.param([(50 * s, 50 * s + ENOUGH) for s in SECONDS], None, id="as fast as the senders, a batch behind"),
        pytest.param([(50 * s, 60 * s + 500) for s in SECONDS], 10, id="slower than the senders"),
        pytest.param([(50 * s, 50 * s + 500) for s in SECONDS], 10, id="as fast as the senders, far behind"),
        pytest.param([(40 * min(s, 20), 100_000) for s in SECONDS], 30, id="stuck after twenty seconds"),
        pytest.param([(7, 8)] * 60, 10, id="stuck in the last message"),
        pytest.param([(50 * (s - s % 8), 100_000) for s in SECONDS], None, id="batches of eight seconds"),
    ],
)
def test_holder_is_behind_when_its_lag_reaches_no_new_minimum(
    looks: list[tuple[int, int]], expected: int | None
) -> None:
    """Each with a message that is handed out all the time."""
    assert behind_at(looks) == expected


def test_idle_holder_is_not_behind_though_the_log_ends_with_records_of_the_broker() -> None:
    """The commit markers of transactions: nobody gets them, so the position stays below the end."""
    assert behind_at([(7, 8)] * 60, is_working=False) is None
    assert behind_at([(7, 7 + ENOUGH + 1)] * 60, is_working=False) == LIMIT_S


@given(st.lists(st.integers(1, 500), min_size=20, max_size=60), st.integers(0, 10_000))
def test_holder_that_gains_on_the_senders_is_never_behind(gains: list[int], lag: int) -> None:
    """Whatever waits, and however unevenly it gains."""
    looks, position, end = [], 0, lag + sum(gains)
    for gain in gains:
        position += gain + 3
        end += 3
        looks.append((position, end))
    assert behind_at(looks) is None


@given(st.lists(st.integers(0, 50), min_size=20, max_size=60))
def test_holder_that_falls_back_is_behind_after_the_limit(falls: list[int]) -> None:
    """However unevenly it works."""
    looks, position, end = [], 0, 1_000
    for fall in falls:
        looks.append((position, end))
        position += 5
        end += 5 + fall
    assert behind_at(looks) == LIMIT_S
