"""What the checker of the fault campaign allows: a right story, and deviations that a promise leaves room for."""

from __future__ import annotations

from dataclasses import replace

from faults.evidence import INJECTOR, TRACKER, WORKER, Process
from faults.waits import Bounds, Interval
from kmq_spark.core.markers import MessageId, Outcome, Release
from kmq_spark.core.policy import QueueRules
from tests.builders import end, keep_alive, log, rules, start, tick
from tests.unit.faults.story import (
    DEAD_LETTERED,
    HOUR_MS,
    LIMIT,
    OTHER,
    REDELIVERED,
    TTL_WAS_OVER,
    Story,
    copy_of,
    empty_letter,
    event,
    letter_of,
)


def test_right_story_has_no_violations() -> None:
    verdict = Story().verdict()
    assert verdict.violations == []
    assert [wait.came_ms - wait.due_ms for wait in verdict.waits] == [200, 200]  # 6_200 - 6_000
    assert [wait.came_ms - wait.due_ms for wait in verdict.other_waits] == [500, 200]
    assert (verdict.counts["redelivered"], verdict.counts["dead_lettered"]) == (2, 2)
    # Six: messages 0 to 3 and the copies 10 and 11.
    assert (verdict.counts["leases"], verdict.counts["leases_reported_by_tracker"]) == (6, 6)


def test_deferred_message_has_no_delivery_yet() -> None:
    """Its copy comes at its instant, with the count it had."""
    story = Story()
    story.defer()
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.waits[-1].came_ms - verdict.waits[-1].due_ms == 100  # 20_100 - 20_000


def test_ack_after_the_decision_is_counted_and_allowed() -> None:
    """The tracker decided at a TICK, the ack came behind it, the END behind that: both are right."""
    story = Story()
    story.add(4, 11_800)
    story.append(start(4, 12_000), tick(20_000), end(4, 20_100))
    story.redeliver(4, 12, 20_200)
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.counts["acked_after_decision"] == 1


def test_ack_without_an_answer_is_written_again() -> None:
    """The broker was suspended for 15 s: the consumer's second END is counted, a fourth would be a violation."""
    story = Story()
    story.append(end(0, 9_000), end(0, 9_001))
    story.bounds = replace(story.bounds, away=[Interval(1_500, 16_500)])
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.counts["acked_again"] == 2
    story.append(end(0, 9_002))
    assert "I4" in {each.invariant for each in story.verdict().violations}


def test_ack_that_its_consumer_says_it_repeats_is_counted() -> None:
    """No fault was active: the machine was busy for longer than the producer waits for an answer."""
    story = Story()
    story.append(end(0, 12_000))
    assert "I4" in {each.invariant for each in story.verdict().violations}
    story.events.append(event("resent", 11_900))
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.counts["acked_again"] == 1


def test_ack_after_the_dead_letter_is_counted_and_allowed() -> None:
    """A consumer that slept too long acks what was given up in the meantime."""
    story = Story()
    story.append(end(3, 12_000), end(11, 12_000))
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.counts["late_acks"] == 2


def test_message_may_be_started_again_by_a_consumer_that_slept() -> None:
    """It was suspended as it wrote the START, longer than its session: two leases, a redelivery each."""
    story = Story()
    story.start_again(1, 12_000, ends=False, woke_ms=[2_000, 11_500])
    story.redeliver(1, 12, 20_100, tick(20_000))
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.counts["started_again"] == 1


def test_message_that_was_started_again_may_have_two_results() -> None:
    """Two acks in transactions, a result each."""
    story = Story()
    story.work_in_transactions()
    story.start_again(0, 12_000, woke_ms=[11_500])
    next(each for each in story.events if each["actor"] == OTHER)["mode"] = "transaction"
    story.add_result(0, 12_090, process="78")
    assert story.verdict().violations == []


def test_payload_that_retention_removed_may_be_gone() -> None:
    """The record was read before it was removed: its dead letter without payload is right."""
    story = Story()
    story.add(4, 11_800)
    reason = "payload gone: x"
    story.append(start(4, 12_000), tick(17_100), end(4, 17_200, outcome=DEAD_LETTERED, reason=reason))
    story.dead_letters.append(empty_letter(4, 2, 17_200, 1, reason))
    story.removed = [story.message(4)]
    story.remove(4)
    assert story.verdict().violations == []


def test_failure_is_redelivered_with_its_exception_and_the_last_one_at_once() -> None:
    """The delay of a release does not apply to what becomes a dead letter."""
    story = Story()
    story.add(4, 11_800)
    failed = keep_alive(4, 12_100, lease_ms=3_000, release=Release.FAILED, reason="E: x")
    story.append(start(4, 12_000), failed, tick(15_101), end(4, 15_200, outcome=REDELIVERED))
    story.messages.append(copy_of(story.message(4), 12, 15_200, 1, is_silent=False, error="E: x"))
    story.append(start(12, 15_300, delivery_count=2), keep_alive(12, 15_400, release=Release.FAILED, reason="E: y"))
    story.bury(12, 2, 15_600, 2, "delivery limit reached: 2 of 2; last error: E: y", tick(15_500))
    assert story.verdict().violations == []


def test_expired_message_is_dropped_by_consumer_and_by_tracker() -> None:
    """Its time to live was over as it was started; another one's as its lease ended."""
    story = Story()
    for offset in (4, 5):
        story.add(offset, 11_800, (("kmq-ttl-ms", b"3000"),))
    story.append(start(5, 14_000))
    story.append(start(4, 14_800), end(4, 14_900, outcome=Outcome.EXPIRED), is_handled=False)
    story.append(tick(19_100), end(5, 19_200, outcome=Outcome.EXPIRED))
    story.resign(-1, "old")
    story.is_reported = False
    assert story.verdict().violations == []


def test_expired_message_becomes_a_dead_letter_where_the_queue_keeps_it() -> None:
    """One that its lease ended, and one that its consumer ended right behind its START; all counts agree."""
    for expire, at_ms, reason in (
        (Story.expire_in_a_lease, 19_200, TTL_WAS_OVER),
        (Story.expire_at_its_start, 15_100, "expired"),
    ):
        story = Story()
        expire(story)
        story.bury(4, 2, at_ms, 1, reason)
        assert story.verdict().violations == []


def test_rules_where_the_end_lies_say_what_becomes_of_an_expired_message() -> None:
    """The rules change between the TICK that decides and the END: a sender goes by the newest rules in the log."""
    story = Story()
    story.add(4, 11_800, (("kmq-ttl-ms", b"3000"),))
    story.append(start(4, 14_000), tick(19_100))
    story.append(rules(QueueRules(1, LIMIT, dead_letters_expired=True), 19_150))
    story.bury(4, 2, 19_200, 1, TTL_WAS_OVER)
    assert story.verdict().violations == []


def test_injector_may_write_an_expired_end_of_the_tracker_again() -> None:
    """A part of the log twice, as F9 writes it: no tracker decided the second END."""
    story = Story()
    story.add(4, 11_800, (("kmq-ttl-ms", b"3000"),))
    story.append(start(4, 14_000), tick(19_100), end(4, 19_200, outcome=Outcome.EXPIRED))
    story.resign(-1, "old")
    story.append(end(4, 19_300, outcome=Outcome.EXPIRED))
    story.resign(-1, "old")
    story.is_reported = False
    assert {one.invariant for one in story.verdict().violations} == {"I4"}
    story.injected = {story.markers[-1].marker_offset}
    assert story.verdict().violations == []


def test_killed_worker_and_fenced_tracker_may_end_with_an_error() -> None:
    """A worker that was killed, and a tracker that a newer one has fenced."""
    story = Story()
    killed = Process(WORKER, "victim", 137, is_ended_by_us=True)
    said = "kmq: tracker b of q has taken over\njava.lang.InterruptedException: null\n"
    fenced = Process(TRACKER, "tracker-2", 1, log=said)
    story.processes += [killed, fenced]
    assert story.verdict().violations == []


def test_newer_tracker_may_take_over() -> None:
    """Each ENDs what it has decided, behind its TERM."""
    story = Story()
    story.take_over(9)
    assert story.verdict().violations == []


def test_time_in_which_the_broker_was_away_excuses_a_late_redelivery() -> None:
    """20 s of suspension, and 14 s after it."""
    story = Story()
    story.bounds = Bounds(away=[Interval(6_100, 26_100)], stall_ms=10_000)
    for offset, source in ((10, 1), (11, 3)):
        story.change(offset, copy_of(story.message(source), offset, 40_100, 1))
    story.markers[6:] = log(
        end(1, 40_100, outcome=REDELIVERED),
        end(3, 40_100, outcome=REDELIVERED),
        start(10, 40_500, delivery_count=2, count=2),
        end(10, 41_000),
        tick(45_600),
        end(11, 45_700, outcome=DEAD_LETTERED, reason="delivery limit reached: 2 of 2"),
        first=7,
    )
    story.dead_letters[1] = letter_of(story.message(11), 1, 45_700, 2, "delivery limit reached: 2 of 2")
    story.events = [each for each in story.events if each.get("copy") not in ([0, 10], [0, 11])]
    story.events += story.worked(10, 40_500, 40_900, name="id-1")
    assert story.verdict().violations == []


def test_clock_of_the_log_goes_on_where_the_clock_of_the_broker_was_set_back() -> None:
    """An hour back between START and TICK: the lease of 5 s is one of 5 s, by the steps from marker to marker."""
    story = Story()
    story.add(4, 100_000 + HOUR_MS)
    story.append(start(4, 100_000 + HOUR_MS))
    story.append(*(tick(at_ms) for at_ms in range(100_000, 105_500, 500)), tick(105_001))
    story.append(end(4, 105_100, outcome=REDELIVERED))
    story.messages.append(copy_of(story.message(4), 12, 105_100, 1))
    story.append(start(12, 105_200, delivery_count=2), end(12, 105_300))
    # The events of handlers are in true time.
    story.events = [each for each in story.events if each.get("copy") != [0, 12]]
    story.events += story.worked(12, 105_200 + HOUR_MS, 105_250 + HOUR_MS, name="id-4")
    true_ms = {(0, logged.marker_offset): logged.appended_at_ms + HOUR_MS for logged in story.markers[13:]}
    story.bounds = Bounds(true_messages={MessageId(0, 12): 105_100 + HOUR_MS}, true_markers=true_ms)
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.waits[-1].came_ms - verdict.waits[-1].due_ms == 100  # 105_100 - 105_000


def test_wall_clock_of_the_machine_may_be_set_back() -> None:
    """By an hour, before the last handlers work. The checker knows when, so it finds the true time of their events."""
    story = Story()
    later = [each for each in story.events if each["wall"] >= 6.4]
    for each in later:
        each["monotonic"] += HOUR_MS / 1000
    assert story.verdict().violations
    story.events.append(event("clock set", 6_400, actor=INJECTOR, since=3_606.0, ahead=-HOUR_MS / 1000))
    assert story.verdict().violations == []
