"""The fixtures of pytest: a queue in memory for each test, and a broker for the tests that need Kafka itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark.local.broker import EmbeddedBroker
    from kmq_spark.testing.queue import InMemoryQueue


@pytest.fixture
def kmq_queue() -> InMemoryQueue:
    """An empty queue in memory, of one partition."""
    from kmq_spark.testing.queue import InMemoryQueue as Queue  # noqa: PLC0415  # pytest loads this module always

    return Queue()


@pytest.fixture(scope="session")
def kmq_broker() -> Iterator[EmbeddedBroker]:
    """A Kafka broker for the whole session, ready in seconds; it needs Java 17 and its archive (`kmq up` loads it)."""
    from kmq_spark.local.broker import EmbeddedBroker as Broker  # noqa: PLC0415  # as above

    with Broker() as broker:
        yield broker
