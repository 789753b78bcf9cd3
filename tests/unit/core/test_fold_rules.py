"""The main rules of the tracker, one by one; `test_fold_properties.py` compares all of them with a model."""

from __future__ import annotations

import pytest

from kmq_spark.core.fold import Decision, DecisionAction, FoldResult, PartitionState, fold
from kmq_spark.core.markers import MAX_MESSAGE_OFFSET, MAX_QUEUE_PARTITION, Outcome
from kmq_spark.core.policy import QueueRules
from tests.builders import begin_term, begun, end, keep_alive, log, rules, start, tick

EMPTY = begun()
SMALL_TICK = "kmq_spark.core.fold.MOST_DECISIONS_OF_A_TICK"


def folded(*markers: object, state: PartitionState = EMPTY, **rules: int) -> FoldResult:
    """Fold markers that follow a state, or the state before the first marker under some rules."""
    before = begun(QueueRules(1, **rules)) if rules else state  # type: ignore[arg-type]  # a bool is an int
    return fold(before, log(*markers, first=before.next_marker_offset))  # type: ignore[arg-type]  # builders


def decided(result: FoldResult) -> list[tuple[int, DecisionAction]]:
    """Return message offset and action of each decision."""
    return [(row.message_offset, row.action) for row in result.decisions.messages()]


def counted(result: FoldResult) -> dict[str, int]:
    """Return the counters that are not zero."""
    return {name: count for name, count in result.status.counters.items() if count}


def test_overdue_message_is_redelivered_at_the_tick() -> None:
    """The decision says everything that the sender needs."""
    result = folded(start(7, at_ms=1_000, lease_ms=5_000, queue_partition=3), tick(6_001))
    # 1_000 + 5_000 = 6_000
    expected = Decision(3, 7, 1, DecisionAction.REDELIVER, 6_000, 1, 6_001, 0, "", is_silent=True)
    assert [expected] == result.decisions.messages()
    assert counted(result) == {"started": 1, "ticks": 1}


def test_message_is_not_due_at_its_deadline() -> None:
    """A deadline is due when it lies below the clock."""
    assert not len(folded(start(at_ms=1_000, lease_ms=5_000), tick(6_000)).decisions)


def test_end_marker_stops_redelivery() -> None:
    """However late: what was appended before the TICK was read before it."""
    result = folded(start(), end(at_ms=900_000), tick(900_000))
    assert not len(result.decisions)
    assert counted(result) == {"started": 1, "acked": 1, "ticks": 1}


@pytest.mark.parametrize("term", [0, 2])
def test_tick_of_another_term_moves_the_clock_and_decides_nothing(term: int) -> None:
    """Also one of a term that never existed, or of a tracker before there were terms."""
    result = folded(start(), tick(50_000, term=term))
    assert (len(result.decisions), result.status.clock_ms) == (0, 50_000)
    assert decided(folded(tick(50_001), state=result.state)) == [(7, DecisionAction.REDELIVER)]


def test_new_term_decides_anew_what_the_older_one_did_not_carry_out() -> None:
    """All ENDs of the older one lie below the TERM. Within a batch its decisions are dropped."""
    rejected = (start(8), end(8, outcome=Outcome.REJECTED, reason="bad"))
    before = folded(
        start(7, delivery_count=2), start(9), *rejected, tick(), end(9, outcome=Outcome.REDELIVERED, term=1)
    )
    assert [offset for offset, _ in sorted(decided(before))] == [7, 8, 9]
    result = folded(tick(), begin_term(term=2), tick(), tick(term=2), tick(term=2), state=before.state)
    rows = [(row.message_offset, row.delivery_count, row.reason) for row in result.decisions.messages()]
    assert rows == [(8, 1, "bad"), (7, 2, "")]
    together = folded(start(7), tick(), begin_term(term=2, tracker_id="t2"))
    assert (decided(together), together.status.term, together.status.term_by) == ([], 2, "t2")


def test_repeated_term_changes_nothing() -> None:
    """A copy of the newest TERM must not clear the marks: the transaction of what it has decided may be open."""
    before = folded(begin_term(term=2), start(), tick(term=2)).state
    assert not len(folded(begin_term(term=2), tick(term=2), state=before).decisions)


def test_start_of_the_old_copy_gets_a_lease_and_the_older_ones_tick_does_not_decide_it_again() -> None:
    """
    A consumer died before it committed, the next one starts its message again; the tracker's END comes after that.

    Whether that lease runs out first, is kept alive, acked or refused: one copy is on its way, and no second one.
    """
    again = start(at_ms=11_000, lease_ms=100)
    before = folded(start(), tick())
    acked_and_started = (end(), start(at_ms=12_000, lease_ms=100))
    for meanwhile in ((), (keep_alive(at_ms=11_050),), (end(),), (end(outcome=Outcome.REJECTED),), acked_and_started):
        state = PartitionState.from_bytes(before.state.to_bytes())
        sent = end(outcome=Outcome.REDELIVERED, term=1)
        result = folded(again, *meanwhile, tick(900_000), sent, tick(), state=state)
        assert (len(result.decisions), result.status.in_flight, result.status.marked) == (0, 0, 0)
    renewed = folded(again, begin_term(term=2), tick(11_100, term=2), state=before.state)
    assert not len(renewed.decisions)
    assert decided(folded(tick(11_101, term=2), state=renewed.state)) == [(7, DecisionAction.REDELIVER)]


def test_message_goes_to_dead_letter_after_max_deliveries() -> None:
    """The dead letter has the reason."""
    result = folded(start(7, delivery_count=4), start(8, delivery_count=5), tick(), max_deliveries=5)
    assert decided(result) == [(7, DecisionAction.REDELIVER), (8, DecisionAction.DEAD_LETTER)]
    assert result.decisions.reasons == ["", "delivery limit reached: 5 of 5"]
    assert counted(result) == {"started": 2, "ticks": 1}


def test_rejected_message_is_dead_lettered_at_the_next_tick_whatever_its_lease() -> None:
    """With the reason that the consumer gave."""
    rejection = end(at_ms=2_000, outcome=Outcome.REJECTED, reason="no such order")
    before = folded(start(lease_ms=900_000), rejection)
    assert (before.status.in_flight, before.status.next_deadline_at_ms) == (1, -1)
    result = folded(tick(2_001), state=before.state)
    expected = Decision(0, 7, 1, DecisionAction.DEAD_LETTER, -1, 2, 2_001, 0, "no such order")
    assert [expected] == result.decisions.messages()
    assert counted(result) == {"started": 1, "rejected": 1, "ticks": 1}
    leased = folded(start(lease_ms=900_000)).state
    assert [expected] == folded(rejection, tick(2_001), state=leased).decisions.messages()


def test_first_marker_of_a_batch_ends_what_was_rejected_before_it() -> None:
    """An earlier tracker's END: where it went unnoticed, the dead letter would be sent twice."""
    rejected = folded(start(count=2), end(outcome=Outcome.REJECTED), end(8, outcome=Outcome.REJECTED)).state
    result = folded(*(end(offset, outcome=Outcome.DEAD_LETTERED) for offset in (7, 8)), tick(), state=rejected)
    assert (len(result.decisions), result.status.in_flight) == (0, 0)


def test_largest_message_of_all_is_decided_and_ended() -> None:
    """The key after it is no int64."""
    before = folded(start(MAX_MESSAGE_OFFSET - 1, count=2, queue_partition=MAX_QUEUE_PARTITION), tick())
    assert before.decisions.message_offset.tolist() == [MAX_MESSAGE_OFFSET - 1]
    last = end(MAX_MESSAGE_OFFSET, queue_partition=MAX_QUEUE_PARTITION, outcome=Outcome.REDELIVERED, term=1)
    after = folded(last, state=PartitionState.from_bytes(before.state.to_bytes()))
    assert (after.status.in_flight, after.status.marked) == (1, 1)


@pytest.mark.parametrize("bound", range(1, 13))
def test_any_bound_cuts_the_same_order_within_a_range_too(monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
    leases = [
        start(ranges=[(first, count)], lease_ms=lease_ms)
        for first, count, lease_ms in ((1, 1, 300), (10, 3, 100), (20, 1, 200), (30, 2, 100), (40, 4, 50), (50, 1, 400))
    ]
    every = folded(*leases, tick()).decisions.messages()
    monkeypatch.setattr(SMALL_TICK, bound)
    bounded = folded(*leases, tick())
    assert bounded.decisions.messages() == every[:bound]
    assert bounded.status.marked == bound


def test_messages_of_one_deadline_are_decided_in_order_of_their_partition_and_offset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands fall due together after an outage; each tracker that replays the log decides them in one order."""
    leases = [
        start(offset, lease_ms=lease_ms, queue_partition=queue_partition)
        for offset in range(0, 600, 2)
        for lease_ms, queue_partition in ((100 + offset % 3, 1), (100, 0))
    ]
    rows = folded(*leases, tick()).decisions.messages()
    places = [(row.deadline_at_ms, row.queue_partition, row.message_offset) for row in rows]
    assert (len(places), places) == (600, sorted(places))
    monkeypatch.setattr(SMALL_TICK, 250)
    limited = folded(*leases, tick()).decisions.messages()
    assert limited == rows[:250]


def test_append_time_before_the_epoch_reads_as_zero() -> None:
    """A record without timestamp has -1, which would look like a rejection."""
    result = folded(start(at_ms=-1, lease_ms=0), tick(1))
    assert result.decisions.deadline_at_ms.tolist() == [0]


def test_fold_leaves_the_state_before_it_unchanged() -> None:
    """A batch that fails is folded again from the same state."""
    before = folded(start(7, count=3), end(9, outcome=Outcome.REJECTED, reason="bad"))
    blob = before.state.to_bytes()
    folded(keep_alive(7, at_ms=9_000), end(8), start(9), tick(90_000), state=before.state)
    assert blob == before.state.to_bytes()


def test_queue_without_rules_in_the_log_has_the_defaults() -> None:
    limited = folded(start(7, delivery_count=5), tick(90_000))
    assert decided(limited) == [(7, DecisionAction.DEAD_LETTER)]
    assert (limited.status.rules, limited.status.needed_rules) == (None, None)


def test_same_rules_again_change_nothing() -> None:
    """Each tracker writes them as it starts."""
    own = QueueRules(1)
    result = folded(rules(own), start(7), rules(own), rules(own))
    assert result.state.rules_log.changes == ((-1, own),)
