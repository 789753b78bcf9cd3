"""Suspects get their turn, alone, and a bounded share of the time; the clock is a number."""

from __future__ import annotations

from kmq_spark.kafka.admission import Admission, Turn, Verdict
from kmq_spark.kafka.isolation import MAX_PAUSE_S, PATIENCE, Isolation

SUSPECT, GOOD = Admission(Verdict.HAND_OUT_ALONE), Admission(Verdict.HAND_OUT)


class Suspect:
    """A message that is held until somebody says otherwise."""

    is_held = True


def turn(isolation: Isolation, now: float, *, is_empty: bool = True, may_wait: bool = False, goods: int = 1) -> Turn:
    """Return the turn of a suspect with so many good messages behind it."""
    return isolation.turn([SUSPECT, *[GOOD] * goods], now, is_empty=is_empty, may_wait=may_wait)


def spend(isolation: Isolation, began_at: float, ended_at: float) -> None:
    """Have a suspect out for a time."""
    suspect = Suspect()
    isolation.begin(suspect, began_at)
    assert isolation.is_out(ended_at)
    suspect.is_held = False
    assert not isolation.is_out(ended_at)


def test_suspect_goes_alone_where_nothing_is_held() -> None:
    assert turn(Isolation(), 0.0) is Turn.ALONE


def test_run_waits_and_receive_defers_while_others_are_held() -> None:
    assert turn(Isolation(), 0.0, is_empty=False, may_wait=True) is Turn.WAIT
    assert turn(Isolation(), 0.0, is_empty=False) is Turn.DEFER


def test_suspects_get_their_share_of_the_time_while_good_ones_wait() -> None:
    isolation = Isolation()
    assert not isolation.is_spent(0.0)
    spend(isolation, 0.0, 3.0)
    # 1.5 saved up, 3 used: 1.5 missing; 0.15 * 10 = 1.5
    assert turn(isolation, 3.0) is Turn.DEFER
    assert turn(isolation, 12.9) is Turn.DEFER
    assert turn(isolation, 13.1) is Turn.ALONE


def test_suspects_may_have_all_the_time_that_nobody_else_wants() -> None:
    isolation = Isolation()
    spend(isolation, 0.0, 60.0)
    assert turn(isolation, 60.0, goods=0) is Turn.ALONE


def test_wait_for_others_counts_as_time_of_the_suspect() -> None:
    isolation = Isolation()
    isolation.is_spent(0.0)
    isolation.pause(0.0, may_wait=True)
    assert isolation.is_pausing(100.0)
    assert turn(isolation, 100.0) is Turn.ALONE
    spend(isolation, 100.0, 100.1)
    assert isolation.is_spent(100.1)


def test_deferrals_in_a_row_grow_to_their_bound_and_begin_again_after_a_turn() -> None:
    isolation = Isolation()
    assert [isolation.defer_ms() for _ in range(3)] == [1_000, 2_000, 3_000]
    assert [isolation.defer_ms() for _ in range(40)][-1] == 30_000
    spend(isolation, 0.0, 0.1)
    assert isolation.defer_ms() == 1_000


def test_receiver_that_always_holds_something_pauses_now_and_then_but_not_for_ever() -> None:
    isolation = Isolation()
    for _ in range(PATIENCE):
        assert turn(isolation, 0.0, is_empty=False) is Turn.DEFER
        isolation.defer_ms()
    assert turn(isolation, 0.0, is_empty=False) is Turn.WAIT
    isolation.pause(0.0, may_wait=False)
    assert isolation.is_pausing(MAX_PAUSE_S - 0.1)
    assert not isolation.is_pausing(MAX_PAUSE_S)
    assert turn(isolation, MAX_PAUSE_S, is_empty=False) is Turn.DEFER
    assert isolation.defer_ms() == 1_000
