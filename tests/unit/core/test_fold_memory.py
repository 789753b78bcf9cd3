"""How much memory the fold needs, whatever a marker names: a few bytes of any writer must not cost gigabytes."""

from __future__ import annotations

import tracemalloc

import pytest

from kmq_spark.core.events import LoggedMarker
from kmq_spark.core.fold import fold
from kmq_spark.core.markers import MAX_MESSAGES_PER_MARKER
from tests.builders import begun, end, keep_alive, log, start

MARKERS = 200
MOST_BYTES = 200_000_000


@pytest.mark.parametrize("logged", [start, keep_alive, end])
def test_flood_of_markers_that_name_many_messages_is_folded_in_bounded_memory(logged: object) -> None:
    """200 markers of 100,000 messages each, 20 KB in all: 2.5 GB where each message named was a row of its own."""
    one: LoggedMarker = logged(0, count=MAX_MESSAGES_PER_MARKER)  # type: ignore[operator]  # a builder
    flood = log(*[one] * MARKERS)
    tracemalloc.start()
    try:
        result = fold(begun(), flood)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES
    total, counters = MARKERS * MAX_MESSAGES_PER_MARKER, result.state.counters
    assert counters.started + counters.renewed + counters.keepalive_unknown + counters.end_unknown == total


def test_table_brought_up_to_date_within_a_batch_is_what_it_is_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many messages are gathered before is a matter of memory, not of rules."""
    markers = log(start(0, count=90), end(5, count=3), keep_alive(10, count=40), start(3, count=4, delivery_count=2))
    whole = fold(begun(), markers).state.to_bytes()
    monkeypatch.setattr("kmq_spark.core.fold.MOST_RANGES_BUFFERED", 1)
    assert fold(begun(), markers).state.to_bytes() == whole
