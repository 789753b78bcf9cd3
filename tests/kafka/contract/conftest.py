"""A queue in memory, and the same queue on the broker: what a test of the contract may use of both."""

# ruff: noqa: D102  # the methods of each world say what they do

from __future__ import annotations

import itertools
import os
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from kmq_spark import (
    AsyncQueueConsumer,
    AsyncQueueProducer,
    QueueConsumer,
    QueueProducer,
    create_queue,
    list_dead_letters,
)
from kmq_spark.testing import InMemoryQueue
from tests.kafka.conftest import Queue, track
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kmq_spark import DeadLetter, Message

_numbers = itertools.count()

MARGIN_S = 0.3
"""How much longer a test waits than a message, on a broker whose clock does not stand still."""

PLAIN = {"max_deliveries": 5, "backoff": "none"}


class World(Protocol):
    """A queue, its tracker, and its time."""

    name: str

    def producer(self, **options: Any) -> QueueProducer: ...
    def consumer(self, **options: Any) -> QueueConsumer: ...
    def async_producer(self) -> AsyncQueueProducer: ...
    def async_consumer(self, **options: Any) -> AsyncQueueConsumer: ...
    def subscribe(self, name: str) -> None: ...
    def pass_time(self, seconds: float, subscription: str = "") -> None: ...
    def dead_letters(self, subscription: str = "") -> list[DeadLetter]: ...
    @property
    def now(self) -> datetime: ...


class InMemory:
    """The queue in memory."""

    def __init__(self, partitions: int, rules: Mapping[str, Any], beside: InMemory | None) -> None:
        self.name = f"queue-{next(_numbers)}"
        self.queue: InMemoryQueue = InMemoryQueue(
            self.name, partitions=partitions, rules=rules, beside=None if beside is None else beside.queue
        )

    def producer(self, **options: Any) -> QueueProducer:
        return self.queue.producer(**options)

    def consumer(self, **options: Any) -> QueueConsumer:
        return self.queue.consumer(**options)

    def async_producer(self) -> AsyncQueueProducer:
        return self.queue.async_producer()

    def async_consumer(self, **options: Any) -> AsyncQueueConsumer:
        return self.queue.async_consumer(**options)

    def subscribe(self, name: str) -> None:
        """A subscription needs no topics here."""

    def pass_time(self, seconds: float, subscription: str = "") -> None:  # noqa: ARG002  # all are tracked
        self.queue.advance(seconds)

    def dead_letters(self, subscription: str = "") -> list[DeadLetter]:
        return self.queue.dead_letters(subscription)

    @property
    def now(self) -> datetime:
        return self.queue.now


class OnBroker:
    """The same on a broker, with the tracker of `kmq tracker once`."""

    def __init__(self, bootstrap_servers: str, partitions: int, rules: Mapping[str, Any]) -> None:
        self.name = f"contract-{os.getpid()}-{next(_numbers)}"
        self._reach: dict[str, Any] = {"bootstrap_servers": bootstrap_servers}
        self._rules = rules
        create_queue(self.name, partitions=partitions, rules=rules, **self._reach)

    def producer(self, **options: Any) -> QueueProducer:
        return QueueProducer(self.name, **self._reach, **options)

    def consumer(self, **options: Any) -> QueueConsumer:
        return QueueConsumer(self.name, **self._reach, **options)

    def async_producer(self) -> AsyncQueueProducer:
        return AsyncQueueProducer(self.name, **self._reach)

    def async_consumer(self, **options: Any) -> AsyncQueueConsumer:
        return AsyncQueueConsumer(self.name, **self._reach, **options)

    def subscribe(self, name: str) -> None:
        create_queue(f"{self.name}@{name}", rules=self._rules, **self._reach)

    def pass_time(self, seconds: float, subscription: str = "") -> None:
        time.sleep(seconds + MARGIN_S)
        track(Queue(self._full(subscription), self._reach["bootstrap_servers"]))

    def dead_letters(self, subscription: str = "") -> list[DeadLetter]:
        track(Queue(self._full(subscription), self._reach["bootstrap_servers"]))
        return list(list_dead_letters(self._full(subscription), **self._reach))

    @property
    def now(self) -> datetime:
        return datetime.now(UTC)

    def _full(self, subscription: str) -> str:
        return f"{self.name}@{subscription}" if subscription else self.name


@pytest.fixture(params=["memory", pytest.param("broker", marks=pytest.mark.kafka)])
def make_world(request: pytest.FixtureRequest) -> Callable[..., World]:
    """Make queues, each in both worlds; *beside* gives a second queue of the same world."""

    def make(partitions: int = 1, beside: Any = None, **rules: Any) -> World:  # noqa: ANN401  # of the same world
        if request.param == "memory":
            return InMemory(partitions, {**PLAIN, **rules}, beside)
        return OnBroker(request.getfixturevalue("bootstrap_servers"), partitions, {**PLAIN, **rules})

    return make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A queue of one partition."""
    return make_world()


def receive(consumer: QueueConsumer, count: int) -> list[Message]:
    """Receive until there are as many as asked for."""
    found: list[Message] = []
    until = time.monotonic() + COMES_S
    while len(found) < count and time.monotonic() < until:
        found += consumer.receive(count - len(found), timeout=0.5)
    assert len(found) == count
    return found


def is_empty(consumer: QueueConsumer) -> bool:
    """Return whether nothing can be received now."""
    return not consumer.receive(10, timeout=0.5)


def send(world: World, *values: str, **options: Any) -> None:
    """Send messages, and wait for them."""
    with world.producer() as producer:
        for value in values:
            producer.send(value, **options)


def soon(world: World, seconds: float) -> datetime:
    """Return an instant that is so far away."""
    return world.now + timedelta(seconds=seconds)
