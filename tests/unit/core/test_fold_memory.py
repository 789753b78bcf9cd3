"""How much memory the fold needs, whatever a marker names: a few bytes of any writer must not cost gigabytes."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pytest

from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.fold import fold
from kmq_spark.core.markers import MAX_MESSAGES_PER_MARKER
from kmq_spark.core.policy import QueueRules
from tests.builders import begun, end, keep_alive, log, start, tick

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.core.events import LoggedMarker

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


def test_table_brought_up_to_date_within_a_batch_is_what_it_is_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many messages are gathered before is a matter of memory, not of rules."""
    markers = log(start(0, count=90), end(5, count=3), keep_alive(10, count=40), start(3, count=4, delivery_count=2))
    whole = fold(begun(), markers).state.to_bytes()
    monkeypatch.setattr("kmq_spark.core.fold.MOST_RANGES_BUFFERED", 1)
    assert fold(begun(), markers).state.to_bytes() == whole


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
