"""`QueueConsumer.run` where the broker is far away: each START takes a long round trip."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from faults.proxy import ProxiedBroker
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.core.markers import MarkerType
from kmq_spark.kafka.topics import create_queue
from tests.brokers import QUICK_JAVA
from tests.kafka.conftest import Queue, stopped_if_it_hangs

if TYPE_CHECKING:
    from pathlib import Path

    from kmq_spark.consumer.message import Message

pytestmark = pytest.mark.kafka

COUNT = 100
DELAY_S = 0.1
"""In each direction, so a START takes 0.2 s. A run takes as much ahead as its handlers do in 0.1 s."""


def test_run_starts_more_messages_at_once_where_each_start_takes_long(tmp_path: Path) -> None:
    """One message a round trip would be 100 STARTs."""
    proxied = ProxiedBroker.start(tmp_path, QUICK_JAVA)
    with closing(proxied.broker), closing(proxied.workers), closing(proxied.trackers):
        create_queue("far", bootstrap_servers=proxied.broker.bootstrap_servers, partitions=1)
        queue = Queue("far", proxied.broker.bootstrap_servers)
        queue.send(*map(str, range(COUNT)))
        proxied.workers.delay(DELAY_S)
        consumer = QueueConsumer(queue.name, bootstrap_servers=proxied.workers.address)
        handled: list[Message] = []

        def handle(message: Message) -> None:
            handled.append(message)
            if len(handled) == COUNT:
                consumer.stop()

        with stopped_if_it_hangs(consumer):
            consumer.run(handle, concurrency=1)
        assert len(handled) == COUNT
        assert len(queue.markers(MarkerType.START)) <= COUNT // 4
