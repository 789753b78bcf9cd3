"""Consumers that nobody closes: neither their process nor their queue suffers."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient

from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import UsageError
from tests.kafka.conftest import Queue, consumer_of, wait_until
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from typing import Any

pytestmark = pytest.mark.kafka

JOINS_AND_ENDS = """
import sys, time
from kmq_spark import QueueConsumer
consumer = QueueConsumer(sys.argv[1], bootstrap_servers=sys.argv[2], extra={"group.protocol": sys.argv[3]})
print(len(consumer.receive(5, timeout=30)), flush=True)
"""


def members_of(queue: Queue) -> int:
    """Return how many members the group of a queue has."""
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    (future,) = admin.describe_consumer_groups([f"kmq.{queue.name}"]).values()
    return len(future.result(30).members)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_consumer_that_is_dropped_before_it_polls_leaves_its_group(
    queue: Queue, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client joins the group; librdkafka's destructor would wait for ever for somebody who serves the rebalance."""
    threads = threading.active_count()
    consumer: Any = QueueConsumer(
        queue.name, bootstrap_servers=queue.bootstrap_servers, extra={"group.protocol": protocol}
    )
    name = consumer.consumer_id
    assert wait_until(lambda: members_of(queue) == 1)
    del consumer
    gc.collect()
    assert f"consumer {name} was not closed" in caplog.text
    assert wait_until(lambda: members_of(queue) == 0)
    assert wait_until(lambda: threading.active_count() == threads)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_script_that_ends_without_close_releases_what_it_holds(queue: Queue, protocol: str) -> None:
    queue.send("a", "b")
    command = [sys.executable, "-c", JOINS_AND_ENDS, queue.name, queue.bootstrap_servers, protocol]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENDS_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    assert members_of(queue) == 0
    (released,) = list(queue.markers(MarkerType.KEEPALIVE))
    assert released.marker.redeliver_after_ms == 0


def test_consumer_that_is_closed_is_dropped_in_silence(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    consumer: Any = consumer_of(queue)
    consumer.close()
    with pytest.raises(UsageError, match="consumer is closed"):
        consumer.receive()
    del consumer
    gc.collect()
    assert "was not closed" not in caplog.text
