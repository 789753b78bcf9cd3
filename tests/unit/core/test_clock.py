"""The clock of a rebuild; its steps are those of the model, and what they promise is in `test_clock_properties.py`."""

from __future__ import annotations

from kmq_spark.core.clock import ClockStart
from kmq_spark.core.fold import PartitionState
from tests.builders import log, start, unreadable


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
