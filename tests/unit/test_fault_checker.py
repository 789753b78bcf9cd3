"""The offline checker of the fault campaign: quiet on a right story, and each violation seeded into it is found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from faults.leases import Session
from faults.waits import Bounds, Stretch
from kmq_spark.core.markers import Outcome, Release
from kmq_spark.testing import end, keep_alive, start, tick
from kmq_spark.wire.headers import DLQ_MESSAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.core.state import Status

from tests.unit.fault_story import (
    DEAD_LETTERED,
    OLD,
    REDELIVERED,
    Story,
    defer,
    first_copy,
    handled,
    next_copy,
    write_gone_for_what_is_there,
)


def lose_a_message(story: Story) -> None:
    """I1: a producer was told that it is durable, and it is not there."""
    story.messages = [record for record in story.messages if record.id != "id-0"]


def leave_a_message_unstarted(story: Story) -> None:
    """I1: nobody ever took it."""
    story.messages.append(first_copy(4))
    story.events.append({"event": "send", "id": "id-4"})


def leave_a_message_in_flight(story: Story) -> None:
    """I1: taken, and never ended."""
    story.messages.append(first_copy(4))
    story.events.append({"event": "send", "id": "id-4"})
    story.append(start(4, 12_000))


def drop_a_copy(story: Story) -> None:
    """I1: an END says redelivered, and no copy is there."""
    story.messages = [record for record in story.messages if record.place.message_offset != 10]


def deliver_a_phantom(story: Story) -> None:
    """I2: a consumer got what nobody sent."""
    story.events.append({"event": "delivered", "id": "id-77"})


def store_a_phantom(story: Story) -> None:
    """I2: the topic holds what nobody sent."""
    story.events = [event for event in story.events if event["id"] != "id-0"]


def redeliver_after_the_end(story: Story) -> None:
    """I3: acked at marker 1, redelivered all the same."""
    story.append(tick(12_000), end(0, 12_100, outcome=REDELIVERED))
    story.messages.append(next_copy(12, 0, 1, 12_100))
    story.append(start(12, 12_200, delivery_count=2), end(12, 12_300))


def redeliver_on_a_tick_of_an_older_tracker(story: Story) -> None:
    """I3: due at a TICK below where the newer tracker decides from, acked before any TICK of its own."""
    story.sessions = [OLD, Session("new", {0: 14})]
    story.messages += [first_copy(4), next_copy(12, 4, 1, 30_100)]
    story.events.append({"event": "send", "id": "id-4"})
    story.append(start(4, 12_000), tick(20_000), end(4, 20_100), tick(30_000), end(4, 30_100, outcome=REDELIVERED))
    story.append(start(12, 30_200, delivery_count=2), end(12, 30_300))


def redeliver_after_an_end_that_a_later_decision_passed(story: Story) -> None:
    """I3: due at TICK 13, acked at 14; the session then sent what TICK 15 decided, and after that the acked one."""
    story.messages += [first_copy(4), first_copy(5)]
    story.events += [{"event": "send", "id": "id-4"}, {"event": "send", "id": "id-5"}]
    story.append(start(4, 12_000, lease_ms=5_000), start(5, 12_000, lease_ms=9_000), tick(17_001), end(4, 17_100))
    story.append(tick(21_001), end(5, 21_100, outcome=REDELIVERED))
    story.messages.append(next_copy(12, 5, 1, 21_100))
    story.commit()
    story.append(end(4, 21_300, outcome=REDELIVERED))
    story.messages.append(next_copy(13, 4, 1, 21_300))


def redeliver_twice(story: Story) -> None:
    """I4: one expiry, two ENDs, two copies."""
    story.append(tick(12_000), end(1, 12_100, outcome=REDELIVERED))
    story.messages.append(next_copy(12, 1, 1, 12_100))
    story.append(start(12, 12_200, delivery_count=2), end(12, 12_300))


def copy_twice(story: Story) -> None:
    """I4: one END, two copies."""
    story.messages.append(next_copy(12, 1, 1, 6_201))
    story.append(start(12, 12_200, delivery_count=2), end(12, 12_300))


def write_two_dead_letters(story: Story) -> None:
    """I5: one END, two dead letters."""
    story.dead_letters.append(next_copy(2, 2, 1, 2_700))


def forget_a_dead_letter(story: Story) -> None:
    """I5: an END says dead-lettered, and no dead letter is there."""
    del story.dead_letters[0]


def redeliver_past_the_limit(story: Story) -> None:
    """I5: the second delivery of two was the last one."""
    story.markers[11] = end(11, 11_700, outcome=REDELIVERED, marker_offset=11)
    del story.dead_letters[1]
    story.messages.append(next_copy(12, 11, 2, 11_700, origin=3))
    story.append(start(12, 12_200, delivery_count=3), end(12, 12_300))


def dead_letter_without_a_cause(story: Story) -> None:
    """I5: the first delivery of two, not rejected."""
    story.markers[6] = end(1, 6_200, outcome=DEAD_LETTERED, marker_offset=6)
    story.messages = [record for record in story.messages if record.place.message_offset != 10]
    story.dead_letters.append(next_copy(2, 1, 1, 6_200))


def dead_letter_after_an_ack(story: Story) -> None:
    """I5: a message is acked, and a dead letter, and its ack did not come late."""
    story.append(tick(12_000), end(0, 12_100, outcome=DEAD_LETTERED, reason="delivery limit reached: 2 of 2"))
    story.dead_letters.append(next_copy(2, 0, 1, 12_100))


def reset_a_count(story: Story) -> None:
    """I6: the copy begins to count anew."""
    story.messages[4] = next_copy(10, 1, 0, 6_200)


def skip_a_count(story: Story) -> None:
    """I6: a START skips a delivery."""
    story.markers[8] = start(10, 6_500, delivery_count=3, count=2, marker_offset=8)


def redeliver_early_by_the_log(story: Story) -> None:
    """I7: no TICK was past the deadline."""
    story.markers[5] = tick(5_900, marker_offset=5)


def redeliver_early_by_the_clock(story: Story) -> None:
    """I7: the copy's append time lies before the deadline."""
    story.messages[4] = next_copy(10, 1, 1, 5_999)


def redeliver_before_a_renewed_deadline(story: Story) -> None:
    """I7: a KEEPALIVE had moved the deadline."""
    story.markers[3] = keep_alive(1, 2_500, marker_offset=3)  # 2_500 + 5_000 = 7_500
    story.markers[4] = end(2, 2_600, outcome=DEAD_LETTERED, marker_offset=4)


def redeliver_before_the_instant_of_a_deferral(story: Story) -> None:
    """I7: no TICK was past it."""
    defer(story, decided_ms=19_999)


def count_a_deferral(story: Story) -> None:
    """I6: nobody has had the message."""
    defer(story, count=1)


def count_a_deferral_as_silent(story: Story) -> None:
    """I6: it was put off, and that is a word."""
    defer(story, silent=1)


def forget_a_silent_delivery(story: Story) -> None:
    """I6: a lease ran out, and the copy does not say so."""
    story.messages[4] = next_copy(10, 1, 1, 6_200, silent=0)


def count_a_release_as_silent(story: Story) -> None:
    """I6: the handler failed, and said so."""
    story.markers[3] = keep_alive(1, 2_500, lease_ms=0, release=Release.FAILED, marker_offset=3)
    story.markers[4] = end(2, 2_600, outcome=DEAD_LETTERED, marker_offset=4)


def lose_a_copy_that_a_lease_became(story: Story) -> None:
    """I10: one of six leases ended as a copy that is not there."""
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


def counted(status: Status, **more: int) -> dict[str, int]:
    """Return the counters of a status, some of them changed."""
    return {name: count + more.get(name, 0) for name, count in status.counters.items()}


def change_a_value(story: Story) -> None:
    """I11: another value."""
    story.messages[4] = story.messages[4]._replace(value=b"id-1|other")


def drop_a_header(story: Story) -> None:
    """I11: a header of the producer is gone from the dead letter."""
    letter = story.dead_letters[0]
    story.dead_letters[0] = letter._replace(headers=letter.headers[1:])


def lose_the_origin(story: Story) -> None:
    """I11: the copy names another first copy."""
    story.dead_letters[1] = next_copy(1, 11, 2, 11_700, origin=0)._replace(value=b"id-3|body")


def write_as_a_fenced_tracker(story: Story) -> None:
    """I12: signed by the older tracker, behind where the newer one began."""
    story.sessions = [OLD, Session("new", {0: 11})]
    logged = story.markers[11]
    assert logged.marker is not None
    story.markers[11] = logged._replace(marker=_signed(logged.marker, "old"))


def write_as_a_stranger(story: Story) -> None:
    """I12: signed by a writer that is no tracker of this queue."""
    logged = story.markers[11]
    assert logged.marker is not None
    story.markers[11] = logged._replace(marker=_signed(logged.marker, "stranger"))


def ack_what_no_handler_saw(story: Story) -> None:
    """I1: acked by a consumer that gave it to no handler: it is lost."""
    story.messages.append(first_copy(4))
    story.events.append({"event": "send", "id": "id-4"})
    story.append(start(4, 12_000), end(4, 12_100), is_handled=False)


def ack_before_the_handler_returned(story: Story) -> None:
    """I1: given to a handler, and acked although that handler raised."""
    story.events = [event for event in story.events if event != handled(0)]
    story.events.append({"event": "raised", "id": "id-0", "copy": [0, 0]})


def drop_as_expired_what_never_expires(story: Story) -> None:
    """I1: an END says that its time to live is over, and it has none."""
    story.markers[1] = end(0, 2_000, outcome=Outcome.EXPIRED, marker_offset=1)


def empty_a_dead_letter_of_what_is_there(story: Story) -> None:
    """I11: as above, at the last delivery, so that the END is right; the payload is not in the dead letter."""
    letter = story.dead_letters[1]
    headers = (*letter.headers, (DLQ_MESSAGE, b"payload gone"))
    story.dead_letters[1] = letter._replace(value=None, headers=headers)


def bury_what_was_never_a_message(story: Story) -> None:
    """I5: a dead letter of an offset past the end of the queue topic."""
    story.append(start(77, 12_000), tick(20_000), end(77, 20_100, outcome=DEAD_LETTERED, reason="payload gone"))
    gone = next_copy(2, 77, 1, 20_100)
    story.dead_letters.append(gone._replace(value=None, headers=(*gone.headers, (DLQ_MESSAGE, b"payload gone"))))


def redeliver_an_hour_late(story: Story) -> None:
    """I8: due at 6_000, sent an hour later, while nothing was away."""
    story.messages[4] = next_copy(10, 1, 1, 6_200 + 3_600_000)


def redeliver_late_after_a_fault(story: Story) -> None:
    """I8: the broker was away for 20 s, and the redelivery came 16 s after its return."""
    story.bounds = Bounds(away=[Stretch(6_100, 26_100)])
    story.messages[4] = next_copy(10, 1, 1, 42_200)


def leave_a_partition_unread(story: Story) -> None:
    """I9: a message waited for 11 s beside consumers that worked, and then was taken."""
    story.bounds = Bounds(stall_ms=10_000)
    story.messages.append(first_copy(4)._replace(appended_at_ms=12_000))
    story.events.append({"event": "send", "id": "id-4"})
    story.append(start(4, 23_001), end(4, 23_100))


def bury_what_no_handler_failed_on(story: Story) -> None:
    """I5: where each dead letter needs a failed handler, a delivery limit used up by false deadlines is no cause."""
    story.bounds = Bounds(letters_need_a_cause=True)


def _signed(marker: Any, writer: str) -> Any:  # noqa: ANN401  # a Marker in, a Marker out
    return replace(marker, consumer_id=writer)


SEEDED: list[Callable[[Story], None]] = [
    lose_a_message, leave_a_message_unstarted, leave_a_message_in_flight, drop_a_copy, deliver_a_phantom,
    store_a_phantom, redeliver_after_the_end, redeliver_after_an_end_that_a_later_decision_passed,
    redeliver_on_a_tick_of_an_older_tracker, redeliver_twice, copy_twice,
    write_two_dead_letters, forget_a_dead_letter, redeliver_past_the_limit, dead_letter_without_a_cause,
    dead_letter_after_an_ack, reset_a_count, skip_a_count, redeliver_early_by_the_log, redeliver_early_by_the_clock,
    redeliver_before_a_renewed_deadline, redeliver_before_the_instant_of_a_deferral, count_a_deferral,
    count_a_deferral_as_silent, forget_a_silent_delivery, count_a_release_as_silent, lose_a_copy_that_a_lease_became,
    end_twice_by_trackers, keep_a_finished_message_in_flight, lose_a_message_from_the_state, count_a_redelivery_twice,
    count_an_ack_as_a_redelivery, count_unevenly, change_a_value, drop_a_header,
    lose_the_origin, write_as_a_fenced_tracker, write_as_a_stranger, ack_what_no_handler_saw,
    ack_before_the_handler_returned, drop_as_expired_what_never_expires, write_gone_for_what_is_there,
    empty_a_dead_letter_of_what_is_there, bury_what_was_never_a_message, redeliver_an_hour_late,
    redeliver_late_after_a_fault, leave_a_partition_unread, bury_what_no_handler_failed_on,
]  # fmt: skip


@pytest.mark.parametrize("seed", SEEDED, ids=lambda seed: seed.__name__)
def test_seeded_violation_is_found(seed: Callable[[Story], None]) -> None:
    """The invariant that the seed's docstring names, among what is found."""
    story = Story()
    seed(story)
    expected = (seed.__doc__ or "").partition(":")[0]
    assert expected in {violation.invariant for violation in story.verdict().violations}
