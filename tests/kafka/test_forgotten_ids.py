"""Who comes back after the broker has forgotten its transactional id (7 days by default)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.dlq import redrive
from kmq_spark.dlq.log import DeadLetterLog
from kmq_spark.dlq.redrive import Redriver, RedriveSummary
from kmq_spark.errors import FencedError
from kmq_spark.kafka.topics import check_queue, create_queue_topics
from kmq_spark.producer.resuming import ResumingProducer
from tests.brokers import quick_broker
from tests.kafka.conftest import Queue, seen
from tests.kafka.letters import Letters

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.kafka

FORGETS_AFTER_S = 5.0
"""More than a loaded machine needs between the steps of one that is not to be forgotten."""


def older_life(queue: Queue, count: int) -> Iterator[None]:
    """It got a new epoch, committed its messages a second time, and fenced the newer life."""

    def life() -> ResumingProducer:
        return ResumingProducer(queue.name, "copier", bootstrap_servers=queue.bootstrap_servers)

    older = life()
    older.send("a")
    older.commit(1)
    for _ in range(count):
        older.send("twice")
    newer = life()
    for _ in range(count):
        newer.send("b")
    newer.commit(2)
    yield
    with pytest.raises(FencedError, match=r"generation 2 by .* has taken over from generation 1"):
        older.commit(2)
    newer.send("c")
    newer.commit(3)
    assert seen(queue) == [b"a", *[b"b"] * count, b"c"]
    older.close()
    newer.close()


def older_redrive(queue: Queue, pause_s: float) -> Iterator[None]:
    """
    The newer one has redriven the letters that it knows as open.

    With a pause behind each record its client knows before the next one that its id is forgotten, and refuses that one.
    """
    letters = Letters(queue)
    letters.bury(b"x", b"y")
    reach: Any = {"bootstrap_servers": queue.bootstrap_servers, "timeout": 10}
    layout = check_queue(queue.name, **reach)
    log = DeadLetterLog(layout, **reach)
    older = Redriver(layout, to=layout.topics, to_partition_count=1, topic_id=log.topic_id(), **reach)
    still_open = list(log.letters(log.state(older.ends).bounds))
    assert letters.redrive(all=True).done == 2
    yield
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redrive, "failpoint", lambda _: time.sleep(pause_s))
        with pytest.raises(FencedError):
            older.run(still_open, RedriveSummary())
    older.close()
    assert seen(queue) == [b"x", b"y"]


def test_older_life_or_redrive_sends_nothing_though_the_broker_has_forgotten_its_id() -> None:
    """Each on a queue of its own, as far as its pause; one pause for all of them."""
    settings = {
        "transactional.id.expiration.ms": f"{FORGETS_AFTER_S * 1000:.0f}",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
    }
    with quick_broker(extra=settings) as broker:

        def queue(name: str) -> Queue:
            create_queue_topics(name, bootstrap_servers=broker.bootstrap_servers, partitions=1)
            return Queue(name, broker.bootstrap_servers)

        stories = [
            older_life(queue("one"), 1),
            older_life(queue("many"), 5_000),
            older_redrive(queue("letters"), 0.0),
            older_redrive(queue("letters.slowly"), 0.5),
        ]
        for story in stories:
            next(story)
        time.sleep(FORGETS_AFTER_S + 2)
        for story in stories:
            next(story, None)
