"""
Apply START, KEEPALIVE and END events to the table, any number of events at once.

Rule 1: the last START of a message counts, and the first END after it. Events before that START have no effect.
Rule 2: a KEEPALIVE after an END or a rejection has no effect; it never puts a message back in flight.
Rule 3: only a START, a TICK or an END of the tracker changes a rejected message. Where expired messages are dropped,
END EXPIRED counts as an END of the tracker: the tracker writes it in place of a copy, and a consumer only writes it
directly after its START. Where expired messages are dead-lettered, END EXPIRED is a rejection.
Rule 4: a delivery that was given back remains so until the next START. A later KEEPALIVE (a straggler) does not change
that.
Rule 5: no Python loop over events or over the events of one key; a key may have a hundred thousand of them when
keep-alives pile up. Events are split into *leases*: one for each START, and one for the events before the first START
of a key. Each value of a lease is a numpy reduction over its events.

`testing/model.py` implements the same rules with a dict, one message at a time. Property tests compare the two.
Source: kafka-mq-go `queue/redelivery/markersqueue.go`, `AddMarker`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from kmq_spark.core.in_flight import REJECTED, Columns, InFlight
from kmq_spark.core.markers import MarkerType, Outcome, Release

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kmq_spark.core.events import Events
    from kmq_spark.core.policy import Rules
    from kmq_spark.core.state import Counters

_T = TypeVar("_T", np.int64, np.bool_)

# The standing (state) of a message between events; REFUSED means rejected.
ABSENT, LEASED, REFUSED = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class _Leases:
    """
    Events sorted by key and split into leases.

    Attributes:
        source: Index of each event's marker.
        of_event: Index of each event's lease.
        first: Index of the first event of each lease.
        began: Whether a START opens the lease; otherwise it continues a lease in the table.
        key: Message key of each lease.
        row: Row of that message in the table; -1 if it is not in the table.
        before: Standing of the message after the START that opens the lease; without a START, its standing in the
            table.
        is_last: Whether this is the last lease of its message.
    """

    source: NDArray[np.int64]
    of_event: NDArray[np.int64]
    first: NDArray[np.int64]
    began: NDArray[np.bool_]
    key: NDArray[np.int64]
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
    Deadline, delivery count and `given_back` of each lease after its last event.

    `failed_by` is the index of the KEEPALIVE FAILED that ended the delivery, -1 if there is none.
    """

    deadline_at_ms: NDArray[np.int64]
    delivery_count: NDArray[np.int64]
    given_back: NDArray[np.bool_]
    failed_by: NDArray[np.int64]


def resolve(table: InFlight, events: Events, counters: Counters, rules: Rules) -> InFlight:
    """
    Apply events to the table.

    Args:
        table: Table before the events.
        events: At least one event, in log order; only START, KEEPALIVE and END.
        counters: Updated in place.
        rules: Rules in force.

    Returns:
        The table after the events.
    """
    leases = _leases_of(table, events)
    ends = _ends_of(leases, events, rules)
    _count_starts(leases, ends, counters)
    _count_ends(leases, ends, events, counters, rules)
    values = _lease_values(table, leases, ends, events, counters, rules=rules)
    rows = _final_rows(table, leases, values, ends, events)
    reasons = _final_reasons(table, leases, ends, events, values.failed_by)
    return InFlight(rows, reasons)


def _leases_of(table: InFlight, events: Events) -> _Leases:
    """Sort the events by key, in log order within a key, and split them into leases."""
    order = np.argsort(events.key, kind="stable")
    key, source = events.key[order], events.source[order]
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
    return _Leases(source, np.cumsum(is_first) - 1, first, began, lease_key, row, before, is_last)


def _standing(table: InFlight, rows: NDArray[np.int64]) -> NDArray[np.int8]:
    """Return the standing of messages in the table."""
    standing = np.full(len(rows), ABSENT, dtype=np.int8)
    found = rows >= 0
    is_rejected = table.columns.deadline_at_ms[rows[found]] == REJECTED
    standing[found] = np.where(is_rejected, REFUSED, LEASED)
    return standing


def _ends_of(leases: _Leases, events: Events, rules: Rules) -> _Ends:
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
    is_rejected = has_end & (outcome == Outcome.REJECTED)
    if rules.dead_letters_expired:
        is_rejected |= has_end & (outcome == Outcome.EXPIRED)
    after = np.where(is_rejected, REFUSED, np.where(has_end, ABSENT, leases.before)).astype(np.int8)
    settled = past
    if np.any(after == REFUSED):
        settles = events.is_by_tracker()
        if not rules.dead_letters_expired:
            settles |= (events.type == MarkerType.END) & (events.outcome == Outcome.EXPIRED)
        settling = ending[settles[leases.source[ending]]]
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
    renewed = int(np.count_nonzero(is_renewed))
    counters.renewed += renewed
    counters.started += len(starts) - renewed


def _count_ends(leases: _Leases, ends: _Ends, events: Events, counters: Counters, rules: Rules) -> None:
    """Count ENDs: those with an effect by outcome, the others by writer."""
    count = len(leases.source)
    is_end = (events.type == MarkerType.END)[leases.source]
    total = int(np.count_nonzero(is_end))
    if not total:
        return
    by_tracker = int(np.count_nonzero(events.is_by_tracker()[leases.source]))
    effective = np.concatenate((ends.end[ends.end < count], ends.settled[ends.settled < count]))
    outcomes = np.bincount(events.outcome[leases.source[effective]], minlength=len(Outcome)).tolist()
    counters.acked += outcomes[Outcome.ACKED]
    counters.rejected += outcomes[Outcome.REJECTED]
    if rules.dead_letters_expired:
        counters.rejected += outcomes[Outcome.EXPIRED]
    else:
        counters.expired += outcomes[Outcome.EXPIRED]
    counters.redelivered += outcomes[Outcome.REDELIVERED]
    counters.dead_lettered += outcomes[Outcome.DEAD_LETTERED]
    confirmed = by_tracker - outcomes[Outcome.REDELIVERED] - outcomes[Outcome.DEAD_LETTERED]
    counters.end_confirmed += confirmed
    counters.end_unknown += total - len(effective) - confirmed


def _final_rows(table: InFlight, leases: _Leases, values: _Values, ends: _Ends, events: Events) -> Columns:
    """Return the rows of the table after all events."""
    is_known = leases.row >= 0
    stays = leases.is_last & (ends.after != ABSENT)
    opened_by = leases.source[leases.first]
    changed = Columns(
        leases.key, values.deadline_at_ms, values.delivery_count, events.marker_offset[opened_by], values.given_back
    )
    columns = table.columns
    updated = np.flatnonzero(stays & is_known)
    if len(updated):
        rows, new = leases.row[updated], changed.take(updated)
        began = leases.began[updated]
        columns = Columns(
            columns.key,
            _put(columns.deadline_at_ms, rows, new.deadline_at_ms),
            _put(columns.delivery_count, rows, new.delivery_count),
            _put(columns.start_marker_offset, rows[began], new.start_marker_offset[began]),
            _put(columns.given_back, rows, new.given_back),
        )
    gone = leases.row[leases.is_last & is_known & (ends.after == ABSENT)]
    if len(gone):
        is_kept = np.ones(len(columns), dtype=np.bool_)
        is_kept[gone] = False
        columns = columns.take(is_kept)
    added = np.flatnonzero(stays & ~is_known)
    return columns.merged(changed.take(added)) if len(added) else columns


def _put(column: NDArray[_T], rows: NDArray[np.int64], values: NDArray[_T]) -> NDArray[_T]:
    """Return a column with some values replaced; the column itself if it already has these values."""
    if np.array_equal(column[rows], values):
        return column
    column = column.copy()
    column[rows] = values
    return column


def _lease_values(
    table: InFlight, leases: _Leases, ends: _Ends, events: Events, counters: Counters, *, rules: Rules
) -> _Values:
    """Return the values of each lease after its last event, and count KEEPALIVEs."""
    opened_by = leases.source[leases.first]
    deadline_at_ms, delivery_count = events.deadline_at_ms[opened_by], events.delivery_count[opened_by]
    # A deferral: no consumer holds the message, and the delivery does not count.
    given_back = leases.began & (events.never_handed_out[opened_by] != 0)
    delivery_count -= given_back
    # Whether backoff is added to the deadline, which depends on the last marker that set it.
    rests = leases.began & ~given_back
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
        counters.kept_alive += int(np.count_nonzero(is_known))
        counters.keepalive_unknown += int(np.count_nonzero(~is_known))
        of_lease, source = of_lease[is_known], leases.source[renewing[is_known]]
        # Events are in log order; when several values are assigned to one index, numpy keeps the last.
        deadline_at_ms[of_lease] = events.deadline_at_ms[source]
        is_uncounted, release = events.never_handed_out[source] != 0, events.release[source]
        rests[of_lease] = ~is_uncounted & (release != Release.GIVEN_BACK)
        given_back[of_lease[is_uncounted | (release != Release.RENEWED)]] = True
        has_failed = np.zeros(len(delivery_count), dtype=np.bool_)
        has_failed[of_lease] = ~is_uncounted & (release == Release.FAILED)
        delay_ms = np.zeros(len(delivery_count), dtype=np.int64)
        delay_ms[of_lease] = events.lease_ms[source]
        # Clamping once after subtracting all of them equals clamping at 0 after each one.
        uncounted = np.bincount(of_lease[is_uncounted], minlength=len(delivery_count))
        delivery_count = np.maximum(delivery_count - uncounted, 0)
        failed_by[of_lease] = source
        failed_by[~has_failed] = -1
        if rules.max_deliveries:
            # A last delivery that failed becomes a dead letter, so neither delay nor backoff applies.
            is_over = has_failed & (delivery_count >= rules.max_deliveries)
            deadline_at_ms[is_over] -= delay_ms[is_over]
            rests &= ~is_over
    if rules.backoff.kind:
        rests = np.flatnonzero(rests)
        deadline_at_ms[rests] += rules.backoff.delays_ms(leases.key[rests], delivery_count[rests])
    deadline_at_ms[ends.after == REFUSED] = REJECTED
    return _Values(deadline_at_ms, delivery_count, given_back, failed_by)


def _final_reasons(
    table: InFlight, leases: _Leases, ends: _Ends, events: Events, failed_by: NDArray[np.int64]
) -> dict[int, str]:
    """Return the reasons of rejected messages and the exception texts of failed ones, after all events."""
    last = np.flatnonzero(leases.is_last)
    failed = last[(ends.after[last] == LEASED) & (failed_by[last] >= 0)]
    rejected = last[(ends.after[last] == REFUSED) & (ends.end[last] < len(leases.source))]
    if not table.reasons and not len(rejected) and not len(failed):
        return table.reasons
    reasons = dict(table.reasons)
    for key in leases.key[last[ends.after[last] != REFUSED]].tolist() if reasons else ():
        reasons.pop(key, None)
    source = leases.source[ends.end[rejected]].tolist()
    reasons.update(zip(leases.key[rejected].tolist(), (events.reasons[marker] for marker in source), strict=True))
    for key, marker in zip(leases.key[failed].tolist(), failed_by[failed].tolist(), strict=True):
        if events.reasons[marker]:
            reasons[key] = events.reasons[marker]
    return reasons
