"""A deferral, backoff and its jitter, and the text of a dead letter; the model has all the rules together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.delays import added_by_jitter_ms, shortest_delays_ms
from kmq_spark.core.fold import DecisionAction, FoldResult, PartitionState, fold
from kmq_spark.core.in_flight import message_keys
from kmq_spark.core.markers import Outcome, Release
from kmq_spark.core.policy import QueueRules
from tests.builders import begun, end, keep_alive, log, start, tick

if TYPE_CHECKING:
    from numpy.typing import NDArray

PLAIN = QueueRules(1)
RESTING = QueueRules(1, backoff=Backoff(BackoffKind.LINEAR, initial_ms=1_000, max_ms=2_500))
KEEPING = QueueRules(1, dead_letters_expired=True)
FOREVER_MS = 10**12


def folded(*markers: object, state: PartitionState | None = None, rules: QueueRules = PLAIN) -> FoldResult:
    """Fold markers that follow a state, or the state before the first marker under some rules."""
    state = state or begun(rules)
    return fold(state, log(*markers, first=state.next_marker_offset))  # type: ignore[arg-type]  # builders


def deadline_ms(*markers: object, rules: QueueRules = PLAIN) -> int | None:
    """Return the deadline of the one message in flight."""
    return folded(*markers, rules=rules).status.next_deadline_at_ms


def test_deferred_message_falls_due_at_its_instant_and_its_delivery_does_not_count() -> None:
    """A delayed message: no consumer holds it, and its first delivery is still to come."""
    deferral = start(at_ms=1_000, lease_ms=0, delivery_count=1, never_handed_out=True, due_at_ms=8_000)
    assert not len(folded(deferral, tick(8_000)).decisions)
    (row,) = folded(deferral, tick(8_001)).decisions.messages()
    assert (row.deadline_at_ms, row.delivery_count, row.action) == (8_000, 0, DecisionAction.REDELIVER)
    assert not row.is_silent


def test_backoff_is_added_to_the_lease_of_a_start_by_its_delivery_count() -> None:
    """1_000 + 5_000, and 1_000 for each delivery, 2_500 at most."""
    found = [deadline_ms(start(delivery_count=count), rules=RESTING) for count in (1, 2, 3, 4)]
    assert found == [7_000, 8_000, 8_500, 8_500]


@pytest.mark.parametrize(("delivery_count", "expected"), [(2, 3_400 + 2_000), (3, 3_000), (4, 3_000)])
def test_last_delivery_that_failed_rests_no_more(delivery_count: int, expected: int) -> None:
    """It becomes a dead letter at the next TICK: neither the delay of its release nor the backoff is for anything."""
    limited = replace(RESTING, max_deliveries=3)
    first, failure = (
        start(at_ms=1_000, delivery_count=delivery_count),
        keep_alive(at_ms=3_000, lease_ms=400, release=Release.FAILED),
    )
    assert deadline_ms(first, failure, rules=limited) == expected
    before = folded(first, rules=limited).state
    assert folded(failure, state=before, rules=limited).status.next_deadline_at_ms == expected
    together = folded(first, failure, tick(3_001), rules=limited)
    for result in (together, folded(failure, tick(3_001), state=before, rules=limited)):
        actions = [row.action for row in result.decisions.messages()]
        assert actions == [DecisionAction.DEAD_LETTER] * (delivery_count >= 3)


@pytest.mark.parametrize(
    ("later", "error"),
    [
        ((), "; last error: TimeoutError: no answer"),
        ((keep_alive(release=Release.FAILED, reason="x" * 400),), "; last error: " + "x" * 300),
        ((keep_alive(release=Release.FAILED),), ""),
        ((start(delivery_count=3),), ""),
    ],
)
def test_dead_letter_says_what_the_handler_of_the_last_delivery_raised(later: tuple[object, ...], error: str) -> None:
    """In one batch and in several, within a bound; a START after it begins a delivery that has raised nothing."""
    failure = keep_alive(release=Release.FAILED, reason="TimeoutError: no answer")
    markers, limited = (start(delivery_count=3), failure, *later), QueueRules(1, max_deliveries=3)
    expected = ["delivery limit reached: 3 of 3" + error]
    assert folded(*markers, tick(FOREVER_MS), rules=limited).decisions.reasons == expected
    state = begun(limited)
    for marker in markers:
        state = PartitionState.from_bytes(folded(marker, state=state, rules=limited).state.to_bytes())
    assert folded(tick(FOREVER_MS), state=state, rules=limited).decisions.reasons == expected


@pytest.mark.parametrize(
    ("reason", "expected_reason"), [("", "expired"), ("ttl of 5 ms was over", "ttl of 5 ms was over")]
)
def test_expired_message_is_dead_lettered_at_the_next_tick_where_the_rules_ask_for_it(
    reason: str, expected_reason: str
) -> None:
    expired = end(at_ms=1_500, outcome=Outcome.EXPIRED, reason=reason)
    (row,) = folded(start(), expired, tick(1_501), rules=KEEPING).decisions.messages()
    assert (row.action, row.reason, row.is_silent) == (DecisionAction.DEAD_LETTER, expected_reason, False)
    leased = folded(start(), rules=KEEPING).state
    assert folded(expired, tick(1_501), state=leased, rules=KEEPING).decisions.reasons == [expected_reason]
    before = folded(start(count=2), rules=KEEPING).state
    first = folded(expired, state=before, rules=KEEPING)
    assert first.status.next_deadline_at_ms == -1
    second = folded(end(8, outcome=Outcome.EXPIRED), state=first.state, rules=KEEPING).status
    assert (second.in_flight, second.counters["rejected"], second.counters["expired"]) == (2, 2, 0)


def delays_ms(backoff: Backoff, keys: NDArray[np.int64], counts: NDArray[np.int64]) -> list[int]:
    """Return the backoff of each message."""
    shortest_ms, jitter_ms = shortest_delays_ms(backoff, counts)
    delays: list[int] = (shortest_ms + added_by_jitter_ms(keys, counts, jitter_ms)).tolist()
    return delays


def test_delays_grow_as_their_kind_says() -> None:
    counts = np.array([0, 1, 2, 3, 4, 40])
    keys = message_keys(0, np.arange(6))
    grown = {kind: delays_ms(Backoff(kind, 100, 350), keys, counts) for kind in BackoffKind}
    assert grown == {
        BackoffKind.NONE: [0] * 6,
        BackoffKind.CONSTANT: [100] * 6,
        BackoffKind.LINEAR: [100, 100, 200, 300, 350, 350],
        BackoffKind.EXPONENTIAL: [100, 100, 200, 350, 350, 350],
    }


def test_jitter_spreads_messages_that_failed_together() -> None:
    jittery = Backoff(BackoffKind.CONSTANT, 1_000, 1_000, 1.0)
    delays = delays_ms(jittery, np.arange(1_000), np.ones(1_000, np.int64))
    per_tenth = np.bincount(np.minimum(np.array(delays) // 100, 9), minlength=10)
    assert per_tenth.min() > 60  # 100 of 1,000 in each tenth, more or less


def test_jitter_of_a_message_and_delivery_is_the_same_in_every_build() -> None:
    """Decisions are a function of the log: a tracker of another build that replays it finds the same deadlines."""
    keys = np.concatenate((message_keys(0, np.array([0, 7])), message_keys(3, np.array([7, 2**40]))))
    backoff = Backoff(BackoffKind.EXPONENTIAL, 1_000, 60_000, 0.5)
    assert [delays_ms(backoff, keys, np.full(4, count)) for count in (1, 2, 3)] == [
        [917, 923, 554, 930],
        [1_491, 1_126, 1_817, 1_431],
        [2_049, 2_085, 2_341, 3_764],
    ]


def test_doubling_stops_at_the_longest_delay_however_many_deliveries_there_were() -> None:
    backoff = Backoff(BackoffKind.EXPONENTIAL, 1, 10**9)
    delays = delays_ms(backoff, np.arange(5), np.array([1, 10, 11, 31, 2**31 - 1]))
    assert delays == [1, 512, 1_024, 10**9, 10**9]
