"""How the audit of a queue judges redeliveries."""

from __future__ import annotations

import pytest

from kmq_spark.core.markers import Marker, MarkerType, MessageId, OffsetRange, Outcome
from kmq_spark.demo.audit import MarkersStory

COPY = MessageId(0, 7)
RANGES = (OffsetRange(7, 1),)
TICK = Marker(MarkerType.TICK, term=1)
FIRST, SECOND = (Marker(MarkerType.TERM, consumer_id="a", term=term) for term in (1, 2))
START = Marker(MarkerType.START, 0, RANGES, redeliver_after_ms=1_000)
REDELIVERED = Marker(MarkerType.END, 0, RANGES, outcome=Outcome.REDELIVERED, term=1)
ACKED = Marker(MarkerType.END, 0, RANGES, outcome=Outcome.ACKED)


def deadlines(*story: tuple[Marker, int]) -> list[int]:
    """Return the deadlines of redeliveries, from markers and their append times."""
    markers = MarkersStory()
    for marker, appended_at_ms in ((FIRST, 0), *story):
        markers.fold(0, appended_at_ms, marker)
    return list(markers.redelivered_deadlines[COPY])


def test_deadline_is_that_of_the_tick_which_decided() -> None:
    """A worker that takes the place of a killed one starts the copy again before its END is written."""
    decided = (START, 1_000), (TICK, 2_001)
    assert deadlines(*decided, (START, 2_100), (REDELIVERED, 2_500)) == [2_000]
    assert deadlines(*decided, (ACKED, 2_100), (REDELIVERED, 2_500)) == [2_000]


def test_redelivery_that_no_tick_of_its_term_decided_is_early() -> None:
    assert deadlines((START, 1_000), (TICK, 2_000), (START, 2_000), (REDELIVERED, 2_001)) == [3_000]
    started_again = (START, 1_000), (TICK, 2_001), (START, 2_100)
    assert deadlines(*started_again, (SECOND, 2_200), (REDELIVERED, 2_300)) == [3_100]
    assert deadlines((SECOND, 500), *started_again, (REDELIVERED, 2_300)) == [3_100]


@pytest.mark.parametrize("story", [(), ((START, 1_000), (ACKED, 1_500), (TICK, 2_001))])
def test_redelivery_of_what_nobody_held_is_an_error(story: tuple[tuple[Marker, int], ...]) -> None:
    with pytest.raises(KeyError):
        deadlines(*story, (REDELIVERED, 2_500))
