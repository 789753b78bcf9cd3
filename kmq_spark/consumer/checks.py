"""Checks before a consumer joins its group: bounds of settings, names, the handler, and the topics."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.core.durations import MIN_LEASE_MS, milliseconds
from kmq_spark.core.markers import MAX_REDELIVER_AFTER_MS
from kmq_spark.errors import ConfigError, TopicError
from kmq_spark.kafka.topics import partition_count

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from confluent_kafka import Producer

    from kmq_spark.kafka.queue_topics import QueueTopics

MAX_START_TIMEOUT_S = 10.0
"""Longest time for a START: enough for a broker restart, and a caller does not block longer."""

DEFAULT_MAX_LEASES = 10
"""Default `max_lease` in leases: long work is renewed; a handler that hangs loses its message."""

_BOUNDS = {"max_in_flight": (1, 10_000_000), "isolate_after": (0, 10_000), "concurrency": (1, 10_000)}

_LAZY_KINDS: dict[str, Callable[[object], bool]] = {
    "coroutine function": inspect.iscoroutinefunction,
    "asynchronous generator function": inspect.isasyncgenfunction,
    "generator function": inspect.isgeneratorfunction,
}


class Limits(NamedTuple):
    """Limits of one consumer: of a lease, of all its renewals, of the time for a START, and of the messages held."""

    lease_s: float
    max_lease_s: float
    start_timeout_s: float
    max_in_flight: int


def check_bounds(**values: int) -> None:
    """Raise ConfigError for a number that is out of its bounds."""
    for name, value in values.items():
        least, most = _BOUNDS[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            message = f"{name} is out of bounds: got {value!r}; expected an integer from {least} to {most}"
            raise ConfigError(message)


def limits_of(lease: float | timedelta, max_lease: float | timedelta | None, max_in_flight: int) -> Limits:
    """Return the limits of a consumer. Raises ConfigError for a value that is out of bounds."""
    lease_ms = milliseconds("lease", lease, MIN_LEASE_MS)
    max_lease_ms = min(MAX_REDELIVER_AFTER_MS, DEFAULT_MAX_LEASES * lease_ms)
    if max_lease is not None:
        max_lease_ms = milliseconds("max_lease", max_lease, lease_ms)
    start_timeout_s = min(MAX_START_TIMEOUT_S, lease_ms / 2_000)
    return Limits(lease_ms / 1000, max_lease_ms / 1000, start_timeout_s, max_in_flight)


def check_batch(batch: int, max_in_flight: int) -> None:
    """Raise ConfigError where the size of the batches of `run` is not an integer from 1 to *max_in_flight*."""
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= max_in_flight:
        message = (
            f"batch is out of bounds: got {batch!r}; expected an integer from 1 to max_in_flight, which is "
            f"{max_in_flight} / correct batch, or raise max_in_flight"
        )
        raise ConfigError(message)


def check_handler(handler: object) -> None:
    """
    Raise ConfigError for a handler that does not do its work when it is called.

    A coroutine function or generator function only returns an object that runs later. Its messages would be
    acknowledged without any work, and lost. An object with such a `__call__` and a `functools.partial` of one are
    detected too.
    """
    called = handler
    while isinstance(called, functools.partial):
        called = called.func
    if not callable(called):
        message = f"handler is not callable: got {handler!r}; expected a function of one message"
        raise ConfigError(message)
    for each in (called, inspect.getattr_static(type(called), "__call__", None)):
        for kind, is_kind in _LAZY_KINDS.items():
            if is_kind(each):
                message = (
                    f"handler is a {kind}: got {handler!r}; expected a function that finishes its work before it "
                    "returns / pass for example `lambda message: asyncio.run(handle(message))`"
                )
                raise ConfigError(message)


def is_unstarted_work(result: object) -> bool:
    """Return whether the return value of a handler is work that has not run yet, such as a coroutine."""
    return inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)


def check_topics(client: Producer, topics: QueueTopics, bootstrap_servers: str, timeout: float) -> None:
    """
    Check that the topics of a queue exist and have fitting partition counts.

    Raises:
        TopicError: A topic is missing, or the markers topic has fewer partitions than the queue topic.
        KafkaClientError: The broker cannot be reached within *timeout* seconds.
    """
    counts = {
        topic: partition_count(client, topic, bootstrap_servers, timeout)
        for topic in (topics.queue_topic, topics.markers_topic)
    }
    queue = str(topics)
    missing = [topic for topic, count in counts.items() if not count]
    if missing:
        message = f"queue {queue!r} has no topic {missing[0]!r}; run `kmq queue create {queue}`"
        raise TopicError(message)
    queue_count, marker_count = counts.values()
    if marker_count < queue_count:
        message = (
            f"topic {topics.markers_topic!r} has too few partitions: got {marker_count}; expected {queue_count}, as "
            f"{queue!r} has / add partitions, otherwise messages of the others cannot be received"
        )
        raise TopicError(message)
