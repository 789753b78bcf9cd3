"""Suspects get their turn, apart, and a bounded share of the time; the clock is a number."""

from __future__ import annotations

import pytest

from kmq_spark.kafka.admission import Admission, Turn, Verdict
from kmq_spark.kafka.isolation import LOOK_FAR, LOOK_FAR_EVERY_S, MAX_PAUSE_S, PATIENCE, Isolation

SUSPECT, GOOD = Admission(Verdict.HAND_OUT_ALONE), Admission(Verdict.HAND_OUT)


class Suspect:
    """A message that is held until somebody says otherwise."""

    is_held = True


def turn(isolation: Isolation, now: float, *, is_empty: bool = True, may_wait: bool = False, goods: int = 1) -> Turn:
    """Return the turn of a suspect with so many good messages behind it, and nothing else."""
    assert isolation.look([SUSPECT, *[GOOD] * goods], now, is_all=True)
    return isolation.turn(now, is_empty=is_empty, may_wait=may_wait)


def spend(isolation: Isolation, began_at: float, ended_at: float, suspects: int = 1) -> None:
    """Have suspects out for a time."""
    out = [Suspect() for _ in range(suspects)]
    isolation.begin(out, began_at)
    assert isolation.is_out(ended_at)
    for suspect in out:
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
    assert turn(isolation, 0.0) is Turn.ALONE
    spend(isolation, 0.0, 3.0)
    # 1.5 saved up, 3 used: 1.5 missing; 0.15 * 10 = 1.5
    assert turn(isolation, 3.0) is Turn.DEFER
    assert turn(isolation, 12.9) is Turn.DEFER
    assert turn(isolation, 13.1) is Turn.ALONE


def test_suspects_may_have_all_the_time_that_nobody_else_wants() -> None:
    isolation = Isolation()
    assert turn(isolation, 0.0, goods=0) is Turn.ALONE
    spend(isolation, 0.0, 60.0)
    assert turn(isolation, 60.0, goods=0) is Turn.ALONE


def test_time_that_nobody_else_wanted_is_not_held_against_suspects_for_long() -> None:
    """A minute while nobody waited: the next good message goes before them for ten seconds, not for seven minutes."""
    isolation = Isolation()
    assert turn(isolation, 0.0, goods=0) is Turn.ALONE
    spend(isolation, 0.0, 60.0)
    assert turn(isolation, 69.9) is Turn.DEFER
    assert turn(isolation, 70.1) is Turn.ALONE
    # while one waits, all of it counts: 60 used, 1.5 saved up; 58.5 / 0.15 = 390
    spend(isolation, 70.1, 130.1)
    assert turn(isolation, 520.0) is Turn.DEFER
    assert turn(isolation, 520.2) is Turn.ALONE


def test_wait_for_others_counts_as_time_of_the_suspect() -> None:
    isolation = Isolation()
    assert turn(isolation, 0.0, is_empty=False, may_wait=True) is Turn.WAIT
    isolation.pause(0.0, may_wait=True)
    assert isolation.is_pausing(100.0)
    assert turn(isolation, 100.0) is Turn.ALONE
    spend(isolation, 100.0, 100.1)
    assert isolation.is_spent(100.1)


def test_crowd_is_out_until_the_last_of_it_is_settled_or_lost() -> None:
    isolation = Isolation()
    spend(isolation, 0.0, 0.5, suspects=32)
    assert not isolation.is_spent(0.5)


def test_others_are_looked_for_behind_a_crowd_of_suspects_but_rarely() -> None:
    isolation = Isolation()
    near = [SUSPECT] * 128
    assert isolation.look(near, 0.0, is_all=False)
    spend(isolation, 0.0, 3.0)
    assert not isolation.look(near, 3.0, is_all=False)
    # nobody: that holds for a while
    assert isolation.look([SUSPECT] * 500, 3.0, is_all=True)
    assert isolation.look(near, 3.0 + LOOK_FAR_EVERY_S, is_all=False)
    assert isolation.turn(3.1, is_empty=True, may_wait=True) is Turn.ALONE
    assert not isolation.look(near, 3.1 + LOOK_FAR_EVERY_S, is_all=False)
    # somebody, and then more suspects than can be seen past
    assert isolation.look([*near, GOOD], 4.0, is_all=False)
    assert isolation.turn(4.0, is_empty=True, may_wait=True) is Turn.DEFER
    assert not isolation.look(near, 4.1, is_all=False)
    assert isolation.look([SUSPECT] * LOOK_FAR, 4.1, is_all=False)
    assert isolation.turn(4.1, is_empty=True, may_wait=True) is Turn.DEFER


def test_suspects_that_others_hold_up_rest_ever_longer_and_a_crowd_is_spread_out() -> None:
    isolation = Isolation()
    rests = [isolation.defer_ms(1, 0.0) for _ in range(61)]
    assert rests[:3] == [1_000, 2_000, 3_000]
    assert [rests[29], rests[30], rests[60]] == [30_000, 1_000, 1_000]
    spend(isolation, 0.0, 0.1)
    assert isolation.defer_ms(1, 0.1) == 1_000


@pytest.mark.parametrize(("cost_s", "turns"), [(0.02, 900), (0.1, 180), (1.0, 18)])
def test_suspects_that_had_their_share_come_back_as_fast_as_it_takes_them(cost_s: float, turns: int) -> None:
    isolation, now = spent_by(cost_s, suspects=1)
    rests = [isolation.defer_ms(1, now) for _ in range(2_000)]
    assert rests == sorted(rests)
    assert (rests[0] >= 1_000, rests[-1]) == (True, 120_000)
    # 120 * 0.15 / cost_s in two minutes, but for what was thought at first, and the debt
    assert 0.7 * turns - 3 <= len([rest for rest in rests if rest < 120_000]) <= 1.1 * turns


def test_crowd_that_had_its_share_comes_back_together() -> None:
    isolation, now = spent_by(1.0, suspects=10)
    rests = [isolation.defer_ms(10, now) for _ in range(100)]
    assert [rests[0]] * 10 == rests[:10]
    assert len(set(rests)) == 10
    # 1 / 0.15 = 6.7 seconds each
    assert 6_000 <= rests[30] - rests[20] <= 8_000
    # What is fetched later makes a crowd of its own, and so do others of another size.
    assert len({isolation.defer_ms(10, now + 0.1), isolation.defer_ms(1, now + 0.1), rests[-1]}) == 3


def spent_by(cost_s: float, suspects: int) -> tuple[Isolation, float]:
    """Let others wait, and suspects use up their share by rounds of such a length; return the time after it."""
    isolation, now = Isolation(), 0.0
    isolation.look([SUSPECT, GOOD], now, is_all=True)
    for number in range(1_000):
        if number >= 30 and isolation.is_spent(now):
            break
        spend(isolation, now, now + cost_s, suspects)
        now += cost_s
    # The debt is paid but for the last bit.
    while isolation._credit_s < -0.01:
        now += 0.01
        isolation.is_spent(now)
    return isolation, now


def test_receiver_that_always_holds_something_pauses_now_and_then_but_not_for_ever() -> None:
    isolation = Isolation()
    for _ in range(PATIENCE):
        assert turn(isolation, 0.0, is_empty=False) is Turn.DEFER
        isolation.defer_ms(1, 0.0)
    assert turn(isolation, 0.0, is_empty=False) is Turn.WAIT
    isolation.pause(0.0, may_wait=False)
    assert isolation.is_pausing(MAX_PAUSE_S - 0.1)
    assert not isolation.is_pausing(MAX_PAUSE_S)
    assert turn(isolation, MAX_PAUSE_S, is_empty=False) is Turn.DEFER
    # 5 - 1.5 = 3.5 too much for nothing; 3.5 / 0.15 = 23.3, and its own turn
    assert isolation.defer_ms(1, MAX_PAUSE_S) == 24_000
