"""
Back-pressure, consumer side: stop fetching while too many messages of the queue are in flight.

Rule 1: a background thread requests the end offset of the topic `kmq.queues` every `CHECK_INTERVAL_S`, with the
client of the consumer group. It reads the topic only if the end offset has changed. The client for reading is closed
after `FRESH_S` without a change.
Rule 2: a record that is not renewed within `FRESH_S` is ignored: its tracker has stopped.
Rule 3: best effort. Without the topic, or without the right to read it, there is no back-pressure. Everything else
works.

The tracker side is `tracker/full_record.py`.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from kmq_spark.errors import KmqError
from kmq_spark.kafka.queue_rules import RULES_TOPIC, RulesReader
from kmq_spark.kafka.settings import new_client_id, reader_config
from kmq_spark.pauses import RateLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from confluent_kafka import Consumer

    from kmq_spark.consumer.intake import Intake
    from kmq_spark.kafka.queue_rules import FullRecord
    from kmq_spark.kafka.queue_topics import QueueTopics

logger = logging.getLogger(__name__)

FRESH_S = 60.0

CHECK_INTERVAL_S = 10.0

READ_TIMEOUT_S = 3.0

END_TIMEOUT_S = 1.0
"""Timeout of a request for the end offset of the topic. `FullWatch.stop` may wait this long."""

WARN_INTERVAL_S = 60.0


class RecordFreshness:
    """Decide whether a record is fresh, by the local time when it was first seen. Clocks of two hosts may differ."""

    def __init__(self) -> None:
        """Start without a record."""
        self._offset: int | None = None
        self._has_checked = False
        self._seen_s = float("-inf")

    def is_fresh(self, record: FullRecord | None, now_s: float, epoch_s: float) -> bool:
        """
        Return whether the queue is full: a record exists and is fresh.

        Args:
            record: The newest record; None if there is none.
            now_s: Monotonic seconds.
            epoch_s: Epoch seconds. Used only for the age of a record that existed before the first check.
        """
        is_first_check, self._has_checked = not self._has_checked, True
        if record is None:
            self._offset = None
            return False
        if record.offset != self._offset:
            self._offset = record.offset
            is_old = is_first_check and epoch_s - record.at_ms / 1000 > FRESH_S
            self._seen_s = float("-inf") if is_old else now_s
        return now_s - self._seen_s <= FRESH_S


class FullWatch(threading.Thread):
    """
    Background thread that checks whether the queue is full.

    Args:
        topics: Names of the queue.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.

    Attributes:
        is_full: Result of the last check.
    """

    def __init__(self, topics: QueueTopics, bootstrap_servers: str, extra: Mapping[str, str] | None) -> None:
        """Open no client; `start_on` starts the thread."""
        super().__init__(name=f"kmq-full-{topics}", daemon=True)
        self._topics = topics
        config = reader_config(bootstrap_servers, topics.consumer_group, new_client_id("full"), extra)
        self._reader = RulesReader(topics, config, READ_TIMEOUT_S)
        self._freshness = RecordFreshness()
        self._intake: Callable[[], Intake | None] = lambda: None
        self._intake_use = threading.Lock()
        self._end: int | None = None
        self._changed_s = float("-inf")
        self._stopping = threading.Event()
        self._warning_limit = RateLimit(WARN_INTERVAL_S)
        self.is_full = False

    @property
    def client(self) -> Consumer | None:
        """The client, which a forked child process must not use; None while none is open."""
        return self._reader.client

    def start_on(self, intake: Intake) -> None:
        """Start the thread. It uses the client of *intake*."""
        # Weak reference: if a consumer is dropped without `close`, this thread must not keep its client alive.
        self._intake = weakref.ref(intake)
        self.start()

    def run(self) -> None:
        """Check until stopped, or until the intake no longer exists. Called by `Thread.start`."""
        try:
            while not self._stopping.is_set() and self._check():
                self._stopping.wait(CHECK_INTERVAL_S)
        finally:
            self.is_full = False
            self._reader.close()

    def stop(self) -> None:
        """Stop the checks. After this method returns, this thread no longer uses the client of the intake."""
        self._stopping.set()
        with self._intake_use:
            pass

    def close(self) -> None:
        """Stop the checks, and wait for a check that is running."""
        self.stop()
        if self.is_alive():
            self.join(READ_TIMEOUT_S)

    def _check(self) -> bool:
        """Check once; return whether to continue."""
        try:
            with self._intake_use:
                intake = self._intake()
                if intake is None or self._stopping.is_set():
                    return False
                end = intake.end_of(RULES_TOPIC, END_TIMEOUT_S)
                del intake
            self._read(end)
        except (KmqError, KafkaException) as error:
            # Keep the last known record until it is too old.
            logger.debug("cannot check whether queue %s is full: %s", self._topics, error)
        self._update()
        return True

    def _read(self, end: int) -> None:
        now_s = time.monotonic()
        if end != self._end:
            # An empty topic needs no client for reading.
            if end or self._end:
                self._reader.refresh()
            self._end, self._changed_s = end, now_s
        elif now_s - self._changed_s > FRESH_S:
            self._reader.close()

    def _update(self) -> None:
        now_s, was_full = time.monotonic(), self.is_full
        self.is_full = self._freshness.is_fresh(self._reader.full, now_s, time.time())
        if self.is_full and self._warning_limit.allows():
            logger.warning(
                "fetching paused: queue %s has more messages in flight than its max_in_flight; acknowledge messages, "
                "or raise the limit with `kmq queue alter %s --max-in-flight`",
                self._topics, self._topics, extra={"action": "queue_full", "queue": str(self._topics)},
            )  # fmt: skip
        elif was_full and not self.is_full:
            logger.info(
                "queue %s is no longer full, fetching resumed", self._topics,
                extra={"action": "queue_full", "queue": str(self._topics)},
            )  # fmt: skip
