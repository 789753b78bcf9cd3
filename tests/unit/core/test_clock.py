"""One step of a partition's clock; what a history of them promises is in `test_clock_properties.py`."""

from __future__ import annotations

import pytest

from kmq_spark.core.clock import LONGEST_STEP_MS, ClockStart, advanced
from kmq_spark.core.fold import PartitionState
from tests.builders import log, start, unreadable


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


def test_rebuild_begins_with_the_time_of_the_first_record_that_has_one() -> None:
    """As far ahead of it as the clock was there; the records of a batch come in any order."""
    timed = [*log(start(at_ms=-1), unreadable(7_000), start(at_ms=6_000))][::-1]
    state = PartitionState.rebuilding(None, ClockStart(ahead_ms=300), timed)
    assert (state.appended_at_ms, state.clock_ms, state.behind_ms) == (7_000, 7_300, 300)
    known = PartitionState.rebuilding(None, ClockStart(300, 6_500), timed)
    assert (known.appended_at_ms, known.clock_ms) == (6_500, 6_800)
    # A broker whose clock begins at the epoch: 0 is a time as well.
    assert PartitionState.rebuilding(None, ClockStart(300, 0), timed).appended_at_ms == 0
    assert PartitionState.rebuilding(None, ClockStart(), log(start(at_ms=0), start(at_ms=5))).appended_at_ms == 0


def test_rebuild_that_finds_no_record_begins_at_the_epoch() -> None:
    for markers in ([], log(start(at_ms=-1))):
        state = PartitionState.rebuilding(None, ClockStart(), markers)
        assert (state.appended_at_ms, state.clock_ms) == (0, 0)
