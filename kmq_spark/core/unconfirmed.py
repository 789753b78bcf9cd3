"""
Handle unconfirmed messages: a TICK has decided them, and the END of that decision is not yet read back.

Rule 1: until that END is read, markers of consumers for the old copy have no effect. Example: a consumer is killed
before it commits its offset, so the next consumer STARTs the old copy again. That lease must not run out and cause a
second copy while the tracker is still writing the END of the first.
Rule 2: an END of the tracker confirms the decision. END EXPIRED confirms it too, because the tracker writes it in place
of a copy. If a consumer wrote that END EXPIRED, it is treated the same way.
Rule 3: the complete leases are kept, so that a decision that was never carried out can be taken back (`core.fold`).
"""

from __future__ import annotations

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
    Remove the events of unconfirmed messages, up to and including the END that confirms each.

    Args:
        unconfirmed: Unconfirmed messages before the events.
        events: Events in log order, cut to segments of this table (`core.segments`).
        counters: Updated in place.

    Returns:
        The messages that are still unconfirmed, and the remaining events.
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
    # Index of the first confirming event of each row; the number of events where there is none.
    confirmed_at = np.full(unconfirmed.run_count, len(events), dtype=np.int64)
    np.minimum.at(confirmed_at, row[confirms], found[confirms])
    is_taken = found <= confirmed_at[row]
    _add(events.type[source[is_taken]], events.count[found[is_taken]], by_tracker[is_taken], counters)
    is_left = np.ones(len(events), dtype=np.bool_)
    is_left[found[is_taken]] = False
    return unconfirmed.without(np.flatnonzero(confirmed_at < len(events))), events.take(is_left)


def _add(types: NDArray[np.int64], count: NDArray[np.int64], by_tracker: NDArray[np.bool_], counters: Counters) -> None:
    """Count the messages of these events."""
    confirmed = int(count[by_tracker].sum())
    counters.renewed += int(count[types == MarkerType.START].sum())
    counters.keepalive_unknown += int(count[types == MarkerType.KEEPALIVE].sum())
    counters.end_confirmed += confirmed
    counters.end_unknown += int(count[types == MarkerType.END].sum()) - confirmed
