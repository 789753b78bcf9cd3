"""The patience of a campaign: what a slow machine gets, and what it does not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from faults.calibration import MOST, REFERENCE_S, SpeedWatch, judged, slowness
from tests.limits import COMES_S


def test_bounds_grow_with_the_machine() -> None:
    assert judged([1.5 * REFERENCE_S] * 3) == 1.5


def test_one_slow_turn_is_noise() -> None:
    assert judged([1.2 * REFERENCE_S, 1.2 * REFERENCE_S, 9 * REFERENCE_S]) == 1.2


@pytest.mark.parametrize(("turn_s", "expected"), [(0.5 * REFERENCE_S, 1.0), (50 * REFERENCE_S, MOST)])
def test_bounds_are_neither_shorter_than_written_nor_without_end(turn_s: float, expected: float) -> None:
    assert judged([turn_s] * 3) == expected


def test_this_machine_is_timed() -> None:
    assert 1.0 <= slowness() <= MOST


@pytest.fixture
def watch() -> Iterator[SpeedWatch]:
    """A watch of this machine."""
    made = SpeedWatch()
    yield made
    made.close()


def test_speed_is_the_average_of_what_was_measured_in_between(watch: SpeedWatch) -> None:
    for at_ms, turns in ((99, 9.0), (100, 1.0), (200, 2.0), (201, 9.0)):
        watch.note(at_ms, turns * REFERENCE_S)
    assert watch.slowness(100, 200) == 1.5


def test_time_in_which_nothing_was_measured_loosens_no_bound(watch: SpeedWatch) -> None:
    assert watch.slowness(0, 1) == 1.0


def test_this_machine_is_watched(watch: SpeedWatch) -> None:
    """What the watch measures is the time of a whole turn."""
    from_ms = time.time_ns() // 1_000_000
    give_up_s = time.monotonic() + COMES_S
    while not (turns_s := watch.turns_s(from_ms, time.time_ns() // 1_000_000)):
        assert time.monotonic() < give_up_s
        time.sleep(0.1)
    assert 0.1 * REFERENCE_S < turns_s[0] < 100 * REFERENCE_S
