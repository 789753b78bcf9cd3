"""Suspects get their turn, apart, and a bounded share of the time; the clock is a number."""

from __future__ import annotations

import pytest

from kmq_spark.consumer.poison.admission import Turn
from kmq_spark.consumer.poison.suspects import FIRST_PAUSE_S, MAX_DEFER_S, MAX_PAUSE_S, REST_FACTOR, Isolation


class Suspect:
    """A message that is held until its test says otherwise."""

    is_held = True


def spend(isolation: Isolation, began_at: float, ended_at: float, suspects: int = 1) -> None:
    """Have suspects out for a time."""
    out = [Suspect() for _ in range(suspects)]
    isolation.begin(out, began_at)
    for suspect in out:
        assert isolation.is_out(ended_at)
        suspect.is_held = False
    assert not isolation.is_out(ended_at)


def test_suspect_goes_alone_where_nothing_is_held() -> None:
    assert Isolation().turn(0.0, is_empty=True, others_wait=True) is Turn.ALONE


def test_others_are_let_finish_for_a_suspect() -> None:
    isolation = Isolation()
    assert isolation.turn(0.0, is_empty=False, others_wait=True) is Turn.WAIT
    isolation.pause(0.0)
    assert isolation.is_pausing(FIRST_PAUSE_S - 0.1)
    assert isolation.turn(FIRST_PAUSE_S - 0.1, is_empty=True, others_wait=True) is Turn.ALONE


def test_suspects_get_their_share_of_the_time_while_good_ones_wait() -> None:
    isolation = Isolation()
    spend(isolation, 0.0, 1.0)
    # 1 + 6 * 1 = 7
    assert isolation.turn(6.9, is_empty=True, others_wait=True) is Turn.DEFER
    assert isolation.turn(7.0, is_empty=True, others_wait=True) is Turn.ALONE


def test_suspects_may_have_all_the_time_that_nothing_else_needs() -> None:
    isolation = Isolation()
    spend(isolation, 0.0, 60.0)
    assert isolation.turn(60.0, is_empty=True, others_wait=False) is Turn.ALONE
    assert isolation.turn(60.0, is_empty=False, others_wait=False) is Turn.DEFER


def test_pause_counts_as_time_of_the_suspect() -> None:
    isolation = Isolation()
    isolation.pause(0.0)
    spend(isolation, 0.9, 1.0)
    assert isolation.is_resting(6.9)
    assert not isolation.is_resting(7.0)


def test_handlers_that_take_long_are_let_finish_ever_longer_and_never_stopped_for_more_than_a_seventh() -> None:
    isolation, now, paused_s = Isolation(), 0.0, 0.0
    pauses = []
    for _ in range(8):
        assert isolation.turn(now, is_empty=False, others_wait=True) is Turn.WAIT
        isolation.pause(now)
        began_at = now
        while isolation.is_pausing(now):
            now += 0.5
        assert isolation.turn(now, is_empty=False, others_wait=True) is Turn.DEFER
        pauses.append(now - began_at)
        paused_s += now - began_at
        while isolation.is_resting(now):
            assert isolation.turn(now, is_empty=False, others_wait=True) is Turn.DEFER
            now += 0.5
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]
    assert paused_s == pytest.approx(now / (1 + REST_FACTOR))


def test_pause_is_short_again_after_a_turn() -> None:
    isolation = Isolation()
    isolation.pause(0.0)
    assert isolation.turn(1.0, is_empty=False, others_wait=True) is Turn.DEFER
    spend(isolation, 10.0, 10.1)
    isolation.pause(20.0)
    assert not isolation.is_pausing(20.0 + FIRST_PAUSE_S)


def test_crowd_is_out_until_the_last_of_it_is_settled_or_lost() -> None:
    spend(Isolation(), 0.0, 0.5, suspects=32)


def test_suspects_that_wait_come_back_one_after_the_other() -> None:
    isolation = Isolation()
    spend(isolation, 0.0, 1.0)
    # Free again at 7; each turn and the rest after it takes 7.
    assert [isolation.defer_ms(1, 1.0) for _ in range(3)] == [13_000, 20_000, 27_000]
    rests = [isolation.defer_ms(1, 1.0) for _ in range(100)]
    assert rests == sorted(rests)
    assert rests[-1] == MAX_DEFER_S * 1_000


def test_crowd_that_waits_comes_back_together() -> None:
    isolation = Isolation()
    spend(isolation, 0.0, 0.125)
    # 0.125 * 7 for all of them, so less than a second
    assert len({isolation.defer_ms(32, 1.0) for _ in range(32)}) == 1
