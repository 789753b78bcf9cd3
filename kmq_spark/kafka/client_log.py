"""
Send librdkafka's log lines to the stdlib logger `kmq_spark.kafka.client`, with a limit on repeated lines.

Rule 1: Lines about normal operation are logged at level DEBUG: see `HARMLESS`.
Rule 2: At most one line per kind and client passes in ten seconds. The next line contains how many were suppressed.
Rule 3: Only these lines contain the reason of a failed connection. The reason is kept for the error of the call that
timed out.

Source: the `logger` setting of confluent-kafka. Without a limit, a broker that is down causes a line every 50 ms.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque

MIN_INTERVAL_S = 10.0
"""Minimum time between two lines of one kind. It still shows that a problem lasts, and when it ended."""

MAX_KINDS = 1_000
"""Maximum number of kinds that are remembered. Above it all are forgotten, so some lines pass twice."""


HARMLESS = {"GETPID": "retrying", "CONFWARN": "will be ignored by this"}
"""
librdkafka facilities, and the words that make a line of them harmless: a coordinator that starts, and a setting of
consumers alone in `extra`, which configures the producers of a consumer too.
"""


class ClientLogLimit(logging.Filter):
    """Let one line per kind pass in `MIN_INTERVAL_S`. A kind is a level, a librdkafka facility and a client name."""

    def __init__(self) -> None:
        """Start with an empty history."""
        super().__init__()
        self._lock = threading.Lock()
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line passes. A line that passes contains how many lines before it were suppressed."""
        args = record.args if isinstance(record.args, tuple) else ()
        words = HARMLESS.get(str(args[0])) if args else None
        if words is not None and words in str(args[-1]) and record.levelno > logging.DEBUG:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            return client_logger.isEnabledFor(logging.DEBUG)
        kind = (record.levelno, record.msg, *args[:2])
        now = time.monotonic()
        with self._lock:
            last_at, suppressed = self._seen.get(kind, (-MIN_INTERVAL_S, 0))
            if now - last_at < MIN_INTERVAL_S:
                self._seen[kind] = (last_at, suppressed + 1)
                return False
            if len(self._seen) >= MAX_KINDS:
                self._seen.clear()
            self._seen[kind] = (now, 0)
        if suppressed:
            record.msg = f"{record.msg} ({suppressed} similar lines suppressed)"
        return True


MAX_REASONS, REASON_AGE_S = 20, 60.0
"""Number of reasons kept per address, and how long each is valid, seconds."""

_ADDRESS = re.compile(r"\]: (?:\w+://)?([^/\s]+)/\w+: (.*?)(?: \(after \d+ms.*)?$", re.DOTALL)


class ConnectionReasons(logging.Filter):
    """Keep the reasons of failed connections by broker address. Every line passes this filter."""

    def __init__(self) -> None:
        """Start with an empty history."""
        super().__init__()
        self._lock = threading.Lock()
        self._kept: dict[str, deque[tuple[float, str]]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Store the reason if the line reports a failed connection."""
        args = record.args if isinstance(record.args, tuple) else ()
        # The arguments are librdkafka's facility, client and text. The text is "[thrd:…]: sasl_ssl://host:port/id:
        # reason (after 3ms in …)".
        found = _ADDRESS.search(str(args[2])) if len(args) > 2 and args[0] == "FAIL" else None  # noqa: PLR2004  # above
        if found is not None:
            with self._lock:
                if len(self._kept) >= MAX_KINDS:
                    self._kept.clear()
                self._kept.setdefault(found[1], deque(maxlen=MAX_REASONS)).append((time.monotonic(), found[2]))
        return True

    def of(self, bootstrap_servers: str) -> str:
        """
        Return why the latest connection to these addresses failed; empty if none failed.

        Args:
            bootstrap_servers: Comma-separated `host:port`.
        """
        since = time.monotonic() - REASON_AGE_S
        with self._lock:
            reasons = [
                reason
                for address in bootstrap_servers.split(",")
                for at, reason in self._kept.get(address.strip().rpartition("://")[2], ())
                if at >= since
            ]
        # If the broker closes the connection, librdkafka only guesses the reason, and not every time.
        specific = [reason for reason in reasons if not reason.startswith("Disconnected")]
        return (specific or reasons or [""])[-1]


connection_reasons = ConnectionReasons()

client_logger = logging.getLogger("kmq_spark.kafka.client")
client_logger.addFilter(connection_reasons)  # first: it must also see the lines that the rate limit suppresses
client_logger.addFilter(ClientLogLimit())
