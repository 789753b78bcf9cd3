"""The offline checker of the fault campaign: quiet on a right story, and each violation seeded into it is found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from faults.checker import check
from faults.conservation import Told
from faults.leases import Session
from faults.topics import Dump, Record
from kmq_spark.core.fold import PartitionState, Rules, fold
from kmq_spark.core.markers import MessageId, Outcome, Release
from kmq_spark.testing import end, keep_alive, log, start, tick
from kmq_spark.wire.headers import DELIVERY_COUNT, ORIGIN, PREVIOUS, SILENT_COUNT

if TYPE_CHECKING:
    from collections.abc import Callable

    from faults.checker import Verdict
    from kmq_spark.core.events import LoggedMarker
    from kmq_spark.core.state import Status

OLD, NEW = Session("old", {0: 0}), Session("new", {0: 100})
REDELIVERED, DEAD_LETTERED = Outcome.REDELIVERED, Outcome.DEAD_LETTERED


def first_copy(offset: int) -> Record:
    """Return a message as its producer sent it."""
    return Record(MessageId(0, offset), 500, b"key", f"id-{offset}|body".encode(), (("trace", b"t"),))


def next_copy(
    offset: int, previous: int, count: int, at_ms: int, *, origin: int | None = None, silent: int | None = None
) -> Record:
    """Return a message as the tracker sends it, or a dead letter; all its deliveries ended without a word."""
    source = first_copy(previous if origin is None else origin)
    ours: dict[str, object] = {
        DELIVERY_COUNT: count,
        PREVIOUS: f"0:{previous}",
        ORIGIN: f"0:{previous if origin is None else origin}",
    }
    ours[SILENT_COUNT] = count if silent is None else silent
    headers = (*source.headers, *((name, str(value).encode()) for name, value in ours.items()))
    return Record(MessageId(0, offset), at_ms, source.key, source.value, headers)


class Story:
    """
    A queue whose every promise was kept.

    Message 0 is acked. Message 1 expires, and its copy 10 is acked. Message 2 is rejected. Message 3 uses up its two
    deliveries. Each test breaks one thing.
    """

    def __init__(self) -> None:
        """Write the story."""
        self.markers: list[LoggedMarker] = log(
            start(0, 1_000, count=4),  # 0: due at 6_000
            end(0, 2_000),
            end(2, 2_100, outcome=Outcome.REJECTED),
            tick(2_500),  # 3: the rejection is due
            end(2, 2_600, outcome=DEAD_LETTERED, reason="bad"),
            tick(6_100),  # 5: messages 1 and 3 are due
            end(1, 6_200, outcome=REDELIVERED),
            end(3, 6_200, outcome=REDELIVERED),
            start(10, 6_500, delivery_count=2, count=2),  # 8: due at 11_500
            end(10, 7_000),
            tick(11_600),  # 10: copy 11 is due, for the last time
            end(11, 11_700, outcome=DEAD_LETTERED, reason="delivery limit reached: 2 of 2"),
        )
        self.messages = [first_copy(offset) for offset in range(4)]
        self.messages += [next_copy(10, 1, 1, 6_200), next_copy(11, 3, 1, 6_200)]
        self.dead_letters = [next_copy(0, 2, 1, 2_600), next_copy(1, 11, 2, 11_700, origin=3)]
        self.events: list[dict[str, Any]] = [
            {"event": event, "id": f"id-{offset}"} for offset in range(4) for event in ("send", "sent", "delivered")
        ]
        self.sessions = [OLD]
        self.tracker_tells: Callable[[Status], Status] = lambda status: status

    def append(self, *markers: LoggedMarker) -> None:
        """Go on with the log."""
        self.markers += log(*markers, first=len(self.markers))

    def verdict(self) -> Verdict:
        """Check it."""
        dump = Dump({0: self.markers}, self.messages, self.dead_letters)
        status = fold(PartitionState.empty(), self.markers, Rules(max_deliveries=2)).status
        told = {0: Told(0, self.tracker_tells(status))}
        return check(dump, self.events, self.sessions, max_deliveries=2, told=told)


def test_right_story_has_no_violations() -> None:
    verdict = Story().verdict()
    assert verdict.violations == []
    assert verdict.lateness_ms == [200, 200]  # 6_200 - 6_000
    assert (verdict.counts["redelivered"], verdict.counts["dead_lettered"]) == (2, 2)
    # Six: messages 0 to 3 and the copies 10 and 11.
    assert (verdict.counts["leases"], verdict.counts["leases_told_by_tracker"]) == (6, 6)


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


def defer(story: Story, *, decided_ms: int = 20_001, count: int = 0, silent: int = 0) -> None:
    """Message 4 is put off until 20_000, and comes then."""
    story.messages += [first_copy(4), next_copy(12, 4, count, 20_100, silent=silent)]
    story.events.append({"event": "send", "id": "id-4"})
    story.append(start(4, 12_000, lease_ms=0, never_handed_out=True, due_at_ms=20_000), tick(decided_ms))
    story.append(end(4, 20_100, outcome=REDELIVERED), start(12, 20_200, delivery_count=count + 1), end(12, 20_300))


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


def _signed(marker: Any, writer: str) -> Any:  # noqa: ANN401  # a Marker in, a Marker out
    return replace(marker, consumer_id=writer)


SEEDED: list[Callable[[Story], None]] = [
    lose_a_message, leave_a_message_unstarted, leave_a_message_in_flight, drop_a_copy, deliver_a_phantom,
    store_a_phantom, redeliver_after_the_end, redeliver_on_a_tick_of_an_older_tracker, redeliver_twice, copy_twice,
    write_two_dead_letters, forget_a_dead_letter, redeliver_past_the_limit, dead_letter_without_a_cause,
    dead_letter_after_an_ack, reset_a_count, skip_a_count, redeliver_early_by_the_log, redeliver_early_by_the_clock,
    redeliver_before_a_renewed_deadline, redeliver_before_the_instant_of_a_deferral, count_a_deferral,
    count_a_deferral_as_silent, forget_a_silent_delivery, count_a_release_as_silent, lose_a_copy_that_a_lease_became,
    end_twice_by_trackers, keep_a_finished_message_in_flight, lose_a_message_from_the_state, count_a_redelivery_twice,
    count_an_ack_as_a_redelivery, count_unevenly, change_a_value, drop_a_header,
    lose_the_origin, write_as_a_fenced_tracker,
]  # fmt: skip


@pytest.mark.parametrize("seed", SEEDED, ids=lambda seed: seed.__name__)
def test_seeded_violation_is_found(seed: Callable[[Story], None]) -> None:
    """The invariant that the seed's docstring names, among what is found."""
    story = Story()
    seed(story)
    expected = (seed.__doc__ or "").partition(":")[0]
    assert expected in {violation.invariant for violation in story.verdict().violations}


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
