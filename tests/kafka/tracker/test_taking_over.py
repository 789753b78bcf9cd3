"""A tracker that starts again after a failure does not take its queue back from a newer tracker."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kmq_spark.errors import FencedError, TopicError
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.producer.producer import QueueProducer
from kmq_spark.tracker.sender import redelivery
from tests.kafka.conftest import delete_topics
from tests.kafka.tracker.senders import StampingSender, new_sender
from tests.kafka.tracker.test_redelivery_sender import due, outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kmq_spark.kafka.topics import QueueLayout

pytestmark = pytest.mark.kafka


@pytest.fixture
def layout(bootstrap_servers: str) -> QueueLayout:
    """A queue with two messages in its first partition."""
    layout = create_queue_topics(f"taking-over-{time.time_ns()}", bootstrap_servers=bootstrap_servers, partitions=2)
    with QueueProducer(layout.topics.queue_topic, bootstrap_servers=bootstrap_servers) as producer:
        for value in "ab":
            producer.send(value, partition=0)
    return layout


@pytest.fixture
def make_sender(bootstrap_servers: str, layout: QueueLayout) -> Iterator[Callable[[], StampingSender]]:
    """Make senders of the queue, not yet open."""
    made: list[StampingSender] = []

    def make() -> StampingSender:
        made.append(new_sender(layout, bootstrap_servers))
        return made[-1]

    yield make
    for sender in made:
        sender.close()


def test_tracker_that_starts_again_leaves_the_queue_to_the_newer_one(
    make_sender: Callable[[], StampingSender],
) -> None:
    """After SIGSTOP and SIGCONT its query fails for another reason than fencing: it must not fence the newer one."""
    older, newer = make_sender(), make_sender()
    older.open()
    newer.open()
    again = make_sender()
    with pytest.raises(FencedError, match=f"was fenced: newer tracker {newer.tracker_id} has taken over"):
        again.open({older.tracker_id})
    assert newer.deliver([outcome(due(0))]).redelivered == 1  # still has the queue
    assert (older.deliver([outcome(due(1))]).redelivered, older.is_fenced) == (0, True)


def test_fenced_tracker_that_reads_no_newer_term_begins_a_new_one(
    make_sender: Callable[[], StampingSender], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker had given its transaction up, as it does after a suspension. What it had decided is decided anew."""
    monkeypatch.setattr(redelivery, "FENCED_WAIT_S", 0.2)
    sender, other = make_sender(), make_sender()
    sender.open()
    other._replace_producer()  # fences it, as the broker does
    before = sender.term
    assert (sender.deliver([outcome(due(0))]).redelivered, sender.is_fenced) == (0, True)
    time.sleep(0.3)
    assert (sender.deliver([outcome(due(0))]).redelivered, sender.is_fenced) == (0, False)
    assert sender.term != before
    assert sender.deliver([outcome(due(0))]).redelivered == 1


def test_fenced_tracker_that_is_slow_to_read_the_newer_term_ends(
    make_sender: Callable[[], StampingSender], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch after a suspension may take longer than the wait: the newer one has committed offsets."""
    monkeypatch.setattr(redelivery, "FENCED_WAIT_S", 0.2)
    sender, newer = make_sender(), make_sender()
    sender.open()
    newer.open()
    assert sender.deliver([outcome(due(0))]).redelivered == 0
    time.sleep(0.3)
    for _ in range(2):
        with pytest.raises(FencedError, match=f"newer tracker {newer.tracker_id} has taken over"):
            sender.deliver([outcome(due(0))])
    sender.close()
    assert newer.deliver([outcome(due(0))]).redelivered == 1


def test_tracker_that_stood_still_while_it_began_a_new_term_ends_and_the_newer_one_goes_on(
    make_sender: Callable[[], StampingSender], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new producer has fenced the newer one, which must not find its offsets: it would take it for a newer one."""
    monkeypatch.setattr(redelivery, "FENCED_WAIT_S", 0.2)
    sender, newer = make_sender(), make_sender()
    sender.open()
    replace_producer = sender._replace_producer

    def stand_still() -> None:
        newer.open()
        replace_producer()

    monkeypatch.setattr(sender, "_replace_producer", stand_still)
    with pytest.raises(FencedError, match=f"newer tracker {newer.tracker_id} has taken over"):
        sender._begin_again("a transaction timed out")
    sender.close()
    assert newer.deliver([outcome(due(0))]).redelivered == 0
    time.sleep(0.3)
    assert [newer.deliver([outcome(due(0))]).redelivered for _ in range(2)] == [0, 1]


def test_decisions_of_another_term_are_not_sent(make_sender: Callable[[], StampingSender]) -> None:
    """A batch that Spark runs again has decided under an old term."""
    sender = make_sender()
    sender.open()
    old = outcome(due(0))
    old = replace(old, status=replace(old.status, term=sender.term + 1, term_by="old"))
    assert sender.deliver([old]).redelivered == 0
    assert sender.unread == {0, 1}
    assert sender.deliver([outcome(due(0))]).redelivered == 1
    assert sender.unread == {1}


def test_tracker_of_a_queue_topic_that_was_created_again_is_refused_and_one_that_runs_ends(
    make_sender: Callable[[], StampingSender], bootstrap_servers: str, layout: QueueLayout
) -> None:
    """The new messages have the offsets of those in flight: they would be sent again though nobody has taken them."""
    sender = make_sender()
    sender.open()
    queue = layout.topics.queue_topic
    delete_topics(bootstrap_servers, queue)
    create_queue_topics(queue, bootstrap_servers=bootstrap_servers, partitions=2)
    told = f"topic '{queue}' was deleted and created again, '{queue}.markers' was not: .*; delete '{queue}.markers' too"
    with pytest.raises(TopicError, match=told):
        sender.check_queue_topic()
    with pytest.raises(TopicError, match=told):
        make_sender().open()
