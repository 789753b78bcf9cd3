"""Topics in memory, and the clock that stamps their records. Rule 1: the clock moves only when a test moves it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from confluent_kafka import Message

from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.core.markers import Marker
    from kmq_spark.testing.queue import InMemoryQueue

_LOG_APPEND_TIME = 2

START_MS = 1_735_689_600_000
"""The clock of a new log: the beginning of 2025."""


class MemoryLog:
    """
    The topics of queues that share a clock.

    Attributes:
        lock: Guards the log and the queues on it. Notified of every record.
        now_ms: The clock, epoch milliseconds.
        queues: The queues on this log, by name.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.now_ms = START_MS
        self.queues: dict[str, InMemoryQueue] = {}
        self._topics: dict[tuple[str, int], list[Message]] = {}

    def records(self, topic: str, partition: int) -> list[Message]:
        """Return the records of a partition; the index of each is its offset."""
        return self._topics.setdefault((topic, partition), [])

    def append(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, Any]]
    ) -> Message:
        """Append a record; return it."""
        with self.lock:
            records = self.records(topic, partition)
            record = Message(
                topic=topic,
                partition=partition,
                offset=len(records),
                key=key,
                value=value,
                headers=list(headers) or None,
                timestamp=(_LOG_APPEND_TIME, self.now_ms),
            )
            records.append(record)
            self.lock.notify_all()
            return record

    def append_marker(self, topic: str, partition: int, marker: Marker) -> None:
        """Append a marker."""
        self.append(topic, partition, None, encode_marker(marker), ())
