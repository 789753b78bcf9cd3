"""The producer's options on a real broker: headers as designed, and no message that its topic would lose."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kmq_spark.errors import ConfigError
from kmq_spark.producer.producer import QueueProducer
from tests.kafka.conftest import Queue, read_all, set_topic

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.kafka


@pytest.fixture
def producer(queue: Queue) -> Iterator[QueueProducer]:
    """A producer of the queue."""
    with QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers) as made:
        yield made


def set_retention(queue: Queue, topic: str, retention_ms: int) -> None:
    """Change how long a topic keeps its messages."""
    set_topic(queue.bootstrap_servers, topic, "retention.ms", retention_ms)
    time.sleep(0.5)  # until the broker has the setting from the controller


@pytest.mark.parametrize("suffix", ["", ".markers"])
def test_delay_past_the_retention_of_queue_or_markers_is_refused_until_it_is_raised(
    queue: Queue, producer: QueueProducer, suffix: str
) -> None:
    topic = queue.name + suffix
    set_retention(queue, topic, 3_600_000)
    producer.send("an hour", delay=3_600)
    with pytest.raises(ConfigError, match=f"got 3601000 ms, retention.ms of {topic} is 3600000; send it later"):
        producer.send("more", delay=3_601)
    with pytest.raises(ConfigError, match=f"retention.ms of {topic} is 3600000"):
        producer.send("more", at=time.time() + 4_000)
    set_retention(queue, topic, 7_200_000)
    producer.send("more", delay=3_601)
    producer.flush()
    assert [record.value() for record in read_all(queue.bootstrap_servers, queue.name)] == [b"an hour", b"more"]
