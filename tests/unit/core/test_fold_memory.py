"""What the fold costs, whatever a marker names: a few bytes of any writer must cost neither gigabytes nor minutes."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.fold import fold
from kmq_spark.core.markers import MAX_MESSAGES_PER_MARKER, Outcome, Release
from kmq_spark.core.policy import QueueRules
from kmq_spark.core.resolve import resolve
from tests.builders import begun, end, keep_alive, log, start, tick

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.core.events import Events, LoggedMarker
    from kmq_spark.core.fold import FoldResult
    from kmq_spark.core.in_flight import InFlight
    from kmq_spark.core.state import Counters

MARKERS = 200
MOST_BYTES = 200_000_000
JITTERY = QueueRules(1, backoff=Backoff(BackoffKind.CONSTANT, initial_ms=1_000, max_ms=1_000, jitter=0.5))


@pytest.mark.parametrize("rules", [None, JITTERY])
@pytest.mark.parametrize("logged", [start, keep_alive, end])
def test_flood_of_markers_that_name_many_messages_is_folded_in_bounded_memory(
    logged: Callable[..., LoggedMarker], rules: QueueRules | None
) -> None:
    """200 markers of 100,000 messages each, 20 KB in all: 2.5 GB where each message named was a row of its own."""
    flood = log(*(logged(i * MAX_MESSAGES_PER_MARKER, count=MAX_MESSAGES_PER_MARKER) for i in range(MARKERS)), tick())
    tracemalloc.start()
    try:
        result = fold(begun(rules), flood)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES
    assert result.state.in_flight.run_count <= MARKERS
    total, counters = MARKERS * MAX_MESSAGES_PER_MARKER, result.state.counters
    assert counters.started + counters.renewed + counters.keepalive_unknown + counters.end_unknown == total


FRAGMENTS = 100
FRAGMENTED = start(ranges=[(2 * each, 1) for each in range(FRAGMENTS)])
ONE_OF_ANY_KIND = st.one_of(
    st.builds(start, st.just(0), count=st.just(MAX_MESSAGES_PER_MARKER), never_handed_out=st.booleans()),
    st.builds(
        keep_alive,
        st.just(0),
        count=st.just(MAX_MESSAGES_PER_MARKER),
        release=st.sampled_from(Release),
        lease_ms=st.just(0),
    ),
    st.builds(
        end,
        st.just(0),
        count=st.just(MAX_MESSAGES_PER_MARKER),
        outcome=st.sampled_from(Outcome),
        term=st.sampled_from([0, 1]),
    ),
)


@given(ONE_OF_ANY_KIND, ONE_OF_ANY_KIND, st.sampled_from([None, JITTERY]))
def test_flood_of_one_marker_over_fragments_costs_its_ranges_and_not_the_fragments(
    first: LoggedMarker, one: LoggedMarker, rules: QueueRules | None
) -> None:
    """Rows that the fold works on, and rows of its table: 60,000 where each marker was an event for each fragment."""
    rows, result = rows_of_a_fold(log(FRAGMENTED, first, *[one] * 300), rules)
    assert rows < 4_000
    assert result.state.in_flight.run_count <= 2 * FRAGMENTS + 1


def test_flood_of_markers_of_different_ranges_costs_where_they_meet_each_other() -> None:
    """Rows that the fold works on: 9,000 where each marker was an event for each fragment."""
    flood = [keep_alive(each, count=2 * (FRAGMENTS - each)) for each in range(60)]
    rows, _ = rows_of_a_fold(log(FRAGMENTED, *flood), None)
    assert rows < 2_000


def rows_of_a_fold(markers: list[LoggedMarker], rules: QueueRules | None) -> tuple[int, FoldResult]:
    """Fold with small passes; return the number of rows that were worked on, too."""
    rows: list[int] = []

    def counted(table: InFlight, events: Events, counters: Counters, in_force: QueueRules) -> InFlight:
        rows.append(len(events))
        return resolve(table, events, counters, in_force)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kmq_spark.core.fold.resolve", counted)
        patched.setattr("kmq_spark.core.segments.MOST_ROWS", 1_000)
        result = fold(begun(rules), markers)
    return sum(rows), result


def test_more_messages_with_jitter_than_a_tick_looks_at_are_decided_by_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each TICK looks at another part, so none waits for ever, and the deadlines are the same."""
    leases = [start(i * 40, count=40, lease_ms=0) for i in range(10)]
    ticks = [tick(at_ms) for at_ms in range(1_600, 2_600, 10)]
    every = fold(begun(JITTERY), log(*leases, *ticks)).decisions.messages()
    monkeypatch.setattr("kmq_spark.core.fold.MOST_SPREAD", 90)
    monkeypatch.setattr("kmq_spark.core.in_flight.MOST_SPREAD", 90)
    result = fold(begun(JITTERY), log(*leases, *ticks))
    values = {(each.message_offset, each.deadline_at_ms) for each in every}
    assert values == {(each.message_offset, each.deadline_at_ms) for each in result.decisions.messages()}
    assert len(result.decisions.messages()) == len(every) == 400


@pytest.mark.parametrize("count", [1, MAX_MESSAGES_PER_MARKER])
def test_state_costs_as_many_runs_as_the_markers_have_ranges(count: int) -> None:
    """Whatever they cover: started together, then half acknowledged, then a tenth kept alive."""
    markers = log(start(0, count=10 * count), end(0, count=5 * count), keep_alive(9 * count, count=count, at_ms=2_000))
    columns = fold(begun(), markers).state.in_flight.columns
    assert (columns.key.tolist(), columns.count.tolist()) == ([5 * count, 9 * count], [4 * count, count])
