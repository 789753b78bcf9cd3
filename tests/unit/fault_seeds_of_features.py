"""
Seeds of features: logical queues, delays, expiry, transactions, suspects, and repeated deliveries after a clean stop.

Rule 1: a seed breaks one promise, and its docstring begins with the invariant that must report it.
Rule 2: it breaks nothing else that would reveal it, as far as that can be: what it appends has events, copies, counts
and headers as they must be, but for the one thing.
"""

from __future__ import annotations

from dataclasses import replace

from faults.allowances import Process, Run
from kmq_spark.core.markers import Outcome
from kmq_spark.testing import end, start, tick
from tests.unit.fault_seed_parts import (
    TTL_WAS_OVER,
    bury,
    counted,
    expire_at_its_start,
    expire_in_a_lease,
    fetch_again,
    redeliver,
)
from tests.unit.fault_story import REDELIVERED, Story, copy_of, event, with_header


def start_a_message_of_another_logical_queue(story: Story) -> None:
    """I2: a consumer of one logical queue starts what was sent to another."""
    story.says(queue="emails")
    story.change(0, with_header(story.message(0), "kmq-logical-queue", b"invoices"))


def fetch_again_after_a_clean_stop(story: Story) -> None:
    """I4: its consumer ended when it was asked to, and had all the time to commit."""
    stopped = Process("WorkerChild", "worker", 0, ended_at_ms=39_000)
    story.run = Run([stopped, Process("TrackerChild", "tracker-1", 0)], 1)
    fetch_again(story, at_ms=40_000, by=78)


def fetch_again_more_than_one_refused_commit(story: Story) -> None:
    """I4: another worker has come, one commit of the first one is refused, and five of 5 s each are missing."""
    for number in range(5):
        story.add(20 + number, 11_800)
        at_ms = 12_000 + 5_000 * number
        story.append(start(20 + number, at_ms), end(20 + number, at_ms + 100))
    story.events.append(event("began", 39_000, actor="other-78"))
    for number in range(5):
        fetch_again(story, 20 + number, at_ms=40_000 + 200 * number, by=78)


def send_without_the_delay(story: Story) -> None:
    """I11: a producer asked for a delay, and the record does not."""
    story.add(4, 11_800)
    story.events[-2]["asked"] = {"kmq-delay-ms": "900"}
    story.append(start(4, 12_000), end(4, 12_100))


# I1, I5, I10: queues with `expired=dead-letter`.


def drop_what_is_to_become_a_dead_letter(story: Story) -> None:
    """I1: the tracker ends an expired message without a dead letter, and its queue keeps what expires."""
    expire_in_a_lease(story)
    story.append(end(4, 19_200, outcome=Outcome.EXPIRED))
    story.resign(-1, "old")
    story.is_reported = False


def forget_what_a_consumer_ended_as_expired(story: Story) -> None:
    """I1: a consumer ends an expired message, and the tracker never writes the dead letter."""
    expire_at_its_start(story)


def drop_what_a_consumer_ended_as_expired(story: Story) -> None:
    """I1: a consumer ends an expired message, and the tracker drops it."""
    expire_at_its_start(story)
    story.append(end(4, 15_100, outcome=Outcome.EXPIRED))
    story.resign(-1, "old")
    story.is_reported = False


def redeliver_what_has_expired(story: Story) -> None:
    """I5: the tracker redelivers an expired message, which its queue must dead-letter."""
    expire_in_a_lease(story)
    copy = copy_of(story.message(4), 12, 19_200, 1)
    story.append(end(4, 19_200, outcome=REDELIVERED))
    story.messages.append(copy)
    story.append(start(12, 19_300, delivery_count=2), end(12, 19_400, outcome=Outcome.EXPIRED), is_handled=False)
    bury(story, 12, 2, 19_600, 2, "expired", tick(19_500))


def redeliver_what_a_consumer_ended_as_expired(story: Story) -> None:
    """I5: a consumer ends an expired message, and the tracker redelivers it."""
    expire_at_its_start(story)
    copy = copy_of(story.message(4), 12, 15_100, 1, is_silent=False)
    story.append(end(4, 15_100, outcome=REDELIVERED))
    story.messages.append(copy)
    story.append(start(12, 15_200, delivery_count=2), end(12, 15_300, outcome=Outcome.EXPIRED), is_handled=False)
    bury(story, 12, 2, 15_500, 2, "expired", tick(15_400))


def name_another_ttl(story: Story) -> None:
    """I5: the dead letter of an expired message names a TTL that the message does not have."""
    expire_in_a_lease(story)
    bury(story, 4, 2, 19_200, 1, "expired: ttl of 9 ms was over")


def name_another_cause_of_what_a_consumer_ended_as_expired(story: Story) -> None:
    """I5: the dead letter of what a consumer ended as expired says that a handler rejected it."""
    expire_at_its_start(story)
    bury(story, 4, 2, 15_100, 1, "rejected")


def keep_the_expired_where_the_queue_drops_it(story: Story) -> None:
    """I5: the dead letter of an expired message, and its queue drops what expires."""
    story.add(4, 11_800, (("kmq-ttl-ms", b"3000"),))
    story.append(start(4, 14_000))
    bury(story, 4, 2, 19_200, 1, TTL_WAS_OVER, tick(19_100))


def count_a_dead_letter_as_expired(story: Story) -> None:
    """I10: the tracker counts as dropped what it has dead-lettered because its TTL was over."""
    expire_at_its_start(story)
    bury(story, 4, 2, 15_100, 1, "expired")
    story.tracker_reports = lambda status: replace(
        status, counters=counted(status, expired=1, dead_lettered=status.counters["dead_lettered"] - 1)
    )


def lose_count_of_a_waiting_expired_message(story: Story) -> None:
    """I10: a message that a consumer ended as expired waits for its dead letter, and the tracker counts it nowhere."""
    expire_at_its_start(story)
    del story.markers[-1]
    story.tracker_reports = lambda status: replace(status, in_flight=status.in_flight - 1)


# I13: bounds.


def take_too_much_memory(story: Story) -> None:
    """I13: a worker of two gigabytes."""
    story.run = Run([Process("WorkerChild", "worker", 0, python_mib=2_000)], 1)


def fill_the_disk(story: Story) -> None:
    """I13: a checkpoint of a gigabyte."""
    story.run = Run(story.run.processes, 1, checkpoint_mib=1_024)


# I16: results of transactions.


def ack_without_a_result(story: Story) -> None:
    """I16: the END of a transaction is there, and its result is not."""
    story.work_in_transactions()
    story.results.pop()


def keep_the_result_of_an_aborted_transaction(story: Story) -> None:
    """I16: a result is there, and no ack: its message comes again."""
    story.work_in_transactions()
    story.add_result(1, 3_000)


def write_a_result_twice(story: Story) -> None:
    """I16: one ack, two results."""
    story.work_in_transactions()
    story.add_result(0, 1_960)


def redeliver_what_has_a_result(story: Story) -> None:
    """I16: the tracker decides behind the END of a transaction, so that the message has a second result."""
    story.work_in_transactions()
    story.add(4, 11_800)
    story.append(start(4, 12_000), tick(20_000), end(4, 20_100))
    story.add_result(4, 20_050)
    redeliver(story, 4, 12, 20_200)
    story.add_result(12, 20_350)


# I17: suspects.


def hand_out_a_suspect_in_company(story: Story) -> None:
    """I17: a handler has a copy that was silent before, and another handler has another message."""
    story.says(isolate_after=1)
