"""
Seeds of I1 to I6: messages lost, invented, redelivered or dead-lettered wrongly, and wrong delivery counts.

Rule 1: a seed breaks one promise, and its docstring begins with the invariant that must report it.
Rule 2: it breaks nothing else that would reveal it, as far as that can be: what it appends has events, copies, counts
and headers as they must be, but for the one thing.
"""

from __future__ import annotations

from dataclasses import replace

from faults.leases import Session
from faults.protocol import MessageId
from faults.waits import Bounds
from kmq_spark.core.markers import Outcome, Release
from kmq_spark.testing import end, keep_alive, start, tick
from tests.unit.fault_seed_parts import (
    HOUR_MS,
    LIMIT_REACHED,
    bury,
    defer,
    fetch_again,
    kill_the_worker,
    redeliver,
)
from tests.unit.fault_story import (
    DEAD_LETTERED,
    OLD,
    REDELIVERED,
    Story,
    copy_of,
    empty_letter,
    event,
    first_copy,
    letter_of,
    with_header,
)

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
    story.is_reported = False


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


def ack_again_because_another_consumer_had_no_answer(story: Story) -> None:
    """I4: two acks of one START; a consumer did not get an answer, and it is another one."""
    story.append(end(0, 12_000))
    story.events.append(event("resent", 11_900, actor="worker-78"))


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
    story.is_reported = False


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


def bury_what_is_no_message(story: Story) -> None:
    """I5: a dead letter that no message became."""
    story.set_aside = [first_copy(2)._replace(key=None, value=b"\xff", headers=())]


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
    """I6: it was put off, so that its delivery was not silent."""
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
    """I6: a handler had the message, and its consumer gives it back as if none had: it may be delivered without end."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), keep_alive(4, 12_100, lease_ms=0, never_handed_out=True))
    redeliver(story, 4, 12, 12_400, tick(12_300), count=0, is_silent=False)
