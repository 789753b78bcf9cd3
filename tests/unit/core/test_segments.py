"""Ranges of messages are cut to segments, and cost as many rows as there are segments."""

from __future__ import annotations

import numpy as np
import pytest

from kmq_spark.core import segments
from kmq_spark.core.events import EventBuffer, Events
from kmq_spark.core.fold import fold
from kmq_spark.core.in_flight import Columns, InFlight
from kmq_spark.core.markers import MAX_MESSAGE_OFFSET, MAX_MESSAGES_PER_MARKER, MAX_QUEUE_PARTITION
from kmq_spark.core.segments import cut_to_segments
from tests.builders import begun, end, keep_alive, log, start


def ends(*ranges: tuple[int, int]) -> Events:
    """Return one END a range, each of a marker of its own."""
    buffer = EventBuffer()
    for place, (first, count) in enumerate(ranges):
        marker = end(first, count=count).marker
        assert marker is not None
        buffer.append(place, 0, marker)
    return buffer.events()


def table(*runs: tuple[int, int]) -> InFlight:
    """Return a table of these runs: first message, number of messages."""
    key, count = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    return InFlight(Columns(key, count, key * 0, key * 0, key * 0, key < 0, key * 0, np.zeros(len(key))))


def rows(of: Events | Columns) -> list[tuple[int, int]]:
    """Return first message and number of messages of each row."""
    return list(zip(of.key.tolist(), of.count.tolist(), strict=True))


def test_ranges_that_do_not_meet_stay_whole() -> None:
    """The usual case: one row a range, however many messages it covers."""
    cut = cut_to_segments(ends((0, 500), (500, 500), (5_000, 100_000)), table((0, 500), (700_000, 9)))
    assert rows(cut.events) == [(0, 500), (500, 500), (5_000, 100_000)]
    assert (rows(cut.table.columns), len(cut.waiting)) == ([(0, 500), (700_000, 9)], 0)


def test_ranges_that_overlap_are_cut_where_they_begin_and_end() -> None:
    """Events stay in the order of the log, and each segment knows its marker."""
    cut = cut_to_segments(ends((0, 10), (3, 4), (6, 10)), table())
    assert rows(cut.events) == [(0, 3), (3, 3), (6, 1), (7, 3), (3, 3), (6, 1), (6, 1), (7, 3), (10, 6)]
    assert cut.events.source.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]


def test_runs_of_the_table_are_cut_with_the_ranges() -> None:
    """What no range touches stays whole."""
    cut = cut_to_segments(ends((5, 10)), table((0, 7), (9, 3), (13, 4), (20, 5)))
    assert rows(cut.table.columns) == [(0, 5), (5, 2), (9, 3), (13, 2), (15, 2), (20, 5)]
    assert rows(cut.events) == [(5, 2), (7, 2), (9, 3), (12, 1), (13, 2)]


def test_largest_key_of_all_is_a_segment() -> None:
    """The key after it is no int64."""
    buffer = EventBuffer()
    marker = end(MAX_MESSAGE_OFFSET - 1, count=2, queue_partition=MAX_QUEUE_PARTITION).marker
    assert marker is not None
    buffer.append(0, 0, marker)
    last = 2**63 - 1
    cut = cut_to_segments(buffer.events(), table((last, 1)))
    assert rows(cut.events) == [(last - 1, 1), (last, 1)]


def test_pass_takes_no_more_rows_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one event, so that it gets on."""
    monkeypatch.setattr(segments, "MOST_ROWS", 4)
    singles = table(*((offset, 1) for offset in range(0, 10, 2)))
    events = ends((0, 2), (2, 2), (0, 10), (4, 2))
    first = cut_to_segments(events, singles)
    assert (len(first.waiting), len(first.events)) == (2, 4)
    second = cut_to_segments(events.take(slice(2, None)), singles)
    assert (len(second.waiting), len(second.events)) == (1, 10)


@pytest.mark.parametrize("count", [1, MAX_MESSAGES_PER_MARKER])
def test_state_costs_as_many_runs_as_the_markers_have_ranges(count: int) -> None:
    """Whatever they cover: started together, then half acknowledged, then a tenth kept alive."""
    markers = log(
        start(0, count=10 * count),
        end(0, count=5 * count),
        keep_alive(9 * count, count=count, at_ms=2_000),
    )
    state = fold(begun(), markers).state
    assert rows(state.in_flight.columns) == [(5 * count, 4 * count), (9 * count, count)]
