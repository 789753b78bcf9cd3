"""The producer's options on a real broker: headers as designed, and no message that its topic would lose."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from kmq_spark.errors import ConfigError
from kmq_spark.producer.producer import QueueProducer
from tests.kafka.conftest import Queue, read_all

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
    entry = ConfigEntry("retention.ms", str(retention_ms), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result()
    time.sleep(0.5)  # until the broker has the setting from the controller


def test_options_travel_as_headers_behind_the_senders_own(queue: Queue, producer: QueueProducer) -> None:
    producer.send("a", headers=[("trace", b"1")], logical_queue="emails", delay=timedelta(seconds=2), ttl=60)
    producer.send("b", at=datetime(2030, 1, 1, tzinfo=UTC) if queue_keeps_for_ever(queue) else 1)
    producer.send("c")
    producer.flush()
    first, second, third = read_all(queue.bootstrap_servers, queue.name)
    assert first.headers() == [
        ("trace", b"1"), ("kmq-logical-queue", b"emails"), ("kmq-delay-ms", b"2000"), ("kmq-ttl-ms", b"60000"),
    ]  # fmt: skip
    assert second.headers() == [("kmq-not-before-ms", b"1893456000000")]
    assert third.headers() is None


def queue_keeps_for_ever(queue: Queue) -> bool:
    """Let a queue keep everything."""
    set_retention(queue, queue.name, -1)
    set_retention(queue, f"{queue.name}.markers", -1)
    return True


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


@pytest.mark.parametrize("options", [{"ttl": 0}, {"delay": 1, "at": 1}])
def test_bad_option_sends_nothing(queue: Queue, producer: QueueProducer, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        producer.send("x", **options)
    producer.flush()
    assert read_all(queue.bootstrap_servers, queue.name) == []
