"""
Messages that a TICK has decided and whose END has not been read back.

Rule 1: until that END a message is on its way: whatever anybody says of its old copy changes nothing. A consumer that
was killed before it committed its position makes the next one START the old copy again; that lease must not run out
into a second copy while the END of the first is being written.
Rule 2: an END of the tracker confirms; so does EXPIRED, which it writes in place of a copy. Should a consumer have
written it, what follows is as if the END had come.
Rule 3: the leases are kept whole: a decision that nobody carried out is taken back (`core.fold`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kmq_spark.core.markers import MarkerType, Outcome

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kmq_spark.core.events import Events
    from kmq_spark.core.in_flight import InFlight
    from kmq_spark.core.state import Counters


def confirm(unconfirmed: InFlight, events: Events, counters: Counters) -> tuple[InFlight, Events]:
    """
    Take out the events of unconfirmed messages, up to the END that confirms each.

    Args:
        unconfirmed: Before the events.
        events: In log order.
        counters: Brought up to date in place.

    Returns:
        What is unconfirmed after them, and the events that are left.
    """
    order = np.argsort(events.key, kind="stable")
    row = np.empty(len(order), dtype=np.int64)
    row[order] = unconfirmed.rows_of(events.key[order])
    found = np.flatnonzero(row >= 0)
    if not len(found):
        return unconfirmed, events
    row, source = row[found], events.source[found]
    by_tracker = events.is_by_tracker()[source]
    is_expired = (events.type == MarkerType.END) & (events.outcome == Outcome.EXPIRED)
    confirms = by_tracker | is_expired[source]
    # The first confirming event of each row, past all others where there is none.
    confirmed_at = np.full(len(unconfirmed), len(events.key), dtype=np.int64)
    np.minimum.at(confirmed_at, row[confirms], found[confirms])
    is_taken = found <= confirmed_at[row]
    _count(events.type[source[is_taken]], by_tracker[is_taken], counters)
    is_left = np.ones(len(events.key), dtype=np.bool_)
    is_left[found[is_taken]] = False
    left = replace(events, key=events.key[is_left], source=events.source[is_left])
    return unconfirmed.without(np.flatnonzero(confirmed_at < len(events.key))), left


def _count(types: NDArray[np.int64], by_tracker: NDArray[np.bool_], counters: Counters) -> None:
    confirmed = int(np.count_nonzero(by_tracker))
    counters.renewed += int(np.count_nonzero(types == MarkerType.START))
    counters.keepalive_unknown += int(np.count_nonzero(types == MarkerType.KEEPALIVE))
    counters.end_confirmed += confirmed
    counters.end_unknown += int(np.count_nonzero(types == MarkerType.END)) - confirmed
