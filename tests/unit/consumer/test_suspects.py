"""When a suspect is delivered, waited for or deferred; the clock is a number."""

from __future__ import annotations

from typing import Any

from kmq_spark.consumer.admission import Turn
from kmq_spark.consumer.suspects import DEFER_S, DRAIN_S, SuspectSchedule


class Suspect:
    """A message that is held until its test says otherwise."""

    is_held = True


def test_suspect_is_delivered_where_nothing_is_held_and_counts_until_it_is_settled() -> None:
    schedule, suspect = SuspectSchedule(), Suspect()
    taken: Any = suspect
    assert schedule.turn(0.0, is_empty=True) is Turn.ALONE
    schedule.took(taken)
    assert schedule.is_held
    suspect.is_held = False
    assert not schedule.is_held


def test_consumer_drains_for_a_suspect_for_a_bounded_time_and_then_defers_suspects_while_others_are_held() -> None:
    schedule = SuspectSchedule()
    assert schedule.turn(0.0, is_empty=False) is Turn.WAIT
    schedule.drain(0.0)
    schedule.drain(5.0)
    assert schedule.is_draining(DRAIN_S - 0.1)
    assert schedule.turn(DRAIN_S - 0.1, is_empty=False) is Turn.WAIT
    assert not schedule.is_draining(DRAIN_S)
    assert schedule.turn(DRAIN_S, is_empty=False) is Turn.DEFER
    assert schedule.turn(DRAIN_S + DEFER_S - 1, is_empty=False) is Turn.DEFER
    assert schedule.turn(DRAIN_S + DEFER_S - 1, is_empty=True) is Turn.ALONE
    assert schedule.turn(DRAIN_S + DEFER_S, is_empty=False) is Turn.WAIT


def test_drain_ends_with_the_batch_that_is_taken() -> None:
    schedule = SuspectSchedule()
    schedule.drain(0.0)
    schedule.took(None)
    assert not schedule.is_draining(0.0)
