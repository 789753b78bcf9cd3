"""
Send librdkafka's log lines to the stdlib logger `kmq_spark.kafka.client`, and not too many of them.

Rule 1: what the client says of a passing state of normal work, and repeats by itself, is at level DEBUG.
Rule 2: of the lines of one kind and one client, one in ten seconds passes; the next one tells how many were kept back.
Rule 3: why a connection failed stands in these lines alone, so it is kept for the error of the call that timed out.

Source: confluent-kafka's `logger` setting; a broker that is away otherwise costs a line every 50 ms.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque

QUIET_S = 10.0
"""Shortest time between two lines of one kind: enough to see that the trouble lasts, and when it ended."""

MAX_KINDS = 1_000
"""Kinds remembered; more only means that some lines pass twice."""


PASSING = frozenset({"GETPID"})
"""Facilities of librdkafka whose lines, where they say that it retries, are no trouble: a coordinator that starts."""


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
        if args and args[0] in PASSING and "retrying" in str(args[-1]) and record.levelno > logging.DEBUG:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            return client_logger.isEnabledFor(logging.DEBUG)
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


REASONS_KEPT, REASON_AGE_S = 20, 60.0
"""Reasons kept of one address, and how long one counts."""

_ADDRESS = re.compile(r"\]: (?:\w+://)?([^/\s]+)/\w+: (.*?)(?: \(after \d+ms.*)?$", re.DOTALL)


class Reasons(logging.Filter):
    """Keep why connections failed, by the broker's address; every line passes."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        super().__init__()
        self._lock = threading.Lock()
        self._kept: dict[str, deque[tuple[float, str]]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Remember the reason that a line of a failed connection names."""
        args = record.args if isinstance(record.args, tuple) else ()
        # librdkafka: facility, client, text; the text is "[thrd:…]: sasl_ssl://host:port/id: reason (after 3ms in …)".
        found = _ADDRESS.search(str(args[2])) if len(args) > 2 and args[0] == "FAIL" else None  # noqa: PLR2004  # above
        if found is not None:
            with self._lock:
                if len(self._kept) >= MAX_KINDS:
                    self._kept.clear()
                self._kept.setdefault(found[1], deque(maxlen=REASONS_KEPT)).append((time.monotonic(), found[2]))
        return True

    def of(self, bootstrap_servers: str) -> str:
        """
        Return why the last connections to one of these addresses failed; empty where none did.

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
        # A broker that closes the connection leaves librdkafka to guess, and it guesses only now and then.
        telling = [reason for reason in reasons if not reason.startswith("Disconnected")]
        return (telling or reasons or [""])[-1]


connection_reasons = Reasons()

client_logger = logging.getLogger("kmq_spark.kafka.client")
client_logger.addFilter(connection_reasons)  # first: it must see the lines that the other one keeps back
client_logger.addFilter(RateLimit())
