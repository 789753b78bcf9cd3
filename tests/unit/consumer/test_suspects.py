"""Suspects get their turn, apart, and a bounded share of the time; the clock is a number."""

from __future__ import annotations

import pytest

from kmq_spark.consumer.poison.admission import Turn
from kmq_spark.consumer.poison.suspects import FIRST_DRAIN_S, MAX_DEFER_S, MAX_DRAIN_S, REST_FACTOR, SuspectSchedule


class Suspect:
    """A message that is held until its test says otherwise."""

    is_held = True


def spend(schedule: SuspectSchedule, began_at: float, ended_at: float, suspects: int = 1) -> None:
    """Have suspects out for a time."""
    out = [Suspect() for _ in range(suspects)]
    schedule.turn_began(out, began_at)
    for suspect in out:
        assert schedule.is_held(ended_at)
        suspect.is_held = False
    assert not schedule.is_held(ended_at)


def test_suspect_goes_alone_where_nothing_is_held() -> None:
    assert SuspectSchedule().turn(0.0, is_empty=True, others_wait=True) is Turn.ALONE


def test_others_are_let_finish_for_a_suspect() -> None:
    schedule = SuspectSchedule()
    assert schedule.turn(0.0, is_empty=False, others_wait=True) is Turn.WAIT
    schedule.drain(0.0)
    assert schedule.is_draining(FIRST_DRAIN_S - 0.1)
    assert schedule.turn(FIRST_DRAIN_S - 0.1, is_empty=True, others_wait=True) is Turn.ALONE


def test_suspects_get_their_share_of_the_time_while_good_ones_wait() -> None:
    schedule = SuspectSchedule()
    spend(schedule, 0.0, 1.0)
    # 1 + 6 * 1 = 7
    assert schedule.turn(6.9, is_empty=True, others_wait=True) is Turn.DEFER
    assert schedule.turn(7.0, is_empty=True, others_wait=True) is Turn.ALONE


def test_suspects_may_have_all_the_time_that_nothing_else_needs() -> None:
    schedule = SuspectSchedule()
    spend(schedule, 0.0, 60.0)
    assert schedule.turn(60.0, is_empty=True, others_wait=False) is Turn.ALONE
    assert schedule.turn(60.0, is_empty=False, others_wait=False) is Turn.DEFER


def test_drain_counts_as_time_of_the_suspect() -> None:
    schedule = SuspectSchedule()
    schedule.drain(0.0)
    spend(schedule, 0.9, 1.0)
    assert schedule.is_resting(6.9)
    assert not schedule.is_resting(7.0)


def test_handlers_that_take_long_are_let_finish_ever_longer_and_never_stopped_for_more_than_a_seventh() -> None:
    schedule, now, drained_s = SuspectSchedule(), 0.0, 0.0
    drains = []
    for _ in range(8):
        assert schedule.turn(now, is_empty=False, others_wait=True) is Turn.WAIT
        schedule.drain(now)
        began_at = now
        while schedule.is_draining(now):
            now += 0.5
        assert schedule.turn(now, is_empty=False, others_wait=True) is Turn.DEFER
        drains.append(now - began_at)
        drained_s += now - began_at
        while schedule.is_resting(now):
            assert schedule.turn(now, is_empty=False, others_wait=True) is Turn.DEFER
            now += 0.5
    assert drains == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_DRAIN_S, MAX_DRAIN_S, MAX_DRAIN_S]
    assert drained_s == pytest.approx(now / (1 + REST_FACTOR))


def test_drain_is_short_again_after_a_turn() -> None:
    schedule = SuspectSchedule()
    schedule.drain(0.0)
    assert schedule.turn(1.0, is_empty=False, others_wait=True) is Turn.DEFER
    spend(schedule, 10.0, 10.1)
    schedule.drain(20.0)
    assert not schedule.is_draining(20.0 + FIRST_DRAIN_S)


def test_crowd_is_out_until_the_last_of_it_is_settled_or_lost() -> None:
    spend(SuspectSchedule(), 0.0, 0.5, suspects=32)


def test_suspects_that_wait_come_back_one_after_the_other() -> None:
    schedule = SuspectSchedule()
    spend(schedule, 0.0, 1.0)
    # Free again at 7; each turn and the rest after it takes 7.
    assert [schedule.defer_ms(1, 1.0) for _ in range(3)] == [13_000, 20_000, 27_000]
    rests = [schedule.defer_ms(1, 1.0) for _ in range(100)]
    assert rests == sorted(rests)
    assert rests[-1] == MAX_DEFER_S * 1_000


def test_crowd_that_waits_comes_back_together() -> None:
    schedule = SuspectSchedule()
    spend(schedule, 0.0, 0.125)
    # 0.125 * 7 for all of them, so less than a second
    assert len({schedule.defer_ms(32, 1.0) for _ in range(32)}) == 1
