"""
What holds for every log: the packed fold is the model, and how a log is cut does not matter.

Few messages, short leases and many TICKs, so that markers meet.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.fold import Decision, DecisionAction, FoldResult, LoggedMarker, PartitionState, Status, fold
from kmq_spark.core.in_flight import KEY_BITS
from kmq_spark.core.markers import MAX_MESSAGE_OFFSET, MarkerType, OffsetRange, Outcome, Release
from kmq_spark.core.policy import QueueRules
from tests.builders import begin_term, begun, end, keep_alive, log, start, tick, unreadable
from tests.builders import rules as rules_marker
from tests.examples import examples
from tests.model import ModelTracker

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

LEASES = st.sampled_from([0, 5, 30, 100])


def ascending(gaps_and_counts: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges with these gaps between them; a gap of 0 makes neighbours."""
    ranges, end = [], 0
    for gap, count in gaps_and_counts:
        ranges.append((end + gap, count))
        end += gap + count
    return tuple(ranges)


# Up to three messages from one of four places, in one of two queue partitions; now and then elsewhere, far apart, up to
# the largest message of all; or several ranges of up to 20 messages, which overlap those of others in every way.
COVERED = st.fixed_dictionaries(
    {
        "ranges": st.one_of(
            st.tuples(st.tuples(st.integers(0, 3), st.integers(1, 3))),
            st.tuples(st.tuples(st.integers(0, 2), st.just(1)), st.tuples(st.integers(4, 5), st.just(1))),
            st.tuples(
                st.tuples(st.integers(0, 3), st.just(2)), st.tuples(st.sampled_from([30, 2**47]), st.integers(1, 40))
            ),
            st.tuples(st.tuples(st.sampled_from([MAX_MESSAGE_OFFSET - 1, MAX_MESSAGE_OFFSET - 2]), st.just(2))),
            st.lists(st.tuples(st.integers(0, 6), st.integers(1, 20)), min_size=1, max_size=4).map(ascending),
        ),
        "queue_partition": st.sampled_from([0, 0, 0, 0, 0, 0, 1, 32_767]),
    }
)
BACKOFFS = st.builds(
    Backoff,
    kind=st.sampled_from(BackoffKind),
    initial_ms=st.sampled_from([0, 1, 7, 50]),
    max_ms=st.sampled_from([0, 30, 1_000]),
    jitter=st.sampled_from([0.0, 0.3, 1.0]),
)
QUEUE_RULES = st.builds(
    QueueRules,
    version=st.integers(1, 3),
    max_deliveries=st.sampled_from([0, 1, 3]),
    backoff=BACKOFFS,
    dead_letters_expired=st.booleans(),
)
STARTS = st.builds(
    lambda covered, **fields: start(**covered, **fields),
    COVERED,
    at_ms=st.just(0),
    lease_ms=LEASES,
    delivery_count=st.integers(1, 4),
    never_handed_out=st.sampled_from([False, False, True]),
    due_at_ms=st.sampled_from([0, 0, 40, 200]),
)
KEEP_ALIVES = st.builds(
    # Only a failed delivery carries the text of an exception on the wire.
    lambda covered, release, reason, **fields: keep_alive(
        **covered, release=release, reason=reason if release is Release.FAILED else "", **fields
    ),
    COVERED,
    st.sampled_from(Release),
    st.sampled_from(["", "ValueError: bad"]),
    at_ms=st.just(0),
    lease_ms=LEASES,
    never_handed_out=st.sampled_from([False, False, True]),
)
ENDS = st.builds(
    lambda covered, **fields: end(**covered, **fields),
    COVERED,
    at_ms=st.just(0),
    outcome=st.sampled_from(Outcome),
    reason=st.sampled_from(["", "bad", "worse"]),
    term=st.sampled_from([0, 0, 1]),
)
TICKS = st.builds(tick, st.just(0), term=st.sampled_from([1, 1, 1, 1, 1, 1, 0, 2]))
TERMS = st.builds(begin_term, st.just(0), term=st.sampled_from([1, 1, 2]), tracker_id=st.sampled_from(["one", "two"]))
CHANGES = st.builds(rules_marker, QUEUE_RULES, st.just(0))
# As often as they have to meet: most rules are about what a TICK finds after two or three markers of one message.
MARKERS = st.sampled_from(
    [*[STARTS] * 6, *[KEEP_ALIVES] * 6, *[ENDS] * 5, *[TICKS] * 8, TERMS, CHANGES, st.builds(unreadable, st.just(0))]
).flatmap(lambda kind: kind)


STEPS_MS = [0, 1, 1, 5, 5, 20, 20, 60, 60, 60, 60, 1_000, 1_001, -7, -60_000, 3_600_000, -3_600_000]


@st.composite
def logs(draw: st.DrawFn) -> list[LoggedMarker]:
    """
    Return a log: offsets with gaps, append times that mostly ascend, and now and then step by up to hours.

    A TICK of term 1 gets the term in force.
    """
    # The length is drawn first: lists without a minimum have five elements on average, too few for markers to meet.
    length = draw(st.integers(0, 40))
    gaps, steps_ms = st.sampled_from([0, 0, 0, 2]), st.sampled_from(STEPS_MS)
    placed, marker_offset, at_ms, term = [], 0, 0, 1
    for logged, gap, step_ms in draw(st.lists(st.tuples(MARKERS, gaps, steps_ms), min_size=length, max_size=length)):
        marker_offset, at_ms, marker = marker_offset + gap, max(0, at_ms + step_ms), logged.marker
        if marker is not None and marker.type is MarkerType.TERM:
            term = marker.term
        elif marker is not None and marker.type is MarkerType.TICK and marker.term == 1:
            marker = replace(marker, term=term)
        placed.append(LoggedMarker(marker_offset, at_ms, marker))
        marker_offset += 1
    return placed


RULES = st.none() | QUEUE_RULES
BOUNDS = st.sampled_from([1, 2, 7, 100])
CUTS = st.lists(st.integers(0, 40), max_size=4)


def batches(markers: list[LoggedMarker], cuts: Iterable[int]) -> list[list[LoggedMarker]]:
    """Return a log in pieces."""
    edges = [0, *sorted(min(cut, len(markers)) for cut in cuts), len(markers)]
    return [markers[first:last] for first, last in pairwise(edges)]


def folded(pieces: Iterable[list[LoggedMarker]], rules: QueueRules | None) -> tuple[list[Decision], PartitionState]:
    """Fold pieces of a log, through bytes in between; return the decisions of the newest term and the state."""
    state, decisions = begun(rules), list[Decision]()
    for piece in pieces:
        result = fold(state, piece)
        assert result.status == result.state.status()
        decisions = [row for row in decisions if row.tick_marker_offset > newest_term_at(piece, state)]
        decisions += result.decisions.messages()
        state = PartitionState.from_bytes(result.state.to_bytes())
    return decisions, state


def newest_term_at(piece: list[LoggedMarker], state: PartitionState) -> int:
    """Return the offset of the last TERM of a piece that begins another term; -1 for none."""
    term, at = state.term, -1
    for offset, _, marker in sorted(piece, key=lambda each: each.marker_offset):
        is_new = offset >= state.next_marker_offset
        if is_new and marker is not None and marker.type is MarkerType.TERM and marker.term != term:
            term, at = marker.term, offset
    return at


def assert_same_state(expected: PartitionState, actual: PartitionState) -> None:
    """Two states are equal when their bytes are."""
    assert expected.to_bytes() == actual.to_bytes()


@settings(max_examples=examples(2.5))
@given(logs(), CUTS, RULES, BOUNDS, st.randoms(use_true_random=False))
def test_packed_fold_is_the_model(
    markers: list[LoggedMarker], cuts: list[int], rules: QueueRules | None, bound: int, random: Random
) -> None:
    """Decisions, status, counters, rows and reasons, batch by batch in any order of rows, some markers read twice."""
    model, state = ModelTracker(rules), begun(rules)
    model.term = 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kmq_spark.core.fold.MOST_DECISIONS_OF_A_TICK", bound)
        patched.setattr("faults.oracle.MOST_DECISIONS_OF_A_TICK", bound)
        for piece in [*batches(markers, cuts), markers[-2:]]:
            random.shuffle(piece)
            result = fold(state, piece)
            expected_decisions, expected_status = model.fold(piece)
            assert expected_decisions == result.decisions.messages()
            assert expected_status == result.status
            state = PartitionState.from_bytes(result.state.to_bytes())
    ranges = zip(state.marks.first.tolist(), state.marks.end.tolist(), strict=True)
    marked = {(key >> KEY_BITS, key & MAX_MESSAGE_OFFSET) for first, end in ranges for key in range(first, end)}
    assert marked == model.marked
    columns = state.in_flight.columns.messages()
    ids = [(key >> KEY_BITS, key & MAX_MESSAGE_OFFSET) for key in columns.key.tolist()]
    values = zip(
        columns.deadline_at_ms.tolist(), columns.delivery_count.tolist(), columns.given_back.tolist(), strict=True
    )
    leases = model.in_flight.items()
    assert dict(zip(ids, values, strict=True)) == {
        message_id: (lease.deadline_ms, lease.count, lease.is_given_back) for message_id, lease in leases
    }
    reasons = {(key >> KEY_BITS, key & MAX_MESSAGE_OFFSET): text for key, text in state.in_flight.reasons().items()}
    assert reasons == {message_id: lease.reason for message_id, lease in leases if lease.reason}


@given(logs(), CUTS, RULES)
def test_log_cut_into_any_batches_gives_the_same(
    markers: list[LoggedMarker], cuts: list[int], rules: QueueRules | None
) -> None:
    """Decisions depend on the log, never on batch boundaries, restarts or rate limits."""
    expected_decisions, expected_state = folded([markers], rules)
    decisions, state = folded(batches(markers, cuts), rules)
    assert expected_decisions == decisions
    assert_same_state(expected_state, state)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(logs(), RULES, st.tuples(st.integers(1, 30), st.integers(1, 9), st.integers(1, 3)))
def test_table_brought_up_to_date_in_small_steps_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
    markers: list[LoggedMarker],
    rules: QueueRules | None,
    bounds: tuple[int, int, int],
) -> None:
    """How much is gathered, and how much is cut in one pass, are matters of cost, not of rules."""
    ranges, rows, times = bounds
    markers = log(*(each._replace(marker_offset=-1) for each in markers for _ in range(times)))
    expected_decisions, expected_state = folded([markers], rules)
    with monkeypatch.context() as patched:
        patched.setattr("kmq_spark.core.fold.MOST_RANGES_BUFFERED", ranges)
        patched.setattr("kmq_spark.core.segments.MOST_ROWS", rows)
        decisions, state = folded([markers], rules)
    assert expected_decisions == decisions
    assert_same_state(expected_state, state)


@given(logs(), RULES)
def test_no_two_runs_of_a_table_could_be_one(markers: list[LoggedMarker], rules: QueueRules | None) -> None:
    """Every message has one row at most, and neighbours with the same values share theirs."""
    _, state = folded([markers], rules)
    columns = state.in_flight.columns
    keys = columns.messages().key
    assert len(np.unique(keys)) == len(keys)
    assert len(columns.coalesced()) == len(columns)
    if not columns.jitter_ms.any():
        assert len(columns.messages().coalesced()) == len(columns)
    assert (state.marks.first[1:] > state.marks.end[:-1]).all()


def widened(logged: LoggedMarker) -> LoggedMarker:
    """
    Return a marker whose ranges are a thousand times as long; those far away stay there.

    Its rules have no jitter, which may spread a run over its messages, up to a bound of its own.
    """
    if (marker := logged.marker) is None:
        return logged
    ranges = ((first * 1_000 if first < 1_000 else first, count * 1_000) for first, count in marker.ranges)
    rules = None if marker.rules is None else replace(marker.rules, backoff=Backoff())
    return logged._replace(marker=replace(marker, ranges=tuple(OffsetRange(*each) for each in ranges), rules=rules))


@given(logs(), CUTS, RULES)
def test_table_grows_with_the_ranges_that_were_read_and_not_with_their_messages(
    markers: list[LoggedMarker], cuts: list[int], rules: QueueRules | None
) -> None:
    """A range cuts two runs of the table at most."""
    wide = [widened(each) for each in markers]
    state = begun(None if rules is None else replace(rules, backoff=Backoff()))
    for piece in batches(wide, cuts):
        state = fold(state, piece).state
    read = sum(len(each.marker.ranges) for each in wide if each.marker is not None)
    assert len(state.in_flight.columns) <= 2 * read
    assert len(state.marks.first) <= 2 * read


@given(logs(), st.integers(0, 40), RULES)
def test_prefix_read_twice_changes_nothing(markers: list[LoggedMarker], cut: int, rules: QueueRules | None) -> None:
    """A replayed batch decides nothing twice."""
    expected_decisions, expected_state = folded([markers], rules)
    decisions, state = folded([markers[:cut], markers, markers], rules)
    assert expected_decisions == decisions
    assert state.counters.repeated == len(markers[:cut]) + len(markers)
    state.counters.repeated = 0
    assert_same_state(expected_state, state)


@given(logs(), RULES)
def test_every_started_message_is_in_flight_or_ended_or_decided(
    markers: list[LoggedMarker], rules: QueueRules | None
) -> None:
    """And nothing else."""
    _, state = folded([markers], rules)
    counters = state.counters
    gone = counters.acked + counters.expired + counters.redelivered + counters.dead_lettered
    assert counters.started == state.in_flight.message_count + gone


@given(logs())
def test_decided_message_was_in_flight_and_overdue(markers: list[LoggedMarker]) -> None:
    """By the clock of the deciding TICK, and by its last START."""
    decisions, _ = folded([markers], QueueRules(1, max_deliveries=3))
    by_offset = {logged.marker_offset: logged for logged in markers}
    for row in decisions:
        opened = by_offset[row.start_marker_offset].marker
        assert opened is not None
        assert row.queue_partition == opened.queue_partition
        assert any(first <= row.message_offset < first + count for first, count in opened.ranges)
        assert row.start_marker_offset < row.tick_marker_offset
        assert row.deadline_at_ms < row.tick_at_ms
        assert row.action is DecisionAction.REDELIVER or row.reason


@given(logs(), CUTS, RULES)
def test_message_is_decided_once_in_a_term_until_a_tracker_ends_it(
    markers: list[LoggedMarker], cuts: list[int], rules: QueueRules | None
) -> None:
    """Whatever consumers say of it in between."""
    decisions, _ = folded(batches(markers, cuts), rules)
    ends = [(offset, marker) for offset, _, marker in markers if marker and marker.is_by_tracker]
    last: dict[tuple[int, int], int] = {}
    for row in decisions:
        message_id = (row.queue_partition, row.message_offset)
        since = last.get(message_id)
        assert since is None or any(
            since < offset < row.tick_marker_offset
            and marker.queue_partition == row.queue_partition
            and any(first <= row.message_offset < first + count for first, count in marker.ranges)
            for offset, marker in ends
        )
        last[message_id] = row.tick_marker_offset


def confirmations(result: FoldResult) -> list[LoggedMarker]:
    """Return the ENDs that a tracker writes with what it sends; of odd messages to be redelivered the time is over."""
    outcomes = {
        (DecisionAction.REDELIVER, 0): Outcome.REDELIVERED,
        (DecisionAction.REDELIVER, 1): Outcome.EXPIRED,
        (DecisionAction.DEAD_LETTER, 0): Outcome.DEAD_LETTERED,
        (DecisionAction.DEAD_LETTER, 1): Outcome.DEAD_LETTERED,
    }
    return [
        end(
            row.message_offset,
            0,
            outcome=outcomes[row.action, row.message_offset % 2],
            queue_partition=row.queue_partition,
            term=result.status.term,
        )
        for row in result.decisions.messages()
    ]


@settings(max_examples=examples(2.5))
@given(logs(), CUTS, st.integers(0, 40), RULES)
def test_rebuild_from_the_needed_marker_decides_as_the_first_run_did(
    markers: list[LoggedMarker], cuts: list[int], lost_at: int, rules: QueueRules | None
) -> None:
    """
    A tracker that lost its state reads from the needed marker on, under the rules in force there, and begins a term.

    It has the same messages in flight with the same deadlines as one that kept its state, and decides the same from its
    TERM on, though the rules change in the log before and after, and though the broker's clock steps back and forth.
    """
    state, written = begun(rules), []
    for piece in batches(markers[:lost_at], cuts):
        placed = log(*(logged._replace(marker_offset=-1) for logged in piece), first=state.next_marker_offset)
        result = fold(state, placed)
        ends = log(*confirmations(result), first=result.state.next_marker_offset)
        written += [*placed, *ends]
        state = fold(result.state, ends).state
    status = state.status()
    needed = [logged for logged in written if logged.marker_offset >= status.needed_marker_offset]
    status = Status.from_dict(json.loads(json.dumps(status.to_dict())))
    rebuilt = PartitionState.rebuilding(status.needed_rules, status.needed_clock, needed)
    rebuilt = fold(rebuilt, needed).state
    assert (rebuilt.clock_ms, rebuilt.appended_at_ms) == (state.clock_ms, state.appended_at_ms)
    assert rebuilt.rules_log.in_force == state.rules_log.in_force
    following = [begin_term(state.appended_at_ms, term=9), tick(state.appended_at_ms, term=9)]
    following += [logged._replace(marker_offset=-1) for logged in markers[lost_at:]]
    rest = log(*following, first=state.next_marker_offset)
    # Where nothing is needed, nothing was read.
    rebuilt.next_marker_offset = state.next_marker_offset
    expected, actual = fold(state, rest), fold(rebuilt, rest)
    assert expected.decisions.messages() == actual.decisions.messages()
    actual.state.counters = expected.state.counters
    assert_same_state(expected.state, actual.state)
