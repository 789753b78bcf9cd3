"""
Violations, each seeded into a right story; `python -m tests.unit.fault_seeds` prints which invariant finds each.

Rule 1: a seed breaks one promise, and its docstring begins with the invariant that must say so.
Rule 2: it breaks nothing else that would give it away, as far as that can be: what it appends has events, copies,
counts and headers as they must be, but for the one thing.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from faults.allowances import Process, Run
from faults.evidence import RawRecord
from faults.leases import Session
from faults.protocol import BackoffKind as Growth
from faults.protocol import MessageId, QueueRules
from faults.waits import Bounds, Stretch
from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.fold import Rules
from kmq_spark.core.markers import Outcome, Release
from kmq_spark.testing import end, keep_alive, start, tick
from tests.unit.fault_story import (
    DEAD_LETTERED,
    OLD,
    QUEUE,
    REDELIVERED,
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

    from faults.topics import Record
    from kmq_spark.core.events import LoggedMarker
    from kmq_spark.core.state import Status

HOUR_MS = 3_600_000
_NAMED = re.compile(r"(I\d+|harness): ")
LIMIT_REACHED = "delivery limit reached: 2 of 2"


# I1: nothing is lost.


def lose_a_message(story: Story) -> None:
    """I1: a producer was told that it is durable, and it is not there."""
    story.add(4, 11_800)
    story.remove(4)


def store_a_message_elsewhere(story: Story) -> None:
    """I1: a producer was told a place, and the message lies at another one."""
    story.add(4, 11_800)
    story.events[-1]["place"] = [0, 5]
    story.append(start(4, 12_000), end(4, 12_100))


def leave_a_send_without_an_answer(story: Story) -> None:
    """I1: a producer was closed in order, and never told what came of a message."""
    story.events.append(event("send", 11_000, id="id-77", actor="sender-1"))


def leave_a_message_unstarted(story: Story) -> None:
    """I1: no consumer ever took it."""
    story.add(4, 11_800)


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


def ack_what_another_process_handled(story: Story) -> None:
    """I1: the handler that returned was another consumer's."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), end(4, 12_100), is_handled=False)
    story.events += [event(kind, 12_050, 4, actor="worker-78") for kind in ("delivered", "handled")]


def reject_what_no_handler_rejected(story: Story) -> None:
    """I1: a consumer rejects by itself what its handler returned from."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), end(4, 12_100, outcome=Outcome.REJECTED), is_handled=False)
    story.events += story.worked(4, 12_000, 12_050)
    bury(story, 4, 2, 12_300, 1, "rejected", tick(12_200))


def fail_what_no_handler_failed_on(story: Story) -> None:
    """I1: a consumer says that a handler raised, and it did not."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), is_handled=True)
    story.append(keep_alive(4, 12_100, lease_ms=0, release=Release.FAILED, reason="E: x"), is_handled=False)
    redeliver(story, 4, 12, 12_400, tick(12_300), is_silent=False, error="E: x")


def hand_out_before_the_start_is_durable(story: Story) -> None:
    """I1: a handler had the message before its START was in the log: a crash would lose the delivery."""
    story.add(4, 11_800)
    story.append(start(4, 13_000), end(4, 13_100), is_handled=False)
    story.events += story.worked(4, 12_000, 12_050)


def drop_as_expired_what_never_expires(story: Story) -> None:
    """I1: a consumer says that its time to live is over, and it has none."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), end(4, 12_100, outcome=Outcome.EXPIRED), is_handled=False)


def drop_as_expired_too_soon(story: Story) -> None:
    """I1: a consumer drops it at 12_000, and its time to live ends at 12_800."""
    story.add(4, 11_800, (("kmq-ttl-ms", b"1000"),))
    story.append(start(4, 12_000), end(4, 12_100, outcome=Outcome.EXPIRED), is_handled=False)


def expire_by_the_tracker_what_never_expires(story: Story) -> None:
    """I1: the tracker ends a due message as expired, and it has no time to live: no copy is sent."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), tick(17_100), end(4, 17_200, outcome=Outcome.EXPIRED))
    story.resign(-1, "old")


def deny_a_message_that_is_there(story: Story) -> None:
    """I1: a TICK says that the queue topic ends before a message that is in flight."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), tick(12_100), tick(12_200, queue_ends=[4], ends_as_of=13))
    story.is_told = False


# I2: nothing appears.


def deliver_a_phantom(story: Story) -> None:
    """I2: a handler got what no producer sent."""
    story.events.append(event("delivered", 2_000, 0, "id-77"))


def give_another_message(story: Story) -> None:
    """I2: a handler got the bytes of one message under the name of another."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), end(4, 12_100), names={4: "id-0"})


def store_a_phantom(story: Story) -> None:
    """I2: the topic holds what no producer sent."""
    story.messages.append(first_copy(4, 11_800))
    story.append(start(4, 12_000), end(4, 12_100))


def store_a_message_twice(story: Story) -> None:
    """I2: one send, two records."""
    story.messages.append(first_copy(4, 11_800)._replace(value=b"id-0|body"))
    story.append(start(4, 12_000), end(4, 12_100), names={4: "id-0"})


def send_nothing(story: Story) -> None:
    """harness: an empty queue keeps every promise."""
    story.markers, story.messages, story.dead_letters = [tick(1_000, marker_offset=0)], [], []
    story.events = [event("injected", 0, actor="injector")]
    story.is_told = False


def deliver_nothing(story: Story) -> None:
    """harness: workers began, and no handler was given anything."""
    story.events = [each for each in story.events if each["event"] != "delivered"]


def inject_nothing(story: Story) -> None:
    """harness: a fault campaign without a fault."""
    story.run = replace(story.run, injections=0)


# I3: no redelivery after its END.


def redeliver_after_the_end(story: Story) -> None:
    """I3: acked at marker 1, redelivered all the same."""
    redeliver(story, 0, 12, 12_100, tick(12_000))


def redeliver_on_a_tick_of_an_older_tracker(story: Story) -> None:
    """I3: due at a TICK below where the newer tracker decides from, acked before any TICK of its own."""
    story.sessions = [OLD, Session("new", {0: 14})]
    story.add(4, 11_800)
    story.append(start(4, 12_000), tick(20_000), end(4, 20_100))
    redeliver(story, 4, 12, 30_100, tick(30_000))


def redeliver_after_an_end_that_a_later_decision_passed(story: Story) -> None:
    """I3: due at TICK 14, acked at 15; the session then sent what TICK 16 decided, and after that the acked one."""
    story.add(4, 11_800)
    story.add(5, 11_800)
    story.append(start(4, 12_000, lease_ms=5_000), start(5, 12_000, lease_ms=9_000), tick(17_001), end(4, 17_100))
    redeliver(story, 5, 12, 21_100, tick(21_001))
    story.commit()
    redeliver(story, 4, 13, 21_300)


def redeliver_an_hour_after_the_ack(story: Story) -> None:
    """I3: due at a TICK, acked behind it, 199 TICKs, and redelivered an hour later."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), tick(17_100), end(4, 17_200))
    story.append(*(tick(17_200 + number * HOUR_MS // 199) for number in range(1, 200)))
    redeliver(story, 4, 12, 17_300 + HOUR_MS)


def bury_an_hour_after_the_renewal(story: Story) -> None:
    """I3: due at a TICK for the last time, renewed for an hour, and dead-lettered in the middle of it."""
    story.add(4, 11_800, (("kmq-delivery-count", b"1"),))
    story.append(start(4, 12_000, delivery_count=2), tick(17_100), keep_alive(4, 17_200, lease_ms=HOUR_MS))
    bury(story, 4, 2, 17_200 + HOUR_MS // 2, 2, LIMIT_REACHED)


# I4: one redelivery an expiry.


def redeliver_twice(story: Story) -> None:
    """I4: one expiry, two ENDs, two copies."""
    redeliver(story, 1, 12, 12_100, tick(12_000))


def copy_twice(story: Story) -> None:
    """I4: one END, two copies."""
    story.messages.append(copy_of(story.message(1), 12, 6_201, 1))
    story.append(start(12, 12_200, delivery_count=2), end(12, 12_300))


def redeliver_what_was_never_started(story: Story) -> None:
    """I4: an END of a message that had no lease, and its copy."""
    story.add(4, 11_800)
    redeliver(story, 4, 12, 12_100, tick(12_000))
    story.append(start(4, 12_400), end(4, 12_500))


def hand_out_one_copy_six_times(story: Story) -> None:
    """I4: one START, and six handlers had the message."""
    story.events += [event("delivered", 6_600 + number, 10, "id-1") for number in range(5)]


def hand_out_what_was_never_started(story: Story) -> None:
    """I4: a consumer hands out a message without a START of its own."""
    story.events.append(event("delivered", 6_600, 10, "id-1", actor="worker-78"))


def ack_more_often_than_it_was_started(story: Story) -> None:
    """I4: one START, and a consumer acks three times."""
    story.append(end(0, 12_000), end(0, 12_100))


def fetch_again_for_no_cause(story: Story) -> None:
    """I4: a message is started a second time, and nothing has happened to the consumer that had started it."""
    fetch_again(story, at_ms=40_000)


def fetch_again_before_its_consumer_died(story: Story) -> None:
    """I4: a message is started by another consumer, two seconds before the first one is killed."""
    fetch_again(story, at_ms=40_000, by=78)
    kill_the_worker(story, at_ms=42_000)


def fetch_again_without_end(story: Story) -> None:
    """I4: one consumer was killed, and what it had started in a minute is started again."""
    for number in range(60):
        story.add(20 + number, 11_800)
        story.append(start(20 + number, 12_000 + 1_000 * number), end(20 + number, 12_100 + 1_000 * number))
    kill_the_worker(story, at_ms=75_000)
    for number in range(60):
        fetch_again(story, 20 + number, at_ms=80_000 + number, by=78)


# I5: one dead letter.


def write_two_dead_letters(story: Story) -> None:
    """I5: one END, two dead letters."""
    story.dead_letters.append(story.dead_letters[0]._replace(place=MessageId(0, 2)))


def forget_a_dead_letter(story: Story) -> None:
    """I5: an END says dead-lettered, and no dead letter is there."""
    del story.dead_letters[0]


def redeliver_past_the_limit(story: Story) -> None:
    """I5: the second delivery of two was the last one."""
    story.rewrite(11, end(11, 11_700, outcome=REDELIVERED))
    del story.dead_letters[1]
    story.messages.append(copy_of(story.message(11), 12, 11_700, 2))
    story.append(start(12, 12_200, delivery_count=3), end(12, 12_300))
    story.is_told = False


def dead_letter_without_a_cause(story: Story) -> None:
    """I5: the first delivery of two, not rejected."""
    story.add(4, 11_800)
    story.append(start(4, 12_000))
    bury(story, 4, 2, 17_300, 1, LIMIT_REACHED, tick(17_200))


def dead_letter_after_an_ack(story: Story) -> None:
    """I5: a message is acked and a dead letter, and its END is another lease's."""
    story.append(tick(12_000))
    bury(story, 0, 2, 12_100, 1, LIMIT_REACHED)


def bury_the_same_message_twice(story: Story) -> None:
    """I5: one message, fetched again once, and three dead letters."""
    fetch_again(story, offset=11, at_ms=12_000, ends=False)
    bury(story, 11, 2, 17_300, 2, LIMIT_REACHED, tick(17_200))
    story.append(tick(17_400))
    bury(story, 11, 3, 17_500, 2, LIMIT_REACHED)


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
    bury(story, 4, 2, 17_200, 1, "too large to redeliver: x", tick(17_100))


def say_expired_of_what_has_no_ttl(story: Story) -> None:
    """I5: the dead letter says that its time to live was over, and it has none."""
    story.add(4, 11_800)
    story.append(start(4, 12_000))
    bury(story, 4, 2, 17_200, 1, "expired: ttl of 9 ms was over", tick(17_100))


def bury_what_was_never_a_message(story: Story) -> None:
    """I5: a dead letter of an offset past the end of the queue topic."""
    reason = "payload gone: x"
    story.append(start(77, 12_000), tick(20_000), is_handled=False)
    story.append(end(77, 20_100, outcome=DEAD_LETTERED, reason=reason))
    story.dead_letters.append(empty_letter(77, 2, 20_100, 1, reason))


def bury_what_no_handler_failed_on(story: Story) -> None:
    """I5: where each dead letter needs a failed handler, a limit used up by false deadlines is no cause."""
    story.bounds = Bounds(letters_need_a_cause=True)


def drop_a_record_that_is_no_marker(story: Story) -> None:
    """I5: bytes that are no marker are in the markers topic, and not set aside."""
    story.no_markers.append(RawRecord(f"{QUEUE}.markers", 0, 12, 2, 11_800, None, b"\xff"))


def set_aside_twice(story: Story) -> None:
    """I5: bytes that are no marker are set aside twice."""
    drop_a_record_that_is_no_marker(story)
    where = {"topic": f"{QUEUE}.markers", "partition": 0, "offset": 12}
    headers = tuple((f"__dlq.errors.{name}", str(value).encode()) for name, value in where.items())
    letter = first_copy(2)._replace(key=None, value=b"\xff", headers=headers)
    story.set_aside = [letter, letter._replace(place=MessageId(0, 3))]


def set_other_bytes_aside(story: Story) -> None:
    """I5: what is set aside is not what lies in the markers topic."""
    set_aside_twice(story)
    story.set_aside = [story.set_aside[0]._replace(value=b"\xfe")]


# I6: deliveries count 1, 2, 3.


def reset_a_count(story: Story) -> None:
    """I6: the copy begins to count anew."""
    story.change(10, with_header(story.message(10), "kmq-delivery-count", b"0"))


def skip_a_count(story: Story) -> None:
    """I6: a START skips a delivery."""
    story.rewrite(8, start(10, 6_500, delivery_count=3, count=2))


def count_another_in_the_letter(story: Story) -> None:
    """I6: the dead letter counts one delivery less."""
    story.dead_letters[1] = with_header(story.dead_letters[1], "__dlq.errors.delivery.count", b"1")


def count_a_deferral(story: Story) -> None:
    """I6: no handler has had the message."""
    defer(story, count=1)


def count_a_deferral_as_silent(story: Story) -> None:
    """I6: it was put off, and that is a word."""
    defer(story, is_silent=True)


def forget_a_silent_delivery(story: Story) -> None:
    """I6: a lease ran out, and the copy does not say so."""
    story.change(10, with_header(story.message(10), "kmq-silent-count", None))


def count_a_failure_as_silent(story: Story) -> None:
    """I6: the handler failed, and said so."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), keep_alive(4, 12_100, lease_ms=0, release=Release.FAILED))
    redeliver(story, 4, 12, 12_400, tick(12_300), is_silent=True)


def give_back_as_uncounted_what_was_handed_out(story: Story) -> None:
    """I6: a handler had the message, and its consumer gives it back as if none had: it may be delivered for ever."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), keep_alive(4, 12_100, lease_ms=0, never_handed_out=True))
    redeliver(story, 4, 12, 12_400, tick(12_300), count=0, is_silent=False)


# I7: never early.


def redeliver_early_by_the_log(story: Story) -> None:
    """I7: no TICK was past the deadline."""
    story.rewrite(5, tick(5_900))


def redeliver_early_by_the_clock(story: Story) -> None:
    """I7: the copy's append time lies before the deadline."""
    story.change(10, story.message(10)._replace(appended_at_ms=5_999))


def redeliver_before_a_renewed_deadline(story: Story) -> None:
    """I7: a KEEPALIVE had moved the deadline."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), keep_alive(4, 16_000))  # due at 21_000
    redeliver(story, 4, 12, 17_300, tick(17_200))


def redeliver_within_the_backoff(story: Story) -> None:
    """I7: the lease was over, and the queue's backoff of four seconds was not."""
    story.rules = QueueRules(2, Growth.CONSTANT, 4_000, 60_000)
    story.tracker_rules = Rules(max_deliveries=2, backoff=Backoff(BackoffKind.CONSTANT, 4_000, 60_000))


def redeliver_before_the_instant_of_a_deferral(story: Story) -> None:
    """I7: no TICK was past it."""
    defer(story, decided_ms=19_999)


def put_off_for_too_short(story: Story) -> None:
    """I7: a message asks for a delay of ten seconds, and its consumer puts it off for eight."""
    defer(story, delay_ms=10_000)


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
    redeliver(story, 4, 12, 17_100 + HOUR_MS, tick(17_000 + HOUR_MS))


def bury_an_hour_late(story: Story) -> None:
    """I8: rejected, and its dead letter comes an hour later."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), end(4, 12_100, outcome=Outcome.REJECTED, reason="bad"))
    bury(story, 4, 2, 12_100 + HOUR_MS, 1, "bad", tick(12_050 + HOUR_MS))


def redeliver_late_after_a_fault(story: Story) -> None:
    """I8: the broker was away for 20 s, and the redelivery came 16 s after its return."""
    story.bounds = Bounds(away=[Stretch(17_100, 37_100)])
    story.add(4, 11_800)
    story.append(start(4, 12_000))
    redeliver(story, 4, 12, 53_200, tick(53_100))


# I9: liveness.


def leave_a_partition_unread(story: Story) -> None:
    """I9: a message waited for 11 s beside consumers that worked, and then was taken."""
    story.bounds = Bounds(stall_ms=10_000)
    story.add(4, 12_000)
    story.append(start(4, 23_001), end(4, 23_100))


def end_a_worker_with_an_error(story: Story) -> None:
    """I9: a worker that nobody killed ends with exit code 1."""
    story.run = Run([Process("WorkerChild", "worker", 1, log="KmqError: no")], 1)


def end_a_tracker_with_an_error(story: Story) -> None:
    """I9: the only tracker ends with exit code 2."""
    story.run = Run([Process("TrackerChild", "tracker-1", 2, log="something has taken over")], 1)


def hang_a_worker(story: Story) -> None:
    """I9: a worker that was asked to end is still there."""
    story.run = Run([Process("WorkerChild", "worker", None)], 1)


def kill_a_worker_that_hangs(story: Story) -> None:
    """I9: a worker did not end when it was asked to, and the harness killed it."""
    story.run = Run([Process("WorkerChild", "worker", 137, is_ended_by_us=True, is_hung=True)], 1)


def end_in_the_middle(story: Story) -> None:
    """I9: a worker ends with exit code 0 before its loop is done."""
    story.events = [each for each in story.events if each["event"] != "ended"]


def log_what_nothing_caught(story: Story) -> None:
    """I9: a worker ends with exit code 0, and its log has an exception in it that nothing caught."""
    log = "Exception in thread 7\nTraceback (most recent call last):\n  File x\nKeyError: 3\nended\n"
    story.run = Run([Process("WorkerChild", "worker", 0, log=log)], 1)


# I10: conservation.


def lose_a_copy_that_a_lease_became(story: Story) -> None:
    """I10: one of seven leases ended as a copy that is not there."""
    drop_a_copy(story)


def end_twice_by_trackers(story: Story) -> None:
    """I10: an END of a tracker that ended nothing: another one had ended that lease."""
    story.append(end(1, 12_100, outcome=REDELIVERED))


def keep_a_finished_message_in_flight(story: Story) -> None:
    """I10: the tracker still has a message that the log has ended, as one that lost an END would."""
    story.tracker_tells = lambda status: replace(status, in_flight=1, counters=counted(status, acked=-1))


def lose_a_message_from_the_state(story: Story) -> None:
    """I10: the tracker has forgotten a message that the log has in flight."""
    leave_a_message_in_flight(story)
    story.tracker_tells = lambda status: replace(status, in_flight=0, counters=counted(status, started=-1))


def count_a_redelivery_twice(story: Story) -> None:
    """I10: the tracker counts a lease twice, with its redelivery."""
    story.tracker_tells = lambda status: replace(status, counters=counted(status, started=1, redelivered=1))


def count_an_ack_as_a_redelivery(story: Story) -> None:
    """I10: even by itself, and not by the log."""
    story.tracker_tells = lambda status: replace(status, counters=counted(status, acked=-1, redelivered=1))


def count_unevenly(story: Story) -> None:
    """I10: the tracker's own counts do not come out even."""
    story.tracker_tells = lambda status: replace(status, counters=counted(status, started=1))


# I11: bytes kept.


def change_a_value(story: Story) -> None:
    """I11: another value."""
    story.change(10, story.message(10)._replace(value=b"id-1|other"))


def change_a_key(story: Story) -> None:
    """I11: a copy without its key."""
    story.change(10, story.message(10)._replace(key=None))


def drop_a_header(story: Story) -> None:
    """I11: a header of the producer is gone from the dead letter."""
    story.dead_letters[0] = with_header(story.dead_letters[0], "trace", None)


def reorder_headers(story: Story) -> None:
    """I11: the producer's headers come in another order."""
    copy = story.message(10)
    story.change(10, copy._replace(headers=(copy.headers[1], copy.headers[0], *copy.headers[2:])))


def lose_the_logical_queue(story: Story) -> None:
    """I11: the copy has no `kmq-queue`: the consumers of its logical queue pass it over."""
    story.change(10, with_header(story.message(10), "kmq-queue", None))


def lose_the_time_to_live(story: Story) -> None:
    """I11: the copy has no `kmq-ttl-ms`: it never expires."""
    story.add(4, 11_800, (("kmq-ttl-ms", b"900000"),))
    story.append(start(4, 12_000))
    redeliver(story, 4, 12, 17_300, tick(17_200))
    story.change(12, with_header(story.message(12), "kmq-ttl-ms", None))


def give_it_to_a_group(story: Story) -> None:
    """I11: the copy is for a group that nobody asked for: the queue's own consumers pass it over."""
    story.change(10, with_header(story.message(10), "kmq-group", b"billing"))


def lose_the_origin(story: Story) -> None:
    """I11: the dead letter names another first copy."""
    story.dead_letters[1] = with_header(story.dead_letters[1], "kmq-origin", b"0:0")


def forget_an_attempt(story: Story) -> None:
    """I11: the dead letter tells one attempt of two."""
    story.dead_letters[1] = with_header(story.dead_letters[1], "kmq-attempts-ms", b"6200")


def send_the_copy_elsewhere(story: Story) -> None:
    """I11: the copy goes to another queue partition: the order of its key is lost."""
    copy = story.message(10)
    story.change(10, copy._replace(place=MessageId(1, 10)))


def forget_the_exception(story: Story) -> None:
    """I11: the handler said why it failed, and the copy does not."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), keep_alive(4, 12_100, lease_ms=0, release=Release.FAILED, reason="E: x"))
    redeliver(story, 4, 12, 12_400, tick(12_300), is_silent=False)


def empty_a_dead_letter_of_what_is_there(story: Story) -> None:
    """I11: at the last delivery, so that the END is right; the payload is not in the dead letter."""
    story.dead_letters[1] = story.dead_letters[1]._replace(value=None)


# I12: fencing.


def write_as_a_fenced_tracker(story: Story) -> None:
    """I12: signed by the older tracker, behind where the newer one began."""
    story.sessions = [OLD, Session("new", {0: 10})]
    story.resign(11, "old")


def write_before_taking_over(story: Story) -> None:
    """I12: an END of a tracker below where it decides from."""
    story.sessions = [OLD, Session("new", {0: 10})]
    story.resign(7, "new")


def write_as_a_stranger(story: Story) -> None:
    """I12: signed by a writer that is no tracker of this queue."""
    story.resign(11, "stranger")


def write_where_no_tracker_took_over(story: Story) -> None:
    """I12: no tracker ever took over, and ENDs of one are there."""
    story.append(tick(12_000))
    for at in (4, 6, 7, 11):
        story.resign(at, "ghost")
    story.sessions = []


def write_without_a_signature(story: Story) -> None:
    """I12: an END of the tracker that anybody could have written."""
    story.unsigned.add(11)


def ack_as_a_consumer_that_did_not_start_it(story: Story) -> None:
    """I12: a consumer ends what another one holds."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), end(4, 12_100))
    story.resign(-1, "kmq-consumer-host-78-abcd")
    story.events += [event("handled", 12_050, 4, actor="worker-78")]


def renew_as_a_consumer_that_did_not_start_it(story: Story) -> None:
    """I12: a consumer renews what another one holds: its message comes late for ever."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), keep_alive(4, 12_050), end(4, 12_100))
    story.resign(-2, "kmq-consumer-host-78-abcd")


# What seeds are made of.


def counted(status: Status, **more: int) -> dict[str, int]:
    """Return the counters of a status, some of them changed."""
    return {name: count + more.get(name, 0) for name, count in status.counters.items()}


def redeliver(
    story: Story,
    offset: int,
    to: int,
    at_ms: int,
    *before: LoggedMarker,
    count: int = 1,
    is_silent: bool = True,
    error: str = "",
) -> Record:
    """Let the tracker redeliver a message; its copy is started and acked."""
    story.append(*before, end(offset, at_ms, outcome=REDELIVERED))
    copy = copy_of(story.message(offset), to, at_ms, count, is_silent=is_silent, error=error)
    story.messages.append(copy)
    story.append(start(to, at_ms + 100, delivery_count=count + 1), end(to, at_ms + 200))
    return copy


def bury(  # noqa: PLR0917  # as a sentence
    story: Story, offset: int, to: int, at_ms: int, count: int, reason: str, *before: LoggedMarker
) -> None:
    """Let the tracker dead-letter a message."""
    story.append(*before, end(offset, at_ms, outcome=DEAD_LETTERED, reason=reason))
    story.dead_letters.append(letter_of(story.message(offset), to, at_ms, count, reason))


def defer(
    story: Story, *, decided_ms: int = 20_001, count: int = 0, is_silent: bool = False, delay_ms: int = 8_200
) -> None:
    """Message 4 is put off until 20_000, and comes then."""
    story.add(4, 11_800, (("kmq-delay-ms", b"%d" % delay_ms),))
    story.append(start(4, 12_000, lease_ms=0, never_handed_out=True, due_at_ms=20_000))
    redeliver(story, 4, 12, 20_100, tick(decided_ms), count=count, is_silent=is_silent)


def fetch_again(story: Story, offset: int = 0, at_ms: int = 40_000, *, ends: bool = True, by: int = 77) -> None:
    """Let a consumer start a message again, and acknowledge it."""
    first = len(story.markers)
    story.append(start(offset, at_ms, delivery_count=1 + (offset == 11)), is_handled=False)
    if ends:
        story.append(end(offset, at_ms + 100), is_handled=False)
    for at in range(first, len(story.markers)):
        story.resign(at, f"kmq-consumer-host-{by}-abcd")
    kinds = ("delivered", "handled") if ends else ("delivered",)
    name = story.message(offset).id
    story.events += [event(kind, at_ms + 50, offset, name, actor=f"worker-{by}") for kind in kinds]


def kill_the_worker(story: Story, at_ms: int) -> None:
    """Let the consumer of the story end by `kill -9`."""
    killed = Process("WorkerChild", "worker", 137, is_ended_by_us=True, ended_at_ms=at_ms)
    story.run = Run([killed, Process("TrackerChild", "tracker-1", 0)], 1)
    story.events = [each for each in story.events if each["event"] != "ended"]


def seeds() -> list[Callable[[Story], None]]:
    """Return all seeds in the order of this file."""
    return [value for value in globals().values() if callable(value) and _NAMED.match(value.__doc__ or "")]


def expected(seed: Callable[[Story], None]) -> str:
    """Return the invariant that must find a seed."""
    return (seed.__doc__ or "").partition(":")[0]


def found_by(seed: Callable[[Story], None]) -> list[str]:
    """Return the invariants that find a seed."""
    story = Story()
    seed(story)
    return sorted({violation.invariant for violation in story.verdict().violations})


def main() -> int:
    """Print the table; return the exit code."""
    missed = 0
    sys.stdout.write("| seed | must be found by | found by |\n|---|---|---|\n")
    for seed in seeds():
        found = found_by(seed)
        is_found = expected(seed) in found
        missed += not is_found
        sys.stdout.write(f"| {seed.__name__} | {expected(seed)} | {', '.join(found) or 'nothing'} |\n")
    clean = Story().verdict().violations
    sys.stdout.write(f"\n{len(seeds())} seeds, {missed} missed; the right story has {len(clean)} violations\n")
    return 1 if missed or clean else 0


if __name__ == "__main__":
    sys.exit(main())
