"""
Checks before a consumer joins its group: bounds of settings, names, the handler, and the topics.

Rule 1: check settings before any connection.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING

from kmq_spark.consumer.started import Limits
from kmq_spark.core.durations import MIN_LEASE_MS
from kmq_spark.core.markers import MAX_REDELIVER_AFTER_MS
from kmq_spark.core.names import is_name, name_error
from kmq_spark.errors import ConfigError, TopicError
from kmq_spark.kafka.topics import partition_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Producer

    from kmq_spark.kafka.queue_topics import QueueTopics

MAX_START_TIMEOUT_MS = 10_000
"""Longest default time for a START: enough for a broker restart, and a caller does not block longer."""

_DEFAULT_MAX_LEASES = 10
"""Default `max_lease_ms` in leases: long work is renewed; a handler that hangs loses its message."""

BOUNDS: dict[str, tuple[int, int]] = {
    "lease_ms": (MIN_LEASE_MS, MAX_REDELIVER_AFTER_MS),
    "max_lease_ms": (MIN_LEASE_MS, MAX_REDELIVER_AFTER_MS),
    "max_in_flight": (1, 10_000_000),
    "max_in_flight_bytes": (1, 2**40),
    "prefetch": (0, 16),
    "isolate_after": (0, 10_000),
    "ack_linger_ms": (0, 1_000),
}
"""Minimum and maximum of each consumer setting."""


_LAZY_KINDS: dict[str, Callable[[object], bool]] = {
    "coroutine function": inspect.iscoroutinefunction,
    "asynchronous generator function": inspect.isasyncgenfunction,
    "generator function": inspect.isgeneratorfunction,
}


def check_bounds(**values: int) -> None:
    """
    Check that values are within `BOUNDS`.

    Raises:
        ConfigError: A value is out of bounds, or `max_lease_ms` is less than `lease_ms`.
    """
    for name, value in values.items():
        least, most = BOUNDS[name]
        if name == "max_lease_ms":
            least = max(least, values.get("lease_ms", least))
        if not least <= value <= most:
            message = f"{name} is out of bounds: got {value!r}, {least} to {most}; correct {name}"
            raise ConfigError(message)


def limits_of(
    lease_ms: int, max_lease_ms: int | None, start_timeout_ms: int | None, max_in_flight: int, max_in_flight_bytes: int
) -> Limits:
    """
    Return the limits of a consumer, with defaults for the values that are None.

    Args:
        lease_ms: Length of a lease.
        max_lease_ms: Longest total time that keep-alive holds a message; None for ten leases or 12 h, whichever is
            less.
        start_timeout_ms: Longest time for a START to become durable; None for half a lease or 10 s, whichever is less.
        max_in_flight: Maximum number of messages held at once.
        max_in_flight_bytes: Maximum bytes of their values, keys and headers.

    Raises:
        ConfigError: A value is out of bounds.
    """
    max_lease_ms = min(MAX_REDELIVER_AFTER_MS, _DEFAULT_MAX_LEASES * lease_ms) if max_lease_ms is None else max_lease_ms
    check_bounds(
        lease_ms=lease_ms,
        max_lease_ms=max_lease_ms,
        max_in_flight=max_in_flight,
        max_in_flight_bytes=max_in_flight_bytes,
    )
    start_timeout_ms = start_timeout_ms or min(MAX_START_TIMEOUT_MS, lease_ms // 2)
    return Limits(lease_ms / 1000, max_lease_ms / 1000, start_timeout_ms / 1000, max_in_flight, max_in_flight_bytes)


def check_logical_queue(queue: str) -> None:
    """
    Check the name of a logical queue. An empty name selects the messages without a logical queue.

    Raises:
        ConfigError: A producer could not use the name either: it is not 1 to 200 characters of A-Z a-z 0-9 . _ -.
    """
    if queue and not is_name(queue):
        raise name_error("logical queue", queue)


def check_batch(batch: int, max_in_flight: int) -> None:
    """
    Check the size of the batches of `run`.

    Raises:
        ConfigError: It is not an integer from 1 to *max_in_flight*.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= max_in_flight:
        message = (
            f"batch is out of bounds: got {batch!r}, an integer from 1 to max_in_flight, which is {max_in_flight}; "
            "correct batch or raise max_in_flight"
        )
        raise ConfigError(message)


def check_handler(handler: object) -> None:
    """
    Check that a handler does its work when it is called.

    A coroutine function or generator function only returns an object that runs later. Its messages would be
    acknowledged without any work, and lost.

    Raises:
        ConfigError: The handler is not callable, or it is a coroutine function, generator function or asynchronous
            generator function. An object with such a `__call__` and a `functools.partial` of one are detected too.
    """
    called = handler
    while isinstance(called, functools.partial):
        called = called.func
    if not callable(called):
        message = f"handler is not callable: got {handler!r}, expected a function of one message; correct the call"
        raise ConfigError(message)
    for each in (called, inspect.getattr_static(type(called), "__call__", None)):
        for kind, is_kind in _LAZY_KINDS.items():
            if is_kind(each):
                message = (
                    f"handler is a {kind}: got {handler!r}, which does nothing when it is called; "
                    "pass a function that finishes its work before it returns, for example "
                    "`lambda message: asyncio.run(handle(message))`"
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
        KafkaClientError: The broker cannot be reached within *timeout*.
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
            f"topic {topics.markers_topic!r} has too few partitions: got {marker_count}, "
            f"{queue!r} has {queue_count}; add partitions, otherwise messages of the others cannot be received"
        )
        raise TopicError(message)
