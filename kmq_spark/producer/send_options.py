"""
Turn what a sender asks of one message into headers: its logical queue, when it may be handed out, and until when.

Rule 1: pure: no client, no clock; whoever has to compare with a clock passes the instant.
Rule 2: a delay and a time to live are relative to the append time on the broker, so that no sender's clock decides.

Source: SQS `DelaySeconds`, RabbitMQ's per-message TTL; for the names, kafka-mq-go's README, "Queues".
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from kmq_spark.core.markers import MAX_DUE_AT_MS
from kmq_spark.core.names import is_name, name_error
from kmq_spark.errors import ConfigError
from kmq_spark.kafka.durations import milliseconds, rounded_up_ms
from kmq_spark.wire.headers import DELAY_MS, NOT_BEFORE_MS, QUEUE, TTL_MS


def option_headers(
    *,
    queue: str | None = None,
    delay: float | timedelta | None = None,
    at: datetime | float | None = None,
    ttl: float | timedelta | None = None,
) -> list[tuple[str, bytes | str | None]]:
    """
    Return the headers that say what a sender asked for.

    Args:
        queue: Logical queue, 1 to 200 of A-Z a-z 0-9 . _ -.
        delay: Seconds or a timedelta from the append time on; 0 is none.
        at: Aware datetime, or epoch seconds.
        ttl: Seconds or a timedelta from the append time of the first copy on.

    Returns:
        No header for what was not asked for; times in whole milliseconds, rounded up: never early.

    Raises:
        ConfigError: A value is not allowed.
    """
    if delay is not None and at is not None:
        message = f"message has two times: got delay={delay!r} and at={at!r}, one of them; leave one out"
        raise ConfigError(message)
    headers: list[tuple[str, bytes | str | None]] = []
    if queue is not None:
        if not is_name(queue):
            raise name_error("queue", queue)
        headers.append((QUEUE, queue.encode()))
    if delay is not None and (delay_ms := milliseconds("delay", delay, most_ms=MAX_DUE_AT_MS)):
        headers.append((DELAY_MS, b"%d" % delay_ms))
    if at is not None:
        headers.append((NOT_BEFORE_MS, b"%d" % _instant_ms(at)))
    if ttl is not None:
        ttl_ms = milliseconds("ttl", ttl, most_ms=MAX_DUE_AT_MS)
        if ttl_ms == 0:
            message = f"ttl is out of bounds: got {ttl!r}, more than 0 seconds; leave it out for a message that stays"
            raise ConfigError(message)
        headers.append((TTL_MS, b"%d" % ttl_ms))
    return headers


def wait_ms(delay: float | timedelta | None, at: datetime | float | None, now_s: float) -> int:
    """
    Return how long a message will lie in its topic before it may be handed out, milliseconds.

    Args:
        delay: As for `option_headers`.
        at: As for `option_headers`.
        now_s: Epoch seconds, the sender's clock: good enough to compare with a retention of days.
    """
    if delay is not None:
        return milliseconds("delay", delay, most_ms=MAX_DUE_AT_MS)
    return 0 if at is None else max(0, _instant_ms(at) - math.floor(now_s * 1000))


def check_wait(waits_ms: int, retention_ms: int, topic: str) -> None:
    """
    Refuse a message that its topic, or the marker that tells of it, would be gone before its time.

    Args:
        waits_ms: From `wait_ms`.
        retention_ms: Shortest retention of the topics that the message needs; negative for no limit.
        topic: The topic with that retention.

    Raises:
        ConfigError: The wait is longer.
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
