"""Who comes back after the broker has forgotten its transactional id (7 days by default)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.dlq.log import DeadLetterLog
from kmq_spark.dlq.redrive import Redriver, RedriveSummary
from kmq_spark.errors import FencedError, KmqError
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


@pytest.fixture(scope="module")
def queue() -> Iterator[Queue]:
    """A queue on a broker that soon forgets."""
    settings = {
        "transactional.id.expiration.ms": f"{FORGETS_AFTER_S * 1000:.0f}",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
    }
    with quick_broker(extra=settings) as broker:
        create_queue_topics("orders", bootstrap_servers=broker.bootstrap_servers, partitions=1)
        yield Queue("orders", broker.bootstrap_servers)


@pytest.mark.parametrize("count", [1, 5_000])
def test_older_life_is_fenced_though_the_broker_has_forgotten_its_id(queue: Queue, count: int) -> None:
    """It got a new epoch, committed its messages a second time, and fenced the newer life."""
    before = len(seen(queue))

    def life() -> ResumingProducer:
        return ResumingProducer(queue.name, f"copier-{count}", bootstrap_servers=queue.bootstrap_servers)

    older = life()
    older.send("a")
    older.commit(1)
    for _ in range(count):
        older.send("twice")
    newer = life()
    for _ in range(count):
        newer.send("b")
    newer.commit(2)
    time.sleep(FORGETS_AFTER_S + 2)
    with pytest.raises(FencedError, match=r"generation 2 by .* has taken over from generation 1"):
        older.commit(2)
    newer.send("c")
    newer.commit(3)
    assert seen(queue)[before:] == [b"a", *[b"b"] * count, b"c"]
    older.close()
    newer.close()


def test_older_redrive_sends_nothing_though_the_broker_has_forgotten_its_id(queue: Queue) -> None:
    letters = Letters(queue)
    letters.bury(b"x", b"y")
    before = len(seen(queue))
    reach: Any = {"bootstrap_servers": queue.bootstrap_servers, "timeout": 10}
    layout = check_queue(queue.name, **reach)
    log = DeadLetterLog(layout, **reach)
    older = Redriver(layout, to=layout.topics, to_partition_count=1, topic_id=log.topic_id(), **reach)
    still_open = list(log.letters(log.state(older.ends).bounds))
    assert letters.redrive(all=True).done == 2
    time.sleep(FORGETS_AFTER_S + 2)
    with pytest.raises(KmqError):
        older.run(still_open, RedriveSummary())
    older.close()
    assert seen(queue)[before:] == [b"x", b"y"]
