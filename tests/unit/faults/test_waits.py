"""What a fault excuses of a wait, and what the broker's moved clock says in true time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults.clocks import Epoch, LeadersClock, MovableClock
from faults.waits import QUIET_COUNT, Bounds, Interval, Quiet, Wait, gaps, merged, too_late
from kmq_spark.core.markers import MessageId

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PLACE = MessageId(0, 1)


def test_longest_quiet_interval_lies_between_the_faults() -> None:
    quiet = Quiet([Interval(100, 200), Interval(250, 300), Interval(190, 220)])
    assert quiet.longest_ms(50, 400) == 100  # 300 to 400
    assert quiet.longest_ms(120, 260) == 30  # 220 to 250
    assert quiet.longest_ms(120, 180) == 0
    assert quiet.longest_ms(0, 90) == 90
    assert quiet.longest_ms(400, 500) == 100


def test_intervals_that_touch_are_merged() -> None:
    assert merged([Interval(5, 9), Interval(1, 3), Interval(3, 4)]) == [Interval(1, 4), Interval(5, 9)]


def test_gaps_are_what_nothing_covers() -> None:
    assert gaps([Interval(20, 30), Interval(25, 40)], Interval(10, 50)) == [Interval(10, 20), Interval(40, 50)]
    assert gaps([], Interval(10, 50)) == [Interval(10, 50)]
    assert gaps([Interval(0, 99)], Interval(10, 50)) == []


def test_short_faults_do_not_excuse_a_long_wait() -> None:
    """Two pauses of a second in a minute: 49 s of it were quiet."""
    bounds = Bounds(away=[Interval(5_000, 6_000), Interval(10_000, 11_000)])
    (found,) = too_late([Wait(PLACE, 0, 60_000)], bounds)
    assert "60000 ms late, 49000 ms of it" in found


def test_fault_free_lateness_is_judged_by_its_99th_percentile() -> None:
    """Six seconds each, below the bound of a single one; with a fault all the time nothing is said."""
    waits = [Wait(PLACE, 100_000 + number, 106_000 + number) for number in range(QUIET_COUNT)]
    (found,) = too_late(waits, Bounds())
    assert "p99 of 100 redeliveries long after any fault is 6000 ms" in found
    assert list(too_late(waits, Bounds(away=[Interval(90_000, 91_000)]))) == []


def test_moved_clock_is_read_in_true_time(tmp_path: Path) -> None:
    """An hour back at 10_000, right at 20_000, an hour ahead at 30_000: each reading has one true time."""
    hour_ms = 3_600_000
    epochs = [Epoch(0, 0), Epoch(10_000, -hour_ms), Epoch(20_000, 0), Epoch(30_000, hour_ms)]
    readings_ms = [5_000, 15_000 - hour_ms, 25_000, 35_000 + hour_ms]
    assert MovableClock(tmp_path, epochs).true_times_ms(readings_ms) == [5_000, 15_000, 25_000, 35_000]


def test_clock_that_shows_a_time_again_is_read_in_the_order_of_the_log(tmp_path: Path) -> None:
    """A minute back after two minutes: 100_000 was true, and comes again a minute later."""
    epochs = [Epoch(0, 0), Epoch(120_000, -60_000)]
    assert MovableClock(tmp_path, epochs).true_times_ms([100_000, 119_000, 61_000, 100_000]) == [
        100_000,
        119_000,
        121_000,
        160_000,
    ]


def test_reading_at_the_edge_of_a_step_belongs_to_the_interval_after_it(tmp_path: Path) -> None:
    """The injector notes a step a moment after the clock has made it."""
    epochs = [Epoch(0, 0), Epoch(10_000, -60_000)]
    assert MovableClock(tmp_path, epochs).true_times_ms([9_990, 9_999 - 60_000]) == [9_990, 9_999]


def test_clock_of_a_partition_moves_with_its_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The injector sees a new leader a moment after it has begun to lead."""
    clock, times_ms = LeadersClock(tmp_path), iter([20_000, 30_000])
    monkeypatch.setattr("faults.clocks.now_ms", lambda: next(times_ms))
    for ahead_ms in (0, 5_000, 5_000, 0):
        clock.leads("jobs", 1, ahead_ms)
    readings_ms = [15_000, 19_000 + 5_000, 29_000 + 5_000, 29_900]
    assert clock.of("jobs", 1).true_times_ms(readings_ms) == [15_000, 19_000, 29_000, 29_900]
