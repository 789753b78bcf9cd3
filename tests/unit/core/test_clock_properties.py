"""
What leases may expect of the clock of a markers partition, whatever the broker's clock does.

The truth here is the time that really passes. The broker's clock is that time and an offset, which steps: by hours, by
seconds, back and forth between two brokers. The fold sees the broker's clock alone. The slow model and the packed fold
are both held to these properties: they are compared with each other elsewhere, and can be wrong together.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmq_spark.core.clock import LONGEST_STEP_MS, ClockStart
from kmq_spark.core.fold import Decision, LoggedMarker, PartitionState, fold
from kmq_spark.core.markers import MarkerType
from kmq_spark.core.policy import QueueRules
from kmq_spark.kafka.positions import Position
from tests.builders import begun, end, keep_alive, log, start, tick
from tests.examples import examples
from tests.model import ModelTracker

if TYPE_CHECKING:
    from collections.abc import Callable

BEGIN_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
LEASES_MS = st.sampled_from([0, 50, 400, 3_000, 30_000, HOUR_MS])
GAPS_MS = st.sampled_from([0, 1, 20, 250, 900, 1_100, 40_000])
RULES = QueueRules(1, max_deliveries=0)

MARKERS = st.one_of(
    st.builds(
        start,
        message_offset=st.one_of(st.integers(0, 3), st.integers(0, 2**40)),
        at_ms=st.just(0),
        lease_ms=LEASES_MS,
        count=st.integers(1, 3),
        queue_partition=st.integers(0, 3),
    ),
    st.builds(
        keep_alive,
        message_offset=st.integers(0, 5),
        at_ms=st.just(0),
        lease_ms=LEASES_MS,
        count=st.integers(1, 3),
        queue_partition=st.integers(0, 3),
    ),
    st.builds(end, message_offset=st.integers(0, 5), at_ms=st.just(0), queue_partition=st.integers(0, 3)),
    st.builds(tick, st.just(0)),
    st.builds(tick, st.just(0)),
)


class Timed(NamedTuple):
    """A marker, the time that had really passed when it was appended, and what the broker's clock was ahead by."""

    real_ms: int
    ahead_ms: int
    logged: LoggedMarker


@st.composite
def histories(draw: st.DrawFn, aheads_ms: st.SearchStrategy[int], gaps_ms: st.SearchStrategy[int]) -> list[Timed]:
    """Return a log under a clock that is ahead by *aheads_ms*, which changes now and then."""
    length = draw(st.integers(2, 30))
    steps = st.tuples(MARKERS, gaps_ms, st.sampled_from([False, False, False, True]))
    real_ms, ahead_ms, history = 0, draw(aheads_ms), []
    for marker_offset, (logged, gap_ms, is_step) in enumerate(draw(st.lists(steps, min_size=length, max_size=length))):
        real_ms += gap_ms
        ahead_ms = draw(aheads_ms) if is_step else ahead_ms
        at_ms = BEGIN_MS + real_ms + ahead_ms
        history.append(Timed(real_ms, ahead_ms, LoggedMarker(marker_offset, at_ms, logged.marker)))
    return history


STEPPING = st.sampled_from([0, 0, -HOUR_MS, HOUR_MS, -60_000, 5_000, 300, -7])
TWO_BROKERS = st.sampled_from([0, 5_000])


def by_fold(history: list[Timed]) -> list[Decision]:
    """Decide by the packed fold."""
    return fold(begun(RULES), [timed.logged for timed in history]).decisions.messages()


def by_model(history: list[Timed]) -> list[Decision]:
    """Decide by the slow model."""
    model = ModelTracker(RULES)
    model.term = 1
    return model.fold([timed.logged for timed in history])[0]


Decide = pytest.mark.parametrize("decide", [by_fold, by_model])


def leased_by(history: list[Timed], queue_partition: int, message_offset: int, before: int) -> tuple[Timed, int] | None:
    """Return the marker that set the deadline of a message in flight, and its lease; None where it is not in flight."""
    found = None
    for timed in history[:before]:
        marker = timed.logged.marker
        assert marker is not None
        is_covered = marker.queue_partition == queue_partition and any(
            first <= message_offset < first + count for first, count in marker.ranges
        )
        if not is_covered:
            continue
        if marker.type is MarkerType.END:
            found = None
        elif marker.type is MarkerType.START or found is not None:
            found = timed, marker.redeliver_after_ms
    return found


@Decide
@settings(max_examples=examples(0.6))
@given(history=histories(STEPPING, GAPS_MS))
def test_lease_ends_early_by_no_more_than_the_clock_was_set_forward(
    decide: Callable[[list[Timed]], list[Decision]], history: list[Timed]
) -> None:
    """A step back ends no lease; a step forward looks like silence, and ends what was started before it."""
    for row in decide(history):
        leased = leased_by(history, row.queue_partition, row.message_offset, row.tick_marker_offset)
        assert leased is not None
        (set_at, lease_ms), ticked = leased, history[row.tick_marker_offset]
        since = history[set_at.logged.marker_offset : row.tick_marker_offset + 1]
        forward_ms = sum(max(0, timed.ahead_ms - before.ahead_ms) for before, timed in pairwise(since))
        assert ticked.real_ms - set_at.real_ms + forward_ms > lease_ms


@Decide
@settings(max_examples=examples(0.6))
@given(history=histories(TWO_BROKERS, GAPS_MS))
def test_leaders_that_take_turns_cost_a_lease_what_their_clocks_differ_by_and_no_more(
    decide: Callable[[list[Timed]], list[Decision]], history: list[Timed]
) -> None:
    """However often the partition goes from one to the other: the clock does not gain five seconds each time."""
    for row in decide(history):
        leased = leased_by(history, row.queue_partition, row.message_offset, row.tick_marker_offset)
        assert leased is not None
        elapsed_ms = history[row.tick_marker_offset].real_ms - leased[0].real_ms
        assert elapsed_ms + 5_000 > leased[1]


@Decide
@settings(max_examples=examples(0.6))
@given(history=histories(STEPPING, st.integers(0, LONGEST_STEP_MS)))
def test_lease_ends_on_time_while_the_clock_runs_and_markers_come(
    decide: Callable[[list[Timed]], list[Decision]], history: list[Timed]
) -> None:
    """Whatever the clock did before the lease: an hour ahead and back, and a lease of 3 s is one of 3 s."""
    decided = {(row.queue_partition, row.message_offset): row.tick_marker_offset for row in decide(history)}
    leased: dict[tuple[int, int], tuple[Timed, int]] = {}
    steady_from, before_ms = 0, history[0].ahead_ms
    for timed in history:
        marker, offset = timed.logged.marker, timed.logged.marker_offset
        assert marker is not None
        if timed.ahead_ms != before_ms:
            steady_from, before_ms = offset, timed.ahead_ms
        for first, count in marker.ranges:
            for message_id in ((marker.queue_partition, first + number) for number in range(count)):
                if marker.type is MarkerType.END:
                    leased.pop(message_id, None)
                elif marker.type is MarkerType.START or message_id in leased:
                    leased[message_id] = timed, marker.redeliver_after_ms
        if marker.type is not MarkerType.TICK:
            continue
        for message_id, (set_at, lease_ms) in leased.items():
            is_steady = steady_from <= set_at.logged.marker_offset
            is_due = is_steady and timed.real_ms - set_at.real_ms > lease_ms
            assert not is_due or decided.get(message_id, len(history)) <= offset


@pytest.mark.parametrize(("is_known", "early"), [(True, 0), (False, 1)])
def test_rebuild_after_a_step_back_ends_no_lease_early_when_the_clock_is_set_forward(
    is_known: bool,  # noqa: FBT001
    early: int,
) -> None:
    """The clock travels with the offsets of the tracker's group; without it the lease would end an hour early."""
    back_ms = BEGIN_MS - HOUR_MS
    markers = log(tick(BEGIN_MS), start(at_ms=back_ms, lease_ms=30_000), tick(BEGIN_MS + 500))
    status = fold(begun(RULES), markers[:2]).status
    assert (status.needed_marker_offset, status.needed_clock) == (1, ClockStart(HOUR_MS))
    written = Position(status.next_marker_offset, status.needed_marker_offset, clock=status.needed_clock)
    read = Position.from_topic_partition(written.to_topic_partition("orders.markers", 0))
    assert read == written
    clock = written.clock if is_known else ClockStart()
    rebuilt = PartitionState.rebuilding(None, clock, markers[1:])
    rebuilt.term = 1
    assert len(fold(rebuilt, markers[1:]).decisions) == early


def test_clock_travels_where_nothing_is_in_flight() -> None:
    """The broker's clock may be set back between the last marker of the first run and the first one of the rebuild."""
    markers = log(tick(BEGIN_MS), start(at_ms=BEGIN_MS - HOUR_MS, lease_ms=30_000), tick(BEGIN_MS + 500))
    status = fold(begun(RULES), markers[:1]).status
    assert status.needed_clock == ClockStart(0, BEGIN_MS)
    rebuilt = PartitionState.rebuilding(None, status.needed_clock, markers[1:])
    rebuilt.term = 1
    assert not len(fold(rebuilt, markers[1:]).decisions)
