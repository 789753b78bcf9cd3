"""
Send librdkafka's log lines to the stdlib logger `kmq_spark.kafka.client`, and not too many of them.

Rule 1: of the lines of one kind and one client, one in ten seconds passes; the next one tells how many were kept back.

Source: confluent-kafka's `logger` setting; a broker that is away otherwise costs a line every 50 ms.
"""

from __future__ import annotations

import logging
import threading
import time

QUIET_S = 10.0
"""Shortest time between two lines of one kind: enough to see that the trouble lasts, and when it ended."""

MAX_KINDS = 1_000
"""Kinds remembered; more only means that some lines pass twice."""


class RateLimit(logging.Filter):
    """Let one line of a kind pass in `QUIET_S` seconds, by level, librdkafka's facility and client name."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        super().__init__()
        self._lock = threading.Lock()
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line passes; one that does names how many were kept back before it."""
        args = record.args if isinstance(record.args, tuple) else ()
        kind = (record.levelno, record.msg, *args[:2])
        now = time.monotonic()
        with self._lock:
            last_at, suppressed = self._seen.get(kind, (-QUIET_S, 0))
            if now - last_at < QUIET_S:
                self._seen[kind] = (last_at, suppressed + 1)
                return False
            if len(self._seen) >= MAX_KINDS:
                self._seen.clear()
            self._seen[kind] = (now, 0)
        if suppressed:
            record.msg = f"{record.msg} ({suppressed} more like it were kept back)"
        return True


client_logger = logging.getLogger("kmq_spark.kafka.client")
client_logger.addFilter(RateLimit())
