"""How long a drain of the campaign may last (I9)."""

from __future__ import annotations

from faults.drains import DEFERRED_TIMEOUT_S, DRAIN_TIMEOUT_S, LONGEST_DRAIN_S, DrainLimit

LATER_MS, NOW_MS, NOT_DEFERRED = 2_000, 1_000, 0


def test_drain_ends_after_a_minute_where_something_is_not_deferred() -> None:
    limit = DrainLimit(began_s=0)
    assert not limit.is_over([LATER_MS, NOT_DEFERRED], DRAIN_TIMEOUT_S, NOW_MS)
    assert limit.is_over([LATER_MS, NOT_DEFERRED], DRAIN_TIMEOUT_S + 1, NOW_MS)


def test_drain_goes_on_while_all_is_deferred_and_a_while_longer() -> None:
    limit = DrainLimit(began_s=0)
    assert not limit.is_over([LATER_MS], 100, NOW_MS)
    assert not limit.is_over([LATER_MS], 100 + DEFERRED_TIMEOUT_S, LATER_MS)
    assert limit.is_over([LATER_MS], 101 + DEFERRED_TIMEOUT_S, LATER_MS)


def test_deferral_that_is_over_gives_no_time() -> None:
    assert DrainLimit(began_s=0).is_over([NOW_MS], DRAIN_TIMEOUT_S + 1, NOW_MS)


def test_deferrals_are_not_waited_for_without_end() -> None:
    limit = DrainLimit(began_s=0)
    assert limit.is_over([LATER_MS], LONGEST_DRAIN_S + 1, NOW_MS)


def test_patience_lengthens_both_limits() -> None:
    limit = DrainLimit(began_s=0, timeout_s=60, patience=2)
    assert not limit.is_over([NOT_DEFERRED], 120, NOW_MS)
    assert not limit.is_over([LATER_MS], 200, NOW_MS)
    assert not limit.is_over([NOT_DEFERRED], 240, NOW_MS)
    assert limit.is_over([NOT_DEFERRED], 241, NOW_MS)
