"""
Seeds of features: logical queues, delays, transactions, suspects, and repeated deliveries after a clean stop.

Rule 1: a seed breaks one promise, and its docstring begins with the invariant that must report it.
Rule 2: it breaks nothing else that would reveal it, as far as that can be: what it appends has events, copies, counts
and headers as they must be, but for the one thing.
"""

from __future__ import annotations

from faults.allowances import Process, Run
from kmq_spark.testing import end, start, tick
from tests.unit.fault_seed_parts import fetch_again, kill_the_worker, redeliver
from tests.unit.fault_story import Story, event, with_header


def start_a_message_of_another_logical_queue(story: Story) -> None:
    """I2: a consumer of one logical queue starts what was sent to another."""
    story.says(queue="emails")
    story.change(0, with_header(story.message(0), "kmq-queue", b"invoices"))


def fetch_again_after_a_clean_stop(story: Story) -> None:
    """I4: its consumer ended when it was asked to, and had all the time to commit."""
    stopped = Process("WorkerChild", "worker", 0, ended_at_ms=39_000)
    story.run = Run([stopped, Process("TrackerChild", "tracker-1", 0)], 1)
    fetch_again(story, at_ms=40_000, by=78)


def fetch_again_what_was_started_with_its_position(story: Story) -> None:
    """I4: START and position were in one transaction, so that even a killed consumer leaves nothing to be repeated."""
    story.says(starts_in_transaction=True)
    kill_the_worker(story, at_ms=30_000)
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
