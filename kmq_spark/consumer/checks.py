"""
What is checked before a consumer joins its group: the bounds of its settings, names, and the topics.

Rule 1: settings first, before any connection.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING

from kmq_spark.consumer.batch import Limits
from kmq_spark.core.markers import MAX_REDELIVER_AFTER_MS
from kmq_spark.core.names import is_name, name_error
from kmq_spark.errors import ConfigError, TopicError
from kmq_spark.kafka.durations import MIN_LEASE_MS
from kmq_spark.kafka.topics import partition_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Producer

    from kmq_spark.kafka.queue_topics import QueueTopics

MAX_START_TIMEOUT_MS = 10_000
"""Longest wait for a START: a broker that restarts is back within it, a caller does not hang for longer."""

_HOLD_LEASES = 10
"""Leases that a message may be held, by default: long work is renewed, a handler that hangs is given up."""

BOUNDS: dict[str, tuple[int, int]] = {
    "lease_ms": (MIN_LEASE_MS, MAX_REDELIVER_AFTER_MS),
    "max_lease_ms": (MIN_LEASE_MS, MAX_REDELIVER_AFTER_MS),
    "max_in_flight": (1, 10_000_000),
    "max_in_flight_bytes": (1, 2**40),
    "prefetch": (0, 16),
    "isolate_after": (0, 10_000),
    "ack_linger_ms": (0, 1_000),
}
"""Settings of a consumer, with the least and the most that each may be."""


_DEFERRED_KINDS: dict[str, Callable[[object], bool]] = {
    "coroutine function": inspect.iscoroutinefunction,
    "asynchronous generator function": inspect.isasyncgenfunction,
    "generator function": inspect.isgeneratorfunction,
}


def check_bounds(**values: int) -> None:
    """
    Refuse values out of bounds.

    Raises:
        ConfigError: One is, or `max_lease_ms` is shorter than `lease_ms`.
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
    Return the limits of a consumer, with what it leaves to us.

    Args:
        lease_ms: Length of a lease.
        max_lease_ms: How long a message may be held; None for ten leases or 12 h, whichever is less.
        start_timeout_ms: How long a START may take; None for half a lease or 10 s, whichever is less.
        max_in_flight: Most messages held.
        max_in_flight_bytes: Most bytes of their values.

    Raises:
        ConfigError: A value is out of bounds.
    """
    max_lease_ms = min(MAX_REDELIVER_AFTER_MS, _HOLD_LEASES * lease_ms) if max_lease_ms is None else max_lease_ms
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
    Refuse the name of a logical queue that no producer may give; empty is for messages that name none.

    Raises:
        ConfigError: It is not allowed.
    """
    if queue and not is_name(queue):
        raise name_error("logical queue", queue)


def check_handler(handler: object) -> None:
    """
    Refuse a handler whose call only makes something that is yet to be run: its messages would be lost.

    Raises:
        ConfigError: It is a coroutine function or a generator function, also as an object with such a `__call__` or
            behind `functools.partial`; or it cannot be called.
    """
    called = handler
    while isinstance(called, functools.partial):
        called = called.func
    if not callable(called):
        message = f"handler cannot be called: got {handler!r}, a function of one message is allowed; correct the call"
        raise ConfigError(message)
    for each in (called, inspect.getattr_static(type(called), "__call__", None)):
        for kind, is_kind in _DEFERRED_KINDS.items():
            if is_kind(each):
                message = (
                    f"handler is a {kind}: got {handler!r}, which does nothing when it is called; "
                    "give a function that has done its work when it returns, for example "
                    "`lambda message: asyncio.run(handle(message))`"
                )
                raise ConfigError(message)


def is_deferred(result: object) -> bool:
    """Return whether what a handler returned is work that is yet to be done, such as a coroutine."""
    return inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)


def check_topics(client: Producer, topics: QueueTopics, bootstrap_servers: str, timeout_ms: int) -> None:
    """
    Refuse a queue whose topics are missing or do not fit together.

    Raises:
        TopicError: A topic is missing, or the markers topic has fewer partitions than the queue topic.
        KafkaClientError: The broker cannot be reached within *timeout_ms*.
    """
    counts = {
        topic: partition_count(client, topic, bootstrap_servers, timeout_ms)
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
            f"{queue_count} as {queue!r}; add them before messages of the others are received"
        )
        raise TopicError(message)
