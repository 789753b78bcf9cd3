"""What the checker of the fault campaign allows: a right story, and deviations that a promise leaves room for."""

from __future__ import annotations

from faults.waits import Bounds, Stretch
from kmq_spark.core.markers import MessageId
from kmq_spark.testing import end, log, start, tick
from tests.unit.fault_story import (
    DEAD_LETTERED,
    REDELIVERED,
    Story,
    defer,
    first_copy,
    next_copy,
    write_gone_for_what_is_there,
)


def test_right_story_has_no_violations() -> None:
    verdict = Story().verdict()
    assert verdict.violations == []
    assert verdict.lateness_ms == [200, 200]  # 6_200 - 6_000
    assert (verdict.counts["redelivered"], verdict.counts["dead_lettered"]) == (2, 2)
    # Six: messages 0 to 3 and the copies 10 and 11.
    assert (verdict.counts["leases"], verdict.counts["leases_told_by_tracker"]) == (6, 6)


def test_deferred_message_has_no_delivery_yet() -> None:
    """Its copy comes at its instant, with the count it had."""
    story = Story()
    defer(story)
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.lateness_ms[-1] == 100  # 20_100 - 20_000


def test_ack_after_the_decision_is_counted_and_allowed() -> None:
    """The tracker decided at a TICK, the ack came behind it, the END behind that: both are right."""
    story = Story()
    story.messages += [first_copy(4), next_copy(12, 4, 1, 20_200)]
    story.events.append({"event": "send", "id": "id-4"})
    story.append(start(4, 12_000), tick(20_000), end(4, 20_100), end(4, 20_200, outcome=REDELIVERED))
    story.append(start(12, 20_300, delivery_count=2), end(12, 20_400))
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.counts["acked_after_decision"] == 1


def test_ack_after_the_dead_letter_is_counted_and_allowed() -> None:
    """A consumer that slept too long acks what was given up in the meantime."""
    story = Story()
    story.append(end(3, 12_000), end(11, 12_000))
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.counts["late_acks"] == 2


def test_message_fetched_again_may_come_twice() -> None:
    """Its consumer died between START and commit, longer ago than a lease: two leases, a redelivery each."""
    story = Story()
    story.append(start(1, 12_000), tick(20_000), end(1, 20_100, outcome=REDELIVERED))
    story.messages.append(next_copy(12, 1, 1, 20_100))
    story.append(start(12, 20_200, delivery_count=2), end(12, 20_300))
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.counts["fetched_again"] == 1


def test_payload_that_retention_removed_may_be_gone() -> None:
    """The record was read before it was removed: its dead letter without payload is right."""
    story = Story()
    write_gone_for_what_is_there(story)
    story.removed.add(MessageId(0, 1))
    assert story.verdict().violations == []


def test_time_in_which_the_broker_was_away_excuses_a_late_redelivery() -> None:
    """20 s of suspension, and 14 s after it."""
    story = Story()
    story.bounds = Bounds(away=[Stretch(6_100, 26_100)], stall_ms=10_000)
    story.messages[4] = next_copy(10, 1, 1, 40_100)
    story.messages[5] = next_copy(11, 3, 1, 40_100)
    story.markers[8:] = log(
        start(10, 40_500, delivery_count=2, count=2),
        end(10, 41_000),
        tick(45_600),
        end(11, 45_700, outcome=DEAD_LETTERED, reason="delivery limit reached: 2 of 2"),
        first=8,
    )
    assert story.verdict().violations == []


def test_clock_of_the_log_goes_on_where_the_clock_of_the_broker_was_set_back() -> None:
    """An hour back between START and TICK: the lease of 5 s is one of 5 s, by the steps from marker to marker."""
    story, hour_ms = Story(), 3_600_000
    story.messages += [first_copy(4), next_copy(12, 4, 1, 105_100)]
    story.events.append({"event": "send", "id": "id-4"})
    story.append(start(4, 100_000 + hour_ms), *(tick(at_ms) for at_ms in range(100_000, 105_500, 500)), tick(105_001))
    story.append(end(4, 105_100, outcome=REDELIVERED))
    story.append(start(12, 105_200, delivery_count=2), end(12, 105_300))
    story.bounds = Bounds(true_messages={MessageId(0, 12): 105_100 + hour_ms})
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.lateness_ms[-1] == 100  # 105_100 - 105_000
