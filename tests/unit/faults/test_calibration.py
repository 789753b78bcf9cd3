"""The patience of a campaign: what a slow machine gets, and what it does not."""

from __future__ import annotations

import pytest

from faults.calibration import MOST, REFERENCE_S, judged, slowness


def test_bounds_grow_with_the_machine() -> None:
    assert judged([1.5 * REFERENCE_S] * 3) == 1.5


def test_one_slow_turn_is_noise() -> None:
    assert judged([1.2 * REFERENCE_S, 1.2 * REFERENCE_S, 9 * REFERENCE_S]) == 1.2


@pytest.mark.parametrize(("turn_s", "expected"), [(0.5 * REFERENCE_S, 1.0), (50 * REFERENCE_S, MOST)])
def test_bounds_are_neither_shorter_than_written_nor_without_end(turn_s: float, expected: float) -> None:
    assert judged([turn_s] * 3) == expected


def test_this_machine_is_timed() -> None:
    assert 1.0 <= slowness() <= MOST
