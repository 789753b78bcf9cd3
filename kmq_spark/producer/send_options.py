"""
Encode the send options of one message (logical queue, delay, TTL) as headers.

Rule 1: pure: no Kafka client and no clock. A caller that needs a comparison with a clock passes the current time.
Rule 2: a delay and a TTL are relative to the append time on the broker. The clock of the sender does not matter.

Source: SQS `DelaySeconds`, RabbitMQ's per-message TTL; for the names, kafka-mq-go's README, "Queues".
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from kmq_spark.core.durations import milliseconds, rounded_up_ms
from kmq_spark.core.markers import MAX_DUE_AT_MS
from kmq_spark.core.names import is_name, name_error
from kmq_spark.errors import ConfigError
from kmq_spark.wire.headers import DELAY_MS, LOGICAL_QUEUE, NOT_BEFORE_MS, TTL_MS


def option_headers(
    *,
    queue: str | None = None,
    delay: float | timedelta | None = None,
    at: datetime | float | None = None,
    ttl: float | timedelta | None = None,
) -> list[tuple[str, bytes | str | None]]:
    """
    Return the headers for the send options of one message.

    Args:
        queue: Logical queue, 1 to 200 characters of A-Z a-z 0-9 . _ -.
        delay: Delay after the append time, seconds or a timedelta; 0 means no delay.
        at: Instant of the first delivery, aware datetime or epoch seconds.
        ttl: Time to live, counted from the append time of the first copy; seconds or a timedelta, more than 0.

    Returns:
        One header per option that is set. Times are whole milliseconds, rounded up, so that no delivery is early.

    Raises:
        ConfigError: A value is not allowed, or both *delay* and *at* are set.
    """
    if delay is not None and at is not None:
        message = f"message has two delivery times: got delay={delay!r} and at={at!r}, one is allowed; leave one out"
        raise ConfigError(message)
    headers: list[tuple[str, bytes | str | None]] = []
    if queue is not None:
        if not is_name(queue):
            raise name_error("queue", queue)
        headers.append((LOGICAL_QUEUE, queue.encode()))
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
    """
    Return how long a message waits in its topic before its first delivery, milliseconds.

    Args:
        delay: See `option_headers`.
        at: See `option_headers`.
        now_s: Epoch seconds, the sender's clock. Its accuracy is sufficient for a comparison with a retention of days.

    Raises:
        ConfigError: A value is not allowed.
    """
    if delay is not None:
        return milliseconds("delay", delay, most_ms=MAX_DUE_AT_MS)
    return 0 if at is None else max(0, _instant_ms(at) - math.floor(now_s * 1000))


def check_wait(waits_ms: int, retention_ms: int, topic: str) -> None:
    """
    Reject a message if retention would delete it, or the marker of its deferral, before its delivery time.

    Args:
        waits_ms: Result of `wait_ms`.
        retention_ms: Shortest retention among the topics that the message needs, milliseconds; negative for no limit.
        topic: The topic with that retention.

    Raises:
        ConfigError: The wait is longer than *retention_ms*.
    """
    if 0 <= retention_ms < waits_ms:
        message = (
            f"message would wait too long: got {waits_ms} ms, retention.ms of {topic} is {retention_ms}; "
            "send it later, or raise the retention of the queue's topics"
        )
        raise ConfigError(message)


def _instant_ms(at: datetime | float) -> int:
    if isinstance(at, datetime):
        if at.tzinfo is None or at.utcoffset() is None:
            message = f"at has no time zone: got {at!r}, an aware datetime or epoch seconds; add tzinfo"
            raise ConfigError(message)
        at = at.timestamp()
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at <= MAX_DUE_AT_MS / 1000:
        message = f"at is out of bounds: got {at!r}, 1970 to 9999; give an aware datetime or epoch seconds"
        raise ConfigError(message)
    return rounded_up_ms(at)
