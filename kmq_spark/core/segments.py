"""
Cut ranges of messages into segments: runs of messages that have the same events and the same row in the table.

Markers name ranges, and the table holds runs. The first messages and the ends of both, as far as they meet, divide the
messages into segments. Within a segment every message has the same history, so `core.resolve` treats it as one message
and counts it as many. Its cost depends on the number of segments, not on the number of messages.

Rule 1: an event that covers several segments becomes one event in each, at the same place in the log.
Rule 2: a run of the table that an event covers in part is split, so that each segment is one row of the table, or none.

Source: coordinate compression, as in sweep-line algorithms; interval maps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kmq_spark.core.in_flight import run_ends, spread

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kmq_spark.core.events import Events
    from kmq_spark.core.in_flight import InFlight

MOST_ROWS = 1_000_000
"""
Number of events after cutting from which on equal events become one where they meet, and the remaining ones wait for
another pass; a pass takes about 100 bytes each.

A KEEPALIVE of 100,000 messages that were started one by one is 100,000 events, and there may be many of them.
"""


class Cut(NamedTuple):
    """
    Events and table, cut to segments.

    Attributes:
        events: One event a segment, ordered by the log.
        table: The table, with runs split where a segment begins or ends. It is not coalesced.
        waiting: Events that wait for another pass.
    """

    events: Events
    table: InFlight
    waiting: Events


def cut_to_segments(events: Events, table: InFlight) -> Cut:
    """Cut at least one event, each for a range of messages, in log order, and the table to segments."""
    first, end = _bounds(events)
    runs = table.columns.take(table.columns.rows_within(*areas_of(first, end)))
    cuts = np.unique(np.concatenate([first, end, runs.key.astype(np.uint64), runs.ends()]))
    rest = events.take(slice(0, 0))
    if _rows(events, cuts)[-1] > MOST_ROWS:
        events = events.without_repeats()
    if _rows(events, cuts)[-1] > MOST_ROWS:
        # Where events meet only each other they are few, and most of the equal ones count for nothing.
        own_cuts = np.unique(np.concatenate([first, end]))
        taken = max(1, int(np.searchsorted(_rows(events, own_cuts), MOST_ROWS, side="right")))
        rest = events.take(slice(taken, None))
        events = _cut(events.take(slice(taken)), own_cuts).without_repeats()
    taken = max(1, int(np.searchsorted(_rows(events, cuts), MOST_ROWS, side="right")))
    waiting = events.take(slice(taken, None)).followed_by(rest)
    return Cut(_cut(events.take(slice(taken)), cuts), table.split_at(cuts), waiting)


def _bounds(events: Events) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    return events.key.astype(np.uint64), run_ends(events.key, events.count)


def _rows(events: Events, cuts: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return how many rows the events up to each one are after cutting."""
    first, end = _bounds(events)
    return np.cumsum(np.searchsorted(cuts, end) - np.searchsorted(cuts, first))


def _cut(events: Events, cuts: NDArray[np.uint64]) -> Events:
    first, end = _bounds(events)
    begin = np.searchsorted(cuts, first)
    count = np.searchsorted(cuts, end) - begin
    if count.sum() == len(events):
        return events
    of_event, segment = spread(begin, count)
    key = cuts[segment].astype(np.int64)
    return replace(events.take(of_event), key=key, count=(cuts[segment + 1] - cuts[segment]).astype(np.int64))


def areas_of(first: NDArray[np.uint64], end: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the first keys and the ends of the union of ranges: ascending areas that do not overlap."""
    order = np.argsort(first)
    first, end = first[order], np.maximum.accumulate(end[order])
    is_new = np.ones(len(first), dtype=np.bool_)
    is_new[1:] = first[1:] > end[:-1]
    place = np.flatnonzero(is_new)
    return first[place], end[np.append(place[1:], len(first)) - 1]
