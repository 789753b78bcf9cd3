"""
The options of a message that is sent (logical queue, delay, TTL): headers, and a check against the topics' retention.

A delay and a TTL count from the append time on the broker, so the sender's clock does not matter.
"""

from __future__ import annotations

import math
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from confluent_kafka.admin import AdminClient

from kmq_spark.core.durations import milliseconds, rounded_up_ms
from kmq_spark.core.markers import MAX_DUE_AT_MS
from kmq_spark.core.names import is_name, name_error
from kmq_spark.errors import ConfigError
from kmq_spark.kafka.lookups import settings_of
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import admin_config, make_client
from kmq_spark.wire.headers import DELAY_MS, LOGICAL_QUEUE, NOT_BEFORE_MS, PREFIX, TTL_MS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Headers = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]
    Pairs = list[tuple[str, bytes | str | None]]


class SendOptions:
    """Make the headers of messages. The first message with a delay reads the retention of the queue's topics."""

    def __init__(self, bootstrap_servers: str, timeout: float, extra: Mapping[str, str] | None) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._timeout = timeout
        self._extra = extra
        self._retentions: dict[str, tuple[int, str]] = {}

    def headers(
        self,
        queue: str,
        own: Headers | None,
        *,
        logical_queue: str | None,
        delay: float | timedelta | None,
        at: datetime | float | None,
        ttl: float | timedelta | None,
    ) -> Pairs:
        """
        Return the sender's headers, followed by those of the options.

        Raises ConfigError also if retention would delete the message, or its deferral's marker, before its delivery.
        """
        pairs = [*checked_headers(own or ()), *option_headers(logical_queue, delay, at, ttl)]
        if waits_ms := wait_ms(delay, at, time.time()):
            self._check_retention(queue, waits_ms)
        return pairs

    def _check_retention(self, queue: str, waits_ms: int) -> None:
        retention_ms, topic = self._retentions.get(queue, (0, ""))
        if 0 <= retention_ms < waits_ms:
            # Read it again before a message is refused: it may have been raised.
            retention_ms, topic = self._retentions[queue] = self._shortest_retention(queue)
        if 0 <= retention_ms < waits_ms:
            message = (
                f"message would wait too long: got {waits_ms} ms, retention.ms of {topic} is {retention_ms}; "
                "send it later, or raise the retention of the queue's topics"
            )
            raise ConfigError(message)

    def _shortest_retention(self, queue: str) -> tuple[int, str]:
        """Best effort: a topic that is missing, or whose settings we may not read, counts as one without a limit."""
        topics = QueueTopics(queue)
        admin = make_client(AdminClient, admin_config(self._bootstrap_servers, extra=self._extra))
        wanted = (topics.queue_topic, topics.markers_topic)
        found = settings_of(admin, wanted, self._timeout, skip_errors=True)
        texts = {topic: settings.get("retention.ms", "") for topic, settings in found.items()}
        return min(((int(text), topic) for topic, text in texts.items() if text.isdecimal()), default=(-1, ""))


def checked_headers(headers: Headers) -> Pairs:
    """Return the sender's headers as pairs. Raises ConfigError for a wrong type or a reserved name."""
    pairs = list(headers.items() if hasattr(headers, "items") else headers)
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, bytes | str | None):
            message = (
                f"header has the wrong type: expected a str name and a bytes, str or None value, got {name!r}; "
                "encode it"
            )
            raise ConfigError(message)
        if name.startswith(PREFIX):
            message = f"header name is reserved: got {name!r}, names that begin with {PREFIX} are reserved; rename it"
            raise ConfigError(message)
    return pairs


def option_headers(
    logical_queue: str | None = None,
    delay: float | timedelta | None = None,
    at: datetime | float | None = None,
    ttl: float | timedelta | None = None,
) -> list[tuple[str, bytes]]:
    """Return one header per option that is set. Times are rounded up, so that no delivery is early."""
    if delay is not None and at is not None:
        message = f"message has two delivery times: got delay={delay!r} and at={at!r}, one is allowed; leave one out"
        raise ConfigError(message)
    headers: list[tuple[str, bytes]] = []
    if logical_queue is not None:
        if not is_name(logical_queue):
            raise name_error("logical queue", logical_queue)
        headers.append((LOGICAL_QUEUE, logical_queue.encode()))
    if delay is not None and (delay_ms := milliseconds("delay", delay, most_ms=MAX_DUE_AT_MS)):
        headers.append((DELAY_MS, b"%d" % delay_ms))
    if at is not None:
        headers.append((NOT_BEFORE_MS, b"%d" % _instant_ms(at)))
    if ttl is not None:
        ttl_ms = milliseconds("ttl", ttl, most_ms=MAX_DUE_AT_MS)
        if ttl_ms == 0:
            message = (
                f"ttl is out of bounds: got {ttl!r}, more than 0 seconds; leave it out for a message that never expires"
            )
            raise ConfigError(message)
        headers.append((TTL_MS, b"%d" % ttl_ms))
    return headers


def wait_ms(delay: float | timedelta | None, at: datetime | float | None, now_s: float) -> int:
    """Return how long a message waits in its topic before its first delivery, milliseconds, by the sender's clock."""
    if delay is not None:
        return milliseconds("delay", delay, most_ms=MAX_DUE_AT_MS)
    return 0 if at is None else max(0, _instant_ms(at) - math.floor(now_s * 1000))


def _instant_ms(at: datetime | float) -> int:
    if isinstance(at, datetime):
        if at.utcoffset() is None:
            message = f"at has no time zone: got {at!r}, an aware datetime or epoch seconds; add tzinfo"
            raise ConfigError(message)
        at = at.timestamp()
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at <= MAX_DUE_AT_MS / 1000:
        message = f"at is out of bounds: got {at!r}, 1970 to 9999; give an aware datetime or epoch seconds"
        raise ConfigError(message)
    return rounded_up_ms(at)


def encoded(value: bytes | str | None) -> bytes | None:
    """Return text as UTF-8."""
    return value.encode() if isinstance(value, str) else value
