"""One step of a partition's clock; what a history of them promises is in `test_clock_properties.py`."""

from __future__ import annotations

import pytest

from kmq_spark.core.clock import LONGEST_STEP_MS, advanced


@pytest.mark.parametrize(
    ("clock_ms", "last_ms", "appended_ms", "expected_ms"),
    [
        # The broker's clock runs: the clock is its newest time, however long nothing came.
        (5_000, 5_000, 5_000, 5_000),
        (5_000, 5_000, 5_001, 5_001),
        (5_000, 5_000, 9_000_000, 9_000_000),
        # It was set back: the clock stays, and from there on advances by what passes between two records.
        (5_000, 5_000, 4_999, 5_000),
        (5_000, 5_000, 0, 5_000),
        (5_000, 1_000, 1_000, 5_000),
        (5_000, 1_000, 1_007, 5_007),
        (5_000, 1_000, 1_000 + LONGEST_STEP_MS, 5_000 + LONGEST_STEP_MS),
        # A longer gap does not count, nor does another step back.
        (5_000, 1_000, 1_001 + LONGEST_STEP_MS, 5_000),
        (5_000, 1_000, 900, 5_000),
        # It caught up.
        (5_000, 1_000, 5_000, 5_000),
        (5_000, 1_000, 5_001, 5_001),
        (5_000, 4_500, 5_100, 5_600),
    ],
)
def test_clock_after_a_record(clock_ms: int, last_ms: int, appended_ms: int, expected_ms: int) -> None:
    assert advanced(clock_ms, last_ms, appended_ms) == expected_ms
