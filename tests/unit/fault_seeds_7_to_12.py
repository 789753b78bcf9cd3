"""
Seeds of I7 to I12: too early, too late, stuck, miscounted, changed bytes, and writers that are fenced.

Rule 1: a seed breaks one promise, and its docstring begins with the invariant that must report it.
Rule 2: it breaks nothing else that would reveal it, as far as that can be: what it appends has events, copies, counts
and headers as they must be, but for the one thing.
"""

from __future__ import annotations

from dataclasses import replace

from faults.allowances import Process, Run
from faults.leases import Session
from faults.protocol import BackoffKind as Growth
from faults.protocol import MessageId, QueueRules
from faults.waits import Bounds, Interval
from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.fold import Rules
from kmq_spark.core.markers import Outcome, Release
from kmq_spark.testing import end, keep_alive, start, tick
from tests.unit.fault_seed_parts import (
    HOUR_MS,
    bury,
    counted,
    defer,
    redeliver,
)
from tests.unit.fault_seeds_1_to_6 import drop_a_copy, leave_a_message_in_flight
from tests.unit.fault_story import (
    OLD,
    REDELIVERED,
    Story,
    event,
    with_header,
)

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
    story.bounds = Bounds(away=[Interval(17_100, 37_100)])
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
    """I9: a worker that was not killed ends with exit code 1."""
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
    story.tracker_reports = lambda status: replace(status, in_flight=1, counters=counted(status, acked=-1))


def lose_a_message_from_the_state(story: Story) -> None:
    """I10: the tracker has forgotten a message that the log has in flight."""
    leave_a_message_in_flight(story)
    story.tracker_reports = lambda status: replace(status, in_flight=0, counters=counted(status, started=-1))


def count_a_redelivery_twice(story: Story) -> None:
    """I10: the tracker counts a lease twice, with its redelivery."""
    story.tracker_reports = lambda status: replace(status, counters=counted(status, started=1, redelivered=1))


def count_an_ack_as_a_redelivery(story: Story) -> None:
    """I10: even by itself, and not by the log."""
    story.tracker_reports = lambda status: replace(status, counters=counted(status, acked=-1, redelivered=1))


def count_unevenly(story: Story) -> None:
    """I10: the tracker's own counts do not come out even."""
    story.tracker_reports = lambda status: replace(status, counters=counted(status, started=1))


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
    """I11: the copy has no `kmq-logical-queue`: the consumers of its logical queue pass it over."""
    story.change(10, with_header(story.message(10), "kmq-logical-queue", None))


def lose_the_time_to_live(story: Story) -> None:
    """I11: the copy has no `kmq-ttl-ms`: it never expires."""
    story.add(4, 11_800, (("kmq-ttl-ms", b"900000"),))
    story.append(start(4, 12_000))
    redeliver(story, 4, 12, 17_300, tick(17_200))
    story.change(12, with_header(story.message(12), "kmq-ttl-ms", None))


def give_it_to_a_group(story: Story) -> None:
    """I11: the copy is for a group that no sender named: the queue's own consumers pass it over."""
    story.change(10, with_header(story.message(10), "kmq-subscription", b"billing"))


def lose_the_origin(story: Story) -> None:
    """I11: the dead letter names another first copy."""
    story.dead_letters[1] = with_header(story.dead_letters[1], "kmq-origin", b"0:0")


def forget_an_attempt(story: Story) -> None:
    """I11: the dead letter lists one attempt of two."""
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
    """I12: by the older tracker, behind where the newer one began."""
    story.sessions = [OLD, Session("new", {0: 10})]
    story.resign(11, "old")


def write_before_taking_over(story: Story) -> None:
    """I12: an END of a tracker below where it decides from."""
    story.sessions = [OLD, Session("new", {0: 10})]
    story.resign(7, "new")


def write_as_a_stranger(story: Story) -> None:
    """I12: by a writer that is no tracker of this queue."""
    story.resign(11, "stranger")


def write_where_no_tracker_took_over(story: Story) -> None:
    """I12: no tracker ever took over, and ENDs of one are there."""
    story.append(tick(12_000))
    for at in (4, 6, 7, 11):
        story.resign(at, "ghost")
    story.sessions = []


def ack_as_a_consumer_that_did_not_start_it(story: Story) -> None:
    """I12: a consumer ends what another one holds."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), end(4, 12_100))
    story.resign(-1, "kmq-consumer-host-78-abcd")
    story.events += [event("handled", 12_050, 4, actor="worker-78")]


def renew_as_a_consumer_that_did_not_start_it(story: Story) -> None:
    """I12: a consumer renews what another one holds: its message is never redelivered."""
    story.add(4, 11_800)
    story.append(start(4, 12_000), keep_alive(4, 12_050), end(4, 12_100))
    story.resign(-2, "kmq-consumer-host-78-abcd")
