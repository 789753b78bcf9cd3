"""
Violations, each seeded into a right story.

Rule 1: a seed breaks one promise, and its docstring begins with the invariant that must report it.
Rule 2: it breaks nothing else that would reveal it: events, copies, counts and headers of what it appends are right.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from faults.evidence import WORKER, Process, Reported
from faults.waits import Bounds, Interval
from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.markers import MessageId, Outcome, Release
from kmq_spark.core.policy import QueueRules
from tests.builders import end, keep_alive, start, tick
from tests.unit.faults.story import (
    ACTOR,
    DEAD_LETTERED,
    HOUR_MS,
    LIMIT_REACHED,
    REDELIVERED,
    TTL_WAS_OVER,
    Story,
    copy_of,
    empty_letter,
    event,
    first_copy,
    letter_of,
    with_header,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMED = re.compile(r"(I\d+|harness): ")


def counted(reported: Reported, **more: int) -> dict[str, int]:
    """Return the counters that a tracker reports, some of them changed."""
    return {name: count + more.get(name, 0) for name, count in reported.counters.items()}


# I1: nothing is lost.


def lose_a_message(story: Story) -> None:
    """I1: a message was confirmed to a producer, and it is not there."""
    story.add(4, 11_800)
    story.remove(4)


def store_a_message_elsewhere(story: Story) -> None:
    """I1: a message was confirmed at one place, and lies at another one."""
    story.add(4, 11_800)
    story.events[-1]["place"] = [0, 5]
    story.append(start(4, 12_000), end(4, 12_100))


def leave_a_send_without_an_answer(story: Story) -> None:
    """I1: a producer was closed in order, and never got an answer for a message."""
    story.events.append(event("send", 11_000, id="id-77", actor="sender-1"))


def leave_a_message_in_flight(story: Story) -> None:
    """I1: taken, and never ended."""
    story.add(4, 11_800)
    story.append(start(4, 12_000))


def drop_a_copy(story: Story) -> None:
    """I1: an END says redelivered, and no copy is there."""
    story.append(start(1, 12_000), tick(20_000), end(1, 20_100, outcome=REDELIVERED))


def ack_what_no_handler_saw(story: Story) -> None:
    """I1: acked by a consumer that gave it to no handler: it is lost."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), end(4, 12_100), is_handled=False)


def ack_although_the_handler_raised(story: Story) -> None:
    """I1: given to a handler, and acked although that handler raised."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), end(4, 12_100), is_handled=False)
    story.events += story.worked(4, 12_000, 12_050, "raised")


def ack_before_the_handler_returned(story: Story) -> None:
    """I1: acked, and only then handled: a crash in between would lose it."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), end(4, 12_100), is_handled=False)
    story.events += story.worked(4, 12_000, 13_000)


def fail_what_no_handler_failed_on(story: Story) -> None:
    """I1: a consumer says that a handler raised, and it did not."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), is_handled=True)
    story.append(keep_alive(4, 12_100, lease_ms=0, release=Release.FAILED, reason="E: x"), is_handled=False)
    story.redeliver(4, 12, 12_400, tick(12_300), is_silent=False, error="E: x")


def hand_out_before_the_start_is_durable(story: Story) -> None:
    """I1: a handler had the message before its START was in the log: a crash would lose the delivery."""
    story.add(4, 11_800)
    story.append(start(4, 13_000), end(4, 13_100), is_handled=False)
    story.events += story.worked(4, 12_000, 12_050)


def drop_as_expired_what_never_expires(story: Story) -> None:
    """I1: a consumer says that its time to live is over, and it has none."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), end(4, 12_100, outcome=Outcome.EXPIRED), is_handled=False)


def expire_by_the_tracker_what_never_expires(story: Story) -> None:
    """I1: the tracker ends a due message as expired, and it has no time to live: no copy is sent."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), tick(17_100), end(4, 17_200, outcome=Outcome.EXPIRED))
    story.resign(-1, "old")


# I2: nothing appears.


def deliver_a_phantom(story: Story) -> None:
    """I2: a handler got what no producer sent."""
    story.events.append(event("delivered", 2_000, 0, "id-77"))


def give_another_message(story: Story) -> None:
    """I2: a handler got the bytes of one message under the name of another."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), end(4, 12_100), names={4: "id-0"})


def store_a_message_twice(story: Story) -> None:
    """I2: one send, two records."""
    story.messages.append(first_copy(4, 11_800)._replace(value=b"id-0|body"))
    story.append(start(4, 12_000), end(4, 12_100), names={4: "id-0"})


def send_nothing(story: Story) -> None:
    """harness: an empty queue keeps every promise."""
    story.markers, story.messages, story.dead_letters = [tick(1_000, marker_offset=1)], [], []
    story.events = [event("injected", 0, actor="injector")]
    story.is_reported = False


def deliver_nothing(story: Story) -> None:
    """harness: workers began, and no handler was given anything."""
    story.events = [each for each in story.events if each["event"] != "delivered"]


def inject_nothing(story: Story) -> None:
    """harness: a fault campaign without a fault."""
    story.injections = 0


# I3: no redelivery after its END.


def redeliver_after_the_end(story: Story) -> None:
    """I3: acked at marker 1, redelivered all the same."""
    story.redeliver(0, 12, 12_100, tick(12_000))


def redeliver_on_a_tick_of_an_older_tracker(story: Story) -> None:
    """I3: due at a TICK of the older term, acked before any TICK of the newer one."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), tick(20_000), end(4, 20_100))
    story.take_over(-1)
    story.redeliver(4, 12, 30_100, tick(30_000))


def redeliver_after_an_end_that_a_later_decision_passed(story: Story) -> None:
    """I3: due at TICK 14, acked at 15; the session then sent what TICK 16 decided, and after that the acked one."""
    story.add(4, 11_800)
    story.add(5, 11_800)
    story.append(start(4, 12_000, lease_ms=5_000), start(5, 12_000, lease_ms=9_000), tick(17_001), end(4, 17_100))
    story.redeliver(5, 12, 21_100, tick(21_001))
    story.commit()
    story.redeliver(4, 13, 21_300)


def redeliver_an_hour_after_the_ack(story: Story) -> None:
    """I3: due at a TICK, acked behind it, 199 TICKs, and redelivered an hour later."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), tick(17_100), end(4, 17_200))
    story.append(*(tick(17_200 + number * HOUR_MS // 199) for number in range(1, 200)))
    story.redeliver(4, 12, 17_300 + HOUR_MS)


def bury_an_hour_after_the_renewal(story: Story) -> None:
    """I3: due at a TICK for the last time, renewed for an hour, and dead-lettered in the middle of it."""
    story.add(4, 11_800, (("kmq-delivery-count", b"1"),))
    story.append(start(4, 12_000, delivery_count=2), tick(17_100), keep_alive(4, 17_200, lease_ms=HOUR_MS))
    story.bury(4, 2, 17_200 + HOUR_MS // 2, 2, LIMIT_REACHED)


# I4: one redelivery an expiry.


def redeliver_twice(story: Story) -> None:
    """I4: one expiry, two ENDs, two copies."""
    story.redeliver(1, 12, 12_100, tick(12_000))


def copy_twice(story: Story) -> None:
    """I4: one END, two copies."""
    story.messages.append(copy_of(story.message(1), 12, 6_201, 1))
    story.append(start(12, 12_200, delivery_count=2), end(12, 12_300))


def hand_out_one_copy_six_times(story: Story) -> None:
    """I4: one START, and six handlers had the message."""
    story.events += [event("delivered", 6_600 + number, 10, "id-1") for number in range(5)]


def ack_more_often_than_it_was_started(story: Story) -> None:
    """I4: one START, and a consumer acks three times."""
    story.append(end(0, 12_000), end(0, 12_100))


def ack_again_because_another_consumer_had_no_answer(story: Story) -> None:
    """I4: two acks of one START; a consumer did not get an answer, and it is another one."""
    story.append(end(0, 12_000))
    story.events.append(event("resent", 11_900, actor="other-78"))


def start_again(story: Story) -> None:
    """I4: a message is started a second time, by a consumer that had not slept."""
    story.start_again()


def start_again_long_after_it_slept(story: Story) -> None:
    """I4: the consumer had slept, and was awake for 3 s."""
    story.start_again(woke_ms=[37_000])


def start_again_before_it_slept(story: Story) -> None:
    """I4: the consumer fell asleep after it."""
    story.start_again(woke_ms=[42_000])


def start_again_after_a_look(story: Story) -> None:
    """I4: the consumer has looked what others have started, has slept, and starts it again."""
    story.append(tick(38_000, term=0))
    story.resign(-1, "kmq-consumer-host-78-abcd")
    story.start_again(woke_ms=[39_500])


# I5: one dead letter.


def write_two_dead_letters(story: Story) -> None:
    """I5: one END, two dead letters."""
    story.dead_letters.append(story.dead_letters[0]._replace(place=MessageId(0, 2)))


def redeliver_past_the_limit(story: Story) -> None:
    """I5: the second delivery of two was the last one."""
    story.rewrite(11, end(11, 11_700, outcome=REDELIVERED))
    del story.dead_letters[1]
    story.messages.append(copy_of(story.message(11), 12, 11_700, 2))
    story.append(start(12, 12_200, delivery_count=3), end(12, 12_300))
    story.is_reported = False


def dead_letter_without_a_cause(story: Story) -> None:
    """I5: the first delivery of two, not rejected."""
    story.add(4, 11_800)
    story.append(start(4, 12_000))
    story.bury(4, 2, 17_300, 1, LIMIT_REACHED, tick(17_200))


def dead_letter_after_an_ack(story: Story) -> None:
    """I5: a message is acked and a dead letter, and its END is another lease's."""
    story.append(tick(12_000))
    story.bury(0, 2, 12_100, 1, LIMIT_REACHED)


def bury_the_same_message_twice(story: Story) -> None:
    """I5: one message, started again once, and three dead letters."""
    story.start_again(offset=11, at_ms=12_000, ends=False, woke_ms=[11_500])
    story.bury(11, 2, 17_300, 2, LIMIT_REACHED, tick(17_200))
    story.append(tick(17_400))
    story.bury(11, 3, 17_500, 2, LIMIT_REACHED)


def say_another_limit(story: Story) -> None:
    """I5: the dead letter says that the limit is five."""
    reason = "delivery limit reached: 2 of 5"
    story.rewrite(11, end(11, 11_700, outcome=DEAD_LETTERED, reason=reason))
    story.dead_letters[1] = letter_of(story.message(11), 1, 11_700, 2, reason)


def say_another_reason(story: Story) -> None:
    """I5: rejected for one reason, and the dead letter has another."""
    story.rewrite(4, end(2, 2_600, outcome=DEAD_LETTERED, reason="worse"))
    story.dead_letters[0] = letter_of(story.message(2), 0, 2_600, 1, "worse")


def say_it_differently_in_the_letter(story: Story) -> None:
    """I5: the END has the reason, and the dead letter has none."""
    story.dead_letters[0] = letter_of(story.message(2), 0, 2_600, 1, "")


def say_gone_of_what_is_there(story: Story) -> None:
    """I5: the dead letter says that retention removed the payload, and the record is in the topic."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), tick(17_100), end(4, 17_200, outcome=DEAD_LETTERED, reason="payload gone: x"))
    story.dead_letters.append(empty_letter(4, 2, 17_200, 1, "payload gone: x"))


def say_too_large_of_what_is_small(story: Story) -> None:
    """I5: the dead letter says that the broker refused a copy, and the message has ten bytes."""
    story.add(4, 11_800)
    story.append(start(4, 12_000))
    story.bury(4, 2, 17_200, 1, "too large to redeliver: x", tick(17_100))


def say_expired_of_what_has_no_ttl(story: Story) -> None:
    """I5: the dead letter says that its time to live was over, and it has none."""
    story.add(4, 11_800)
    story.append(start(4, 12_000))
    story.bury(4, 2, 17_200, 1, "expired: ttl of 9 ms was over", tick(17_100))


def bury_what_was_never_a_message(story: Story) -> None:
    """I5: a dead letter of an offset past the end of the queue topic."""
    reason = "payload gone: x"
    story.append(start(77, 12_000), tick(20_000), is_handled=False)
    story.append(end(77, 20_100, outcome=DEAD_LETTERED, reason=reason))
    story.dead_letters.append(empty_letter(77, 2, 20_100, 1, reason))


def bury_what_no_handler_failed_on(story: Story) -> None:
    """I5: where each dead letter needs a failed handler, a limit used up by false deadlines is no cause."""
    story.bounds = Bounds(letters_need_a_cause=True)


def bury_what_is_no_message(story: Story) -> None:
    """I5: a dead letter that no message became."""
    story.dead_letters.append(first_copy(2)._replace(key=None, value=b"\xff", headers=()))


# I6: deliveries count 1, 2, 3.


def reset_a_count(story: Story) -> None:
    """I6: the copy begins to count anew."""
    story.change(10, with_header(story.message(10), "kmq-delivery-count", b"0"))


def skip_a_count(story: Story) -> None:
    """I6: a START skips a delivery."""
    story.rewrite(8, start(10, 6_500, delivery_count=3, count=2))


def count_a_deferral_as_silent(story: Story) -> None:
    """I6: it was put off, so that its delivery was not silent."""
    story.defer(is_silent=True)


def forget_a_silent_delivery(story: Story) -> None:
    """I6: a lease ran out, and the copy does not say so."""
    story.change(10, with_header(story.message(10), "kmq-silent-count", None))


def count_a_failure_as_silent(story: Story) -> None:
    """I6: the handler failed, and said so."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), keep_alive(4, 12_100, lease_ms=0, release=Release.FAILED))
    story.redeliver(4, 12, 12_400, tick(12_300), is_silent=True)


def give_back_as_uncounted_what_was_handed_out(story: Story) -> None:
    """I6: a handler had the message, and its consumer gives it back as if none had: it may be delivered without end."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), keep_alive(4, 12_100, lease_ms=0, never_handed_out=True))
    story.redeliver(4, 12, 12_400, tick(12_300), count=0, is_silent=False)


# I7: never early.


def redeliver_early_by_the_log(story: Story) -> None:
    """I7: no TICK was past the deadline."""
    story.rewrite(5, tick(5_900))


def redeliver_early_by_the_clock(story: Story) -> None:
    """I7: the copy's append time lies before the deadline."""
    story.change(10, story.message(10)._replace(at_ms=5_999))


def redeliver_within_the_backoff(story: Story) -> None:
    """I7: the lease was over, and the queue's backoff of four seconds was not."""
    story.rules = QueueRules(1, 2, Backoff(BackoffKind.CONSTANT, 4_000, 60_000))


def put_off_for_too_short(story: Story) -> None:
    """I7: a message asks for a delay of ten seconds, and its consumer puts it off for eight."""
    story.defer(delay_ms=10_000)


def hand_out_what_is_delayed(story: Story) -> None:
    """I7: a message asks for a delay, and its consumer hands it out at once."""
    story.add(4, 11_800, (("kmq-delay-ms", b"9000"),))
    story.append(start(4, 12_000), end(4, 12_100))


def hand_out_what_has_expired(story: Story) -> None:
    """I7: a message's time to live is over as it is started, and a handler gets it."""
    story.add(4, 11_800, (("kmq-ttl-ms", b"100"),))
    story.append(start(4, 12_000), end(4, 12_100))


# I8: bounded lateness.


def redeliver_an_hour_late(story: Story) -> None:
    """I8: due at 17_000, sent an hour later, while nothing was away."""
    story.add(4, 11_800)
    story.append(start(4, 12_000))
    story.redeliver(4, 12, 17_100 + HOUR_MS, tick(17_000 + HOUR_MS))


def redeliver_late_after_a_fault(story: Story) -> None:
    """I8: the broker was away for 20 s, and the redelivery came 16 s after its return."""
    story.bounds = Bounds(away=[Interval(17_100, 37_100)])
    story.add(4, 11_800)
    story.append(start(4, 12_000))
    story.redeliver(4, 12, 53_200, tick(53_100))


# I9: liveness.


def leave_a_partition_unread(story: Story) -> None:
    """I9: a message waited for 11 s beside consumers that worked, and then was taken."""
    story.bounds = Bounds(stall_ms=10_000)
    story.add(4, 12_000)
    story.append(start(4, 23_001), end(4, 23_100))


def end_a_worker_with_an_error(story: Story) -> None:
    """I9: a worker that was not killed ends with exit code 1."""
    story.processes = [Process(WORKER, ACTOR, 1, log="KmqError: no")]


def hang_a_worker(story: Story) -> None:
    """I9: a worker that was asked to end is still there."""
    story.processes = [Process(WORKER, ACTOR, None)]


def end_in_the_middle(story: Story) -> None:
    """I9: a worker ends with exit code 0 before its loop is done."""
    story.events = [each for each in story.events if each["event"] != "ended"]


def log_what_nothing_caught(story: Story) -> None:
    """I9: a worker ends with exit code 0, and its log has an exception in it that nothing caught."""
    log = "Exception in thread 7\nTraceback (most recent call last):\n  File x\nKeyError: 3\nended\n"
    story.processes = [Process(WORKER, ACTOR, 0, log=log)]


# I10: conservation.


def keep_a_finished_message_in_flight(story: Story) -> None:
    """I10: the tracker still has a message that the log has ended, as one that lost an END would."""
    story.tracker_reports = lambda one: one._replace(in_flight=1, counters=counted(one, acked=-1))


def lose_a_message_from_the_state(story: Story) -> None:
    """I10: the tracker has forgotten a message that the log has in flight."""
    leave_a_message_in_flight(story)
    story.tracker_reports = lambda one: one._replace(in_flight=0, counters=counted(one, started=-1))


def count_an_ack_as_a_redelivery(story: Story) -> None:
    """I10: even by itself, and not by the log."""
    story.tracker_reports = lambda one: one._replace(counters=counted(one, acked=-1, redelivered=1))


# I11: bytes kept.


def change_a_value(story: Story) -> None:
    """I11: another value."""
    story.change(10, story.message(10)._replace(value=b"id-1|other"))


def drop_a_header(story: Story) -> None:
    """I11: a header of the producer is gone from the dead letter."""
    story.dead_letters[0] = with_header(story.dead_letters[0], "trace", None)


def reorder_headers(story: Story) -> None:
    """I11: the producer's headers come in another order."""
    copy = story.message(10)
    story.change(10, copy._replace(headers=(copy.headers[1], copy.headers[0], *copy.headers[2:])))


def lose_the_time_to_live(story: Story) -> None:
    """I11: the copy has no `kmq-ttl-ms`: it never expires."""
    story.add(4, 11_800, (("kmq-ttl-ms", b"900000"),))
    story.append(start(4, 12_000))
    story.redeliver(4, 12, 17_300, tick(17_200))
    story.change(12, with_header(story.message(12), "kmq-ttl-ms", None))


def give_it_to_a_group(story: Story) -> None:
    """I11: the copy is for a group that no sender named: the queue's own consumers pass it over."""
    story.change(10, with_header(story.message(10), "kmq-subscription", b"billing"))


def send_the_copy_elsewhere(story: Story) -> None:
    """I11: the copy goes to another queue partition: the order of its key is lost."""
    copy = story.message(10)
    story.change(10, copy._replace(place=MessageId(1, 10)))


def empty_a_dead_letter_of_what_is_there(story: Story) -> None:
    """I11: at the last delivery, so that the END is right; the payload is not in the dead letter."""
    story.dead_letters[1] = story.dead_letters[1]._replace(value=None)


# I12: fencing.


def write_as_a_fenced_tracker(story: Story) -> None:
    """I12: by the older tracker, behind the TERM of the newer one."""
    story.take_over(10)
    story.resign(11, "old")


def write_before_taking_over(story: Story) -> None:
    """I12: an END of a tracker below its TERM."""
    story.take_over(10)
    story.resign(7, "new")


def write_as_a_stranger(story: Story) -> None:
    """I12: by a writer that is no tracker of this queue."""
    story.resign(11, "stranger")


def ack_as_a_consumer_that_did_not_start_it(story: Story) -> None:
    """I12: a consumer ends what another one holds."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), end(4, 12_100))
    story.resign(-1, "kmq-consumer-host-78-abcd")
    story.events += [event("handled", 12_050, 4, actor="other-78")]


def start_a_message_of_another_logical_queue(story: Story) -> None:
    """I2: a consumer of one logical queue starts what was sent to another."""
    story.says(queue="emails")
    story.change(0, with_header(story.message(0), "kmq-logical-queue", b"invoices"))


def send_without_the_delay(story: Story) -> None:
    """I11: a producer asked for a delay, and the record does not."""
    story.add(4, 11_800)
    story.events[-2]["asked"] = {"kmq-delay-ms": "900"}
    story.append(start(4, 12_000), end(4, 12_100))


# I1, I5, I10: queues with `expired=dead-letter`.


def drop_what_is_to_become_a_dead_letter(story: Story) -> None:
    """I1: the tracker ends an expired message without a dead letter, and its queue keeps what expires."""
    story.expire_in_a_lease()
    story.append(end(4, 19_200, outcome=Outcome.EXPIRED))
    story.resign(-1, "old")
    story.is_reported = False


def forget_what_a_consumer_ended_as_expired(story: Story) -> None:
    """I1: a consumer ends an expired message, and the tracker never writes the dead letter."""
    story.expire_at_its_start()


def redeliver_what_has_expired(story: Story) -> None:
    """I5: the tracker redelivers an expired message, which its queue must dead-letter."""
    story.expire_in_a_lease()
    copy = copy_of(story.message(4), 12, 19_200, 1)
    story.append(end(4, 19_200, outcome=REDELIVERED))
    story.messages.append(copy)
    story.append(start(12, 19_300, delivery_count=2), end(12, 19_400, outcome=Outcome.EXPIRED), is_handled=False)
    story.bury(12, 2, 19_600, 2, "expired", tick(19_500))


def name_another_ttl(story: Story) -> None:
    """I5: the dead letter of an expired message names a TTL that the message does not have."""
    story.expire_in_a_lease()
    story.bury(4, 2, 19_200, 1, "expired: ttl of 9 ms was over")


def keep_the_expired_where_the_queue_drops_it(story: Story) -> None:
    """I5: the dead letter of an expired message, and its queue drops what expires."""
    story.add(4, 11_800, (("kmq-ttl-ms", b"3000"),))
    story.append(start(4, 14_000))
    story.bury(4, 2, 19_200, 1, TTL_WAS_OVER, tick(19_100))


def lose_count_of_a_waiting_expired_message(story: Story) -> None:
    """I10: a message that a consumer ended as expired waits for its dead letter, and the tracker counts it nowhere."""
    story.expire_at_its_start()
    del story.markers[-1]
    story.tracker_reports = lambda one: one._replace(in_flight=one.in_flight - 1)


# I13: bounds.


def take_too_much_memory(story: Story) -> None:
    """I13: a worker of two gigabytes."""
    story.processes = [Process(WORKER, ACTOR, 0, python_mib=2_000)]


def fill_the_disk(story: Story) -> None:
    """I13: a checkpoint of a gigabyte."""
    story.checkpoint_mib = 1_024


# I16: results of transactions.


def ack_without_a_result(story: Story) -> None:
    """I16: the END of a transaction is there, and its result is not."""
    story.work_in_transactions()
    story.results.pop()


def keep_the_result_of_an_aborted_transaction(story: Story) -> None:
    """I16: a result is there, and no ack: its message comes again."""
    story.work_in_transactions()
    story.add_result(1, 3_000)


def redeliver_what_has_a_result(story: Story) -> None:
    """I16: the tracker decides behind the END of a transaction, so that the message has a second result."""
    story.work_in_transactions()
    story.add(4, 11_800)
    story.append(start(4, 12_000), tick(20_000), end(4, 20_100))
    story.add_result(4, 20_050)
    story.redeliver(4, 12, 20_200)
    story.add_result(12, 20_350)


# I17: suspects.


def hand_out_a_suspect_in_company(story: Story) -> None:
    """I17: a handler has a copy that was silent before, and another handler has another message."""
    story.says(isolate_after=1)


def seeds() -> list[Callable[[Story], None]]:
    """Return all seeds in the order of this file."""
    return [value for value in globals().values() if _NAMED.match(getattr(value, "__doc__", None) or "")]


def expected(seed: Callable[[Story], None]) -> str:
    """Return the invariant that must find a seed."""
    return (seed.__doc__ or "").partition(":")[0]


def found_by(seed: Callable[[Story], None]) -> list[str]:
    """Return the invariants that find a seed."""
    story = Story()
    seed(story)
    return sorted({violation.invariant for violation in story.verdict().violations})
