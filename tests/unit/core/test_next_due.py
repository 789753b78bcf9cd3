"""When one marker may cause a decision: a lower bound of what the fold does."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmq_spark.core.fold import LoggedMarker, fold
from kmq_spark.core.markers import Outcome, Release
from kmq_spark.core.next_due import next_due_at_ms
from tests.builders import begun, end, keep_alive, log, start, tick
from tests.examples import examples
from tests.unit.core.test_fold_properties import MARKERS


@pytest.mark.parametrize(
    ("logged", "dead_letters_expired", "expected"),
    [
        (start(at_ms=1_000, lease_ms=5_000), False, 6_000),
        (start(at_ms=1_000, lease_ms=0, due_at_ms=9_000), False, 9_000),  # a deferral
        (start(at_ms=1_000, lease_ms=5_000, due_at_ms=2_000), False, 6_000),
        (keep_alive(at_ms=1_000, lease_ms=5_000), False, 6_000),
        (keep_alive(at_ms=1_000, lease_ms=0), False, 1_000),  # a release
        (keep_alive(at_ms=1_000, lease_ms=700, release=Release.GIVEN_BACK), False, 1_700),
        (keep_alive(at_ms=1_000, lease_ms=700, release=Release.FAILED), False, 1_000),  # perhaps the last delivery
        (end(at_ms=1_000, outcome=Outcome.REJECTED), False, -1),
        (end(at_ms=1_000, outcome=Outcome.EXPIRED), True, -1),
        (end(at_ms=1_000, outcome=Outcome.EXPIRED), False, None),
        (end(at_ms=1_000, outcome=Outcome.ACKED), True, None),
        (end(at_ms=1_000, outcome=Outcome.REDELIVERED), True, None),
        (tick(1_000), True, None),
    ],
)
def test_deadline_of_a_marker_is_the_end_of_its_lease_and_for_a_release_or_rejection_now(
    logged: LoggedMarker,
    dead_letters_expired: bool,  # noqa: FBT001  # a parameter of the test
    expected: int | None,
) -> None:
    assert logged.marker is not None
    found = next_due_at_ms(logged.marker, logged.appended_at_ms, dead_letters_expired=dead_letters_expired)
    assert found == expected


@settings(max_examples=examples(3))
@given(st.lists(st.tuples(MARKERS, st.sampled_from([0, 1, 5, 20, 60])), max_size=40))
def test_no_tick_decides_anything_up_to_the_earliest_deadline(steps: list[tuple[LoggedMarker, int]]) -> None:
    """Whatever the rules: a pause that ends just after this deadline is never too long."""
    times_ms = accumulate((step_ms for _, step_ms in steps), initial=1_000)
    placed = log(*(each._replace(appended_at_ms=at_ms) for (each, _), at_ms in zip(steps, times_ms, strict=False)))
    decided = fold(begun(), placed).decisions.messages()
    for decision in decided:
        known = [
            next_due_at_ms(each.marker, each.appended_at_ms, dead_letters_expired=True)
            for each in placed
            if each.marker is not None and each.marker_offset < decision.tick_marker_offset
        ]
        assert decision.tick_at_ms > min(due_at_ms for due_at_ms in known if due_at_ms is not None)
