"""librdkafka's own mock broker, for tests of clients without Java."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from confluent_kafka import Producer

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTITIONS = 4
"""The mock broker makes its topics so."""


@contextmanager
def mock_broker(topic: str) -> Iterator[str]:
    """Run a mock broker with a topic; yield its address. It lives as long as the client that made it."""
    owner = Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = owner.list_topics(timeout=5).brokers.values()
    owner.list_topics(topic, timeout=5)
    yield f"{broker.host}:{broker.port}"
    owner.flush(0)
