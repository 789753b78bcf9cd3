"""
Apply START, KEEPALIVE and END events to the table, any number of events at once.

Rule 1: the last START of a message counts, and the first END after it. Events before that START have no effect.
Rule 2: a KEEPALIVE after an END or a rejection has no effect; it never puts a message back in flight.
Rule 3: only a START or an END of a tracker changes a rejected message. Where expired messages are dead-lettered, END
EXPIRED of a consumer is a rejection.
Rule 4: a delivery that was given back remains so until the next START. A later KEEPALIVE (a straggler) does not change
that.
Rule 5: no Python loop over events or over the events of one segment; a segment may have a hundred thousand of them
when keep-alives pile up. Events are split into *leases*: one for each START, and one for the events before the first
START of a segment. Each value of a lease is a numpy reduction over its events.
Rule 6: a segment (`core.segments`) stands for all of its messages: they have the same events and the same row in the
table. What jitter adds to their deadlines differs; a row keeps only its most.

`faults/oracle.py` implements the same rules with a dict, one message at a time. Property tests compare the two.
Source: kafka-mq-go `queue/redelivery/markersqueue.go`, `AddMarker`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from kmq_spark.core.delays import shortest_delays_ms
from kmq_spark.core.in_flight import REJECTED, Columns, InFlight, with_texts
from kmq_spark.core.markers import MarkerType, Outcome, Release

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kmq_spark.core.events import Events
    from kmq_spark.core.policy import QueueRules
    from kmq_spark.core.state import Counters

_T = TypeVar("_T", np.int64, np.bool_, np.float64)

# The standing (state) of a message between events; REFUSED means rejected.
ABSENT, LEASED, REFUSED = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class _Leases:
    """
    Events sorted by key and split into leases.

    Attributes:
        began: Whether a START opens the lease; otherwise it continues a lease in the table.
        row: Row of these messages in the table; -1 if they are not in the table.
        before: Standing of the messages after the START that opens the lease; without a START, their standing in the
            table.
        is_last: Whether this is the last lease of its messages.
    """

    source: NDArray[np.int64]
    weight: NDArray[np.int64]
    times: NDArray[np.int64]
    of_event: NDArray[np.int64]
    first: NDArray[np.int64]
    began: NDArray[np.bool_]
    key: NDArray[np.int64]
    count: NDArray[np.int64]
    row: NDArray[np.int64]
    before: NDArray[np.int8]
    is_last: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Ends:
    """
    The effect of ENDs on each lease; an event index equal to the number of events means that there is none.

    Attributes:
        end: Index of the first END while the message is leased.
        settled: Index of the first END that removes the message after its rejection.
        after: Standing of the message after the last event of the lease.
    """

    end: NDArray[np.int64]
    settled: NDArray[np.int64]
    after: NDArray[np.int8]


class _Values(NamedTuple):
    """
    The values of each lease after its last event.

    Attributes:
        deadline_at_ms: Deadline without backoff.
        given_back: Whether a release or deferral ended the delivery.
        backs_off: Whether backoff is added to the deadline.
        failed_by: Index of the KEEPALIVE FAILED that ended the delivery; -1 if there is none.
    """

    deadline_at_ms: NDArray[np.int64]
    delivery_count: NDArray[np.int64]
    given_back: NDArray[np.bool_]
    backs_off: NDArray[np.bool_]
    failed_by: NDArray[np.int64]


def resolve(table: InFlight, events: Events, counters: Counters, rules: QueueRules) -> InFlight:
    """Apply events to the table."""
    leases = _leases_of(table, events)
    ends = _ends_of(leases, events, rules)
    _count_starts(leases, ends, counters)
    _count_ends(leases, ends, events, counters, rules)
    values = _lease_values(table, leases, ends, events, counters, rules=rules)
    texts, text = _final_texts(table, leases, ends, events, values.failed_by)
    start_marker_offset = events.marker_offset[leases.source[leases.first]]
    goes_on = np.flatnonzero(~leases.began & (leases.row >= 0))
    start_marker_offset[goes_on] = table.columns.start_marker_offset[leases.row[goes_on]]
    shortest_ms, jitter_ms = shortest_delays_ms(rules.backoff, values.delivery_count)
    changed = Columns(
        leases.key,
        leases.count,
        values.deadline_at_ms + shortest_ms * values.backs_off,
        values.delivery_count,
        start_marker_offset,
        values.given_back,
        text,
        jitter_ms * values.backs_off,
    )
    return InFlight(_final_rows(table.columns, leases, changed, ends), texts)


def _leases_of(table: InFlight, events: Events) -> _Leases:
    """Sort the events by key, in log order within a key, and split them into leases."""
    order = np.argsort(events.key, kind="stable")
    key, source, weight = events.key[order], events.source[order], events.count[order]
    is_new_key = np.ones(len(key), dtype=np.bool_)
    is_new_key[1:] = key[1:] != key[:-1]
    is_start = (events.type == MarkerType.START)[source]
    is_first = is_new_key | is_start
    first = np.flatnonzero(is_first)
    began = is_start[first]
    opens_key = is_new_key[first]
    lease_key = key[first]
    keys_row = table.rows_of(lease_key[opens_key])
    row = keys_row[np.cumsum(opens_key) - 1]
    before = np.full(len(first), LEASED, dtype=np.int8)
    goes_on = np.flatnonzero(~began)
    before[goes_on] = _standing(table, row[goes_on])
    is_last = np.ones(len(first), dtype=np.bool_)
    is_last[:-1] = opens_key[1:]
    of_event = np.cumsum(is_first) - 1
    return _Leases(
        source, weight, events.times[order], of_event, first, began, lease_key, weight[first], row, before, is_last
    )


def _standing(table: InFlight, rows: NDArray[np.int64]) -> NDArray[np.int8]:
    """Return the standing of messages in the table."""
    standing = np.full(len(rows), ABSENT, dtype=np.int8)
    found = rows >= 0
    is_rejected = table.columns.deadline_at_ms[rows[found]] == REJECTED
    standing[found] = np.where(is_rejected, REFUSED, LEASED)
    return standing


def _ends_of(leases: _Leases, events: Events, rules: QueueRules) -> _Ends:
    """Find the ENDs that have an effect."""
    count = len(leases.source)
    past = np.full(len(leases.first), count, dtype=np.int64)
    ending = np.flatnonzero((events.type == MarkerType.END)[leases.source])
    if not len(ending):
        return _Ends(past, past, leases.before)
    end = _first_of_lease(leases, ending)
    end[leases.before != LEASED] = count
    has_end = end < count
    outcome = events.outcome[leases.source[np.minimum(end, count - 1)]]
    by_tracker = events.by_tracker[leases.source[np.minimum(end, count - 1)]]
    is_rejected = has_end & (outcome == Outcome.REJECTED)
    if rules.dead_letters_expired:
        is_rejected |= has_end & (outcome == Outcome.EXPIRED) & ~by_tracker
    after = np.where(is_rejected, REFUSED, np.where(has_end, ABSENT, leases.before)).astype(np.int8)
    settled = past
    if np.any(after == REFUSED):
        settling = ending[events.by_tracker[leases.source[ending]]]
        # Only an END after the rejection, in the same lease, removes the message.
        refused_at = np.where(is_rejected, end, np.where(leases.before == REFUSED, -1, count))
        settled = _first_of_lease(leases, settling[settling > refused_at[leases.of_event[settling]]])
        after[settled < count] = ABSENT
    return _Ends(end, settled, after)


def _first_of_lease(leases: _Leases, found: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first of the *found* events (ascending) in each lease; the number of events if there is none."""
    first = np.full(len(leases.first), len(leases.source), dtype=np.int64)
    of_lease = leases.of_event[found]
    is_first = np.ones(len(found), dtype=np.bool_)
    is_first[1:] = of_lease[1:] != of_lease[:-1]
    first[of_lease[is_first]] = found[is_first]
    return first


def _count_starts(leases: _Leases, ends: _Ends, counters: Counters) -> None:
    """Count STARTs: `renewed` if the message was in flight, else `started`."""
    starts = np.flatnonzero(leases.began)
    is_renewed = leases.row[starts] >= 0
    # If the batch has an earlier lease of the same message, its standing counts instead of that in the table.
    follows = np.flatnonzero((starts > 0) & ~leases.is_last[starts - 1])
    is_renewed[follows] = ends.after[starts[follows] - 1] != ABSENT
    count = leases.count[starts]
    renewed = int(count[is_renewed].sum())
    counters.renewed += renewed
    counters.started += int(count.sum()) - renewed


def _count_ends(leases: _Leases, ends: _Ends, events: Events, counters: Counters, rules: QueueRules) -> None:
    """Count ENDs: those with an effect by outcome, the others by writer."""
    count = len(leases.source)
    is_end = (events.type == MarkerType.END)[leases.source]
    named = leases.weight * leases.times
    total = int(named[is_end].sum())
    if not total:
        return
    by_tracker = events.by_tracker[leases.source]
    effective = np.concatenate((ends.end[ends.end < count], ends.settled[ends.settled < count]))
    weight, outcome = leases.weight[effective], events.outcome[leases.source[effective]]
    expired = outcome == Outcome.EXPIRED
    outcomes = [int(weight[outcome == each].sum()) for each in Outcome]
    dead_on_expiry = int(weight[expired & ~by_tracker[effective]].sum()) if rules.dead_letters_expired else 0
    counters.acked += outcomes[Outcome.ACKED]
    counters.rejected += outcomes[Outcome.REJECTED] + dead_on_expiry
    counters.expired += outcomes[Outcome.EXPIRED] - dead_on_expiry
    counters.redelivered += outcomes[Outcome.REDELIVERED]
    counters.dead_lettered += outcomes[Outcome.DEAD_LETTERED]
    late = int(named[by_tracker].sum()) - int(weight[by_tracker[effective]].sum())
    counters.end_late += late
    counters.end_unknown += total - int(weight.sum()) - late


def _final_rows(table: Columns, leases: _Leases, changed: Columns, ends: _Ends) -> Columns:
    """Return the rows of the table after all events."""
    is_known = leases.row >= 0
    stays = leases.is_last & (ends.after != ABSENT)
    updated = np.flatnonzero(stays & is_known)
    columns = table
    if len(updated):
        rows = leases.row[updated]
        new = changed.take(updated)
        columns = Columns(
            columns.key,
            columns.count,
            _put(columns.deadline_at_ms, rows, new.deadline_at_ms),
            _put(columns.delivery_count, rows, new.delivery_count),
            _put(columns.start_marker_offset, rows, new.start_marker_offset),
            _put(columns.given_back, rows, new.given_back),
            _put(columns.text, rows, new.text),
            _put(columns.jitter_ms, rows, new.jitter_ms),
        )
    gone = leases.row[leases.is_last & is_known & ~stays]
    if len(gone):
        is_kept = np.ones(len(columns), dtype=np.bool_)
        is_kept[gone] = False
        columns = columns.take(is_kept)
    return columns.merged(changed.take(np.flatnonzero(stays & ~is_known)))


def _put(column: NDArray[_T], rows: NDArray[np.int64], values: NDArray[_T]) -> NDArray[_T]:
    """Return a column with some values replaced; the column itself if it already has these values."""
    if np.array_equal(column[rows], values):
        return column
    column = column.copy()
    column[rows] = values
    return column


def _lease_values(
    table: InFlight, leases: _Leases, ends: _Ends, events: Events, counters: Counters, *, rules: QueueRules
) -> _Values:
    """Return the values of each lease after its last event, and count KEEPALIVEs."""
    opened_by = leases.source[leases.first]
    deadline_at_ms, delivery_count = events.deadline_at_ms[opened_by], events.delivery_count[opened_by]
    # A deferral: no consumer holds the message, and the delivery does not count.
    given_back = leases.began & (events.never_handed_out[opened_by] != 0)
    delivery_count -= given_back
    # This depends on the last marker that set the deadline.
    backs_off = leases.began & ~given_back
    goes_on = np.flatnonzero(~leases.began & (leases.row >= 0))
    columns, row = table.columns, leases.row[goes_on]
    deadline_at_ms[goes_on] = columns.deadline_at_ms[row]
    delivery_count[goes_on] = columns.delivery_count[row]
    given_back[goes_on] = columns.given_back[row]
    failed_by = np.full(len(leases.first), -1, dtype=np.int64)
    renewing = np.flatnonzero((events.type == MarkerType.KEEPALIVE)[leases.source])
    if len(renewing):
        of_lease = leases.of_event[renewing]
        is_known = (leases.before[of_lease] == LEASED) & (renewing < ends.end[of_lease])
        named, times = leases.weight[renewing] * leases.times[renewing], leases.times[renewing[is_known]]
        counters.kept_alive += int(named[is_known].sum())
        counters.keepalive_unknown += int(named[~is_known].sum())
        of_lease, source = of_lease[is_known], leases.source[renewing[is_known]]
        # Events are in log order; when several values are assigned to one index, numpy keeps the last.
        deadline_at_ms[of_lease] = events.deadline_at_ms[source]
        is_uncounted, release = events.never_handed_out[source] != 0, events.release[source]
        backs_off[of_lease] = ~is_uncounted & (release != Release.GIVEN_BACK)
        given_back[of_lease[is_uncounted | (release != Release.RENEWED)]] = True
        has_failed = np.zeros(len(delivery_count), dtype=np.bool_)
        has_failed[of_lease] = ~is_uncounted & (release == Release.FAILED)
        delay_ms = np.zeros(len(delivery_count), dtype=np.int64)
        delay_ms[of_lease] = events.lease_ms[source]
        # Clamping once after subtracting all of them equals clamping at 0 after each one.
        uncounted = np.bincount(of_lease, is_uncounted * times, minlength=len(delivery_count))
        delivery_count = np.maximum(delivery_count - uncounted.astype(np.int64), 0)
        failed_by[of_lease] = source
        failed_by[~has_failed] = -1
        if rules.max_deliveries:
            # A last delivery that failed becomes a dead letter, so neither delay nor backoff applies.
            is_over = has_failed & (delivery_count >= rules.max_deliveries)
            deadline_at_ms[is_over] -= delay_ms[is_over]
            backs_off &= ~is_over
    deadline_at_ms[ends.after == REFUSED] = REJECTED
    backs_off &= ends.after == LEASED
    return _Values(deadline_at_ms, delivery_count, given_back, backs_off, failed_by)


def _final_texts(
    table: InFlight, leases: _Leases, ends: _Ends, events: Events, failed_by: NDArray[np.int64]
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """
    Return the texts of the table after all events, and the number of each lease's text.

    A text is the reason of a rejected message or the exception of a failed delivery.
    """
    count = len(leases.source)
    text = np.zeros(len(leases.key), dtype=np.int64)
    is_refused, is_rejected_now = ends.after == REFUSED, ends.end < count
    remains = np.flatnonzero(is_refused & ~is_rejected_now)
    text[remains] = table.columns.text[leases.row[remains]]
    # Index of the marker that brings a text; -1 for none.
    brought_by = np.where(ends.after == LEASED, failed_by, -1)
    rejected = np.flatnonzero(is_refused & is_rejected_now)
    brought_by[rejected] = leases.source[ends.end[rejected]]
    brings = np.flatnonzero(brought_by >= 0)
    if not len(brings):
        return table.texts, text
    markers, place = np.unique(brought_by[brings], return_inverse=True)
    texts, number = with_texts(table.texts, [events.reasons[marker] for marker in markers.tolist()])
    text[brings] = number[place]
    return texts, text
