"""Two groups of a queue, each with a tracker of its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.kafka.topics import create_queue_topics
from tests.kafka.stage import receive_all

if TYPE_CHECKING:
    from tests.kafka.stage import Stage

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def test_redelivery_for_one_group_is_no_work_for_another(stage: Stage) -> None:
    """Two groups, two trackers in one application; each message is dropped once by one of the groups."""
    create_queue_topics(f"{stage.queue}@billing", bootstrap_servers=stage.bootstrap_servers)
    with stage.tracking(), stage.tracking("billing") as tracker:
        stage.send("a", "b")
        servers = stage.bootstrap_servers
        with stage.consumer() as own, QueueConsumer(
            stage.queue, subscription="billing", bootstrap_servers=servers, lease=60
        ) as theirs:  # fmt: skip
            assert len(receive_all(own, 2)) == 2  # dropped
            for message in receive_all(theirs, 2):
                message.ack()
            again = receive_all(own, 2)
            assert [message.delivery_count for message in again] == [2, 2]
            for message in again:
                message.ack()
            assert theirs.receive(10, timeout=2.0) == []
            time.sleep(2.5)
            assert (own.receive(10, timeout=0.5), theirs.receive(10, timeout=0.5)) == ([], [])
    assert (tracker.stats.redelivered, tracker.stats.dead_lettered) == (0, 0)
