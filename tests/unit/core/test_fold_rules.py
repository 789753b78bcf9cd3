"""The rules of the tracker, one by one."""

from __future__ import annotations

import pytest

from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.fold import Decision, DecisionAction, Decisions, FoldResult, PartitionState, fold
from kmq_spark.core.markers import Outcome
from kmq_spark.core.policy import QueueRules
from tests.builders import begin_term, begun, end, keep_alive, log, rules, start, tick, unreadable

EMPTY = begun()
SMALL_TICK = "kmq_spark.core.fold.MOST_DECISIONS_OF_A_TICK"
TRACKER_OUTCOMES = (Outcome.REDELIVERED, Outcome.DEAD_LETTERED)


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


def test_nothing_is_decided_without_a_tick() -> None:
    """Silence is not time: markers far past the deadline decide nothing."""
    result = folded(start(7, at_ms=1_000), start(8, at_ms=900_000), end(8, at_ms=900_001))
    assert not len(result.decisions)
    assert (result.status.in_flight, result.status.next_deadline_at_ms) == (1, 6_000)


def test_end_marker_stops_redelivery() -> None:
    """However late: what was appended before the TICK was read before it."""
    result = folded(start(), end(at_ms=900_000), tick(900_000))
    assert not len(result.decisions)
    assert counted(result) == {"started": 1, "acked": 1, "ticks": 1}


def test_decided_message_stays_in_the_table_until_its_end_is_read() -> None:
    """A tracker that decides and does not get to send shows in `marked`. Its START is still needed."""
    decided_two = folded(start(7, count=2), tick())
    status = decided_two.status
    assert (status.in_flight, status.marked, status.needed_marker_offset, status.next_deadline_at_ms) == (2, 2, 0, None)
    half = folded(end(7, outcome=Outcome.REDELIVERED, term=1), state=decided_two.state)
    assert (half.status.in_flight, half.status.marked) == (1, 1)
    assert counted(half) == {"started": 2, "redelivered": 1, "ticks": 1}


def test_end_of_a_consumer_after_the_decision_ends_the_message() -> None:
    """The tracker's END comes after it and changes nothing."""
    result = folded(start(), tick(), end(at_ms=10_001), tick(20_000), end(outcome=Outcome.REDELIVERED, term=1))
    assert decided(result) == [(7, DecisionAction.REDELIVER)]
    assert counted(result) == {"started": 1, "acked": 1, "end_late": 1, "ticks": 2}


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


def test_keep_alive_moves_the_deadline() -> None:
    """From its own append time on."""
    markers = (start(at_ms=1_000, lease_ms=5_000), keep_alive(at_ms=4_000, lease_ms=5_000))
    assert not len(folded(*markers, tick(9_000)).decisions)
    assert decided(folded(*markers, tick(9_001))) == [(7, DecisionAction.REDELIVER)]


def test_keep_alive_after_end_does_not_revive_message() -> None:
    """A straggler is counted and ignored."""
    result = folded(start(), end(), keep_alive(at_ms=4_000), tick(900_000))
    assert not len(result.decisions)
    assert counted(result) == {"started": 1, "acked": 1, "keepalive_unknown": 1, "ticks": 1}


def test_released_message_is_due_at_the_next_tick() -> None:
    """A KEEPALIVE of no length; the delivery counts."""
    rows = folded(start(delivery_count=2), keep_alive(at_ms=2_000, lease_ms=0), tick(2_001)).decisions.messages()
    assert [(row.message_offset, row.delivery_count, row.deadline_at_ms) for row in rows] == [(7, 2, 2_000)]


def test_release_of_messages_that_no_handler_saw_does_not_count() -> None:
    """Nor does it below zero, nor towards the limit."""
    release = keep_alive(at_ms=2_000, lease_ms=0, never_handed_out=True)
    result = folded(start(delivery_count=1), release, release, tick(2_001), max_deliveries=1)
    assert result.decisions.delivery_count.tolist() == [0]
    assert decided(result) == [(7, DecisionAction.REDELIVER)]


def test_second_start_renews_the_lease_with_its_own_values() -> None:
    """The last START wins."""
    result = folded(start(at_ms=1_000, delivery_count=2), start(at_ms=4_000, delivery_count=3), tick(9_001))
    rows = [(row.deadline_at_ms, row.delivery_count, row.start_marker_offset) for row in result.decisions.messages()]
    assert rows == [(9_000, 3, 1)]  # 4_000 + 5_000
    assert counted(result) == {"started": 1, "renewed": 1, "ticks": 1}


def test_start_after_the_redelivery_puts_the_old_copy_in_flight_anew() -> None:
    """kafka-mq-go's tracker ends here."""
    result = folded(start(), tick(), end(outcome=Outcome.REDELIVERED), start(at_ms=11_000), tick(16_001))
    assert result.decisions.message_offset.tolist() == [7, 7]
    assert counted(result) == {"started": 2, "redelivered": 1, "ticks": 2}


def test_message_goes_to_dead_letter_after_max_deliveries() -> None:
    """The dead letter has the reason."""
    result = folded(start(7, delivery_count=4), start(8, delivery_count=5), tick(), max_deliveries=5)
    assert decided(result) == [(7, DecisionAction.REDELIVER), (8, DecisionAction.DEAD_LETTER)]
    assert result.decisions.reasons == ["", "delivery limit reached: 5 of 5"]
    assert counted(result) == {"started": 2, "ticks": 1}


def test_without_a_limit_messages_are_redelivered_for_ever() -> None:
    """0 = none."""
    result = folded(start(delivery_count=1_000_000), tick(), max_deliveries=0)
    assert decided(result) == [(7, DecisionAction.REDELIVER)]


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


def test_rejection_without_reason_says_rejected() -> None:
    """A dead letter always says why."""
    assert folded(start(), end(outcome=Outcome.REJECTED), tick()).decisions.reasons == ["rejected"]


@pytest.mark.parametrize("late", [end(), end(outcome=Outcome.REJECTED, reason="again"), end(outcome=Outcome.EXPIRED)])
def test_later_end_does_not_change_a_rejection(late: object) -> None:
    """The first END after the START counts, whatever comes in the same batch or in a later one."""
    rejected = (start(), end(outcome=Outcome.REJECTED, reason="bad"))
    together = folded(*rejected, late, keep_alive(), tick(), dead_letters_expired=True)
    before = folded(*rejected, dead_letters_expired=True).state
    for result in (together, folded(late, keep_alive(), tick(), state=before)):
        assert result.decisions.reasons == ["bad"]
        counters = counted(result)
        assert (counters["rejected"], counters["end_unknown"], counters["keepalive_unknown"]) == (1, 1, 1)


@pytest.mark.parametrize("late", [end(), end(outcome=Outcome.REJECTED, reason="again")])
def test_late_end_of_a_consumer_takes_no_rejected_message_away_where_expired_ones_are_dropped(late: object) -> None:
    """Only a tracker ends a rejected message, or else its dead letter would be lost."""
    rejected = (start(), end(outcome=Outcome.REJECTED, reason="bad"))
    before = folded(*rejected).state
    for result in (folded(*rejected, late, tick()), folded(late, tick(), state=before)):
        assert decided(result) == [(7, DecisionAction.DEAD_LETTER)]
        assert (result.decisions.reasons, counted(result)["end_unknown"]) == (["bad"], 1)


def test_start_clears_a_rejection() -> None:
    """Another consumer has started it; a new rejection has its own reason."""
    rejection = end(outcome=Outcome.REJECTED, reason="bad")
    again = folded(start(), rejection, start(at_ms=4_000))
    assert (again.state.in_flight.reasons(), again.status.next_deadline_at_ms) == ({}, 9_000)  # 4_000 + 5_000
    before = folded(start(), rejection)
    assert folded(start(at_ms=4_000), state=before.state).state.in_flight.reasons() == {}
    assert counted(folded(start(at_ms=4_000), state=before.state)) == {"started": 1, "rejected": 1, "renewed": 1}


@pytest.mark.parametrize("outcome", TRACKER_OUTCOMES)
def test_end_of_an_earlier_tracker_takes_the_message_out(outcome: Outcome) -> None:
    """Also a rejected one. A tracker of kafka-mq-go or of an older version names no term."""
    leased = folded(start(), tick(term=0), end(outcome=outcome))
    rejected = folded(start(), end(outcome=Outcome.REJECTED), end(outcome=outcome))
    for result in (leased, rejected):
        assert (result.status.in_flight, result.state.in_flight.reasons()) == (0, {})
    assert counted(leased) == {"started": 1, outcome.name.lower(): 1, "ticks": 1}
    assert counted(rejected) == {"started": 1, "rejected": 1, outcome.name.lower(): 1}


def test_lease_is_whole_after_the_brokers_clock_was_set_back() -> None:
    """Times of the decision are those of the broker's clock at the TICK, however far it is behind."""
    begun = folded(tick(50_000), start(at_ms=1_000, lease_ms=1_500), tick(2_000), tick(2_500))
    assert not len(begun.decisions)
    # 50_000, 50_000 + 0, + 1_000, + 500
    assert (begun.status.clock_ms, begun.status.behind_ms, begun.status.appended_at_ms) == (51_500, 49_000, 2_500)
    assert begun.status.next_deadline_at_ms == 1_000 + 1_500
    ended = folded(tick(2_501), state=begun.state)
    (row,) = ended.decisions.messages()
    assert (row.deadline_at_ms, row.tick_at_ms) == (2_500, 2_501)


def test_silence_does_not_count_while_the_brokers_clock_is_behind() -> None:
    """It looks like a clock that is set forward again; TICKs come oftener as long."""
    behind = folded(tick(50_000), start(at_ms=1_000, lease_ms=500), tick(3_000))
    assert (len(behind.decisions), behind.status.behind_ms) == (0, 47_000)
    assert len(folded(tick(3_400), state=behind.state).decisions) == 0
    assert len(folded(tick(3_501), state=behind.state).decisions) == 1
    caught_up = folded(tick(60_000), state=behind.state)
    assert (len(caught_up.decisions), caught_up.status.behind_ms) == (1, 0)


def test_renewal_and_release_count_from_the_partitions_clock() -> None:
    """As a START does."""
    state = folded(tick(50_000), start(7, at_ms=1_000), start(8, at_ms=1_000)).state
    renewed = folded(keep_alive(7, 1_500, lease_ms=900), keep_alive(8, 1_500, lease_ms=0), tick(1_501), state=state)
    assert renewed.decisions.message_offset.tolist() == [8]
    assert renewed.status.next_deadline_at_ms == 1_500 + 900


def test_instant_of_a_deferral_is_one_of_the_brokers_clock() -> None:
    """So it does not fall due when the clock of the partition shows it, an hour ahead."""
    deferral = start(at_ms=1_000, lease_ms=0, never_handed_out=True, due_at_ms=2_000)
    state = folded(tick(3_601_000), deferral, tick(2_000)).state
    assert state.status().next_deadline_at_ms == 2_000
    assert len(folded(tick(2_001), state=state).decisions) == 1


def test_rejected_message_is_due_whatever_the_clock_says() -> None:
    """Its deadline is none."""
    state = folded(tick(50_000), start(at_ms=1_000), end(at_ms=1_000, outcome=Outcome.REJECTED)).state
    assert state.status().next_deadline_at_ms == -1
    assert folded(tick(900), state=state).decisions.deadline_at_ms.tolist() == [-1]


def test_clock_survives_a_restart_of_the_tracker() -> None:
    """And continues from its own value, not from the broker's."""
    state = folded(tick(50_000), start(at_ms=1_000, lease_ms=1_500)).state
    again = PartitionState.from_bytes(state.to_bytes())
    assert (again.clock_ms, again.appended_at_ms) == (50_000, 1_000)
    assert not len(folded(tick(2_000), state=again).decisions)


def test_one_tick_decides_no_more_than_its_bound_earliest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it decides fits into one transaction; the rest stays due."""
    leases = [start(offset, lease_ms=lease_ms) for offset, lease_ms in ((1, 300), (2, 100), (3, 200), (4, 100))]
    monkeypatch.setattr(SMALL_TICK, 3)
    first = folded(*leases, tick())
    assert first.decisions.message_offset.tolist() == [2, 4, 3]
    assert (first.status.marked, first.status.next_deadline_at_ms) == (3, 1_300)  # 1_000 + 300
    second = folded(tick(), state=first.state)
    assert second.decisions.message_offset.tolist() == [1]


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


def test_one_marker_covers_many_messages() -> None:
    """Ranges of one START, ended in other pieces."""
    result = folded(start(ranges=[(7, 3), (20, 2)]), end(ranges=[(8, 1), (20, 1)]), tick())
    assert result.decisions.message_offset.tolist() == [7, 9, 21]


def test_same_offset_of_two_queue_partitions_is_two_messages() -> None:
    """kafka-mq-go spreads markers by queue id, so one markers partition may hold several queue partitions."""
    result = folded(start(7, queue_partition=1), start(7, queue_partition=2), end(7, queue_partition=1), tick())
    assert result.decisions.queue_partition.tolist() == [2]


def test_marker_read_again_is_counted_and_skipped() -> None:
    """A replayed batch changes nothing."""
    batch = log(start(), end())
    state = fold(EMPTY, batch).state
    again = fold(state, [*batch, *log(start(8), first=2)])
    assert counted(again) == {"started": 2, "acked": 1, "repeated": 2}
    assert again.status.in_flight == 1


def test_unreadable_record_is_counted_and_passed() -> None:
    """Foreign bytes never stop the tracker."""
    result = folded(start(), unreadable(), end())
    assert counted(result) == {"started": 1, "acked": 1, "unreadable": 1}
    assert result.status.next_marker_offset == 3


def test_append_time_before_the_epoch_reads_as_zero() -> None:
    """A record without timestamp has -1, which would look like a rejection."""
    result = folded(start(at_ms=-1, lease_ms=0), tick(1))
    assert result.decisions.deadline_at_ms.tolist() == [0]


def test_needed_marker_is_the_oldest_start_in_flight() -> None:
    """From there a lost checkpoint is rebuilt."""
    result = folded(start(7), start(8), start(9), end(7), start(8))
    assert (result.status.needed_marker_offset, result.status.next_marker_offset) == (2, 5)
    done = folded(end(8), end(9), state=result.state)
    assert (done.status.needed_marker_offset, done.status.next_deadline_at_ms) == (7, None)


def test_fold_leaves_the_state_before_it_unchanged() -> None:
    """A batch that fails is folded again from the same state."""
    before = folded(start(7, count=3), end(9, outcome=Outcome.REJECTED, reason="bad"))
    blob = before.state.to_bytes()
    folded(keep_alive(7, at_ms=9_000), end(8), start(9), tick(90_000), state=before.state)
    assert blob == before.state.to_bytes()


def test_rules_in_the_log_hold_from_their_marker_on() -> None:
    """The limit of deliveries counts at the TICK, backoff at the START: each under the rules in force there."""
    first = QueueRules(1, max_deliveries=3, backoff=Backoff(BackoffKind.CONSTANT, 500, 500))
    second = QueueRules(2, max_deliveries=2)
    result = folded(
        rules(first),
        start(7, at_ms=1_000, lease_ms=5_000, delivery_count=2),
        rules(second),
        start(8, at_ms=1_000, lease_ms=5_000),
        tick(6_001),
        tick(6_501),
    )
    # 1_000 + 5_000 + 500 = 6_500
    assert [(row.message_offset, row.deadline_at_ms, row.reason) for row in result.decisions.messages()] == [
        (8, 6_000, ""),
        (7, 6_500, "delivery limit reached: 2 of 2"),
    ]


def test_queue_without_rules_in_the_log_has_the_defaults() -> None:
    limited = folded(start(7, delivery_count=5), tick(90_000))
    assert decided(limited) == [(7, DecisionAction.DEAD_LETTER)]
    assert (limited.status.rules, limited.status.needed_rules) == (None, None)


def test_same_rules_again_change_nothing() -> None:
    """Each tracker writes them as it starts."""
    own = QueueRules(1)
    result = folded(rules(own), start(7), rules(own), rules(own))
    assert result.state.rules_log.changes == ((-1, own),)


def test_empty_batch_changes_nothing() -> None:
    """Spark may call with no rows."""
    result = folded()
    assert (len(result.decisions), result.status.next_marker_offset) == (0, 0)
    assert not len(Decisions.empty())
